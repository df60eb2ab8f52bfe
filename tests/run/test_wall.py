"""The user is told of updates that the graph does not read, and is not troubled otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lengths import some
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizers
from weights_runs import (
    COPIED,
    IN_PLACE,
    LAYERS,
    Pair,
    batch,
    clean_slate,
    descend,
    loss_of,
    on_host,
    ours,
    seeded,
)
from weights_runs import pair as build

import offcompile
from offcompile.optim import AdamW as AdamWBeside
from offcompile.run.accounts import other_optimizers, wall

STEPS = 6


@pytest.fixture(autouse=True)
def clean(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    wall.hooks.watches.clear()  # of models that other tests have left
    wall.hooks.take_away()
    with caplog.at_level(logging.WARNING, "offcompile"):
        yield from clean_slate()
        assert not wall.hooks.watches, "a watch outlives its model"
        wall.hooks.take_away()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Say what the wall has warned of."""
    return [r.getMessage() for r in caplog.records if "it writes elsewhere" in r.getMessage()]


def hooks() -> int:
    """Those of the watch: what notes which optimizers make steps stays."""
    found = torch_optimizers._global_optimizer_pre_hooks, torch_optimizers
    after = found[1]._global_optimizer_post_hooks.values()
    return len(found[0]) + sum(hook is not other_optimizers._note for hook in after)


# --- what is told ---------------------------------------------------------------------------------


def over_arrays(model: Pair) -> dict[str, np.ndarray[Any, Any]]:
    """Give the layers memory that NumPy owns, which torch counts no holders of."""
    arrays = {}
    for name in LAYERS:
        parameter = model.get_parameter(name)
        arrays[name] = np.array(parameter.detach().numpy())
        parameter.data = torch.from_numpy(arrays[name])
    return arrays


class ByAddress(torch.optim.SGD):
    """Writes to the memory that some of its parameters had when it was made."""

    def __init__(self, model: Pair) -> None:
        self.arrays = over_arrays(model)
        self.mine = {name: model.get_parameter(name) for name in self.arrays}
        super().__init__(model.parameters(), 0.05)

    def step(self, closure: Any = None) -> None:
        gradients = {name: p.grad for name, p in self.mine.items()}
        for name, p in self.mine.items():
            assert p.grad is not None
            self.arrays[name] -= 0.05 * p.grad.numpy()
            p.grad = None
        super().step()
        for name, p in self.mine.items():
            p.grad = gradients[name]


@pytest.mark.parametrize("access", [IN_PLACE, COPIED])
def test_an_optimizer_that_writes_to_former_memory_is_told(
    access: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(build)
    torch.optim.SGD(model.parameters(), 0.05)  # hooks are called in its `step`, too, from now on
    optimizer, forward = ByAddress(model), ours(model, access)
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert on_host(model) == LAYERS
    (said,) = told(caplog)
    assert "3 steps of ByAddress" in said and set(said.replace(",", "").split()) >= LAYERS
    assert hooks() == 0


class Masters:
    """Trains a copy of every weight. `arrays`: where it writes them back; None: to the weights."""

    def __init__(self, model: Pair, lr: float, arrays: Any = None) -> None:
        self.model, self.arrays = model, arrays
        self.masters = {k: p.detach().clone() for k, p in model.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr)

    def step(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.masters[name].grad, parameter.grad = parameter.grad, None
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            if self.arrays is None:
                parameter.data.copy_(self.masters[name])
            elif name in self.arrays:
                np.copyto(self.arrays[name], self.masters[name].detach().numpy())


def test_masters_that_come_back_to_former_memory_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(build)
    masters, forward = Masters(model, 1e-2, over_arrays(model)), ours(model)
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        masters.step()
    (said,) = told(caplog)
    assert "nothing has changed" in said and "3 steps of AdamW" in said and "up.weight" in said


def test_verify_says_it_too() -> None:
    model = seeded(build)
    options = {"memory": "minimum", "lowering": "aot_eager", "hardware": "cpu", "verify": True}
    optimizer = ByAddress(model)
    forward = torch.compile(model, backend="offcompile", options=options)
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
    verified = offcompile.reports()[-1].verified
    assert verified is not None and "it writes elsewhere" in verified.notes["weights"]


@pytest.mark.parametrize("way", ["views", "made later"])
def test_the_fix_that_is_named_is_one(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Either way the optimizer's memory is the graph's again."""

    def train(forward: Any, model: Pair) -> list[Tensor]:
        if way == "views":
            optimizer, views = ByAddress(model), [p.detach() for p in model.parameters()]
        else:
            forward(batch(0))
            with torch.no_grad():
                optimizer, views = ByAddress.__new__(ByAddress), []
                optimizer.mine = {name: model.get_parameter(name) for name in LAYERS}
                optimizer.arrays = {name: p.numpy() for name, p in optimizer.mine.items()}
                torch.optim.SGD.__init__(optimizer, model.parameters(), 0.05)
        seen = []
        for seed in range(STEPS):
            loss = loss_of(forward(batch(seed)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return [*seen, *views]

    plain, model = seeded(build), seeded(build)
    expected = train(torch.compile(plain, backend="aot_eager"), plain)
    found = train(ours(model), model)
    assert all(map(torch.equal, found, expected))
    assert told(caplog) == []


# --- nobody else is troubled ----------------------------------------------------------------------


def plainly(optimizer: Any, forward: Any) -> None:
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(forward: Any, model: Pair) -> None:
    plainly(torch.optim.AdamW(model.parameters(), 1e-2), forward)


def no_rate_at_first(forward: Any, model: Pair) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step >= 4))
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        optimizer.step()
        warm.step()
        optimizer.zero_grad()


def a_group_without_rate(forward: Any, model: Pair) -> None:
    class BySetting(torch.optim.SGD):
        """Writes through `.data`, as some optimizers do, so that no version counts."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad, alpha=group["lr"])

    layers = [model.get_parameter(name) for name in sorted(LAYERS)]
    rest = [p for name, p in model.named_parameters() if name not in LAYERS]
    groups = [{"params": layers, "lr": 0.0}, {"params": rest}]
    plainly(BySetting(groups, 1e-2), forward)


def accumulating(forward: Any, model: Pair) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for seed in range(4 * STEPS):
        loss_of(forward(batch(seed))).backward()
        if seed % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def by_hand(forward: Any, model: Pair) -> None:
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        descend(model)


def frozen(forward: Any, model: Pair) -> None:
    model.up.requires_grad_(False)
    plainly(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), forward)


def in_no_optimizer(forward: Any, model: Pair) -> None:
    """Only the norm is trained; gradients of the rest stay and grow."""
    plainly(torch.optim.AdamW(model.norm.parameters(), 1e-2), forward)


def in_no_optimizer_and_dropped(forward: Any, model: Pair) -> None:
    optimizer = torch.optim.AdamW(model.norm.parameters(), 1e-2)
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        optimizer.step()
        model.zero_grad()


def with_another_model(forward: Any, model: Pair) -> None:
    """A generator takes four steps through a critic whose gradients are dropped, then it one."""
    maker = seeded(lambda: nn.Linear(48, 48))
    makers, critics = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (maker, model))
    for seed in range(10):
        model.zero_grad()
        loss_of(forward(maker(batch(seed)))).backward()
        if seed % 5 == 4:
            critics.step()
        else:
            makers.step()
        maker.zero_grad()


def masters(forward: Any, model: Pair) -> None:
    mine = Masters(model, 1e-2)
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        mine.step()


def masters_with_no_rate(forward: Any, model: Pair) -> None:
    mine = Masters(model, 0.0)
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        mine.step()


def beside(forward: Any, model: Pair, overlap: bool = False) -> None:
    plainly(AdamWBeside(model.parameters(), 1e-2, overlap=overlap), forward)


def during_backward(forward: Any, model: Pair) -> None:
    beside(forward, model, overlap=True)


def with_closures(forward: Any, model: Pair) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(forward(batch(0)))
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


def scaled(forward: Any, model: Pair) -> None:
    """The first steps are skipped, for their gradients are no numbers."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-24)
    for seed in range(STEPS):
        scaler.scale(loss_of(forward(batch(seed)))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def one_for_each_weight(forward: Any, model: Pair) -> None:
    optimizers = [torch.optim.AdamW([p], 1e-2) for p in model.parameters()]
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def in_turns(forward: Any, model: Pair) -> None:
    """Trains its weights one after the other, in one optimizer, as block coordinate descent."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        for i, p in enumerate(model.parameters()):
            if i % 2 == seed // 3 % 2:
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()


def compiled_step(forward: Any, model: Pair) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)
    step = torch.compile(optimizer.step, backend="eager")
    for seed in range(STEPS):
        loss_of(forward(batch(seed))).backward()
        step()
        optimizer.zero_grad()


WAYS: list[Callable[[Any, Pair], None]] = [
    adamw,
    no_rate_at_first,
    a_group_without_rate,
    accumulating,
    by_hand,
    frozen,
    in_no_optimizer,
    in_no_optimizer_and_dropped,
    with_another_model,
    masters,
    masters_with_no_rate,
    beside,
    during_backward,
    with_closures,
    scaled,
    one_for_each_weight,
    in_turns,
    compiled_step,
]


#: each is much like another: gradients that stay or are dropped, masters and updates of all kinds
ALIKE = (in_no_optimizer_and_dropped, masters_with_no_rate, beside, one_for_each_weight)


@pytest.mark.parametrize(
    "way", some(WAYS, *(way for way in WAYS if way not in ALIKE)), ids=lambda way: way.__name__
)
def test_nobody_is_troubled_without_need(
    way: Callable[[Any, Pair], None], caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = seeded(build), seeded(build)
    way(torch.compile(plain, backend="aot_eager"), plain)
    way(ours(model), model)
    assert on_host(model) == LAYERS
    assert told(caplog) == []
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


# --- what it costs --------------------------------------------------------------------------------


def test_the_watch_ends_with_the_first_step() -> None:
    assert hooks() == 0
    model = seeded(build)
    forward, optimizer = ours(model), torch.optim.AdamW(model.parameters(), 1e-2)
    loss_of(forward(batch(0))).backward()
    assert hooks() == 2
    optimizer.step()
    forward(batch(1))
    assert hooks() == 0


def test_the_watch_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall, "MOST_CALLS", 3)
    model = seeded(build)
    forward = ours(model)
    for seed in range(4):
        loss_of(forward(batch(seed))).backward()
    assert hooks() == 0


def test_nothing_is_watched_where_nothing_is_trained() -> None:
    model = seeded(build)
    with torch.no_grad():
        ours(model)(batch(0))
    assert on_host(model) == LAYERS and hooks() == 0


def test_samples_are_of_all_of_a_tensor() -> None:
    large = torch.zeros(784, 128)
    before = wall.sampled(large)
    assert before.numel() == wall.RUNS * wall.RUN_LENGTH
    for row in range(0, 784, 7):
        large[row : row + 70].fill_(1.0)
        assert not torch.equal(wall.sampled(large), before)
        large.zero_()
