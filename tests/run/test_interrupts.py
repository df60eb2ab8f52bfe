"""Ctrl-C at drawn points of a step, of planning and of an update: the process trains on."""

from __future__ import annotations

import copy
import gc
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import interrupt_child
import pytest
import torch
import warm
from interrupted import Interrupted
from torch import Tensor, nn
from weights_runs import seeded
from zoo import GPT

import offcompile
from offcompile.ir import OffloadError
from offcompile.runtime.base import progress
from offcompile.runtime.memory.malloc.places import PLACED_FROM

WORDS, LENGTH = 96, 32
OPTIONS: dict[str, Any] = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.01}
#: present amounts that an interrupted step must not change
HELD = ("live_tickets", "in_flight_bytes", "spill_bytes", "host_bytes", "keeper_bytes")


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """An interrupt is one, also where a shell started the tests with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, before)


def gpt() -> nn.Module:
    return GPT(WORDS, 64, 2, 4, LENGTH)


def batch(number: int) -> Tensor:
    drawn = torch.Generator().manual_seed(number)
    return torch.randint(0, WORDS, (4, LENGTH + 1), generator=drawn)


def compiled(model: Any, memory: str | None, by_blocks: bool = False) -> Any:
    how: dict[str, Any] = {"backend": "aot_eager"}
    if memory is not None:
        how = {"backend": "offcompile", "options": {"memory": memory, **OPTIONS}}
    if not by_blocks:
        return torch.compile(model, **how)
    for block in model.blocks:
        block.compile(**how)
    return model


def points(run: Callable[[], object]) -> int:
    with Interrupted() as counted:
        run()
    return counted.count


def is_interrupted(at: int, run: Callable[[], object]) -> bool:
    """Run with an interrupt at a point; False if there were fewer points this time."""
    try:
        with Interrupted(at) as interrupted:
            run()
    except KeyboardInterrupt:
        assert interrupted.where is not None
        return True
    return False


def held() -> list[int | float]:
    gc.collect()
    found = offcompile.counters()
    assert found["live_tickets"] == 0
    return [found[name] for name in HELD]


def workers() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("offcompile")}


@pytest.mark.parametrize(
    ("memory", "by_blocks"),
    [("minimum", False), pytest.param("2MiB", True, marks=pytest.mark.soak)],
)
def test_a_step_that_is_interrupted_leaves_nothing(memory: str, by_blocks: bool) -> None:
    ours, plain = seeded(gpt), seeded(gpt)
    run, wanted = compiled(ours, memory, by_blocks), compiled(plain, None, by_blocks)

    def step(run: Any, model: Any, number: int) -> list[Tensor]:
        model.zero_grad()
        loss = run(batch(number))
        loss.backward()
        return [loss.detach().clone(), *(p.grad for p in model.parameters())]

    for number in range(PLACED_FROM):  # the last of them lays out blocks, at many points
        assert all(map(torch.equal, step(run, ours, number), step(wanted, plain, number)))
    assert any(not r.fits for r in offcompile.reports())
    most = points(lambda: step(run, ours, PLACED_FROM))
    ours.zero_grad()
    before, alive = held(), workers()
    drawn, hits = random.Random(0), 0
    for number in range(6):
        at = drawn.randrange(1, most)
        hits += is_interrupted(at, lambda: step(run, ours, 99))
        assert all(map(torch.equal, step(run, ours, number), step(wanted, plain, number))), at
        ours.zero_grad()
        after = held()
        # the keeper may hold less than before, never more
        assert all(map(int.__eq__, after[:-1], before[:-1])) and after[-1] <= before[-1], at
        assert alive <= workers()
    assert hits > 3


@pytest.mark.long
def test_planning_that_is_interrupted_begins_anew() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU())))

    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))

    def step(run: Any, model: nn.Module) -> list[Tensor]:
        loss = run(x).square().sum()
        loss.backward()
        found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        return found

    def fresh() -> tuple[Any, nn.Module]:
        torch._dynamo.reset()
        model = seeded(build)
        return compiled(model, "minimum"), model

    plain = seeded(build)
    wanted = step(compiled(plain, None), plain)
    run, model = fresh()
    most = points(lambda: step(run, model))
    plan = offcompile.reports()[-1]
    assert not plan.fits
    drawn, hits = random.Random(0), 0
    for _ in range(20):
        run, model = fresh()
        # how many points there are depends on how far the search came in its time
        if is_interrupted(drawn.randrange(1, most), lambda: step(run, model)):  # noqa: B023
            hits += 1
        else:
            most = max(2, most // 2)
        model.zero_grad()
        assert progress._innermost is None and torch.is_grad_enabled()
        for _ in range(2):
            assert all(map(torch.equal, step(run, model), wanted))
        again = offcompile.reports()[-1]
        # a step that was given up takes nothing from the budget
        assert again.budget_bytes == plan.budget_bytes and not again.fits
        if hits > 2:
            break
    assert hits > 2
    held()


STATES: list[dict[str, Any]] = [
    {"states": "host", "overlap": True},
    {"states": "host"},
    {"states": "disk", "overlap": True},
    {"states": "host", "overlap": "forward", "channels": True},
]


@pytest.mark.parametrize(
    "how", [STATES[0], *(pytest.param(h, marks=pytest.mark.soak) for h in STATES[1:])]
)
def test_an_update_that_is_interrupted_is_told(how: dict[str, Any]) -> None:
    ours, plain = seeded(gpt), seeded(gpt)
    run, wanted = compiled(ours, "minimum"), compiled(plain, None)
    optimizer: Any = offcompile.optim.AdamW(ours.parameters(), lr=1e-2, **how)
    twin = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)

    def step(run: Any, by: Any, number: int) -> Tensor:
        loss: Tensor = run(batch(number))
        loss.backward()
        by.step()
        by.zero_grad()
        return loss.detach().clone()

    for number in range(2):
        assert torch.equal(step(run, optimizer, number), step(wanted, twin, number))
    most = points(lambda: step(run, optimizer, 2))
    step(wanted, twin, 2)
    before = held()
    drawn = random.Random(0)
    for number in range(6):
        model_state = copy.deepcopy(plain.state_dict())
        state = copy.deepcopy(twin.state_dict())
        is_interrupted(drawn.randrange(1, most), lambda: step(run, optimizer, 99))
        optimizer.settle()
        step(wanted, twin, 99)
        old = list(map(torch.equal, ours.parameters(), model_state.values()))
        new = list(map(torch.equal, ours.parameters(), plain.parameters()))
        # each parameter was updated as a whole, or not at all
        assert how["states"] == "disk" or all(a or b for a, b in zip(old, new, strict=True))
        if any(old) and not all(old):  # told at the next use
            with pytest.raises(OffloadError, match="discard"):
                optimizer.zero_grad() if how.get("overlap") else optimizer.step()
        # the documented way on: back to the last checkpoint
        optimizer.discard()
        for model, by in ((ours, optimizer), (plain, twin)):
            model.load_state_dict(model_state)
            by.load_state_dict(copy.deepcopy(state))
        assert torch.equal(step(run, optimizer, number), step(wanted, twin, number))
        assert all(map(torch.equal, ours.parameters(), plain.parameters()))
        ours.zero_grad()
        assert held() == before


def test_a_step_that_ends_amid_its_updates_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from offcompile.optim import apply

    model: Any = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = offcompile.optim.SGD(model.parameters(), lr=0.1, states="device")
    real, calls = apply._update_call, [0]

    def interrupted(*given: Any) -> None:
        real(*given)
        calls[0] += 1
        raise KeyboardInterrupt

    def backward() -> None:
        model(torch.ones(2, 4)).sum().backward()

    backward()
    saved = copy.deepcopy(optimizer.state_dict())
    with monkeypatch.context() as patched:
        patched.setattr(apply, "_update_call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert calls == [1]
    for way_on in (optimizer.discard, lambda: optimizer.load_state_dict(saved)):
        optimizer._core.is_torn = True
        with pytest.raises(OffloadError, match="ended amid its updates"):
            optimizer.step()
        way_on()
        backward()
        optimizer.step()


@pytest.mark.long
def test_a_process_that_ctrl_c_hits_trains_on_and_leaves_no_files(tmp_path: Path) -> None:
    here = Path(interrupt_child.__file__).resolve()
    paths = [str(here.parent), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    child = warm.start(
        [sys.executable, str(here), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        cwd=here.parents[2],
    )
    try:
        for _ in range(interrupt_child.INTERRUPTS):
            assert child.readline() == "train\n"
            os.kill(child.pid, signal.SIGINT)
        first, *found = json.loads(child.readline())
        _, said_last = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 0 and first["right"], said_last
    assert len(found) == interrupt_child.INTERRUPTS
    for said in found:
        assert said["right"] and not said["dead"]
        assert said["held"] == first["held"] and said["held"][0] == 0
    assert list(tmp_path.iterdir()) == []
