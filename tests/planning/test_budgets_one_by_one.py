"""A notebook: one budget after the other is tried in one process, with refusals among them."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import weakref

import pytest
import torch
from torch import nn

import offcompile
from offcompile.ir import Infeasible, InvalidInput, Violation

WIDTH, ROWS = 256, 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Models of one class share compiled code, and with it the plans of former tests."""
    torch._dynamo.reset()


def compiled(model: nn.Module, memory: int | str) -> nn.Module:
    options = {"memory": memory, "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.1}
    return torch.compile(model, backend="offcompile", options=options)


def step(model: nn.Module, memory: int | str) -> float:
    loss = compiled(model, memory)(torch.ones(ROWS, WIDTH))
    loss.backward()
    return float(loss)


def refused(memory: int | str) -> Infeasible:
    with pytest.raises(Infeasible) as told:
        step(Net(), memory)
    return told.value


def named_budget(error: Infeasible) -> str:
    """The budget that the refusal says to set."""
    found = re.search(r"Set memory to '(.+?)'", error.smallest_change)
    assert found is not None, error
    return found.group(1)


def test_the_budget_that_a_refusal_names_is_enough_for_a_fresh_model() -> None:
    budget = named_budget(refused(100_000))
    assert step(Net(), budget) > 0


def test_refusals_name_the_same_budget_however_many_came_before() -> None:
    assert len({named_budget(refused(100_000)) for _ in range(5)}) == 1


def test_a_refusal_that_is_kept_does_not_hold_its_model() -> None:
    """Neither in a variable nor as the last error of an interactive session."""
    kept = refused(100_000)
    sys.last_value = refused(100_000)
    try:
        assert step(Net(), named_budget(kept)) > 0
    finally:
        del sys.last_value


def test_a_model_that_was_refused_dies_with_its_last_user() -> None:
    model = Net()
    gone = weakref.ref(model)
    with pytest.raises(Infeasible):
        compiled(model, 100_000)(torch.ones(ROWS, WIDTH))
    del model
    gc.collect()
    assert gone() is None


def test_one_model_is_tried_under_one_budget_after_the_other() -> None:
    model = Net()
    with pytest.raises(Infeasible) as told:
        step(model, 100_000)
    assert step(model, named_budget(told.value)) > 0
    model.zero_grad()
    assert step(model, "minimum") > 0
    model.zero_grad()
    assert step(model, "1GiB") > 0


def test_another_model_that_lives_is_said_to_be_one_of_the_process() -> None:
    first = Net()
    assert step(first, "1GiB") > 0
    with pytest.raises(Infeasible, match=r"others hold .* compiled graphs of this process"):
        step(Net(), 200_000)
    del first
    assert step(Net(), named_budget(refused(100_000))) > 0


def test_twenty_models_leave_nothing_behind() -> None:
    def held() -> int:
        gc.collect()
        return sum(isinstance(x, nn.Parameter) for x in gc.get_objects())

    step(Net(), "minimum")
    before = held()
    for _ in range(20):
        step(Net(), "minimum")
    assert held() <= before
    assert offcompile.counters()["live_tickets"] == 0


@pytest.mark.parametrize(
    "error",
    [
        Infeasible("Too much.", 7, "Take less."),
        InvalidInput([Violation("bad-value", "memory", "-1")]),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("way", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_are_copied_whole(error: Exception, way: object) -> None:
    again = way(error)  # type: ignore[operator]
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
