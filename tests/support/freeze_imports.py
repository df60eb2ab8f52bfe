"""Spares a process of a test most of the garbage collector's work."""

from __future__ import annotations

import gc
import importlib


def freeze_imports(*more: str) -> None:
    """Import what any compilation needs, and `more`; the collector no longer looks through it.

    Each compilation collects several times, which without this is half of its time.
    """
    for name in ("offcompile.run.backend", *more):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
