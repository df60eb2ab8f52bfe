"""Train models that do not fit their device. Importing this imports no torch."""

from offcompile.ir import Infeasible, OffloadError

__all__ = ["Infeasible", "OffloadError", "__version__"]
__version__ = "0.1.0"
