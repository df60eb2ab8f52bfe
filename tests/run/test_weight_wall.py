"""Others hold the memory of a weight that a plan would send away: it stays, and they are named."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weights_runs import LAYERS, Pair, batch, clean_slate, descend, loss_of, on_host, ours, seeded
from weights_runs import pair as build

import offcompile
from offcompile.run.accounts.fixed_weights import FixedWeights
from offcompile.runtime.device.owners import (
    LOOKS,
    has_others,
    name_holders,
    plain_parts,
    why_it_stays,
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield from clean_slate()


def step(forward: Any, model: Pair, seed: int = 0) -> Tensor:
    loss = loss_of(forward(batch(seed)))
    loss.backward()
    descend(model)
    return loss.detach()


class Averager:
    """Keeps weights by views of them, as frameworks do."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = [p.detach() for p in model.parameters()]


Take = Callable[[Pair], Any]
HOLDERS: dict[str, Take] = {
    "views": lambda model: [p.detach() for p in model.parameters()],
    "state dict": lambda model: model.state_dict(),
    "numpy": lambda model: [p.detach().numpy() for p in model.parameters()],
    "object": Averager,
    "storages": lambda model: [p.untyped_storage() for p in model.parameters()],
    "parameters": lambda model: [nn.Parameter(p) for p in model.parameters()],
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_who_holds_a_weights_memory_goes_on_sharing_it(kind: str) -> None:
    model = seeded(build)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    held = HOLDERS[kind](model)
    forward = ours(model)
    for seed in range(2):
        step(forward, model, seed)
    assert held is not None and on_host(model) == set()
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


def test_writes_through_a_view_reach_the_step() -> None:
    def run(forward: Any, model: Pair) -> list[Tensor]:
        view = model.up.weight.detach()
        seen = [step(forward, model)]
        view.mul_(0.5)
        seen.append(step(forward, model, 1))
        return [*seen, view.clone()]

    plain, model = seeded(build), seeded(build)
    expected, found = run(plain, plain), run(ours(model), model)
    assert all(map(torch.equal, found, expected))
    assert on_host(model) == {"down.weight"}


def test_weights_leave_when_nobody_else_holds_them() -> None:
    model = seeded(build)
    views = HOLDERS["views"](model)
    del views
    step(ours(model), model)
    assert on_host(model) == LAYERS


def test_a_view_of_new_memory_is_noticed_at_the_next_call() -> None:
    def run(forward: Any, model: Pair) -> list[Tensor]:
        seen = [step(forward, model)]
        model.up.weight.data = memory = torch.full_like(model.up.weight, 0.01)
        seen.append(step(forward, model, 1))
        memory.mul_(0.5)
        return [*seen, step(forward, model, 2), memory]

    plain, model = seeded(build), seeded(build)
    expected, found = run(plain, plain), run(ours(model), model)
    assert all(map(torch.equal, found, expected))
    assert "up.weight" not in on_host(model)


def test_the_holder_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(build)
    averager = Averager(model)
    forward = ours(model)
    with caplog.at_level(logging.WARNING, "offcompile"):
        step(forward, model)
        step(forward, model, 1)
    said = [r.getMessage() for r in caplog.records if "stay on the device" in r.getMessage()]
    assert len(said) == 1
    assert "up.weight" in said[0] and f"{__name__}.Averager" in said[0]
    assert len(averager.kept) == 6


def test_a_refusal_names_the_weights_that_could_not_leave() -> None:
    model = seeded(build)
    averager = Averager(model)
    options = {"memory": "30KiB", "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}
    with pytest.raises(offcompile.Infeasible, match=r"stay on the device: .*Averager"):
        torch.compile(model, backend="offcompile", options=options)(batch(0))
    assert averager.kept


def test_verify_says_that_weights_stayed() -> None:
    model = seeded(build)
    averager = Averager(model)
    options = {"memory": "minimum", "lowering": "aot_eager", "hardware": "cpu", "verify": True}
    step(torch.compile(model, backend="offcompile", options=options), model)
    verified = offcompile.reports()[-1].verified
    assert verified is not None and "6 weights stayed on the device" in verified.words()
    assert averager.kept


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_shared_model_stays_shared(when: str) -> None:
    def run(forward: Any, model: Pair) -> list[Tensor]:
        seen = []
        if when == "after":
            seen.append(step(forward, model))
        model.share_memory()
        places = [p.data_ptr() for p in model.parameters()]
        seen += [step(forward, model, 1), step(forward, model, 2)]
        assert all(p.is_shared() for p in model.parameters())
        assert places == [p.data_ptr() for p in model.parameters()]
        return [*seen, *(p.detach() for p in model.parameters())]

    plain, model = seeded(build), seeded(build)
    expected, found = run(plain, plain), run(ours(model), model)
    assert all(map(torch.equal, found, expected))


# --- the count that all this rests on -------------------------------------------------------------


def test_only_others_count() -> None:
    tensor = torch.empty(4)
    assert not has_others(tensor) and why_it_stays(tensor) is None
    view = tensor.view(2, 2)
    assert has_others(tensor) and has_others(view)
    del view
    assert not has_others(tensor)
    linear = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert not has_others(linear.weight)


def test_a_weight_may_leave_when_what_shared_its_memory_is_gone() -> None:
    weight, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    view = weight.detach()
    found = FixedWeights("graph 0", {0: "up.weight"})
    found.look([weight], [0])
    assert found.indices == {0} and "up.weight" in found.words()
    del view
    found.look([other], [0])  # another call's: says nothing of the first one
    assert found.indices == {0}
    found.look([weight], [0])
    assert not found.indices and found.words() == ""


def test_tensors_without_memory_of_their_own_stay() -> None:
    assert why_it_stays(torch.empty(4, device="meta")) is not None
    assert why_it_stays(torch.eye(3).to_sparse()) is not None
    assert why_it_stays(torch.empty(4).share_memory_()) is not None
    assert plain_parts(torch.ones(2))[0].tolist() == [1, 1]


def test_a_holder_that_is_no_python_object() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    pending = (
        torch.randn(2, 4, requires_grad=True) @ weight.t()
    ).sum()  # saves a view of the weight
    assert has_others(weight) and "backward pass" in name_holders([weight])[0]
    pending.backward()
    assert not has_others(weight)


def test_many_weights_are_named_in_as_many_looks_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = list[int](), gc.get_referrers

    def counted(*held: object) -> list[Any]:
        looks.append(len(held))
        return look(*held)

    monkeypatch.setattr(gc, "get_referrers", counted)
    weights = [nn.Parameter(torch.randn(4)) for _ in range(20)]
    views = Averager(nn.ParameterList(weights[1:]))
    nested = {"of one": {"more": [(weights[0].detach(),)]}}
    held = name_holders(weights)
    kind = f"{Averager.__module__}.{Averager.__qualname__}"
    assert held[1:] == [f"a Tensor held by {kind}"] * len(views.kept)
    assert nested and held[0] == "a Tensor in a variable, or saved for a backward pass"
    assert looks[0] == len(weights) and len(looks) <= LOOKS
