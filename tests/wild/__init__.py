"""Programs as people write them, none of them for this backend: each must give the same bits."""

import sys
from pathlib import Path

# outside of pytest, which has it on its path
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
