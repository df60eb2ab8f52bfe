"""A mover on the CUDA device on simulated streams, and programs for it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from simulated_streams import Faults, SimulatedStreams

from offcompile.runtime.device import tickets
from offcompile.runtime.device.cuda import staging
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.disk.spill_space import Extent
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Load, Saved

PAGE = 4096
STAGING = staging.CHUNKS * PAGE


class Disk(SpillStore):
    """A real store that tells the detector what it does with memory, and fails on demand."""

    streams: SimulatedStreams
    fail: OSError | None = None
    gate: threading.Event | None = None

    def write(self, extent: Extent, offset: int, buffer: memoryview) -> None:
        self._touch(buffer, write=False)
        super().write(extent, offset, buffer)

    def read(self, extent: Extent, offset: int, buffer: memoryview) -> None:
        self._touch(buffer, write=True)
        super().read(extent, offset, buffer)

    def _touch(self, buffer: memoryview, write: bool) -> None:
        self.streams.touch(torch.from_numpy(np.frombuffer(buffer, np.uint8)), write, "disk")
        if self.gate is not None:
            self.gate.wait()
        if self.fail is not None:
            raise self.fail


@dataclass
class Bench:
    """A mover on a device of its own, and short names for what graphs do."""

    streams: SimulatedStreams
    device: CudaDevice
    mover: Mover
    wrong: list[str] = field(default_factory=list)
    #: the codec of all copies out
    codec: str | None = None

    def full(self, nbytes: int, value: int) -> torch.Tensor:
        x = self.streams.empty(nbytes)
        self.streams.launch(fill(value), (), (x,), f"fill {value}")
        return x

    def expect(self, x: torch.Tensor, value: int, tag: str = "") -> None:
        def kernel(data: np.ndarray) -> None:
            if not (data == value).all():
                self.wrong.append(f"{tag}: {data[:4]}, not {value}")

        self.streams.launch(kernel, (x,), (), f"expect {value}")

    def out(
        self, x: torch.Tensor, tag: str = "x", tier: str = "host", lane: str = "d2h"
    ) -> torch.Tensor:
        return self.mover.start_out(x, tag, tier, lane, self.codec)

    def wait_out(self, ticket: torch.Tensor) -> None:
        self.mover.wait_out(tickets.find(ticket, Saved))

    def load(
        self, ticket: torch.Tensor, tag: str = "x", lane: str = "h2d"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mover.start_load(tickets.find(ticket, Saved), tag, lane)

    def wait_load(self, load: torch.Tensor) -> None:
        self.mover.wait_load(tickets.find(load, Load))

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Nobody sees a copy end meanwhile: what is in order then is so without luck."""
        gate = threading.Lock()
        with gate:
            self.device.before_copies(partial(_pass, gate))
            yield
        self.device.before_copies(self.mover.sweep)

    def settle(self) -> None:
        """Everything has ended, and what has died is given back."""
        self.mover.sweep()
        self.device.drain()
        self.streams.drain()
        self.mover.sweep()

    def left(self) -> dict[str, int]:
        """Bytes and objects still held: all zero once everything was dropped, but for the rings."""
        self.settle()
        used = self.streams.memory().allocated_bytes
        return {
            "device": used,
            "host": self.device.arena.used_bytes - self.rings,  # type: ignore[attr-defined]
            "disk": sum(store.used_bytes for store in self.device.stores.values()),
            **self.mover._gauges(),
        }

    @property
    def rings(self) -> int:
        """Bytes of the arena that lanes to the disk hold."""
        chunks = [chunk for ring in self.device._disk.rings.values() for chunk in ring._chunks]
        ours = [c for c in chunks if self.streams._watch.of(c.tensor).pool is self.device.arena]
        return sum(chunk.tensor.numel() for chunk in ours)

    def close(self) -> None:
        self.mover.close()
        self.streams.close()


def _pass(gate: threading.Lock) -> None:
    with gate:
        return None


NOTHING = {"device": 0, "host": 0, "disk": 0, "live_tickets": 0, "in_flight_bytes": 0}


def bench_of(
    seed: int,
    stores: dict[str, Disk] | None = None,
    device: Callable[..., CudaDevice] = CudaDevice,
    mover: type[Mover] = Mover,
    streams: type[SimulatedStreams] = SimulatedStreams,
    faults: Faults | None = None,
    pace_s: float | None = None,
    limit_bytes: int = 1 << 30,
    in_flight_bytes: int | None = None,
) -> Bench:
    sim = streams(seed, faults, pace_s)
    for store in (stores or {}).values():
        store.streams = sim
    made = device(sim, sim.arena(limit_bytes), stores or {}, STAGING)
    return Bench(sim, made, mover(made, in_flight_bytes))


def fill(value: int) -> Callable[[np.ndarray], None]:
    return lambda data: data.fill(value)


# -- programs ------------------------------------------------------------------------------------


def train(bench: Bench, nbytes: int = 64, tier: str = "host", layers: int = 4) -> None:
    """A forward that saves each layer's output and a backward that reads them, reversed."""
    lanes = ("d2h", "h2d") if tier == "host" else ("device_to_disk", "disk_to_device")
    saved: list[torch.Tensor] = []
    x = bench.full(nbytes, 100)
    for layer in range(layers):
        # the same memory is written again as soon as the copy out of it has been waited for
        bench.streams.launch(fill(layer), (), (x,), f"F{layer}")
        saved.append(bench.out(x, f"a{layer}", tier, lanes[0]))
        y = bench.streams.empty(nbytes)
        bench.streams.launch(lambda x, y: np.copyto(y, x), (x,), (y,), f"G{layer}")
        bench.wait_out(saved[-1])
        if layer % 2:
            x = y
    del x, y
    loads: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in reversed(range(layers)):
        while saved and len(loads) < 3:
            left = saved.pop()
            loads.append(bench.load(left, tickets.find(left, Saved).tag, lanes[1]))
        buffer, ticket = loads.pop(0)
        bench.wait_load(ticket)
        bench.expect(buffer, layer, f"B{layer}")
        # its memory goes round at once, while the kernel may still be queued
        del buffer, ticket


def drop_before_the_wait(bench: Bench) -> None:
    """Memory dropped without a wait may not be given out while a copy still uses it."""
    with bench.unseen():
        ticket = bench.out(bench.full(64, 1))
        y = bench.full(64, 2)
        bench.wait_out(ticket)
        bench.load(ticket)
        z = bench.full(64, 3)
    bench.expect(y, 2)
    bench.expect(z, 3)


def free_a_slot_that_was_read(bench: Bench) -> None:
    """A load that nobody waits for reads a block that the next tensor gets."""
    ticket = bench.out(bench.full(64, 1))
    bench.wait_out(ticket)
    bench.load(ticket)
    del ticket
    bench.mover.sweep()
    bench.device.drain()
    bench.mover.sweep()
    ticket = bench.out(bench.full(64, 2))
    bench.wait_out(ticket)


def load_at_once(bench: Bench) -> None:
    """Nothing but the copies themselves between the way out and the way back."""
    with bench.unseen():
        ticket = bench.out(bench.full(64, 5))
        buffer, load = bench.load(ticket)
        bench.wait_load(load)
        bench.expect(buffer, 5)


def wait_on_another_stream(bench: Bench) -> None:
    """A wait there says nothing of what the memory's own stream does next."""
    with bench.unseen():
        x = bench.full(64, 1)
        ticket = bench.out(x)
        with bench.streams.on(bench.streams.stream("another")):
            bench.wait_out(ticket)
        del x
        bench.expect(bench.full(64, 2), 2)


def stage_much(bench: Bench) -> None:
    """More than the ring holds, both ways."""
    tag = ("device_to_disk", "disk_to_device")
    ticket = bench.out(bench.full(3 * STAGING - 5, 9), tier="disk", lane=tag[0])
    bench.wait_out(ticket)
    buffer, load = bench.load(ticket, lane=tag[1])
    bench.wait_load(load)
    bench.expect(buffer, 9)


def wander(bench: Bench, seed: int, tier: str, sizes: Sequence[int], steps: int = 14) -> None:
    """Whatever a program may do, in any order."""
    dice = random.Random(seed)
    fresh: list[tuple[torch.Tensor, int]] = []
    out: list[tuple[torch.Tensor | None, torch.Tensor, int]] = []
    loads: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for value in range(1, steps + 1):
        act = dice.choice("nnooowwllldr")
        if act == "n":
            fresh.append((bench.full(dice.choice(sizes), value), value))
        elif act == "o" and fresh:
            x, was = fresh.pop(dice.randrange(len(fresh)))
            # dropping it here is fine: the copy holds it
            kept = x if dice.random() < 0.7 else None
            out.append((kept, bench.out(x, f"a{was}", tier, dice.choice(["d2h", "side"])), was))
        elif act == "w" and out:
            at = dice.randrange(len(out))
            kept, ticket, was = out[at]
            bench.wait_out(ticket)
            if kept is not None:
                bench.streams.launch(fill(0), (), (kept,), "again")
            out[at] = (None, ticket, was)
        elif act == "l" and out:
            _, ticket, was = dice.choice(out)
            lane = dice.choice(["h2d", "d2h"])
            loads.append((*bench.load(ticket, f"a{was}", lane), was))
        elif act == "r" and loads:
            buffer, load, was = loads.pop(dice.randrange(len(loads)))
            bench.wait_load(load)
            bench.expect(buffer, was)
        elif act == "d":
            for some in (fresh, out, loads):
                if some and dice.random() < 0.5:
                    some.pop(dice.randrange(len(some)))
    for buffer, load, was in loads:
        bench.wait_load(load)
        bench.expect(buffer, was)
