"""The accounts of one mover: who uses each slot, the bytes in flight, and counts of moves.

A slot is freed by its last user: the ticket, the copy out, or a load. Callers tell these accounts
when a copy begins and ends; nothing here starts a copy or waits for one.
"""

from __future__ import annotations

import threading

from offcompile.passes.correlation.predictor import Counters
from offcompile.runtime.base.counters import new_tally
from offcompile.runtime.device.interface import Copy, Device, How, Slot, Waited

from .ledger import InFlightLedger
from .saved import Saved


class MoveAccounts:
    """Thread-safe: one lock for slots, ledger and tally."""

    def __init__(self, device: Device, in_flight_bytes: int | None) -> None:
        self.tally = new_tally()
        self._lock = threading.Lock()
        self.ledger = InFlightLedger(
            in_flight_bytes, self._lock, self.tally, lambda: device.staging_bytes
        )
        #: the keeper's counts (hits, misses, late, wasted bytes) that the tally includes
        self._kept_counted = (0, 0, 0, 0)

    # -- users of slots --------------------------------------------------------------------------

    def use(self, saved: Saved) -> None:
        """Count one more user of the slot: a copy that is about to begin."""
        with self._lock:
            saved.users += 1

    def drop(self, saved: Saved) -> None:
        """Count one user less: a copy that was cancelled or never began."""
        with self._lock:
            _drop_user(saved)

    def over(self, saved: Saved, direction: str, copy: Copy, reserved: bool = False) -> None:
        """Count a copy that has ended, and drop it as a user of its slot.

        reserved: its bytes were in flight until now.
        """
        with self._lock:
            if copy.error is None:
                self._count(saved.slot, direction)
            if reserved:
                self.ledger.release_locked(saved.slot.nbytes, drained=True)
            _drop_user(saved)

    def out_cancelled(self, saved: Saved) -> None:
        """Undo the reservation of a copy out, and drop it as a user."""
        with self._lock:
            self.ledger.release_locked(saved.slot.nbytes, drained=True)
            _drop_user(saved)

    def ticket_died(self, saved: Saved) -> None:
        with self._lock:
            saved.ticket_alive = False
            _drop_user(saved)

    def unwanted(self, saved: Saved) -> bool:
        """True if nobody but the copy out itself uses the slot any more."""
        with self._lock:
            return not (saved.ticket_alive or saved.awaited) and saved.users == 1

    # -- counts ----------------------------------------------------------------------------------

    def waited(self, waited: Waited, load: bool) -> None:
        """Count a wait of compute for a copy."""
        with self._lock:
            tally = self.tally
            tally.wait_us += waited.duration_ns / 1000
            tally.late += waited.how is not How.READY
            if load:
                tally.prefetch_hits += waited.how is How.READY
                tally.demand_misses += waited.how is How.PROMOTED

    def found_there(self) -> None:
        """Count a load whose data was on the device already."""
        with self._lock:
            self.tally.prefetch_hits += 1

    def read_in_place(self, count: int) -> None:
        with self._lock:
            self.tally.direct_reads += count

    def replayed(self, moves: int, out_bytes: int, in_bytes: int) -> None:
        with self._lock:
            tally = self.tally
            tally.moves += moves
            tally.bytes_out += out_bytes
            tally.raw_bytes_out += out_bytes
            tally.bytes_in += in_bytes
            tally.raw_bytes_in += in_bytes

    def kept(self, counted: Counters) -> None:
        """Count what the keeper's forecast has counted since the last call."""
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

    def _count(self, slot: Slot, direction: str) -> None:
        tally = self.tally
        tally.moves += 1
        if direction == "out":
            tally.bytes_out += slot.crossed_bytes
            tally.raw_bytes_out += slot.nbytes
        else:
            tally.bytes_in += slot.crossed_bytes
            tally.raw_bytes_in += slot.nbytes


def _drop_user(saved: Saved) -> None:
    """Drop one user; callers hold the lock."""
    saved.users -= 1
    if not saved.users:
        saved.slot.free()
