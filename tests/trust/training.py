"""Little training steps on the CUDA device's own code, with simulated streams and disks below it.

Each step is some graphs' forward and backward, once or several times, and updates of weights and
of states on disk by channels meanwhile. Every value is known beforehand and looked at wherever it
is read: `Training.wrong` names what was not as it should be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from cuda_bench import STAGING, Bench, Disk, fill
from simulated_streams import SimulatedStreams
from update_bench import KINDS, SimulatedCarrier, Updates, produce, weight_of

from offcompile.ir import OffloadError
from offcompile.passes.correlation.predictor import Predictor
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.moves.activation_cache import ActivationCache
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.states.disk_states import DiskStates
from offcompile.runtime.states.state_blocks import GRAIN
from offcompile.runtime.states.update_workers import UpdateWorkers

from .interleaving import Interleaving
from .simulated_disk import SimulatedDisk

BLOCK_BYTES = GRAIN * 8
F32 = torch.float32
LANES = {"host": ("d2h", "h2d"), "disk": ("device_to_disk", "disk_to_device")}


class Stopped(Exception):
    """The model's own error, in the middle of a step."""


@dataclass(frozen=True)
class Shape:
    """The sizes, places and limits that are drawn for a program."""

    #: bytes of the activations of each layer, and where they go: host, disk, or None
    sizes: tuple[int, ...]
    tiers: tuple[str | None, ...]
    weights_on_host: tuple[bool, ...]
    #: blocks of each layer's states on disk
    state_blocks: tuple[int, ...]
    #: where layers end a graph
    cuts: frozenset[int]
    steps: int
    rounds: int
    ahead: int
    channels: int
    in_flight_bytes: int | None
    #: bytes that the keeper may keep; None: there is no keeper
    kept_bytes: int | None
    state_buffers: int
    states_kept: int

    @property
    def graphs(self) -> list[list[int]]:
        found: list[list[int]] = [[]]
        for layer in range(len(self.sizes)):
            if layer in self.cuts and found[-1]:
                found.append([])
            found[-1].append(layer)
        return found


def shape_of(dice: random.Random) -> Shape:
    layers = dice.randint(2, 4)
    several = range(layers)
    in_flight = dice.choice((None, None, 12_000))
    return Shape(
        sizes=tuple(dice.choice((64, 200, 5000)) for _ in several),
        tiers=tuple(dice.choice(("host", "host", "disk", None)) for _ in several),
        weights_on_host=tuple(dice.random() < 0.6 for _ in several),
        state_blocks=tuple(dice.choice((0, 1, 2)) for _ in several),
        cuts=frozenset(layer for layer in several if dice.random() < 0.4),
        steps=dice.randint(2, 3),
        rounds=dice.choice((1, 1, 2)),
        ahead=dice.randint(1, 3),
        channels=dice.randint(1, 3),
        in_flight_bytes=in_flight,
        kept_bytes=dice.choice((None, None, 0, 300, 6000)),
        state_buffers=dice.choice((3, 4)),
        states_kept=dice.choice((0, 0, 2)),
    )


class Training:
    """`values` are the weights as they should be, `sums` what each layer's states have had."""

    def __init__(
        self,
        seed: int,
        shape: Shape,
        run: Interleaving,
        disks: tuple[SimulatedDisk, SimulatedDisk],
        place: Path,
    ) -> None:
        self.shape, self.run = shape, run
        self.dice = random.Random(f"training {seed}")
        streams = SimulatedStreams(seed)
        self.store = Disk([place], files=disks[0].files, weights=[1.0], reserve_bytes=0)
        self.store.streams = streams
        made = CudaDevice(streams, streams.arena(), {"disk": self.store}, STAGING, cufile=_no_way)
        self.bench = Bench(streams, made, Mover(made, shape.in_flight_bytes))
        self.keeper: ActivationCache | None = None
        if shape.kept_bytes is not None:
            self.keeper = self.bench.mover.keeper = ActivationCache(self.bench.mover, Predictor())
        carrier = SimulatedCarrier(self.bench.mover)
        carrier.bench = self.bench
        self.updates = Updates(self.bench, carrier, UpdateWorkers(shape.channels))
        self.states = DiskStates(
            [place],
            shape.states_kept * BLOCK_BYTES,
            block_bytes=BLOCK_BYTES,
            buffers=shape.state_buffers,
            small_bytes=0,
            files=disks[1].files,
        )
        layers = range(len(shape.sizes))
        self.values = [10 * layer + 1 for layer in layers]
        self.sums = [0] * len(layers)
        self.visits = [0] * len(layers)
        self.weights = [
            weight_of(self.bench, shape.sizes[n], self.values[n], shape.weights_on_host[n])
            for n in layers
        ]
        for n in layers:
            if shape.state_blocks[n]:
                self.states.add(n, shape.state_blocks[n] * GRAIN, [F32, F32])
        self.states.expect([n for n in reversed(layers) if shape.state_blocks[n]])
        #: called at every op of a step; may raise
        self.at_op: Callable[[], None] = _nothing

    @property
    def wrong(self) -> list[str]:
        return self.bench.wrong

    # -- a step ----------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        shape, waits = self.shape, list[Callable[[], None]]()
        sums: list[torch.Tensor | None] = [None] * len(shape.sizes)
        total = [0] * len(shape.sizes)
        for at in range(shape.rounds):
            saved = self._forward(10 * number + at)
            last = at + 1 == shape.rounds
            self._backward(saved, sums, total, waits if last else None)
            del saved
        for wait in waits:
            wait()
        self.updates.channels.settle()
        self.updates.carrier.finish()
        self.states.step_over()
        for n, gradient in enumerate(total):
            self.values[n] = (self.values[n] + gradient) % 256
            if shape.state_blocks[n]:
                self.sums[n] += gradient
                self.visits[n] += 1

    def _forward(self, first: int) -> dict[int, tuple[torch.Tensor, bool, int]]:
        """Layer → its input, or the ticket for it; whether it left; its value."""
        shape, bench = self.shape, self.bench
        saved: dict[int, tuple[torch.Tensor, bool, int]] = {}
        x, value = self._make(shape.sizes[0], first), first
        leaving: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for graph in shape.graphs:
            with self._graph("F", graph):
                for n in graph:
                    self.at_op()
                    weight = self._weight(n)
                    after = (value + self.values[n] + 1) % 256
                    size = shape.sizes[min(n + 1, len(shape.sizes) - 1)]
                    y = self._make(size, after, ((x, value, True), (weight, self.values[n], False)))
                    tier = shape.tiers[n]
                    if tier is None:
                        saved[n] = (x, False, value)
                    else:
                        ticket = bench.out(x, f"a{n}", tier, LANES[tier][0])
                        saved[n] = (ticket, True, value)
                        leaving.append((n, ticket, x))
                    while leaving and self.dice.random() < 0.6:
                        self._gone(*leaving.pop(0))
                    x, value = y, after
                    del weight, y
                # the next one waits for tensors that stay here, or nobody does
                while leaving and self.dice.random() < 0.8:
                    self._gone(*leaving.pop(0))
        return saved

    def _gone(self, n: int, ticket: torch.Tensor, x: torch.Tensor) -> None:
        self.bench.wait_out(ticket)
        if self.keeper is None:
            self.bench.streams.launch(fill(0xEE), (), (x,), f"again a{n}")

    def _backward(
        self,
        saved: dict[int, tuple[torch.Tensor, bool, int]],
        sums: list[torch.Tensor | None],
        total: list[int],
        waits: list[Callable[[], None]] | None,
    ) -> None:
        """waits: of the updates, which are started; None: gradients are only added up."""
        shape = self.shape
        coming: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        flow = 1
        for graph in reversed(shape.graphs):
            with self._graph("B", graph):
                order = list(reversed(graph))
                for at, n in enumerate(order):
                    self.at_op()
                    for m in order[at : at + shape.ahead]:
                        self._begin_load(m, saved, coming)
                    x, value = self._arrived(n, saved, coming)
                    weight = self._weight(n)
                    total[n] += (value + flow) % 16
                    self._gradient(n, x, value, weight, sums, (value + flow) % 16)
                    if waits is not None:
                        self._update(n, sums, total[n], waits)
                    flow = (flow + self.values[n]) % 256
                    del x, weight

    def _begin_load(
        self,
        n: int,
        saved: dict[int, tuple[torch.Tensor, bool, int]],
        coming: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        ticket, left, _ = saved[n]
        tier = self.shape.tiers[n]
        if left and n not in coming and tier is not None:
            coming[n] = self.bench.load(ticket, f"a{n}", LANES[tier][1])

    def _arrived(
        self,
        n: int,
        saved: dict[int, tuple[torch.Tensor, bool, int]],
        coming: dict[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, int]:
        x, left, value = saved.pop(n)
        if left:
            x, load = coming.pop(n)
            self.bench.wait_load(load)
        return x, value

    def _gradient(
        self,
        n: int,
        x: torch.Tensor,
        value: int,
        weight: torch.Tensor,
        sums: list[torch.Tensor | None],
        amount: int,
    ) -> None:
        """Read what the layer has, and add to its gradient where rounds are several."""
        reads = ((x, value, True), (weight, self.values[n], False))
        self.bench.streams.launch(self._checked(reads, None), (x, weight), (), f"B{n}")
        if self.shape.rounds > 1:
            have = sums[n]
            if have is None:
                sums[n] = self.bench.full(self.shape.sizes[n], amount)
            else:
                self.bench.streams.launch(_add(amount), (), (have,), f"add g{n}")

    def _update(
        self,
        n: int,
        sums: list[torch.Tensor | None],
        gradient: int,
        waits: list[Callable[[], None]],
    ) -> None:
        bench, updates, weight = self.bench, self.updates, self.weights[n]
        made, sums[n] = sums[n], None
        kind = self.dice.choice(KINDS)
        if made is None:
            made = produce(bench, self.shape.sizes[n], gradient % 256, kind)
        elif kind not in ("lent", "kept"):
            kind = "kept"
        if self.dice.random() < 0.5:  # by what goes on to the layer before
            bench.expect(self._weight(n), self.values[n] % 256, f"B{n} after its gradient")
        brought = updates.carrier.bring(weight, made, f"g{n}", lent=kind == "lent")
        if kind == "lent":
            bench.streams.launch(fill(0x77), (), (made,), "reuse")
        first = partial(self._state_update, n) if self.shape.state_blocks[n] else None
        wait = updates.start(weight, brought, f"w{n}", first)
        # copies that a keeper makes ahead of an update are not used: their version is old. The
        # detector knows no versions, so that there all are held
        held = self.keeper is not None or self.dice.random() < 0.5
        if self.shape.weights_on_host[n] and held:
            bench.device.hold(weight, partial(_tried, wait))
        else:
            waits.append(wait)

    def _state_update(self, n: int, gradient: torch.Tensor) -> None:
        for r in self.states.visit(n):
            for part in r.parts:
                self.run.touch(part.data_ptr(), part.nbytes, True, f"update states {n}")
                part.add_(float(gradient[0]) + r.start // GRAIN)

    # -- what ops do -----------------------------------------------------------------------------

    @contextmanager
    def _graph(self, phase: str, layers: list[int]) -> Iterator[None]:
        if self.keeper is None or self.shape.kept_bytes is None:
            yield
            return
        hosted = [self.weights[n] for n in layers if self.shape.weights_on_host[n]]
        limit = self.dice.choice((self.shape.kept_bytes, self.shape.kept_bytes // 2))
        self.keeper.enter((phase, tuple(layers)), limit, True, hosted, phase == "B")
        yield
        self.keeper.leave()

    def _weight(self, n: int) -> torch.Tensor:
        """The weight as a compiled graph uses it: in place, or a copy of it."""
        bench, weight = self.bench, self.weights[n]
        if not self.shape.weights_on_host[n]:
            return weight
        if self.dice.random() < 0.4:
            bench.device.claim(weight)
            return weight
        buffer, load = bench.mover.start_fetch(weight, f"w{n}", "h2d")
        bench.wait_load(load)
        return buffer

    def _make(
        self, nbytes: int, value: int, reads: tuple[tuple[torch.Tensor, int, bool], ...] = ()
    ) -> torch.Tensor:
        """A new tensor of `value` and a ramp, once what is read was found to be right."""
        made = self.bench.streams.empty(nbytes)
        given = tuple(tensor for tensor, _, _ in reads)
        work = self._checked(reads, value)
        self.bench.streams.launch(work, given, (made,), f"make {value}")
        return made

    def _checked(
        self, reads: tuple[tuple[torch.Tensor, int, bool], ...], value: int | None
    ) -> Callable[..., None]:
        wanted = [(number, ramps) for _, number, ramps in reads]

        def kernel(*arrays: np.ndarray) -> None:
            for data, (number, ramps) in zip(arrays, wanted, strict=False):
                want = ramp(data.size, number) if ramps else number % 256
                if not (data == want).all():
                    self.wrong.append(f"{data[:4]}, not {number}")
            if value is not None:
                arrays[-1][:] = ramp(arrays[-1].size, value)

        return kernel

    # -- between steps ---------------------------------------------------------------------------

    def told_late(self) -> list[str]:
        """Come to rest after an error; what there was to tell besides."""
        told = []
        for rest in (
            self._settle,
            self.updates.carrier.finish,
            self.states.settle,
            self.bench.settle,
        ):
            for _ in range(20):
                try:
                    rest()
                    break
                except OffloadError as error:
                    told.append(str(error))
            else:
                told.append(f"{rest.__qualname__} never comes to rest")
        return told

    def _settle(self) -> None:
        try:
            self.updates.channels.settle()
        finally:  # all of them are over now
            self.bench.streams._watch.known |= self.updates.clock

    def restore(self) -> None:
        """Give weights and states their values from before the step, as a checkpoint would."""
        bench = self.bench
        for n, weight in enumerate(self.weights):
            bench.device.claim(weight)
            bench.streams.launch(fill(self.values[n] % 256), (), (weight,), f"restore w{n}")
            torch.autograd.graph.increment_version(weight)
            if self.shape.state_blocks[n]:
                for r in self.states.visit(n):
                    for part in r.parts:
                        part.fill_(self._state(n, r.start // GRAIN))
        bench.settle()

    def check(self) -> None:
        """All weights and states, as nobody but the end of the training looks at them."""
        for n in range(len(self.weights)):
            weight = self._weight(n)
            self.bench.expect(weight, self.values[n] % 256, f"w{n} in the end")
            del weight
            if self.shape.state_blocks[n]:
                for r in self.states.visit(n, write=False):
                    want = self._state(n, r.start // GRAIN)
                    if not all(bool((part == want).all()) for part in r.parts):
                        self.wrong.append(f"states of w{n} from {r.start} are not {want}")
        self.bench.settle()

    def _state(self, n: int, block: int) -> float:
        return float(self.sums[n] + self.visits[n] * block)

    def left(self) -> list[str]:
        """List what is still held when nothing is needed any more, and close everything."""
        self.weights.clear()
        self.updates.carrier._copies.clear()
        if self.keeper is not None:
            self.keeper.enter("end", 0)
            self.keeper.leave()
        self.bench.settle()
        self.bench.device.shadows.release()
        gauges = self.bench.left() | {"frames over": self._frames_over()}
        gauges.pop("keeper_table_bytes", None)
        found = [f"{name}: {count}" for name, count in gauges.items() if count]
        self.updates.channels.close()
        self.bench.close()
        self.store.close()
        self.states.close()
        return found

    def _frames_over(self) -> int:
        facts = self.states.facts()
        return max(0, facts.frame_bytes - facts.limit_bytes)


def ramp(nbytes: int, value: int) -> np.ndarray:
    return ((np.arange(nbytes) + value) % 256).astype(np.uint8)


def _add(amount: int) -> Callable[[np.ndarray], None]:
    def kernel(data: np.ndarray) -> None:
        data += np.uint8(amount)

    return kernel


def _tried(wait: Callable[[], None]) -> None:
    """For who holds a weight: what went wrong is told where updates are settled."""
    with suppress(OffloadError):
        wait()


def _no_way() -> str:
    return "no way past the host is simulated"


def _nothing() -> None:
    """Nothing goes wrong in the model."""
