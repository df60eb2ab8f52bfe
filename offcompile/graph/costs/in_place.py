"""Measures ops with an operand in place on the host, if a plan may use it there.

Runs the plain op and the in-place one in turn, with all data in memory, and caches the slowdown for
each shape. The cost to fetch pages from a disk, or bytes over a bus, comes from the target's model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from offcompile.graph.annotate import Annotated
from offcompile.graph.direct_ops import does_less, reader_of, write_of
from offcompile.graph.graphs import Graphs, Hint
from offcompile.graph.storages import Place
from offcompile.ir import Op
from offcompile.runtime.measure.in_place import InPlaceCall, measure_in_place
from offcompile.runtime.measure.op import Operands

from .op_costs import CostModel, OpCost

#: a smaller slowdown counts as none, since measurements vary that much
LEAST_SLOWDOWN = 1.05
#: limit for all measurements of one graph; the rest comes from the target's model
MOST_SECONDS = 20.0


def with_in_place(
    costs: Mapping[Place, OpCost],
    graphs: Graphs,
    annotated: Annotated,
    model: CostModel,
    hint: Hint,
    addressable: Callable[[int], torch.Tensor],
    runtime: str,
    seconds: float = MOST_SECONDS,
) -> dict[Place, OpCost]:
    """The costs, with `in_place` durations for the operands that `annotated` allows in place.

    `addressable` allocates host memory of the runtime that `runtime` names.
    """
    found, nodes = dict(costs), {(p, n.name): n for p, m in graphs for n in m.graph.nodes}
    operands, until = Operands(model.device), time.monotonic() + seconds
    for place, tensor, what in _candidates(nodes, annotated, model, hint, runtime):
        if not model.cache.settled(what.key) and time.monotonic() < until:
            needed = sum(s.nbytes for s in what.call.inputs + what.call.outputs)
            if needed <= model.room_bytes:
                model.progress("measuring ops with operands on the host")
                slower = measure_in_place(what, operands, addressable)
                if slower is not None:
                    model.cache.put(what.key, round(slower.ratio, 4), 0, slower.disturbed)
        known = model.cache.get(what.key)
        if known is not None:
            # only an op that does less work can be faster in place
            least = 0.0 if does_less(nodes[place]) else 1.0
            ratio = known[0] if known[0] >= LEAST_SLOWDOWN else min(1.0, max(known[0], least))
            cost = found[place]
            durations = {**cost.in_place, tensor: cost.duration_us * ratio}
            found[place] = replace(cost, in_place=durations)
    model.close()
    return found


def _candidates(
    nodes: Mapping[Place, fx.Node],
    annotated: Annotated,
    model: CostModel,
    hint: Hint,
    runtime: str,
) -> Iterator[tuple[Place, str, InPlaceCall]]:
    """Yields (op, operand, call to measure) for each operand that an op may use in place."""
    for op in annotated.problem.ops:
        if not op.direct:
            continue
        (place,) = annotated.node_of[op.id]
        for tensor in op.direct:
            what = _in_place(op, tensor, place, nodes[place], annotated, model, hint, runtime)
            if what is not None:
                yield place, tensor, what


def _in_place(
    op: Op,
    tensor: str,
    place: Place,
    node: fx.Node,
    annotated: Annotated,
    model: CostModel,
    hint: Hint,
    runtime: str,
) -> InPlaceCall | None:
    call = model.measurable(node, hint)
    if call is None:
        return None
    if tensor in op.writes:
        write = write_of(node)
        if write is None or annotated.base_of[tensor] != place:
            return None
        count = sum(1 for given in write.args if given in node.args)
        output = call.outputs[0]
        lies = (list(output.size), list(output.stride), output.dtype)
        more = (*write.args[count:], *lies, "measured", runtime)
        return InPlaceCall(call, write.target, None, count, more)
    of = [(place[0], a.name) if isinstance(a, fx.Node) else None for a in node.args]
    places = [
        i for i, p in enumerate(of) if p is not None and annotated.storage_of.get(p) == tensor
    ]
    if len(places) != 1:
        return None
    exact = model.lowering != "inductor"
    target = reader_of(node, frozenset(places), model.device.type, exact) or node.target
    return InPlaceCall(call, target, places[0])
