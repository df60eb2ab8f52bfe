"""The auditor: goes through a record instant by instant with books of its own.

At each instant completions and frees come first, then the compute lane, host updates, and the
lanes as listed. What the record starts is checked against everything the contract makes it
wait for, then done as recorded; what could have started and did not is a fault too, since
nothing idles on its own account. Frees are held to the same two questions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from offcompile.ir.errors import Violation
from offcompile.ir.model import DEVICE, HOST, SELF_ENDING_KINDS, Machine, Problem
from offcompile.ir.plan import Freed, Move, Plan, Timeline

from .ending import Leftover, check_end
from .ledger import Ledger, Place
from .order import Run, arrives_as, executed, start_codecs, touches
from .record import Key, Task
from .waits import Waits

ENOUGH = 40  # findings after which the rest would only be consequences


class Replay:
    """One pass over a record whose spans are whole and in order (`check_record`)."""

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        plan: Plan,
        timeline: Timeline,
        todo: dict[str, list[Task]],
    ) -> None:
        self.problem, self.plan, self.timeline = problem, plan, timeline
        self.found: list[Violation] = []
        self.states: list[object] = []  # at the end of each step
        self._lanes = {name: deque(tasks) for name, tasks in todo.items()}
        self._running: dict[str, Task] = {}  # by lane
        self._touches = touches(executed(problem, plan))
        self._touched: dict[str, int] = {}  # touches of each tensor started in this step
        self._pending: dict[Place, None] = {}  # drops asked for, in order
        self._dying: set[str] = set()  # self-ending tensors whose value nobody needs any more
        self._step = -1
        self._open: list[int] = [0] * (len(timeline.steps) + 1)  # what each step's end awaits
        for tasks in todo.values():
            for task in tasks:
                self._open[task.step + task.wraps] += 1
        self._arriving: dict[Key, Move] = {}  # wrapped moves of this step, not yet there
        self._wrapped = [m for m in plan.moves if m.wraps]
        self._asks: dict[str | None, list[Place]] = {}
        for drop in plan.drops:
            self._asks.setdefault(drop.after, []).append((drop.tensor, drop.tier))
        self._freed: dict[int, list[Freed]] = {}
        for freed in timeline.freed:
            self._freed.setdefault(freed.time_ns, []).append(freed)
        self._noted: set[object] = set()
        self.books = Ledger(problem, machine)
        self._waits = Waits(plan, self.books, self._touches, self._running)
        for place, codec in start_codecs(problem, plan).items():
            self.books.hold(place, codec, valid=True)

    def run(self) -> None:
        spans = self.timeline.spans
        times = {x for s in spans for x in (s.start_ns, s.end_ns)}
        times |= self._freed.keys() | {x for step in self.timeline.steps for x in step}
        self._begin_step()
        for now in sorted(times):
            self._instant(now)
            for freed in self._freed.pop(now, ()):
                self._fault(*self._why_kept(freed), freed)
                if self.books.get((freed.tensor, freed.tier)) is not None:
                    self._release((freed.tensor, freed.tier))
            if self._over or len(self.found) >= ENOUGH:
                break
        for late in (f for several in self._freed.values() for f in several):
            self._fault("bad-value", "freed after the last step has ended", late)

    @property
    def _over(self) -> bool:
        return self._step == len(self.timeline.steps)

    # one instant

    def _instant(self, now: int) -> None:
        """Everything that happens at `now`, until nothing more does."""
        while not self._over and len(self.found) < ENOUGH:
            if self._complete(now) or self._frees(now) or self._end_step(now):
                continue
            if not (self._start_ready(now) or self._start_forced(now)):
                return

    def _complete(self, now: int) -> bool:
        ended = [t for t in self._running.values() if t.span is not None and t.span.end_ns <= now]
        for task in ended:
            del self._running[task.lane]
            self._open[task.step + task.wraps] -= 1
            self._waits.ended.add((task.step, task.id))
            if task.run is not None:
                self._finish_run(task.run)
            elif task.move is not None:
                self._finish_move(task.step, task.move)
            self._ask(task.id)
        return bool(ended)

    def _finish_run(self, run: Run) -> None:
        for tensor in run.op.operands:
            copy = self.books.get((tensor, run.tier_of(tensor)))
            if copy is not None:
                copy.users -= 1
                if tensor in run.op.writes:
                    copy.valid = True
            kind = self.problem.tensor[tensor].kind
            if kind in SELF_ENDING_KINDS and not self._read_again(tensor):
                self._dying.add(tensor)
        self.books.take(HOST if run.on_host else DEVICE, -run.op.workspace_bytes)

    def _finish_move(self, step: int, move: Move) -> None:
        for tier in (move.source, move.target):
            copy = self.books.get((move.tensor, tier))
            if copy is not None:
                copy.users -= 1
                copy.valid |= tier == move.target
        self._arriving.pop((step, move.id), None)

    def _ask(self, after: str | None) -> None:
        """The drops that `after` triggers; one of a copy that is not there does nothing."""
        for place in self._asks.get(after, ()):
            if self.books.get(place) is not None:
                self._pending[place] = None

    # frees

    def _read_again(self, tensor: str) -> bool:
        """Whether an op that has not started reads `tensor` before one writes it anew."""
        several = self._touches.get(tensor, ())
        done = self._touched.get(tensor, 0)
        if done < len(several):
            return several[done].reads
        return self.problem.steady and bool(several) and several[0].reads

    def _spare(self, tensor: str) -> bool:
        """Whether a drop may take the last valid copy: the second ground of the contract."""
        return not self.problem.must_survive(tensor) and not self._read_again(tensor)

    def _grounds(self, place: Place) -> set[str]:
        """The causes for which the copy may be freed now."""
        copy = self.books.get(place)
        if copy is None or copy.users:
            return set()
        grounds = {"death"} if place[0] in self._dying else set()
        if place in self._pending:
            others = (c.valid for tier, c in self.books.of(place[0]).items() if tier != place[1])
            if any(others) or self._spare(place[0]):
                grounds.add("drop")
        return grounds

    def _frees(self, now: int) -> bool:
        recorded = self._freed.get(now, [])
        for freed in recorded:
            place = (freed.tensor, freed.tier)
            if freed.cause in self._grounds(place):
                recorded.remove(freed)
                self._release(place)
                return True
        dead = [(t, tier) for t in self._dying for tier in self.books.of(t)]
        for place in (*self._pending, *dead):
            grounds = self._grounds(place)
            if grounds and place not in self._noted:
                self._noted.add(place)
                detail = f"could be freed at {now} ns ({', '.join(sorted(grounds))}) and was not"
                self._note("bad-value", f"{place[0]} on {place[1]}", detail)
        return False

    def _release(self, place: Place) -> None:
        self.books.free(place)
        if not self.books.of(place[0]):
            self._dying.discard(place[0])
        by_drop = place in self._pending
        self._pending.pop(place, None)
        self._waits.dropped[place] = by_drop

    def _why_kept(self, freed: Freed) -> tuple[str, str]:
        """The rule that a free breaks which nothing here explains."""
        place = (freed.tensor, freed.tier)
        copy = self.books.get(place)
        if copy is None:
            return "bad-value", "freed, but no copy is there"
        if copy.users:
            return "read-after-drop", "freed while an op or a move uses it"
        if freed.cause == "drop" and place in self._pending:
            if self.problem.must_survive(freed.tensor):
                return "missing-write-back", "dropped while no other valid copy is complete"
            return "lost", "dropped while its value is still to be read and held nowhere else"
        if freed.cause == "death" and self._read_again(freed.tensor):
            return "read-after-drop", "died although an op still reads its value"
        return "bad-value", f"freed as {freed.cause!r}, for which there is no ground"

    # ends of steps

    def _begin_step(self) -> None:
        self._step += 1
        self._waits.step = self._step
        self._touched.clear()
        if not self._over:
            self._arriving.update({(self._step, m.id): m for m in self._wrapped})
            self._ask(None)

    def _end_step(self, now: int) -> bool:
        if self._open[self._step]:
            return False
        left = Leftover(
            valid={p: c.codec for p, c in self.books.places() if c.valid},
            pending=tuple(p for p in self._pending if self.books.get(p) is not None),
            arriving=tuple(self._arriving.values()),
            spare=self._spare,
        )
        self.found += check_end(self.problem, self.plan, self._step, left)
        last = self._step + 1 == len(self.timeline.steps)
        stale = [p for p, c in self.books.places() if not c.valid and not c.users]
        for place in stale:
            match = Freed(place[0], place[1], now, "stale")
            if match in self._freed.get(now, []):
                self._freed[now].remove(match)
            elif not last:
                detail = f"invalid, and not freed at the end of step {self._step}"
                self._note("bad-value", f"{place[0]} on {place[1]}", detail)
            self._release(place)
        self.states.append(self._state(now))
        self._begin_step()
        return True

    def _state(self, now: int) -> object:
        """Everything that the steps to come depend on, in times from now."""
        copies = {p: (c.codec, c.valid, c.users) for p, c in self.books.places()}
        on_the_way = {t.lane: (t.id, t.span.end_ns - now) for t in self._running.values() if t.span}
        queued = {
            (name, t.id) for name, q in self._lanes.items() for t in q if t.step <= self._step
        }
        return copies, set(self._pending), set(self._dying), on_the_way, queued

    # starts

    def _start_ready(self, now: int) -> bool:
        """Start the first thing, in lane order, that the record starts now and nothing hinders.

        One at a time: what ends or goes at this instant because of it comes before the next.
        """
        for lane, tasks in self._lanes.items():
            if not tasks or lane in self._running:
                continue
            task = tasks[0]
            if next(self._blockers(task), None) is not None:
                continue
            if task.span is not None and task.span.start_ns == now:
                self._start(tasks.popleft())
                return True
            elif (task.step, task.id) not in self._noted:
                self._noted.add((task.step, task.id))
                when = f"starts at {task.span.start_ns} ns" if task.span else "never starts"
                detail = f"{when}, but nothing keeps it from starting at {now} ns"
                self._note("bad-value", task.where, detail)
        return False

    def _start_forced(self, now: int) -> bool:
        """Start one thing that the record starts now against the contract, and say why not."""
        for tasks in self._lanes.values():
            if tasks and tasks[0].span is not None and tasks[0].span.start_ns <= now:
                task = tasks.popleft()
                for rule, detail in self._blockers(task):
                    self._note(rule, task.where, f"starts at {now} ns, but {detail}")
                self._start(task)
                return True
        return False

    def _blockers(self, task: Task) -> Iterator[tuple[str, str]]:
        if task.run is not None:
            return self._waits.of_run(task.step, task.run)
        if task.move is not None:
            return self._waits.of_move(task.step, task.move)
        return iter(())

    def _start(self, task: Task) -> None:
        self._running[task.lane] = task
        if task.run is not None:
            self._start_run(task, task.run)
        elif task.move is not None:
            self._start_move(task.move)

    def _start_run(self, task: Task, run: Run) -> None:
        for tensor in run.op.operands:
            place = (tensor, run.tier_of(tensor))
            if tensor in run.op.reads and place in self._pending:
                detail = f"reads {tensor} on {place[1]}, whose drop is pending"
                self._note("read-after-drop", task.where, detail)
            if tensor in run.op.writes:
                self._dying.discard(tensor)
                for copy in self.books.of(tensor).values():
                    copy.valid = False
                self.books.hold(place, None, valid=False)
            found = self.books.get(place)
            if found is not None:
                found.users += 1
            self._touched[tensor] = self._touched.get(tensor, 0) + 1
        self.books.take(HOST if run.on_host else DEVICE, run.op.workspace_bytes)

    def _start_move(self, move: Move) -> None:
        source = self.books.get((move.tensor, move.source))
        if source is not None:
            source.users += 1
        target = self.books.hold((move.tensor, move.target), arrives_as(move), valid=False)
        target.users += 1

    # findings

    def _fault(self, rule: str, detail: str, freed: Freed) -> None:
        where = f"{freed.tensor} on {freed.tier}"
        self._note(rule, where, f"at {freed.time_ns} ns: {detail}")

    def _note(self, rule: str, where: str, detail: str) -> None:
        self.found.append(Violation(rule, where, detail))
