"""Where states go, what goes with an optimizer, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optim_runs import (
    loss_of,
    one_thread,
    our_run,
)
from torch import nn

from offcompile import InvalidInput, OffloadError, optim
from offcompile.runtime.device.mapped import MappedStore
from offcompile.runtime.states.states import HostStates, MemoryStates


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def test_host_states_lie_in_a_mapped_file_and_device_states_do_not() -> None:
    on_host = our_run("AdamW", states="host").steps(1)
    weight = on_host.model.mix.weight
    store = on_host.optimizer._core.entries[weight].store
    assert isinstance(store, HostStates)
    room: Any = store._room
    assert isinstance(room._store, MappedStore)
    assert room._store.slot_of(on_host.optimizer.state[weight]["exp_avg"]) is not None
    on_device = our_run("AdamW", states="device").steps(1)
    assert type(on_device.optimizer._core.entries[on_device.model.mix.weight].store) is MemoryStates


def test_auto_goes_to_disk_where_the_host_has_too_little() -> None:
    assert set(our_run("AdamW").steps(1).optimizer.facts().stores) == {"host"}
    none = our_run("AdamW", host_memory=0).steps(1)
    assert set(none.optimizer.facts().stores) == {"disk"}
    assert set(our_run("AdamW", host_memory=1 << 30).steps(1).optimizer.facts().stores) == {"host"}


def test_auto_shares_between_host_and_disk_in_turn() -> None:
    ps = [nn.Parameter(torch.ones(1000)) for _ in range(8)]
    ours = optim.AdamW(ps, host_memory=4 * 8000)
    places = [ours._core.entries[p].place for p in placed(ours, ps)]
    assert places == ["disk", "host"] * 4


def test_the_device_keeps_states_of_the_first_parameters() -> None:
    ps = [nn.Parameter(torch.ones(1000)) for _ in range(4)]
    ours = optim.AdamW(ps, states="host", device_memory=2 * 8000 + 1)
    places = [ours._core.entries[p].place for p in placed(ours, ps)]
    assert places == ["device cpu"] * 2 + ["host"] * 2


def placed(ours: optim.AdamW, ps: list[nn.Parameter]) -> list[nn.Parameter]:
    for p in ps:
        p.grad = torch.ones(1000)
    ours.step()
    return ps


def test_frozen_parameters_take_no_room_on_the_host() -> None:
    adapter, base = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(100_000))
    base.requires_grad_(False)
    ours = optim.AdamW([adapter, base], host_memory="4kB")
    adapter.grad = torch.ones(8)
    ours.step()
    assert set(ours.facts().stores) == {"host"}
    base.grad = torch.ones(100_000)  # nobody forbids it
    ours.step()
    assert set(ours.facts().stores) == {"host", "disk"} and (base < 1).all()


def test_states_made_in_inference_mode_can_be_changed_later() -> None:
    p = nn.Parameter(torch.ones(8))
    ours = optim.AdamW([p])
    p.grad = torch.ones(8)
    with torch.inference_mode():
        ours.step()
    ours.step()
    assert ours.state[p]["step"] == 2


def test_what_an_optimizer_held_goes_with_it() -> None:
    run = our_run("AdamW", overlap=True).steps(1)
    arrivals, parameter = weakref.ref(run.optimizer._arrivals), run.model.mix.weight
    assert parameter._post_accumulate_grad_hooks
    before = parameter.detach().clone()
    del run.optimizer, run.scheduler
    gc.collect()
    assert arrivals() is None and not parameter._post_accumulate_grad_hooks
    loss_of(run.model, 0).backward()
    assert parameter.grad is not None and torch.equal(parameter, before)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"states": "gpu"}, "states='gpu'.*'disk'"),
        ({"accumulate": 0, "overlap": True}, "accumulate=0"),
        ({"accumulate": 2}, "overlap=True only"),
        ({"max_norm": -1.0}, "max_norm=-1.0.*positive"),
        ({"host_memory": "much"}, "much"),
        ({"host_memory": -3}, "host_memory=-3"),
        ({"state_dtype": "fp8"}, "state_dtype='fp8'.*bf16"),
        ({"channels": "fast"}, "channels='fast'"),
        ({"verify_spill": "yes"}, "verify_spill='yes'"),
    ],
)
def test_wrong_arguments_are_told(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        optim.AdamW([nn.Parameter(torch.ones(2))], **wrong)


@pytest.mark.parametrize("flag", ["differentiable", "capturable"])
def test_flags_that_cannot_be_honoured(flag: str) -> None:
    wrong: dict[str, Any] = {flag: True}
    with pytest.raises(OffloadError, match=f"{flag}=True is not possible.*torch.optim"):
        optim.AdamW([nn.Parameter(torch.ones(2))], **wrong)
    ours = optim.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(OffloadError, match=flag):
        ours.add_param_group({"params": [nn.Parameter(torch.ones(2))], flag: True})


def test_foreach_and_fused_are_accepted_and_kept_for_torch() -> None:
    p = nn.Parameter(torch.ones(2))
    assert optim.AdamW([p]).param_groups[0]["fused"] is True
    assert optim.AdamW([p], fused=False).param_groups[0]["fused"] is False
    with_foreach = optim.SGD([p], foreach=True).param_groups[0]
    assert with_foreach["foreach"] is True and with_foreach["fused"] is None
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optim.AdamW([p], lr=-1.0)


def test_sparse_and_complex_gradients_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    ours = optim.Adam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(OffloadError, match=r"sparse.*SparseAdam"):
        ours.step()
    with pytest.raises(OffloadError, match=r"complex64.*view_as_real"):
        optim.Adam([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
