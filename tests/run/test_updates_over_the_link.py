"""A plan counts the time that a user's optimizer takes for weights that it puts on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offcompile
from offcompile.ir import HOST
from offcompile.machine.hardware import load_profile
from offcompile.machine.in_place import InPlace

WIDTH, CARD = 1024, "h200"


def planned(batch: int, memory: Any, train: bool = True, **asked: Any) -> offcompile.PlanReport:
    with torch.device("meta"):
        layers = (m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()))
        model = nn.Sequential(*layers)
        model[0].requires_grad_(train)
        x = torch.zeros(batch, WIDTH)
    options = {"reuse_plans": False, "seconds": 0.2}
    return offcompile.plan(model, x, memory=memory, options=options, **{"hardware": CARD, **asked})


def hosted_bytes(report: offcompile.PlanReport) -> int:
    tensors = report.problem.tensors
    return sum(t.nbytes for t in tensors if t.kind == "weight" and t.home == HOST)


def test_weights_stay_where_their_update_costs_more_than_their_place_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = 86 << 20
    report = planned(2048, at)
    assert hosted_bytes(report) == report.running.updates_us == 0
    assert "its update" not in report.to_text()
    monkeypatch.setattr(InPlace, "update_us", lambda self, nbytes: 0.0)
    free = planned(2048, at)
    assert hosted_bytes(free) > 0 and free.planned_us < report.planned_us


def test_a_report_tells_what_the_update_takes() -> None:
    report = planned(64, "minimum")
    profile, moved = load_profile(CARD), hosted_bytes(report)
    slower = min(profile.h2d_gbps, profile.d2h_gbps) / 2  # in place, where that is not measured
    assert moved > 0
    assert report.running.updates_us == pytest.approx(moved / (slower * 1e3))
    assert "offcompile.optim updates them beside backward" in report.to_text()


@pytest.mark.parametrize(
    ("asked", "train"), [({"hardware": "cpu"}, True), ({"optimizer": "sgd"}, True)]
)
def test_updates_that_are_planned_or_made_by_the_processor_are_free(
    asked: dict[str, Any], train: bool
) -> None:
    report = planned(64, "minimum", train, **asked)
    assert report.running.updates_us == 0


def test_frozen_weights_need_no_update() -> None:
    report = planned(64, "minimum", train=False)
    tensors = {t.id for t in report.problem.tensors if t.kind == "weight" and t.home == HOST}
    trained = {report.names[t.id] for t in report.problem.tensors if t.kind == "gradient"}
    frozen = [t for t in tensors if report.names[t] not in trained]
    assert len(frozen) == 1
    all_us = planned(64, "minimum").running.updates_us
    assert report.running.updates_us == pytest.approx(all_us * (len(tensors) - 1) / len(tensors))
