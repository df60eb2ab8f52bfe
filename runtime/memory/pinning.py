"""The table of memory registered with CUDA. It outlives arenas, since tensors may outlive them too.

Memory is unmapped only after CUDA has unregistered it. Segments die in finalizers, which must take
no locks and make no CUDA calls: they leave their number here, and the next sweep does the work.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import mmap
import os
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offcompile.runtime.base import host_limits
from offcompile.runtime.base.mapping import Mapping
from offcompile.runtime.base.once import first_time

_PORTABLE = 1
NO_DEVICE = 100
#: CUDA's names for the errors of registration, available without a driver
_SAID = {
    1: "invalid value",
    2: "out of memory",
    35: "the driver is too old for this CUDA",
    NO_DEVICE: "no CUDA device was found",
    304: "a call to the operating system failed",
    700: "illegal memory access",
    712: "the memory is registered already",
    713: "the memory is not registered",
    801: "not supported on this system",
}

_process = ctypes.CDLL(None, use_errno=True)
_process.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Registrar(Protocol):
    """Pins memory for the GPU. Both methods return CUDA's error code; 0 is success."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin [address, address + nbytes) for all devices."""

    def unregister(self, address: int) -> int:
        """Unpin the memory of `register(address, …)`, once no device uses it any more."""


class CudaRegistrar:
    """Registers memory with CUDA itself; refuses if there is no CUDA device."""

    def register(self, address: int, nbytes: int) -> int:
        if not torch.cuda.is_available():
            return NO_DEVICE
        code = int(_cudart().cudaHostRegister(address, nbytes, _PORTABLE))
        if code:
            _forget_last_error()
        return code

    def unregister(self, address: int) -> int:
        # synchronising an unused device would create a context on it
        is_used = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        try:
            for index in range(torch.cuda.device_count()):
                if is_used is None or is_used(index):
                    torch.cuda.synchronize(index)
        except RuntimeError:
            # a kernel failed earlier, and the code that waits for it gets the error; here it only
            # means that no work is left. The call below tells if CUDA can still unregister.
            _forget_last_error()
        code = int(_cudart().cudaHostUnregister(address))
        if code:
            _forget_last_error()
        return code


def _cudart() -> Any:
    load: Callable[[], Any] = torch.cuda.cudart
    return load()


def _forget_last_error() -> None:
    # CUDA keeps the code of a failed call, and torch would blame it on its next kernel launch
    if hasattr(_process, "cudaGetLastError"):
        _process.cudaGetLastError()


def said(code: int) -> str:
    """Returns CUDA's error in words."""
    return f"error {code}, {_SAID[code]}" if code in _SAID else f"error {code}"


@dataclass(frozen=True)
class _Registered:
    mapping: Mapping
    registrar: Registrar


class _Table:
    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.registered: dict[int, _Registered] = {}
        #: let go, and to be unregistered by the next sweep
        self.dead: deque[int] = deque()


# per process, as CUDA's own table is
_table = _Table()


def register(mapping: Mapping, registrar: Registrar) -> tuple[int | None, int]:
    """Pin a whole mapping; returns (its number, 0), or (None, CUDA's error code).

    The mapping lives until the first `sweep` after its `let_go`. Forked children do not get it: a
    child would otherwise receive a full copy, since the kernel copies pinned pages at the fork.
    """
    code = registrar.register(mapping.address, mapping.nbytes)
    if code:
        return None, code
    _process.madvise(mapping.address, mapping.nbytes, mmap.MADV_DONTFORK)
    number = next(_table.numbers)
    _table.registered[number] = _Registered(mapping, registrar)
    return number, 0


def let_go(number: int) -> None:
    """Mark the mapping as unused. Safe in finalizers: takes no lock, makes no CUDA call."""
    _table.dead.append(number)


def sweep() -> None:
    """Unregister and unmap the mappings let go since the last sweep; waits for the devices."""
    refused: list[tuple[int, int]] = []
    while _table.dead:
        # a child's table does not have the parent's numbers
        entry = _table.registered.pop(_table.dead.popleft(), None)
        if entry is None:
            continue
        code = entry.registrar.unregister(entry.mapping.address)
        if code:
            entry.mapping.keep()
            refused.append((entry.mapping.nbytes, code))
    if refused:
        nbytes, code = sum(size for size, _ in refused), refused[-1][1]
        _warn_once(
            "unregister",
            f"CUDA did not let go of {nbytes} bytes of pinned host memory ({said(code)}). They stay"
            " taken until this process ends. An earlier error of a kernel is the usual reason: run"
            " again with CUDA_LAUNCH_BLOCKING=1 to see which one.",
        )


def is_registered(address: int, nbytes: int) -> bool:
    """True if all of [address, address + nbytes) lies in one registered mapping."""
    return any(
        entry.mapping.address <= address
        and address + nbytes <= entry.mapping.address + entry.mapping.nbytes
        for entry in tuple(_table.registered.values())
    )


def warn_pageable(nbytes: int, code: int) -> None:
    """Warn, once per process, that host memory is not pinned, with the cause and a remedy."""
    _warn_once(
        "register",
        f"Host memory cannot be pinned: CUDA refused to register {nbytes} bytes ({said(code)}). "
        f"{_cause(nbytes, code)} Training goes on with pageable memory: results are the same, but "
        "copies are slower and do not run beside compute, and the GPU cannot access host memory "
        "in place.",
    )


def _cause(nbytes: int, code: int) -> str:
    if code == NO_DEVICE:
        return "Look at what `nvidia-smi` says, and in a container start it with `--gpus all`."
    found = []
    memlock = host_limits.memlock_bytes()
    container = host_limits.in_container()
    if host_limits.in_wsl():
        found.append(
            "Under WSL Windows bounds what can be pinned, mostly to half of the memory: raise "
            '`memory` in .wslconfig, or lower options={"host_memory": …}.'
        )
    if memlock is not None and memlock < nbytes:
        raise_it = (
            "start the container with `--ulimit memlock=-1`"
            if container
            else "run `ulimit -l unlimited` first, or raise memlock in /etc/security/limits.conf"
        )
        found.append(f"`ulimit -l` allows {memlock} bytes of locked memory: {raise_it}.")
    elif container:
        found.append(
            "This is a container: its runtime may forbid pinning; try `--ulimit memlock=-1` and "
            "more memory (`--memory`)."
        )
    return " ".join(found) or (
        'No limit was found that explains it: lower options={"host_memory": …}, or free memory.'
    )


def _warn_once(kind: str, text: str) -> None:
    if first_time("pinning", kind):
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _at_exit() -> None:
    # does not unmap: tensors may still lie there, and the system reclaims the memory anyway
    for number in list(_table.registered):
        entry = _table.registered.pop(number, None)
        if entry is not None:
            entry.mapping.keep()
            entry.registrar.unregister(entry.mapping.address)


def _forget_parents() -> None:
    # the addresses are not mapped in the child and may be reused for other data: never unmap them
    for entry in _table.registered.values():
        entry.mapping.keep()
    _table.registered.clear()
    _table.dead.clear()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)
