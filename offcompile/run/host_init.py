"""`with offcompile.host_init():` builds modules whose weights are never on the device."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

import torch

from offcompile.ir import OffloadError
from offcompile.machine.options import Options
from offcompile.machine.target import runtime_settings
from offcompile.runtime.base.progress import Progress
from offcompile.runtime.memory.accelerators import accelerators
from offcompile.runtime.moves.registry import runtime_for
from offcompile.runtime.states.host_birth import Birth

_Directory = str | os.PathLike[str]


class host_init:
    """Allocates and initialises parameters and large buffers in host memory.

    device: where the modules will compute; None: CUDA if available, else the CPU. For CUDA, host
    memory is pinned memory that the GPU can address; for the CPU, it is a file in a directory of
    `spill`, memory-mapped. spill, host_memory: like the options of `torch.compile` (and the
    variables `OFFCOMPILE_SPILL`, `OFFCOMPILE_HOST_MEMORY`); give the same values in both places.

    Applies to the thread that enters it. Reusable and reentrant.
    """

    def __init__(
        self,
        device: str | int | torch.device | None = None,
        *,
        spill: _Directory | Sequence[_Directory] | None = None,
        host_memory: int | str | None = None,
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        asked = torch.device(device)
        if asked.type not in ("cpu", "cuda", *accelerators()):
            raise OffloadError(
                f"host_init({str(device)!r}): weights can leave the CPU and CUDA devices so far."
                " Name one of these, or build the model outside of host_init."
            )
        given = {"spill": spill, "host_memory": host_memory}
        options = Options.read({k: v for k, v in given.items() if v is not None})
        self._settings = runtime_settings(options, asked)
        self._home = torch.device(self._settings.target)
        self._entered = _Entered()

    def __enter__(self) -> None:
        device = runtime_for(self._settings.key).device
        with ExitStack() as stack:
            if self._home.type != "cpu":
                stack.enter_context(self._home)
            progress = stack.enter_context(Progress("host_init"))
            stack.enter_context(Birth(device, self._home, progress.bytes_done))
            self._entered.stacks.append(stack.pop_all())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.stacks.pop().__exit__(kind, error, trace)


class _Entered(threading.local):
    def __init__(self) -> None:
        self.stacks: list[ExitStack] = []
