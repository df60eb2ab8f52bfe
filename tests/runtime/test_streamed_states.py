"""Optimizer states that cross to the device for updates: no race, and torch's steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cuda_bench import Bench, bench_of
from simulated_streams import Faults
from torch import nn

from offcompile import optim
from offcompile.ir import OffloadError
from offcompile.runtime.states import updates
from offcompile.runtime.states.state_blocks import GRAIN
from offcompile.runtime.states.streamed_states import StreamedStates

#: elements of each key: one block and a bit, exactly one, several
SIZES = (GRAIN + 3, GRAIN, 3 * GRAIN + 17, 5)


def add_one(part: np.ndarray) -> None:
    part += 1


def check(wrong: list[str], value: int, what: str) -> Callable[[np.ndarray], None]:
    def kernel(part: np.ndarray) -> None:
        if not (part == value % 256).all():
            wrong.append(f"{what}: {part[:4]}, not {value}")

    return kernel


def made(bench: Bench, kind: type[StreamedStates] = StreamedStates, buffers: int = 3) -> Any:
    states = kind(bench.device, block_bytes=GRAIN, buffers=buffers)
    for key, numel in enumerate(SIZES):
        states.add(key, numel, [torch.uint8])
    return states


def visit(bench: Bench, states: StreamedStates, key: int, value: int, write: bool) -> None:
    for r in states.visit(key, write):
        (part,) = r.parts
        assert part.numel() == r.stop - r.start
        bench.streams.launch(check(bench.wrong, value, f"key {key}"), (part,), ())
        if write:
            bench.streams.launch(lambda x, y: add_one(y), (part,), (part,), f"update {key}")
        del part, r


def steps(bench: Bench, states: StreamedStates, seed: int, count: int = 5) -> None:
    """Mostly in the expected order; some visits only read, some come out of order."""
    dice = random.Random(seed)
    values = dict.fromkeys(range(len(SIZES)), 0)
    order = list(values)
    for step in range(count):
        if step == 1:
            states.expect(order)
        keys = dice.sample(order, len(order)) if dice.random() < 0.3 else order
        for key in keys:
            write = dice.random() < 0.8
            visit(bench, states, key, values[key], write)
            values[key] += write
    for key in order:
        visit(bench, states, key, values[key], write=False)


@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_no_race_whatever_the_timing_and_the_order(buffers: int) -> None:
    for seed in range(60):
        bench = bench_of(seed)
        states = made(bench, buffers=buffers)
        steps(bench, states, seed)
        states.settle()
        states.close()
        bench.settle()
        bench.close()
        assert (bench.streams.races, bench.wrong) == ([], []), seed


class Hasty(StreamedStates):
    """Fills a buffer while what was in it may still be leaving."""

    def _load(self, buffer: Any, block: Any) -> None:
        buffer.after = []
        super()._load(buffer, block)


class Forgetful(StreamedStates):
    """Loads what may not be written yet."""

    def _load(self, buffer: Any, block: Any) -> None:
        block.written = None
        super()._load(buffer, block)


@pytest.mark.parametrize("kind", [Hasty, Forgetful])
def test_an_order_taken_away_is_found(kind: type[StreamedStates]) -> None:
    found = 0
    for seed in range(30):
        bench = bench_of(seed)
        states = made(bench, kind, buffers=4 if kind is Forgetful else 2)
        steps(bench, states, seed)
        bench.settle()
        found += bool(bench.streams.races)
        states.close()
        bench.close()
    assert found > 0


def test_buffers_are_all_that_it_takes_of_the_device() -> None:
    bench = bench_of(3)
    states = made(bench, buffers=3)
    bench.streams.reset_peak()
    steps(bench, states, 3)
    assert bench.streams.memory().peak_allocated_bytes <= states.held_bytes(GRAIN) == 3 * GRAIN
    states.close()
    bench.settle()
    assert bench.streams.memory().allocated_bytes == 0
    bench.close()


def test_what_is_expected_is_on_its_way_before_it_is_asked_for() -> None:
    bench = bench_of(1)
    states = made(bench, buffers=3)
    states.expect([1, 0, 2])
    visit(bench, states, 1, 0, write=True)
    loaded = states.facts().bytes_read
    # key 1, both blocks of key 0 beside it
    assert loaded == GRAIN + 2 * GRAIN or loaded > GRAIN + GRAIN
    states.close()
    bench.settle()
    bench.close()


@pytest.mark.parametrize("running", [True, False])
def test_a_failed_way_back_is_told_and_names_the_states(running: bool) -> None:
    bench = bench_of(0)
    states = made(bench, buffers=2)
    fails = frozenset({bench.streams._copies + 1})  # the load, then the way back
    bench.streams.faults = Faults(running=fails) if running else Faults(at_issue=fails)
    visit(bench, states, 1, 0, write=True)
    with pytest.raises(OffloadError, match=r"optimizer states 1 \[0:4096\] did not arrive"):
        states.settle()
    states.close()
    bench.close()


def test_states_are_removed_and_added_again_as_zeros() -> None:
    bench = bench_of(5)
    states = made(bench)
    visit(bench, states, 2, 0, write=True)
    states.remove(2)
    states.add(2, SIZES[2], [torch.uint8])
    visit(bench, states, 2, 0, write=True)
    with pytest.raises(OffloadError, match="are there already"):
        states.add(2, 1, [torch.uint8])
    bench.settle()
    assert (bench.streams.races, bench.wrong) == ([], [])
    states.close()
    bench.close()


# -- the optimizers that use them ------------------------------------------------------------


def train(make: Callable[[nn.Module], torch.optim.Optimizer], dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(390, 410), nn.Tanh(), nn.Linear(410, 301)).to(dtype)
    optimizer = make(model)
    for step in range(4):
        x = torch.randn(6, 390, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], optimizer


MAKERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "momentum": (torch.optim.SGD, optim.SGD, {"lr": 0.01, "momentum": 0.9}),
}


@pytest.mark.parametrize(
    "asked", [{}, {"overlap": True}, {"overlap": "forward"}, {"max_norm": 9.0}]
)
@pytest.mark.parametrize("stream", [True, 0.5])
@pytest.mark.parametrize("kind", MAKERS)
def test_steps_with_streamed_states_are_torch_s(kind: str, stream: Any, asked: Any) -> None:
    theirs, ours, numbers = MAKERS[kind]

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        made = theirs(model.parameters(), fused=True, **numbers)
        if "max_norm" in asked:
            made.register_step_pre_hook(
                lambda *_: nn.utils.clip_grad_norm_(model.parameters(), asked["max_norm"]) and None
            )
        return made

    expected, _ = train(plain, torch.float32)
    found, optimizer = train(
        lambda m: ours(m.parameters(), states="host", stream=stream, **numbers, **asked),
        torch.float32,
    )
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)
    facts = optimizer.facts().stores
    assert facts["streamed cpu"].bytes_written > 0
    assert ("host" in facts) is (stream == 0.5)


def test_masters_stream_too_and_a_checkpoint_goes_both_ways() -> None:
    numbers = {"lr": 0.01, "states": "host"}
    expected, host = train(lambda m: optim.AdamW(m.parameters(), **numbers), torch.bfloat16)
    found, streamed = train(
        lambda m: optim.AdamW(m.parameters(), stream=True, **numbers), torch.bfloat16
    )
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)
    mine, other = streamed.state_dict()["state"], host.state_dict()["state"]
    assert mine.keys() == other.keys()
    for key, states in mine.items():
        assert states.keys() == other[key].keys()
        for name, value in states.items():
            assert torch.equal(value, other[key][name]), name
    model = nn.Sequential(nn.Linear(390, 410), nn.Tanh(), nn.Linear(410, 301)).to(torch.bfloat16)
    again = optim.AdamW(model.parameters(), stream=True, **numbers)
    again.load_state_dict(streamed.state_dict())
    for key, states in again.state_dict()["state"].items():
        assert torch.equal(states["exp_avg"], mine[key]["exp_avg"])


def test_a_plan_s_advice_decides_unless_a_share_is_given() -> None:
    model = nn.Linear(200, 300, bias=False)
    updates.advise([model.weight], by_device=True)
    model(torch.ones(1, 200)).sum().backward()
    by_plan = optim.AdamW(model.parameters(), states="host")
    by_plan.step()
    assert by_plan.facts().stores.keys() == {"streamed cpu"}
    by_hand = optim.AdamW(model.parameters(), states="host", stream=False)
    by_hand.step()
    assert by_hand.facts().stores.keys() == {"host"}


@pytest.mark.parametrize("stream", [-0.1, 1.5, "half"])
def test_a_share_that_is_none_is_refused(stream: Any) -> None:
    with pytest.raises(OffloadError, match=r"stream=.*give True, False, a share between 0 and 1"):
        optim.SGD(nn.Linear(2, 2).parameters(), 0.1, stream=stream)
