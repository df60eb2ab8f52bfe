"""The public import path of `offcompile.passes.build.contract`."""

from offcompile.passes.build.contract import Judge, Pass

__all__ = [
    "Judge",
    "Pass",
]
