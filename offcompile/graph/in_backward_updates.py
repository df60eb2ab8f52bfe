"""Updates weights while backward still runs, by offering each large gradient to its update early.

    forward    …                         call = begin_call([0, 2, …]); …
               return y, saved           return y, call, saved
    backward   (saved, tangents)         (call, saved, tangents)
               g = mm(…); …              g = mm(…); …  until nothing reads the weight any more
                                         offered = offer(call, g, …)
               return g                  return offered

`offer` updates the weight, so it comes after the last op that reads the weight, and it frees the
gradient. Backward returns its result instead, which is resolved when backward is over (`resolve`).

Ranks that reduce gradients want them early, too, whoever updates. `with_early_gradients` inserts
such offers into graphs that are planned already: gradients still count until the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

from offcompile.ir import BACKWARD, FORWARD
from offcompile.planning.order import Order, RunStep
from offcompile.runtime.device import tickets
from offcompile.runtime.states import update_ops

from .annotate import Annotated
from .costs.op_costs import OpCost
from .graphs import (
    Graphs,
    Hint,
    aliased_input,
    closed,
    copied,
    is_parameter,
    outputs_of,
    storage_bytes,
)
from .lowering.resave import new_placeholder
from .storages import Place

#: bytes that an update reads and writes per byte of gradient: with two moments, 28 for 4
BYTES_PER_BYTE = 7.0


@dataclass(frozen=True)
class Offers:
    """The graphs with offers inserted."""

    graphs: Graphs
    #: weight's storage → name of the node that offers its gradient
    nodes: Mapping[str, str]
    #: indices of backward's outputs that are offers
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class _Offered:
    """One weight: its argument, the output index of its gradient, and the node to offer after
    (None: at once, since no update follows)."""

    weight: fx.Node
    argument: int
    storage: str
    output: int
    gradient: fx.Node
    after: fx.Node | None


def with_offers(
    graphs: Graphs,
    annotated: Annotated,
    wanted: frozenset[int],
    hint: Hint,
    least_bytes: int,
    runtime: str,
    without: frozenset[str] = frozenset(),
) -> Offers | None:
    """Insert offers for the gradients of the `wanted` arguments; None if there are none.

    Skips gradients smaller than `least_bytes`, and those of the weights `without`.
    """
    if graphs.backward is None:
        return None
    found = [
        o
        for o in _offered(graphs, annotated, wanted)
        if o.storage not in without and storage_bytes(o.gradient.meta["val"], hint) >= least_bytes
    ]
    if not found:
        return None
    return _with_offers(graphs, found, [[o.argument for o in found]], runtime)


def with_early_gradients(
    planned: Graphs,
    given: Graphs,
    annotated: Annotated,
    wanted: frozenset[int],
    runtime: str,
) -> Offers | None:
    """Insert offers for the gradients of the `wanted` arguments that stay on the device into graphs
    that carry out a plan, or into those `given`; None if there are none.

    In rewritten graphs, ops may read a weight after the offer, so optimizers must wait.
    """
    if planned.backward is None:
        return None
    outputs, found = outputs_of(planned.backward), []
    for o in _offered(given, annotated, wanted):
        gradient = outputs[o.output]
        if isinstance(gradient, fx.Node) and gradient.name == o.gradient.name:
            found.append(o if planned is given else replace(o, after=None))
    if not found:
        return None
    arguments = [o.argument for o in found]
    return _with_offers(planned, found, [arguments, True, planned is given], runtime)


def _with_offers(graphs: Graphs, found: list[_Offered], begun: list[Any], runtime: str) -> Offers:
    """Insert offers into both graphs. begun: the arguments of `begin_call`."""
    assert graphs.backward is not None
    forward, call = _forward(graphs, begun)
    backward, nodes = _backward(graphs.backward, found, call, runtime)
    return Offers(
        replace(graphs, forward=forward, backward=backward),
        nodes,
        tuple(o.output for o in found),
    )


def _offered(graphs: Graphs, annotated: Annotated, wanted: frozenset[int]) -> list[_Offered]:
    assert graphs.backward is not None
    nodes = list(graphs.backward.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    outputs = outputs_of(graphs.backward)
    storage_of = annotated.storage_of
    stored = [
        storage_of.get((BACKWARD, o.name)) if isinstance(o, fx.Node) else None for o in outputs
    ]
    last_reader: dict[str | None, fx.Node] = {}
    for node in nodes:
        if node.op == "call_function":
            read = (storage_of.get((BACKWARD, a.name)) for a in node.all_input_nodes)
            last_reader.update(dict.fromkeys(read, node))
    weights = list(graphs.forward.graph.find_nodes(op="placeholder"))
    owners = [storage_of.get((FORWARD, w.name)) for w in weights]
    found = []
    for i, (weight, gradient) in enumerate(zip(weights, outputs, strict=False)):
        argument = getattr(weight.meta.get("desc"), "idx", -1)
        storage = owners[i]
        if argument not in wanted or not is_parameter(weight, graphs) or storage is None:
            continue
        if not isinstance(gradient, fx.Node) or gradient.op != "call_function":
            continue
        if not all(isinstance(n, int) for n in weight.meta["val"].shape):
            continue
        made = stored[i]
        whole = made is not None and annotated.problem.tensor[made].home is None
        # skip memory that is shared with another argument or gradient: it has several owners
        if not whole or stored.count(made) > 1 or owners.count(storage) > 1:
            continue
        after = max(gradient, last_reader.get(storage, gradient), key=position.__getitem__)
        found.append(_Offered(weight, argument, storage, i, gradient, after))
    return found


def _forward(graphs: Graphs, begun: list[Any]) -> tuple[fx.GraphModule, fx.Node]:
    """Forward with one more saved tensor, the ticket of the call; and that ticket's node."""
    module = copied(graphs.forward)
    graph = module.graph
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        call = graph.call_function(update_ops.begin_call, tuple(begun))
    call.meta["val"] = _ticket_like(graphs)
    (output,) = graph.find_nodes(op="output")
    outputs = list(output.args[0])
    outputs.insert(graphs.num_outputs, call)
    output.args = (tuple(outputs),)
    known = output.meta.get("desc")
    if known is not None:
        seen = list(known[: graphs.num_outputs])
        rest = [SavedForBackwardsAOTOutput, *map(type, known[graphs.num_outputs :])]
        output.meta["desc"] = [*seen, *(kind(i) for i, kind in enumerate(rest))]
    return closed(module), call


def _backward(
    old: fx.GraphModule, found: list[_Offered], call: fx.Node, runtime: str
) -> tuple[fx.GraphModule, dict[str, str]]:
    module = copied(old)
    graph = module.graph
    new = {n.name: n for n in graph.nodes}
    ticket = new_placeholder(graph, call.name, call.meta["val"])
    (output,) = graph.find_nodes(op="output")
    outputs = list(output.args[0])
    names = {}
    for o in found:
        value = o.weight.meta["val"]
        args = (
            ticket,
            new[o.gradient.name],
            found.index(o),
            list(value.shape),
            list(value.stride()),
            runtime,
        )
        if o.after is None:
            _made_early(new[o.gradient.name])
        with graph.inserting_after(new[(o.after or o.gradient).name]):
            node = graph.call_function(update_ops.offer, args)
        node.meta["val"] = call.meta["val"].clone()
        outputs[o.output] = node
        names[o.storage] = node.name
    output.args = (tuple(outputs),)
    return closed(module), names


def _made_early(node: fx.Node) -> None:
    """Move a view of a new tensor behind the op that makes it, if it needs nothing else but
    arguments: rewritten graphs make views of what they return at their end."""
    views = [node]
    while (source := aliased_input(views[-1])) is not None and source.op == "call_function":
        views.append(source)
    made = views.pop()
    for view in reversed(views):
        others = set(view.all_input_nodes) - {made}
        if any(n.op != "placeholder" for n in others):
            return
        made.append(view)
        made = view


def _ticket_like(graphs: Graphs) -> torch.Tensor:
    like = next(
        v
        for n in graphs.forward.graph.find_nodes(op="placeholder")
        if isinstance(v := n.meta.get("val"), torch._subclasses.FakeTensor)
    )
    with like.fake_mode:
        return tickets.fake_ticket()


def costs_of_offers(offers: Offers, hint: Hint, bytes_per_us: float) -> dict[Place, OpCost]:
    """The costs of the new nodes: an update on the device of its states is memory-bound."""
    assert offers.graphs.backward is not None
    costs: dict[Place, OpCost] = {}
    for node in offers.graphs.backward.graph.find_nodes(
        op="call_function", target=update_ops.offer
    ):
        nbytes = storage_bytes(node.args[1].meta["val"], hint)
        duration_us = round(BYTES_PER_BYTE * nbytes / bytes_per_us, 3)
        costs[BACKWARD, node.name] = OpCost(duration_us)
    return costs


def read_after_update(offers: Offers, annotated: Annotated, order: Order) -> frozenset[str]:
    """The weights that a recomputation in this order would read after their update."""
    problem = annotated.problem
    updated: set[str] = set()
    late: set[str] = set()
    weight_of = {name: storage for storage, name in offers.nodes.items()}
    for step in order.steps:
        if not isinstance(step, RunStep):
            continue
        op = step.name.partition("@")[0]
        late |= updated.intersection(problem.op[op].reads)
        updated |= {weight_of[name] for _, name in annotated.node_of[op] if name in weight_of}
    return frozenset(late)
