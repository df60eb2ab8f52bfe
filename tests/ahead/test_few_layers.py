"""Another batch needs one trace of few layers: its steps are those that two traces give."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from test_ahead import LENGTH, WIDTH, Language, quiet
from torch import nn

from offcompile.ahead.fitting import DeviceFit
from offcompile.ahead.others.few_layers import few_layers
from offcompile.ahead.plan import Ahead, ForecastRequest
from offcompile.ahead.ranks.request import RankRequest
from offcompile.ahead.ranks.surveyed import AheadOnRank
from offcompile.ahead.surveyed import NotAlike
from offcompile.machine.options import Options

PIECES = 4


class Block(nn.Module):
    """A layer that scales its result if the batch is larger than `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.down(torch.relu(self.up(x)))
        return x + (made if len(x) <= self.most else 2 * made)


class Scaling(Language):
    def __init__(self, layers: int, most: int) -> None:
        super().__init__(layers)
        self.blocks = nn.ModuleList(Block(most) for _ in range(layers))


@cache
def scaling(layers: int, most: int) -> Scaling:
    with torch.device("meta"):
        return Scaling(layers, most)


def request(
    batch: int, optimizer: str | None = None, layers: int = 12, most: int = 100
) -> ForecastRequest:
    text = torch.zeros(batch, LENGTH, dtype=torch.long, device="meta")
    options = Options.read(
        {"memory": "1GiB", "hardware": "rtx4090", "lowering": "inductor", "seconds": 0.1}
    )
    return ForecastRequest(scaling(layers, most), (text,), {}, options, optimizer=optimizer)


@cache
def ahead(batch: int, optimizer: str | None = None) -> Ahead:
    return Ahead.of(request(batch, optimizer), quiet)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [None, "adamw"])
@pytest.mark.parametrize("ranks", [None, RankRequest.read(2, "ddp")], ids=["alone", "two ranks"])
def test_a_second_batch_is_what_tracing_it_twice_gives(
    optimizer: str | None, ranks: RankRequest | None
) -> None:
    mine, theirs = ahead(2, optimizer), ahead(6, optimizer)
    few = few_layers(request(6, optimizer), mine.target, PIECES, quiet)
    assert few is not None and len(few.steps) == 2
    if ranks is not None:
        mine = AheadOnRank.sharing(mine, ranks, quiet)
        theirs = AheadOnRank.sharing(theirs, ranks, quiet)
    before = mine.variants
    for one, other in ((mine, theirs), (mine.in_pieces(4, quiet), theirs.in_pieces(4, quiet))):
        assert few.all_layers(one) == other.variants
        assert len(other.variants) == 2 and other.variants[0] != one.variants[0]
    assert mine.variants == before


def test_few_layers_have_no_steps_for_other_pieces() -> None:
    few = few_layers(request(6), ahead(2).target, PIECES, quiet)
    assert few is not None
    assert few.all_layers(ahead(2).in_pieces(2, quiet)) == []


def test_a_model_with_few_layers_is_traced_as_a_whole() -> None:
    assert few_layers(request(6, layers=3), ahead(2).target, PIECES, quiet) is None


@pytest.mark.long
@pytest.mark.parametrize("most", [100, 3])
def test_the_largest_batch_needs_steps_that_line_up(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    # the loss in as few pieces as the others here: its graphs take the most time
    monkeypatch.setattr("offcompile.ahead.fitting.LADDER", (PIECES,))

    def asked(batch: int) -> ForecastRequest:
        found = request(batch, most=most)
        return replace(found, options=replace(found.options, memory=32 << 20))

    found = DeviceFit(asked, 2, told.append)
    largest = found.largest
    again = "tracing all layers with twice the batch" in told
    # with twice the batch, layers scale their results, so both ways to trace it differ
    assert (largest is None) == again == (most == 3)
    monkeypatch.setattr("offcompile.ahead.fitting.few_layers", lambda *given: None)
    assert DeviceFit(asked, 2, quiet).largest == largest


def test_layers_that_differ_with_another_batch_are_not_repeated() -> None:
    step = ahead(2)
    few = few_layers(request(6), step.target, PIECES, quiet)
    assert few is not None
    whole = few.steps[None]
    problem = whole[None]
    copied = step.survey._estimates[0].unrolled[None].later
    slower = next(op.id for op in problem.ops if op.id in copied)
    ops = tuple(
        replace(op, duration_us=op.duration_us + 1) if op.id == slower else op for op in problem.ops
    )
    changed = replace(few, steps={None: {**whole, None: replace(problem, ops=ops)}})
    with pytest.raises(NotAlike):
        changed.all_layers(step)
