"""Layers of several stacks, or with odd ones among them, are traced in part: the extrapolated step
is that of all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lengths import some
from torch import nn

from offcompile.ahead.layers import Layers, find_layers, shortened
from offcompile.ahead.plan import Ahead, ForecastRequest
from offcompile.ahead.unroll import alike
from offcompile.machine.options import Options

WIDTH, WORDS, LENGTH = 16, 64, 8


class Block(nn.Module):
    """Adds what its own words, and those of the encoder if there are any, come to. The first block
    of a stack that `shares` makes places for all blocks of the stack."""

    def __init__(self, reads: bool, makes: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH) if reads else None
        self.makes = makes
        if makes:
            self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(
        self,
        x: torch.Tensor,
        encoded: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.makes:
            places = self.places(torch.arange(LENGTH, device=x.device))
        if places is not None:
            x = x + torch.sin(x + places)
        if self.other is not None and encoded is not None:
            x = x + torch.tanh(self.other(encoded))
        return x + self.down(torch.relu(self.up(x))), places


class Translator(nn.Module):
    def __init__(self, encoder: int, decoder: int, shares: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(Block(False, shares and i == 0) for i in range(encoder))
        self.between = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Block(True, shares and i == 0) for i in range(decoder))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        encoded, places = self.words(given), None
        for block in self.encoder:
            encoded, places = block(encoded, None, places)
        encoded, x, places = self.between(encoded), self.words(given), None
        for block in self.decoder:
            x, places = block(x, encoded, places)
        return self.head(x)


def in_one_list(middle: int = 11) -> nn.Sequential:
    """Make a model whose one list has two odd layers at its beginning and two at its end."""
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(middle))
    first = nn.Embedding(WORDS, 4), nn.Linear(4, WIDTH)
    return nn.Sequential(*first, *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def found_in(encoder: int, decoder: int, shares: bool = False) -> Layers | None:
    with torch.device("meta"):
        return find_layers(Translator(encoder, decoder, shares))


# --- which layers are traced -----------------------------------------------------------------


def test_lists_of_one_length_are_shortened_together() -> None:
    found = found_in(12, 12)
    assert found is not None
    assert (found.paths, found.traced, found.beyond) == (("encoder", "decoder"), 5, 7)
    with torch.device("meta"):
        few = shortened(Translator(12, 12), found, 5)
    assert [len(few.encoder), len(few.decoder)] == [5, 5]


@pytest.mark.parametrize(("encoder", "decoder", "path"), [(6, 30, "decoder"), (30, 6, "encoder")])
def test_others_one_by_one(encoder: int, decoder: int, path: str) -> None:
    found = found_in(encoder, decoder)
    assert found is not None and found.paths == (path,)


@pytest.mark.parametrize("layers", [(8, 8), (12, 14), (12, 12, True)])
def test_short_lists_are_traced_whole_since_two_traces_would_take_longer(layers: Any) -> None:
    assert found_in(*layers) is None


def test_odd_layers_are_kept() -> None:
    found = found_in(14, 14, shares=True)
    assert found is not None
    assert (found.paths, found.first, found.last) == (("encoder", "decoder"), 1, 0)
    assert (found.kept(5), found.beyond) == (6, 8)
    with torch.device("meta"):
        model = in_one_list()
    found = find_layers(model)
    assert found is not None
    assert (found.first, found.last, found.kept(4), found.beyond) == (2, 2, 8, 7)
    few = shortened(model, found, 4)
    assert list(few) == [*list(model)[:6], *list(model)[-2:]]


def _odd_in_the_middle(model: nn.Module) -> None:
    model[7] = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())


def _told_at_the_end(model: nn.Module) -> None:
    model.kinds = ["near"] * (len(model) - 1) + ["far"]


def _tied(model: nn.Module) -> None:
    model[7][0].weight = model[3][0].weight


@pytest.mark.parametrize("change", [_odd_in_the_middle, _told_at_the_end, _tied])
def test_layers_that_may_not_repeat_are_traced_whole(change: Any) -> None:
    with torch.device("meta"):
        model = in_one_list()
        assert find_layers(model) is not None
        change(model)
    assert find_layers(model) is None


def test_a_tensor_of_all_layers_is_no_odd_one() -> None:
    with torch.device("meta"):
        model = in_one_list()
    for layer in list(model)[2:-2]:
        layer[0].weight = model[2][0].weight
    found = find_layers(model)
    assert found is not None and (found.first, found.last) == (2, 2)


# --- the step of all layers ------------------------------------------------------------------


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two stacks": lambda: Translator(11, 11),
    "odd ones": lambda: Translator(13, 13, shares=True),
    "one list": in_one_list,
}


def step(which: str, repeats: bool) -> Ahead:
    lowering = "inductor" if which == "one list" else "aot_eager"
    options = Options.read({"hardware": "rtx4090", "lowering": lowering})
    words = torch.zeros(4, LENGTH, dtype=torch.long)

    def loss(made: torch.Tensor) -> torch.Tensor:
        return made.float().logsumexp(-1).sum()

    asked = ForecastRequest(MODELS[which](), (words,), {}, options, loss, repeats=repeats)
    return Ahead.of(asked, lambda told: None)


@pytest.mark.parametrize("which", some(MODELS, "two stacks"))
def test_the_step_is_that_of_all_layers(which: str) -> None:
    few, whole = step(which, True), step(which, False)
    assert few.layers is not None and whole.layers is None
    for mine, theirs in zip(few.variants, whole.variants, strict=True):
        assert alike(mine, theirs)
    one, other = few.survey.problem(few.graphs), whole.survey.problem(whole.graphs)
    for mine, theirs in zip(one.problem.ops, other.problem.ops, strict=True):
        assert one.labels[mine.id] == other.labels[theirs.id]
        for a, b in zip(mine.operands, theirs.operands, strict=True):
            assert (one.names.get(a), one.labels[a]) == (other.names.get(b), other.labels[b])
