"""Train models that do not fit their device. Importing this package does not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .ir import Infeasible, InvalidInput, OffloadError
from .ir.version import VERSION

if TYPE_CHECKING:
    from offcompile.ahead.answers.fit_report import FitReport
    from offcompile.ahead.batches.search import max_batch
    from offcompile.ahead.fit import fit
    from offcompile.ahead.plan import plan
    from offcompile.report.report import PlanReport, reports, save_html
    from offcompile.run.host_init import host_init
    from offcompile.run.loading import load_weights
    from offcompile.run.recording import record
    from offcompile.run.saving import save
    from offcompile.runtime.base.counters import counters

    from . import optim

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
__version__ = VERSION

#: names whose modules import torch; imported at first access
_LATER = {
    "FitReport": "offcompile.ahead.answers.fit_report",
    "PlanReport": "offcompile.report.report",
    "counters": "offcompile.runtime.base.counters",
    "fit": "offcompile.ahead.fit",
    "host_init": "offcompile.run.host_init",
    "load_weights": "offcompile.run.loading",
    "max_batch": "offcompile.ahead.batches.search",
    "plan": "offcompile.ahead.plan",
    "record": "offcompile.run.recording",
    "reports": "offcompile.report.report",
    "save": "offcompile.run.saving",
    "save_html": "offcompile.report.report",
}


def __getattr__(name: str) -> Any:
    if name == "optim":
        return import_module("offcompile.optim")
    if name not in _LATER:
        raise AttributeError(f"module 'offcompile' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
