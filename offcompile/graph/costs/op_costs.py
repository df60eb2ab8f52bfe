"""Finds the duration and workspace of every op in a captured graph.

Runs large ops once per shape on this machine and caches the result. All others, and all ops if the
hardware is given by a profile, are estimated from rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import fx

from offcompile.graph.graphs import Hint, is_getitem
from offcompile.machine.cost_cache import CostCache
from offcompile.machine.hardware import HardwareProfile
from offcompile.runtime.base.process_memory import machine_memory_bytes
from offcompile.runtime.device.cuda.facts import cuda_identity, cuda_index
from offcompile.runtime.kernels import bit_ops
from offcompile.runtime.measure.op import OpCall, Operands, measure_call
from offcompile.runtime.measure.timing import (
    Overheads,
    Stopwatch,
    machine_identity,
    measure_overheads,
)
from offcompile.runtime.memory.malloc.heap import heap

from .calls import call_of, has_tensors, is_view, value_bytes
from .fusion import calls_library, spread_over_groups
from .roofline import (
    CUDA_OVERHEADS,
    USUAL_OVERHEADS,
    OpCost,
    Work,
    op_name,
    roofline_us,
    work_of,
    workspace_bytes,
)

__all__ = ["CostModel", "OpCost", "costs_of_graph", "open_cost_cache"]

#: an op with an estimate below this is not worth measuring
WORTH_MEASURING_US = 50.0
#: limit for all measurements of one model; the rest is estimated
MOST_SECONDS = 60.0

#: ops whose results synthetic data cannot reproduce, or that do not check their operands
_NOT_MEASURED = frozenset({"_embedding_bag", "_embedding_bag_forward_only", "set_", "resize_"})
_OVERHEADS = ("op_us", "view_us", "fresh_us_per_mib", "touch_us_per_mib")
_UNPREDICTABLE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


FREE = OpCost(0.0)


class CostModel:
    """Costs of ops under one lowering, measured on this machine (`measure`) or from a profile.

    `lowering` is "aot_eager" (every node runs as its own kernel) or "inductor" (fusible ops are
    estimated, the rest measured). `room_bytes` limits the memory for measuring an op: larger ops
    are estimated; None means half of the machine's memory. Without `measure`, nothing runs and the
    costs of a graph never change; with it, they are stable once `cache` has every op. Measurements
    run on `device`; ops on another type of device are estimated.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        measure: bool,
        lowering: str,
        cache: CostCache | None = None,
        progress: Callable[[str], None] | None = None,
        room_bytes: int | None = None,
        seconds: float = MOST_SECONDS,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.profile, self.measure, self.lowering = profile, measure, lowering
        self.cache = CostCache() if cache is None else cache
        self.progress = progress or (lambda text: None)
        self.room_bytes = machine_memory_bytes() // 2 if room_bytes is None else room_bytes
        self.overheads = self._overheads()
        self._seconds_left = seconds
        self._operands = Operands(self.device)

    def cost(self, node: fx.Node, hint: Hint) -> OpCost:
        """The cost of one node as a separate kernel; `hint` maps symbolic sizes to numbers."""
        cost = self.price(node, hint)
        self.close()
        return cost

    def price(self, node: fx.Node, hint: Hint) -> OpCost:
        """Like `cost`, for one of many nodes: call `close()` after the last."""
        if node.op != "call_function" or is_getitem(node) or not has_tensors(node):
            return FREE
        if is_view(node):
            return OpCost(self.overheads.view_us)
        call = call_of(node, hint)
        if call is None:
            return OpCost(roofline_us(self.work(node, hint), self.profile, self.overheads))
        estimate = roofline_us(work_of(call), self.profile, self.overheads)
        if self.measure and self._worth_measuring(node, call, estimate):
            if not self.cache.settled(call.key):
                self._measure(call)
            if (known := self.cache.get(call.key)) is not None:
                return OpCost(*known)
        return OpCost(estimate, workspace_bytes(call, self.device.type))

    def to_measure(self, node: fx.Node, hint: Hint) -> OpCall | None:
        """The call that `price` would measure now; None if it would measure none."""
        call = self.measurable(node, hint)
        return None if call is None or self.cache.settled(call.key) else call

    def measurable(self, node: fx.Node, hint: Hint) -> OpCall | None:
        """The call, if it should be measured rather than estimated; else None."""
        if not self.measure or node.op != "call_function" or not has_tensors(node):
            return None
        if is_getitem(node) or is_view(node) or (call := call_of(node, hint)) is None:
            return None
        estimate = roofline_us(work_of(call), self.profile, self.overheads)
        return call if self._worth_measuring(node, call, estimate) else None

    def work(self, node: fx.Node, hint: Hint) -> Work:
        """The node's work; only its reads and writes if it cannot be described as a call."""
        call = call_of(node, hint)
        if call is not None:
            return work_of(call)
        read = sum(value_bytes(n.meta.get("val"), hint) for n in node.all_input_nodes)
        return Work(read_bytes=read, written_bytes=value_bytes(node.meta.get("val"), hint))

    def close(self) -> None:
        """Save the measurements and free the memory used for measuring."""
        self.cache.save()
        self._operands = Operands(self.device)
        if self.measure and self.device.type == "cuda":
            torch.cuda.empty_cache()  # leave that memory to the step

    def _worth_measuring(self, node: fx.Node, call: OpCall, estimate_us: float) -> bool:
        if estimate_us < WORTH_MEASURING_US or not _can_run_alone(call, self.device.type):
            return False
        return self.lowering == "aot_eager" or calls_library(node)

    def _measure(self, call: OpCall) -> None:
        """Run the op and cache its cost, unless memory or time runs out, or it fails."""
        made_bytes = sum(s.nbytes for s in call.outputs) + workspace_bytes(call, self.device.type)
        inputs_bytes = sum(s.nbytes for s in call.inputs)
        if made_bytes + inputs_bytes > self.room_bytes or self._seconds_left <= 0:
            return
        # free operands of earlier, larger ops
        self._operands.give_back(but_bytes=self.room_bytes - made_bytes)
        begun = time.perf_counter()
        found = measure_call(call, self._operands)
        self._seconds_left -= time.perf_counter() - begun
        if found is not None:
            duration_us = round(found.duration_us, 3)
            self.cache.put(call.key, duration_us, found.workspace_bytes, found.disturbed)

    def _overheads(self) -> Overheads:
        if self.device.type != "cpu":
            return CUDA_OVERHEADS
        if not self.measure:
            return USUAL_OVERHEADS
        keys = [f"overheads.{name}" for name in _OVERHEADS]
        if not all(map(self.cache.settled, keys)):
            heap().prepare()
            with Stopwatch() as watch:
                found = measure_overheads()
            for key, name in zip(keys, _OVERHEADS, strict=True):
                self.cache.put(key, round(getattr(found, name), 4), 0, watch.disturbed)
        entries = [self.cache.get(key) or (0.0, 0) for key in keys]
        return Overheads(*(value for value, _ in entries))


def open_cost_cache(device: torch.device | None = None) -> CostCache:
    """The cache of earlier measurements on this device, with these versions and threads."""
    if device is not None and device.type == "cuda":
        return CostCache(cuda_identity(cuda_index(device)))
    return CostCache(machine_identity())


def costs_of_graph(graph: fx.Graph, model: CostModel, hint: Hint) -> dict[str, OpCost]:
    """The cost of every node of a graph, by name; their sum is the time of the graph.

    Reports to the model's progress callback while it measures ops.
    """
    nodes = list(graph.nodes)
    calls = {n: c for n in nodes if (c := model.to_measure(n, hint)) is not None}
    total, begun, told = len({c.key for c in calls.values()}), set[str](), 0.0
    costs: dict[str, OpCost] = {}
    try:
        for node in nodes:
            call = calls.get(node)
            if call is not None and call.key not in begun:
                begun.add(call.key)
                if time.monotonic() - told > 0.25:
                    told = time.monotonic()
                    model.progress(f"measuring ops: {len(begun)} of {total} ({op_name(call)})")
            costs[node.name] = _with_subgraphs(node, model, hint)
    finally:
        model.close()
    if model.lowering == "inductor":
        return spread_over_groups(nodes, costs, model, hint)
    return costs


def _with_subgraphs(node: fx.Node, model: CostModel, hint: Hint) -> OpCost:
    """The cost of a node; for a higher-order op at least that of its most expensive subgraph."""
    cost = model.price(node, hint)
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return cost
    inner = [cost.duration_us]
    for given in node.all_input_nodes:
        module = getattr(node.graph.owning_module, str(given.target), None)
        if given.op == "get_attr" and isinstance(module, fx.GraphModule):
            within = costs_of_graph(module.graph, model, hint)
            inner.append(sum(c.duration_us for c in within.values()))
    return OpCost(max(inner), cost.workspace_bytes)


def _can_run_alone(call: OpCall, kind: str) -> bool:
    ours = call.target in bit_ops.BIT_OPS
    if (call.target.namespace != "aten" and not ours) or op_name(call) in _NOT_MEASURED:
        return False
    if any(tag in call.target.tags for tag in _UNPREDICTABLE):
        return False
    if any(spec.device != kind for spec in call.inputs + call.outputs):
        return False
    return torch.device(str(call.kwargs.get("device") or kind)).type == kind
