"""Sizes in a graph under construction: numbers stay numbers, symbols become nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sympy
import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from .graphs import Hint, Size

#: what a size that only the data tells is taken to be while planning
UNKNOWN_SIZE = 4096


class SizeMaker:
    """Finds or makes the node for a size, from the sizes that the graph already has."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.known: dict[sympy.Expr, fx.Node] = {}

    def learn(self, node: fx.Node) -> None:
        """A node that holds a size can stand for its expression from here on."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self.known.setdefault(value.node.expr, node)

    def make(self, sizes: Iterable[Size]) -> list[int | fx.Node]:
        return [self.node(s) for s in sizes]

    def node(self, size: Size) -> int | fx.Node:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr
        if expr.is_number:
            return int(expr)
        if expr not in self.known:
            self.known[expr] = self._emit(size, expr)
        return self.known[expr]

    def _emit(self, size: torch.SymInt, expr: sympy.Expr) -> fx.Node:
        before = set(self.graph.nodes)
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        symbols = {s: fx.Proxy(self.known[s], tracer) for s in expr.free_symbols}
        made: fx.Node = sympy_interp(PythonReferenceAnalysis, symbols, expr).node
        for node in self.graph.nodes:
            if node not in before:
                args = fx.map_arg(node.args, lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args)
        made.meta["val"] = size
        return made


def symbols_of(size: Size) -> frozenset[sympy.Symbol]:
    """The symbols that a size depends on."""
    return frozenset(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else frozenset()


def hint_of(values: Mapping[sympy.Symbol, int] | None = None) -> Hint:
    """Sizes as numbers: as traced, or with other values for the symbols."""

    def hint(size: Size) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        node = size.node
        expr = node.expr
        if values:
            expr = expr.xreplace({s: sympy.Integer(v) for s, v in values.items()})
        if expr.is_number:
            return int(expr)
        env = node.shape_env
        # named differently before torch 2.12
        traced = getattr(env, "backed_var_to_val", None) or env.var_to_val
        known = {s: int(traced.get(s, UNKNOWN_SIZE)) for s in expr.free_symbols}
        return int(expr.xreplace({s: sympy.Integer(v) for s, v in known.items()}))

    return hint
