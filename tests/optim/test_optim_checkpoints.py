"""Training goes on in torch's optimizers and in ours, from one to the other, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_runs import (
    KINDS,
    PLACES,
    TRAINED,
    Run,
    assert_equal,
    loss_of,
    one_thread,
    our_run,
    torch_run,
)
from torch import nn

from offcompile import OffloadError, optim
from offcompile.runtime.states.states import HostStates


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def moved(source: Run, target: Run, through_a_file: bool = False) -> Run:
    """The target goes on where the source is."""
    target.model.load_state_dict(source.model.state_dict())
    state = source.optimizer.state_dict()
    if through_a_file:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file)
    else:
        state = copy.deepcopy(state)
    target.optimizer.load_state_dict(state)
    target.scheduler.load_state_dict(source.scheduler.state_dict())
    target.made, target.losses, target.norms = source.made, source.losses, source.norms
    return target


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("through_a_file", [False, True])
def test_torch_to_ours_to_torch(
    kind: str, states: str, overlap: bool, through_a_file: bool
) -> None:
    whole = torch_run(kind, accumulate=3).steps(10)
    begun = torch_run(kind, accumulate=3).steps(3)
    ours = our_run(kind, accumulate=3, clips=True, states=states, overlap=overlap)
    moved(begun, ours, through_a_file).steps(4)
    ended = moved(ours, torch_run(kind, accumulate=3), through_a_file).steps(3)
    assert_equal(ended, whole)


@pytest.mark.parametrize("states", PLACES)
def test_ours_to_ours_is_the_uninterrupted_run(states: str, tmp_path: Path) -> None:
    whole = our_run("AdamW", states=states).steps(6)
    begun = our_run("AdamW", states=states).steps(3)
    ended = moved(begun, our_run("AdamW", states="host", directory=tmp_path), True).steps(3)
    assert_equal(ended, whole)
    assert isinstance(ended.optimizer._core.entries[ended.model.mix.weight].store, HostStates)


def bf16_run(steps: int, **beside: Any) -> tuple[nn.Module, optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5)).bfloat16()
    ours = optim.AdamW(model.parameters(), 1e-3, **beside)
    return go_on(model, ours, range(steps))


def go_on(model: nn.Module, ours: optim.AdamW, numbers: range) -> tuple[nn.Module, optim.AdamW]:
    for number in numbers:
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(number)).bfloat16()
        ours.zero_grad()
        model(x).float().square().mean().backward()
        ours.step()
    return model, ours


@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("model_first", [False, True])
def test_masters_are_kept_in_checkpoints(states: str, model_first: bool) -> None:
    whole, _ = bf16_run(6)
    begun, first = bf16_run(3, states=states)
    saved = copy.deepcopy(first.state_dict())
    assert saved["state"][0]["master"].dtype == saved["state"][0]["exp_avg"].dtype == torch.float32
    model, ours = bf16_run(0, states=states)
    if model_first:
        model.load_state_dict(begun.state_dict())
    ours.load_state_dict(saved)
    if not model_first:
        model.load_state_dict(begun.state_dict())
    go_on(model, ours, range(3, 6))
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("states", PLACES)
def test_states_of_several_types_can_be_saved(states: str) -> None:
    whole, _ = bf16_run(4, state_dtype="bf16")
    model, begun = bf16_run(2, states=states, state_dtype="bf16")
    file = io.BytesIO()
    torch.save(begun.state_dict(), file)
    file.seek(0)
    ours = optim.AdamW(model.parameters(), 1e-3, states=states, state_dtype="bf16")
    ours.load_state_dict(torch.load(file))
    go_on(model, ours, range(2, 4))
    assert ours.state_dict()["state"][0]["exp_avg"].dtype == torch.bfloat16
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q)


def test_torch_takes_a_checkpoint_with_masters_and_gives_one_without() -> None:
    model, ours = bf16_run(2)
    torchs = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    torchs.load_state_dict(ours.state_dict())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torchs.step()
    again = optim.AdamW(model.parameters(), 1e-3)
    without = torchs.state_dict()
    for state in without["state"].values():
        state.pop("master", None)
    again.load_state_dict(without)
    again.step()
    for p in model.parameters():
        assert torch.equal(again.state[p]["master"].bfloat16(), p)


def test_the_state_is_live_as_in_torch() -> None:
    run = our_run("AdamW", states="host").steps(1)
    weight = run.model.mix.weight
    live = run.optimizer.state_dict()["state"]
    ordered = [p for g in run.optimizer.param_groups for p in g["params"]]
    position = next(i for i, p in enumerate(ordered) if p is weight)
    before = live[position]["exp_avg"].clone()
    run.step()
    assert live[position]["exp_avg"] is run.optimizer.state[weight]["exp_avg"]
    assert not torch.equal(live[position]["exp_avg"], before)


def test_a_checkpoint_of_states_on_disk_is_not_live_and_lies_in_a_file() -> None:
    run = our_run("AdamW", states="disk").steps(1)
    saved = run.optimizer.state_dict()["state"][0]
    before = saved["exp_avg"].clone()
    run.step()
    assert torch.equal(saved["exp_avg"], before)
    maps = Path("/proc/self/maps").read_text().splitlines()
    address = saved["exp_avg"].data_ptr()
    mine = [m for m in maps if _holds(m, address)]
    assert len(mine) == 1 and "(deleted)" in mine[0]


def _holds(mapping: str, address: int) -> bool:
    start, end = (int(x, 16) for x in mapping.split()[0].split("-"))
    return start <= address < end


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_whole_and_of_their_own(kind: str, way: str, overlap: bool) -> None:
    run = our_run(kind, overlap=overlap).steps(2)
    pair = (run.model, run.optimizer)
    model, ours = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    for number in range(2):
        for m, o in ((run.model, run.optimizer), (model, ours)):
            o.zero_grad()
            loss_of(m, number).backward()
            o.step()
    for p, q in zip(model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(p, q) and p is not q
    assert isinstance(ours._core.entries[model.mix.weight].store, HostStates)
    assert ours.facts().updated_in_backward == (TRAINED if overlap else 0)


def test_states_on_disk_are_not_copied_along() -> None:
    run = our_run("AdamW", states="disk").steps(1)
    with pytest.raises(OffloadError, match=r"cannot be copied or pickled.*state_dict"):
        copy.deepcopy(run.optimizer)


def test_hooks_around_checkpoints_are_called_once() -> None:
    run, seen = our_run("AdamW").steps(1), []
    state = run.optimizer.state_dict()
    run.optimizer.register_load_state_dict_pre_hook(
        lambda o, s: seen.append(("pre", len(s["state"])))
    )
    run.optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("post", len(o.state))))
    run.optimizer.load_state_dict(copy.deepcopy(state))
    assert seen == [("pre", len(state["state"])), ("post", len(state["state"]))]


def test_a_checkpoint_of_another_model_is_refused() -> None:
    one, other = nn.Linear(3, 3), nn.Linear(4, 3)
    for layer in (one, other):
        layer(torch.ones(1, layer.in_features)).sum().backward()
    ours, theirs = optim.AdamW(one.parameters()), torch.optim.AdamW(other.parameters())
    theirs.step()
    with pytest.raises(OffloadError, match=r"exp_avg .* shape \(3, 4\).*not \(3, 3\)"):
        ours.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        ours.load_state_dict(torch_run("AdamW").optimizer.state_dict())


def test_the_state_may_be_emptied() -> None:
    run = our_run("AdamW", max_norm=None).steps(2)
    run.optimizer.state.clear()
    fresh = our_run("AdamW")
    fresh.model.load_state_dict(run.model.state_dict())
    fresh.optimizer.load_state_dict(run.optimizer.state_dict())
    for other in (run, fresh):
        other.optimizer.zero_grad()
        loss_of(other.model, 2).backward()
        other.optimizer.step()
    for p, q in zip(run.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_another_kind_of_copy_of_the_model_keeps_its_optimizer_apart() -> None:
    run = our_run("AdamW", overlap=True).steps(1)
    twin = copy.deepcopy(run.model)
    loss_of(twin, 0).backward()
    assert twin.mix.weight.grad is not None
    assert not torch.equal(twin.mix.weight.grad, torch.zeros(13, 13))
