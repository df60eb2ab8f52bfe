"""Wear of drives by spilling: bytes of a plan, years, a line in the report, one warning."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import offcompile
from offcompile.ir import DEVICE, HOST, Move, Op, Plan, Problem, Tensor
from offcompile.planning.feedback import endurance
from offcompile.planning.feedback.endurance import (
    SPILLED,
    SpillWatch,
    daily_bytes,
    planned_life,
    spilled_bytes,
)
from offcompile.runtime.disk import drive_life
from offcompile.runtime.disk.drive_life import DriveWarning
from offcompile.runtime.moves.registry import RuntimeSettings

MIB = 1 << 20
PROBLEM = Problem(
    (
        Tensor("a", 100 * MIB, "activation", None, {"bitmask": 0.25}),
        Tensor("w", 50 * MIB, "weight", HOST, {}),
    ),
    (Op("f", "forward", 1.0, reads=("a", "w")),),
)


def move(tensor: str, source: str, target: str, codec: str | None = None) -> Move:
    lane = f"{source}_{target}"
    return Move(f"{tensor}_{target}", tensor, source, target, lane, start_after="f", codec=codec)


def plan(*moves: Move) -> Plan:
    return Plan(moves=moves)


def test_bytes_are_those_that_reach_files() -> None:
    out, back = move("a", DEVICE, HOST), move("a", HOST, DEVICE)
    assert spilled_bytes(PROBLEM, plan(out, back), "cpu") == 100 * MIB
    assert spilled_bytes(PROBLEM, plan(out, back), "cuda") == 0
    assert spilled_bytes(PROBLEM, plan(move("a", DEVICE, "disk")), "cuda") == 100 * MIB
    assert spilled_bytes(PROBLEM, plan(move("a", HOST, "disk")), "cuda") == 100 * MIB
    packed = plan(move("a", DEVICE, "disk", "bitmask"))
    assert spilled_bytes(PROBLEM, packed, "cpu") == 25 * MIB
    # a mapped file of weights is none of the spill files
    assert spilled_bytes(PROBLEM, plan(move("w", DEVICE, HOST)), "cpu") == 0


def test_the_life_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endurance, "capacity_of", lambda places: 10**12)
    settings = RuntimeSettings(directories=(str(tmp_path),))
    life = planned_life(PROBLEM, plan(move("a", DEVICE, HOST)), settings, 1e6)
    assert life is not None and life.words().startswith(f"{SPILLED}: 0.105 GB written per step")
    assert life.steps == pytest.approx(600e12 / (100 * MIB))
    assert planned_life(PROBLEM, plan(), settings, 1e6) is None
    gone = RuntimeSettings(directories=(str(tmp_path / "gone"),))
    monkeypatch.undo()
    assert planned_life(PROBLEM, plan(move("a", DEVICE, HOST)), gone, 1e6) is None


def test_what_a_drive_may_take_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endurance, "capacity_of", lambda places: 10**12)
    assert daily_bytes(tmp_path) == pytest.approx(600e12 / (5 * 365.25))


def test_training_that_spills_tells_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(endurance, "capacity_of", lambda places: 10**6)
    watches: dict[str, SpillWatch] = {}
    monkeypatch.setattr(
        "offcompile.run.running_step.watch_for",
        lambda settings: watches.setdefault(
            settings.key, SpillWatch(settings, now_s=lambda: now_s[0])
        ),
    )
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)))
    options = {
        "memory": "minimum",
        "lowering": "aot_eager",
        "hardware": "cpu",
        "spill": str(tmp_path),
    }
    step = torch.compile(model, backend="offcompile", options=options)
    x = torch.randn(2048, 256)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            step(x).sum().backward()
            now_s[0] += drive_life.LEAST_S
    told = [w for w in caught if issubclass(w.category, DriveWarning)]
    assert len(told) == 1 and 'options={"lossy": "bf16"}' in str(told[0].message)
    (watch,) = watches.values()
    report = offcompile.reports()[-1]
    written = spilled_bytes(report.problem, report.plan, "cpu")
    assert watch.life is not None and written > 0
    # files take whole pages
    assert written <= watch.life.written_bytes_per_step <= 1.1 * written
    assert "drives" in report.to_text() and f"{SPILLED}: " in report.to_text()
