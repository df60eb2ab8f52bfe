"""Backwards are predicted from the forwards that wait for them, in whatever order those ran."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offcompile.passes.correlation.backwards import KnownBackwards
from offcompile.passes.correlation.blocks import BlockId
from offcompile.passes.correlation.predictor import Predictor

NBYTES, TAGS = 4, "abc"
Forward = tuple[str, int]


def backward_of(execution: Hashable) -> Hashable | None:
    assert isinstance(execution, tuple)
    phase, layer = execution
    return ("backward", layer) if phase == "forward" else None


class Device:
    """Runs forwards that write blocks, and backwards that read them; holds what is prefetched."""

    def __init__(self) -> None:
        self.predictor = Predictor(KnownBackwards(backward_of))
        self.alive: list[tuple[int, list[BlockId]]] = []
        self.names: set[BlockId] = set()
        self.hits = self.misses = 0

    def forward(self, layer: int, tags: str = TAGS) -> None:
        blocks: list[BlockId] = []
        self.predictor.enter(("forward", layer))
        for tag in tags:
            number = next(n for n in range(99) if (layer, tag, n) not in self.names)
            block = (layer, tag, number)
            self.names.add(block)
            blocks.append(block)
            self.predictor.touch(block, NBYTES, reads=False)
            self.predictor.fetching(block, NBYTES)
            self.predictor.arrived(block)
            self.predictor.wrote(block)
        self.predictor.leave()
        for block in blocks:
            self._evict(block)
        if blocks:
            self.alive.append((layer, blocks))

    def _evict(self, block: BlockId) -> None:
        self.predictor.leaving(block)
        self.predictor.cleaned(block)
        self.predictor.left(block)

    def backward(self, at: int = -1) -> None:
        """Run a backward; then prefetch as much as one reads."""
        layer, blocks = self.alive.pop(at)
        self.predictor.enter(("backward", layer))
        for block in blocks:
            if self.predictor.touch(block, NBYTES) == "hit":
                self.hits += 1
            else:
                self.misses += 1
                self.predictor.fetching(block, NBYTES)
                self.predictor.arrived(block)
        self.predictor.leave()
        for block in blocks:
            self.drop(block)
        for wanted in self.predictor.predictions(1 << 20, limit=len(TAGS)):
            self.predictor.fetching(wanted.block, NBYTES, prefetch=True)
            self.predictor.arrived(wanted.block)

    def drop(self, block: BlockId) -> None:
        self.names.remove(block)
        self.predictor.dead(block)

    def step(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self.forward(layer)
        while self.alive:
            self.backward()


@pytest.mark.parametrize("repeats", [False, True])
def test_all_but_the_first_backward_is_known_in_an_order_that_never_came(repeats: bool) -> None:
    device, chosen = Device(), random.Random(0)
    steps = 5
    for _ in range(steps):
        layers = chosen.choices(range(8), k=8) if repeats else chosen.sample(range(8), 8)
        device.step(layers)
    assert device.hits == steps * 7 * len(TAGS)
    assert device.misses == steps * len(TAGS)


def test_evaluations_and_dropped_forwards_are_expected_back_by_nobody() -> None:
    device = Device()
    for layer in range(4):
        device.forward(layer)
        device.forward(layer + 10, tags="")
    _, dropped = device.alive.pop(1)
    for block in dropped:
        device.drop(block)
    while device.alive:
        device.backward()
    assert (device.hits, device.misses) == (2 * len(TAGS), len(TAGS))


def test_the_first_backward_is_expected_once_as_many_forwards_wait_as_the_last_time() -> None:
    device, forecast = Device(), None
    for layers in ((0, 1, 2), (2, 0, 1)):
        for layer in layers:
            device.forward(layer)
            forecast = device.predictor.following()
        while device.alive:
            device.backward()
    assert forecast == ("backward", 1)


def test_backwards_of_a_pipeline_are_learned_as_they_come() -> None:
    device = Device()
    for step in range(40):
        if step == 30:
            device.hits = device.misses = 0
        for layer in range(4):
            device.forward(layer)
        while device.alive:
            device.backward(0)  # the oldest first
    assert device.misses <= 10 * len(TAGS) and device.hits >= 10 * 3 * len(TAGS)


ACTS = st.tuples(st.sampled_from(["forward", "evaluate", "backward", "drop"]), st.integers(0, 3))


@given(st.lists(ACTS, max_size=60))
def test_any_order_of_forwards_backwards_and_drops_is_followed(acts: list[tuple[str, int]]) -> None:
    device = Device()
    for act, number in acts:
        if act == "forward":
            device.forward(number)
        elif act == "evaluate":
            device.forward(number, tags="")
        elif device.alive and act == "backward":
            device.backward(number % len(device.alive))
        elif device.alive:
            _, blocks = device.alive.pop(number % len(device.alive))
            for block in blocks:
                device.drop(block)
    forecast = device.predictor.forecast
    assert isinstance(forecast, KnownBackwards)
    assert [list(w.born) for w in forecast._waiting] == [blocks for _, blocks in device.alive]


def test_what_is_known_of_backwards_takes_no_memory_for_long() -> None:
    device = Device()
    for _ in range(100):
        device.step(range(4))
    forecast = device.predictor.forecast
    assert isinstance(forecast, KnownBackwards)
    assert not forecast._waiting and not forecast._writer
    assert len(forecast._left) < 100
    assert device.predictor.table_bytes == forecast.learned.table_bytes
