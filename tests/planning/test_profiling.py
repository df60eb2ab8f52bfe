"""Zeros found while training: they are measured, plans made again for them, and results exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offcompile
from offcompile.planning.feedback import profiling
from offcompile.report.report import PlanReport

#: a disk so slow that what moves is waited for, and a codec that is not
PROFILE = """
base = "cpu"
name = "slow disk"
h2d_gbps = 0.15
d2h_gbps = 0.15
[codec_gbps]
bitmask = 5.0
fp16 = 5.0
bf16 = 5.0
"""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "WATCH_EVERY", 2)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    profile = tmp_path / "slow.toml"
    profile.write_text(PROFILE)
    return {
        "hardware": str(profile),
        "spill": tmp_path,
        "memory": "minimum",
        "lowering": "aot_eager",
        "policy": "activation_spill",
        "seconds": 0.5,
    }


class Sieve(nn.Module):
    """Convolutions and ReLUs that pass on only what exceeds `threshold` in the input."""

    def __init__(self, depth: int = 6, channels: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(channels, channels, 1, groups=channels, bias=False) for _ in range(depth)
        )
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()


def batch(density: float, seed: int = 0) -> torch.Tensor:
    """A batch with this share of its elements above zero."""
    made = torch.Generator().manual_seed(seed)
    return torch.rand(8, 16, 32, 32, generator=made) - (1 - density)


class Run:
    """A compiled model beside a plain one, trained on the same batches."""

    def __init__(self, model: nn.Module, plain: nn.Module, options: dict[str, object]) -> None:
        torch._dynamo.reset()
        plain.load_state_dict(model.state_dict())
        self.model, self.plain = model, plain
        self.before = len(offcompile.reports())
        self.run = torch.compile(model, backend="offcompile", options=options)

    def step(self, x: torch.Tensor) -> None:
        for parameter in (*self.model.parameters(), *self.plain.parameters()):
            parameter.grad = None
        loss, wanted = self.run(x), self.plain(x)
        loss.backward()
        wanted.backward()
        assert torch.equal(loss, wanted)
        for mine, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad)

    @property
    def reports(self) -> list[PlanReport]:
        return offcompile.reports()[self.before :]

    @property
    def codecs(self) -> set[str | None]:
        return {m.codec for m in self.reports[-1].plan.moves}


def sieve(options: dict[str, object]) -> Run:
    return Run(Sieve(), Sieve(), options)


def test_known_zeros_are_found_and_packed_and_results_stay_exact(
    options: dict[str, object],
) -> None:
    run = sieve(options)
    run.step(batch(0.25))
    run.step(batch(0.25, 1))
    assert len(run.reports) == 1 and run.codecs == {None}
    raw = offcompile.counters()
    run.step(batch(0.25, 2))
    assert len(run.reports) == 2 and "bitmask" in run.codecs
    profile = run.reports[-1].profile
    assert profile is not None
    relus = {t: d for t, d in profile.densities.items() if t.startswith("relu")}
    assert len(relus) >= 4
    assert all(d == pytest.approx(0.25, abs=0.01) for d in relus.values())
    assert (
        run.reports[1].planned_us < (1 - profiling.WORTH["aot_eager"]) * run.reports[0].planned_us
    )
    packed = offcompile.counters()
    gone = {k: packed[k] - raw[k] for k in ("bytes_out", "raw_bytes_out")}
    assert gone["bytes_out"] < 0.5 * gone["raw_bytes_out"]


def test_nothing_is_planned_again_where_there_are_no_zeros(options: dict[str, object]) -> None:
    run = sieve(options)
    for seed in range(8):
        run.step(batch(1.0, seed))
    assert len(run.reports) == 1
    profile = run.reports[0].profile
    assert profile is not None
    assert profile.said == ["after 2 steps: no tensor has zeros enough to be worth packing"]


def test_inputs_that_become_dense_bring_another_plan_between_steps(
    options: dict[str, object],
) -> None:
    run = sieve(options)
    for seed in range(4):
        run.step(batch(0.1, seed))
    assert len(run.reports) == 2 and "bitmask" in run.codecs
    for seed in range(8):
        run.step(batch(1.0, seed))
    assert len(run.reports) == 3 and run.codecs == {None}
    for seed in range(24):
        run.step(batch(0.1, seed))
    assert len(run.reports) == 4 and "bitmask" in run.codecs


def test_a_forward_that_waits_keeps_its_plan_while_another_is_made(
    options: dict[str, object],
) -> None:
    run = sieve(options)
    run.step(batch(0.25))
    run.step(batch(0.25, 1))
    x, y = batch(0.25, 2), batch(0.25, 3)
    for parameter in (*run.model.parameters(), *run.plain.parameters()):
        parameter.grad = None
    first = run.run(x)
    second = run.run(y)
    assert len(run.reports) == 2
    (second + first).backward()
    (run.plain(y) + run.plain(x)).backward()
    for mine, theirs in zip(run.model.parameters(), run.plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_inputs_that_never_settle_bring_no_storm_of_plans(options: dict[str, object]) -> None:
    run = sieve(options)
    for seed in range(60):
        run.step(batch(1.0 if seed // 3 % 2 else 0.05, seed))
    assert len(run.reports) <= 1 + profiling.MOST_REPLANS
    profile = run.reports[-1].profile
    assert profile is not None
    assert len(profile.said) <= profiling.MOST_DECISIONS


@pytest.mark.parametrize("variant", ["printed", "benefit"])
def test_flashneuron_s_selection_packs_for_real(options: dict[str, Any], variant: str) -> None:
    run = sieve(options | {"policy": f"activation_spill:variant={variant}"})
    for seed in range(4):
        run.step(batch(0.25, seed))
    assert run.codecs >= {"bitmask"}


def test_the_report_says_what_was_measured_and_decided(options: dict[str, object]) -> None:
    run = sieve(options)
    for seed in range(3):
        run.step(batch(0.25, seed))
    report = run.reports[-1]
    text = report.to_text()
    assert "profiling" in text and "it is taken" in text
    assert "75" in text.partition("zeros, as measured")[2] and "(bitmask)" in text
    told = report.to_json()
    assert told["decisions"] == report.profile.said  # type: ignore[union-attr]
    assert set(told["densities"]) >= {m.tensor for m in report.plan.moves if m.codec}


class Tower(nn.Module):
    """Saves tensors without zeros for backward, and reads the first layer's output at the end."""

    def __init__(self, depth: int = 6, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return (x * first).square().mean()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_lossy_rounds_what_backward_gets_and_nothing_else(
    options: dict[str, Any], name: str
) -> None:
    torch.manual_seed(0)
    model, plain = Tower(), Tower()
    run = Run(model, plain, options | {"lossy": name})
    x = torch.randn(512, 256)
    loss, wanted = run.run(x), plain(x)
    assert name in run.codecs
    assert torch.equal(loss, wanted)
    loss.backward()
    wanted.backward()
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    assert any(not torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]
    for mine, theirs in pairs:
        scale = theirs.abs().max().item()  # type: ignore[union-attr]
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.02 * scale)
    assert offcompile.counters()["live_tickets"] == 0


def test_lossy_is_only_what_was_asked_for(options: dict[str, Any]) -> None:
    run = Run(Tower(), Tower(), options | {"policy": "activation_spill:lossy=true"})
    run.step(torch.randn(512, 256))
    assert run.codecs == {None}
    run = Run(Sieve(), Sieve(), options | {"lossy": "fp16"})
    for _ in range(3):
        run.run(batch(0.25)).backward()
    assert "bitmask+fp16" in run.codecs and not any("bf16" in c for c in run.codecs if c)
