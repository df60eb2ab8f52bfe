"""`offcompile fit --lengths`: the same model with sequences of several lengths."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from offcompile.ahead.answers.lengths import LengthRow, answered
from offcompile.ahead.answers.outcome import StepOutcome
from offcompile.ahead.fit import fit
from offcompile.cli import command as cli
from offcompile.ir import InvalidInput

CARD, WIDTH = "rtx4090", 64
OPTIONS = {"lowering": "aot_eager", "seconds": 0.1}


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def rows(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, WIDTH, device="meta")


def asked(memory: str, **more: Any) -> dict[str, Any]:
    return {"memory": memory, "hardware": CARD, "loss": torch.sum, "options": OPTIONS} | more


def test_each_length_has_the_figures_of_a_fit_of_its_own() -> None:
    found = fit(model(), rows, 2, lengths=[64, 16, 64], **asked("1GiB"))
    assert [row.length for row in found.lengths] == [16, 64]
    for row in found.lengths:
        alone = fit(model(), lambda n, row=row: rows(n, row.length), 2, **asked("1GiB"))
        assert row.outcome == alone.outcome and row.largest_batch == alone.largest_batch
        assert row.tokens == 2 * row.length
        assert row.tokens_per_second == pytest.approx(1e6 * row.tokens / row.outcome.step_us)
        assert row.outcome.how == "nothing moves"
    assert found.report is not None and found.report.planned_us == alone.report.planned_us
    assert found.largest_batch == alone.largest_batch and found.table == ()
    text = found.to_text()
    assert text.startswith("fits: a batch of 2 with length 64 in 1.00 GiB of rtx4090")
    assert "tokens/s" in text and "largest batch" in text.splitlines()[-3]
    told = json.loads(json.dumps(found.to_json()))["lengths"]
    assert [(r["length"], r["fits"], r["how"]) for r in told] == [
        (16, True, "nothing moves"),
        (64, True, "nothing moves"),
    ]


def test_the_answer_is_for_the_longest_that_fits() -> None:
    found = fit(model(), rows, 1, lengths=[16, 1 << 14], largest=False, **asked("4MiB"))
    short, long = found.lengths
    assert short.outcome.fits and not long.outcome.fits
    assert found.fits and found.outcome == short.outcome
    assert long.tokens_per_second is None and short.largest_batch is None
    assert "below the floor" in long.outcome.reason
    assert long.outcome.smallest_change in found.to_text()
    assert "reason" in found.to_json()["lengths"][1]
    none = fit(model(), rows, 1, lengths=[1 << 13, 1 << 14], largest=False, **asked("2MiB"))
    assert not none.fits and none.reason == none.lengths[0].outcome.reason
    assert none.to_text().startswith("does not fit with length 8192: ")


def test_what_is_answered_is_the_longest_that_fits_else_the_shortest() -> None:
    no, yes = StepOutcome(reason="full"), StepOutcome(1.0, 1, "moves")
    some = [LengthRow(n, n, outcome) for n, outcome in ((1, yes), (2, yes), (4, no))]
    assert answered(some).length == 2
    assert answered(some[2:]).length == 4


def test_bad_lengths_are_named() -> None:
    for wrong, said in {
        (): "there is none",
        (0,): "0 is no length",
        (1.5,): "1.5 is no length",
        (True,): "True is no length",
    }.items():
        with pytest.raises(InvalidInput, match=said):
            fit(model(), rows, lengths=wrong, **asked("1GiB"))


FACTORY = """
import torch
from torch import nn

def make(batch, length=8):
    return nn.Linear(64, 64), torch.zeros(batch, length, 64), torch.sum

def needs(length):
    return nn.Linear(64, 64), torch.zeros(2, length, 64), torch.sum

def short(batch):
    return nn.Linear(64, 64), torch.zeros(batch, 64), torch.sum
"""


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.py"
    file.write_text(FACTORY)
    make = ["fit", f"{file}:make", "--hardware", CARD, "--memory", "1GiB", "--json"]
    assert cli.main([*make, "--lengths", "16, 32"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["length"] for row in told["lengths"]] == [16, 32]
    assert told["lengths"][0]["largest_batch"] > told["lengths"][1]["largest_batch"] > 1000
    assert cli.main([*make, "--quick"]) == 0  # a factory's own length
    own = json.loads(capsys.readouterr().out)
    assert cli.main([*make, "--quick", "--length", "8"]) == 0
    assert json.loads(capsys.readouterr().out) == own and own["lengths"] == []
    assert cli.main([*make, "--quick", "--length", "1024"]) == 0
    usual = json.loads(capsys.readouterr().out)
    assert usual["tier_bytes"]["device"] > own["tier_bytes"]["device"]
    needs = ["fit", f"{file}:needs", *make[2:]]
    assert cli.main(needs) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert cli.main([*make[:4], "--memory", "64KiB", "--quick", "--lengths", "2048,4096"]) == 3
    assert "  no  " in capsys.readouterr().out
    for wrong, said in {
        ("--lengths", "16,many"): "'16,many' is no list of lengths",
        ("--lengths", "16,0"): "0 is no length",
        ("--lengths", "16", "--length", "8"): "not allowed with argument",
    }.items():
        assert cli.main([*make, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["fit", f"{file}:short", *make[2:], "--lengths", "16"]) == 2
    assert "takes no length; give it a parameter `length`" in capsys.readouterr().err
    assert cli.main(["fit", "hf:gpt2", "--hardware", CARD, "--lengths", "512,2048"]) == 2
    assert "2048 is more than the 1024 positions" in capsys.readouterr().err
