"""The simple ways to fit a step, on graphs of models: plans are never behind them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lengths import some
from torch import nn

from offcompile.ahead.fit import fit
from offcompile.ahead.fitting import published_ways, variants
from offcompile.ahead.plan import Ahead, ForecastRequest, plan, simple_ways
from offcompile.ahead.simple_ways import BUDGETED, CHECKPOINTED
from offcompile.graph.updates import USUAL_HOST_GBPS, Updates
from offcompile.machine.hardware import load_profile
from offcompile.machine.options import Options
from offcompile.planning.floors import peak_alone
from offcompile.planning.planner import plan_problem

CARD, WIDTH, WORDS, LENGTH, LAYERS = "rtx4090", 128, 256, 64, 4
#: a plan is behind what is faster by more than this share
BEHIND = 0.001
#: the search ends by its count, whatever the machine does meanwhile
COUNTED, SECONDS = "joint:evaluations=100", 100.0
#: shares of the peak when nothing moves
SHARES = (0.85, 0.75, 0.6)
#: ways that fit, over all shares
LEAST_COMPARED = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.inner(x))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), text.flatten())


class Images(nn.Module):
    """Convolutions in blocks with a way around each."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 32, 3, 1, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(32, 64, 3, 1, 1), nn.GELU(), nn.Conv2d(64, 32, 3, 1, 1), nn.GELU()
            )
            for _ in range(LAYERS)
        )
        self.leave = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x.mean((2, 3))).square().mean()


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(m for _ in range(3 * LAYERS) for m in (nn.Linear(256, 256), nn.GELU()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


BATCH = 16


def inputs_of(kind: type[nn.Module], batch: int = BATCH) -> torch.Tensor:
    if kind is Language:
        return torch.zeros(batch, LENGTH, dtype=torch.long, device="meta")
    shape = (batch, 3, 32, 32) if kind is Images else (512 * batch, 256)
    return torch.zeros(*shape, device="meta")


@cache
def traced(kind: type[nn.Module]) -> Ahead:
    with torch.device("meta"):
        model = kind()
    options = Options.read({"hardware": CARD})
    return Ahead.of(ForecastRequest(model, (inputs_of(kind),), {}, options), lambda _: None)


def alone_of(ahead: Ahead) -> int:
    return peak_alone(variants(ahead)[0], ahead.survey.machine)


def test_checkpointing_of_a_language_model_saves_memory_for_less_than_its_forward() -> None:
    ahead = traced(Language)
    problem = variants(ahead)[0]
    plain_us = sum(op.duration_us for op in problem.ops)
    forward_us = sum(op.duration_us for op in problem.ops if op.phase == "forward")
    way = simple_ways(ahead, alone_of(ahead) // 2)[0]
    assert way.name == CHECKPOINTED and way.peak_bytes is not None and way.step_us is not None
    assert way.peak_bytes < 0.6 * alone_of(ahead)
    assert plain_us < way.step_us <= plain_us + forward_us


@pytest.mark.parametrize("kind", some([Language, Images, Rows], Rows))
def test_no_plan_is_behind_a_simple_way(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offcompile.planning.planner.BOUND_SHARE", 0.002)  # nothing is asked of it
    ahead, compared = traced(kind), 0
    for share in SHARES:
        memory = int(share * alone_of(ahead))
        machine = ahead.survey.machine(memory)
        ours = plan_problem(variants(ahead)[0], machine, COUNTED, SECONDS)
        for way in simple_ways(ahead, memory):
            if way.fits and way.step_us is not None:
                assert ours.makespan_us <= way.step_us * (1 + BEHIND), f"{way} in {memory:,} bytes"
                compared += 1
    assert compared >= LEAST_COMPARED


def test_fit_says_what_simpler_ways_take() -> None:
    with torch.device("meta"):
        model = Rows()
    budget = int(0.75 * alone_of(traced(Rows)))
    asked: dict[str, Any] = {"hardware": CARD, "table": False, "largest": False}

    def inputs(batch: int) -> torch.Tensor:
        return inputs_of(Rows, batch)

    quick = asked | {"options": {"seconds": 0.1}}
    found = fit(model, inputs, BATCH, memory=budget, **quick)
    assert [way.name for way in found.simple_ways] == [CHECKPOINTED, BUDGETED]
    text = found.to_text()
    assert text.index("against simpler ways") < text.index("this plan") < text.index(CHECKPOINTED)
    told = json.loads(json.dumps(found.to_json()))["simple_ways"]
    assert told[0].keys() == {"name", "step_us", "peak_bytes", "missing_bytes", "reason", "fits"}
    # where nothing has to move there is nothing to compare
    assert fit(model, inputs, BATCH, memory="20GiB", **quick).simple_ways == ()
    # a model that does not fit is compared too
    refused = fit(model, inputs, BATCH, memory=budget // 10, **quick)
    assert not refused.fits and not any(way.fits for way in refused.simple_ways)
    assert "this plan" not in refused.to_text() and CHECKPOINTED in refused.to_text()


def test_reports_of_plans_say_what_simpler_ways_take() -> None:
    with torch.device("meta"):
        model = Rows()
    budget = int(0.75 * alone_of(traced(Rows)))
    asked: dict[str, Any] = {"hardware": CARD, "options": {"seconds": 0.1}}
    report = plan(model, inputs_of(Rows, BATCH), memory=budget, **asked)
    assert [way.name for way in report.simple_ways] == [CHECKPOINTED, BUDGETED]
    assert report.planned_us <= min(w.step_us or 0 for w in report.simple_ways if w.fits)
    text = report.to_text()
    assert text.index("against simpler ways") < text.index("this plan") < text.index(CHECKPOINTED)
    assert [way["name"] for way in report.to_json()["simple_ways"]] == [CHECKPOINTED, BUDGETED]
    roomy = plan(model, inputs_of(Rows, BATCH), memory="20GiB", **asked)
    assert roomy.simple_ways == () and "simpler ways" not in roomy.to_text()


def test_the_host_updates_as_much_slower_as_its_memory_is() -> None:
    updates = Updates.read("adamw", load_profile(CARD), apart=True)
    assert updates.host_factor == load_profile(CARD).memory_gbps / USUAL_HOST_GBPS
    assert replace(updates, apart=False).host_factor is None  # nothing of it runs by itself


def test_published_policies_may_use_no_more_than_a_plan_may() -> None:
    ahead = traced(Rows)
    budget = int(0.75 * alone_of(ahead))
    for way in published_ways(ahead, budget, 0.2):
        reserve = ahead.target.reserve_bytes(budget)
        assert way.peak_bytes is None or way.peak_bytes <= budget - reserve
