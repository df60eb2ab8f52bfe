"""Our optimizers against torch's fused ones on the CPU: bit for bit."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offcompile import InvalidInput, OffloadError, optim
from offcompile.optim import apply
from offcompile.runtime.mapped import MappedStore
from offcompile.runtime.states import HostStates, MemoryStates
from tests.optim_runs import KINDS, Model, Run, assert_equal, loss_of, our_run, torch_run

PLACES = ("device", "host", "disk")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("clips", [False, True])
def test_ten_steps_are_those_of_torch(kind: str, states: str, clips: bool) -> None:
    torchs = torch_run(kind, accumulate=3).steps(10)
    ours = our_run(kind, accumulate=3, states=states, clips=clips).steps(10)
    assert min(torchs.norms) > 0.05, "clipping is to clip"
    assert_equal(ours, torchs)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_zeros_and_no_gradient_differ_as_in_torch(kind: str) -> None:
    torchs, ours = torch_run(kind, set_to_none=False), our_run(kind)
    ours.set_to_none = False
    assert_equal(ours.steps(4), torchs.steps(4))


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["AdamW", "Adam", "SGD"]),
    lr=st.floats(1e-5, 1.0),
    tensor_lr=st.booleans(),
    decay=st.sampled_from([0.0, 0.01, 0.3]),
    flag=st.booleans(),
    maximize=st.booleans(),
    a=st.floats(0.0, 0.99),
    b=st.floats(0.5, 0.999),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]),
    numel=st.integers(0, 200),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    tile=st.sampled_from([16, 48, 1 << 18]),
    max_norm=st.sampled_from([None, 0.3]),
    states=st.sampled_from(["host", "device"]),
    seed=st.integers(0, 1000),
)
def test_any_hyper_parameters(
    kind: str,
    lr: float,
    tensor_lr: bool,
    decay: float,
    flag: bool,
    maximize: bool,
    a: float,
    b: float,
    eps: float,
    numel: int,
    dtype: torch.dtype,
    tile: int,
    max_norm: float | None,
    states: str,
    seed: int,
) -> None:
    common: dict[str, Any] = {"weight_decay": decay, "maximize": maximize}
    common["lr"] = torch.tensor(lr) if tensor_lr else lr
    if kind == "SGD":
        common |= {"momentum": a, "nesterov": flag and a > 0}
        common |= {} if common["nesterov"] else {"dampening": b}
    else:
        common |= {"betas": (a, b), "eps": eps, "amsgrad": flag}
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(numel, dtype=dtype, generator=generator)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = getattr(optim, kind)([mine], **common, states=states, max_norm=max_norm)
    torchs = getattr(torch.optim, kind)([theirs], **common, fused=True)
    whole, apply.TILE_ELEMENTS = apply.TILE_ELEMENTS, tile
    try:
        for _ in range(3):
            gradient = torch.randn(numel, dtype=dtype, generator=generator)
            mine.grad, theirs.grad = gradient.clone(), gradient.clone()
            if max_norm is not None:
                nn.utils.clip_grad_norm_([theirs], max_norm)
            ours.step()
            torchs.step()
    finally:
        apply.TILE_ELEMENTS = whole
    assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1000, 4099, 40001])
@pytest.mark.parametrize("kind", KINDS)
def test_ranges_add_up_to_the_whole_bit_for_bit(
    kind: str, numel: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "TILE_ELEMENTS", 1024)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        start, gradient = torch.randn(numel), torch.randn(numel)
        mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        ours = getattr(optim, kind)([mine], **KINDS[kind], states="device", max_norm=0.01)
        torchs = getattr(torch.optim, kind)([theirs], **KINDS[kind], fused=True)
        for _ in range(3):
            mine.grad, theirs.grad = gradient.clone(), gradient.clone()
            nn.utils.clip_grad_norm_([theirs], 0.01)
            ours.step()
            torchs.step()
        assert torch.equal(mine, theirs)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(4, 6, 5, 3), (2, 3, 1, 7)])
def test_weights_that_are_not_contiguous(shape: tuple[int, ...]) -> None:
    start = torch.randn(shape).to(memory_format=torch.channels_last)
    gradient = torch.randn(shape)  # of another layout
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.contiguous())
    ours = optim.AdamW([mine], states="host")
    torchs = torch.optim.AdamW([theirs], fused=True)
    for _ in range(3):
        mine.grad, theirs.grad = gradient, gradient.clone()
        ours.step()
        torchs.step()
    assert mine.stride() == start.stride() and torch.allclose(mine, theirs, atol=1e-6)
    assert ours.state[mine]["exp_avg"].stride() == start.stride()
    assert torch.allclose(ours.state[mine]["exp_avg"], torchs.state[theirs]["exp_avg"])


def test_a_weight_with_gaps_in_its_memory() -> None:
    base = torch.randn(6, 10)
    mine, theirs = nn.Parameter(base[:, :7]), nn.Parameter(base[:, :7].contiguous())
    untouched = base[:, 7:].clone()
    ours, torchs = optim.AdamW([mine]), torch.optim.AdamW([theirs], fused=True)
    for _ in range(3):
        gradient = torch.randn(6, 7)
        mine.grad, theirs.grad = gradient, gradient.clone()
        ours.step()
        torchs.step()
    assert torch.equal(mine, theirs) and torch.equal(base[:, 7:], untouched)


class Masters:
    """What bf16 weights with fp32 masters are to do, by torch's own classes."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.weights]
        self.optimizer = getattr(torch.optim, kind)(self.masters, fused=True, **KINDS[kind])

    def step(self, max_norm: float | None) -> None:
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.weights, max_norm)
        for master, p in zip(self.masters, self.weights, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.weights, strict=True):
                p.copy_(master)
                p.grad = None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_low_precision_weights_follow_masters(
    kind: str, overlap: bool, max_norm: float | None, dtype: torch.dtype
) -> None:
    theirs, mine = Model(dtype), Model(dtype)
    masters = Masters(theirs, kind)
    trained = [p for p in mine.parameters() if p.requires_grad]
    ours = getattr(optim, kind)(trained, **KINDS[kind], overlap=overlap, max_norm=max_norm)
    for number in range(6):
        loss_of(theirs, number).backward()
        masters.step(max_norm)
        loss_of(mine, number).backward()
        ours.step()
        ours.zero_grad()
    for p, q in zip(trained, masters.weights, strict=True):
        assert torch.equal(p, q)
    states = [ours.state[p].get("master") for p in trained if p in ours.state]
    assert all(s is not None and s.dtype == torch.float32 for s in states) and states


def test_a_weight_that_somebody_changed_is_followed_and_the_rest_keeps_its_master() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    ours = optim.SGD([p], lr=1e-4)
    for _ in range(10):
        p.grad = torch.ones_like(p)
        ours.step()
    small = ours.state[p]["master"].clone()
    assert torch.equal(p, torch.ones_like(p)) and (small < 1).all()
    with torch.no_grad():
        p[0] = 5.0
    p.grad = torch.zeros_like(p)
    ours.step()
    assert ours.state[p]["master"][0] == 5.0
    assert torch.equal(ours.state[p]["master"][1:], small[1:])


def test_without_masters_low_precision_is_torchs_own() -> None:
    start = torch.randn(100).bfloat16()
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = optim.AdamW([mine], master=False)
    torchs = torch.optim.AdamW([theirs], fused=True)
    for _ in range(3):
        gradient = torch.randn(100).bfloat16()
        mine.grad, theirs.grad = gradient, gradient.clone()
        ours.step()
        torchs.step()
    assert torch.equal(mine, theirs) and ours.state[mine]["exp_avg"].dtype == torch.bfloat16


def test_lossy_states_take_half_and_come_close() -> None:
    mine, theirs = our_run("AdamW", state_dtype="bf16").steps(5), torch_run("AdamW").steps(5)
    for p, q in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=2e-2)
    weight = mine.model.mix.weight
    assert mine.optimizer.state[weight]["exp_avg"].dtype == torch.bfloat16
    exact = our_run("AdamW", states="host").steps(1).optimizer.facts().stores["host"]
    lossy = our_run("AdamW", states="host", state_dtype="bf16").steps(1).optimizer.facts()
    assert lossy.stores["host"].host_bytes < 0.6 * exact.host_bytes


def scaled_steps(run: Run, ways: str, scale: float, **scaler_of: Any) -> list[float]:
    scaler, scales = torch.amp.GradScaler("cpu", scale, growth_interval=2), []
    if "set" in scaler_of:
        scaler_of["set"](scaler)
    for number in range(6):
        loss = loss_of(run.model, number)
        loss = loss * float("inf") if number == 2 else loss
        scaler.scale(loss).backward()
        if ways == "unscaled":
            scaler.unscale_(run.optimizer)
            ordered = [p for g in run.optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(ordered, 0.05)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ways", ["plain", "unscaled"])
@pytest.mark.parametrize("states", PLACES)
@pytest.mark.parametrize("scale", [1024.0, 1000.3])
def test_a_grad_scaler_skips_and_unscales_as_with_torch(
    kind: str, ways: str, states: str, scale: float
) -> None:
    torchs, ours = torch_run(kind), our_run(kind, states=states)
    scales = scaled_steps(torchs, ways, scale)
    assert scaled_steps(ours, ways, scale) == scales
    assert scales[2] == scales[1] / 2, "the infinity is to be found"
    assert_equal(ours, torchs)


@pytest.mark.parametrize("scale", [1024.0, 1000.3])
def test_max_norm_with_a_scaler_is_unscale_and_clip(scale: float) -> None:
    torchs, ours = torch_run("AdamW"), our_run("AdamW", clips=True)
    assert scaled_steps(torchs, "unscaled", scale) == scaled_steps(ours, "plain", scale)
    assert_equal(ours, torchs)


def test_gradients_of_two_types_have_the_norm_that_torch_finds() -> None:
    def parameters() -> list[nn.Parameter]:
        torch.manual_seed(1)
        kinds = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.float32]
        made = [nn.Parameter(torch.randn(50).to(d)) for d in kinds]
        for p in made:
            p.grad = torch.randn(50).to(p.dtype)
        return made

    mine = parameters()
    ours = optim.SGD(mine, max_norm=0.1)
    ours.step()
    assert ours.last_norm is not None
    assert torch.equal(ours.last_norm, nn.utils.clip_grad_norm_(parameters(), 0.1))


def test_groups_may_come_later_and_closures_are_called() -> None:
    def train(kind: Any, **more: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        first, second = nn.Linear(5, 5), nn.Linear(5, 5)
        optimizer = kind(first.parameters(), lr=0.1, **more)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = second(torch.tanh(first(torch.ones(2, 5)))).square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        optimizer.add_param_group({"params": second.parameters(), "lr": 0.01})
        optimizer.step(closure)
        optimizer.step(closure)
        return [*first.parameters(), *second.parameters()]

    theirs = train(torch.optim.AdamW, fused=True)
    for more in ({}, {"overlap": True}, {"states": "disk", "overlap": True}):
        for p, q in zip(train(optim.AdamW, **more), theirs, strict=True):
            assert torch.equal(p, q)


def test_momentum_that_begins_later() -> None:
    mine, theirs = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(20))
    ours, torchs = optim.SGD([mine], 0.1), torch.optim.SGD([theirs], 0.1, fused=True)
    for number in range(5):
        if number == 2:
            ours.param_groups[0]["momentum"] = torchs.param_groups[0]["momentum"] = 0.9
        gradient = torch.randn(20)
        mine.grad, theirs.grad = gradient, gradient.clone()
        ours.step()
        torchs.step()
    assert torch.equal(mine, theirs)


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
    small = our_run("AdamW", host_memory="1kB").steps(1)
    assert set(small.optimizer.facts().stores) == {"disk"}
    assert set(our_run("AdamW", host_memory=1 << 30).steps(1).optimizer.facts().stores) == {"host"}


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
