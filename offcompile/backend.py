"""The entry that `torch.compile` looks up; it lives in `offcompile.run.backend`."""

from offcompile.run.backend import compile_graph

__all__ = [
    "compile_graph",
]
