"""A disk in memory, behind `Files`: slow at any point, and at fault on demand."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from offcompile.runtime.base.mapping import PAGE_BYTES
from offcompile.runtime.disk.spill_file import Files

#: faults that a call may have instead of doing all that it was asked for
READ_FAULTS = ("EIO", "torn", "short", "nothing")
WRITE_FAULTS = (*READ_FAULTS, "ENOSPC")
GROW_FAULTS = ("ENOSPC", "EIO")
#: pieces of one transfer, between which others may go
_PIECES = 4


@dataclass(eq=False)
class SimulatedDisk:
    """`point` is called between any two pages or so; `touch(address, nbytes, writes, what)` told.

    faults: (read | write | grow, how many of its kind come before) → what goes wrong, once.
    hit: those that did.
    """

    name: str
    point: Callable[[str], None]
    touch: Callable[[int, int, bool, str], None]
    faults: dict[tuple[str, int], str] = field(default_factory=dict)
    hit: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0, "grow": 0})
    _data: dict[int, bytearray] = field(default_factory=dict)

    @property
    def files(self) -> Files:
        return Files(self._read, self._write, self._grow, lambda descriptor: 1 << 40)

    def _fault(self, what: str) -> str | None:
        number = self.counts[what]
        self.counts[what] += 1
        fault = self.faults.pop((what, number), None)
        if fault is not None:
            self.hit.append(f"{self.name} {what} {fault}")
        return fault

    def _grow(self, descriptor: int, offset: int, nbytes: int) -> None:
        self.point("grow")
        fault = self._fault("grow")
        if fault is not None:
            raise _error(fault)

    def _read(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        return self._move("read", descriptor, views, offset)

    def _write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        return self._move("write", descriptor, views, offset)

    def _move(self, what: str, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        fault = self._fault(what)
        self.point(what)
        if fault in ("EIO", "ENOSPC"):
            raise _error(fault)
        if fault == "nothing":
            return 0
        total = sum(map(len, views))
        most = total // 2 if fault in ("short", "torn") else total
        data = self._data.setdefault(descriptor, bytearray())
        if len(data) < offset + total:
            data.extend(bytes(offset + total - len(data)))
        moved = 0
        for view in views:
            self.touch(_address(view), len(view), what == "read", f"{self.name} {what}")
            step = max(len(view) // _PIECES // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)
            for start in range(0, len(view), step):
                size = min(step, len(view) - start, most - moved)
                if size > 0:
                    at = offset + moved
                    if what == "read":
                        view[start : start + size] = data[at : at + size]
                    else:
                        data[at : at + size] = view[start : start + size]
                    moved += size
                    self.point(what)
        if fault == "torn":
            raise _error("EIO")
        return moved


def _error(name: str) -> OSError:
    code = getattr(errno, name)
    return OSError(code, os.strerror(code))


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
