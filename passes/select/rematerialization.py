"""Chooses which activations backward recomputes and which are saved.

Keeping a tensor costs its bytes times a price; rerunning an op costs its duration and needs its
operands, which are kept or recomputed themselves. The cheapest choice for a given price is a
minimum cut, as in torch's own partitioner. Low prices drop tensors that are almost free to compute
(outputs of activation functions); high prices keep little more than the results of attention.

A cut does not know *when*: an op rerun early holds its results until they are used. So rerun chains
end at *boundaries*: tensors that always stay available, located where the fewest bytes cross from
one part of forward to the next. With a boundary at each block and a high price this is classical
activation checkpointing per block; each part is rerun right before its own backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate

from offcompile.ir import Op, Problem

from .droppable import own_outputs
from .min_cut import UNCUTTABLE, Network

#: (op, the op before which it is rerun)
Rerun = tuple[str, str]
NS_PER_US = 1000


@dataclass(frozen=True, eq=False)
class Rematerialization:
    """The choices of one problem. Forward ops may be rerun for the ops of all later phases."""

    problem: Problem
    #: cached results, and networks in which only prices change
    _known: dict[tuple[frozenset[str], tuple[int, ...]], frozenset[Rerun]] = field(
        default_factory=dict, init=False, repr=False
    )
    _networks: dict[tuple[frozenset[str], frozenset[str]], tuple[Network, dict[str, int]]] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def of(cls, problem: Problem) -> Rematerialization:
        """Returns the choices of this problem, cached across problems that differ only in homes."""
        made = {t for op in problem.ops if op.phase == "forward" for t in op.writes}
        tensors = tuple(
            (t.id, t.nbytes, t.kind, t.home is None) for t in problem.tensors if t.id in made
        )
        return _shared(_Likeness(problem.ops, tensors, problem))

    @staticmethod
    def forget() -> None:
        """Clears that cache, whose networks and problems are large."""
        _shared.cache_clear()

    @cached_property
    def forward(self) -> list[Op]:
        return [op for op in self.problem.ops if op.phase == "forward"]

    @cached_property
    def maker(self) -> dict[str, Op]:
        """Tensor → the forward op that produces it."""
        found: dict[str, Op] = {}
        for op in self.forward:
            for t in op.writes:
                found.setdefault(t, op)
        return found

    @cached_property
    def saved(self) -> frozenset[str]:
        """Tensors made in forward and read later."""
        others = (op for op in self.problem.ops if op.phase != "forward")
        return frozenset(t for op in others for t in op.reads if t in self.maker)

    @cached_property
    def progress(self) -> dict[str, float]:
        """Tensor → the fraction of forward time that has passed when it is produced."""
        ends = list(accumulate(op.duration_us for op in self.forward))
        total = ends[-1] if ends and ends[-1] > 0 else 1.0
        found: dict[str, float] = {}
        for op, end in zip(self.forward, ends, strict=True):
            for t in op.writes:
                found.setdefault(t, end / total)
        return found

    @cached_property
    def _repeatable(self) -> frozenset[str]:
        """Forward ops that may be rerun as long as their operands are not overwritten."""
        writers: dict[str, list[str]] = {}
        for op in self.problem.ops:
            for t in op.writes:
                writers.setdefault(t, []).append(op.id)
        ops = (op for op in self.forward if op.recompute)
        return frozenset(op.id for op in ops if own_outputs(self.problem, op, writers))

    def may_run_again(self, op: str, before: int) -> bool:
        """True if a forward op can be rerun right before the op at this position."""
        return op in self._repeatable and self._overwritten_at[op] >= before

    @cached_property
    def _overwritten_at(self) -> dict[str, int]:
        """Op → the first later position at which one of its inputs is overwritten."""
        writes: dict[str, list[int]] = {}
        for at, op in enumerate(self.problem.ops):
            for t in op.writes:
                writes.setdefault(t, []).append(at)
        index, end = self.problem.op_index, len(self.problem.ops)
        found: dict[str, int] = {}
        for op in self.forward:
            later = [w for t in op.reads for w in writes.get(t, ()) if w > index[op.id]]
            found[op.id] = min(later, default=end)
        return found

    def boundaries(self, parts: int) -> frozenset[str]:
        """Returns the activations that cross from one part of forward to the next.

        Forward is cut into parts of about equal time, at the narrowest place near each ideal cut.
        """
        total = sum(op.duration_us for op in self.forward)
        found: set[str] = set()
        ends = list(accumulate((op.duration_us for op in self.forward), initial=0.0))
        for part in range(1, parts):
            wanted, reach = total * part / parts, total / parts / 2
            near = [
                at
                for at in range(1, len(self.forward))
                if abs(ends[at] - wanted) < reach and self._crossing[at]
            ]
            if near:
                at = min(near, key=lambda i: (self._crossing_bytes[i], abs(ends[i] - wanted)))
                found |= self._crossing[at]
        return frozenset(found)

    @cached_property
    def _crossing(self) -> list[frozenset[str]]:
        """Per forward op: activations made before it and read by it or later in forward."""
        made: dict[str, int] = {}
        last: dict[str, int] = {}
        for at, op in enumerate(self.forward):
            last.update((t, at) for t in op.reads if t in made)
            for t in op.writes:
                made.setdefault(t, at)
        crossing: list[set[str]] = [set() for _ in self.forward]
        for t, at in last.items():
            for between in range(made[t] + 1, at + 1):
                crossing[between].add(t)
        return [frozenset(here) for here in crossing]

    @cached_property
    def _crossing_bytes(self) -> list[int]:
        nbytes = self.problem.tensor
        return [sum(nbytes[t].nbytes for t in here) for here in self._crossing]

    def reruns(
        self, price_ns: Callable[[str], float], boundaries: frozenset[str] = frozenset()
    ) -> frozenset[Rerun]:
        """Returns the reruns (op, before) if keeping a tensor costs `price_ns`."""
        prices = {t: max(0, round(price_ns(t))) for t in self.maker if t not in boundaries}
        asked = boundaries, tuple(prices.values())
        if asked not in self._known:
            self._known[asked] = self._cheapest(prices, boundaries)
        return self._known[asked]

    def _cheapest(self, prices: dict[str, int], boundaries: frozenset[str]) -> frozenset[Rerun]:
        repeatable = set(self._repeatable)
        while True:
            again = self._cut(prices, boundaries, repeatable)
            found, broken = self._just_in_time(again, boundaries)
            if not broken:
                return frozenset(found)
            repeatable -= broken

    def _cut(
        self, prices: dict[str, int], boundaries: frozenset[str], repeatable: set[str]
    ) -> set[str]:
        """Returns the ops to rerun at least cost.

        Each tensor has a node that is on the source side if backward needs it; each op has one that
        is on the source side if the op is rerun. The edge between them carries the price of
        keeping: it is cut if the tensor is needed and its op is not rerun.
        """
        known = boundaries, frozenset(repeatable)
        if known not in self._networks:
            self._networks[known] = self._network(*known)
        network, keeping = self._networks[known]
        for t, edge in keeping.items():
            network.change(edge, prices[t])
        side = network.source_side()
        return {op.id for op in self.forward if ("again", op.id) in side}

    def _network(
        self, boundaries: frozenset[str], repeatable: frozenset[str]
    ) -> tuple[Network, dict[str, int]]:
        """Returns the network without prices, and the edge that is cut by keeping each tensor."""
        network = Network()
        for t in self.saved - boundaries:
            network.from_source(("needed", t), UNCUTTABLE)
        keeping: dict[str, int] = {}
        for t, op in self.maker.items():
            if t in boundaries:
                continue
            if op.id in repeatable:
                keeping[t] = network.edge(("needed", t), ("again", op.id), 0)
            else:
                keeping[t] = network.to_sink(("needed", t), 0)
        for op in self.forward:
            if op.id not in repeatable:
                continue
            network.to_sink(("again", op.id), max(1, round(NS_PER_US * op.duration_us)))
            for t in op.reads:
                if t in self.maker and t not in boundaries:
                    network.edge(("again", op.id), ("needed", t), UNCUTTABLE)
        return network, keeping

    def _just_in_time(
        self, again: set[str], boundaries: frozenset[str]
    ) -> tuple[list[Rerun], set[str]]:
        """Schedules each op before its first user; also returns ops whose operands are lost."""
        there: set[str] = set()
        found: list[Rerun] = []
        broken: set[str] = set()

        def makers(tensors: tuple[str, ...]) -> list[str]:
            here = (t for t in tensors if t not in boundaries and t in self.maker)
            return [op for t in here if (op := self.maker[t].id) in again and op not in there]

        for at, op in enumerate(self.problem.ops):
            if op.phase == "forward":
                continue
            stack = makers(op.reads)
            while stack:
                one = stack.pop()
                if one in there:
                    continue
                there.add(one)
                found.append((one, op.id))
                if self._overwritten_at[one] < at:
                    broken.add(one)
                stack += makers(self.problem.op[one].reads)
        return found, broken


@dataclass(frozen=True)
class _Likeness:
    """The parts of a problem on which its choices depend."""

    ops: tuple[Op, ...]
    made: tuple[tuple[str, int, str, bool], ...]
    problem: Problem = field(compare=False)


@lru_cache(maxsize=4)
def _shared(likeness: _Likeness) -> Rematerialization:
    return Rematerialization(likeness.problem)
