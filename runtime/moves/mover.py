"""The movement ops, written against the Device interface alone."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from offcompile.ir import OffloadError
from offcompile.passes.correlation.predictor import Counters
from offcompile.runtime.base import interrupts
from offcompile.runtime.base.counters import add_gauges, new_tally, note, now_ns
from offcompile.runtime.device import tickets
from offcompile.runtime.device.failures import failure
from offcompile.runtime.device.interface import Copy, Device, How, Label, Point, Slot
from offcompile.runtime.device.move_events import listener

from .activation_cache import ActivationCache
from .ledger import InFlightLedger
from .probes import show
from .saved import Saved


@dataclass(eq=False)
class Load:
    """A reload into a buffer of its own."""

    mover: Mover
    tag: str
    lane: str
    saved: Saved
    number: int = 0
    awaited: bool = False
    #: None if the data was already there
    copy: Copy | None = None
    #: True if the keeper owns the buffer and the copy
    kept: bool = False


_Entry = TypeVar("_Entry", Saved, Load)


class Mover:
    """Moves tensors out of and into the memory of one device.

    in_flight_bytes bounds sources of unfinished copies out, reload buffers and staging together: a
    caller that would exceed it waits until copies out have drained, but never for memory that only
    the caller itself can free. Thread-safe.
    """

    def __init__(self, device: Device, in_flight_bytes: int | None = None) -> None:
        self.device = device
        self.tally = new_tally()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ledger = InFlightLedger(
            in_flight_bytes, self._lock, self.tally, lambda: device.staging_bytes
        )
        #: number → what its death calls
        self._live: dict[int, Callable[[], None]] = {}
        #: uses spare memory between graphs; None if evicted tensors always leave at once
        self.keeper: ActivationCache | None = None
        self._kept_counted = (0, 0, 0, 0)
        # finalizers append to it; they may run between any two lines, and take no lock
        self._deaths: deque[Callable[[], None]] = deque()
        self._is_closed = self._sweeps = False
        device.before_copies(self.sweep)
        self._forget_gauges = add_gauges(self._gauges)

    # -- the ops -------------------------------------------------------------------------------

    def start_out(
        self, x: torch.Tensor, tag: str, tier: str, lane: str, codec: str | None = None
    ) -> torch.Tensor:
        """Start copying x, which is dense and covers its storage, to `tier`; returns its ticket.

        `codec` packs it on the way; loads of the ticket unpack it. SpillFull if there is no room. x
        must not change before `wait_out`.
        """
        began_ns = now_ns()
        self._enter()
        _check_dense(x, tag)
        show(x, tag)
        slot = self.device.slot(x, tier, codec)
        saved = Saved(self, tag, lane, slot, layout=(x.shape, x.stride()))
        ticket = self._issue(saved, self._saved_died)
        if (cache := self._cache) is not None and cache.keep(saved, x):
            note("keep", tag, lane, began_ns, now_ns() - began_ns)
            return ticket
        return self._start_out(x, saved, ticket, began_ns)

    def start_store(self, x: torch.Tensor, tag: str, lane: str) -> torch.Tensor:
        """Like `start_out`, to host memory that ops can use in place, which `host_of` returns.

        The copy runs even if the ticket dies, because somebody may hold that memory.
        """
        began_ns = now_ns()
        self._enter()
        _check_dense(x, tag)
        (host,) = self.device.addressable([x.numel() * x.element_size()])
        slot = self.device.slot_of(host)
        assert slot is not None, "the device does not know its own memory"
        layout = (x.shape, x.stride())
        saved = Saved(self, tag, lane, slot, awaited=True, host=host, layout=layout)
        ticket = self._start_out(x, saved, self._issue(saved, self._saved_died), began_ns)
        self.device.sent(host, saved.copy)
        return ticket

    def store_in_place(
        self, nbytes: int, tag: str, zeroed: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat host memory that an op is about to write in place, and the ticket for it.

        The memory is uninitialized unless `zeroed`.
        """
        self._enter()
        (host,) = self.device.addressable([nbytes])
        slot = self.device.slot_of(host)
        assert slot is not None, "the device does not know its own memory"
        if zeroed:
            self.device.clear(host)
        saved = Saved(self, tag, "", slot, awaited=True, host=host)
        return host, self._issue(saved, self._saved_died)

    def stored(self, host: torch.Tensor) -> None:
        """Note that compute was given the op that writes the memory from `store_in_place`."""
        self.device.sent(host, self.device.mark())

    def _start_out(
        self, x: torch.Tensor, saved: Saved, ticket: torch.Tensor, began_ns: int
    ) -> torch.Tensor:
        """Reserve memory and start the copy out. After errors, the ticket's death undoes it."""
        tag, lane = saved.tag, saved.lane
        nbytes = saved.slot.nbytes
        self._reserve(nbytes, tag)
        try:
            label = Label("out", tag, listener())
            saved.copy = self._copy(saved, label, lane, x, partial(self._out_ended, saved))
        except BaseException:
            self._ledger.release(nbytes, drained=True)
            raise
        note("start_out", tag, lane, began_ns, now_ns() - began_ns)
        return ticket

    def wait_out(self, saved: Saved) -> None:
        """Return when x may be freed: the copy is complete, or compute is made to wait for it."""
        began_ns = now_ns()
        self._enter()
        if (cache := self._cache) is not None and cache.settle(saved):
            note("wait_out", saved.tag, saved.lane, began_ns, now_ns() - began_ns)
            return
        assert saved.copy is not None
        saved.awaited = True
        self._stand(saved.copy, saved.tag, load=False)
        note("wait_out", saved.tag, saved.lane, began_ns, now_ns() - began_ns)
        if saved.copy.error is not None:
            raise failure(saved.copy.error, "out", saved.tag, saved.slot)

    def start_fetch(
        self, host: torch.Tensor, tag: str, lane: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Start loading a tensor in `addressable` memory into a new buffer; see `start_load`.

        The load includes everything that compute was given to write there before. It first waits
        for whoever holds that memory (`Device.hold`).
        """
        began_ns = now_ns()
        self._enter()
        self._claim(host, tag)
        slot = self.device.slot_of(host)
        if slot is None:
            raise OffloadError(
                f"{tag} cannot be fetched: its {host.untyped_storage().nbytes()} bytes do not lie"
                " on the host tier. They were replaced while the compiled step ran; change"
                " parameters between steps only."
            )
        saved = self.saved_on_host(host, slot, tag, lane)
        kept = None if (cache := self._cache) is None else cache.fetch(host, tag, lane)
        return self._start_load(saved, tag, lane, kept, began_ns)

    def start_load(self, saved: Saved, tag: str, lane: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Start loading a saved tensor into a new buffer: (flat uint8 buffer, load ticket).

        The buffer must not be touched before `wait_load`. The ticket must be alive; it can be
        loaded any number of times.
        """
        began_ns = now_ns()
        self._enter()
        kept = None if (cache := self._cache) is None else cache.take(saved, lane)
        return self._start_load(saved, tag, lane, kept, began_ns)

    def _start_load(
        self,
        saved: Saved,
        tag: str,
        lane: str,
        kept: tuple[torch.Tensor, Copy | None] | None,
        began_ns: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        load = Load(self, tag, lane, saved)
        ticket = self._issue(load, self._load_died)
        if kept is not None:
            load.kept = True
            buffer, load.copy = kept
            note("take", tag, lane, began_ns, now_ns() - began_ns)
            return buffer, ticket
        nbytes = saved.slot.nbytes
        self._reserve(nbytes, tag, drains=False)
        try:
            gone = partial(self._deaths.append, partial(self._ledger.release, nbytes))
            buffer = self.device.allocate(saved.slot, gone)
        except BaseException:
            self._ledger.release(nbytes)
            raise
        label = Label("load", tag, listener())
        load.copy = self._copy(saved, label, lane, buffer, partial(self._ended, saved, "load"))
        note("start_load", tag, lane, began_ns, now_ns() - began_ns)
        return buffer, ticket

    def wait_load(self, load: Load) -> None:
        """Return when the buffer holds the data (or compute is made to wait for it)."""
        began_ns = now_ns()
        self._enter()
        load.awaited = True
        if load.copy is None:
            with self._lock:
                self.tally.prefetch_hits += 1
            return
        self._stand(load.copy, load.tag, load=True)
        note("wait_load", load.tag, load.lane, began_ns, now_ns() - began_ns)
        if load.copy.error is not None:
            raise failure(load.copy.error, "load", load.tag, load.saved.slot)

    def read_in_place(self, count: int) -> None:
        """Count operands that ops have read on the host in place."""
        with self._lock:
            self.tally.direct_reads += count

    @property
    def _cache(self) -> ActivationCache | None:
        """The keeper; None where a graph is captured, whose moves are always the same."""
        return None if self.device.captures else self.keeper

    def replayed(self, moves: int, out_bytes: int, in_bytes: int) -> None:
        """Count the moves of a graph that was replayed."""
        with self._lock:
            tally = self.tally
            tally.moves += moves
            tally.bytes_out += out_bytes
            tally.raw_bytes_out += out_bytes
            tally.bytes_in += in_bytes
            tally.raw_bytes_in += in_bytes

    # -- interface for the keeper ------------------------------------------------------------------

    @property
    def waited_us(self) -> float:
        """The time that compute has waited for copies, since the counters were reset."""
        return self.tally.wait_us

    def begin_out(self, saved: Saved, x: torch.Tensor, ended: Callable[[Copy], None]) -> Copy:
        """Start copying out a tensor that the keeper held; calls `ended` when the copy is over."""
        ended = partial(self._ended, saved, "out", then=ended)
        saved.copy = self._copy(saved, Label("out", saved.tag), saved.lane, x, ended)
        return saved.copy

    def begin_in(
        self, saved: Saved, buffer: torch.Tensor, lane: str, ended: Callable[[Copy], None]
    ) -> Copy:
        """Start loading into a buffer of the keeper, before anybody has asked for it."""
        ended = partial(self._ended, saved, "load", then=ended)
        return self._copy(saved, Label("load", saved.tag), lane, buffer, ended)

    def saved_on_host(self, host: torch.Tensor, slot: Slot, tag: str, lane: str) -> Saved:
        """A record of data in `addressable` memory, so that it can be loaded."""
        return Saved(self, tag, lane, slot, users=0, host=host)

    def died(self, tell: Callable[[], None]) -> None:
        """Have the next sweep call `tell`. For finalizers: takes no lock."""
        self._deaths.append(tell)

    def count_kept(self, counted: Counters) -> None:
        """Add to the tally what the keeper's forecast has counted since the last call."""
        now = counted.hits, counted.misses, counted.late, counted.wasted_bytes
        with self._lock:
            hits, misses, late, wasted = (
                b - a for a, b in zip(self._kept_counted, now, strict=True)
            )
            self._kept_counted = now
            tally = self.tally
            tally.keeper_hits += hits
            tally.keeper_misses += misses
            tally.keeper_late += late
            tally.keeper_wasted_bytes += wasted

    def copy_cancelled(self, saved: Saved) -> None:
        with self._lock:
            self._drop_user(saved)

    # -- copies ----------------------------------------------------------------------------------

    def _copy(
        self,
        saved: Saved,
        label: Label,
        lane: str,
        tensor: torch.Tensor,
        ended: Callable[[Copy], None],
    ) -> Copy:
        """Start a copy in the label's direction. It uses the slot until `ended` drops it."""
        with self._lock:
            saved.users += 1
        device = self.device
        try:
            mark = device.mark()
            if label.direction == "out":
                after = self._after(mark)
                return device.copy_out(lane, tensor, saved.slot, after, label, ended)
            after = self._after(mark, saved.copy)
            return device.copy_in(lane, saved.slot, tensor, after, label, ended)
        except BaseException:
            self.copy_cancelled(saved)
            raise

    def _ended(
        self,
        saved: Saved,
        direction: str,
        copy: Copy,
        then: Callable[[Copy], None] | None = None,
    ) -> None:
        with self._lock:
            if copy.error is None:
                self._count(saved, direction)
            self._drop_user(saved)
        if then is not None:
            then(copy)

    def _count(self, saved: Saved, direction: str) -> None:
        slot, tally = saved.slot, self.tally
        tally.moves += 1
        if direction == "out":
            tally.bytes_out += slot.crossed_bytes
            tally.raw_bytes_out += slot.nbytes
        else:
            tally.bytes_in += slot.crossed_bytes
            tally.raw_bytes_in += slot.nbytes

    # -- waits, reported to the listener ---------------------------------------------------------

    def _stand(self, copy: Copy, tag: str, load: bool) -> None:
        heard = listener()
        if heard is None:
            self._wait(copy, load)
            return
        began = None if copy.ended else heard.now()
        with heard.wait_range(tag):
            self._wait(copy, load)
        if began is not None:
            heard.waited(tag, began)

    def _claim(self, host: torch.Tensor, tag: str) -> None:
        heard = listener() if self.device.ever_held else None
        slot = None if heard is None else self.device.slot_of(host)
        if heard is None or slot is None or not slot.holds:
            self.device.claim(host)
            return
        began = heard.now()
        with heard.wait_range(tag):
            self.device.claim(host)
        heard.waited(tag, began, starting=True)

    def _reserve(self, nbytes: int, tag: str, drains: bool = True) -> None:
        heard = listener()
        began = None if heard is None else heard.now()
        if self._ledger.reserve(nbytes, drains) and heard is not None:
            heard.waited(tag, began, starting=True)

    # -- orders and waits, which test subclasses override to remove -------------------------------

    def _after(self, mark: Point | None, out: Copy | None = None) -> Sequence[Point]:
        """The points that a copy starts after: compute up to here and, for a load, the copy out."""
        return [point for point in (mark, out) if point is not None]

    def _wait(self, copy: Copy, load: bool) -> None:
        waited = self.device.wait(copy)
        with self._lock:
            tally = self.tally
            tally.wait_us += waited.duration_ns / 1000
            tally.late += waited.how is not How.READY
            if load:
                tally.prefetch_hits += waited.how is How.READY
                tally.demand_misses += waited.how is How.PROMOTED

    # -- ended copies and dead tickets -----------------------------------------------------------

    def sweep(self) -> None:
        """Release everything that died since the last sweep. Called at each op and before jobs."""
        if self._is_closed and self._sweeps:
            return  # a finalizer interrupted the sweep below, which goes on until all is done
        self._sweeps = True
        try:
            self._sweep()
        finally:
            self._sweeps = False

    def _bury(self, died: Callable[[], None]) -> None:
        """Note a death after `close`: no later sweep comes."""
        self._deaths.append(died)
        self.sweep()

    @interrupts.uninterrupted
    def _sweep(self) -> None:
        while self._deaths:
            try:
                died = self._deaths.popleft()
            except IndexError:  # another thread was faster
                return
            died()
            del died  # objects that it held may die with it and be queued next

    def _issue(self, entry: _Entry, died: Callable[[_Entry], None]) -> torch.Tensor:
        told = partial(died, entry)
        note = self._bury if self._is_closed else self._deaths.append
        entry.number, ticket = tickets.issue(entry, partial(note, told))
        self._live[entry.number] = told
        return ticket

    def _out_ended(self, saved: Saved, copy: Copy) -> None:
        with self._lock:
            if copy.error is None:
                self._count(saved, "out")
            self._out_over(saved)

    def _out_over(self, saved: Saved) -> None:
        self._ledger.release_locked(saved.slot.nbytes, drained=True)
        self._drop_user(saved)

    def _saved_died(self, saved: Saved) -> None:
        tickets.retire(saved.number)
        self._live.pop(saved.number, None)
        with self._lock:
            saved.ticket_alive = False
            self._drop_user(saved)
        if self.keeper is not None:
            self.keeper.forget(saved)
        self._cancel_if_unwanted(saved)

    def _load_died(self, load: Load) -> None:
        tickets.retire(load.number)
        self._live.pop(load.number, None)
        # nobody can wait for it any more, so it need not begin
        if load.copy is None or load.kept or load.awaited:
            return
        if self.device.cancel(load.copy):
            with self._lock:
                self._drop_user(load.saved)
            self._cancel_if_unwanted(load.saved)

    def _cancel_if_unwanted(self, saved: Saved) -> None:
        with self._lock:
            unwanted = not (saved.ticket_alive or saved.awaited) and saved.users == 1
        if unwanted and saved.copy is not None and self.device.cancel(saved.copy):
            with self._lock:
                self._out_over(saved)

    def _drop_user(self, saved: Saved) -> None:
        saved.users -= 1
        if not saved.users:
            saved.slot.free()

    # -- the rest --------------------------------------------------------------------------------

    def _enter(self) -> None:
        if os.getpid() != self._pid:
            raise OffloadError(
                "This tensor was moved by the parent process before fork(): what copies it did not "
                "come along. Run the compiled step wholly in one process, or start the workers "
                "with the `spawn` method."
            )
        interrupts.check()
        if self._deaths:
            self.sweep()

    def _gauges(self) -> dict[str, int]:
        self.sweep()
        held = {
            "live_tickets": len(self._live),
            "in_flight_bytes": self._ledger.held_bytes,
        }
        if self.keeper is not None:
            held["keeper_bytes"] = self.keeper.held_bytes
            held["keeper_table_bytes"] = self.keeper.foresight.table_bytes
        return held

    def close(self) -> None:
        """Stop. Waits for and loads of data that had not arrived fail from now on."""
        self._forget_gauges()
        self.device.close()
        self._ledger.close()
        self._is_closed = True
        for number, told in tuple(self._live.items()):
            tickets.tell_instead(number, partial(self._bury, told))
        self.sweep()


def _check_dense(x: torch.Tensor, tag: str) -> None:
    if x.is_contiguous():
        return
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if x.numel() and last + 1 != x.numel():
        raise OffloadError(
            f"{tag} cannot move: a tensor of size {tuple(x.shape)} and stride {x.stride()} does "
            "not fill its memory. Move the storage, as one dense tensor, and rebuild the view."
        )
