"""A simple model of Inductor's fusion, to estimate the cost of fused kernels.

Pointwise and reduction nodes over the same number of elements become one kernel, as long as no
kernel of another kind comes between them; a value used only by nodes of its own kernel is never
written. A value needed again after a reduction is computed anew from what it is made of, if that is
cheap: so the logits of a language model are never held in float32. If Inductor might do either, the
value counts as written: it is better to plan too much memory than too little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import fx

from offcompile.graph.graphs import Hint, is_getitem, mutated_inputs
from offcompile.machine.hardware import HardwareProfile
from offcompile.runtime.measure.timing import Overheads
from offcompile.runtime.memory.malloc.glibc import RETURNED_BYTES

from .calls import call_of, is_view, value_bytes
from .roofline import GATHERS, OpCost, Work, op_name, roofline_us

MOST_NODES = 64  # Inductor's limit for one kernel

_NORMS = ("linalg_vector_norm", "norm")
_EXTREMES = ("amax", "amin", "max", "min", "argmax", "argmin")
_REDUCTIONS = frozenset(
    ("sum", "mean", "prod", "var", "var_mean", "any", "all", "xor_sum", *_EXTREMES, *_NORMS)
)
_FILLS = ("full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "arange", "iota")
_COPIES = ("clone", "copy", "copy_", "_to_copy", "convert_element_type", "lift_fresh_copy")
_MORE = ("scalar_tensor", "constant_pad_nd", "slice_scatter", "select_scatter", "avg_pool2d")
_POOLS = (
    "max_pool2d_with_indices",
    "_low_memory_max_pool_with_offsets",
    "_low_memory_max_pool_offsets_to_indices",
)
_RANDOM = tuple(f"inductor_{name}" for name in ("random", "randint", "lookup_seed", "seeds"))
_DRAWN = "inductor_random"
#: the seeds of a step are as many as its random ops; none of these needs more than one of them
_SEEDS, _SEED = "inductor_seeds", "inductor_lookup_seed"
#: ops that fuse although they are not tagged as pointwise
_FUSED = frozenset((*_REDUCTIONS, *GATHERS, *_FILLS, *_COPIES, *_MORE, *_POOLS, *_RANDOM))
#: Inductor generates these too, and may fuse them with later ops; the value is always written
_PUTS = ("index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate")
_ENDS = frozenset(("cat", "stack", "scatter", "scatter_add", "scatter_reduce", *_PUTS))
#: Inductor computes a value for each of its users if that reads and does no more than this
MOST_READS, MOST_OPS = 4, 30
#: and has none of these, on the CPU
_HEAVY = frozenset(("exp", "expm1", "log", "log10", "log1p", "log2", "sigmoid", "tanh", "erf"))
#: time of one processor for each random number of a kernel, on the CPU: Inductor draws them one by
#: one there, and such a kernel is not vectorized (measured with torch 2.13: dropout alone takes 16,
#: behind a softmax or a layer norm 34)
RANDOM_NS, NS_PER_US = 32.0, 1000
#: views that keep the order of elements
_KEEPS_ORDER = frozenset(
    ["view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "alias", "detach"]
)


class FusionModel(Protocol):
    """The parts of a cost model that groups need."""

    profile: HardwareProfile
    overheads: Overheads
    device: torch.device


def is_extern(node: fx.Node) -> bool:
    """True if no other node shares the node's kernel: products, convolutions, …"""
    return not _fuses(node) and not is_view(node) and not is_getitem(node)


def calls_library(node: fx.Node) -> bool:
    """True if the node runs under Inductor as it does alone, so that a measurement applies."""
    return is_extern(node) and _name(node) not in _ENDS


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).rpartition("::")[2]


def _fuses(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace not in ("aten", "prims", "inductor"):
        return False
    return torch.Tag.pointwise in target.tags or _name(node) in _FUSED


def spread_over_groups(
    nodes: Sequence[fx.Node], alone: Mapping[str, OpCost], model: FusionModel, hint: Hint
) -> dict[str, OpCost]:
    """The costs of nodes under Inductor. A kernel's first node carries the call's cost; each node
    carries its own traffic."""
    groups = _Groups(nodes, hint, model.device.type)
    costs = dict(alone)
    #: (kernel, value, reductions before): read once in each pass over the elements
    seen: set[tuple[int, fx.Node, int]] = set()
    called: set[int] = set()
    for node in nodes:
        if node not in groups.space:
            if is_view(node):
                costs[node.name] = OpCost(0.0)
            continue
        group = groups.find(node)
        written = groups.materialises(node)
        read_bytes = 0
        for given in node.all_input_nodes:
            base = groups.base(given)
            inside = base in groups.space and groups.find(base) == group
            if inside and not groups.crosses(base):
                continue
            again = inside and groups.inlines(base)
            for source in groups.sources(base) if again else (base,):
                key = (group, source, groups.level(node) if again else 0)
                if key not in seen:
                    seen.add(key)
                    read_bytes += _read(node, given if source is base else source, hint)
        work = _work(node, read_bytes, hint) if written else Work(read_bytes=read_bytes)
        duration_us = roofline_us(work, model.profile, model.overheads)
        if group in called:
            duration_us -= model.overheads.op_us
        called.add(group)
        if _name(node) == _DRAWN and model.device.type == "cpu":
            drawn = groups.space[node] / torch.get_num_threads()
            duration_us += RANDOM_NS / NS_PER_US * drawn
        costs[node.name] = OpCost(max(duration_us, 0.0), 0, written)
    return costs


def _read(node: fx.Node, given: fx.Node, hint: Hint) -> int:
    if _name(node) in GATHERS and given is node.args[0]:
        return value_bytes(node.meta.get("val"), hint)
    return 0 if _name(node) == _SEED else value_bytes(given.meta.get("val"), hint)


def _work(node: fx.Node, read_bytes: int, hint: Hint) -> Work:
    written = 0 if _name(node) == _SEEDS else value_bytes(node.meta.get("val"), hint)
    call = call_of(node, hint)
    fresh = 0
    if call is not None and not mutated_inputs(node) and not op_name(call).startswith("empty"):
        fresh = sum(s.nbytes for s in call.outputs if s.nbytes >= RETURNED_BYTES)
    return Work(0.0, read_bytes, written, fresh)


class _Groups:
    """The groups of nodes that share a kernel (union-find over the nodes that fuse)."""

    def __init__(self, nodes: Sequence[fx.Node], hint: Hint, device: str) -> None:
        self._heavy = _HEAVY if device == "cpu" else frozenset[str]()
        #: value that is never written → the written values it is made of, how many ops make it, and
        #: if one of them is heavy
        self._inlined: dict[fx.Node, tuple[frozenset[fx.Node], int, bool]] = {}
        #: fusible node → number of elements in its loop
        self.space: dict[fx.Node, int] = {}
        self._parent: dict[int, int] = {}
        self._size: dict[int, int] = {}
        self._number = {node: i for i, node in enumerate(nodes)}
        self._level: dict[fx.Node, int] = {}  # number of reductions before it in its kernel
        self._users: dict[fx.Node, list[fx.Node]] = {}
        #: number of kernels of another kind before it, in the order of the graph
        self._turn: dict[fx.Node, int] = {}
        #: nodes asked for so far → the nodes that they are views or parts of
        self._bases: dict[fx.Node, fx.Node] = {}
        externs: dict[fx.Node, int] = {}  # as many that it needs, one behind the other
        turn = 0
        for node in nodes:
            self._turn[node] = turn
            turn += node.op == "call_function" and is_extern(node)
            inputs = node.all_input_nodes
            # ops on sizes and other constants come before everything
            externs[node] = max((externs[n] for n in inputs), default=0)
            if not _fuses(node) or is_view(node):
                externs[node] += node.op == "call_function" and is_extern(node)
                continue
            self._add(node, hint)
            for base in map(self.base, inputs):
                if base in self.space and externs[base] == externs[node]:
                    self._join(base, node)
        self._find_levels(nodes)
        for node in nodes:
            self._inline(node)

    def base(self, node: fx.Node) -> fx.Node:
        """The node that this one is a view or a part of, or the node itself."""
        found = self._bases.get(node)
        if found is None:
            found = node
            if is_getitem(node) or (node.op == "call_function" and is_view(node)):
                found = self.base(node.all_input_nodes[0])
            self._bases[node] = found
        return found

    def find(self, node: fx.Node) -> int:
        number = self._number[node]
        while self._parent[number] != number:
            number = self._parent[number]
        return number

    def crosses(self, node: fx.Node) -> bool:
        """True if the value is needed again in its kernel after a reduction has ended."""
        group, level = self.find(node), self._after(node)
        return any(
            user in self.space and self.find(user) == group and self._level[user] > level
            for user in self._users[node]
        )

    def materialises(self, node: fx.Node) -> bool:
        """True if the value may have to be written to memory."""
        users, group = self._users[node], self.find(node)
        if not users or mutated_inputs(node):
            return True
        if self.inlines(node):
            return False
        if self.crosses(node):
            return True
        if any(user not in self.space or self.find(user) != group for user in users):
            return True
        return len(users) > 1 and self._reordered(node)

    def inlines(self, node: fx.Node) -> bool:
        """True if each user computes the value for itself."""
        return node in self._inlined

    def sources(self, node: fx.Node) -> frozenset[fx.Node]:
        """The values in memory that an inlined value is computed from."""
        return self._inlined[node][0]

    def level(self, node: fx.Node) -> int:
        """The number of reductions before the node in its kernel."""
        return self._level[node]

    def _inline(self, node: fx.Node) -> None:
        """Note the node if Inductor inlines it: its inputs have been visited before."""
        if node not in self.space or _is_reduction(node) or _name(node) in _ENDS:
            return
        users, turn = self._users[node], self._turn
        if not users or mutated_inputs(node):
            return
        # beyond another kernel, Inductor would keep its inputs for it; plans keep the value
        if any(u not in self.space or turn[u] != turn[node] for u in users):
            return
        sources, ops, heavy = frozenset[fx.Node](), 1, _name(node) in self._heavy
        for base in map(self.base, node.all_input_nodes):
            below, more, too = self._inlined.get(base, (frozenset((base,)), 0, False))
            sources, ops, heavy = sources | below, ops + more, heavy or too
        if len(users) > 1 and (heavy or len(sources) > MOST_READS or ops > MOST_OPS):
            return
        self._inlined[node] = sources, ops, heavy

    def _after(self, node: fx.Node) -> int:
        return self._level[node] + _is_reduction(node)

    def _reordered(self, node: fx.Node) -> bool:
        views = [user for user in node.users if is_getitem(user) or is_view(user)]
        return any(_name(v) not in _KEEPS_ORDER or self._reordered(v) for v in views)

    def _add(self, node: fx.Node, hint: Hint) -> None:
        call = call_of(node, hint)
        specs = () if call is None else call.outputs
        if call is not None and _is_reduction(node):
            specs = call.inputs
        self.space[node] = max((spec.numel for spec in specs), default=0)
        number = self._number[node]
        self._parent[number], self._size[number] = number, 1

    def _join(self, producer: fx.Node, consumer: fx.Node) -> None:
        one, other = self.find(producer), self.find(consumer)
        size = self._size[one] + self._size[other]
        if one == other or size > MOST_NODES or self.space[producer] != self.space[consumer]:
            return
        self._parent[max(one, other)] = min(one, other)
        self._size[min(one, other)] = size

    def _find_levels(self, nodes: Sequence[fx.Node]) -> None:
        self._users = {node: [] for node in nodes}
        for node in nodes:
            if node in self.space:
                inside = [
                    base
                    for base in map(self.base, node.all_input_nodes)
                    if base in self.space and self.find(base) == self.find(node)
                ]
                self._level[node] = max(map(self._after, inside), default=0)
            if not (is_getitem(node) or (node.op == "call_function" and is_view(node))):
                for base in map(self.base, node.all_input_nodes):
                    self._users[base].append(node)


def _is_reduction(node: fx.Node) -> bool:
    return _name(node) in _REDUCTIONS
