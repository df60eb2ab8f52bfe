"""The public import path of `offcompile.passes.build.decisions`."""

from offcompile.passes.build.decisions import Away, Decisions

__all__ = [
    "Away",
    "Decisions",
]
