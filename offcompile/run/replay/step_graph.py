"""Captures the halves of a planned graph, and replays them wherever that gives plain's results.

1. A plan has settled once it has run `SETTLED_AFTER` steps: measured, judged, and kept. Then
   `refusals` says what stands in the way, if anything does.
2. A forward is captured, and its graph replayed at once; so is the backward that gets what that
   forward saved. Both take memory from one pool, in the order of the plan, so that the pool takes
   what the plan takes. It does not go back between steps, and counts as held for other graphs.
3. From then on each half is a replay: arguments whose address changes are copied in, outputs are
   copied out, and what forward saves, and gradients, are lent (`places`). A replay that would write
   over memory that somebody still holds does not happen.
4. Such a call takes the usual path, and the pool is given up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offcompile.graph.lowering.lower import Compiled
from offcompile.ir import BACKWARD
from offcompile.ir.units import show_bytes
from offcompile.report.log import first_time, log_decision, warn
from offcompile.run.accounts.usage import GraphUsage
from offcompile.run.plan.contract import GraphFacts, Planned
from offcompile.run.recording import recorded
from offcompile.run.trial import MOST_ASKED, STEPS_BEFORE
from offcompile.runtime.base.interpreter import rarely_collected
from offcompile.runtime.base.threads import bare
from offcompile.runtime.device.cuda.capture import HostRoom, capturing
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.streams import Event, Stream
from offcompile.runtime.memory.host_arena import HostFull
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.registry import runtime_for
from offcompile.runtime.moves.weights import claim

from .halves import CapturedHalf, in_words, is_small, spare_of, take_out
from .places import Arguments, StaticPlace
from .refusals import why_never, why_not
from .results import Results
from .room import check_room, host_rooms, more_on_host

#: steps of a plan before it is captured: by then its trial is over
SETTLED_AFTER = STEPS_BEFORE + MOST_ASKED + 1
#: steps the usual way before a plan is captured again
AGAIN_AFTER = 2
#: a plan is captured at most so often on end without so many replays of one
MOST_CAPTURES, WORTH_RUNS = 4, 50


class StepGraph:
    """The captured halves of one plan. `changed`: forward's arguments that it writes in place."""

    def __init__(
        self, facts: GraphFacts, planned: Planned, num_outputs: int, changed: frozenset[int]
    ) -> None:
        self.facts, self.planned = facts, planned
        self._num_outputs, self._changed = num_outputs, changed
        #: why nothing is captured any more
        self.refusal: str | None = None
        self.captures = self.replays = 0
        #: steps until a capture
        self._left = SETTLED_AFTER
        #: addresses that each argument of forward has had, two at most
        self._seen: list[set[int]] = []
        #: True once an argument had another address than captured
        self._moving = False
        self._forward: CapturedHalf | None = None
        self._backward: CapturedHalf | None = None
        self._pool: object = None
        #: why the pool is given up at the next forward
        self._doomed: str | None = None
        #: where the last replay was queued, and its end
        self._last: tuple[Stream, Event] | None = None
        if (why := why_never(facts)) is not None:
            self._refuse(why)

    @property
    def entry(self) -> GraphUsage:
        return self.facts.runs.entry

    @property
    def pool_bytes(self) -> int:
        """Bytes of the device that do not go back between steps."""
        halves = [half for half in (self._forward, self._backward) if half is not None]
        static = sum(half.arguments.nbytes for half in halves)
        return static + max((half.taken_bytes for half in halves), default=0)

    @property
    def more_host_bytes(self) -> int:
        """Bytes of the host tier that the graphs hold beyond what their plan takes."""
        halves = [half for half in (self._forward, self._backward) if half is not None]
        return more_on_host(self.planned, halves) if halves else 0

    @property
    def _target(self) -> torch.device:
        return self.facts.target.device

    @property
    def _mover(self) -> Mover:
        return runtime_for(self.facts.target.runtime.key).mover

    @property
    def _device(self) -> CudaDevice:
        device = self._mover.device
        assert isinstance(device, CudaDevice)
        return device

    # --- a run ----------------------------------------------------------------------------------

    def run(self, phase: str, arguments: list[Any], compiled: Compiled) -> Any:
        """Return the results of a half by replay; None if it has to run the usual way."""
        if self.refusal is not None:
            return None
        if phase == BACKWARD:
            return self._run_backward(arguments, compiled)
        return self._run_forward(phase, arguments, compiled)

    def _run_forward(self, phase: str, arguments: list[Any], compiled: Compiled) -> Any:
        if torch._C._current_graph_task_id() != -1:
            self._refuse("forward runs inside a backward; checkpoint within the compiled model")
            return None
        if self._doomed is not None:
            self._refuse(self._doomed)
            return None
        self._look(arguments)
        forward = self._forward
        if forward is not None:
            if not self._may_replay(forward, phase, arguments):
                return None
            return self._replay(forward, arguments)
        self._left -= 1
        if self._left >= 0:
            return None
        why = why_not(self.facts, self.planned)
        if why is not None:
            self._refuse(why)
            return None
        return self._capture_forward(phase, arguments, compiled)

    def _run_backward(self, arguments: list[Any], compiled: Compiled) -> Any:
        forward, backward = self._forward, self._backward
        if forward is None:
            return None
        given = {x.data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
        if not given >= forward.own:
            return None  # of a forward that ran the usual way
        if torch._C._autograd._get_current_graph_task_keep_graph():
            self._doomed = "a backward keeps its graph (retain_graph); run such steps without"
            return None
        if backward is None:
            return self._capture_backward(forward, arguments, compiled)
        if backward.arguments.strays(arguments):
            return None
        self._settle_weights(arguments)
        result = self._replay(backward, arguments)
        arguments.clear()
        return result

    def _replay(
        self, half: CapturedHalf, arguments: Sequence[Any], outputs: Sequence[Any] | None = None
    ) -> list[Any]:
        streams = self._device.streams
        compute = streams.compute()
        if self._last is not None and self._last[0] != compute:
            streams.wait(compute, self._last[1])
        capture = half.capture
        half.arguments.fill(arguments)
        half.graph.replay()
        capture.given_to(compute)
        result = half.results.given(arguments, outputs)
        self._last = compute, streams.record(compute)
        self.replays += 1
        if half.runs:  # those of the first one were counted as they were captured
            self._mover.replayed(len(capture.copies), capture.out_bytes, capture.in_bytes)
        half.runs += 1
        return result

    def _settle_weights(self, arguments: Sequence[Any]) -> None:
        """Wait for updates of weights that still run on the host, as their fetches would, and drop
        copies of weights that other graphs have made: nothing else tells that a step has begun."""
        claim(x for x in arguments if isinstance(x, torch.Tensor))
        if self._mover.keeper is not None:
            self._mover.keeper.drop_weights()

    # --- whether a replay is right ----------------------------------------------------------------

    def _may_replay(self, forward: CapturedHalf, phase: str, arguments: Sequence[Any]) -> bool:
        """True if forward's replay writes over nothing that is still of use."""
        self._settle_weights(arguments)  # updates under way hold gradients
        backward = self._backward
        if backward is None and phase != "inference":
            self._give_up("the captured forward got no backward")
            return False
        if forward.results.out():
            self._doomed = "a forward came before the backward of the one before; run each in turn"
            return False
        if backward is not None and (out := backward.results.out()):
            try:
                take_out(self._device, out, arguments)
            except HostFull:
                self._give_up("the host has no room for gradients that stay")
                return False
            if backward.results.out():
                self._give_up("gradients of the step before are held beyond .grad")
                return False
        if strays := forward.arguments.strays(arguments):
            self._moving = True
            self._give_up(f"{len(strays)} arguments have another address than before")
            return False
        if recorded() is not None:
            self._give_up("the step is recorded")
            return False
        return True

    def _look(self, arguments: Sequence[Any]) -> None:
        """Note the addresses of forward's arguments: those that change are copied in."""
        if not self._seen:
            self._seen = [set() for _ in arguments]
        for seen, x in zip(self._seen, arguments, strict=True):
            if len(seen) < 2 and isinstance(x, torch.Tensor):
                seen.add(x.data_ptr())

    def _copied(self, arguments: Sequence[Any]) -> frozenset[int]:
        """Forward's arguments that each replay gets in a copy: not those that it writes, nor
        parameters, which a copy would double."""
        found = set()
        for i, (seen, x) in enumerate(zip(self._seen, arguments, strict=True)):
            if i in self._changed or isinstance(x, torch.nn.Parameter):
                continue
            if len(seen) > 1 or self._moving or is_small(x):
                found.add(i)
        return frozenset(found)

    # --- capturing ------------------------------------------------------------------------------

    def _capture_forward(self, phase: str, arguments: Sequence[Any], compiled: Compiled) -> Any:
        if self.captures >= MOST_CAPTURES:
            self._refuse(f"it was captured {MOST_CAPTURES} times, and soon given up each time")
            return None
        self.captures += 1
        trains = phase != "inference"
        try:
            self._pool = self._device.streams.pool()
            users = self._num_outputs if trains else None
            places = Arguments(arguments, self._target, self._copied(arguments))
            forward, outputs = self._captured(places, list(arguments), compiled, users)
        except Exception as error:
            self._refuse(in_words(bare(error)))
            return None
        self._forward = forward
        result = self._replay(forward, arguments, outputs)
        if not trains:
            self._captured_whole()
        return result

    def _capture_backward(
        self, forward: CapturedHalf, arguments: list[Any], compiled: Compiled
    ) -> Any:
        saved = len(forward.results.ways) - forward.results.users
        moving = frozenset(
            i
            for i, x in enumerate(arguments)
            if isinstance(x, torch.Tensor)
            and x.numel()
            and (i >= saved or x.data_ptr() not in forward.addresses)
        )
        spare = [x if i in moving else spare_of(x) for i, x in enumerate(arguments)]
        try:
            places = Arguments(arguments, self._target, moving, forward.results.storages)
            backward, _ = self._captured(places, arguments, compiled, 0, forward)
        except Exception as error:
            self._doomed = in_words(bare(error))
            # nothing has run, so that all is still there
            owner = forward.owner
            arguments[:] = [x.alias(owner) if isinstance(x, StaticPlace) else x for x in spare]
            return None
        self._backward = backward
        self._captured_whole()
        return self._replay(backward, [x if i in moving else None for i, x in enumerate(spare)])

    def _captured(
        self,
        places: Arguments,
        arguments: list[Any],
        compiled: Compiled,
        users: int | None,
        forward: CapturedHalf | None = None,
    ) -> tuple[CapturedHalf, Sequence[Any]]:
        """Capture a half, which uses up its arguments; returns also its results, in the pool.
        `users`: see `Results`; None: all. `forward`: of a backward."""
        streams, mover = self._device.streams, self._mover
        mover.device.drain()
        mover.sweep()
        # looking for room while the graph is captured would wait for events outside of it
        self._device.shadows.release()
        self._settle_weights(arguments)
        if forward is None:
            # of both halves: backward finds no room where the graph keeps what forward has saved
            rooms = host_rooms(self._device, self.planned)
            mine: list[HostRoom] = []
        else:
            rooms, mine = [], forward.rooms
            forward.rooms = []
        graph = streams.graph(self._pool)
        call = places.put_in(arguments)
        addresses = {x.data_ptr() for x in call}
        arguments.clear()
        began_bytes = streams.memory().allocated_bytes
        streams.reset_peak()
        with rarely_collected(), capturing(streams, graph, mine) as capture:
            outputs = compiled(call)
        taken_bytes = streams.memory().peak_allocated_bytes - began_bytes
        try:
            users = len(outputs) if users is None else users
            results = Results.of(outputs, self._target, places.where, users)
            own = frozenset(x.data_ptr() for x in results.saved_in_pool(outputs))
            known = frozenset(x.data_ptr() for x in outputs[users:] if isinstance(x, torch.Tensor))
            half = CapturedHalf(
                graph, capture, places, results, known | addresses, own, taken_bytes, rooms
            )
            if forward is not None:
                half.taken_bytes += forward.results.saved_bytes
            results.lend(half.owner, [room.flat for room in capture.written])
            check_room(self.facts, self.planned, [half] if forward is None else [forward, half])
        except BaseException:
            capture.release()
            raise
        return half, outputs

    def _captured_whole(self) -> None:
        self.facts.runs.usage.pools.add(self)
        self.facts.runs.usage.invalidate()
        text = (
            f"captured as a CUDA graph: its pool keeps {show_bytes(self.pool_bytes)} of the device"
            " between steps"
        )
        self.facts.profile.note(text)
        log_decision(self.planned.request.name, text)

    # --- the end --------------------------------------------------------------------------------

    def give_way(self) -> bool:
        """Give the pool up for others who need its room; False if there is none."""
        if self._forward is None:
            return False
        self._give_up("others need the room of its pool")
        return True

    def _give_up(self, why: str) -> None:
        """Forget the graphs, and capture again later. Lent results keep their memory."""
        self._drop()
        self._left = AGAIN_AFTER
        log_decision(self.planned.request.name, f"runs without its CUDA graph: {why}")

    def _refuse(self, why: str) -> None:
        """Capture no more."""
        self._drop()
        self.refusal = why
        name = self.planned.request.name
        self.facts.profile.note(f"no CUDA graph: {why}")
        if first_time("no CUDA graph", f"{self.facts.runs.name}: {why}"):
            warn(f"{name}: cudagraphs=True, and no CUDA graph: {why}.")

    def _drop(self) -> None:
        self.facts.runs.usage.pools.discard(self)
        self.facts.runs.usage.invalidate()
        halves, self._forward, self._backward = (self._forward, self._backward), None, None
        if halves[0] is not None and halves[0].runs >= WORTH_RUNS:
            self.captures = 0
        self._pool = self._doomed = None
        if self._last is not None:
            # the graphs' host memory goes to others
            self._device.streams.synchronize(self._last[1])
            self._last = None
        for half in halves:
            if half is not None:
                half.capture.release()
