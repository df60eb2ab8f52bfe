"""The backend as its users meet it: one line, plans for sizes and surroundings, clear refusals."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import Perceptron
from torch import nn
from torch.nn import functional as F

import offcompile
from offcompile.ir import InvalidInput, OffloadError
from offcompile.machine.hardware import parse_bytes
from offcompile.report.report import PlanReport
from offcompile.run.accounts import graph_runs as executions

# the joint search is counted, the profile given: what is planned does not depend on the machine
POLICY = "joint:evaluations=10,seconds=20"


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def options(directory: Path, **more: Any) -> dict[str, Any]:
    given = {"lowering": "aot_eager", "hardware": "cpu", "policy": POLICY, "seconds": 0.1}
    return {**given, "spill": str(directory), **more}


def newest() -> PlanReport:
    return offcompile.reports()[-1]


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def test_one_line_and_no_import_is_all_it_takes(tmp_path: Path) -> None:
    model, x = Perceptron(64, 4), torch.randn(512, 64)
    loss, wanted = step(model, x), gradients(model)
    compiled = torch.compile(model, backend="offcompile", options=options(tmp_path, memory=None))
    assert torch.equal(step(compiled, x), loss)
    for mine, theirs in zip(gradients(model), wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert newest().fits
    assert newest().measured_us is not None


def test_the_budget_decides_what_moves_and_the_report_says_so(tmp_path: Path) -> None:
    model, x = Perceptron(64, 6), torch.randn(2048, 64)
    loss, wanted = step(model, x), gradients(model)
    before = offcompile.counters()["bytes_out"]
    compiled = torch.compile(model, backend="offcompile", options=options(tmp_path, memory="5MiB"))
    assert torch.equal(step(compiled, x), loss)
    for mine, theirs in zip(gradients(model), wanted, strict=True):
        assert torch.equal(mine, theirs)
    report = newest()
    assert not report.fits and report.planned_peak_bytes <= 5 << 20
    moved = sum(report.problem.tensor[m.tensor].nbytes for m in report.plan.moves) // 2
    assert offcompile.counters()["bytes_out"] - before == moved > 0
    assert list(tmp_path.iterdir()) == []  # spill files have no name


def test_memory_minimum_takes_the_least_there_is(tmp_path: Path) -> None:
    model, x = Perceptron(64, 6), torch.randn(2048, 64)
    torch.compile(model, backend="offcompile", options=options(tmp_path, memory="minimum"))(x)
    least = newest().planned_peak_bytes
    torch._dynamo.reset()
    below = torch.compile(model, backend="offcompile", options=options(tmp_path, memory=least // 2))
    with pytest.raises(offcompile.Infeasible) as refused:
        below(x)
    text = str(refused.value)
    assert f"{least // 2:,} bytes" in text and "Set memory to" in text
    assert "of inputs" in text and "tanh" in text  # weights can leave
    # the change that the message names is enough
    asked = text.split("Set memory to '")[1].split("'")[0]
    torch._dynamo.reset()
    enough = torch.compile(model, backend="offcompile", options=options(tmp_path, memory=asked))
    assert torch.equal(enough(x), model(x))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memroy": "8GiB"}, "memory"),
        ({"memory": "8 parsecs"}, "8 parsecs"),
        ({"lowering": "tvm"}, "aot_eager"),
        ({"policy": "jiont"}, "joint"),
        ({"hardware": "rtx4091"}, "rtx4090"),
    ],
)
def test_bad_options_are_named_with_what_was_meant(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = torch.compile(Perceptron(), backend="offcompile", options=options(tmp_path, **given))
    with pytest.raises(InvalidInput, match=said):
        model(torch.randn(8, 64))


def test_modes_are_not_for_this_backend() -> None:
    model = torch.compile(Perceptron(), backend="offcompile", mode="max-autotune")
    with pytest.raises(InvalidInput, match="max-autotune"):
        model(torch.randn(8, 64))


def test_a_spill_directory_that_cannot_be_is_an_error_before_training(tmp_path: Path) -> None:
    x = torch.randn(2048, 64)
    for wrong in (tmp_path / "missing", Path("/dev/shm")):
        if wrong == Path("/dev/shm") and not wrong.exists():
            continue
        torch._dynamo.reset()
        model = Perceptron(64, 6)
        compiled = torch.compile(model, backend="offcompile", options=options(wrong, memory="5MiB"))
        with pytest.raises(OffloadError, match=str(wrong)):
            compiled(x)
        assert all(p.grad is None for p in model.parameters())


def test_sizes_that_do_not_fit_the_plan_get_one_of_their_own(tmp_path: Path) -> None:
    model = Perceptron(64, 6)
    compiled = torch.compile(
        model, backend="offcompile", dynamic=True, options=options(tmp_path, memory="4MiB")
    )
    begun = len(offcompile.reports())
    for batch, plans in ((256, 1), (512, 1), (2048, 2), (256, 2), (2048, 2)):
        x = torch.randn(batch, 64)
        loss, mine = step(compiled, x), gradients(model)
        assert torch.equal(loss, step(model, x))
        for a, b in zip(mine, gradients(model), strict=True):
            torch.testing.assert_close(a, b)
        assert len(offcompile.reports()) - begun == plans
    first, second = offcompile.reports()[begun:]
    assert first.fits and not second.fits
    assert second.planned_peak_bytes <= 4 << 20


def test_gradients_that_stand_already_count(tmp_path: Path) -> None:
    """Accumulation holds two sets of gradients for a moment: the second run is planned for it."""
    model, x = Perceptron(256, 4), torch.randn(2048, 256)
    weights = sum(p.nbytes for p in model.parameters())
    ample = torch.compile(model, backend="offcompile", options=options(tmp_path))
    step(ample, x)
    peak = newest().planned_peak_bytes
    model.zero_grad()
    torch._dynamo.reset()
    tight = peak + weights // 2
    compiled = torch.compile(model, backend="offcompile", options=options(tmp_path, memory=tight))
    begun = len(offcompile.reports())
    step(compiled, x)
    step(compiled, x)
    once, again = offcompile.reports()[begun:]
    assert once.fits and once.budget_bytes == tight
    assert again.budget_bytes == tight - weights
    summed = gradients(model)
    step(model, x)
    step(model, x)
    for mine, theirs in zip(summed, gradients(model), strict=True):
        torch.testing.assert_close(mine, theirs)


class Broken(nn.Module):
    """Two graphs, with data deciding between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Perceptron(64, 4), Perceptron(64, 4)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:4]:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        for layer in self.layers[4:]:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_the_graphs_of_a_model_share_its_budget(tmp_path: Path) -> None:
    model, x = Broken(), torch.randn(1024, 64)
    loss, wanted = step(model, x), gradients(model)
    begun = len(offcompile.reports())
    compiled = torch.compile(model, backend="offcompile", options=options(tmp_path, memory="5MiB"))
    for _ in range(3):
        assert torch.equal(step(compiled, x), loss)
        for mine, theirs in zip(gradients(model), wanted, strict=True):
            assert torch.equal(mine, theirs)
    reports = offcompile.reports()[begun:]
    alone = 5 << 20
    assert reports[0].budget_bytes == alone
    # the second graph finds the first one's weights and what it keeps for backward
    assert reports[1].budget_bytes < alone - 4 * 64 * 64 * 4


def test_what_other_graphs_hold_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that does not fit beside them is refused, or said with a figure: never silent."""
    said: list[str] = []
    monkeypatch.setattr(executions, "warn", said.append)
    monkeypatch.setattr(executions, "first_time", lambda what: True)
    model, x = Broken(), torch.randn(1024, 64)
    given = 2275 << 10  # enough for the first graph by itself, and for both with weights away
    compiled = torch.compile(model, backend="offcompile", options=options(tmp_path, memory=given))
    try:
        compiled(x).sum().backward()
    except offcompile.Infeasible as refused:
        assert "other graphs" in str(refused)
        said.append(str(refused))
    # the figure that would do is more than the one given
    assert said
    for text in said:
        asked = text.split("Set memory to ")[1].strip("'").split("'")[0].split(" bytes")[0]
        assert parse_bytes(asked.replace(",", "")) > given


def test_two_forwards_before_a_backward_and_one_that_is_dropped(tmp_path: Path) -> None:
    model, x, y = Perceptron(64, 6), torch.randn(1024, 64), torch.randn(1024, 64)
    (model(x) + model(y)).backward()
    wanted = gradients(model)
    compiled = torch.compile(
        model, backend="offcompile", options=options(tmp_path, memory="minimum")
    )
    a, b = compiled(x), compiled(y)
    (a + b).backward()
    for mine, theirs in zip(gradients(model), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    del a, b
    dropped = compiled(x)
    del dropped
    kept = compiled(x)
    kept.backward(retain_graph=True)
    once = gradients(model)
    kept.backward()
    for mine, theirs in zip(gradients(model), once, strict=True):
        assert torch.equal(mine, theirs)
    del kept
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0
    assert offcompile.counters()["spill_bytes"] == 0


def test_inference_takes_the_same_road(tmp_path: Path) -> None:
    class Skips(nn.Module):
        """An early value that is wanted late: the one thing that inference can move."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            early = [x * float(i) for i in range(6)]
            y = x
            for _ in range(6):
                y = torch.tanh(y @ y.mT @ y)
            for e in early:
                y = y + e
            return y.sum()

    x = torch.randn(64, 64, 64)
    model = Skips()
    compiled = torch.compile(
        model, backend="offcompile", options=options(tmp_path, memory="minimum")
    )
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    assert not newest().fits
    with torch.inference_mode():
        assert torch.equal(compiled(x), model(x))


def test_functional_transforms_inside_the_function(tmp_path: Path) -> None:
    w = torch.randn(64, 64)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).square().mean()

    def per_sample(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)

    x = torch.randn(32, 4, 64)
    compiled = torch.compile(
        per_sample, backend="offcompile", options=options(tmp_path, memory="minimum")
    )
    assert torch.equal(compiled(w, x), torch.compile(per_sample, backend="aot_eager")(w, x))


def test_buffers_that_forward_updates(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )

    x = torch.randn(8, 3, 32, 32)
    plain, ours = make(), make()
    compiled = torch.compile(
        ours, backend="offcompile", options=options(tmp_path, memory="minimum")
    )
    for _ in range(2):
        F.mse_loss(plain(x), torch.zeros(8, 8, 28, 28)).backward()
        F.mse_loss(compiled(x), torch.zeros(8, 8, 28, 28)).backward()
    assert not newest().fits
    for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_dump_writes_graphs_problem_and_plan(tmp_path: Path) -> None:
    spill, dump = tmp_path / "spill", tmp_path / "dump"
    spill.mkdir()
    model = torch.compile(
        Perceptron(64, 6),
        backend="offcompile",
        options=options(spill, memory="5MiB", dump=str(dump)),
    )
    step(model, torch.randn(2048, 64))
    (folder,) = dump.iterdir()
    assert "start_out" in (folder / "forward_after.py").read_text()
    assert "start_out" not in (folder / "forward_before.py").read_text()
    assert "wait_load" in (folder / "backward.svg").read_text()
    assert (folder / "order.txt").read_text().count("Start") == 2 * len(newest().plan.moves) / 2


def test_a_dump_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = torch.compile(
        nn.Linear(4, 4), backend="offcompile", options=options(tmp_path, dump=tmp_path / "file")
    )
    with pytest.raises(offcompile.InvalidInput, match="option dump"):
        model(torch.ones(2, 4))
