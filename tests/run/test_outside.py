"""Tensors that the program itself makes between forward and backward, such as its loss, are within
the budget from the step on that has shown them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hand_sgd import step_by_hand
from torch import Tensor, nn

import offcompile
from offcompile.planning.footprint import NeedsBySize
from offcompile.run.accounts.outside import MEASURED_ON_CARD, GapPeaks, OutsideTensors
from offcompile.run.plan.contract import EMPTIED, PlanRequest
from offcompile.run.variants import ladder
from offcompile.run.variants.plans import Call, Plans
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.streams import MemoryUse
from offcompile.runtime.memory.malloc.heap import heap

MIB = 1 << 20
WIDTH, LAYERS, ROWS, CLASSES = 256, 6, 1024, 1024
#: bytes that the loss works with in backward
SCRATCH_BYTES = 32 * MIB
#: what allocations of other things may come to
OTHERS_BYTES = 1 * MIB


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


Compile = Callable[[Model], Callable[[Tensor], Tensor]]


def plainly(model: Model) -> Callable[[Tensor], Tensor]:
    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend="aot_eager")
    return compiled


def within(memory: int, spill: Path) -> Compile:
    options = {"memory": memory, "lowering": "aot_eager", "spill": str(spill)}

    def compiled(model: Model) -> Callable[[Tensor], Tensor]:
        made: Callable[[Tensor], Tensor] = torch.compile(
            model, backend="offcompile", options=options
        )
        return made

    return compiled


def layer_by_layer(memory: int, spill: Path) -> Compile:
    options = {"memory": memory, "lowering": "aot_eager", "spill": str(spill)}

    def compiled(model: Model) -> Callable[[Tensor], Tensor]:
        for layer in model.layers:
            layer.compile(backend="offcompile", options=options)
        return model

    return compiled


class Scratch(torch.autograd.Function):
    """The identity; its backward works with memory of its own, and notes what malloc has handed out
    then."""

    most_bytes = 0

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
        Scratch.most_bytes = max(Scratch.most_bytes, heap().live_bytes())
        del scratch
        return grads[0]


def train(compiled: Compile, steps: int = 8) -> tuple[list[str], int]:
    """Losses and gradients as exact text, and what was held during the loss's backward in the last
    step: the weights, and what malloc had handed out since the step's beginning."""
    torch.manual_seed(0)
    model = Model()
    forward, seen = compiled(model), []
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        targets = torch.arange(ROWS) % CLASSES
        gc.collect()
        before, Scratch.most_bytes = heap().live_bytes(), 0
        loss = F.cross_entropy(Scratch.apply(forward(x)), targets)
        loss.backward()
        seen.append(float(loss.detach()).hex())
        seen += step_by_hand(model.parameters())
        del loss
    weights = sum(p.nbytes for p in model.parameters())
    return seen, Scratch.most_bytes - before + weights


@pytest.fixture(scope="module")
def ample(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], int]:
    """The same with everything on the device."""
    torch._dynamo.reset()
    plain, _ = train(plainly)
    torch._dynamo.reset()
    losses, held = train(within(400 * MIB, tmp_path_factory.mktemp("spill")))
    assert losses == plain
    assert offcompile.reports()[-1].fits
    return losses, held


def test_a_step_is_planned_again_with_room_for_a_loss_outside_of_it(
    ample: tuple[list[str], int], tmp_path: Path
) -> None:
    losses, held = ample
    budget, count = held - 16 * MIB, len(offcompile.reports())  # enough but for the loss
    mine, mine_held = train(within(budget, tmp_path))
    assert mine == losses
    # the first step's plan, and the one for all that follow: the graph's own was not compiled
    assert len(offcompile.reports()) == count + 2
    text = str(offcompile.reports()[-1])
    assert "between forward and backward the program itself held" in text
    assert "planned again with that much room" in text
    assert mine_held <= budget + OTHERS_BYTES


def test_a_plan_is_passed_over_only_for_one_that_is_found(
    ample: tuple[list[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, held = ample
    asked: list[PlanRequest] = []

    def hopeless(
        plans: Plans, call: Call, request: PlanRequest, needs: NeedsBySize
    ) -> PlanRequest | None:
        asked.append(replace(request, kind=EMPTIED, held_bytes=2 * held, states=None))
        return asked[-1]

    monkeypatch.setattr(ladder, "_emptied_at_once", hopeless)
    count = len(offcompile.reports())
    assert train(within(held - 16 * MIB, tmp_path))[0] == losses
    assert len(asked) == 1
    assert offcompile.reports()[count].name == asked[0].name


def test_what_graphs_keep_for_each_other_leaves_room_for_a_loss_between_them(
    ample: tuple[list[str], int], tmp_path: Path
) -> None:
    losses, held = ample
    budget = held - 16 * MIB
    mine, mine_held = train(layer_by_layer(budget, tmp_path))
    assert mine == losses
    assert mine_held <= budget + OTHERS_BYTES


def test_where_no_plan_leaves_that_much_room_one_warning_names_a_budget_that_does(
    ample: tuple[list[str], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses, _ = ample
    mine, _ = train(within(34 * MIB, tmp_path))
    assert mine == losses
    (told,) = [m for m in caplog.messages if "the program itself held" in m]
    assert "Set memory to" in told


class FakeStreams:
    """A card's allocator that has given out `now_bytes`, and `peak_bytes` since the last reset."""

    now_bytes = peak_bytes = resets = 0

    def reset_peak(self) -> None:
        self.resets += 1
        self.peak_bytes = self.now_bytes

    def memory(self) -> MemoryUse:
        return MemoryUse(self.now_bytes, self.peak_bytes, 0)


def test_on_a_card_few_gaps_are_measured_and_their_most_goes_on_to_count() -> None:
    streams = FakeStreams()
    card: Any = CudaDevice.__new__(CudaDevice)
    card.streams = streams
    device, peaks, place = OutsideTensors(), GapPeaks(), ("forward", ())
    for step in range(8):
        device.ends(in_step=False)
        device.begins(peaks, place, card)
        streams.peak_bytes = streams.now_bytes + (step + 1) * MIB
        device.ends(in_step=True)
    assert streams.resets == MEASURED_ON_CARD
    assert peaks.most_bytes(place) == device.most_bytes == MEASURED_ON_CARD * MIB
    for _ in range(8):  # evaluations
        device.ends(in_step=False)
    assert device.most_bytes == MEASURED_ON_CARD * MIB


@pytest.mark.parametrize(("compiles", "in_step", "wanted"), [(True, True, 1), (False, False, 0)])
def test_what_compiling_takes_in_a_gap_and_a_gap_between_steps_do_not_count(
    compiles: bool, in_step: bool, wanted: int
) -> None:
    card: Any = CudaDevice.__new__(CudaDevice)
    card.streams = streams = FakeStreams()
    device, peaks, place = OutsideTensors(), GapPeaks(), ("forward", ())
    device.begins(peaks, place, card)
    streams.peak_bytes += MIB
    for _ in range(2 * compiles):  # the second one begins where nothing is measured any more
        device.compiles()
        streams.peak_bytes += MIB
    device.ends(in_step)
    assert peaks.most_bytes(place) == device.most_bytes == wanted * MIB
    assert peaks.times(place) == wanted


def test_a_step_that_has_room_for_its_loss_stays_as_it_is(
    ample: tuple[list[str], int], tmp_path: Path
) -> None:
    losses, held = ample
    count = len(offcompile.reports())
    assert train(within(held * 2, tmp_path))[0] == losses
    assert [r.fits for r in offcompile.reports()[count:]] == [True]
