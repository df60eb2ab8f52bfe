"""A library in place of cuFile's: the calls, on the processor's memory, failing on demand."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offcompile.runtime.disk.gds import CuFile, open_cufile


class Call:
    """A function of a library: takes what ctypes would, lets its types be set."""

    def __init__(self, does: Any) -> None:
        self.does = does
        self.restype: Any = None
        self.argtypes: Any = None

    def __call__(self, *arguments: Any) -> Any:
        result = self.does(*arguments)
        return self.restype(*result) if isinstance(result, tuple) else result


class FakeLibrary:
    """Reads and writes with the system's calls; "GPU memory" is the processor's."""

    def __init__(self, opens: tuple[int, int] = (0, 0)) -> None:
        self.files: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self.fails: int | None = None
        #: calls that move something and still succeed before the rest fails; None: all of them
        self.good_calls: int | None = None
        #: the error of registering a file; 0: none
        self.refuses = 0
        #: told of each (writing to memory, address, bytes) before it happens
        self.touches: Callable[[bool, int, int], None] = lambda writes, pointer, nbytes: None
        self.is_open = False
        self._opens = opens
        self.cuFileDriverOpen = Call(self._open)
        self.cuFileDriverClose = Call(self._close)
        self.cuFileHandleRegister = Call(self._register)
        self.cuFileHandleDeregister = Call(lambda handle: self.files.pop(handle))
        self.cuFileRead = Call(self._read)
        self.cuFileWrite = Call(self._write)

    def _open(self) -> tuple[int, int]:
        self.is_open = not self._opens[0]
        return self._opens

    def _close(self) -> tuple[int, int]:
        self.is_open = False
        return (0, 0)

    def _register(self, handle: Any, told: Any) -> tuple[int, int]:
        if self.refuses:
            return (self.refuses, 0)
        number = 1000 + len(self.files)
        assert told._obj.type == 1
        self.files[number] = told._obj.handle.descriptor
        handle._obj.value = number
        return (0, 0)

    def _read(self, handle: int, pointer: int, nbytes: int, offset: int, within: int) -> int:
        return self._moved("read", os.preadv, handle, pointer, nbytes, offset)

    def _write(self, handle: int, pointer: int, nbytes: int, offset: int, within: int) -> int:
        return self._moved("write", os.pwritev, handle, pointer, nbytes, offset)

    def _moved(
        self, name: str, call: Any, handle: int, pointer: int, nbytes: int, offset: int
    ) -> int:
        self.calls.append((name, nbytes))
        self.touches(name == "read", pointer, nbytes)
        if self.good_calls is not None:
            self.good_calls -= 1
            if self.good_calls < 0:
                return -5011
        if self.fails is not None:
            return self.fails
        view = memoryview((ctypes.c_uint8 * nbytes).from_address(pointer)).cast("B")
        return int(call(self.files[handle], [view], offset))


def driver(tmp_path: Path) -> Path:
    path = tmp_path / "nvidia-fs"
    path.mkdir(exist_ok=True)
    return path


def opened(tmp_path: Path, library: FakeLibrary) -> CuFile:
    found = open_cufile(lambda: library, driver(tmp_path))
    assert isinstance(found, CuFile)
    return found
