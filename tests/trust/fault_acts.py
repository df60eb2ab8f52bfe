"""How each fault is made to happen in a phase of a `Rig`, and what is looked at afterwards."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from offcompile.ir import OffloadError
from offcompile.run.saving import Calls
from offcompile.runtime.base import watchdog
from offcompile.runtime.base.mapping import PAGE_BYTES
from offcompile.runtime.base.threads import bare
from offcompile.runtime.device import cpu
from offcompile.runtime.memory import arena
from offcompile.runtime.moves import registry
from offcompile.runtime.states import state_blocks

from .fault_rig import Record, Rig, disks, refusing, same, short, short_write
from .faults import Cell

#: one that hangs is told after this; others may have a busy machine
_HANGS_S, _PATIENCE_S = 1.6, 60.0
#: a call takes about 100 µs in such small files
_SLOW_S = 0.01

Act = Callable[["Player", str], AbstractContextManager[Any]]


class Player:
    """Plays cells in one rig, which a checkpoint brings back to where it was."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        rig.step()
        rig.checkpoint()
        self.start_weights = tuple(p.detach().clone() for p in rig.model.parameters())
        self.wanted: Record = rig.step()
        #: set when the fault is over
        self.gone = threading.Event()

    def play(self, cell: Cell) -> str:
        """Make the fault happen; return what was not as the cell says, empty if all was."""
        rig, phase = self.rig, cell.phase
        self.gone = threading.Event()
        rig.resume()
        for before in ("forward", "backward")[: {"backward": 1, "update": 2}.get(phase, 0)]:
            getattr(rig, before)()
        rig.drain()
        caught: BaseException | None = None
        heard: list[str] = []
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = partial(self._hear, heard)
            with watchdog.patience(_HANGS_S if cell.fault == "hung disk" else _PATIENCE_S):
                try:
                    with _ACTS[cell.fault](self, phase):
                        try:
                            self._meet(cell)
                        except BaseException as error:
                            caught = bare(error)
                        finally:
                            self.gone.set()
                except BaseException as error:
                    return f"the fault itself went wrong: {error!r}"
            return self._judge(cell, caught, heard)

    def _meet(self, cell: Cell) -> None:
        rig = self.rig
        getattr(rig, cell.phase)()
        if cell.phase in ("forward", "init"):
            # a tensor that could not leave is told where it is needed, at the latest in backward
            rig.backward() if cell.outcome.startswith("error") else rig.drain()

    def _hear(self, heard: list[str], message: Warning | str, *_: Any, **__: Any) -> None:
        heard.append(str(message))
        if isinstance(message, watchdog.StallWarning) and "One call" in str(message):
            self.gone.set()

    def _judge(self, cell: Cell, caught: BaseException | None, heard: list[str]) -> str:
        rig, phase = self.rig, cell.phase
        if cell.outcome.startswith("error"):
            if caught is None:
                return "there was no error"
            if cell.says == "KeyboardInterrupt":
                as_said = isinstance(caught, KeyboardInterrupt)
            else:
                as_said = isinstance(caught, OffloadError) and _says(cell, str(caught))
            if not as_said:
                return f"the error is {caught!r}"
        elif caught is not None:
            return f"there was an error: {caught!r}"
        if cell.outcome == "told" and not any(_says(cell, said) for said in heard):
            return f"nobody was told; heard were {heard}"
        caught = None
        if cell.outcome == "error, repeat" and not self._is_untouched():
            return "weights were changed"
        try:
            found = self._go_on(cell.outcome, phase)
            if not same(found, self.wanted):
                return (
                    f"the loss is {found[0]}, and undisturbed {self.wanted[0]}; or weights differ"
                )
            rig.holds_nothing()
        except Exception as error:
            return f"afterwards: {error!r}"
        return ""

    def _is_untouched(self) -> bool:
        pairs = zip(self.rig.model.parameters(), self.start_weights, strict=True)
        return all(torch.equal(weight, before) for weight, before in pairs)

    def _go_on(self, outcome: str, phase: str) -> Record:
        rig = self.rig
        if phase == "checkpoint" or outcome == "error, resume":
            rig.resume()  # what is there is whole: the old one, or the new one
            if phase == "checkpoint":
                rig.checkpoint()
            return rig.step()
        if outcome == "error, repeat":
            return rig.step()
        assert rig.loss is not None
        loss = rig.loss.item()
        for after in {"backward": ("update",), "update": ()}.get(phase, ("backward", "update")):
            getattr(rig, after)()
        return loss, tuple(p.detach().clone() for p in rig.model.parameters())


def _says(cell: Cell, text: str) -> bool:
    return re.search(cell.says, text, re.S) is not None


# -- faults of disks ------------------------------------------------------------------------------


def at_disk(rig: Rig, phase: str, fault: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`fault(real, …)` stands in for the calls that reach the disk in that phase."""
    if phase == "checkpoint":
        return mock.patch.object(rig, "calls", Calls(write=partial(fault, os.write)))
    if phase == "init":
        return disks(rig, phase, allocate=fault)
    if phase == "forward":  # what it has written is read in backward
        return disks(rig, phase, pwritev=fault)
    return disks(rig, phase, pwritev=fault, preadv=fault)


def _full(player: Player, phase: str) -> AbstractContextManager[Any]:
    fault = refusing(errno.ENOSPC)
    if phase == "update":  # reading takes no space
        return disks(player.rig, phase, pwritev=fault)
    return at_disk(player.rig, phase, fault)


def _broken(player: Player, phase: str) -> AbstractContextManager[Any]:
    return at_disk(player.rig, phase, refusing(errno.EIO))


def _short(player: Player, phase: str) -> AbstractContextManager[Any]:
    return at_disk(player.rig, phase, short_write if phase == "checkpoint" else short)


def _slow(player: Player, phase: str) -> AbstractContextManager[Any]:
    def late(real: Callable[..., Any], *given: Any) -> Any:
        time.sleep(_SLOW_S)
        return real(*given)

    return at_disk(player.rig, phase, late)


def _hung(player: Player, phase: str) -> AbstractContextManager[Any]:
    def hang(real: Callable[..., Any], *given: Any) -> Any:
        player.gone.wait()
        return real(*given)

    return at_disk(player.rig, phase, hang)


@contextmanager
def _vanished(player: Player, phase: str) -> Iterator[None]:
    rig = player.rig
    place = {"update": rig.states, "checkpoint": rig.saved.parent}.get(phase, rig.spill)
    away = place.with_name("away")
    place.rename(away)
    try:
        yield
    finally:
        away.rename(place)


@contextmanager
def _corrupt(player: Player, phase: str) -> Iterator[None]:
    (store,) = (store for store in player.rig.stores(phase) if store.used_bytes)
    # a second descriptor: the store's own passes the page cache by
    places = [store.ranges(extent, 0, PAGE_BYTES)[0][:2] for extent in store._extents.live.values()]
    for file, at in places if phase == "update" else places[:1]:  # some states are in memory
        descriptor = os.open(f"/proc/self/fd/{store.descriptors[file]}", os.O_RDWR)
        try:
            (byte,) = os.pread(descriptor, 1, at + 100)
            os.pwrite(descriptor, bytes([byte ^ 4]), at + 100)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    yield


# -- of memory and threads ----------------------------------------------------------------------


@contextmanager
def _no_memory(player: Player, phase: str) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OffloadError("the operating system refused the memory")

    def exhausted(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    rig = player.rig
    if phase == "forward":
        for runtime in registry.runtimes():
            runtime.device._staging.clear()
            runtime.device._packing.clear()
        patch = mock.patch.object(arena.Arena, "block", refuse)
    elif phase == "backward":
        patch = mock.patch.object(cpu.torch, "empty", exhausted)
    elif phase == "init":
        patch = mock.patch.object(arena.Arena, "__init__", refuse)
    else:
        with rig.store._flow.lock:  # what lies free is gone; what blocks lie in is what there is
            frames = rig.store._frames
            free_bytes = sum(frame.nbytes for frame in frames._free)
            # a checkpoint makes do with little, not with nothing, which no block in memory would be
            if phase == "update" or free_bytes < frames.nbytes:
                frames.nbytes -= free_bytes
                frames._free.clear()
        patch = mock.patch.object(state_blocks, "Frame", refuse)
    with patch:
        yield


@contextmanager
def _dead_thread(player: Player, phase: str) -> Iterator[None]:
    rig = player.rig

    def die(*_: Any) -> None:
        raise SystemExit("told to")

    if phase in ("update", "checkpoint"):
        reader = rig.store._flow._reader
        with mock.patch.object(reader, "_work", die):
            yield
    elif phase == "init":
        refuse = mock.Mock(side_effect=RuntimeError("can't start new thread"))
        with mock.patch.object(threading.Thread, "start", refuse):
            yield
    else:
        lanes = [runtime.device.lanes for runtime in registry.runtimes()]
        before = [one.before for one in lanes]
        for one in lanes:
            one.before = die
        try:
            yield
        finally:
            for one, real in zip(lanes, before, strict=True):
                one.before = real


@contextmanager
def _interrupt(player: Player, phase: str) -> Iterator[None]:
    main, calls = threading.main_thread().ident, [0]
    assert main is not None and main == threading.get_ident()

    def press(real: Callable[..., Any], *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            signal.pthread_kill(main, signal.SIGINT)
            # the event that the main thread waits for must not come before it has heard
            player.gone.wait(5) if threading.get_ident() != main else None
        return real(*given)

    # processes that a shell starts in the background ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with at_disk(player.rig, phase, press):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


_ACTS: dict[str, Act] = {
    "ENOSPC": _full,
    "EIO": _broken,
    "short transfer": _short,
    "slow disk (100×)": _slow,
    "hung disk": _hung,
    "vanished directory": _vanished,
    "corrupt block": _corrupt,
    "allocation failure": _no_memory,
    "thread death": _dead_thread,
    "SIGINT": _interrupt,
}
