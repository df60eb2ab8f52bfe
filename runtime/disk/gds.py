"""GPUDirect Storage: moves data between disk and GPU memory, bypassing host memory, with cuFile.

Used only if its kernel module is loaded: otherwise cuFile copies through host memory of its own,
and the package's own staging is as good (`cuda_direct_files` chooses). Never run on a machine that
has it; the tests use a fake library.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from offcompile.ir import OffloadError

from .spill import SpillStore
from .spill_space import Extent

LIBRARIES = ("libcufile.so.0", "libcufile.so")
DRIVER = Path("/proc/driver/nvidia-fs")
#: most bytes per call: the library's default limit
CHUNK_BYTES = 16 << 20

_OPAQUE_DESCRIPTOR = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD
_CUDA_DRIVER_ERROR = 5011  # `cuda_code` then holds the error


class _Status(ctypes.Structure):
    """CUfileError_t"""

    _fields_ = [("code", ctypes.c_int), ("cuda_code", ctypes.c_int)]


class _Handle(ctypes.Union):
    _fields_ = [("descriptor", ctypes.c_int), ("pointer", ctypes.c_void_p)]


class _Description(ctypes.Structure):
    """CUfileDescr_t"""

    _fields_ = [("type", ctypes.c_int), ("handle", _Handle), ("operations", ctypes.c_void_p)]


class CuFile:
    """The cuFile library with its driver open. `close` it once no file is registered any more."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name in ("cuFileDriverOpen", "cuFileDriverClose", "cuFileHandleRegister"):
            getattr(library, name).restype = _Status
        library.cuFileHandleDeregister.restype = None
        library.cuFileHandleDeregister.argtypes = [ctypes.c_void_p]
        for name in ("cuFileRead", "cuFileWrite"):
            call = getattr(library, name)
            call.restype = ctypes.c_ssize_t
            call.argtypes = [
                *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
                *(ctypes.c_longlong, ctypes.c_longlong),
            ]
        _check(library.cuFileDriverOpen(), "opening its driver")

    def register(self, descriptor: int) -> int:
        """Returns a handle for an open file, which must be direct (O_DIRECT)."""
        handle = ctypes.c_void_p()
        told = _Description(_OPAQUE_DESCRIPTOR, _Handle(descriptor=descriptor), None)
        status = self._library.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(told))
        _check(status, "registering a spill file")
        assert handle.value is not None
        return handle.value

    def deregister(self, handle: int) -> None:
        self._library.cuFileHandleDeregister(handle)

    def read(self, handle: int, pointer: int, nbytes: int, offset: int) -> int:
        """Read the file into GPU memory; returns the bytes moved, raises OSError on failure."""
        return self._moved(self._library.cuFileRead(handle, pointer, nbytes, offset, 0))

    def write(self, handle: int, pointer: int, nbytes: int, offset: int) -> int:
        """Write GPU memory to the file; returns the bytes moved, raises OSError on failure."""
        return self._moved(self._library.cuFileWrite(handle, pointer, nbytes, offset, 0))

    def close(self) -> None:
        _check(self._library.cuFileDriverClose(), "closing its driver")

    def _moved(self, result: int) -> int:
        if result == -1:
            code = ctypes.get_errno() or errno.EIO
            raise OSError(code, os.strerror(code))
        if result < 0:
            raise OSError(errno.EIO, f"cuFile error {-result}")
        return result


def _check(status: _Status, doing: str) -> None:
    if status.code:
        code = f"error {status.code}"
        if status.code == _CUDA_DRIVER_ERROR:
            code += f", CUDA error {status.cuda_code}"
        raise OffloadError(
            f"GPUDirect Storage failed {doing} ({code}): look at cufile.log, or run "
            "`gdscheck -p`; copies go through host memory meanwhile"
        )


def _load() -> Any:
    refused = ""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name, use_errno=True)
        except OSError as error:
            refused = str(error)
    raise OffloadError(f"no GPUDirect Storage: {refused}")


def open_cufile(load: Callable[[], Any] = _load, driver: Path = DRIVER) -> CuFile | str:
    """Returns the library, or one line that says why disk copies go through host memory."""
    if not driver.exists():
        return (
            "no GPUDirect Storage: the kernel module nvidia-fs is not loaded (`modprobe "
            "nvidia-fs`); copies to disk go through host memory"
        )
    try:
        return CuFile(load())
    except (OffloadError, AttributeError) as error:
        return str(error)


def why_not_direct(directories: Sequence[Path]) -> str | None:
    """Returns None if GPU memory can reach files there directly, or one line that says why not."""
    found = this_cufile()
    if isinstance(found, str):
        return found
    try:
        with SpillStore(directories) as store:
            GdsStore(store, found).close()
    except OffloadError as error:
        return str(error)
    return None


@cache
def this_cufile() -> CuFile | str:
    """Returns this process's `open_cufile()`, opened once."""
    return open_cufile()


class GdsStore:
    """Reads and writes extents of a store straight to and from GPU memory.

    Calls block until the bytes have arrived, and ignore streams: kernels that write the source
    must have finished before, and those that read the target must start after. Thread-safe;
    `on_card` makes the card current on the thread that moves a part.
    """

    def __init__(
        self,
        store: SpillStore,
        cufile: CuFile,
        on_card: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        if not store.direct:
            places = ", ".join(map(str, store.directories))
            raise OffloadError(
                f"GPUDirect Storage wants files that pass the page cache by, and {places} has "
                'none: name a directory on a local disk with options={"spill": "/path"}'
            )
        self._store, self._cufile, self._on_card = store, cufile, on_card
        self._handles: list[int] = []
        try:
            for descriptor in store.descriptors:
                self._handles.append(cufile.register(descriptor))
        except BaseException:
            self.close()
            raise

    def write(self, extent: Extent, offset: int, pointer: int, nbytes: int) -> None:
        """Write `nbytes` of GPU memory at `offset` of `extent`; both in whole pages."""
        self._move(extent, offset, pointer, nbytes, writing=True)

    def read(self, extent: Extent, offset: int, pointer: int, nbytes: int) -> None:
        """Fill `nbytes` of GPU memory from `offset` of `extent`; both in whole pages."""
        self._move(extent, offset, pointer, nbytes, writing=False)

    def close(self) -> None:
        """Deregister the files; call this before closing the store."""
        while self._handles:
            self._cufile.deregister(self._handles.pop())

    def _move(self, extent: Extent, offset: int, pointer: int, nbytes: int, writing: bool) -> None:
        call = self._cufile.write if writing else self._cufile.read

        def transfer(file: int, at: int, begin: int, size: int) -> None:
            for start in range(0, size, CHUNK_BYTES):
                part = min(CHUNK_BYTES, size - start)
                with self._store.moving(part, writing), self._on_card():
                    self._whole(call, file, pointer + begin + start, part, at + start, writing)

        self._store.spread(extent, offset, nbytes, writing, transfer)

    def _whole(
        self,
        call: Callable[[int, int, int, int], int],
        file: int,
        pointer: int,
        nbytes: int,
        at: int,
        writing: bool,
    ) -> None:
        try:
            moved = call(self._handles[file], pointer, nbytes, at)
            if moved != nbytes:
                raise OSError(errno.EIO, f"{moved} bytes of {nbytes}")
        except OSError as error:
            place = self._store.directories[file]
            raise OffloadError(
                f"{'writing' if writing else 'reading'} {nbytes} bytes at {at} of the spill file "
                f"in {place} through GPUDirect Storage failed ({error.strerror}): check that disk "
                "(`dmesg`, cufile.log)"
            ) from error
