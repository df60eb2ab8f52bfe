"""The CUDA calls that measurements need, in one place, so that a fake can stand in for a GPU."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.clock import timed_event
from offcompile.runtime.base.limits import PciLink, pci_link
from offcompile.runtime.base.mapping import Mapping
from offcompile.runtime.memory.pinning import CudaRegistrar

COMPUTE, LOADS, OUTS = "compute", "h2d", "d2h"
_FP8_FROM = (8, 9)
_BF16_FROM = (8, 0)


@dataclass(frozen=True)
class Card:
    """The device and the properties that its measurements depend on."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    #: PCI address such as `0000:01:00.0`; empty if unknown
    address: str
    cuda: str

    @property
    def matmul_dtypes(self) -> tuple[str, ...]:
        """Dtypes that its matrix units support, and fp32, which every card supports."""
        found = ["fp32", "fp16"]
        if self.capability >= _BF16_FROM:
            found += ["tf32", "bf16"]
        if self.capability >= _FP8_FROM:
            found.append("fp8")
        return tuple(found)


class DriverCalls(ABC):
    """One device. `kind` names the figure being measured; only a fake uses it."""

    card: Card
    device: torch.device

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor:
        """Flat uint8 host memory, pinned so that copies skip staging; pageable if CUDA refuses."""

    @abstractmethod
    def alias(self, host: torch.Tensor) -> torch.Tensor:
        """A flat uint8 device tensor on the same memory as a pinned host tensor."""

    @abstractmethod
    def issue(self, kind: str, amount: float, stream: str, call: Callable[[], object]) -> None:
        """Queue the work of `call` (bytes, operations or launches) on a stream."""

    @abstractmethod
    def mark(self, stream: str) -> Any:
        """A mark behind all work queued on the stream so far."""

    @abstractmethod
    def follow(self, stream: str, mark: Any) -> None:
        """Make work queued on the stream from now on wait for the mark."""

    @abstractmethod
    def elapsed_us(self, first: Any, last: Any) -> float:
        """Time between two marks; waits for the later one."""

    @abstractmethod
    def pin_us(self, nbytes: int) -> tuple[float, int]:
        """Time to register `nbytes` of touched memory, and CUDA's error code (0: success)."""

    @abstractmethod
    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy every element with a kernel, never with a copy engine."""

    @abstractmethod
    def gather(self, table: torch.Tensor, rows: torch.Tensor) -> None:
        """Gather rows of the table by index, with a kernel."""

    @abstractmethod
    def link(self) -> PciLink | None:
        """The card's PCI link, read after the card was used."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for all work and release cached memory."""


class CudaCalls(DriverCalls):
    """The real CUDA calls."""

    def __init__(self, index: int) -> None:
        self.card = describe_card(index)
        self.device = torch.device("cuda", index)
        self._streams: dict[str, torch.cuda.Stream] = {
            name: torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for name in (LOADS, OUTS)
        }

    def _stream(self, name: str) -> torch.cuda.Stream:
        return self._streams.get(name) or torch.cuda.current_stream(self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        host = torch.zeros(nbytes, dtype=torch.uint8)
        try:
            with torch.cuda.device(self.device):
                return host.pin_memory()
        except RuntimeError:
            # pageable memory has a rate too; `pin_us` reports that pinning fails
            return host

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        if not host.is_pinned():
            # a kernel that reads it would kill the process
            raise RuntimeError("host memory could not be pinned, and only such can be addressed")
        return torch.as_tensor(_Addressed(host), device=self.device)

    def issue(self, kind: str, amount: float, stream: str, call: Callable[[], object]) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(torch.cuda.stream(self._stream(stream)))
            call()

    def mark(self, stream: str) -> Any:
        event = timed_event()
        event.record(self._stream(stream))
        return event

    def follow(self, stream: str, mark: Any) -> None:
        self._stream(stream).wait_event(mark)

    def elapsed_us(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    def pin_us(self, nbytes: int) -> tuple[float, int]:
        mapping, registrar = Mapping(nbytes), CudaRegistrar()
        mapping.open(0, mapping.nbytes)
        mapping.touch(0, mapping.nbytes)
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            code = registrar.register(mapping.address, mapping.nbytes)
            taken_us = (time.perf_counter() - begun) * 1e6
            if code == 0 and registrar.unregister(mapping.address) != 0:
                mapping.keep()  # CUDA still refers to it
        return taken_us, code

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        from offcompile.runtime.kernels.copying import copy_launch

        try:
            launch = copy_launch(target, source)
            fits = launch.why_not() is None
        except OffloadError:
            fits = False
        if fits:
            launch.run()
        else:
            # not `copy_`, which uses a copy engine for dense memory
            torch.neg(source, out=target)

    def gather(self, table: torch.Tensor, rows: torch.Tensor) -> None:
        from offcompile.runtime.kernels.gathering import gather_rows

        gather_rows(table, rows)

    def link(self) -> PciLink | None:
        return pci_link(self.card.address)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


class _Addressed:
    """Exposes pinned memory to torch as memory of the device; keeps it alive."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.numel(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def describe_card(index: int) -> Card:
    found = torch.cuda.get_device_properties(index)
    place = [getattr(found, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return Card(
        index=index,
        name=found.name,
        capability=(found.major, found.minor),
        memory_bytes=found.total_memory,
        address="" if -1 in place else "{:04x}:{:02x}:{:02x}.0".format(*place),
        cuda=str(torch.version.cuda or torch.version.hip),
    )


def count_cards() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_no_cards() -> str:
    """The reason in one line, for when `count_cards()` is 0."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"no CUDA: torch {torch.__version__} was built without it"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "no CUDA device: CUDA_VISIBLE_DEVICES hides them all"
    return "no CUDA device: torch finds none; `nvidia-smi` tells whether the driver does"
