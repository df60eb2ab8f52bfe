"""The auditor: replays a record instant by instant with accounts of its own.

At each instant completions and frees come first, then the compute lane, host updates, and the
lanes as listed. Each recorded start is checked against everything that the contract makes it
wait for, and then carried out as recorded. A task that could have started and did not is a
fault too, since nothing idles without a reason. Frees get the same two checks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from offcompile.ir.model import DEVICE, HOST, Machine, Problem
from offcompile.ir.plan import Freed, Move, Plan, Timeline

from .ending import Leftover, check_end
from .findings import Findings
from .frees import Frees, RecordedFrees
from .ledger import Ledger
from .order import VerifiedRun, arrives_as, executed, start_codecs, touches
from .record import Key, Task
from .waits import Waits


class Replay:
    """One pass over a record whose spans are complete and in order (`check_record`)."""

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        plan: Plan,
        timeline: Timeline,
        todo: dict[str, list[Task]],
    ) -> None:
        self.problem, self.plan, self.timeline = problem, plan, timeline
        self.findings = Findings()
        self.states: list[object] = []  # at the end of each step
        self._lanes = {name: deque(tasks) for name, tasks in todo.items()}
        self._running: dict[str, Task] = {}  # by lane
        self._step = -1
        self._open: list[int] = [0] * (len(timeline.steps) + 1)  # tasks that each step awaits
        for tasks in todo.values():
            for task in tasks:
                self._open[task.step + task.wraps] += 1
        self._arriving: dict[Key, Move] = {}  # wrapped moves of this step, not yet arrived
        self._wrapped = [m for m in plan.moves if m.wraps]
        self._recorded = RecordedFrees(timeline)
        self.ledger = Ledger(problem, machine)
        touching = touches(executed(problem, plan))
        self._frees = Frees(problem, plan, self.ledger, touching)
        self._waits = Waits(plan, self.ledger, touching, self._running, self._frees.dropped)
        for place, codec in start_codecs(problem, plan).items():
            self.ledger.hold(place, codec, valid=True)

    def run(self) -> None:
        spans = self.timeline.spans
        times = {x for s in spans for x in (s.start_ns, s.end_ns)}
        times |= self._recorded.times | {x for step in self.timeline.steps for x in step}
        self._begin_step()
        for now in sorted(times):
            self._instant(now)
            if self.findings.enough:
                return
            self._free_groundless(now)
            if self._over:
                break
        for late in self._recorded.rest():
            detail = f"freed at {late.time_ns} ns, after the last step"
            self.findings.note("bad-value", f"{late.tensor} on {late.tier}", detail)

    @property
    def _over(self) -> bool:
        return self._step == len(self.timeline.steps)

    # one instant

    def _instant(self, now: int) -> None:
        """Processes everything that happens at `now`, until nothing more does."""
        while not self._over and not self.findings.enough:
            if self._complete(now) or self._free_due(now):
                continue
            # before anything starts at this instant
            self._recorded.doubt(now, self._frees.why_kept)
            if not (self._end_step(now) or self._start_ready(now) or self._start_forced(now)):
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
            self._frees.ask(task.id)
        return bool(ended)

    def _finish_run(self, run: VerifiedRun) -> None:
        for tensor in run.op.operands:
            copy = self.ledger.get((tensor, run.tier_of(tensor)))
            if copy is not None:
                copy.users -= 1
                if tensor in run.op.writes:
                    copy.valid = True
        self._frees.end_run(run)
        self.ledger.take(HOST if run.on_host else DEVICE, -run.op.workspace_bytes)

    def _finish_move(self, step: int, move: Move) -> None:
        for tier in (move.source, move.target):
            copy = self.ledger.get((move.tensor, tier))
            if copy is not None:
                copy.users -= 1
                copy.valid |= tier == move.target
        self._frees.end_move(move.tensor)
        self._arriving.pop((step, move.id), None)

    # frees

    def _free_due(self, now: int) -> bool:
        """Frees the first copy that the record frees now for a valid reason."""
        for freed in self._recorded.at(now):
            place = (freed.tensor, freed.tier)
            if freed.cause in self._frees.grounds(place):
                self._recorded.remove(freed)
                self._frees.release(place)
                return True
        for place, grounds in self._frees.due().items():
            if self.findings.first(place):
                detail = f"could be freed at {now} ns ({', '.join(sorted(grounds))}) and was not"
                self.findings.note("bad-value", f"{place[0]} on {place[1]}", detail)
        return False

    def _free_groundless(self, now: int) -> None:
        """Reports the frees recorded now that have no valid reason, then carries them out."""
        for freed, (rule, detail) in self._recorded.take(now):
            self.findings.note(rule, f"{freed.tensor} on {freed.tier}", f"at {now} ns: {detail}")
            if self.ledger.get((freed.tensor, freed.tier)) is not None:
                self._frees.release((freed.tensor, freed.tier))

    # ends of steps

    def _begin_step(self) -> None:
        self._step += 1
        self._waits.step = self._step
        if not self._over:
            self._arriving.update({(self._step, m.id): m for m in self._wrapped})
            self._frees.begin_step()

    def _end_step(self, now: int) -> bool:
        if self._open[self._step]:
            return False
        left = Leftover(
            valid={p: c.codec for p, c in self.ledger.places() if c.valid},
            pending=tuple(p for p in self._frees.pending if self.ledger.get(p) is not None),
            arriving=tuple(self._arriving.values()),
            spare=self._frees.spare,
        )
        self.findings.found += check_end(self.problem, self.plan, self._step, left)
        last = self._step + 1 == len(self.timeline.steps)
        stale = [p for p, c in self.ledger.places() if not c.valid and not c.users]
        for place in stale:
            match = Freed(place[0], place[1], now, "stale")
            if match in self._recorded.at(now):
                self._recorded.remove(match)
            elif not last:
                detail = f"invalid, and not freed at the end of step {self._step}"
                self.findings.note("bad-value", f"{place[0]} on {place[1]}", detail)
            self._frees.release(place)
        self.states.append(self._state(now))
        self._begin_step()
        return True

    def _state(self, now: int) -> object:
        """Everything that the following steps depend on, with times relative to now."""
        copies = {p: (c.codec, c.valid, c.users) for p, c in self.ledger.places()}
        on_the_way = {t.lane: (t.id, t.span.end_ns - now) for t in self._running.values() if t.span}
        queued = {
            (name, t.id) for name, q in self._lanes.items() for t in q if t.step <= self._step
        }
        return copies, set(self._frees.pending), set(self._frees.dying), on_the_way, queued

    # starts

    def _start_ready(self, now: int) -> bool:
        """Starts the first task, in lane order, that the record starts now and nothing blocks.

        One at a time: completions and frees that it causes at this instant come before the next.
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
            elif self.findings.first((task.step, task.id)):
                when = f"starts at {task.span.start_ns} ns" if task.span else "never starts"
                detail = f"{when}, but nothing keeps it from starting at {now} ns"
                self.findings.note("bad-value", task.where, detail)
        return False

    def _start_forced(self, now: int) -> bool:
        """Starts one task that the record starts now against the contract, and reports why."""
        for tasks in self._lanes.values():
            if tasks and tasks[0].span is not None and tasks[0].span.start_ns <= now:
                task = tasks.popleft()
                for rule, detail in self._blockers(task):
                    self.findings.note(rule, task.where, f"starts at {now} ns, but {detail}")
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

    def _start_run(self, task: Task, run: VerifiedRun) -> None:
        self._frees.begin_run(run)
        for tensor in run.op.operands:
            place = (tensor, run.tier_of(tensor))
            if tensor in run.op.reads and place in self._frees.pending:
                detail = f"reads {tensor} on {place[1]}, whose drop is pending"
                self.findings.note("read-after-drop", task.where, detail)
            if tensor in run.op.writes:
                for copy in self.ledger.of(tensor).values():
                    copy.valid = False
                self.ledger.hold(place, None, valid=False)
            found = self.ledger.get(place)
            if found is not None:
                found.users += 1
        self.ledger.take(HOST if run.on_host else DEVICE, run.op.workspace_bytes)

    def _start_move(self, move: Move) -> None:
        source = self.ledger.get((move.tensor, move.source))
        if source is not None:
            source.users += 1
        target = self.ledger.hold((move.tensor, move.target), arrives_as(move), valid=False)
        target.users += 1
