"""Keeps autograd from filling tangents of unused outputs with zeros, if backward takes tickets.

Graphs in pieces take a ticket in place of the tangent of a large output, such as logits
(`runtime.moves.row_ops`). Autograd is told to leave out what it has no gradient for, and `fill`
puts tickets, or zeros for other tangents, in their places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from offcompile.graph.graphs import is_tangent
from offcompile.runtime.device import tickets
from offcompile.runtime.moves.row_ops import Tangent

#: autograd nodes between an output and the compiled function: views that AOTAutograd makes again
MOST_VIEWS = 3


@dataclass(eq=False)
class Tangents:
    """The tangents of one backward, by their place among its arguments."""

    #: place → the traced value
    traced: dict[int, torch.Tensor] = field(default_factory=dict)
    #: places that take a ticket
    tickets: set[int] = field(default_factory=set)

    def read(self, backward: fx.GraphModule, joint: fx.GraphModule) -> None:
        known = {n.name: n for n in joint.graph.find_nodes(op="placeholder")}
        for place, node in enumerate(backward.graph.find_nodes(op="placeholder")):
            if node.name in known and is_tangent(node):
                self.traced[place] = known[node.name].meta["val"]
                if node.meta["val"].dtype != self.traced[place].dtype:
                    self.tickets.add(place)

    @property
    def may_be_missing(self) -> bool:
        return bool(self.tickets)

    def fill(self, arguments: list[Any]) -> None:
        """Put tickets and zeros into the arguments of backward."""
        for place, like in self.traced.items():
            given = arguments[place]
            if place in self.tickets:
                found = Tangent(given, like.shape, like.dtype, like.device)
                arguments[place] = tickets.issue_owned(found)
            elif given is None:
                zeros = torch.empty_strided(
                    like.shape, like.stride(), dtype=like.dtype, device=like.device
                )
                arguments[place] = zeros.zero_()


def with_missing_tangents(compiled: Callable[..., Any], tangents: Tangents) -> Callable[..., Any]:
    """Tell autograd after each call to leave out tangents, if backward can do without them."""
    if not tangents.may_be_missing:
        return compiled

    @functools.wraps(compiled)
    def run(*arguments: Any) -> Any:
        outputs = compiled(*arguments)
        for function in _functions_of(outputs):
            function.set_materialize_grads(False)
        return outputs

    return run


def _functions_of(outputs: Any) -> Iterator[Any]:
    """The compiled functions that made the outputs, as nodes of autograd's graph."""
    for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        for _ in range(MOST_VIEWS):
            if node is None:
                break
            if type(node).__name__ == "CompiledFunctionBackward":
                yield node
                break
            node = node.next_functions[0][0] if node.next_functions else None


def whole_tangent(argument: Any, like: object) -> Any:
    """The tangent that a ticket stands for, for a graph that takes the tangent itself."""
    if not isinstance(argument, torch.Tensor) or not isinstance(like, torch.Tensor):
        return argument
    if argument.dtype == like.dtype:
        return argument
    found = tickets.peek(argument, Tangent)
    return argument if found is None else found.whole()
