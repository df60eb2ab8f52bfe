"""Keeps the values that forward saves for backward in the order that AOTAutograd relies on.

Forward returns the user's outputs, then saved tensors, then sizes; backward takes sizes, then saved
tensors, then tangents. New saved values go to the front of the saved tensors on both sides, which
preserves the rules for the rest (unchecked versions last, opaque objects after tensors).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

from offcompile.graph.graphs import Graphs, around, outputs_of


@dataclass(frozen=True)
class Resaved:
    """The value that a placeholder of backward holds: a node of forward, a storage's ticket, or
    a weight's copy on the device."""

    node: str | None = None
    copy_of: str | None = None
    ticket_of: str | None = None
    tier: str | None = None

    @property
    def name(self) -> str:
        if self.copy_of is not None:
            return f"copy_{self.copy_of}"
        return self.node if self.node is not None else f"ticket_{self.ticket_of}"


class HalfValues(Protocol):
    """The values of a rewritten graph, as `values` builds them."""

    graph: fx.Graph
    new: dict[str, fx.Node]
    old: dict[str, fx.Node]
    saved: dict[fx.Node, Resaved]

    def value(self, node: fx.Node) -> fx.Node: ...


class Half(Protocol):
    """One rewritten graph, as `rewrite` builds it."""

    module: fx.GraphModule
    tickets: dict[tuple[str, str], fx.Node]
    device: dict[str, fx.Node]

    @property
    def values(self) -> HalfValues: ...


def new_placeholder(graph: fx.Graph, name: str, value: object) -> fx.Node:
    """Add a saved tensor to backward, before the existing ones."""
    first = next((n for n in graph.nodes if not _is_size(n)), None)
    if first is None:
        new = graph.placeholder(name)
    else:
        with graph.inserting_before(first):
            new = graph.placeholder(name)
    new.meta["val"] = value
    return new


def finish_backward(half: Half) -> fx.GraphModule:
    """Finish the graph, without placeholders for saved tensors that are no longer used."""
    _run_effects(half)
    _output(half, _new_outputs(half, _old_outputs(half)))
    graph, saved = half.values.graph, half.values.saved
    for node in [n for n in saved if not n.users and not _is_size(n)]:
        graph.erase_node(node)
        del saved[node]
    return _module(half)


def finish_forward(half: Half, graphs: Graphs, backward: Half | None) -> fx.GraphModule:
    """Finish the graph: the user's outputs, then the values for backward, in backward's order."""
    _run_effects(half)
    old = _old_outputs(half)
    seen, rest = old[: graphs.num_outputs], old[graphs.num_outputs :]
    outputs = _new_outputs(half, seen)
    if backward is not None:
        saved = backward.values.saved
        wanted = [saved[n] for n in backward.values.graph.nodes if n in saved]
        before = {o.name for o in rest if isinstance(o, fx.Node)}
        new = [w for w in wanted if w.node is None or w.node not in before]
        kept = {w.node for w in wanted if w.node is not None}
        outputs += [_saved(half, w) for w in new]
        outputs += _new_outputs(
            half, [o for o in rest if not isinstance(o, fx.Node) or o.name in kept]
        )
    _output(half, outputs)
    _describe(half, old, outputs, graphs.num_outputs)
    return _module(half)


def _saved(half: Half, what: Resaved) -> fx.Node:
    if what.ticket_of is not None:
        assert what.tier is not None
        return half.tickets[what.ticket_of, what.tier]
    if what.copy_of is not None:
        return half.device[what.copy_of]
    assert what.node is not None
    return half.values.value(half.values.old[what.node])


def _old_outputs(half: Half) -> list[object]:
    return outputs_of(half.module)


def _new_outputs(half: Half, old: list[object]) -> list[object]:
    return [half.values.value(o) if isinstance(o, fx.Node) else o for o in old]


def _run_effects(half: Half) -> None:
    """Copy nodes that are no ops of the plan but have side effects, such as size checks."""
    for node in half.values.old.values():
        if node.op == "call_function" and node.name not in half.values.new and node.is_impure():
            half.values.value(node)


def _output(half: Half, outputs: list[object]) -> None:
    node = half.values.graph.output(tuple(outputs))  # type: ignore[arg-type]
    (old,) = half.module.graph.find_nodes(op="output")
    node.meta.update(old.meta)


def _describe(half: Half, old: list[object], outputs: list[object], seen: int) -> None:
    """Update AOTAutograd's descriptions of the outputs, renumbering the saved ones."""
    (node,) = half.values.graph.find_nodes(op="output")
    known = node.meta.get("desc")
    if known is None:
        return
    kind_of: dict[int, Any] = {
        id(half.values.new.get(o.name)): type(d) for o, d in _nodes(old[seen:], known[seen:])
    }
    node.meta["desc"] = [
        *known[:seen],
        *(kind_of.get(id(o), SavedForBackwardsAOTOutput)(i) for i, o in enumerate(outputs[seen:])),
    ]


def _nodes(outputs: list[object], known: list[object]) -> list[tuple[fx.Node, object]]:
    both = zip(outputs, known, strict=True)
    return [(o, d) for o, d in both if isinstance(o, fx.Node)]


def _is_size(node: fx.Node) -> bool:
    return node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor)


def _module(half: Half) -> fx.GraphModule:
    module = around(half.values.graph, half.module)
    module.graph.lint()
    return module
