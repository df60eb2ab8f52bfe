"""Long runs counted in docs/trust.md: `make soak`, or `python -m trust NAME` in tests/."""

import sys
from pathlib import Path

# outside of pytest, which has them on its path
for _folder in ("support", "e2e"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / _folder))
