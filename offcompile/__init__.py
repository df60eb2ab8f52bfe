"""Train models that do not fit their device. Importing this imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offcompile.ir import Infeasible, InvalidInput, OffloadError

if TYPE_CHECKING:
    from offcompile import optim
    from offcompile.ahead.fit import FitReport, fit
    from offcompile.ahead.plan import plan
    from offcompile.batch_search import max_batch
    from offcompile.born_on_host import host_init
    from offcompile.loading import load_weights
    from offcompile.recording import record
    from offcompile.report import PlanReport, reports, save_html
    from offcompile.runtime.counters import counters
    from offcompile.saving import save

__all__ = [
    "FitReport",
    "Infeasible",
    "InvalidInput",
    "OffloadError",
    "PlanReport",
    "__version__",
    "counters",
    "fit",
    "host_init",
    "load_weights",
    "max_batch",
    "optim",
    "plan",
    "record",
    "reports",
    "save",
    "save_html",
]
__version__ = "0.1.0"

#: what brings torch along is imported when it is first asked for
_LATER = {
    "FitReport": "offcompile.ahead.fit",
    "PlanReport": "offcompile.report",
    "counters": "offcompile.runtime.counters",
    "fit": "offcompile.ahead.fit",
    "host_init": "offcompile.born_on_host",
    "load_weights": "offcompile.loading",
    "max_batch": "offcompile.batch_search",
    "plan": "offcompile.ahead.plan",
    "record": "offcompile.recording",
    "reports": "offcompile.report",
    "save": "offcompile.saving",
    "save_html": "offcompile.report",
}


def __getattr__(name: str) -> Any:
    if name == "optim":
        return import_module("offcompile.optim")
    if name not in _LATER:
        raise AttributeError(f"module 'offcompile' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
