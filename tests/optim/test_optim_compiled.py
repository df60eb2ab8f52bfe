"""Our optimizers on compiled models at the smallest budget, against torch's on the plain ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lengths import some
from torch import nn

import offcompile
from offcompile import optim
from offcompile.optim import apply
from offcompile.runtime.moves.weights import is_on_host

WIDTH, WORDS, STEPS, MICRO = 48, 160, 10, 3

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Words(nn.Module):
    """Embedding and head are one matrix, one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.frozen, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.norm = nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        x = x + self.frozen(x).relu()
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    decays = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return [
        {"params": decays, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-3},
    ]


def train(
    run: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro: int,
    max_norm: float | None,
) -> list[float]:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        for _ in range(micro):
            tokens = torch.randint(0, WORDS, (4, 32), generator=generator)
            loss = run(tokens) / micro
            loss.backward()
            losses.append(loss.item())
        if max_norm is not None:
            # norms are summed up in the optimizer's order
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            assert nn.utils.clip_grad_norm_(mine, max_norm) > max_norm
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


CLASSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (optim.AdamW, torch.optim.AdamW, {"lr": 1e-2}),
    "Adam": (optim.Adam, torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "SGD": (optim.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
}


#: each class, each place of states, and each way of stepping
ALWAYS = {
    ("AdamW", "host", 1, None),
    ("AdamW", "disk", MICRO, 0.05),
    ("Adam", "disk", 1, 0.05),
    ("SGD", "host", MICRO, None),
}


@pytest.mark.parametrize(
    ("name", "states", "micro", "max_norm"),
    [
        pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.soak)
        for case in product(CLASSES, ("host", "disk"), (1, MICRO), (None, 0.05))
    ],
)
def test_ten_steps_with_overlap_are_torch_s(
    name: str, states: str, micro: int, max_norm: float | None, tmp_path: Path
) -> None:
    ours, theirs, how = CLASSES[name]
    model, reference = Words(), Words()
    torch._dynamo.reset()
    options = {"memory": "minimum", "lowering": "aot_eager", "spill": str(tmp_path)}
    run: Any = torch.compile(model, backend="offcompile", options=options)
    mine = ours(
        groups(model),
        **how,
        overlap=True,
        accumulate=micro,
        max_norm=max_norm,
        states=states,
        directory=tmp_path,
    )
    losses = train(run, mine, micro, None)
    wanted = train(reference, theirs(groups(reference), **how, fused=True), micro, max_norm)
    assert losses == wanted
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)
    assert mine.facts().taken_from_graphs > 0


@pytest.mark.parametrize("policy", ["joint", "hybrid_access:variant=zero_offload"])
@pytest.mark.parametrize("max_norm", some([None, 0.05], 0.05))
def test_updates_that_run_into_the_next_forward(
    policy: str, max_norm: float | None, tmp_path: Path
) -> None:
    model, reference = Words(), Words()
    torch._dynamo.reset()
    options = {
        "memory": "minimum",
        "policy": policy,
        "lowering": "aot_eager",
        "spill": str(tmp_path),
    }
    run: Any = torch.compile(model, backend="offcompile", options=options)
    mine = optim.AdamW(
        groups(model), lr=1e-2, overlap="forward", max_norm=max_norm, channels=True, states="host"
    )
    losses = train(run, mine, 1, None)
    assert is_on_host(model.up.weight)
    mine.settle()
    wanted = train(
        reference, torch.optim.AdamW(groups(reference), lr=1e-2, fused=True), 1, max_norm
    )
    assert losses == wanted
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_forward_waits_for_the_updates_that_its_weights_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = Words(), Words()
    torch._dynamo.reset()
    options = {"memory": "minimum", "lowering": "aot_eager", "spill": str(tmp_path)}
    run: Any = torch.compile(model, backend="offcompile", options=options)
    mine = optim.AdamW(groups(model), lr=1e-2, overlap="forward", max_norm=0.05, states="host")
    theirs = torch.optim.AdamW(groups(reference), lr=1e-2, fused=True)
    tokens = torch.randint(0, WORDS, (4, 32), generator=torch.Generator().manual_seed(1))
    may_go, update = threading.Event(), apply.update

    def late(*given: Any) -> None:
        may_go.wait()
        update(*given)

    for optimizer, forward in ((mine, run), (theirs, reference)):
        forward(tokens).backward()
        if optimizer is theirs:
            ordered = [p for group in theirs.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(ordered, 0.05)
    before = model.up.weight.detach().clone()
    monkeypatch.setattr(apply, "update", late)
    mine.step()
    theirs.step()
    assert torch.equal(model.up.weight, before)
    ended: list[float] = []
    forward_pass = threading.Thread(target=lambda: ended.append(run(tokens).item()))
    forward_pass.start()
    may_go.set()
    forward_pass.join()
    assert ended == [reference(tokens).item()]
    assert not torch.equal(model.up.weight, before)


def test_states_on_the_device_count_in_the_budget(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = Words()
    states = 8 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    options = {"memory": "4MiB", "lowering": "aot_eager", "spill": str(tmp_path)}
    run: Any = torch.compile(model, backend="offcompile", options=options)
    optimizer = optim.AdamW(groups(model), states="device")
    run(torch.zeros(4, 32, dtype=torch.int64)).backward()
    assert offcompile.reports()[-1].budget_bytes == (4 << 20) - states
    optimizer.step()


def test_a_weight_with_gaps_in_its_memory_is_updated() -> None:
    def trained(overlap: bool, **compiles: Any) -> torch.Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WORDS, WORDS), nn.Tanh(), nn.Linear(WORDS, WORDS))
        gaps = torch.empty(WORDS, 2 * WORDS)[:, ::2]
        model[2].weight.data = gaps.copy_(model[2].weight.data)
        run: Any = torch.compile(model, **compiles)
        optimizer = optim.AdamW(model.parameters(), 1e-2, overlap=overlap)
        for _ in range(3):
            run(torch.linspace(-1, 1, 8 * WORDS).view(8, WORDS)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model[2].weight.detach()

    options = {"memory": "minimum", "lowering": "aot_eager", "hardware": "cpu"}
    plain = trained(False, backend="aot_eager")
    assert torch.equal(plain, trained(True, backend="offcompile", options=options))
