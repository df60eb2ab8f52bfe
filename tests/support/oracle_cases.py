"""Small random training steps with plans that often are legal, and mutations of them.

`case(rng)` takes anything with the methods of `random.Random`, so hypothesis can shrink it and
a longer run can use plain seeds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from offcompile.ir import (
    KINDS,
    Codec,
    Direct,
    Drop,
    Lane,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    Recompute,
    SharedLink,
    Start,
    Tensor,
    Tier,
    Update,
)

DURATIONS = (0, 0.0005, 0.5, 1, 1, 2, 2.0015, 3, 4)
SIZES = (1, 1, 2, 3, 4, 5, 7)


def case(rng: Any) -> tuple[Problem, Machine, Plan]:
    """One problem, a machine without limits, and a plan, often legal."""
    if rng.random() < 0.1:
        return tides(rng)
    steady = rng.random() < 0.7
    if rng.random() < 0.6:
        problem = training_chain(rng, rng.randint(1, 3), steady)
    else:
        problem = soup(rng, steady)
    machine = small_machine(rng)
    plan = Planner(rng, problem, machine).plan()
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        plan = mutate(rng, problem, machine, plan)
    return problem, machine, plan


def small_machine(rng: Any) -> Machine:
    lanes = [
        Lane("h2d", "host", "device", rng.choice((0.5, 1, 2, 3)), rng.choice((0, 0, 0.5, 1))),
        Lane("d2h", "device", "host", rng.choice((0.5, 1, 2, 3)), rng.choice((0, 0, 0.5, 1))),
        Lane("read", "disk", "host", rng.choice((0.5, 1)), rng.choice((0, 2))),
        Lane("write", "host", "disk", rng.choice((0.5, 1)), rng.choice((0, 2))),
    ]
    if rng.random() < 0.2:
        lanes.append(Lane("h2d_b", "host", "device", 1))
    rng.shuffle(lanes)
    codecs = (Codec("half", False, rng.choice((1, 3, 100))),)
    tiers = Tier("device"), Tier("host"), Tier("disk")
    return Machine(tiers, tuple(lanes), codecs, shared_links(rng, [lane.name for lane in lanes]))


def shared_links(rng: Any, lanes: list[str]) -> tuple[SharedLink, ...]:
    """Mostly none; else one or two that lanes and accesses of the host have to share."""

    def flag() -> bool:
        return bool(rng.random() < 0.5)

    return tuple(
        SharedLink(
            f"link{i}",
            rng.choice((0.3, 0.5, 1, 2, 3, 5)),
            tuple(name for name in lanes if flag()),
            *(flag() for _ in range(3)),
        )
        for i in range(rng.choice((0, 0, 0, 1, 1, 2)))
    )


def training_chain(rng: Any, layers: int, steady: bool) -> Problem:
    """Forward, backward and updates of a chain, each layer with its own habits."""
    tensors: list[Tensor] = []
    ops: list[Op] = []

    def tensor(name: str, kind: str, home: str | None) -> str:
        ratios = {"half": rng.choice((0.5, 0.3))}
        tensors.append(Tensor(name, rng.choice(SIZES), kind, home, ratios))
        return name

    def op(name: str, phase: str, reads: list[str], writes: list[str]) -> None:
        shared = {t: rng.choice(DURATIONS) for t in reads + writes if rng.random() < 0.5}
        host = rng.choice((None, 1, 2.5, 4)) if phase == "update" else None
        work = rng.choice((0, 0, 0, 1, 3))
        ops.append(
            Op(
                name,
                phase,
                rng.choice(DURATIONS),
                tuple(reads),
                tuple(writes),
                work,
                shared,
                host,
                phase == "forward",
            )
        )

    home = ["device", "host", "host", "disk"]
    before = [tensor("x", "input", rng.choice(home))]
    fused = [rng.random() < 0.4 for _ in range(layers)]
    for i in range(layers):
        tensor(f"w{i}", "weight", rng.choice(home))
        before.append(tensor(f"a{i}", "activation", None))
        op(f"F{i}", "forward", [before[-2], f"w{i}"], [before[-1]])
    late: list[int] = []
    for i in reversed(range(layers)):
        reads = [f"w{i}", before[i]] + ([f"d{i + 1}"] if i + 1 < layers else [before[i + 1]])
        if rng.random() < 0.5 and before[i + 1] not in reads:
            reads.append(before[i + 1])
        writes = [tensor(f"d{i}", "temporary", None)]
        if fused[i]:
            writes.append(f"w{i}")
        else:
            writes.append(tensor(f"g{i}", "gradient", None))
        op(f"B{i}", "backward", reads, writes)
        if not fused[i] and rng.random() < 0.9:
            tensor(f"s{i}", "state", rng.choice(home))
            if rng.random() < 0.5:
                late.append(i)
            else:
                op(f"U{i}", "update", [f"g{i}", f"w{i}", f"s{i}"], [f"w{i}", f"s{i}"])
    for i in late:
        op(f"U{i}", "update", [f"g{i}", f"w{i}", f"s{i}"], [f"w{i}", f"s{i}"])
    if rng.random() < 0.3:
        op("L", "forward", [f"w{layers - 1}"], [tensor("y", "output", None)])
    return Problem(tuple(tensors), tuple(ops), steady)


def soup(rng: Any, steady: bool) -> Problem:
    """A few ops that read and write a few tensors of any kind, in no order of training."""
    ids = [f"t{i}" for i in range(rng.randint(1, 4))]
    homes = (None, "device", "host", "disk")
    tensors = tuple(
        Tensor(t, rng.choice(SIZES), rng.choice(KINDS), rng.choice(homes), {"half": 0.5})
        for t in ids
    )
    ops = []
    for i in range(rng.randint(1, 6)):
        reads = [t for t in ids if rng.random() < 0.4]
        writes = [t for t in ids if rng.random() < 0.35]
        ops.append(
            Op(
                f"O{i}",
                rng.choice(("forward", "backward", "update")),
                rng.choice(DURATIONS),
                tuple(reads),
                tuple(writes),
                rng.choice((0, 0, 1, 3)),
                {t: rng.choice(DURATIONS) for t in reads + writes if rng.random() < 0.6},
                rng.choice((None, *DURATIONS)),
                rng.random() < 0.5,
            )
        )
    return Problem(tensors, tuple(ops), steady)


def tides(rng: Any) -> tuple[Problem, Machine, Plan]:
    """Chains of wrapped moves over several lanes: steps that settle late, by turns or never."""
    count = rng.randint(2, 5)
    ids = [f"x{i}" for i in range(count)]
    tensors = tuple(Tensor(t, rng.choice(SIZES), "input") for t in ids)
    ops = tuple(Op(f"O{i}", "forward", rng.choice(DURATIONS)) for i in range(rng.randint(1, 3)))
    lanes = tuple(Lane(f"l{i}", "device", "host", rng.choice((0.5, 1, 1, 2))) for i in range(count))
    moves: list[Move] = []
    for i, t in enumerate(ids):
        after = rng.choice([None, ops[0].id, *(m.id for m in moves[-1:] * 4)])
        awaited = rng.choice([None, None, *(o.id for o in ops)])
        lane = rng.choice(lanes[: i + 1]).name if rng.random() < 0.3 else f"l{i}"
        wraps = rng.random() < 0.9
        if not wraps:
            awaited = None
        moves.append(Move(f"m{i}", t, "device", "host", lane, after, awaited, wraps))
    drops = tuple(Drop(m.tensor, "host", rng.choice((m.id, moves[-1].id))) for m in moves)
    plan = Plan(tuple(Start(t, "device") for t in ids), tuple(moves), drops)
    machine = Machine((Tier("device"), Tier("host"), Tier("disk")), lanes)
    return Problem(tensors, ops, True), machine, plan


@dataclass
class Planner:
    """Walks each tensor's accesses and makes them legal, with random detours."""

    rng: Any
    problem: Problem
    machine: Machine
    moves: list[tuple[float, Move]] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    start: list[Start] = field(default_factory=list)

    def plan(self) -> Plan:
        rng, ops = self.rng, self.problem.ops
        self.leaves = rng.choice((0.1, 0.5, 0.9))
        recomputes = [
            Recompute(o.id, b.id)
            for i, o in enumerate(ops)
            for b in ops[i + 1 :]
            if o.recompute and b.phase == "backward" and set(o.writes) & set(b.reads)
            if rng.random() < 0.15
        ]
        directs = [Direct(o.id, t) for o in ops for t in sorted(o.direct) if rng.random() < 0.15]
        written = dict.fromkeys(t for o in ops if o.phase == "update" for t in o.writes)
        written = [t for t in written if self.problem.tensor[t].kind == "weight"]
        moved = [w for w in written if rng.random() < 0.5]
        writers = {w: [o for o in ops if o.phase == "update" and w in o.writes] for w in moved}
        moved = [w for w in moved if all(o.host_duration_us is not None for o in writers[w])]
        hosted = {o.id for w in moved for o in writers[w]}
        directs = [d for d in directs if d.op not in hosted]
        recomputes = [r for r in recomputes if not {r.op, r.before} & hosted]
        direct = {(d.op, d.tensor) for d in directs}
        self.names: list[str] = []
        runs: list[tuple[str, Op]] = []
        for o in ops:
            runs += [(r.id, self.problem.op[r.op]) for r in recomputes if r.before == o.id]
            runs.append((o.id, o))
        self.names = [name for name, _ in runs]
        for t in self.problem.tensors:
            accesses = []
            for at, (name, o) in enumerate(runs):
                if t.id in o.operands:
                    away = name in hosted or (o.id, t.id) in direct
                    accesses.append((at, o, "host" if away else "device"))
            self.walk(t, accesses)
        self.moves.sort(key=lambda pair: pair[0])
        return Plan(
            tuple(self.start),
            tuple(m for _, m in self.moves),
            tuple(self.drops),
            tuple(directs),
            tuple(recomputes),
            tuple(Update(w, "host") for w in moved),
        )

    def begins_on(self, t: Tensor, accesses: list[tuple[int, Op, str]]) -> set[str]:
        if not self.problem.steady:
            return {t.home} if t.home else set()
        if t.kind in ("weight", "state", "input"):
            return set(
                self.rng.choice((["host"], ["host"], ["device"], ["host", "device"], ["disk"]))
            )
        if t.kind == "output" or (t.kind == "gradient" and t.id not in self.problem.read_ids):
            return {self.rng.choice(("device", "host"))} if accesses else set()
        if accesses and t.id in accesses[0][1].reads:
            return {self.rng.choice(("device", "host"))}
        return set()

    def walk(self, t: Tensor, accesses: list[tuple[int, Op, str]]) -> None:
        rng = self.rng
        begin = self.begins_on(t, accesses)
        valid, self.packed = set(begin), None
        packs = t.kind in ("activation", "temporary", "gradient") and rng.random() < 0.3
        packs = packs or (not self.problem.steady and rng.random() < 0.1)
        packs = packs and all(tier == "device" for _, _, tier in accesses)
        self.behind, self.last = -1.0, None
        self.start += [Start(t.id, tier) for tier in sorted(begin)]
        wrapped = self.problem.steady and rng.random() < 0.3
        floor = 0
        for k, (at, op, tier) in enumerate(accesses):
            name = self.names[at]
            if t.id in op.reads and tier not in valid and valid:
                self.bring(t, valid, tier, rng.randint(floor, at), name, packs=packs)
            if t.id in op.writes:
                valid = {tier}
                self.packed = None
            floor = at + 1
            later = accesses[k + 1 :] or (accesses if self.problem.steady else [])
            dead = not later or t.id not in later[0][1].reads
            if dead and t.kind in ("activation", "temporary"):
                valid = set()
            elif dead and t.kind in ("input", "gradient") and rng.random() < 0.95:
                if not (k + 1 == len(accesses) and begin):
                    self.drops += [Drop(t.id, x, name) for x in sorted(valid)]
                    valid = set()
            elif rng.random() < self.leaves and tier in valid:
                away = "host" if tier == "device" else rng.choice(("device", "disk"))
                after = name
                if len(valid) == 1:
                    after = rng.choice(
                        (self.bring(t, valid, away, at + 1, None, packs=packs), name)
                    )
                self.drops.append(Drop(t.id, tier, after))
                valid.discard(tier)
        if not self.problem.steady or not valid:
            return
        for tier in sorted(begin - valid):
            if tier in valid:  # left there on the way to another tier
                continue
            awaited = None
            if accesses and rng.random() < 0.7:
                awaited = self.names[accesses[0][0]]
            lands = rng.randint(floor, len(self.names))
            self.bring(t, valid, tier, lands, awaited if wrapped else None, wraps=wrapped)
        after = self.last if self.behind >= floor else self.names[max(floor - 1, 0)]
        self.drops += [Drop(t.id, x, after) for x in sorted(valid - begin)]

    def bring(
        self,
        t: Tensor,
        valid: set[str],
        target: str,
        at: int,
        awaited: str | None,
        *,
        packs: bool = False,
        wraps: bool = False,
    ) -> str:
        """Moves that take the tensor to `target`, started before the run at `at`."""
        source = "host" if "host" in valid else sorted(valid)[0]
        after = self.names[at - 1] if at else None
        through = []
        if {source, target} == {"device", "disk"}:
            through = ["host"]
        name = ""
        for stop in [*through, target]:
            lanes = [x for x in self.machine.lanes if (x.source, x.target) == (source, stop)]
            lane = self.rng.choice(lanes).name
            codec = self.packed if source != "device" else ("half" if packs else None)
            if stop == "host" or stop == "disk":
                self.packed = codec
            name = f"m{len(self.moves)}"
            ready = awaited if stop == target else None
            move = Move(name, t.id, source, stop, lane, after, ready, wraps, codec)
            jitter = self.rng.random() * (1.5 if self.rng.random() < 0.04 else 0.9)
            self.behind = max(self.behind + 0.001, at + jitter)
            self.moves.append((self.behind, move))
            self.last = name
            valid.add(stop)
            if stop != target and self.rng.random() < 0.7:
                self.drops.append(Drop(t.id, stop, f"m{len(self.moves)}"))
                valid.discard(stop)
            source, after = stop, name
        return name


def mutate(rng: Any, problem: Problem, machine: Machine, plan: Plan) -> Plan:
    """The plan with one thing changed."""
    runs = [o.id for o in problem.ops] + [r.id for r in plan.recomputes]
    names = [None, *runs, *(m.id for m in plan.moves)]
    moves, drops = list(plan.moves), list(plan.drops)
    what = rng.randint(0, 9)
    at = rng.randrange(len(moves)) if moves else None
    if what == 0 and at is not None:
        del moves[at]
        gone = plan.moves[at].id
        moves = [replace(m, start_after=None) if m.start_after == gone else m for m in moves]
        drops = [replace(d, after=None) if d.after == gone else d for d in drops]
    elif what == 1 and at is not None:
        moves.insert(rng.randint(0, len(moves)), moves.pop(at))
    elif what == 2 and at is not None:
        moves[at] = replace(moves[at], start_after=rng.choice(names))
    elif what == 3 and at is not None:
        moves[at] = replace(moves[at], ready_before=rng.choice([None, *runs]))
    elif what == 4 and at is not None and problem.steady:
        moves[at] = replace(moves[at], wraps=not moves[at].wraps)
    elif what == 5 and drops:
        del drops[rng.randrange(len(drops))]
    elif what == 6 and drops:
        here = rng.randrange(len(drops))
        drops[here] = replace(drops[here], after=rng.choice(names))
    elif what == 7:
        t, tier = rng.choice(problem.tensors).id, rng.choice(machine.tiers).name
        drops.append(Drop(t, tier, rng.choice(names)))
    elif what == 8:
        lane, t = rng.choice(machine.lanes), rng.choice(problem.tensors).id
        where = (lane.source, lane.target, lane.name)
        wraps = problem.steady and rng.random() < 0.3
        after, ready = rng.choice(names), rng.choice([None, None, *runs])
        extra = Move(f"e{rng.random()}", t, *where, after, ready, wraps)
        moves.insert(rng.randint(0, len(moves)), extra)
    elif what == 9 and problem.steady:
        t, tier = rng.choice(problem.tensors).id, rng.choice(machine.tiers).name
        flip = Start(t, tier)
        start = [s for s in plan.start if s != flip]
        plan = replace(plan, start=tuple(start if flip in plan.start else [*start, flip]))
    return replace(plan, moves=tuple(moves), drops=tuple(drops))
