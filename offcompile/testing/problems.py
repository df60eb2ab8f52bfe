"""Strategies for problems and for machines that suit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from offcompile.ir import (
    DEVICE,
    HOST,
    KINDS,
    PHASES,
    SELF_ENDING_KINDS,
    Codec,
    Lane,
    Machine,
    Op,
    Problem,
    Tensor,
    Tier,
)

from .drawing import Draw, composite, durations, rates, some_of, strategies

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

FAMILIES = ("any", "training")  # the one to shrink towards first
CODECS = ("fp16", "bitmask")


def problems(
    *,
    steady: bool | None = None,
    family: str | None = None,
    max_layers: int = 3,
    tiers: Sequence[str] = (DEVICE, HOST),
    codecs: Sequence[str] = CODECS,
    readable: bool = True,
) -> SearchStrategy[Problem]:
    """Problems of a few ops, with tensors homed on `tiers` and `ratios` for some of `codecs`.

    `family` "training" has forward, backward and update ops in layers (tied, frozen, rotating or
    accumulating); "any" has ops that touch arbitrary tensors; None draws either. `readable`: no op
    reads a tensor without a value (for family "any"; always true for training). Some tensors
    without a home, or with home on the device, are pinned.
    """
    if family not in (None, *FAMILIES):
        raise ValueError(f"family {family!r} is not one of {', '.join(FAMILIES)} or None")
    st = strategies()

    def draw_problem(draw: Draw) -> Problem:
        repeats = draw(st.booleans()) if steady is None else steady
        parts = _Parts(draw, st, tuple(tiers), tuple(codecs))
        if (draw(st.sampled_from(FAMILIES)) if family is None else family) == "training":
            _training(parts, draw(st.integers(1, max_layers)))
        else:
            _any_ops(parts, max_layers, repeats, readable)
        return Problem(tuple(parts.tensors.values()), tuple(parts.ops), repeats)

    return composite(draw_problem)


def machines(
    *, disk: bool | None = None, codecs: Sequence[str] = CODECS, capacities: Any = None
) -> SearchStrategy[Machine]:
    """Machines with a device, mostly a host, sometimes a disk, and lanes between them.

    `capacities` is a strategy for the bytes of a tier; by default None or a few hundred.
    """
    st = strategies()
    room = st.none() | st.integers(0, 400) if capacities is None else capacities

    def draw_machine(draw: Draw) -> Machine:
        has_disk = draw(st.booleans()) if disk is None else disk
        names = [DEVICE]
        if has_disk or draw(st.sampled_from((True, True, True, False))):
            names.append(HOST)
        if has_disk:
            names.append("disk")
        links = [("h2d", HOST, DEVICE), ("d2h", DEVICE, HOST)]
        links += [("disk_read", "disk", HOST), ("disk_write", HOST, "disk")]
        links += [("device_to_disk", DEVICE, "disk"), ("d2h_second", DEVICE, HOST)]
        extra = draw(some_of(st, [name for name, _, _ in links[4:]]))
        lanes = [
            Lane(name, source, target, draw(rates(st)), draw(durations(st)))
            for i, (name, source, target) in enumerate(links)
            if source in names and target in names and (i < 4 or name in extra)
        ]
        turn = draw(st.integers(0, len(lanes)))  # the order of lanes decides which goes first
        return Machine(
            tuple(Tier(name, draw(room)) for name in names),
            (*lanes[turn:], *lanes[:turn]),
            tuple(
                Codec(name, draw(st.booleans()), draw(rates(st)))
                for name in draw(some_of(st, codecs))
            ),
        )

    return composite(draw_machine)


def problems_with_machines(**options: Any) -> SearchStrategy[tuple[Problem, Machine]]:
    """Problems (with `options` of `problems`), each with a machine that has its homes and codecs.

    The device's capacity is unlimited, tight (it fits each op, but maybe not everything) or
    arbitrary.
    """
    st = strategies()

    def draw_both(draw: Draw) -> tuple[Problem, Machine]:
        machine = draw(machines(capacities=st.none()))
        given = {"tiers": tuple(machine.tier), "codecs": tuple(machine.codec)} | options
        problem = draw(problems(**given))
        most = sum(t.nbytes for t in problem.tensors)
        most += max((o.workspace_bytes for o in problem.ops), default=0)
        least = max((_footprint(problem, op) for op in problem.ops), default=0)
        tight = st.integers(least, most)
        machine = machine.with_capacity(DEVICE, draw(st.none() | tight | st.integers(0, most)))
        if HOST in machine.tier and draw(st.integers(0, 3)) == 3:
            machine = machine.with_capacity(HOST, draw(st.integers(0, most)))
        return problem, machine

    return composite(draw_both)


def _footprint(problem: Problem, op: Op) -> int:
    return op.workspace_bytes + sum(problem.tensor[t].nbytes for t in op.operands)


#: sets of optional features of an op, one of which is drawn per op
_EXTRAS: tuple[tuple[str, ...], ...] = (
    (),
    (),
    ("workspace",),
    ("direct",),
    ("host",),
    ("direct", "host", "workspace"),
)


@dataclass
class _Parts:
    """Collects tensors and ops as they are drawn."""

    draw: Draw
    st: Any
    tiers: tuple[str, ...]
    codecs: tuple[str, ...]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    @cached_property
    def ratios(self) -> list[tuple[dict[str, float], bool]]:
        """Pairs of (ratios, pinned) to draw from: mostly no codec; some good, useless or worse."""
        single = [{c: r} for c in self.codecs for r in (0.5, 0.41, 1.0)]
        every = [dict.fromkeys(self.codecs, 1.1)] if self.codecs else []
        plain: list[dict[str, float]] = [{} for _ in range(2 * len(single) + 1)]
        anywhere = [(r, False) for r in (*plain, *single, *every)]
        return anywhere + [({}, True)] * (1 + len(plain) // 6)

    def sometimes(self) -> bool:
        return bool(self.draw(self.st.integers(0, 3)) == 3)

    def tensor(self, name: str, kind: str, home: str | None = None) -> str:
        if name not in self.tensors:
            nbytes = self.draw(self.st.integers(0, 100))
            ratios, pinned = self.draw(self.st.sampled_from(self.ratios))
            # no op could use a tensor that is pinned away from the device
            pinned &= home in (None, DEVICE)
            self.tensors[name] = Tensor(name, nbytes, kind, home, ratios, pinned)
        return name

    def home(self) -> str:
        return str(self.draw(self.st.sampled_from(self.tiers)))

    def op(self, name: str, phase: str, reads: Sequence[str], writes: Sequence[str]) -> None:
        extras = self.draw(self.st.sampled_from(_EXTRAS))
        time = durations(self.st)
        operands = tuple(dict.fromkeys((*reads, *writes)))
        in_place = self.draw(some_of(self.st, operands)) if "direct" in extras else ()
        on_host = phase == "update" or "host" in extras
        pure = phase == "forward" and not set(reads) & set(writes)
        self.ops.append(
            Op(
                name,
                phase,
                self.draw(time),
                tuple(reads),
                tuple(writes),
                self.draw(self.st.integers(0, 20)) if "workspace" in extras else 0,
                {t: self.draw(time) for t in in_place},
                self.draw(self.st.none() | time) if on_host else None,
                pure and self.draw(self.st.booleans()),
            )
        )


def _training(parts: _Parts, layers: int) -> None:
    """Draw forward, backward and updates, like a training step."""
    draw, st = parts.draw, parts.st
    source = parts.tensor("x", "input", parts.home())
    weights: list[str] = []
    for i in range(layers):
        tied = bool(weights) and parts.sometimes()
        weight = weights[0] if tied else parts.tensor(f"w{i}", "weight", parts.home())
        weights.append(weight)
        output = parts.tensor(f"a{i}", "activation")
        parts.op(f"F{i}", "forward", (weight, source), (output,))
        source = output
    parts.op("L", "forward", (source,), (parts.tensor("loss", "output"),))
    late: list[str] = []
    for i in reversed(range(layers)):
        weight = weights[i]
        reads = [weight, f"a{i - 1}" if i else "x", *([f"d{i}"] if i + 1 < layers else [])]
        writes = []
        if i:
            kind = draw(st.sampled_from(("temporary", "activation")))
            writes.append(parts.tensor(f"d{i - 1}", kind))
        style = draw(st.sampled_from(("gradient", "frozen", "rotates", "accumulates")))
        if weights.count(weight) > 1:
            style = "gradient"
        if style == "rotates":
            writes.append(weight)
        elif style != "frozen":
            name = f"g{weight[1:]}"
            if style == "accumulates":
                parts.tensor(name, "gradient", parts.home())
            if name in parts.tensors:
                reads.append(name)
            writes.append(parts.tensor(name, "gradient"))
        parts.op(f"B{i}", "backward", reads, writes)
        if style in ("gradient", "accumulates") and i == weights.index(weight):
            late.append(weight)
            if draw(st.booleans()):
                _update(parts, late.pop())
    for weight in late:
        if not parts.sometimes():  # else its gradient is the result of the step
            _update(parts, weight)


def _update(parts: _Parts, weight: str) -> None:
    state = [parts.tensor(f"s{weight[1:]}", "state", parts.home())] * parts.draw(
        parts.st.integers(0, 1)
    )
    parts.op(f"U{weight[1:]}", "update", (weight, f"g{weight[1:]}", *state), (weight, *state))


def _any_ops(parts: _Parts, max_layers: int, steady: bool, readable: bool) -> None:
    """Draw tensors of any kind, and ops that touch any of them."""
    draw, st = parts.draw, parts.st
    for i in range(draw(st.integers(1, 2 * max_layers))):
        home = parts.home() if draw(st.booleans()) else None
        parts.tensor(f"t{i}", draw(st.sampled_from(KINDS)), home)
    alive = {
        t.id
        for t in parts.tensors.values()
        if not readable or (t.kind not in SELF_ENDING_KINDS if steady else t.home is not None)
    }
    some = some_of(st, tuple(parts.tensors))
    for i in range(draw(st.integers(1, 2 * max_layers))):
        reads = [t for t in draw(some) if t in alive]
        writes = draw(some)
        parts.op(f"o{i}", draw(st.sampled_from(PHASES)), reads, writes)
        alive.update(writes)
    written = {t for op in parts.ops for t in op.writes}
    for tensor in tuple(parts.tensors.values()):
        # a tensor that must exist at the end and is never written must exist at the start
        if readable and not steady and tensor.home is None and tensor.id not in written:
            home = DEVICE if tensor.pinned else parts.home()
            parts.tensors[tensor.id] = replace(tensor, home=home)
