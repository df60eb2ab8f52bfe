"""Optimizers without a class here, with their states elsewhere: their numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optim_runs import MAX_NORM, PLACES, Model, Run, assert_equal, assert_same_states, one_thread
from torch import nn

import offcompile
from offcompile import optim
from offcompile.ir import InvalidInput, OffloadError
from offcompile.optim import others

Kind = type[torch.optim.Optimizer]
KINDS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def plain(name: str, **more: Any) -> Run:
    model, (kind, own) = Model(), KINDS[name]
    return Run(model, kind(trained(model), **own), **more)


def ours(name: str, accumulate: int = 1, **beside: Any) -> Run:
    model, (kind, own) = Model(), KINDS[name]
    if beside.get("overlap"):
        beside["accumulate"] = accumulate
    made = optim.offload(kind, trained(model), **own, **beside)
    return Run(model, made, accumulate, clips="max_norm" in beside)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("states", PLACES)
def test_ten_steps_are_those_of_the_class(name: str, states: str) -> None:
    made = ours(name, states=states)
    assert isinstance(made.optimizer, KINDS[name][0])
    assert_equal(made.steps(10), plain(name).steps(10))


@pytest.mark.parametrize("states", PLACES)
def test_updates_during_backward_and_clipped_are_those_of_the_class(states: str) -> None:
    torchs = plain("RMSprop", accumulate=2).steps(4)
    clipped = ours("RMSprop", accumulate=2, states=states, overlap=True, max_norm=MAX_NORM)
    assert_equal(clipped.steps(4), torchs)
    unclipped = ours("RMSprop", accumulate=2, states=states, overlap=True)
    unclipped.max_norm = None
    assert_equal(unclipped.steps(4), plain("RMSprop", accumulate=2, max_norm=None).steps(4))
    assert unclipped.optimizer.facts().updated_in_backward > 0


@pytest.mark.parametrize("name", KINDS)
def test_checkpoints_go_both_ways(name: str) -> None:
    torchs, made = plain(name), ours(name, states="disk")
    torchs.steps(3), made.steps(3)
    saved = made.optimizer.state_dict()
    assert_same_states(saved, torchs.optimizer.state_dict())
    again, back = ours(name, states="host"), plain(name)
    for run, state in ((again, torchs.optimizer.state_dict()), (back, saved)):
        run.model.load_state_dict(torchs.model.state_dict())
        run.optimizer.load_state_dict(state)
    assert_equal(again.steps(3), back.steps(3))


def test_a_schedule_tries_the_optimizer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    real = others._tried
    monkeypatch.setattr(others, "_tried", lambda *given: tried.append(given) or real(*given))
    made, torchs = ours("RMSprop", states="host"), plain("RMSprop")
    for run in (made, torchs):
        schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        for _ in range(3):
            run.steps(1)
            schedule.step()
    assert len(tried) == 1
    assert_equal(made.steps(1), torchs.steps(1))


def test_compiled_graphs_hand_over_their_gradients() -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        if compiled:
            made: Any = optim.offload(
                torch.optim.RMSprop, model.parameters(), lr=1e-3, states="host", overlap=True
            )
            options = {"memory": "minimum", "lowering": "aot_eager"}
            step = torch.compile(model, backend="offcompile", options=options)
        else:
            made = torch.optim.RMSprop(model.parameters(), lr=1e-3)
            step = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            step(torch.randn(32, 64, generator=torch.Generator().manual_seed(1))).sum().backward()
            made.step()
            made.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))
    assert offcompile.counters()


class Together(torch.optim.Optimizer):
    """Divides by the largest gradient of all parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        largest = max(float(p.grad.abs().max()) for p in every)
        for p in every:
            self.state[p].setdefault("step", torch.zeros(()))
            p.add_(p.grad / largest, alpha=-0.1)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (torch.optim.AdamW, r"offcompile\.optim\.AdamW\(…\) with the same arguments"),
        (torch.optim.LBFGS, "missing 1 required positional argument: 'closure'"),
        (torch.optim.NAdam, r"'mu_product' is a tensor of shape \(\) for one of shape \(3, 2\)"),
        (torch.optim.Adafactor, "'row_var' is a tensor of shape"),
        (Together, "its update of one parameter depends on the others"),
    ],
)
def test_an_optimizer_that_cannot_be_divided_is_refused_by_name(kind: Kind, says: str) -> None:
    with pytest.raises(OffloadError, match=says) as refused:
        optim.offload(kind, trained(Model()), lr=0.1)
    assert kind.__name__ in str(refused.value)


def test_wrong_arguments_are_refused_as_elsewhere() -> None:
    with pytest.raises(InvalidInput, match="states='tape' is not possible"):
        optim.offload(torch.optim.RMSprop, trained(Model()), states="tape")
    with pytest.raises(TypeError, match="pace"):
        optim.offload(torch.optim.RMSprop, trained(Model()), pace=3)
