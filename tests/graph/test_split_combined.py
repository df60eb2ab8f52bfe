"""A step in pieces whose weights, gradients and updates live on the host, and one in two graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from split_losses import furthest
from torch import nn
from torch.nn import functional as F

import offcompile
from offcompile.report.modes import TAKEN
from offcompile.runtime.moves.registry import close_all
from offcompile.runtime.moves.weights import is_on_host

WORDS, WIDTH, INNER, TOKENS = 1536, 64, 512, 512
MIB = 1 << 20


class Model(nn.Module):
    """Chains and a loss; the graph breaks between them if asked to."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.breaks = breaks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.words(tokens)
        for up, down in zip(self.up, self.down, strict=True):
            h = h + down(F.gelu(up(h)))
        if self.breaks:
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(h).flatten(0, 1), tokens.flatten())


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    close_all()
    assert offcompile.counters()["live_tickets"] == 0


def tokens(step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (2, TOKENS // 2), generator=generator)


def compiled(model: Model, tmp_path: Path, **options: object) -> Any:
    given = {"lowering": "aot_eager", "spill": str(tmp_path), "split": True, "seconds": 0.1}
    return torch.compile(model, backend="offcompile", options=given | options)


def gradients(run: Any, model: Model, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    loss = run(tokens(step))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def step_twice(run: Any, model: Model, plain: Model) -> None:
    for step in range(2):
        found, wanted = gradients(run, model, step), gradients(plain, plain, step)
        assert furthest(found, wanted) < 1e-5


WITH_INDUCTOR = pytest.param("inductor", marks=pytest.mark.soak)


@pytest.mark.soak  # with an optimizer below they live there, too
@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_weights_and_gradients_live_on_the_host(lowering: str, tmp_path: Path) -> None:
    model, plain = Model(), Model()
    run = compiled(model, tmp_path, memory="minimum", lowering=lowering)
    step_twice(run, model, plain)
    report = offcompile.reports()[-1]
    assert "loss" in report.split and "chain" in report.split
    assert is_on_host(model.head.weight)
    assert is_on_host(model.up[0].weight)
    kinds = {t.id: t.kind for t in report.problem.tensors}
    moved = {m.tensor for m in report.plan.moves} | {d.tensor for d in report.plan.directs}
    assert {"weight", "gradient"} <= {kinds[t] for t in moved}
    # Inductor fuses the gradients of words and head into one kernel, which holds both
    plain_bytes = sum(p.nbytes for p in plain.parameters())
    logits_bytes = TOKENS * WORDS * 4
    most = plain_bytes if lowering == "aot_eager" else logits_bytes
    assert report.planned_peak_bytes < most


@pytest.mark.long
@pytest.mark.parametrize("lowering", ["aot_eager", WITH_INDUCTOR])
def test_an_optimizer_takes_gradients_during_backward(lowering: str, tmp_path: Path) -> None:
    model, plain = Model(), Model()
    ours = offcompile.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, overlap=True)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    run = compiled(model, tmp_path, memory="minimum", lowering=lowering)
    for step in range(2):
        losses = []
        for one, optimizer in ((run, ours), (plain, theirs)):
            loss = one(tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    report = offcompile.reports()[-1]
    assert "loss" in report.split and "chain" in report.split
    assert TAKEN in report.modules()
    pairs = [[p.detach() for p in m.parameters()] for m in (model, plain)]
    assert furthest(*pairs) < 1e-5


@pytest.mark.soak  # one graph in pieces, beside weights and an optimizer, is tested below
def test_several_graphs_share_a_budget_in_pieces(tmp_path: Path) -> None:
    """The chains are in one graph, the loss in another: each is split by itself."""
    model, plain = Model(breaks=True), Model()
    before = len(offcompile.reports())
    run = compiled(model, tmp_path, memory=5 * MIB)
    step_twice(run, model, plain)
    said = [report.split for report in offcompile.reports()[before:]]
    assert any("loss" in split for split in said), said
    assert any("chain" in split for split in said), said
