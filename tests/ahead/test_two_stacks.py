"""Encoder and decoder are shortened together: the extrapolated step is that of all layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offcompile.ahead.layers import Layers, find_layers, shortened
from offcompile.ahead.plan import Ahead, ForecastRequest
from offcompile.ahead.unroll import alike
from offcompile.machine.options import Options

WIDTH, WORDS = 16, 64


class Block(nn.Module):
    """Adds what its own words, and those of the encoder if there are any, come to."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH) if reads else None

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        if self.other is not None and encoded is not None:
            x = x + torch.tanh(self.other(encoded))
        return x + self.down(torch.relu(self.up(x)))


class Translator(nn.Module):
    def __init__(self, encoder: int, decoder: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(Block(False) for _ in range(encoder))
        self.between = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Block(True) for _ in range(decoder))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        encoded = self.words(given)
        for block in self.encoder:
            encoded = block(encoded)
        encoded, x = self.between(encoded), self.words(given)
        for block in self.decoder:
            x = block(x, encoded)
        return self.head(x).float().logsumexp(-1).sum()


def found_in(encoder: int, decoder: int) -> Layers | None:
    with torch.device("meta"):
        return find_layers(Translator(encoder, decoder))


def test_lists_of_one_length_are_shortened_together() -> None:
    found = found_in(12, 12)
    assert found is not None
    assert (found.paths, found.traced, found.beyond) == (("encoder", "decoder"), 5, 7)
    with torch.device("meta"):
        few = shortened(Translator(12, 12), found, 5)
    assert [len(few.encoder), len(few.decoder)] == [5, 5]


@pytest.mark.parametrize(("encoder", "decoder", "path"), [(12, 14, "decoder"), (8, 8, "encoder")])
def test_others_one_by_one(encoder: int, decoder: int, path: str) -> None:
    found = found_in(encoder, decoder)
    assert found is not None and found.paths == (path,)


def step(repeats: bool) -> Ahead:
    options = Options.read({"hardware": "rtx4090"})
    words = torch.zeros(4, 8, dtype=torch.long)
    asked = ForecastRequest(
        Translator(12, 12), (words,), {}, options, lambda loss: loss, repeats=repeats
    )
    return Ahead.of(asked, lambda told: None)


def test_the_step_is_that_of_all_layers() -> None:
    few, whole = step(repeats=True), step(repeats=False)
    assert few.layers is not None and whole.layers is None
    for mine, theirs in zip(few.variants, whole.variants, strict=True):
        assert alike(mine, theirs)
