"""The public import path of `offcompile.passes.build.schedule`."""

from offcompile.passes.build.schedule import (
    ROUNDS,
    Builder,
    build,
)

__all__ = [
    "ROUNDS",
    "Builder",
    "build",
]
