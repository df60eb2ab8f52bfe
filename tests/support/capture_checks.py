"""Checks of steps captured as CUDA graphs, on a card and on the asynchronous device.

Each check trains plainly and with `cudagraphs=True`, and wants the same bits. `CHECKS` take the
device; `PLANTED` names orders of capturing that are taken away, and the check that must then fail.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
import zoo
from gpu_checks import Loss, _loss, deterministic, nothing_stays, on, plain
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from zoo import BY_NAME, Specimen

import offcompile
from offcompile.machine.options import Options
from offcompile.machine.target import target_for
from offcompile.run import compile_hooks
from offcompile.run.replay import halves, step_graph
from offcompile.run.replay.places import Arguments
from offcompile.run.replay.results import Results
from offcompile.run.replay.step_graph import StepGraph
from offcompile.runtime.device.cuda.capture import Capture
from offcompile.runtime.device.graphs import TorchGraph

#: steps the usual way, and steps that are replayed
USUAL, REPLAYED = 3, 4
#: share of the planned peak without moves: activations leave, and weights stay
SHARE = 0.66
#: options for all of them
MORE: dict[str, Any] = {}
CAPTURING = TorchGraph.capturing


class Seen:
    """The step graphs that were made, and what was logged."""

    def __init__(self) -> None:
        self.made: list[StepGraph] = []
        self.said: list[str] = []
        #: captures that left their thread on another stream than it was on
        self.strayed = 0

    def make(self, *asked: Any) -> StepGraph:
        self.made.append(StepGraph(*asked))
        return self.made[-1]

    @contextmanager
    def capturing(self, graph: TorchGraph) -> Iterator[None]:
        before = torch.accelerator.current_stream()
        try:
            with CAPTURING(graph):
                yield
        finally:
            self.strayed += torch.accelerator.current_stream() != before

    @property
    def replays(self) -> int:
        return sum(one.replays for one in self.made)

    @property
    def refusals(self) -> list[str]:
        return [one.refusal for one in self.made if one.refusal is not None]


@contextmanager
def seen() -> Iterator[Seen]:
    """Capture early, and note what is captured."""
    found = Seen()
    with (
        mock.patch.object(step_graph, "SETTLED_AFTER", USUAL),
        mock.patch.object(compile_hooks, "StepGraph", found.make),
        mock.patch.object(TorchGraph, "capturing", lambda graph: found.capturing(graph)),
    ):
        yield found
    assert not found.strayed


def captured(memory: int | str | None, **more: Any) -> Callable[[nn.Module], Any]:
    options = {"memory": memory, "lowering": "aot_eager", "cudagraphs": True, **MORE, **more}
    return lambda model: torch.compile(model, backend="offcompile", options=options)


def with_reserve(nbytes: int, device: str) -> int:
    """The budget whose tensors may take `nbytes`: libraries of a card take far more than these."""
    options = Options.read({"hardware": "h100-sxm"})  # nothing is measured for it
    target = target_for(options, torch.device(device))
    least = nbytes + target.reserve_bytes(0)
    return nbytes + target.reserve_bytes(least)


@functools.cache
def budget(name: str, device: str) -> int:
    """A budget in which only activations have to leave."""
    options = {"memory": None, "lowering": "aot_eager", **MORE}
    zoo.train(
        on(BY_NAME[name], device),
        lambda model: torch.compile(model, backend="offcompile", options=options),
        steps=1,
    )
    return with_reserve(int(SHARE * tensor_peak()), device)


def tensor_peak() -> int:
    """The peak of the last plan, without the reserve."""
    report = offcompile.reports()[-1]
    return report.planned_peak_bytes - report.memory.reserve_bytes


# --- the same bits --------------------------------------------------------------------------------


def trained(name: str, moves: bool, device: str, replayed: int = REPLAYED) -> None:
    """Losses, gradients and weights of every step, and the end of it all."""
    specimen, steps = on(BY_NAME[name], device), USUAL + replayed
    memory = budget(name, device) if moves else None
    with deterministic(), seen() as found:
        expected = zoo.train(specimen, plain(), steps)
        before = offcompile.counters()["bytes_out"]
        got = zoo.train(specimen, captured(memory), steps)
    assert not (wrong := got.differences(expected)), wrong[:5]
    assert found.replays >= 2 * replayed, (found.replays, found.refusals)
    moved = offcompile.counters()["bytes_out"] - before
    assert (moved > 0) == moves
    assert moved % steps == 0, f"{moved} bytes in {steps} equal steps"
    found.made.clear()
    torch._dynamo.reset()
    gc.collect()
    nothing_stays()


Steps = Callable[[nn.Module, Loss], Any]


def same(steps: Steps, device: str, replays: int, moves: bool = True) -> Seen:
    """`steps`, after a few that were captured, leaves what it leaves under the plain backend."""
    memory = budget("gpt", device) if moves else None
    return same_within(memory, on(BY_NAME["gpt"], device), steps, replays)


def same_within(memory: int | str | None, specimen: Specimen, steps: Steps, replays: int) -> Seen:
    results = []
    with deterministic(), seen() as found:
        for compiler in (plain(), captured(memory)):
            torch._dynamo.reset()
            model = specimen.fresh()
            loss = functools.partial(_loss, specimen, compiler(model))
            for step in range(USUAL + 2):
                model.zero_grad()
                loss(step).backward()
            model.zero_grad()
            result = steps(model, loss)
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
            results.append((result, gradients, model.state_dict()))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert found.replays - 2 * 2 >= replays, (found.replays, found.refusals)
    return found


def kept_losses(device: str) -> None:
    """Losses that are kept over steps do not change."""

    def steps(model: nn.Module, loss: Loss) -> list[Tensor]:
        kept = []
        for step in range(3):
            model.zero_grad()
            kept.append(loss(step))
            kept[-1].backward()
        return [value.detach() for value in kept]

    same(steps, device, replays=6)


def accumulated(model: nn.Module, loss: Loss) -> list[Tensor]:
    """Gradients of several forwards add up, also where they are zeroed in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(2):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(3):
            losses.append(loss(10 * step + micro) / 3)
            losses[-1].backward()
        optimizer.step()
    return [value.detach() for value in losses]


def accumulation(device: str) -> None:
    same(accumulated, device, replays=12, moves=False)
    same(accumulated, device, replays=2)


def held(model: nn.Module, loss: Loss) -> list[Tensor]:
    """Gradients that the program holds over the next step stay as they are."""
    loss(0).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss(1).backward()
    return found  # type: ignore[return-value]


def held_gradients(device: str) -> None:
    same(held, device, replays=2)


def two_forwards(device: str) -> None:
    def steps(model: nn.Module, loss: Loss) -> list[Tensor]:
        losses = [loss(0), loss(1)]
        losses[1].backward()
        losses[0].backward()
        loss(2).backward()
        return [value.detach() for value in losses]

    found = same(steps, device, replays=2, moves=False)
    assert any("a forward came before" in why for why in found.refusals)


def retain_graph(device: str) -> None:
    def steps(model: nn.Module, loss: Loss) -> None:
        kept = loss(0)
        kept.backward(retain_graph=True)
        kept.backward()
        loss(1).backward()

    with functorch_config.patch(donated_buffer=False):
        found = same(steps, device, replays=1, moves=False)
    assert any("retain_graph" in why for why in found.refusals)


def no_grad_between(device: str) -> None:
    """A graph without backward runs in between, beside the pool or after it was given up."""

    def steps(model: nn.Module, loss: Loss) -> list[Tensor]:
        scores = []
        for step in range(2):
            loss(step).backward()
            with torch.no_grad():
                scores.append(loss(10 + step).clone())
        return scores

    same(steps, device, replays=2)


def without_gradients(device: str) -> None:
    """A graph without a backward is captured too, and its results stay as they are."""
    specimen, results = on(BY_NAME["encoder"], device), []
    with deterministic(), seen() as found, torch.no_grad():
        for compiler in (plain(), captured(None)):
            torch._dynamo.reset()
            forward = compiler(specimen.fresh().eval())
            results.append([forward(*specimen.inputs(n)) for n in range(USUAL + REPLAYED)])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert found.replays == REPLAYED, found.refusals


def a_dropped_loss(device: str) -> None:
    def steps(model: nn.Module, loss: Loss) -> None:
        loss(0)
        loss(1).backward()

    same(steps, device, replays=3)


def gradients_outlive_the_graph(device: str) -> None:
    """Lent gradients keep their memory when all that was compiled is gone."""

    def steps(model: nn.Module, loss: Loss) -> list[Tensor]:
        loss(0).backward()
        torch._dynamo.reset()
        gc.collect()
        module = torch.get_device_module(torch.device(device))
        module.empty_cache()
        # take the memory, if anybody may
        return [torch.full((1 << n,), 7.0, device=device) for n in range(8, 20)]

    same(steps, device, replays=2)


def batches_that_move(device: str) -> None:
    """A batch at the same address for a while, and then at others."""
    specimen = on(BY_NAME["encoder"], device)
    results = []
    with deterministic(), seen() as found, mock.patch.object(halves, "SMALL_BYTES", 0):
        for compiler in (plain(), captured(None)):
            torch._dynamo.reset()
            model = specimen.fresh()
            forward = compiler(model)
            (still,) = specimen.inputs(0)
            batches = [still] * (USUAL + 2) + [specimen.inputs(n)[0] for n in range(1, 8)]
            losses = []
            for step, x in enumerate(batches):
                torch.manual_seed(step)
                losses.append(specimen.loss(forward(x)))
                losses[-1].backward()
                model.zero_grad()
            results.append([value.detach() for value in losses])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert found.made[-1].captures == 2
    assert not found.refusals


# --- refusals -------------------------------------------------------------------------------------


@torch.library.custom_op("offcompile_tests::asking", mutates_args=())
def asking(x: Tensor) -> Tensor:
    """Makes the host wait for the device, as an op that looks into a tensor does."""
    return x * float(x.sum().isfinite().item())


asking.register_fake(torch.empty_like)
asking.register_autograd(lambda _, gradient: asking(gradient))


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = asking(self.layers(x)).square().mean()
        return made


def refused(build: Callable[[], nn.Module], sizes: tuple[int, ...], why: str, **more: Any) -> None:
    """The step runs as ever, and one warning says why it is no graph."""
    device, memory = more.pop("device"), more.pop("memory", None)
    replays = more.pop("replays", 0)  # of a forward whose backward cannot be captured
    results: list[list[Tensor]] = []
    handler = _Lines()
    logging.getLogger("offcompile").addHandler(handler)
    with deterministic(), seen() as found:
        for compiler in (plain(), captured(memory, **more)):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = build().to(device)
            forward, losses = compiler(model), []
            for step in range(USUAL + 3):
                rows = sizes[step % len(sizes)]
                x = torch.full((rows, 64), 0.1 * step, device=device)
                losses.append(forward(x))
                losses[-1].backward()
            results.append([value.detach() for value in losses])
    logging.getLogger("offcompile").removeHandler(handler)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert found.replays == replays
    told = [line for line in handler.lines if "no CUDA graph" in line]
    assert told and why in told[-1], (told, found.refusals)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _summed() -> nn.Module:
    torch.manual_seed(0)
    return _Summed()


class _Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x).square().mean()
        return made


def an_op_that_waits_is_refused(device: str) -> None:
    refused(Asking, (8,), "an op of the model may wait", device=device)


def refusals(device: str) -> None:
    refused(_summed, (64, 48, 40), "its sizes are dynamic", device=device)
    refused(
        _summed,
        (512,),
        "moves go to the disk",
        device=device,
        memory="minimum",
        host_memory="64KiB",
        policy="activation_spill",
    )


CHECKS: dict[str, Callable[[str], None]] = {
    "gpt": functools.partial(trained, "gpt", True),
    "conv": functools.partial(trained, "conv", False),
    "encoder": functools.partial(trained, "encoder", False),
    **{
        check.__name__: check
        for check in (
            *(kept_losses, accumulation, held_gradients, two_forwards, retain_graph),
            *(
                no_grad_between,
                without_gradients,
                a_dropped_loss,
                gradients_outlive_the_graph,
                batches_that_move,
            ),
            an_op_that_waits_is_refused,
            refusals,
        )
    },
}


# --- with one order taken away --------------------------------------------------------------------


def _wait_for_nothing(self: Capture, copy: Any) -> Any:
    with mock.patch.object(Capture, "join", lambda self, copy: None):
        return _WAIT(self, copy)


_WAIT = Capture.wait
Plant = tuple[Any, Callable[[str], None]]
#: a safeguard → a patch that takes it away, and the check that then fails
PLANTED: dict[str, Plant] = {
    "compute's waits for copies": (
        functools.partial(mock.patch.object, Capture, "wait", _wait_for_nothing),
        functools.partial(trained, "gpt", True, replayed=1),
    ),
    "copies of batches": (
        functools.partial(mock.patch.object, Arguments, "fill", lambda self, arguments: None),
        functools.partial(trained, "encoder", False, replayed=1),
    ),
    "the look for what is still lent": (
        functools.partial(mock.patch.object, Results, "out", lambda self: []),
        held_gradients,
    ),
}


def shows(planted: Plant, device: str) -> bool:
    """True if a check fails without an order of capturing."""
    patched, check = planted
    with patched():
        try:
            check(device)
        except (AssertionError, RuntimeError):  # wrong bits, or indices that are none
            return True
        finally:
            with suppress(RuntimeError):  # of kernels that came upon them
                torch.get_device_module(torch.device(device)).synchronize()
    return False
