"""The vocabulary of a problem: tensors and ops, and the machine that runs them.

All classes are frozen and every object has a stable string id. Sizes are bytes of storage
(aliases and views of one storage are one `Tensor`), durations are microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar, cast

Made = TypeVar("Made")

KINDS = ("weight", "gradient", "state", "activation", "input", "output", "temporary")
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
PHASES = (FORWARD, BACKWARD, UPDATE)
DEVICE = "device"  # the tier that ops compute on
HOST = "host"  # the tier whose copies may be accessed in place

#: kinds whose values all die by themselves after their last reader
SELF_ENDING_KINDS = frozenset({"activation", "temporary"})


@dataclass(frozen=True)
class Tensor:
    """One storage. `home` is the tier that holds it before the step (None: not yet written)."""

    id: str
    nbytes: int
    kind: str
    home: str | None = None
    #: codec name → compressed size over raw size
    ratios: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: never moved, dropped or accessed directly; it takes space and may be recomputed
    pinned: bool = False


@dataclass(frozen=True)
class Op:
    """One step of computation. A tensor both read and written is updated in place."""

    id: str
    phase: str
    duration_us: float
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    workspace_bytes: int = 0
    #: tensor id → duration of this op if that operand is accessed in place on the host
    direct: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: duration as a host update; None if it cannot run on the host
    host_duration_us: float | None = None
    #: True if the op may run again to restore its outputs
    recompute: bool = False

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Every tensor the op touches, each once, reads first."""
        return tuple(dict.fromkeys(self.reads + self.writes))


@dataclass(frozen=True)
class Problem:
    """The computation of one training step. If `steady`, it repeats and must end as it began."""

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    steady: bool = False

    @cached_property
    def tensor(self) -> Mapping[str, Tensor]:
        return MappingProxyType({t.id: t for t in self.tensors})

    @cached_property
    def op(self) -> Mapping[str, Op]:
        return MappingProxyType({o.id: o for o in self.ops})

    @cached_property
    def op_index(self) -> Mapping[str, int]:
        return MappingProxyType({o.id: i for i, o in enumerate(self.ops)})

    @cached_property
    def _made(self) -> dict[object, object]:
        return {}

    def once(self, make: Callable[[Problem], Made]) -> Made:
        """Returns `make(self)`, computed on the first call only."""
        if make not in self._made:
            self._made[make] = make(self)
        return cast("Made", self._made[make])

    def forget(self) -> None:
        """Clears the cached results of `once`, some of which are large."""
        self._made.clear()

    @cached_property
    def read_ids(self) -> frozenset[str]:
        """Tensors that some op reads."""
        return frozenset(t for o in self.ops for t in o.reads)

    @cached_property
    def in_place_ids(self) -> frozenset[str]:
        """Tensors that some op may access in place on the host."""
        return frozenset(t for o in self.ops for t in o.direct)

    @cached_property
    def uses(self) -> tuple[tuple[tuple[str, bool, bool], ...], ...]:
        """The operands of each op as (tensor, is read, is written)."""
        return tuple(
            tuple((t, t in reads, t in writes) for t in op.operands)
            for op in self.ops
            for reads, writes in ((frozenset(op.reads), frozenset(op.writes)),)
        )

    @cached_property
    def operand_bytes(self) -> tuple[int, ...]:
        """The bytes that each op needs on its own: operands, outputs and workspace."""
        nbytes = {t.id: t.nbytes for t in self.tensors}
        return tuple(
            op.workspace_bytes + sum(nbytes[t] for t, _, _ in uses)
            for op, uses in zip(self.ops, self.uses, strict=True)
        )

    @cached_property
    def surviving_ids(self) -> frozenset[str]:
        """Tensors that stay where they are, or whose last copy must never be dropped."""
        ids = (t.id for t in self.tensors)
        return frozenset(t for t in ids if self.must_survive(t) or self.stays_put(t))

    def stays_put(self, tensor_id: str) -> bool:
        """True if a copy, once made, stays to the end: pinned, and not of a kind that dies."""
        tensor = self.tensor[tensor_id]
        return tensor.pinned and tensor.kind not in SELF_ENDING_KINDS

    def must_survive(self, tensor_id: str) -> bool:
        """True if a value may leave a tier only when another tier holds it.

        These are weights, states and outputs, and gradients that no op reads: the step's results.
        """
        kind = self.tensor[tensor_id].kind
        if kind == "gradient":
            return tensor_id not in self.read_ids
        return kind in ("weight", "state", "output")

    def __getstate__(self) -> dict[str, object]:
        # the cached look-up tables cannot be pickled and are cheap to rebuild
        return {"tensors": self.tensors, "ops": self.ops, "steady": self.steady}


@dataclass(frozen=True)
class Tier:
    """A place that holds copies. `capacity_bytes` is None if it has no limit."""

    name: str
    capacity_bytes: int | None = None


@dataclass(frozen=True)
class Lane:
    """A one-way link that runs one move at a time, in order.

    Tolls are the compute time that concurrent moves cost. Simulated times do not include them;
    planners add them to the cost of a plan (`Timeline.cost_us`).
    """

    name: str
    source: str
    target: str
    bytes_per_us: float
    latency_us: float = 0.0
    #: cost of each move, whatever its size
    toll_us: float = 0.0
    #: share of a move's time that it costs, for tensors that ops may access in place on the host:
    #: where the processor can address both ends, the processor does the copying
    toll_share: float = 0.0
    #: the same for all other moves, which bypass the processor but not the memory
    bypass_share: float = 0.0


@dataclass(frozen=True)
class Codec:
    """A way to store a copy in fewer bytes; `bytes_per_us` counts raw bytes coded per µs."""

    name: str
    lossless: bool
    bytes_per_us: float


@dataclass(frozen=True)
class SharedLink:
    """A link or a memory whose rate is shared by lanes and by accesses of host memory.

    Ops and host updates take what they need; moves that run meanwhile share the rest.
    """

    name: str
    bytes_per_us: float
    #: moves over these lanes cross the link
    lanes: tuple[str, ...] = ()
    #: operands that ops read, or write, in place on the host cross it
    in_place_reads: bool = False
    in_place_writes: bool = False
    #: operands of host updates cross it, read and written ones each once
    updates: bool = False


@dataclass(frozen=True)
class Machine:
    tiers: tuple[Tier, ...]
    lanes: tuple[Lane, ...] = ()
    codecs: tuple[Codec, ...] = ()
    shared: tuple[SharedLink, ...] = ()

    @cached_property
    def tier(self) -> Mapping[str, Tier]:
        return MappingProxyType({t.name: t for t in self.tiers})

    @cached_property
    def lane(self) -> Mapping[str, Lane]:
        return MappingProxyType({lane.name: lane for lane in self.lanes})

    @cached_property
    def codec(self) -> Mapping[str, Codec]:
        return MappingProxyType({c.name: c for c in self.codecs})

    def lanes_between(self, source: str, target: str) -> tuple[Lane, ...]:
        return self._by_ends.get((source, target), ())

    @cached_property
    def _by_ends(self) -> Mapping[tuple[str, str], tuple[Lane, ...]]:
        found: dict[tuple[str, str], tuple[Lane, ...]] = {}
        for lane in self.lanes:
            ends = lane.source, lane.target
            found[ends] = (*found.get(ends, ()), lane)
        return MappingProxyType(found)

    def with_capacity(self, tier: str, capacity_bytes: int | None) -> Machine:
        """Returns the same machine with another capacity for one tier."""
        tiers = tuple(Tier(t.name, capacity_bytes) if t.name == tier else t for t in self.tiers)
        return replace(self, tiers=tiers)

    def __getstate__(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
