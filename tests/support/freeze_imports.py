"""Spares a process of a test work that proves nothing: collecting garbage, timing guards."""

from __future__ import annotations

import gc
import importlib
import sys


def do_not_time_guards() -> None:
    """Dynamo times the guards of each graph for its log, and empties the caches before it does."""
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None and hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


def freeze_imports(*more: str) -> None:
    """Import what any compilation needs, and `more`; the collector no longer looks through it.

    Each compilation collects several times, which without this is half of its time.
    """
    for name in ("offcompile.run.backend", *more):
        importlib.import_module(name)
    do_not_time_guards()
    gc.collect()
    gc.freeze()
