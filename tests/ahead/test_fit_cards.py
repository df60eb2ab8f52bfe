"""`offcompile fit --cards`: the same step on several cards, and what it costs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from test_ahead import Language
from torch import nn

from offcompile.ahead import plan as ahead_plan
from offcompile.ahead.answers.cards import CardRow, StepWork, by_step, cheapest, read_cards
from offcompile.ahead.answers.outcome import StepOutcome
from offcompile.ahead.fit import fit
from offcompile.cli import command as cli
from offcompile.ir import InvalidInput
from offcompile.machine.hardware import list_profiles, load_profile

OPTIONS = {"lowering": "aot_eager", "seconds": 0.1}
ASKED: dict[str, Any] = {"optimizer": "adamw", "largest": False, "options": OPTIONS}
LENGTH = 32


def language(layers: int = 8) -> Language:
    with torch.device("meta"):
        return Language(layers, dropout=0.0)


def text(batch: int) -> torch.Tensor:
    return torch.zeros(batch, LENGTH, dtype=torch.long, device="meta")


@pytest.mark.long
def test_each_card_has_the_figures_of_a_fit_of_its_own_and_all_share_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces: list[bool] = []
    trace = ahead_plan.trace_ahead

    def counted(*given: Any) -> Any:
        traces.append(True)
        return trace(*given)

    monkeypatch.setattr(ahead_plan, "trace_ahead", counted)
    model = language()
    found = fit(model, text, 2, cards=["rtx4090", "h100", "h100-sxm"], memory="1GiB", **ASKED)
    assert len(traces) == 2  # four of eight equal layers, and three
    assert {row.card for row in found.cards} == {"rtx4090", "h100-sxm"}
    for row in found.cards:
        alone = fit(model, text, 2, hardware=row.card, table=False, memory="1GiB", **ASKED)
        assert row.outcome == alone.outcome and row.memory_bytes == 1 << 30
        assert row.outcome.fits and row.outcome.how == "nothing moves"
        assert row.work == StepWork(2 * LENGTH, "tokens")
    steps = [row.outcome.step_us for row in found.cards]
    assert steps == sorted(steps)  # type: ignore[type-var]
    assert found.hardware == found.cards[0].card and found.outcome == found.cards[0].outcome
    assert "cost" not in found.to_text() and "cheapest" not in found.to_text()
    told = json.loads(json.dumps(found.to_json()))
    assert [row["card"] for row in told["cards"]] == [row.card for row in found.cards]
    assert told["cheapest_card"] is None and "hourly_price" not in told["cards"][0]


def test_what_moves_on_one_card_moves_as_in_a_fit_for_it_alone() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())))
    rows = torch.zeros(2048, 64, device="meta")
    asked: dict[str, Any] = {"memory": "3120KiB", "loss": torch.sum, "largest": False}
    # a count ends these searches, not the clock: two searches of one step then find the same plan
    asked["options"] = {"lowering": "aot_eager", "policy": "joint:evaluations=12", "seconds": 2}
    found = fit(model, lambda _: rows, cards=["l40s", "rtx4090"], **asked)
    for row in found.cards:
        alone = fit(model, lambda _: rows, hardware=row.card, table=False, **asked)
        assert row.outcome == alone.outcome and row.outcome.fits
        assert "moves" in row.outcome.how and "nothing" not in row.outcome.how


def test_prices_make_costs_and_name_the_cheapest() -> None:
    work = StepWork(1000, "tokens", ranks=2)
    slow = CardRow("slow", 8, StepOutcome(2e6, 1, "moves"), work, 0.9)
    fast = CardRow("fast", 9, StepOutcome(1e6, 1, "nothing moves"), work, 3.6)
    unknown = CardRow("unknown", 7, StepOutcome(1.5e6, 1, "moves"), work)
    small, tiny = (
        CardRow(n, m, StepOutcome(reason="full"), work, 0.1) for n, m in (("a", 2), ("b", 1))
    )
    rows = by_step([tiny, slow, small, unknown, fast])
    assert rows == (fast, unknown, slow, small, tiny)
    assert fast.step_cost == pytest.approx(0.002) and fast.million_cost == pytest.approx(2.0)
    assert slow.step_cost == pytest.approx(0.001) and slow.million_cost == pytest.approx(1.0)
    assert unknown.step_cost is None and small.step_cost is None
    assert cheapest(rows) is slow and cheapest([unknown, small]) is None
    assert slow.to_json()["million_tokens_cost"] == pytest.approx(1.0)


def test_ranks_cost_as_many_cards() -> None:
    found = fit(language(), text, 2, cards=["rtx4090"], prices={"rtx4090": 0.5}, ranks=2, **ASKED)
    (row,) = found.cards
    assert found.ranks is not None and row.outcome.step_us == found.ranks.chosen.step_us
    assert row.work == StepWork(2 * 2 * LENGTH, "tokens", ranks=2)
    assert row.step_cost == pytest.approx(2 * 0.5 * found.ranks.chosen.step_us / 3.6e9)


def test_a_budget_is_cut_to_the_card_and_the_fastest_that_fits_is_answered() -> None:
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    rows = torch.zeros(4, 64, device="meta")
    cards = ["v100-16g", "rtx4090"]
    found = fit(model, lambda _: rows, 4, cards=cards, memory="20GiB", loss=torch.sum, **ASKED)
    memory = {row.card: row.memory_bytes for row in found.cards}
    assert memory == {
        "v100-16g": load_profile("v100-16g").device_memory_bytes,
        "rtx4090": 20 << 30,
    }
    assert found.cards[0].work == StepWork(4, "samples")
    none = fit(model, lambda _: rows, 4, cards=cards, memory="16KiB", loss=torch.sum, **ASKED)
    assert not none.fits and none.reason == none.cards[0].outcome.reason


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"cards": []}, "there is none; name profiles, or 'all'"),
        ({"cards": ["rtx4091"]}, "the nearest is 'rtx4090'"),
        ({"cards": ["cpu"]}, "'cpu' is no card"),
        ({"cards": "all", "hardware": "rtx4090"}, "they do not go with hardware"),
        ({"cards": "all", "lengths": [16]}, "they do not go with lengths"),
        ({"cards": "all", "measure": True}, "leave out hardware or measure"),
        ({"prices": {"rtx4090": 1.0}}, "give cards too"),
        ({"cards": ["l40s"], "prices": {"rtx4090": 1.0}}, "is not compared; there are l40s"),
        ({"cards": ["l40s"], "prices": {"l40s": -1.0}}, "-1.0 is no price of l40s"),
        ({"cards": ["l40s"], "prices": {"l40s": float("nan")}}, "nan is no price"),
        ({"cards": ["l40s"], "prices": {"l40s": True}}, "True is no price"),
    ],
)
def test_bad_requests_are_named(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as error:
        fit(language(2), text, **asked)
    assert said in str(error.value)


def test_all_cards_are_the_profiles_without_the_cpu() -> None:
    assert read_cards("all") == tuple(name for name in list_profiles() if name != "cpu")
    assert read_cards([" H100", "h100-sxm"]) == ("h100-sxm",)


FACTORY = """
import torch
from torch import nn

def make(batch):
    return nn.Linear(64, 64), torch.zeros(batch, 64), torch.sum
"""


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.py"
    file.write_text(FACTORY)
    make = ["fit", f"{file}:make", "--quick", "--batch", "1000"]
    assert cli.main([*make, "--cards"]) == 0
    said = capsys.readouterr().out
    assert len([line for line in said.splitlines() if " yes " in line]) == len(list_profiles()) - 1
    priced = [*make, "--cards", "rtx4090,l40s", "--price", "rtx4090=0.40, l40s=40"]
    assert cli.main(priced) == 0
    said = capsys.readouterr().out
    assert "cost of a step  per million samples" in said
    assert said.splitlines()[-1].startswith("cheapest: rtx4090, 0.0")
    assert cli.main([*priced, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cheapest_card"] == "rtx4090" and told["cards"][0]["million_samples_cost"] > 0
    assert cli.main([*make, "--cards", "rtx4090", "--memory", "16KiB"]) == 3
    assert " no " in capsys.readouterr().out
    for wrong, reason in {
        ("--cards", "rtx4090", "--price", "0.40"): "'0.40' is no price; write NAME=X",
        ("--cards", "rtx4090", "--price", "rtx4090=cheap"): "'rtx4090=cheap' is no price",
        ("--price", "rtx4090=0.40"): "give cards too",
        ("--cards", "rtx4090,"): "no profile is named ''",
    }.items():
        assert cli.main([*make, *wrong]) == 2
        assert reason in capsys.readouterr().err
