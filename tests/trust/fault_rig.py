"""A training that moves everything it can: activations and states to disk, checkpoints in a file.

Its steps fall into phases. A fault is put into one of them at the runtime's own seams; what stands
afterwards is held against the same training undisturbed.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from zoo import MLP

import offcompile
from offcompile.optim import AdamW
from offcompile.optim import state_placement as places
from offcompile.run.saving import Calls, save
from offcompile.runtime.disk import spill
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.moves.registry import close_all, runtimes
from offcompile.runtime.states.disk_states import DiskStates

PHASES = ("forward", "backward", "update", "checkpoint", "init")
STEPS = 2
_WIDTH, _ROWS = 64, 1024

Record = tuple[float, tuple[Tensor, ...]]


@dataclass
class Rig:
    """One training in `folder`. `x` and the weights are always the same ones."""

    folder: Path
    verify: bool = True
    calls: Calls = field(default_factory=Calls)

    def __post_init__(self) -> None:
        self.spill, self.states = self.folder / "spill", self.folder / "states"
        self.saved = self.folder / "saved" / "model.pt"
        for place in (self.spill, self.states, self.saved.parent):
            place.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        self.model, self.x = MLP(_WIDTH, 3), torch.randn(STEPS + 1, _ROWS, _WIDTH)
        options = {
            "hardware": "cpu",
            "memory": "minimum",
            "lowering": "aot_eager",
            "seconds": 0.1,
            "spill": self.spill,
            "verify_spill": self.verify,
        }
        self.run = torch.compile(self.model, backend="offcompile", options=options)
        self.loss: Tensor | None = None
        self.at = 0
        self._new_optimizer()

    def _new_optimizer(self) -> None:
        small = partial(DiskStates, block_bytes=32768, buffers=3, small_bytes=0)
        with mock.patch.object(places, "DiskStates", small):
            self.optimizer = AdamW(
                self.model.parameters(),
                lr=0.01,
                states="disk",
                directory=self.states,
                verify_spill=self.verify,
            )
            # the store is made where it is first needed: here
            self.store = self.optimizer._core.places.named("disk")

    # -- the phases ------------------------------------------------------------------------------

    def init(self) -> None:
        """A runtime of its own, with its files and threads; then the forward that makes it."""
        close_all()
        self.forward()

    def forward(self) -> None:
        self.model.zero_grad()
        self.loss = None
        self.loss = self.run(self.x[self.at]).square().mean()

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.settle()
        self.at += 1

    def checkpoint(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        save({**state, "at": self.at}, self.saved, calls=self.calls)

    def step(self) -> Record:
        self.forward()
        assert self.loss is not None
        loss = self.loss.item()
        self.backward()
        self.update()
        self.loss = None
        return loss, tuple(p.detach().clone() for p in self.model.parameters())

    def resume(self, fresh: bool = False) -> None:
        """From the checkpoint, with an optimizer of its own if `fresh`."""
        self.loss = None
        if fresh:
            self._new_optimizer()
        saved = torch.load(self.saved)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.model.zero_grad()
        self.at = saved["at"]

    # -- what is beneath -------------------------------------------------------------------------

    def drain(self) -> None:
        for runtime in runtimes():
            runtime.device.drain()

    def stores(self, phase: str) -> list[SpillStore]:
        """Those that a phase moves to or from."""
        if phase == "update":
            return [self.store._store]
        return [store for runtime in runtimes() for store in runtime.stores.values()]

    def holds_nothing(self) -> None:
        """No ticket, no byte of spill files, no named file and no thread but the runtime's own."""
        self.loss = None
        gc.collect()
        self.drain()
        found = offcompile.counters()
        left = {
            "tickets": found["live_tickets"],
            "bytes in flight": found["in_flight_bytes"]
            - sum(runtime.device.staging_bytes for runtime in runtimes()),
            "bytes of spill files": sum(store.used_bytes for store in self.stores("forward")),
            "files": sum(len(os.listdir(place)) for place in (self.spill, self.states)),
            "parts of checkpoints": sum(".part" in n for n in os.listdir(self.saved.parent)),
        }
        assert not any(left.values()), f"left behind: {left}"

    def close(self) -> None:
        """Nothing of it is there any more: no descriptor, no thread."""
        self.loss = None
        self.store.close()
        # weights lie in files of the host tier as long as they live
        del self.optimizer, self.store, self.model, self.run
        torch._dynamo.reset()
        close_all()
        gc.collect()


def threads() -> list[threading.Thread]:
    """Threads of runtimes and optimizers, without the process's own that trims the heap."""
    ours = (t for t in threading.enumerate() if t.name.startswith("offcompile"))
    return [thread for thread in ours if thread.name != "offcompile-heap"]


def descriptors(folder: Path) -> list[str]:
    """Files of a folder that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(file for file in found if file.startswith(str(folder)))


def same(found: Record, wanted: Record) -> bool:
    """True if both records are equal, bit for bit."""
    equal = all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))
    return found[0] == wanted[0] and equal


# -- seams ----------------------------------------------------------------------------------------


@contextmanager
def disks(rig: Rig, phase: str, **faults: Callable[..., Any]) -> Iterator[None]:
    """Calls of the files that the phase moves to and from are `fault(real, *given)`."""

    def files(real: Files) -> Files:
        return replace(real, **{n: partial(f, getattr(real, n)) for n, f in faults.items()})

    if phase == "init":  # the files are yet to be opened
        with mock.patch.object(spill, "Files", lambda: files(Files())):
            yield
        real = {file: Files() for store in rig.stores(phase) for file in store._files}
    else:
        real = {file: file._files for store in rig.stores(phase) for file in store._files}
        for file, calls in real.items():
            file._files = files(calls)
        yield
    for file, calls in real.items():
        file._files = calls


def refusing(code: int) -> Callable[..., Any]:
    def call(real: Callable[..., Any], *given: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


def short(real: Callable[..., int], descriptor: int, views: Sequence[memoryview], at: int) -> int:
    """A page, or a part of one the first time."""
    return real(descriptor, [views[0][:4096]], at)


def short_write(real: Callable[[int, memoryview], int], descriptor: int, view: memoryview) -> int:
    return real(descriptor, view[:1000])
