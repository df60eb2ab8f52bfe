"""Plans for models and hardware that are not there."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lengths import some
from torch import nn

import offcompile
from offcompile.ahead.answers.fit_report import BudgetPoint, pareto
from offcompile.ahead.factories import build as build_named
from offcompile.ahead.fit import fit
from offcompile.ahead.fitting import tier_bytes
from offcompile.ahead.layers import find_layers, shortened
from offcompile.ahead.plan import Ahead, ForecastRequest, plan
from offcompile.ahead.scaled import Scale
from offcompile.ahead.surveyed import relabelled
from offcompile.ahead.unroll import alike, unroll
from offcompile.cli import command as cli
from offcompile.graph.costs import in_place as costs_in_place
from offcompile.graph.costs import op_costs as costs
from offcompile.ir import InvalidInput, OffloadError
from offcompile.machine.hardware import load_profile
from offcompile.machine.options import Options
from offcompile.machine.target import CpuTarget
from offcompile.planning.floors import floor_of
from offcompile.run.problem_source import ProblemSource
from offcompile.runtime.measure.in_place import Slowdown
from offcompile.runtime.measure.op import Measured
from offcompile.runtime.memory.malloc.heap import Heap

WIDTH, WORDS, LENGTH = 64, 96, 32
CARD = "rtx4090"


class Block(nn.Module):
    def __init__(self, index: int = 0, dropout: float = 0.1) -> None:
        super().__init__()
        self.index, self.dropout = index, dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.squeeze(1)), self.dropout)
        return x + self.down(F.relu(self.up(x)))


class Language(nn.Module):
    def __init__(self, layers: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(i, dropout) for i in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), text.flatten())


def text(batch: int) -> torch.Tensor:
    return torch.zeros(batch, LENGTH, dtype=torch.long, device="meta")


def quiet(told: str) -> None:
    """Nobody listens."""


@cache
def language(layers: int, dropout: float = 0.1) -> Language:
    with torch.device("meta"):
        return Language(layers, dropout)


@cache
def ahead(layers: int, lowering: str, repeats: bool, batch: int = 2, **more: Any) -> Ahead:
    options = Options.read(
        {"memory": "1GiB", "hardware": CARD, "lowering": lowering, "seconds": 0.2}
    )
    asked = ForecastRequest(language(layers), (text(batch),), {}, options, repeats=repeats, **more)
    return Ahead.of(asked, quiet)


# --- equal layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", some(["inductor", "aot_eager"], "aot_eager"))
def test_many_layers_from_few_are_what_tracing_all_of_them_gives(lowering: str) -> None:
    few, whole = ahead(8, lowering, True), ahead(8, lowering, False)
    assert few.survey.twin is not None and whole.survey.twin is None
    in_place = whole.target.in_place(1)
    for asked in ({}, {"in_place": in_place}):
        mine = few.survey.problem(few.graphs, **asked)
        theirs = whole.survey.problem(whole.graphs, **asked)
        assert alike(mine.problem, theirs.problem)
        for one, other in zip(mine.problem.ops, theirs.problem.ops, strict=True):
            labels = mine.labels[one.id], theirs.labels[other.id]
            seeds = ("4 int64", "8 int64")  # one for each layer, in one tensor
            assert labels[0] == labels[1] or labels == seeds
        assert sorted(mine.names.values()) == sorted(theirs.names.values())
        assert len(mine.names) > 8 * 8  # weights and their gradients


def test_what_does_not_repeat_is_refused() -> None:
    few = ahead(8, "aot_eager", True)
    assert few.survey.twin is not None
    larger = few.survey.twin.survey.problem(few.survey.twin.graphs).problem
    assert unroll(larger, larger, 3) is None
    ops = (replace(larger.ops[5], duration_us=1e6), *larger.ops[:5], *larger.ops[6:])
    assert unroll(larger, replace(larger, ops=ops), 3) is None


def test_labels_count_on() -> None:
    label, fewer = "blocks.3.up 4×4", "blocks.1.up 4×4"
    assert relabelled(label, label, "blocks", None, 4) == label
    assert relabelled(label, fewer, "blocks", None, 4) == "blocks.11.up 4×4"
    assert relabelled("3.weight", "2.weight", "", None, 4) == "7.weight"
    later, earlier = "blocks.5.up 4×4", "blocks.1.up 4×4"
    assert [relabelled(label, later, "blocks", copy, 1) for copy in (0, 1)] == [label, later]
    assert [relabelled(label, earlier, "blocks", copy, 1) for copy in (0, 1)] == [later, label]
    gradients = f"gradient of {label}", f"gradient of {later}"
    assert relabelled(*gradients, "blocks", 3, 4) == "gradient of blocks.9.up 4×4"
    for other in ("head 4×4", "blocks.x.up", "inner.blocks.1.up"):
        assert relabelled(other, label, "blocks", None, 4) == other


def test_layers_are_found_with_their_period() -> None:
    found = find_layers(language(8))
    assert found is not None
    assert (found.paths, found.count, found.period, found.beyond) == (("blocks",), 8, 1, 4)
    with torch.device("meta"):
        turns = nn.Sequential(*(nn.Linear(4, 4, bias=i % 2 == 0) for i in range(19)))
    found = find_layers(turns)
    assert found is not None
    assert (found.paths, found.period, found.kept(4), found.beyond) == (("",), 2, 9, 5)
    assert len(list(shortened(turns, found, 4).children())) == 9
    assert len(turns) == 19


def _odd_attribute(model: Language) -> None:
    model.blocks[5].dropout = 0.2


def _hook(model: Language) -> None:
    model.blocks[5].register_forward_hook(lambda *_: None)


def _frozen(model: Language) -> None:
    model.blocks[5].up.weight.requires_grad_(False)


def _told(model: Language) -> None:
    model.kinds = ["near"] * 5 + ["far"] * 3


@pytest.mark.parametrize("change", [_odd_attribute, _hook, _frozen, _told])
def test_one_layer_that_differs_makes_them_unequal(change: Any) -> None:
    with torch.device("meta"):
        model = Language(8)
    assert find_layers(model) is not None
    change(model)
    assert find_layers(model) is None


# --- plan ------------------------------------------------------------------------------------


def test_the_plan_ahead_is_the_plan_that_compiling_makes() -> None:
    torch.manual_seed(0)
    model = Language(2, dropout=0.0)
    given = torch.zeros(2, LENGTH, dtype=torch.long)
    # at the floor all weights leave, whatever plans the searches come to
    options = {"lowering": "aot_eager", "seconds": 0.1}
    asked = {"memory": "minimum", "hardware": "cpu", **options}
    torch.compile(model, backend="offcompile", options=asked)(given)
    compiled = offcompile.reports()[-1]
    planned = plan(model, given, memory="minimum", hardware="cpu", options=options)
    assert not planned.fits and not compiled.fits
    assert planned.floor_bytes == compiled.floor_bytes
    assert alike(planned.problem, compiled.problem)
    assert planned.planned_peak_bytes <= 1 << 20 and planned.measured_us is None


def test_plans_are_compared_by_what_their_reports_foresee(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProblemSource, "touch_again_us_per_mib", 250.0)
    monkeypatch.setattr(Heap, "gives_back", True)
    options = Options.read({"lowering": "aot_eager", "seconds": 0.2, "hardware": "cpu"})
    found = Ahead.of(ForecastRequest(language(4), (text(64),), {}, options), quiet)
    ample = found.choose(8 << 30, quiet)
    peak_bytes = ample.decided.order.peak_bytes
    touched_us = []
    for share in (0.25, 0.28, 0.6):
        memory = int(share * peak_bytes)
        choice = found.choose(memory, quiet)
        asking = replace(found, asked=replace(found.asked, options=replace(options, memory=memory)))
        report = asking.report(quiet, choice)
        assert choice.decided.cost_us == pytest.approx(report.foreseen_us)
        assert not report.fits
        touched_us.append(choice.decided.touching_us)
    assert touched_us[0] > 0.0 == touched_us[-1]


def test_layers_stay_alike_where_every_measurement_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = count(100)
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(costs, "WORTH_MEASURING_US", 0.0)
    monkeypatch.setattr(costs, "measure_call", lambda *_, **__: Measured(float(next(taken)), 0))
    monkeypatch.setattr(
        costs_in_place, "measure_in_place", lambda *_: Slowdown(float(next(taken)), False)
    )
    options = Options.read({"lowering": "aot_eager"})
    asked = ForecastRequest(language(8), (text(2),), {}, options, measures=True)
    target = CpuTarget(load_profile("cpu"), (tmp_path,), 1 << 40, None)
    found = Ahead.of(asked, quiet, target)
    assert found.survey.twin is not None
    in_place = found.target.in_place(1)
    assert in_place is not None
    found.survey.measure_in_place(found.graphs, in_place)
    problem = found.survey.problem(found.graphs, in_place).problem
    assert max(us for op in problem.ops for us in op.direct.values()) > 1000


def test_nothing_is_allocated() -> None:
    with torch.device("meta"):
        huge = nn.Sequential(nn.Linear(1 << 20, 1 << 18), nn.Linear(1 << 18, 8))  # a terabyte
    given = torch.zeros(4, 1 << 20, device="meta")
    found = plan(huge, given, memory="8GiB", hardware=CARD, loss=lambda y: y.sum())
    assert found.planned_peak_bytes <= 8 << 30
    assert tier_bytes(found)["host"] > 1 << 40


def test_updates_are_part_of_the_step() -> None:
    weights = sum(p.numel() for p in language(8).parameters()) * 4
    found = ahead(8, "aot_eager", True, optimizer="adamw")
    plain = ahead(8, "aot_eager", True).choose(1 << 30, quiet).decided
    roomy, tight = found.choose(1 << 30, quiet), found.choose(4 << 20, quiet)
    states = [t for t in roomy.annotated.problem.tensors if t.kind == "state"]
    assert sum(t.nbytes for t in states) == 2 * weights
    assert roomy.decided.fits and {t.home for t in states} == {"device"}
    made = tight.decided.result.plan
    on_host = {u.weight for u in made.updates if u.where == "host"}
    states = {t.id for t in tight.annotated.problem.tensors if t.kind == "state"}
    assert {t for t in states if tight.annotated.problem.tensor[t].home == "host"}
    crossing = {m.tensor for m in made.moves} & states
    # each update is the host's, or the device's with the states brought there
    for op in tight.annotated.problem.ops:
        if op.host_duration_us is not None:
            assert (on_host | crossing) & set(op.writes)
    # and the step ends with all of it back on the host, for the next one to begin with
    back = {m.tensor for m in made.moves if m.target == "host"}
    tensor = tight.annotated.problem.tensor
    for op in tight.annotated.problem.ops:
        if op.phase == "update" and not on_host & set(op.writes):
            assert {t for t in op.writes if tensor[t].home == "host"} <= back
    assert tight.decided.order.peak_bytes <= 4 << 20
    steps_us = [d.result.makespan_us for d in (plain, roomy.decided, tight.decided)]
    assert steps_us[0] <= min(steps_us)
    # the host updates beside the device, which gains more than the moves cost where both are small
    assert steps_us[2] >= 0.99 * steps_us[1]
    with pytest.raises(InvalidInput, match="'adagrad' is not known; there are 'sgd'"):
        plan(nn.Linear(4, 4), torch.zeros(2, 4), hardware=CARD, optimizer="adagrad")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"no torch.nn.Module"):
        plan(len, text(1))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="leave out hardware or measure"):
        plan(language(8), text(1), hardware=CARD, measure=True)
    with pytest.raises(InvalidInput, match="0 is no batch"):
        fit(language(8), text, 0)


# --- fit -------------------------------------------------------------------------------------


def test_sizes_at_other_batches_are_exact() -> None:
    problems = {}
    for batch in (2, 4, 7):
        found = ahead(2, "aot_eager", False, batch)
        problems[batch] = found.survey.problem(found.graphs).problem
    scale = Scale(problems[2], problems[4], (2, 4))
    assert scale.lines_up
    mine, theirs = scale.at(7), problems[7]
    assert [t.nbytes for t in mine.tensors] == [t.nbytes for t in theirs.tensors]
    assert not Scale(problems[2], replace(problems[4], ops=problems[4].ops[1:]), (2, 4)).lines_up
    floor = floor_of(theirs, found.survey.machine)
    assert abs(scale.floors(found.survey.machine).at(7) - floor) <= len(theirs.tensors)


def test_fit_answers_with_the_largest_batch_and_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "offcompile.ahead.others.budgets.TABLE_SECONDS", 0.0
    )  # what costs no search
    with torch.device("meta"):
        model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())))

    def rows(batch: int) -> torch.Tensor:
        return torch.zeros(batch, 64, device="meta")

    asked: dict[str, Any] = {
        "memory": "6MiB",
        "hardware": CARD,
        "loss": torch.sum,
        "options": {"lowering": "aot_eager", "seconds": 0.1},
    }
    found = fit(model, rows, 64, **asked)
    assert found.fits and found.report is not None and found.largest_batch is not None
    assert found.largest_batch > 64
    assert not plan(model, rows(found.largest_batch), **asked).fits
    assert found.table == pareto(found.table) and not found.table[-1].moves
    assert "largest batch" in found.to_text()
    told = json.loads(json.dumps(found.to_json()))
    assert told["fits"] and told["tier_bytes"]["device"] <= 6 << 20
    assert tier_bytes(found.report) == dict(found.tier_bytes)
    large = fit(model, rows, int(found.largest_batch * 1.5), table=False, **asked)
    assert not large.fits and "below the floor" in large.reason
    assert large.smallest_change.startswith(f"A batch of {large.largest_batch} fits. Set memory to")
    assert large.largest_batch == pytest.approx(found.largest_batch, rel=0.02)
    assert large.to_text().startswith("does not fit: ")


def test_only_what_no_other_beats_is_in_the_table() -> None:
    slow, quick, worse = (
        BudgetPoint(1, 9.0, True),
        BudgetPoint(3, 2.0, True),
        BudgetPoint(4, 3.0, True),
    )
    assert pareto([worse, quick, slow]) == (slow, quick)


FACTORY = """
import torch
from torch import nn

def make(batch=1):
    return nn.Linear(64, 64), torch.zeros(batch, 64), torch.sum

def wrong():
    return 3

def fails(batch):
    raise RuntimeError("no data")
"""


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.py"
    file.write_text(FACTORY)
    asked = ["fit", f"{file}:make", "--hardware", CARD, "--memory", "1GiB", "--batch", "4"]
    assert cli.main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest_batch"] > 1000
    asked[5] = "16KiB"
    assert cli.main([*asked, "--quick"]) == 3
    assert "does not fit" in capsys.readouterr().out
    for name, said in {
        f"{file}:wrong": "return (model, inputs)",
        f"{file}:fails": "RuntimeError: no data",
        f"{file}:none": "has no function 'none'",
        "none.py:make": "there is no file none.py",
        "make": "names no factory",
        "no_such_module:make": "cannot be imported",
        "hf:gpt2-xxl": "the nearest is 'hf:gpt2-xl'",
    }.items():
        assert cli.main(["fit", name, "--hardware", CARD]) == 2
        assert said in capsys.readouterr().err


def test_models_by_name_have_their_published_sizes(tmp_path: Any) -> None:
    sizes = {"hf:gpt2": 124.4e6, "hf:gpt2-xl": 1557.6e6, "hf:llama-3.1-70b": 70.55e9}
    for name, parameters in sizes.items():
        built = build_named(name, 1, 16, "bfloat16")
        model, inputs = built.model, built.inputs
        assert built.takes == {"batch", "length"} and built.loss is not None
        assert inputs(3)["input_ids"].shape == (3, 16)
        assert inputs(3, 8)["input_ids"].shape == (3, 8)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=1e-3)
        assert {p.device.type for p in model.parameters()} == {"meta"}
    model.config.num_hidden_layers = 2
    model.config.save_pretrained(tmp_path)
    few = build_named(f"hf:{tmp_path}", 1, 16, "float32").model
    assert len(few.model.layers) == 2
    with pytest.raises(InvalidInput, match="more than the 1024 positions"):
        build_named("hf:gpt2", 1, 4096, "bfloat16")


def test_a_graph_break_is_said() -> None:
    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("here")
            return x * 2

    with pytest.raises(OffloadError, match="could not be traced as one graph"):
        plan(Breaks(), torch.zeros(2, device="meta"), hardware=CARD)
