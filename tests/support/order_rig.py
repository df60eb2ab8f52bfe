"""Executes static orders by the contract's rules, on lanes of any speed, and checks their laws.

It shares no code with the module under test.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

from offcompile.ir import (
    DEVICE,
    HOST,
    SELF_ENDING_KINDS,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    Timeline,
)
from offcompile.planning.order import Order, RunStep, WaitStep, static_order
from offcompile.planning.order import StartStep as Begin

# ---- a program that knows nothing of the module under test ---------------------------------


class Rig:
    """Executes an order by the contract's own rules for copies, with lanes of any speed.

    A move is *done* when its lane gets round to it, which a Wait forces. The program knows that a
    move is done once it has waited for it, or for one that must follow it; only then may memory be
    freed, so the bytes counted are the most there can be. Off the device nothing is freed.
    """

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        plan: Plan,
        timeline: Timeline,
        order: Order,
        rng: random.Random,
        eager: float,
    ) -> None:
        self.problem, self.machine, self.plan, self.order = problem, machine, plan, order
        self.rng, self.eager = rng, eager
        self.moves = {m.id: m for m in plan.moves}
        self.span = {s.id: s for s in timeline.spans}
        self.place = {s.id: i for i, s in enumerate(timeline.spans)}
        self.on_host = {
            o.id
            for o in problem.ops
            if o.phase == "update"
            and {u.weight for u in plan.updates if u.where == HOST} & set(o.writes)
        }
        self.directs = {(d.op, d.tensor) for d in plan.directs}
        self.queues: dict[str, list[str]] = {x.name: [] for x in machine.lanes}
        self.done: set[str] = set()
        self.waited: set[str] = set()
        self.known: set[str] = set()
        self.begun: set[str] = set()
        self.ran: list[str] = []
        # (tensor, tier) → what filled it last: a move's id, or None for a run or the start
        self.copies: dict[tuple[str, str], str | None] = {}
        self.valid: set[tuple[str, str]] = set()
        self.source: dict[str, str | None] = {}  # move → the move that its source comes from
        self.using: dict[str, set[str]] = {}  # tensor → moves at its device copy
        self.asked: set[str] = set()
        self.born: dict[str, str] = {}  # tensor → the run or move that its device copy came with
        self.used = self.peak = 0
        self.accesses: dict[str, list[bool]] = {t.id: [] for t in problem.tensors}
        again = Counter(r.before for r in plan.recomputes)
        for op in problem.ops:
            before = [r.op for r in plan.recomputes if r.before == op.id] if again[op.id] else []
            for name in (*before, op.id):
                for t in problem.op[name].operands:
                    self.accesses[t].append(t not in problem.op[name].reads)
        self.touched = Counter[str]()
        runs = [s.id for s in timeline.spans if s.id not in self.moves]
        self.writers = {
            t.id: [x for x in runs if t.id in op_of(problem, x).writes] for t in problem.tensors
        }
        for s in plan.start:
            self.hold(s.tensor, s.tier, None)
            self.valid.add((s.tensor, s.tier))
        self.ask(None)
        self.sweep()

    # copies

    def tier_of(self, run: str, tensor: str) -> str:
        op = op_of(self.problem, run)
        direct = run in self.on_host or (op.id, tensor) in self.directs
        return HOST if direct else DEVICE

    def take(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        capacity = self.machine.tier[DEVICE].capacity_bytes
        assert capacity is None or self.used <= capacity

    def hold(self, tensor: str, tier: str, by: str | None, event: str = "") -> None:
        if tier == DEVICE and (tensor, tier) not in self.copies:
            self.take(self.problem.tensor[tensor].nbytes)
            self.born[tensor] = event
        self.copies[tensor, tier] = by

    def over(self, tensor: str) -> bool:
        rest = self.accesses[tensor][self.touched[tensor] :]
        return not rest or rest[0]

    def ask(self, after: str | None) -> None:
        for d in self.plan.drops:
            if d.tier != DEVICE or d.after != after:
                continue
            # the copy that was there, or was coming, when the simulation asked for the drop
            coming = [m.id for m in self.plan.moves if m.tensor == d.tensor and m.target == DEVICE]
            event = self.born.get(d.tensor) if (d.tensor, DEVICE) in self.copies else None
            events = [event] if event is not None else [m for m in coming if m not in self.begun]
            if any(self.earlier(x, after) for x in events):
                self.asked.add(d.tensor)

    def earlier(self, event: str, ended: str | None) -> bool:
        """True if the event started before the other ended, in the simulation."""
        if not event or ended is None:
            return not event
        first, second = self.span[event], self.span[ended]
        return first.start_ns < second.end_ns or self.place[event] <= self.place[ended]

    def next_is_out(self, tensor: str) -> bool:
        """True if a move to come reads this copy: drops off the device, which might otherwise
        have been what kept the copy so long, are not followed here."""
        comes: list[tuple[int, bool]] = []
        for m in self.plan.moves:
            if m.tensor == tensor and DEVICE in (m.source, m.target) and m.id not in self.begun:
                comes.append((self.place[m.id], m.source == DEVICE))
        for name in self.writers[tensor]:
            if name not in self.ran:
                comes.append((self.place[name], False))
        return min(comes, default=(0, False))[1]

    def knows(self, place: tuple[str, str]) -> bool:
        by = self.copies.get(place)
        return place in self.valid and (by is None or by in self.known)

    def sweep(self) -> None:
        """Free what the program knows to be spare."""
        for tensor in [t for t, tier in self.copies if tier == DEVICE]:
            place = (tensor, DEVICE)
            if self.using.get(tensor, set()) - self.waited or self.next_is_out(tensor):
                continue
            dead = self.problem.tensor[tensor].kind in SELF_ENDING_KINDS
            dead = dead and self.touched[tensor] > 0 and self.over(tensor)
            spare = any(self.knows(p) for p in self.copies if p[0] == tensor and p != place)
            spare |= not self.problem.must_survive(tensor) and self.over(tensor)
            if dead or (tensor in self.asked and spare):
                del self.copies[place]
                self.valid.discard(place)
                self.using.pop(tensor, None)
                self.asked.discard(tensor)
                self.used -= self.problem.tensor[tensor].nbytes

    # steps

    def run(self) -> None:
        for step in self.order.steps:
            while self.rng.random() < self.eager and self.finish_one():
                pass
            if isinstance(step, RunStep):
                self.execute(step.name)
            elif isinstance(step, Begin):
                self.begin(self.moves[step.move])
            else:
                self.wait(step.move)
        while self.finish_one():
            pass
        assert self.done == set(self.moves)

    def execute(self, name: str) -> None:
        op, done = op_of(self.problem, name), self.done
        for t in op.operands:
            self.touched[t] += 1
        for t in op.reads:
            place = (t, self.tier_of(name, t))
            assert place in self.valid, f"{name} reads {place}, which is not there"
            by = self.copies[place]
            assert by is None or by in self.waited, f"{name} reads {place} before it has come"
        for t in op.writes:
            under_way = [m for m in self.begun - done if self.moves[m].tensor == t]
            assert not [m for m in under_way if m not in self.waited], f"{name} writes {t} too soon"
        for t in op.writes:
            self.valid -= {p for p in self.copies if p[0] == t}
            self.hold(t, self.tier_of(name, t), None, name)
        workspace = 0 if name in self.on_host else op.workspace_bytes
        self.take(workspace)
        assert self.used <= self.order.device_bytes[len(self.ran)]
        self.used -= workspace
        for t in op.writes:
            self.valid.add((t, self.tier_of(name, t)))
        self.ran.append(name)
        self.ask(name)
        self.sweep()

    def begin(self, move: Move) -> None:
        source, target = (move.tensor, move.source), (move.tensor, move.target)
        assert source in self.valid, f"{move.id} has nothing to move"
        if move.target == DEVICE:
            assert target not in self.valid, f"{move.id} brings what is there"
        after = move.start_after
        assert after is None or after in self.ran or after in self.begun
        self.begun.add(move.id)
        self.queues[move.lane].append(move.id)
        self.source[move.id] = self.copies[source]
        self.hold(move.tensor, move.target, move.id, move.id)
        self.valid.add(target)  # what needs it waits for the move
        if DEVICE in (move.source, move.target):
            self.using.setdefault(move.tensor, set()).add(move.id)

    def behind(self, move: str) -> Iterator[str]:
        """List what must be done before the move."""
        after, source = self.moves[move].start_after, self.source[move]
        yield from (x for x in (after, source) if x in self.moves and x is not None)

    def finish_one(self) -> bool:
        heads = [q[0] for q in self.queues.values() if q]
        ready = [m for m in heads if all(b in self.done for b in self.behind(m))]
        if not ready:
            return False
        move = self.rng.choice(ready)
        self.queues[self.moves[move].lane].pop(0)
        self.done.add(move)
        return True

    def wait(self, move: str) -> None:
        assert move in self.begun and move not in self.waited
        while move not in self.done:
            assert self.finish_one(), f"the lanes stand still before {move}"
        self.waited.add(move)
        self.learn(move)
        self.sweep()
        self.ask(move)
        self.sweep()

    def learn(self, move: str) -> None:
        todo = [move]
        while todo:
            x = todo.pop()
            if x not in self.known:
                self.known.add(x)
                todo += self.behind(x)


def check(problem: Problem, machine: Machine, plan: Plan, timeline: Timeline) -> Order:
    """Every law, on one plan; the order."""
    order = static_order(problem, machine, plan, timeline)
    assert order == static_order(problem, machine, plan, timeline)
    laws_of_steps(problem, machine, plan, timeline, order)
    for seed, eager in enumerate((0.0, 0.0, 0.4, 0.8, 1.0)):
        rig = Rig(problem, machine, plan, timeline, order, random.Random(seed), eager)
        rig.run()
        assert rig.peak <= order.peak_bytes
    return order


# ---- what the steps themselves must be -----------------------------------------------------


def laws_of_steps(
    problem: Problem, machine: Machine, plan: Plan, timeline: Timeline, order: Order
) -> None:
    span = {s.id: s for s in timeline.spans}
    moves = {m.id: m for m in plan.moves}
    runs = [s.id for s in timeline.spans if s.id not in moves]
    steps = order.steps
    assert [s.name for s in steps if isinstance(s, RunStep)] == runs
    assert order.forward() + order.backward() == steps
    starts = {s.move: i for i, s in enumerate(steps) if isinstance(s, Begin)}
    waits = {s.move: i for i, s in enumerate(steps) if isinstance(s, WaitStep)}
    ran = {s.name: i for i, s in enumerate(steps) if isinstance(s, RunStep)}
    assert len(starts) + len(waits) + len(ran) == len(steps)
    assert starts.keys() == moves.keys()
    assert all(starts[m] < waits[m] for m in waits)

    # how many runs stand before each step, and before each move in the simulation
    before = [0]
    for s in steps:
        before.append(before[-1] + isinstance(s, RunStep))
    place = {s.id: i for i, s in enumerate(timeline.spans)}
    late = only_backward(problem, plan, timeline, runs)
    for m in plan.moves:
        after = m.start_after
        assert after is None or (ran | starts)[after] < starts[m.id]
        writers = [
            r for r in runs if place[r] < place[m.id] and m.tensor in op_of(problem, r).writes
        ]
        readers = [  # of a copy that was on the target before
            r for r in runs if place[r] < place[m.id] and m.tensor in op_of(problem, r).operands
        ]
        assert all(ran[r] < starts[m.id] for r in writers)
        if m.target == DEVICE:
            simulated = sum(place[r] < place[m.id] for r in runs)
            assert simulated - 1 <= before[starts[m.id]]
            if m.id in late:
                assert starts[m.id] >= len(order.forward())
            else:
                assert before[starts[m.id]] <= simulated or starts[m.id] >= len(order.forward())
        elif after in ran:
            # nothing but other starts since its trigger, or since its lane or tensor was free
            enabled = [
                ran[after],
                *(ran[r] for r in readers if m.target == HOST),
                *(ran[r] for r in writers),
            ]
            enabled += [
                starts[x.id]
                for x in plan.moves
                if starts[x.id] < starts[m.id] and (x.lane == m.lane or x.tensor == m.tensor)
            ]
            assert all(isinstance(s, Begin) for s in steps[max(enabled) + 1 : starts[m.id]])
        if m.ready_before is not None:
            assert waits[m.id] < ran[m.ready_before]
    for lane in machine.lanes:
        for part in (order.forward(), order.backward()):
            here = {s.move for s in part if isinstance(s, Begin)}
            listed = [m.id for m in plan.moves if m.lane == lane.name and m.id in here]
            assert listed == sorted(listed, key=starts.__getitem__)

    # where lanes keep to their times no wait costs any
    for m, at in waits.items():
        following = next((s.name for s in steps[at:] if isinstance(s, RunStep)), None)
        assert following is None or span[m].end_ns <= span[following].start_ns
    capacity = machine.tier[DEVICE].capacity_bytes
    if capacity is None:
        for m, at in waits.items():
            assert wanted_next(problem, plan, moves[m], steps[at + 1 :])
    assert capacity is None or order.peak_bytes <= capacity
    assert order.peak_bytes >= max(order.device_bytes, default=0)
    assert len(order.device_bytes) == len(runs)
    for tier in machine.tiers[1:]:
        assert order.tier_bytes[tier.name] >= timeline.peak_bytes[tier.name]


def op_of(problem: Problem, run: str) -> Op:
    return problem.op[run if run in problem.op else run.rpartition("@")[0]]


def wanted_next(problem: Problem, plan: Plan, move: Move, rest: Sequence[object]) -> bool:
    """True if what follows needs the move complete, space aside: the next run uses its tensor or
    is named, or a start before that brings back what had to go by then."""
    concerned = {move.tensor} | {d.tensor for d in plan.drops if d.after == move.id}
    for s in rest:
        if isinstance(s, RunStep):
            used = concerned.intersection(op_of(problem, s.name).operands)
            return bool(used) or move.ready_before == s.name
        if isinstance(s, Begin) and any(
            m.id == s.move and m.tensor in concerned for m in plan.moves
        ):
            return True
    return False


def only_backward(problem: Problem, plan: Plan, timeline: Timeline, runs: list[str]) -> set[str]:
    """Loads that no forward run has a use for, and nothing in the plan waits for by name."""
    forward = [r for r in runs if r in problem.op and problem.op[r].phase == "forward"]
    if not forward or forward[-1] == runs[-1]:
        return set()
    place = {s.id: i for i, s in enumerate(timeline.spans)}
    ahead = runs[: runs.index(forward[-1]) + 1]
    named = {m.start_after for m in plan.moves} | {d.after for d in plan.drops}
    found = set()
    for m in plan.moves:
        touched = [
            r for r in ahead if place[r] > place[m.id] and m.tensor in op_of(problem, r).operands
        ]
        moved = [x for x in plan.moves if x.tensor == m.tensor and place[x.id] > place[m.id]]
        dropped = [
            d
            for d in plan.drops
            if d.tensor == m.tensor
            and d.tier == DEVICE
            and d.after in ahead
            and timeline_end(timeline, d.after) >= timeline_start(timeline, m.id)
        ]
        awaited = m.id in named or m.ready_before in ahead
        if m.target == DEVICE and not (awaited or touched or moved or dropped):
            found.add(m.id)
    return found


def timeline_end(timeline: Timeline, name: str) -> int:
    return next(s.end_ns for s in timeline.spans if s.id == name)


def timeline_start(timeline: Timeline, name: str) -> int:
    return next(s.start_ns for s in timeline.spans if s.id == name)
