"""The event loop of the simulator: contract §2, one instant at a time.

Order within an instant: completions and drops, the end of the step, the compute lane, host
updates, then the lanes as listed. A task of zero length completes before anything else starts.
"""

from __future__ import annotations

from dataclasses import replace

from offcompile.ir import Freed, Span, Stall, Violation

from .compiled import CompiledPlan, CompiledRun, Transfer
from .copies import FILLING, STALE, VALID, Halt
from .diagnosis import explain_stuck, waits_of
from .links import FULL
from .pace import Paces, may_slow_down
from .settle import check_end
from .state import Beginning, ComputeLane, CopyLane, SimulationState, StepWindow, UnderWay

MAX_STEPS = 8


class Engine(SimulationState):
    """One simulation of one compiled plan."""

    def __init__(self, plan: CompiledPlan, record: bool) -> None:
        super().__init__(plan, record)
        self.paces = Paces(self.base, self.lanes) if may_slow_down(plan) else None

    # ---- the loop ------------------------------------------------------------------------

    def run(self) -> None:
        self._ask_drops(self.p.start_drops)
        self._free_asked()
        self._begin_step()
        lanes = [lane for lane in self.lanes if lane.queue]
        ops, updates = self.ops, self.updates
        paces = self.paces
        while True:
            self._complete()
            if self._step_is_over():
                if self._end_step():
                    return
                continue
            if ops.end_ns < 0 and self._start_run(ops, updates):
                continue
            if updates.runs and updates.end_ns < 0 and self._start_run(updates, ops):
                continue
            for lane in lanes:
                if lane.end_ns < 0 and self._start_move(lane):
                    break
            else:
                if paces is not None:
                    paces.set(self.now, ops, updates)
                self.now = self._next_end()

    def _next_end(self) -> int:
        every = [self.ops.end_ns, self.updates.end_ns, *(lane.end_ns for lane in self.lanes)]
        ends = [end_ns for end_ns in every if end_ns >= 0]
        if ends:
            return min(ends)
        raise Halt(*explain_stuck(self))

    def _complete(self) -> None:
        """Processes everything that ends now, then the drops that this makes possible."""
        now, asked = self.now, list[int]()
        for compute in (self.ops, self.updates):
            if compute.end_ns == now:
                run = compute.runs[compute.started - 1]
                compute.end_ns = -1
                compute.done += 1
                self.used[compute.tier] -= run.workspace
                self._end_accesses(run)
                asked += self.p.run_drops.get(run.number, ())
                if compute is self.ops:
                    self.last_run_end = now
        for lane in self.lanes:
            if lane.end_ns == now:
                move = self.p.moves[lane.move]
                self._end_move(lane, move)
                asked += move.drops
        if asked:
            self._ask_drops(sorted(asked))
        if self.ending:
            self._free_ended()
        if self.drops.asked and self.drops.stirred:
            self._free_asked()

    # ---- completions -------------------------------------------------------------------------

    def _end_accesses(self, run: CompiledRun) -> None:
        users, status, pending = self.users, self.status, self.drops.of_tensor
        for key in run.reads:
            users[key] -= 1
        for key in run.writes:
            users[key] -= 1
            status[key] = VALID
        for t in run.tensors:
            if pending[t]:
                self.drops.stirred.add(t)
        for t in run.mortal:
            if self.value_is_over(t):
                self.ending.add(t)

    def _end_move(self, lane: CopyLane, move: Transfer) -> None:
        spans = self.journal.spans
        if spans[lane.span].end_ns != self.now:  # slowed down on a shared link
            spans[lane.span] = replace(spans[lane.span], end_ns=self.now)
        lane.end_ns = lane.move = lane.span = -1
        lane.place += 1
        self.move_count[move.index] += 1
        if not move.wraps:
            self.plain_done += 1
        self.status[move.target] = VALID
        self.users[move.source] -= 1
        self.users[move.target] -= 1
        self.moving[move.tensor] -= 1
        if self.drops.of_tensor[move.tensor]:
            self.drops.stirred.add(move.tensor)

    # ---- ops and host updates ------------------------------------------------------------

    def _start_run(self, lane: ComputeLane, other: ComputeLane) -> bool:
        """Starts the lane's next run if it may; True if it has zero length (so that it completes
        first)."""
        i = lane.started
        if i == len(lane.runs):
            return False
        run = lane.runs[i]
        if other.done < run.other_lane_runs or not self._may_start(run):
            if lane is self.ops and self.journal.details:
                self.waiting.update(dict.fromkeys(w.on for w in waits_of(self, run)))
            return False
        if lane is self.ops:
            self._note_stall(run.id)
        lane.end_ns = self.now + run.duration_ns
        self.journal.spans.append(Span(run.id, lane.name, self.step, self.now, lane.end_ns))
        self.window.starts.append((lane.number, i, self.now - self.window.start_ns))
        self._begin_accesses(run, lane.tier)
        lane.started += 1
        return run.duration_ns == 0

    def _may_start(self, run: CompiledRun) -> bool:
        status, moves, step = self.status, self.p.moves, self.step
        for m in self.p.before_moves.get(run.number, ()):
            if self.move_count[m] < (step if moves[m].wraps else step + 1):
                return False
        for key in run.reads:
            if status[key] != VALID:
                return False
        for key in run.host_reads:
            if self.codec[key]:
                return False
        for t in run.written:
            if self.moving[t]:
                return False
        return self._fits(run)

    def _fits(self, run: CompiledRun) -> bool:
        base, size = self.base, self.size
        here, there = (0, run.workspace) if run.on_host else (run.workspace, 0)
        for key, on_device, nbytes in run.outputs:
            if on_device:
                here += nbytes - size[key]
            else:
                there += nbytes - size[key]
        if here > 0 and here > base.capacity[base.device] - self.used[base.device]:
            return False
        return there <= 0 or there <= base.capacity[base.host] - self.used[base.host]

    def _begin_accesses(self, run: CompiledRun, workspace_tier: int) -> None:
        users, status, pending, next_access = (
            self.users,
            self.status,
            self.drops.of_tensor,
            self.next_access,
        )
        for key in run.reads:
            users[key] += 1
            if key in self.drops.asked:
                self._halt_read(run, key)
        for t in run.tensors:
            next_access[t] += 1
            if pending[t]:
                self.drops.stirred.add(t)
        for t in run.written:
            self.ending.discard(t)
            for key in self.copies(t):
                if status[key] == VALID:
                    status[key] = STALE
        for key, _, nbytes in run.outputs:
            status[key], self.codec[key] = FILLING, 0
            users[key] += 1
            if self.size[key] != nbytes:
                self._hold(key, nbytes)
        if run.workspace:
            self.used[workspace_tier] += run.workspace
            self.peak[workspace_tier] = max(self.peak[workspace_tier], self.used[workspace_tier])

    def _halt_read(self, run: CompiledRun, key: int) -> None:
        tensor, tier = self.name_of(key)
        raise Halt(
            Violation(
                "read-after-drop",
                run.id,
                f"{run.id} reads {tensor} on {tier} while the drop after"
                f" {self.drops.after[key]} is pending: no other valid copy lets it go",
            )
        )

    def _note_stall(self, op: str) -> None:
        since = max(self.last_run_end, self.window.start_ns)
        if self.now > since:
            self.window.stalls.append(Stall(op, since, self.now - since, tuple(self.waiting)))
        self.waiting.clear()

    # ---- moves ---------------------------------------------------------------------------

    def _start_move(self, lane: CopyLane) -> bool:
        """Starts the lane's next move if it may; True if it has zero length."""
        i = self.lane_head(lane)
        if i is None:
            return False
        move = self.p.moves[i]
        source, target = move.source, move.target
        if (
            self.status[source] != VALID
            or self.status[target] >= VALID
            or not self.triggered(move, lane.step)
        ):
            return False
        tier = move.target_tier
        extra = move.target_bytes - self.size[target]
        if extra > 0 and self.used[tier] + extra > self.base.capacity[tier]:
            return False
        self._check_codec(move)
        self.status[target] = FILLING
        self.codec[target] = 0 if move.to_device else move.codec
        self._hold(target, move.target_bytes)
        self.users[source] += 1
        self.users[target] += 1
        self.moving[move.tensor] += 1
        lane.move, lane.end_ns = i, self.now + move.duration_ns
        lane.pace, lane.since_ns, lane.left = FULL, self.now, FULL * move.duration_ns
        lane.span = len(self.journal.spans)
        late = self.step - lane.step
        self.window.starts.append((2 + late, i, self.now - self.window.start_ns))
        name = self.base.machine.lanes[move.lane].name
        self.journal.spans.append(Span(move.id, name, lane.step, self.now, lane.end_ns))
        return move.duration_ns == 0

    def _check_codec(self, move: Transfer) -> None:
        held = self.codec[move.source]
        if move.from_device or held == move.codec:
            return
        names = [None, *self.base.machine.codec]
        tensor, tier = self.name_of(move.source)
        what = f"compressed with {names[held]}" if held else "not compressed"
        asked = f"with {names[move.codec]}" if move.codec else "without a codec"
        raise Halt(
            Violation("codec", move.id, f"the copy of {tensor} on {tier} is {what}, moved {asked}")
        )

    # ---- the end of a step ---------------------------------------------------------------

    def _step_is_over(self) -> bool:
        return (
            self.ops.done == len(self.ops.runs)
            and self.updates.done == len(self.updates.runs)
            and self.plain_done == self.p.n_plain_moves
            and all(self.move_count[m] >= self.step for m in self.p.wrapped)
        )

    def _end_step(self) -> bool:
        """Ends the step; True if the simulation is over."""
        self._note_stall("the end of the step")
        self.journal.steps.append((self.window.start_ns, self.now))
        wrong = check_end(self)
        if wrong:
            raise Halt(*wrong)
        if not self.base.problem.steady:
            self._record_under_way()
            return True
        for key, status in enumerate(self.status):
            if status == STALE:
                self._free(key, "stale")
        freed_in_step = len(self.journal.freed)
        same = self.previous is not None and self.previous.starts == self.window.starts
        lengths = [end - start for start, end in self.journal.steps[-2:]]
        self.settled = same and lengths[0] == lengths[1] and self._under_way_as_before()
        if self.settled:
            self._end_as_before(self.began)
            return True
        if len(self.journal.steps) == MAX_STEPS:
            self._record_under_way()
            return True
        self.previous, self.window = self.window, StepWindow(self.now)
        self.step += 1
        for lane in (self.ops, self.updates):
            lane.started = lane.done = 0
        self.plain_done = 0
        self.next_access = [0] * len(self.next_access)
        self.drops.stir_all()
        self._ask_drops(self.p.start_drops)
        self._free_asked()
        before = self.began
        self._begin_step()
        if before.state == self.began.state:
            self.settled = True
            self._repeat(before, freed_in_step)
            return True
        return False

    def _under_way(self) -> tuple[UnderWay, ...]:
        return tuple(
            UnderWay(lane.span, lane.move, lane.left_at(self.now))
            if lane.end_ns >= 0
            else UnderWay(-1, -1, -1)
            for lane in self.lanes
        )

    def _under_way_as_before(self) -> bool:
        """True if the same moves are under way as when the step began, and have as much left."""
        return [u[1:] for u in self._under_way()] == [u[1:] for u in self.began.under_way]

    def _end_as_before(self, before: Beginning) -> None:
        """Records that the moves under way end as those of the step before did."""
        spans, by = self.journal.spans, self.now - before.now
        for now, then in zip(self._under_way(), before.under_way, strict=True):
            if now.span >= 0:
                spans[now.span] = replace(spans[now.span], end_ns=spans[then.span].end_ns + by)

    def _record_under_way(self) -> None:
        """Records moves that are under way at the end as if nothing came after it."""
        if self.paces is None:
            return
        self.paces.set(self.now, self.ops, self.updates)
        for lane in self.lanes:
            if lane.end_ns >= 0:
                spans = self.journal.spans
                spans[lane.span] = replace(spans[lane.span], end_ns=lane.end_ns)

    def _begin_step(self) -> None:
        if not self.base.problem.steady:
            return
        lanes, under_way = [], self._under_way()
        for lane in self.lanes:
            place, ahead = lane.place, lane.step - self.step
            if place == len(lane.queue):  # it goes on with the next step as soon as there is one
                place, ahead = 0, ahead + 1
            lanes.append((place, ahead))
        state = (
            lanes,
            [u[1:] for u in under_way],
            [count - self.step for count in self.move_count],
            list(self.status),
            list(self.size),
            list(self.codec),
            list(self.users),
            list(self.drops.asked),
            set(self.ending),
        )
        spans, freed = len(self.journal.spans), len(self.journal.freed)
        self.began = Beginning(self.now, spans, freed, under_way, state)

    def _repeat(self, before: Beginning, freed_in_step: int) -> None:
        """Records the current step as a copy of the previous one, since both begin alike."""
        by, journal = self.now - before.now, self.journal
        more = len(journal.spans) - before.spans
        self._end_as_before(before)
        for s in journal.spans[before.spans :]:
            journal.spans.append(Span(s.id, s.lane, s.step + 1, s.start_ns + by, s.end_ns + by))
        for f in journal.freed[before.freed : freed_in_step]:
            journal.freed.append(Freed(f.tensor, f.tier, f.time_ns + by, f.cause, f.started + more))
        assert self.previous is not None
        self.window.stalls += [
            Stall(s.op, s.start_ns + by, s.duration_ns, s.waited_for) for s in self.previous.stalls
        ]
        self.now += by
        journal.steps.append((self.window.start_ns, self.now))
