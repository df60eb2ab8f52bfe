"""The event loop of the simulator: contract §2, one instant at a time.

Order within an instant: completions and drops, the end of the step, the compute lane, host
updates, then the lanes as listed. A task of zero length completes before anything else starts.
"""

from __future__ import annotations

from offcompile.ir import COMPUTE, HOST_COMPUTE, Freed, Span, Stall, Violation

from .compiled import CompiledRun, Transfer
from .copies import FILLING, STALE, VALID, Halt
from .diagnosis import explain_stuck, waits_of
from .settle import check_end
from .state import Beginning, SimulationState, StepWindow

MAX_STEPS = 8


class Engine(SimulationState):
    """One simulation of one compiled plan."""

    # ---- the loop ------------------------------------------------------------------------

    def run(self) -> None:
        self._ask_drops(self.p.start_drops)
        self._free_asked()
        self._begin_step()
        lanes = [i for i, queue in enumerate(self.p.lanes) if queue]
        updates = bool(self.p.updates)
        while True:
            self._complete()
            if self._step_is_over():
                if self._end_step():
                    return
                continue
            if self.run_end < 0 and self._start_run():
                continue
            if updates and self.update_end < 0 and self._start_update():
                continue
            for i in lanes:
                if self.lane_end[i] < 0 and self._start_move(i):
                    break
            else:
                self.now = self._next_end()

    def _next_end(self) -> int:
        ends = [e for e in (self.run_end, self.update_end, *self.lane_end) if e >= 0]
        if ends:
            return min(ends)
        raise Halt(*explain_stuck(self))

    def _complete(self) -> None:
        """Processes everything that ends now, then the drops that this makes possible."""
        now, asked = self.now, list[int]()
        if self.run_end == now:
            run = self.p.runs[self.run_index - 1]
            self.run_end, self.last_run_end = -1, now
            self.runs_done += 1
            self.used[self.base.device] -= run.workspace
            self._end_accesses(run)
            asked += self.p.run_drops.get(run.number, ())
        if self.update_end == now:
            run = self.p.updates[self.update_index - 1]
            self.update_end = -1
            self.updates_done += 1
            self.used[self.base.host] -= run.workspace
            self._end_accesses(run)
            asked += self.p.run_drops.get(run.number, ())
        for lane, end in enumerate(self.lane_end):
            if end == now:
                move = self.p.moves[self.lane_move[lane]]
                self._end_move(lane, move)
                asked += move.drops
        if asked:
            self._ask_drops(sorted(asked))
        if self.ending:
            self._free_ended()
        if self.asked and self.stirred:
            self._free_asked()

    # ---- completions -------------------------------------------------------------------------

    def _end_accesses(self, run: CompiledRun) -> None:
        users, status, pending = self.users, self.status, self.pending
        for key in run.reads:
            users[key] -= 1
        for key in run.writes:
            users[key] -= 1
            status[key] = VALID
        for t in run.tensors:
            if pending[t]:
                self.stirred.add(t)
        for t in run.mortal:
            if self.value_is_over(t):
                self.ending.add(t)

    def _end_move(self, lane: int, move: Transfer) -> None:
        i = self.lane_move[lane]
        self.lane_end[lane] = self.lane_move[lane] = -1
        self.lane_place[lane] += 1
        self.move_count[i] += 1
        if not move.wraps:
            self.plain_done += 1
        self.status[move.target] = VALID
        self.users[move.source] -= 1
        self.users[move.target] -= 1
        self.moving[move.tensor] -= 1
        if self.pending[move.tensor]:
            self.stirred.add(move.tensor)

    # ---- ops and host updates ------------------------------------------------------------

    def _start_run(self) -> bool:
        """Starts the next op if it may; True if it has zero length (so that it completes first)."""
        i = self.run_index
        if i == len(self.p.runs):
            return False
        run = self.p.runs[i]
        if self.updates_done < run.other_lane_runs or not self._may_start(run):
            if self.record:
                self.waiting.update(dict.fromkeys(w.on for w in waits_of(self, run)))
            return False
        self._note_stall(run.id)
        self.spans.append(Span(run.id, COMPUTE, self.step, self.now, self.now + run.duration_ns))
        self.window.starts.append((0, i, self.now - self.window.start_ns))
        self._begin_accesses(run, self.base.device)
        self.run_index += 1
        self.run_end = self.now + run.duration_ns
        return run.duration_ns == 0

    def _start_update(self) -> bool:
        i = self.update_index
        if i == len(self.p.updates):
            return False
        run = self.p.updates[i]
        if self.runs_done < run.other_lane_runs or not self._may_start(run):
            return False
        end = self.now + run.duration_ns
        self.spans.append(Span(run.id, HOST_COMPUTE, self.step, self.now, end))
        self.window.starts.append((1, i, self.now - self.window.start_ns))
        self._begin_accesses(run, self.base.host)
        self.update_index += 1
        self.update_end = self.now + run.duration_ns
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
            self.pending,
            self.next_access,
        )
        for key in run.reads:
            users[key] += 1
            if self.drop_asked[key]:
                self._halt_read(run, key)
        for t in run.tensors:
            next_access[t] += 1
            if pending[t]:
                self.stirred.add(t)
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
                f" {self.dropped_by[key]} is pending: no other valid copy lets it go",
            )
        )

    def _note_stall(self, op: str) -> None:
        since = max(self.last_run_end, self.window.start_ns)
        if self.now > since:
            self.window.stalls.append(Stall(op, since, self.now - since, tuple(self.waiting)))
        self.waiting.clear()

    # ---- moves ---------------------------------------------------------------------------

    def _start_move(self, lane: int) -> bool:
        """Starts the lane's next move if it may; True if it has zero length."""
        i = self.lane_head(lane)
        if i is None:
            return False
        move = self.p.moves[i]
        source, target = move.source, move.target
        if (
            self.status[source] != VALID
            or self.status[target] >= VALID
            or not self.triggered(move, self.lane_step[lane])
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
        self.lane_move[lane] = i
        self.lane_end[lane] = self.now + move.duration_ns
        late = self.step - self.lane_step[lane]
        self.window.starts.append((2 + late, i, self.now - self.window.start_ns))
        name = self.base.machine.lanes[lane].name
        self.spans.append(Span(move.id, name, self.lane_step[lane], self.now, self.lane_end[lane]))
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
            self.runs_done == len(self.p.runs)
            and self.updates_done == len(self.p.updates)
            and self.plain_done == self.p.n_plain_moves
            and all(self.move_count[m] >= self.step for m in self.p.wrapped)
        )

    def _end_step(self) -> bool:
        """Ends the step; True if the simulation is over."""
        self._note_stall("the end of the step")
        self.steps.append((self.window.start_ns, self.now))
        wrong = check_end(self)
        if wrong:
            raise Halt(*wrong)
        if not self.base.problem.steady:
            return True
        for key, status in enumerate(self.status):
            if status == STALE:
                self._free(key, "stale")
        freed_in_step = len(self.freed)
        same = self.previous is not None and self.previous.starts == self.window.starts
        lengths = [end - start for start, end in self.steps[-2:]]
        if same and lengths[0] == lengths[1]:
            return True
        if len(self.steps) == MAX_STEPS:
            self.settled = False
            return True
        self.previous, self.window = self.window, StepWindow(self.now)
        self.step += 1
        self.run_index = self.update_index = self.runs_done = self.updates_done = 0
        self.plain_done = 0
        self.next_access = [0] * len(self.next_access)
        self.stirred.update(key // self.base.n_tiers for key in self.asked)
        self._ask_drops(self.p.start_drops)
        self._free_asked()
        before = self.began
        self._begin_step()
        if before.state == self.began.state:
            self._repeat(before, freed_in_step)
            return True
        return False

    def _begin_step(self) -> None:
        if not self.base.problem.steady:
            return
        lanes = []
        for lane, queue in enumerate(self.p.lanes):
            place, ahead = self.lane_place[lane], self.lane_step[lane] - self.step
            if place == len(queue):  # the lane goes on with the next step as soon as there is one
                place, ahead = 0, ahead + 1
            end = self.lane_end[lane]
            lanes.append((place, ahead, self.lane_move[lane], end - self.now if end >= 0 else -1))
        state = (
            lanes,
            [count - self.step for count in self.move_count],
            list(self.status),
            list(self.size),
            list(self.codec),
            list(self.users),
            list(self.asked),
            set(self.ending),
        )
        self.began = Beginning(self.now, len(self.spans), len(self.freed), state)

    def _repeat(self, before: Beginning, freed_in_step: int) -> None:
        """Records the current step as a copy of the previous one, since both begin alike."""
        by, done = self.now - before.now, len(self.spans)
        for s in self.spans[before.spans :]:
            self.spans.append(Span(s.id, s.lane, s.step + 1, s.start_ns + by, s.end_ns + by))
        for f in self.freed[before.freed : freed_in_step]:
            started = f.started + done - before.spans
            self.freed.append(Freed(f.tensor, f.tier, f.time_ns + by, f.cause, started))
        assert self.previous is not None
        self.window.stalls += [
            Stall(s.op, s.start_ns + by, s.duration_ns, s.waited_for) for s in self.previous.stalls
        ]
        self.now += by
        self.steps.append((self.window.start_ns, self.now))
