"""The entry that `torch.compile` looks up; it lives in `offcompile.run.backend`."""

from offcompile.run.backend import compile_graph, refusal
from offcompile.run.ranks.whole_graphs import keep_graphs_whole

__all__ = [
    "compile_graph",
]

keep_graphs_whole(compile_graph, refusal)
