"""MemFerry: weights live on the host; for each, load it or compute on the host copy in place.

MemFerry §IV-B names three modes. GFGB loads the weight for the forward op and keeps it for
backward. DHA accesses it in place both times. DFGB accesses it in place in forward and loads it for
backward. `hybrid_modes` chooses from plain figures, and the builder makes the plan. Differences
from the paper: lanes here are one-way, so gradients that leave do not close the window in which
DFGB weights are loaded (the variants taken from the paper keep its window); and memory is limited:
if the GFGB weights cannot all stay from forward to backward, some leave in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from offcompile.ir import DEVICE, HOST, Infeasible, Machine, Move, Op, Plan, Problem
from offcompile.ir.units import round_ns

from .build.contract import Judge
from .build.lanes import Routes
from .search.fitting import Fitting, Key
from .search.program_variant import Choices, ProgramVariant
from .select.hybrid_modes import (
    VARIANTS,
    LayerTimes,
    Schedule,
    choose_dfgb,
    exact,
    repaired,
    zero_offload,
)

#: total points of the Pareto fronts over all layers: 4,000 each for 200 layers, which is exact for
#: nets whose layers differ in kind; fronts are thinned where direct access costs almost the same
#: per byte
POINTS = 800_000
#: number of choices tried times number of ops: longer steps try fewer choices, at least one
OPS_ASKED = 2400


@dataclass(frozen=True)
class HybridAccess:
    """Per weight: load before use (GFGB), access in place (DHA), or in place, then load (DFGB).

    `variant` selects the algorithm. `exact` is a Pareto program; the judge also tries the repaired
    choice, loading everything for backward, and loading everything for both. `repaired` and
    `printed` are Algorithm 1. `zero_offload` loads everything. `load_all` does so, too, but no op
    starts before all of it has arrived: the baseline for the other schedules.
    """

    name: ClassVar[str] = "hybrid_access"

    variant: str = "exact"
    judge: Judge | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            known = ", ".join(VARIANTS)
            raise ValueError(f"variant is {self.variant!r}; it must be one of {known}")

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        fitting = Fitting(problem, machine, self.judge, plan, first="weight")
        layers = _Layers(problem, machine, fitting.base)
        patience = 1 if self.judge is None else max(1, OPS_ASKED // max(1, len(problem.ops)))
        for asked, directs in enumerate(self._choices(layers), 1):
            kept = frozenset(d for d in fitting.base.directs if not layers.decides(d))
            forced = fitting.forced.directs & fitting.base.directs
            choices = Choices(kept | forced | directs, fitting.base.recomputes, fitting.base.hosted)
            variant = fitting.variant(choices)
            fitting.offer(variant, _between_steps(variant, layers.weights))
            if fitting.trials.best is not None and asked >= patience:
                break
        made = fitting.plan()
        return _all_loaded_first(problem, machine, made, self.judge) if self._waits else made

    @property
    def _waits(self) -> bool:
        return self.variant == "load_all"

    def _choices(self, layers: _Layers) -> Iterator[frozenset[tuple[str, str]]]:
        """Yields sets of direct accesses to try."""
        if self.variant != "exact":
            forward = layers.forward(VARIANTS[self.variant])
            yield layers.directs(forward, layers.backward(forward, _windowed))
            return
        forward = layers.forward(_exact)
        yield layers.directs(forward, layers.backward(forward, _unwindowed))
        other = layers.forward(repaired)
        yield layers.directs(other, layers.backward(other, _windowed))
        yield layers.directs(forward, frozenset())
        yield layers.directs(layers.forward(zero_offload), frozenset())


def _exact(layers: list[LayerTimes], link_ns: int = 0, start_ns: int = 0) -> Schedule:
    most = max(400, POINTS // max(1, len(layers)))
    best = exact(layers, link_ns, start_ns, most=most)
    return best or zero_offload(layers)


def _windowed(layers: list[LayerTimes], link: int, start: int, window: int | None) -> Schedule:
    return choose_dfgb(layers, link, start, window)


def _unwindowed(layers: list[LayerTimes], link: int, start: int, window: int | None) -> Schedule:
    return _exact(layers, link, start)


def _all_loaded_first(problem: Problem, machine: Machine, plan: Plan, judge: Judge | None) -> Plan:
    """Returns the plan with the first loads of all weights before any op that reads one.

    Raises `Infeasible` if the device cannot hold all of them at once.
    """
    first: dict[str, Move] = {}
    for move in plan.moves:
        if move.target == DEVICE and problem.tensor[move.tensor].kind == "weight":
            first.setdefault(move.tensor, move)
    reader = next((o.id for o in problem.ops if not first.keys().isdisjoint(o.reads)), None)
    if reader is None:
        return plan
    ids = {m.id for m in first.values()}
    # loaded in this step, not at the end of the one before
    wrapped = {m.tensor for m in first.values() if m.wraps}
    start = tuple(s for s in plan.start if s.tier != DEVICE or s.tensor not in wrapped)
    early = [replace(m, start_after=None, ready_before=reader, wraps=False) for m in first.values()]
    made = replace(plan, start=start, moves=(*early, *(m for m in plan.moves if m.id not in ids)))
    if judge is not None and not judge(problem, machine, made).valid:
        total = sum(problem.tensor[t].nbytes for t in first)
        raise Infeasible(
            f"The weights that are to be loaded before anything else take {total:,} bytes, for"
            " which the device has no room.",
            None,
            "Use another variant, which loads them one after the other.",
        )
    return made


def _between_steps(variant: ProgramVariant, weights: Iterable[str]) -> set[Key]:
    """The gaps of these weights across the end of the step, which they spend on the host."""
    mine = set(weights)
    return {
        (g.tensor.id, g.after)
        for g in variant.gaps.gaps
        if g.tensor.id in mine and g.last <= g.first
    }


@dataclass(frozen=True)
class _HybridWeight:
    """A weight to decide on, the ops of each phase that touch it, and its load time."""

    id: str
    load_ns: int
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]

    def extra_ns(self, ops: tuple[Op, ...]) -> int | None:
        """Returns the time that access in place adds to these ops; None if one of them cannot."""
        if any(self.id not in op.direct for op in ops):
            return None
        return sum(round_ns(op.direct[self.id]) - round_ns(op.duration_us) for op in ops)


class _Layers:
    """A problem as MemFerry models it: one layer per weight, in order of first use.

    A weight that several forward ops read (tied) is one layer at its first read, and may be direct
    only if all of them can access it in place. An op with several weights becomes one layer per
    weight; the last one gets the computation.
    """

    def __init__(self, problem: Problem, machine: Machine, base: Choices) -> None:
        self.problem, self.base = problem, base
        self.hosted = {
            o.id
            for o in problem.ops
            if o.phase == "update" and not base.hosted.isdisjoint(o.writes)
        }
        self.weights: dict[str, _HybridWeight] = {}
        if HOST not in machine.tier:
            return
        load_ns = _load_times(problem, machine)
        for tensor in problem.tensors:
            if tensor.kind != "weight" or not (problem.steady or tensor.home == HOST):
                continue
            if tensor.pinned:
                continue
            ops = [o for o in problem.ops if tensor.id in o.operands]
            forward = tuple(o for o in ops if o.phase == "forward")
            backward = tuple(o for o in ops if o.phase == "backward")
            if any(tensor.id in o.reads for o in forward):
                load = load_ns(tensor.id)
                self.weights[tensor.id] = _HybridWeight(tensor.id, load, forward, backward)

    def decides(self, direct: tuple[str, str]) -> bool:
        """True if the modes decide this direct access."""
        return direct[1] in self.weights and self.problem.op[direct[0]].phase != "update"

    def forward(self, choose: Callable[[list[LayerTimes]], Schedule]) -> _Chosen:
        ops = [o for o in self.problem.ops if o.phase == "forward"]
        first = {w: x.forward for w, x in self.weights.items()}
        layers, owners = self._times(ops, first)
        schedule = choose(layers)
        loaded = {w for w, load in zip(owners, schedule.loaded, strict=True) if w and load}
        return _Chosen(frozenset(loaded), schedule.end_ns, schedule.link_ns)

    def backward(
        self,
        forward: _Chosen,
        choose: Callable[[list[LayerTimes], int, int, int | None], Schedule],
    ) -> frozenset[str]:
        """Returns the weights accessed in place in backward too; the others are loaded (DFGB)."""
        ops = [o for o in self.problem.ops if o.phase != "forward" and o.id not in self.hosted]
        open_weights = {
            w: x.backward for w, x in self.weights.items() if w not in forward.loaded and x.backward
        }
        layers, owners = self._times(ops, open_weights)
        window = self._first_gradient_ns(ops, forward.end_ns)
        chosen = choose(layers, forward.link_ns, forward.end_ns, window)
        return frozenset(w for w, load in zip(owners, chosen.loaded, strict=True) if w and not load)

    def directs(self, forward: _Chosen, backward: frozenset[str]) -> frozenset[tuple[str, str]]:
        """Returns the direct accesses that these modes amount to."""
        found: set[tuple[str, str]] = set()
        for w, weight in self.weights.items():
            if w not in forward.loaded:
                found |= {(op.id, w) for op in weight.forward}
            if w in backward:
                found |= {(op.id, w) for op in weight.backward}
        return frozenset(found)

    def _times(
        self, ops: list[Op], uses: dict[str, tuple[Op, ...]]
    ) -> tuple[list[LayerTimes], list[str | None]]:
        """Returns the layers and the weight of each (None: computation before the first layer)."""
        layers: list[LayerTimes] = []
        owners: list[str | None] = []
        for op in ops:
            here = [w for w in op.operands if w in uses and uses[w][0].id == op.id]
            # wait for weights that must be loaded before computing anything in place
            here.sort(key=lambda w: self.weights[w].extra_ns(uses[w]) is not None)
            duration = round_ns(op.duration_us)
            if not here and layers:
                last = layers[-1]
                layers[-1] = LayerTimes(
                    last.load_ns, last.compute_ns, last.direct_ns, last.between_ns + duration
                )
            elif not here:
                layers.append(LayerTimes(0, duration, duration))
                owners.append(None)
            for n, w in enumerate(here):
                own = duration if n == len(here) - 1 else 0
                extra = self.weights[w].extra_ns(uses[w])
                direct = None if extra is None else max(0, own + extra)
                layers.append(LayerTimes(self.weights[w].load_ns, own, direct))
                owners.append(w)
        return layers, owners

    def _first_gradient_ns(self, ops: list[Op], start_ns: int) -> int | None:
        """Returns when the first gradient is ready to send: the end of the paper's idle window."""
        for op in ops:
            start_ns += round_ns(op.duration_us)
            if any(self.problem.tensor[t].kind == "gradient" for t in op.writes):
                return start_ns
        return None


@dataclass(frozen=True)
class _Chosen:
    """The forward modes: the weights loaded, the end of compute, and when the link is free."""

    loaded: frozenset[str]
    end_ns: int
    link_ns: int


def _load_times(problem: Problem, machine: Machine) -> Callable[[str], int]:
    """Returns a function from weight to load time from the host (if no lane: near infinity)."""
    routes = Routes(machine)
    try:
        lanes = routes.lanes(HOST, DEVICE)
    except Infeasible:
        return lambda weight: 1 << 60
    side_by_side = max(1, len(machine.lanes_between(HOST, DEVICE)))

    def load_ns(weight: str) -> int:
        tensor = problem.tensor[weight]
        us = max(routes.move_us(tensor, lane, None) for lane in lanes)
        return round_ns(us / side_by_side)

    return load_ns
