"""Checks of captured steps whose plan has weights on the host, and leaves gradients there.

They run on a card and on the asynchronous device, as those of `capture_checks`.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import capture_checks
import torch
import zoo
from budget_child import Loss
from capture_checks import REPLAYED, USUAL, Seen, captured, same_within, seen
from gpu_checks import Loss as LossOf
from gpu_checks import Skipped, deterministic, nothing_stays, on, plain
from torch import Tensor, nn
from zoo import BY_NAME, Specimen

import offcompile
from offcompile import optim
from offcompile.run.plan.carry_out import gradients_on_host
from offcompile.run.replay.step_graph import StepGraph
from offcompile.runtime.device.cuda.capture import Capture
from offcompile.runtime.device.cuda.copies import CudaCopy
from offcompile.runtime.device.graphs import CannotCapture
from offcompile.runtime.device.interface import Slot
from offcompile.runtime.moves.weights import device_of

#: rows and width of a stack: most weights of the first are loaded, those of the other are used
#: where they lie
STACKS = {"deep": (1024, 128), "wide": (64, 256)}


def _specimen(name: str, device: str) -> Specimen:
    if name not in STACKS:
        return on(BY_NAME[name], device)
    rows, width = STACKS[name]

    def inputs(seed: int) -> tuple[Tensor, ...]:
        return (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)),)

    return on(Specimen(name, lambda: Loss(width, 6), inputs, lambda loss: loss), device)


@functools.cache
def peaks(name: str, device: str) -> tuple[int, int]:
    """Planned peaks of tensors, with as little memory as possible and with more than enough."""
    found = []
    for memory in ("minimum", None):
        options = {"memory": memory, "lowering": "aot_eager", **capture_checks.MORE}
        ours = functools.partial(torch.compile, backend="offcompile", options=options)
        zoo.train(_specimen(name, device), ours, steps=1)
        found.append(capture_checks.tensor_peak())
    return found[0], found[1]


def left_by(found: Seen) -> tuple[int, int]:
    """Weights on the host, and gradients that go there, of the plan that was captured."""
    step = next(one for one in found.made if one.replays)
    report = step.planned.report
    return len(step.planned.placement.hosted), len(gradients_on_host(report.problem, report.plan))


def trained(name: str, share: float | None, device: str, replayed: int = REPLAYED) -> None:
    """Losses, gradients and weights of every step with momentum. share: of the memory between the
    least and enough; None: the least."""
    least, ample = (0, 0) if share is None else peaks(name, device)
    some = int(least + (share or 0) * (ample - least))
    memory = "minimum" if share is None else capture_checks.with_reserve(some, device)
    # measured steps may ask for another plan
    steps = (1 if share is None else 2) * USUAL + replayed
    specimen = _specimen(name, device)
    with deterministic(), seen() as found:
        expected = zoo.train(specimen, plain(), steps)
        before = offcompile.counters()
        got = zoo.train(specimen, captured(memory), steps)
        after = offcompile.counters()
    assert not (wrong := got.differences(expected)), wrong[:5]
    assert found.replays >= 2 * replayed, (found.replays, found.refusals)
    assert not found.refusals, found.refusals
    weights, gradients = left_by(found)
    assert weights and gradients, (weights, gradients)
    for counted in ("bytes_out", "bytes_in", "direct_reads") if share is None else ():
        more = after[counted] - before[counted]
        assert more % steps == 0, f"{more} {counted} in {steps} equal steps"
    found.made.clear()
    torch._dynamo.reset()
    gc.collect()
    nothing_stays()


# --- whatever a program does between steps --------------------------------------------------------


def same(steps: Callable[[nn.Module, LossOf], Any], device: str, replays: int) -> Seen:
    found = same_within("minimum", _specimen("deep", device), steps, replays)
    weights, gradients = left_by(found)
    assert weights and gradients, (weights, gradients)
    return found


def accumulation(device: str) -> None:
    """All of it replayed: gradients that stay get host memory of their own."""
    found = same(capture_checks.accumulated, device, replays=12)
    assert found.made[-1].captures == 1 and not found.refusals


def held_gradients(device: str) -> None:
    same(capture_checks.held, device, replays=2)


def gradients_outlive_the_graph(device: str) -> None:
    """Lent gradients keep their host memory when all that was compiled is gone."""

    def steps(model: nn.Module, loss: LossOf) -> list[Tensor]:
        loss(0).backward()
        torch._dynamo.reset()
        gc.collect()
        first = next(model.parameters())
        found = device_of(first)
        # what takes the memory, if anybody may
        return [] if found is None else _filled(found, [p.nbytes for p in model.parameters()])

    def _filled(on_host: Any, sizes: list[int]) -> list[Tensor]:
        for flat in on_host.addressable(sizes * 2):
            flat.fill_(7)
        return []

    same(steps, device, replays=2)


def others_on_the_host(device: str) -> None:
    """Host memory that others take while the graph lives is not the graph's."""

    def steps(model: nn.Module, loss: LossOf) -> list[Tensor]:
        sizes = [p.nbytes for p in model.parameters()]
        on_host = device_of(max(model.parameters(), key=torch.numel))
        offcompile.counters()  # gives back what has died
        taken = [] if on_host is None else on_host.addressable(sizes)
        for flat in taken:
            flat.fill_(7)
        loss(0).backward()
        return [flat.cpu() for flat in taken] or [
            torch.full((n,), 7, dtype=torch.uint8) for n in sizes
        ]

    same(steps, device, replays=2)


def weights_that_move(device: str) -> None:
    """Weights that get other memory between steps, and values written in place."""

    def steps(model: nn.Module, loss: LossOf) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = copy.deepcopy(model.state_dict())
        losses = []
        for step in range(9):
            if step == 1:
                model.load_state_dict(state)
            if step == 3:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone() * 2
            losses.append(loss(step))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        loss(9).backward()
        return [value.detach() for value in losses]

    found = same(steps, device, replays=14)
    assert found.made[-1].captures == 2 and not found.refusals


def a_parameter_replaced(device: str) -> None:
    """`load_state_dict(assign=True)` gives the model other parameters."""

    def steps(model: nn.Module, loss: LossOf) -> list[Tensor]:
        state = {name: value.clone() * 2 for name, value in model.state_dict().items()}
        losses = [loss(0)]
        losses[-1].backward()
        model.load_state_dict(state, assign=True)
        state.clear()  # weights that others hold too do not leave
        for step in range(4):
            losses.append(loss(step))
            losses[-1].backward()
        return [value.detach() for value in losses]

    same(steps, device, replays=2)


def updates_on_the_host(overlap: bool | str, device: str) -> None:
    """An optimizer of ours with states on the host, to which no gradient is offered."""

    def steps(model: nn.Module, loss: LossOf) -> list[Tensor]:
        optimizer = optim.AdamW(
            model.parameters(), 1e-2, states="host", stream=0.0, overlap=overlap, max_norm=1.0
        )
        losses = []
        for step in range(4):
            losses.append(loss(step))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        loss(5).backward()
        return [value.detach() for value in losses]

    same(steps, device, replays=4)


def a_late_update(device: str) -> None:
    """A weight on the host that another thread updates: replays wait for that."""

    def steps(model: nn.Module, loss: LossOf) -> None:
        loss(0).backward()
        model.zero_grad()
        module = torch.get_device_module(torch.device(device))
        module.synchronize()
        with ExitStack() as stack:
            for parameter in model.parameters():
                stack.enter_context(_updated_late(parameter))
            loss(1).backward()
            module.synchronize()  # later updates come too late for all of it

    found = same(steps, device, replays=2)
    if not found.made[-1].planned.placement.fetched:
        raise Skipped("each weight is used in place somewhere, where calls wait for it")


@contextmanager
def _updated_late(parameter: Tensor) -> Iterator[None]:
    """Inside, the first that waits for the parameter starts its update."""
    on_host = device_of(parameter)
    if on_host is None:
        with torch.no_grad():
            parameter.add_(1)
        yield
        return
    place, asked = on_host.on_host(parameter.detach()), threading.Event()

    def update() -> None:
        asked.wait()
        place.add_(1)

    updating = threading.Thread(target=update)
    updating.start()

    def until() -> None:
        asked.set()
        updating.join()

    on_host.hold(parameter.detach(), until)
    yield
    asked.set()
    updating.join()


def little_room_on_the_host(device: str) -> None:
    """A host tier with room for the plan and gradients that stay, and little more: the step runs,
    captured or not."""
    specimen, found = _specimen("deep", device), list[int]()

    def steps(compiler: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch._dynamo.reset()
        model = specimen.fresh()
        forward, optimizer = compiler(model), torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for step in range(USUAL + 3):
            optimizer.zero_grad(set_to_none=False)
            for micro in range(2):
                losses.append(specimen.loss(forward(*specimen.inputs(10 * step + micro))))
                losses[-1].backward()
            optimizer.step()
        return [*(x.detach() for x in losses), *(p.detach().clone() for p in model.parameters())]

    with deterministic(), seen() as kept:
        expected = steps(plain())
        for part in (None, 1.05, 1.12, 1.3):
            limit = None if part is None else int(part * found[0])
            kept.made.clear()
            got = steps(captured("minimum", host_memory=limit))
            assert all(map(torch.equal, got, expected)), limit
            found.append(kept.made[-1].planned.needs.planned.host_bytes)
            assert kept.replays or any("host_memory" in why for why in kept.refusals), kept.refusals


def a_backward_that_cannot_be_captured(device: str) -> None:
    """It stops when copies are already part of its graph, behind a forward that is replayed."""

    def copy(self: Capture, copy: CudaCopy, slot: Slot, *asked: Any) -> None:
        # backward runs on a thread of its own, in a task of autograd
        if torch._C._current_graph_task_id() != -1 and len(self.copies) == 4:
            raise CannotCapture("planted")
        _COPY(self, copy, slot, *asked)

    def steps(model: nn.Module, loss: LossOf) -> list[Tensor]:
        kept = []
        for step in range(3):
            kept.append(loss(step))
            kept[-1].backward()
        return [value.detach() for value in kept]

    with mock.patch.object(Capture, "copy", copy):
        # a forward alone; the others count replays of the steps before
        found = same(steps, device, replays=1 - 2 * 2)
    assert "planted" in found.refusals


def a_table_by_rows_is_refused(device: str) -> None:
    """The gradient of an embedding that is written to the host by rows: the host counts them."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4096, 64)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.table((x * 10).long()).square().mean()
            return made

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Table()

    why = "is written on the host by rows"
    capture_checks.refused(build, (64,), why, device=device, memory="minimum", replays=1)


CHECKS: dict[str, Callable[[str], None]] = {
    "weights of an mlp": functools.partial(trained, "deep", None),
    "weights in place": functools.partial(trained, "wide", None),
    "weights, half way": functools.partial(trained, "wide", 0.5),
    "weights of a conv": functools.partial(trained, "conv", None),
    "weights of an encoder": functools.partial(trained, "encoder", None),
    "weights, updates on the host": functools.partial(updates_on_the_host, False),
    "weights, updates in the next forward": functools.partial(updates_on_the_host, "forward"),
    **{
        f"weights, {check.__name__}": check
        for check in (
            *(accumulation, held_gradients, gradients_outlive_the_graph, others_on_the_host),
            *(weights_that_move, a_parameter_replaced, a_late_update, a_table_by_rows_is_refused),
            *(little_room_on_the_host, a_backward_that_cannot_be_captured),
        )
    },
}


# --- with one order taken away --------------------------------------------------------------------


def _handed_on(self: Capture, nbytes: int) -> Tensor:
    """Host memory that the graph does not hold."""
    found = _ROOM(self, nbytes)
    self.written.pop()
    return found


_ROOM = Capture._room
_COPY = Capture.copy
_WAITS = capture_checks.PLANTED["compute's waits for copies"][0]
PLANTED: dict[str, capture_checks.Plant] = {
    "compute's waits for weights": (_WAITS, functools.partial(trained, "deep", None, replayed=1)),
    "host memory of its own": (
        functools.partial(mock.patch.object, Capture, "_room", _handed_on),
        others_on_the_host,
    ),
    "waits for updates of weights": (
        functools.partial(
            mock.patch.object, StepGraph, "_settle_weights", lambda self, arguments: None
        ),
        a_late_update,
    ),
}
