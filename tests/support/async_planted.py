"""Orders taken away from the CUDA device on the asynchronous one: bits must come out wrong.

Each plant has a program that needs the order, and the stream whose slowness shows that it is
missing. Some orders show only in programs of moves, since a compiled step has a second order in
their place.

These show in no bits. A copy holds its tensor until the host has seen it end: without compute's
wait for a copy out, memory is held longer and nothing else, unless kernels read the copy in place.
The waits of staging after a failed copy come too late for a result, since the error replaces it.
"""

from __future__ import annotations

import functools
import gc
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import gpu_checks
import torch
from async_device import Controls
from async_own_checks import DELAYS_US, DEVICE, settle, side_stream
from gpu_checks import deterministic
from torch import Tensor, nn
from trust.planted import PLANTS

from offcompile import optim
from offcompile.ir import OffloadError
from offcompile.runtime.device.cuda.copies import CudaCopy, Mark
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.cuda.host_aliases import HostAliases
from offcompile.runtime.device.cuda.staging import Chunk, Ring, StagingStep
from offcompile.runtime.device.interface import Copy, Point
from offcompile.runtime.device.streams import Event, Stream, TorchStreams
from offcompile.runtime.moves import ops
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.registry import RuntimeSettings, close_all, runtime_for
from offcompile.runtime.moves.weights import is_on_host, live_on_host
from offcompile.runtime.states.gradient_transport import GradientTransport, carrier_of

ROOM = 1 << 14


# --- programs: training ---------------------------------------------------------------------------


def _stack(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*parts).to(DEVICE)


def _batch(step: int, rows: int) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)


def _activations_leave() -> list[Tensor]:
    """Two steps at the least memory, and what they leave."""
    torch._dynamo.reset()
    model = _stack()
    forward = gpu_checks.ours("minimum")(model)
    found = []
    for step in range(2):
        loss = forward(_batch(step, 512)).square().mean()
        loss.backward()
        found.append(loss.detach().cpu())
    found += [p.grad.cpu() for p in model.parameters()]  # type: ignore[union-attr]
    return found


def _updates_beside() -> list[Tensor]:
    """Gradients and weights on the host, updates beside backward."""
    torch._dynamo.reset()
    model = _stack()
    forward = gpu_checks.ours("minimum")(model)
    optimizer = optim.AdamW(model.parameters(), 1e-2, states="host", stream=0.0, overlap=True)
    found = []
    for step in range(3):
        loss = forward(_batch(step, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    assert any(is_on_host(p) for p in model.parameters())
    return found + [p.detach().cpu() for p in model.parameters()]


def on_another_stream(compiler: Callable[[nn.Module], Any] | None = None) -> list[Tensor]:
    """A model of the default stream is first called, and trained, on another."""
    torch._dynamo.reset()
    model = _stack()
    forward = (compiler or gpu_checks.ours("minimum"))(model)
    settle()
    with stream_of("side"):
        loss = forward(torch.ones(512, 64).to(DEVICE)).square().mean()
        loss.backward()
        left = [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]  # type: ignore[union-attr]
    settle()
    assert compiler is not None or any(is_on_host(p) for p in model.parameters())
    return left


# --- programs: moves ------------------------------------------------------------------------------


def _update_of_a_weight_in_place() -> list[Tensor]:
    """The host updates a weight where kernels read it, as soon as its gradient is there."""
    key = RuntimeSettings(target=DEVICE).key
    weight = nn.Parameter(torch.zeros(ROOM, device=DEVICE))
    live_on_host(runtime_for(key).device, [weight])
    return _updated(weight, key)


def _update_of_a_weight_on_the_device() -> list[Tensor]:
    """The host updates its copy of a weight and sends that, before compute has read the last."""
    key = RuntimeSettings(target=DEVICE).key
    return _updated(nn.Parameter(torch.zeros(ROOM, device=DEVICE)), key)


def _updates_of_a_weight_in_turn() -> list[Tensor]:
    """The host updates its copy of a weight again while the last update returns."""
    key = RuntimeSettings(target=DEVICE).key
    weight = nn.Parameter(torch.zeros(ROOM, device=DEVICE))
    return _updated(weight, key, [_sent(weight, key) for _ in range(3)])


def _updated(weight: nn.Parameter, key: str, sent: Sequence[Tensor] = ()) -> list[Tensor]:
    """Values of the weight that compute saw before each of three updates. `sent`: gradients; if
    none, each update has one of its own, and the host waits for compute in between."""
    carrier = carrier_of(weight)
    assert carrier is not None
    carrier.place(weight)
    found = []
    for step in range(3):
        host = sent[step] if sent else _sent(weight, key)
        seen = weight.detach() * 1.0  # queued when the gradient is on its way already
        brought = carrier.bring(weight, host, "w")
        brought.arrive()
        carrier.place(weight).add_(brought.gradient)
        carrier.updated(weight, "w")
        carrier.finish()
        found.append(seen if sent else seen.cpu())
    return [seen.cpu() for seen in found]


def _sent(weight: Tensor, key: str) -> Tensor:
    """A gradient of ones on its way to the host."""
    gradient = torch.ones_like(weight)
    ticket = ops.start_store(gradient, "g", "host", "d2h", key)
    ops.wait_out(ticket, gradient)
    return ops.host_of(ticket, tuple(weight.shape), (1,), torch.float32, DEVICE)


def _results_in_place() -> list[Tensor]:
    """A kernel reads host memory that a copy out fills."""
    key = RuntimeSettings(target=DEVICE).key
    x = torch.ones(ROOM, device=DEVICE)
    return [(_sent(x, key) * 2).cpu()]


def _loads_at_once() -> list[Tensor]:
    """Loads of tensors whose copies out nobody has waited for."""
    key = RuntimeSettings(target=DEVICE).key
    tensors = [torch.full((ROOM,), float(i), device=DEVICE) for i in range(3)]
    tickets = [ops.start_out(x, "x", "host", "d2h", key) for x in tensors]
    return _loaded(tickets, "h2d")


def _through_a_disk() -> list[Tensor]:
    """More tensors to files and back at once than staging has chunks."""
    with tempfile.TemporaryDirectory() as files:
        key = RuntimeSettings(target=DEVICE, directories=(files,)).key
        tensors = [torch.full((ROOM,), float(i), device=DEVICE) for i in range(12)]
        tickets = [ops.start_out(x, "x", "disk", "device_to_disk", key) for x in tensors]
        for ticket, x in zip(tickets, tensors, strict=True):
            ops.wait_out(ticket, x)
        found = _loaded(tickets, "disk_to_device")
        del tickets, x, ticket
        runtime_for(key).mover.device.drain()
        close_all()
    return found


def _loaded(tickets: list[Tensor], lane: str) -> list[Tensor]:
    loads = [
        ops.start_load(t, (ROOM,), (1,), torch.float32, "x", lane, [], DEVICE) for t in tickets
    ]
    return [ops.wait_load(*load).cpu() for load in loads]


def _host_memory_goes_round() -> list[Tensor]:
    """Host memory that a kernel of one stream reads goes to another stream."""
    device = runtime_for(RuntimeSettings(target=DEVICE).key).device
    # the pool keeps as much spare memory as there is in use
    first, other = device.addressable([ROOM, ROOM])
    first.fill_(1)
    settle()
    seen = first * 1
    del first
    with stream_of("side"):
        (second,) = device.addressable([ROOM])
        second.fill_(2)
        written = second.cpu()
    return [seen.cpu(), written, other.fill_(3).cpu()]


def _an_update_that_a_fetch_waits_for() -> list[Tensor]:
    """A weight on the host is updated late; its next fetch waits for that."""
    key = RuntimeSettings(target=DEVICE).key
    device = runtime_for(key).device
    weight = nn.Parameter(torch.zeros(ROOM, device=DEVICE))
    live_on_host(device, [weight])
    host, awaited = weight.detach(), threading.Event()
    place = device.on_host(host)

    def update() -> None:
        awaited.wait()
        place.add_(1)

    updating = threading.Thread(target=update)
    updating.start()

    def until() -> None:
        awaited.set()
        updating.join()

    device.hold(host, until)
    buffer, load = ops.start_fetch(host, (ROOM,), (1,), torch.float32, "w", "h2d", [], key, DEVICE)
    found = ops.wait_load(buffer, load).cpu()
    awaited.set()
    updating.join()
    return [found]


# --- orders taken away ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """A program that shows that an order is missing where the stream `slow` is slow."""

    program: Callable[[], list[Tensor]]
    slow: str
    plant: Callable[[], AbstractContextManager[Any]]


def _without(owner: type, name: str, other: Any) -> Callable[[], AbstractContextManager[Any]]:
    return functools.partial(mock.patch.object, owner, name, other)


@contextmanager
def _copies_out_hold_nothing() -> Iterator[None]:
    """Nobody waits for a copy out, and it does not hold its source."""
    issued = CudaDevice._ending

    def and_drop(device: CudaDevice, copy: CudaCopy) -> None:
        if copy.label.direction == "out":
            copy.keep = None
        issued(device, copy)

    with (
        PLANTS["copies out before memory is used again"](),
        mock.patch.object(CudaDevice, "_ending", and_drop),
    ):
        yield


def _after_compute_only(mover: Mover, mark: Point | None, out: Copy | None = None) -> list[Point]:
    return [] if mark is None else [mark]


_record, _reached, _updated_by = (
    TorchStreams.record,
    CudaDevice.reached,
    GradientTransport.updated,
)


def _recorded_on_compute(streams: TorchStreams, stream: Stream, timing: bool = False) -> Event:
    return _record(streams, streams.compute(), timing)


def _copies_only(device: CudaDevice, point: Point) -> None:
    if not isinstance(point, Mark):
        _reached(device, point)


def _nothing(*_: Any) -> None:
    """Nobody waits."""


def _landed_at_once(ring: Ring, chunk: Chunk, step: StagingStep) -> None:
    step.by_disk(chunk)


def _forgets_readers(transport: GradientTransport, parameter: Tensor, label: str) -> None:
    transport._copies[parameter].used = None
    _updated_by(transport, parameter, label)


def _arrives(transport: GradientTransport, arrive: Callable[[], None], back: Copy | None) -> None:
    arrive()


def _returned(transport: GradientTransport) -> None:
    transport._returning.clear()


#: the order that is taken away → how it shows
SHOWN_BY = {
    "copies out before memory is used again": Shown(
        _activations_leave, "d2h", _copies_out_hold_nothing
    ),
    **{
        name: Shown(program, slow, PLANTS[name])
        for name, program, slow in (
            ("loads before they are used", _activations_leave, "h2d"),
            ("compute before copies", _activations_leave, "compute"),
            ("gradients before updates", _updates_beside, "d2h"),
            ("readers before weights are updated", _update_of_a_weight_in_place, "compute"),
            ("updates before weights are used", _an_update_that_a_fetch_waits_for, "h2d"),
        )
    },
    "copies out before kernels read them in place": Shown(
        _results_in_place, "d2h", PLANTS["copies out before memory is used again"]
    ),
    "copies out before their loads": Shown(
        _loads_at_once, "d2h", _without(Mover, "_after", _after_compute_only)
    ),
    "events behind the work of their own stream": Shown(
        _loads_at_once, "h2d", _without(TorchStreams, "record", _recorded_on_compute)
    ),
    "copies out before staging is written to the disk": Shown(
        _through_a_disk, "device_to_disk", _without(Ring, "_land", _landed_at_once)
    ),
    "loads before staging is read from the disk again": Shown(
        _through_a_disk, "disk_to_device", _without(Ring, "_settle", _nothing)
    ),
    "readers before host memory is used again": Shown(
        _host_memory_goes_round, "compute", _without(HostAliases, "_follow", _nothing)
    ),
    "copies of weights before their memory is used again": Shown(
        on_another_stream, "side", _without(CudaDevice, "reached", _copies_only)
    ),
    "readers before weights return": Shown(
        _update_of_a_weight_on_the_device,
        "compute",
        _without(GradientTransport, "updated", _forgets_readers),
    ),
    "weights that return before they are used": Shown(
        _updates_of_a_weight_in_turn, "h2d", _without(GradientTransport, "finish", _returned)
    ),
    "weights that return before the next update": Shown(
        _updates_of_a_weight_in_turn, "h2d", _without(GradientTransport, "_arrive", _arrives)
    ),
}
#: orders that every run of the tests takes away: one of each program, and those of the stream's own
ALWAYS = (
    "copies out before memory is used again",
    "loads before they are used",
    "gradients before updates",
    "updates before weights are used",
    "copies out before their loads",
    "events behind the work of their own stream",
)


# --- checks ---------------------------------------------------------------------------------------


@functools.cache
def _side() -> torch.Stream:
    return side_stream()


def stream_of(name: str) -> torch.Stream:
    if name == "side":
        return _side()
    streams = TorchStreams(torch.device(DEVICE))
    found: torch.Stream = streams.compute() if name == "compute" else streams.stream(name)
    return found


def _runs(program: Callable[[], list[Tensor]]) -> list[Tensor] | str:
    """The program's result, or how it failed; frees everything it held."""
    try:
        with deterministic():
            return program()
    except (RuntimeError, OffloadError) as error:
        return str(error)
    finally:
        torch._dynamo.reset()
        gc.collect()
        # the error of a kernel may be one that nobody has heard of yet
        with suppress(RuntimeError):
            settle()
        close_all()


@functools.cache
def _expected(program: Callable[[], list[Tensor]]) -> list[Tensor]:
    found = _runs(program)
    assert not isinstance(found, str), found
    return found


def _right(program: Callable[[], list[Tensor]]) -> bool:
    found, expected = _runs(program), _expected(program)
    return not isinstance(found, str) and all(map(torch.equal, found, expected))


@contextmanager
def delayed(controls: Controls, seed: int, slow: str, us: float) -> Iterator[None]:
    """One stream is slow, the others are as the seed has them."""
    controls.seed(seed)
    try:
        with controls.slow(stream_of(slow), us):
            yield
    finally:
        controls.seed(0)


def planted(name: str, seed: int, controls: Controls) -> None:
    """Without one order, bits are wrong where streams are slow."""
    shown = SHOWN_BY[name]
    _expected(shown.program)
    for us in DELAYS_US:
        with delayed(controls, seed, shown.slow, us), shown.plant():
            if not _right(shown.program):
                return
    raise AssertionError(f"no delay showed the missing order: {name}")


def nothing_planted(names: Iterable[str], controls: Controls) -> None:
    """With all orders in place the programs of these are right, whichever streams are slow."""
    pairs = {(SHOWN_BY[name].program, SHOWN_BY[name].slow) for name in names}
    for program, slow in sorted(pairs, key=lambda pair: (pair[0].__name__, pair[1])):
        with delayed(controls, 0, slow, DELAYS_US[0]):
            assert _right(program), f"{program.__name__} with slow {slow}"


def on_a_side_stream(controls: Controls) -> None:
    """A model of the default stream trains on another: memory that its weights leave there may be
    used again at once."""
    expected = on_another_stream(gpu_checks.plain())
    with controls.slow(stream_of("side"), DELAYS_US[0]):
        assert all(map(torch.equal, on_another_stream(), expected))
