"""The movement ops, written against the Device interface alone.

A `Mover` starts copies and makes compute wait for them. `move_accounts` counts who uses a slot and
how many bytes are in flight; `live_tickets` releases what belonged to a ticket that has died.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch

from offcompile.ir import OffloadError
from offcompile.passes.correlation.predictor import Counters
from offcompile.runtime.base import interrupts
from offcompile.runtime.base.counters import Tally, add_gauges, note, now_ns
from offcompile.runtime.device.failures import failure
from offcompile.runtime.device.interface import Copy, Device, Label, Point, Slot
from offcompile.runtime.device.move_events import listener

from .activation_cache import ActivationCache
from .live_tickets import LiveTickets
from .move_accounts import MoveAccounts
from .probes import show
from .saved import Load, Saved, check_dense


class Mover:
    """Moves tensors out of and into the memory of one device.

    in_flight_bytes bounds sources of unfinished copies out, reload buffers and staging together: a
    caller that would exceed it waits until copies out have drained, but never for memory that only
    the caller itself can free. Thread-safe.
    """

    def __init__(self, device: Device, in_flight_bytes: int | None = None) -> None:
        self.device = device
        self._pid = os.getpid()
        self._accounts = MoveAccounts(device, in_flight_bytes)
        self._tickets = LiveTickets()
        #: uses spare memory between graphs; None if evicted tensors always leave at once
        self.keeper: ActivationCache | None = None
        device.before_copies(self.sweep)
        self._forget_gauges = add_gauges(self._gauges)

    @property
    def tally(self) -> Tally:
        return self._accounts.tally

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
        check_dense(x, tag)
        show(x, tag)
        slot = self.device.slot(x, tier, codec)
        saved = Saved(self, tag, lane, slot, layout=(x.shape, x.stride()))
        ticket = self._tickets.issue(saved, self._saved_died)
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
        check_dense(x, tag)
        (host,) = self.device.addressable([x.numel() * x.element_size()])
        slot = self.device.slot_of(host)
        assert slot is not None, "the device does not know its own memory"
        layout = (x.shape, x.stride())
        saved = Saved(self, tag, lane, slot, awaited=True, host=host, layout=layout)
        ticket = self._start_out(x, saved, self._tickets.issue(saved, self._saved_died), began_ns)
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
        return host, self._tickets.issue(saved, self._saved_died)

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
            ended = partial(self._accounts.over, saved, "out", reserved=True)
            saved.copy = self._copy(saved, label, lane, x, ended)
        except BaseException:
            self._accounts.ledger.release(nbytes, drained=True)
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
        ticket = self._tickets.issue(load, self._load_died)
        if kept is not None:
            load.kept = True
            buffer, load.copy = kept
            note("take", tag, lane, began_ns, now_ns() - began_ns)
            return buffer, ticket
        nbytes = saved.slot.nbytes
        self._reserve(nbytes, tag, drains=False)
        try:
            gone = partial(self._tickets.died, partial(self._accounts.ledger.release, nbytes))
            buffer = self.device.allocate(saved.slot, gone)
        except BaseException:
            self._accounts.ledger.release(nbytes)
            raise
        label = Label("load", tag, listener())
        ended = partial(self._accounts.over, saved, "load")
        load.copy = self._copy(saved, label, lane, buffer, ended)
        note("start_load", tag, lane, began_ns, now_ns() - began_ns)
        return buffer, ticket

    def wait_load(self, load: Load) -> None:
        """Return when the buffer holds the data (or compute is made to wait for it)."""
        began_ns = now_ns()
        self._enter()
        load.awaited = True
        if load.copy is None:
            self._accounts.found_there()
            return
        self._stand(load.copy, load.tag, load=True)
        note("wait_load", load.tag, load.lane, began_ns, now_ns() - began_ns)
        if load.copy.error is not None:
            load.copy.told = True  # it may have failed since the device let compute pass
            raise failure(load.copy.error, "load", load.tag, load.saved.slot)

    def read_in_place(self, count: int) -> None:
        """Count operands that ops have read on the host in place."""
        self._accounts.read_in_place(count)

    @property
    def _cache(self) -> ActivationCache | None:
        """The keeper; None where a graph is captured, whose moves are always the same."""
        return None if self.device.captures else self.keeper

    def replayed(self, moves: int, out_bytes: int, in_bytes: int) -> None:
        """Count the moves of a graph that was replayed."""
        self._accounts.replayed(moves, out_bytes, in_bytes)

    # -- interface for the keeper ------------------------------------------------------------------

    @property
    def waited_us(self) -> float:
        """The time that compute has waited for copies, since the counters were reset."""
        return self.tally.wait_us

    def begin_out(self, saved: Saved, x: torch.Tensor, ended: Callable[[Copy], None]) -> Copy:
        """Start copying out a tensor that the keeper held; calls `ended` when the copy is over."""
        ended = partial(self._kept_copy_ended, saved, "out", ended)
        saved.copy = self._copy(saved, Label("out", saved.tag), saved.lane, x, ended)
        return saved.copy

    def begin_in(
        self, saved: Saved, buffer: torch.Tensor, lane: str, ended: Callable[[Copy], None]
    ) -> Copy:
        """Start loading into a buffer of the keeper, before anybody has asked for it."""
        ended = partial(self._kept_copy_ended, saved, "load", ended)
        return self._copy(saved, Label("load", saved.tag), lane, buffer, ended)

    def saved_on_host(self, host: torch.Tensor, slot: Slot, tag: str, lane: str) -> Saved:
        """A record of data in `addressable` memory, so that it can be loaded."""
        return Saved(self, tag, lane, slot, users=0, host=host)

    def died(self, tell: Callable[[], None]) -> None:
        """Have the next sweep call `tell`. For finalizers: takes no lock."""
        self._tickets.died(tell)

    def count_kept(self, counted: Counters) -> None:
        """Add to the tally what the keeper's forecast has counted since the last call."""
        self._accounts.kept(counted)

    def copy_cancelled(self, saved: Saved) -> None:
        self._accounts.drop(saved)

    def _kept_copy_ended(
        self, saved: Saved, direction: str, then: Callable[[Copy], None], copy: Copy
    ) -> None:
        self._accounts.over(saved, direction, copy)
        then(copy)

    # -- copies ----------------------------------------------------------------------------------

    def _copy(
        self,
        saved: Saved,
        label: Label,
        lane: str,
        tensor: torch.Tensor,
        ended: Callable[[Copy], None],
    ) -> Copy:
        """Start a copy in the label's direction. `ended` drops it as a user of the slot."""
        self._accounts.use(saved)
        device = self.device
        try:
            mark = device.mark()
            if label.direction == "out":
                after = self._after(mark)
                return device.copy_out(lane, tensor, saved.slot, after, label, ended)
            after = self._after(mark, saved.copy)
            return device.copy_in(lane, saved.slot, tensor, after, label, ended)
        except BaseException:
            self._accounts.drop(saved)
            raise

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
        if self._accounts.ledger.reserve(nbytes, drains) and heard is not None:
            heard.waited(tag, began, starting=True)

    # -- orders and waits, which test subclasses override to remove -------------------------------

    def _after(self, mark: Point | None, out: Copy | None = None) -> Sequence[Point]:
        """The points that a copy starts after: compute up to here and, for a load, the copy out."""
        return [point for point in (mark, out) if point is not None]

    def _wait(self, copy: Copy, load: bool) -> None:
        self._accounts.waited(self.device.wait(copy), load)

    # -- dead tickets ----------------------------------------------------------------------------

    def sweep(self) -> None:
        """Release everything that died since the last sweep. Called at each op and before jobs."""
        self._tickets.sweep()

    def _saved_died(self, saved: Saved) -> None:
        self._tickets.retire(saved)
        self._accounts.ticket_died(saved)
        if self.keeper is not None:
            self.keeper.forget(saved)
        self._cancel_if_unwanted(saved)

    def _load_died(self, load: Load) -> None:
        self._tickets.retire(load)
        # nobody can wait for it any more, so it need not begin
        if load.copy is None or load.kept or load.awaited:
            return
        if self.device.cancel(load.copy):
            self._accounts.drop(load.saved)
            self._cancel_if_unwanted(load.saved)

    def _cancel_if_unwanted(self, saved: Saved) -> None:
        unwanted = self._accounts.unwanted(saved)
        if unwanted and saved.copy is not None and self.device.cancel(saved.copy):
            self._accounts.out_cancelled(saved)

    # -- the rest --------------------------------------------------------------------------------

    def _enter(self) -> None:
        if os.getpid() != self._pid:
            raise OffloadError(
                "This tensor was moved by the parent process before fork(): what copies it did not "
                "come along. Run the compiled step wholly in one process, or start the workers "
                "with the `spawn` method."
            )
        interrupts.check()
        self.sweep()

    def _gauges(self) -> dict[str, int]:
        self.sweep()
        held = {
            "live_tickets": len(self._tickets),
            "in_flight_bytes": self._accounts.ledger.held_bytes,
        }
        if self.keeper is not None:
            held["keeper_bytes"] = self.keeper.held_bytes
            held["keeper_table_bytes"] = self.keeper.foresight.table_bytes
        return held

    def close(self) -> None:
        """Stop. Waits for and loads of data that had not arrived fail from now on."""
        self._forget_gauges()
        self.device.close()
        self._accounts.ledger.close()
        self._tickets.close()
