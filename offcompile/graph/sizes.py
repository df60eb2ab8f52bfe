"""Builds the sizes in a graph under construction: numbers stay numbers, symbols become nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from offcompile.ir import OffloadError
from offcompile.runtime.device.owners import plain_parts

from .graphs import Hint, Size

#: value assumed during planning for a data-dependent size
UNKNOWN_SIZE = 4096


class SizeMaker:
    """Finds or makes the node for a size, from the sizes that the graph already has."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.known: dict[sympy.Expr, fx.Node] = {}
        #: symbol → the argument and dimension that have this size
        self._told: dict[sympy.Expr, tuple[fx.Node, int]] = {}

    def learn(self, node: fx.Node) -> None:
        """Use a node that holds a size for its expression from here on."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self.known.setdefault(value.node.expr, node)

    def learn_dims(self, tensors: Iterable[fx.Node]) -> None:
        """Read symbols that no node holds from the dimensions of existing arguments. Nothing else
        gives the length of a nested tensor that is passed in."""
        for node in tensors:
            value = node.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    self._told.setdefault(size.node.expr, (node, dim))

    def knows(self, symbol: sympy.Expr) -> bool:
        return symbol in self.known or symbol in self._told

    def _ask(self, symbol: sympy.Expr) -> None:
        """Add a node that reads a symbol from an argument, at the start, while the argument is
        alive."""
        node, dim = self._told[symbol]
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        with nullcontext() if first is None else self.graph.inserting_before(first):
            told = self.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
        told.meta["val"] = node.meta["val"].shape[dim]
        self.known[symbol] = told

    def make(self, sizes: Iterable[Size]) -> list[int | fx.Node]:
        return [self.node(s) for s in sizes]

    def node(self, size: Size) -> int | fx.Node:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr
        if expr.is_number:
            return int(expr)
        for symbol in (expr.free_symbols - self.known.keys()) & self._told.keys():
            self._ask(symbol)
        if expr not in self.known:
            self.known[expr] = self._emit(size, expr)
        return self.known[expr]

    def _emit(self, size: torch.SymInt, expr: sympy.Expr) -> fx.Node:
        before = set(self.graph.nodes)
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        if missing := [str(s) for s in expr.free_symbols if s not in self.known]:
            raise OffloadError(
                f"A size of this graph, {expr}, rests on {', '.join(missing)}, which none of its"
                " arguments tells. Keep that part out of the compiled function, or set memory to"
                " None so that nothing moves."
            )
        symbols = {s: fx.Proxy(self.known[s], tracer) for s in expr.free_symbols}
        made: fx.Node = sympy_interp(PythonReferenceAnalysis, symbols, expr).node
        for node in self.graph.nodes:
            if node not in before:
                args = fx.map_arg(node.args, lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args)
        made.meta["val"] = size
        return made


def write_known_floats(graph: fx.Graph) -> None:
    """Replace symbolic floats by numbers if their symbols have become numbers.

    Inductor does not evaluate all such expressions: 1.0 over a product of sizes stays a fraction.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymFloat):
            continue
        inner = value.node
        if not inner.shape_env.replace(inner.expr).free_symbols and inner.hint is not None:
            node.replace_all_uses_with(float(inner.hint))


def symbols_in(size: Size) -> frozenset[sympy.Symbol]:
    """The symbols that a size depends on."""
    return frozenset(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else frozenset()


def hint_of(values: Mapping[sympy.Symbol, int] | None = None) -> Hint:
    """Map sizes to numbers: the traced ones, or those for other values of the symbols."""

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
        # torch before 2.12 uses another name
        traced = getattr(env, "backed_var_to_val", None) or env.var_to_val
        known = {s: _number(traced.get(s)) for s in expr.free_symbols}
        return int(expr.xreplace({s: sympy.Integer(v) for s, v in known.items()}))

    return hint


def symbols_of(
    traced: Sequence[object],
) -> list[tuple[sympy.Symbol, Callable[[Sequence[Any]], int]]]:
    """The symbols that a call's arguments determine, each with a function that reads its value.

    `traced`: the arguments as traced. A nested tensor determines the lengths of its components.
    """
    found: dict[sympy.Symbol, Callable[[Sequence[Any]], int]] = {}
    for i, value in enumerate(traced):
        if isinstance(value, torch.SymInt):
            # the length of a ragged dimension is not a number
            if value.node.expr.is_symbol and not value.node.is_nested_int():
                found.setdefault(value.node.expr, partial(_argument, i))
        elif isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
            for k, part in enumerate(plain_parts(value)):
                for dim, size in enumerate(part.shape):
                    if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                        found.setdefault(size.node.expr, partial(_length, i, k, dim))
    return list(found.items())


def _argument(index: int, arguments: Sequence[Any]) -> int:
    return int(arguments[index])


def _length(index: int, part: int, dim: int, arguments: Sequence[Any]) -> int:
    return plain_parts(arguments[index])[part].size(dim)


def _number(traced: object) -> int:
    """A symbol's traced value; `UNKNOWN_SIZE` if it is data-dependent or a ragged length."""
    return int(traced) if isinstance(traced, int | sympy.Integer) else UNKNOWN_SIZE
