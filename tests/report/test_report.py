"""Reports: figures agree with plan and timeline, and every tensor's fate is told in numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from offcompile.ir import (
    Direct,
    Drop,
    Lane,
    Machine,
    Move,
    OffloadError,
    Op,
    Plan,
    Problem,
    Recompute,
    Start,
    Tensor,
    Tier,
)
from offcompile.ir.jsonio import loads_machine, loads_plan, loads_problem
from offcompile.ir.units import size
from offcompile.planning.planner import PlanResult, certify
from offcompile.planning.timelines import print_timeline
from offcompile.report import report as reporting
from offcompile.report.explain import DIRECT, ELSEWHERE, MOVES, RECOMPUTED, STAYS
from offcompile.report.figures import PlannedMemory
from offcompile.report.report import PlanReport, remember, reports
from offcompile.report.words import facts, traffic

MIB = 1 << 20

#: forward makes a and b, backward needs both; c can be made again
PROBLEM = Problem(
    (
        Tensor("x", MIB, "input", "device"),
        Tensor("w", 2 * MIB, "weight", "host"),
        Tensor("a", 4 * MIB, "activation"),
        Tensor("b", 2 * MIB, "activation"),
        Tensor("c", 2 * MIB, "activation"),
        Tensor("y", MIB, "output"),
        Tensor("p", 100, "input", "device", pinned=True),
    ),
    (
        Op("fa", "forward", 100.0, ("x",), ("a",)),
        Op("fb", "forward", 100.0, ("a", "p"), ("b",), recompute=True),
        Op("fc", "forward", 1000.0, ("b",), ("c",), recompute=True),
        Op("fd", "forward", 2000.0, ("c", "w"), (), direct={"w": 2500.0}),
        Op("bc", "backward", 500.0, ("c", "p"), ("y",)),
        Op("ba", "backward", 500.0, ("a",), ("y",)),
    ),
)
MACHINE = Machine(
    (Tier("device", 12 * MIB), Tier("host")),
    (Lane("d2h", "device", "host", MIB / 100), Lane("h2d", "host", "device", MIB / 100)),
)
PLAN = Plan(
    start=(Start("x", "device"), Start("w", "host"), Start("p", "device")),
    moves=(
        Move("a out", "a", "device", "host", "d2h", "fa", None),
        Move("a in", "a", "host", "device", "h2d", "bc", "ba"),
    ),
    drops=(Drop("a", "device", "fb"), Drop("c", "device", "fd")),
    directs=(Direct("fd", "w"),),
    recomputes=(Recompute("fc", "bc"),),
)


def made(plan: Plan = PLAN, problem: Problem = PROBLEM, **given: object) -> PlanReport:
    timeline = certify(problem, MACHINE, plan, "hand")
    result = PlanResult(plan, timeline, "hand", 0.25, 4000.0, "by hand")
    memory = PlannedMemory(13 * MIB, MIB)
    return PlanReport("graph 0", problem, MACHINE, result, memory, **given)  # type: ignore[arg-type]


@pytest.fixture
def report() -> PlanReport:
    # b must live on for c to be made again
    problem = replace(
        PROBLEM,
        ops=tuple(replace(op, reads=("a", "b")) if op.id == "ba" else op for op in PROBLEM.ops),
    )
    return made(problem=problem, labels={"a": "layers.0.act 64×512 float32"})


def test_figures_agree_with_plan_and_timeline(report: PlanReport) -> None:
    assert report.policy == "hand"
    assert report.plan == PLAN
    assert report.planned_us == report.timeline.makespan_us
    assert report.gap == pytest.approx(report.planned_us / 4000.0 - 1)
    assert report.planned_peak_bytes == report.timeline.peak_bytes["device"] + MIB
    assert report.floor_bytes == 8 * MIB + 100  # a, b and y of `ba`, p which stays; the reserve
    assert report.planned_peak_bytes <= report.budget_bytes
    assert not report.fits


def test_the_worst_case_of_the_order_is_the_peak_where_it_is_known() -> None:
    report = made(Plan(start=tuple(Start(t, "device") for t in "xp")), _light())
    memory = replace(report.memory, worst_peak_bytes=11 * MIB)
    assert replace(report, memory=memory).planned_peak_bytes == 12 * MIB


def _light() -> Problem:
    """Everything fits: no weight on the host."""
    ops = tuple(
        replace(o, reads=tuple(t for t in o.reads if t != "w"), direct={}) for o in PROBLEM.ops
    )
    return Problem(tuple(t for t in PROBLEM.tensors if t.id != "w"), ops)


def test_what_fits_says_so() -> None:
    report = made(Plan(start=tuple(Start(t, "device") for t in "xp")), _light())
    assert report.fits
    assert report.summary().startswith("graph 0: fits, nothing moves; ")
    assert "everything fits" in report.to_text()
    assert {fate.modes for fate in report.fates()} == {(STAYS,)}


def test_measured_is_the_median_step_once_every_phase_has_run(report: PlanReport) -> None:
    for us in (9000.0, 4000.0, 4100.0):
        report.observe("forward", us)
    assert report.measured_us is None
    assert report.measured_over_planned is None
    assert "not yet run" in report.to_text()
    report.observe("backward", 2000.0)
    assert report.measured_us == 6100.0
    assert report.measured_over_planned == pytest.approx(6100.0 / report.planned_us)
    assert "6.100 ms" in report.to_text()
    with pytest.raises(ValueError, match="'sideways' is no phase"):
        report.observe("sideways", 1.0)


def test_long_runs_keep_the_latest_steps(report: PlanReport) -> None:
    report.observe("backward", 0.0)
    for us in range(5000):
        report.observe("forward", float(us))
    assert report.measured_us is not None
    assert 4000 < report.measured_us < 5000


def test_text_says_what_moves_and_what_is_recomputed(report: PlanReport) -> None:
    text = str(report)
    for said in (
        "13,631,488 bytes (13.00 MiB)",
        "of which the runtime takes 1,048,576 bytes",
        "moving: 1 tensor",
        "run again: 1 op, 1.000 ms",
        "accessed in place: 1 operand",
        "activation  device → host  1 move  4.00 MiB",
        "activation  host → device  1 move  4.00 MiB",
    ):
        assert said in text
    summary = report.summary()
    assert "\n" not in summary
    assert "4.00 MiB out, 4.00 MiB in, 1 op recomputed (hand)" in summary


def test_fates_are_sorted_by_what_they_cost(report: PlanReport) -> None:
    fates = report.fates()
    assert {f.tensor.id for f in fates} == {t.id for t in PROBLEM.tensors}
    costs = [(f.cost_us, f.lane_us) for f in fates]
    assert costs == sorted(costs, reverse=True)
    by_id = {f.tensor.id: f for f in fates}
    assert by_id["a"].modes == (MOVES,)
    assert by_id["a"].lane_us == pytest.approx(800.0)
    assert by_id["a"].waiting_us == pytest.approx(400.0)  # ba waits for what starts after bc
    assert by_id["c"].modes == (RECOMPUTED,)
    assert by_id["c"].compute_us == 1000.0
    assert by_id["w"].modes == (DIRECT,)
    assert by_id["w"].compute_us == 500.0
    assert by_id["x"].modes == (STAYS,)


def test_explanations_name_places_times_and_reasons(report: PlanReport) -> None:
    text = report.explain()
    for said in (
        "a (layers.0.act 64×512 float32, activation, 4.00 MiB): moves",
        "goes: device → host on d2h, 4.00 MiB, 100.000 µs to 500.000 µs, after fa",
        "returns: host → device on h2d, 4.00 MiB",
        "after bc, ready before ba",
        "its moves hold lanes for 800.000 µs, ops wait 400.000 µs for them",
        "runs again: fc before bc",
        "idle for 1.000 ms from fd to bc; computing it again adds 1.000 ms of compute; "
        "moving it out and back would hold lanes for 400.000 µs",
        "in place: fd on the host",
        "fd takes 500.000 µs more in place",
        "b (activation, 2.00 MiB): stays on the device",
        "idle for 4.400 ms from fc to ba; out and back: lanes held 400.000 µs",
        "idle for 4.500 ms from fb to bc; it may not move",
    ):
        assert said in text, text
    assert report.explain(limit=1).splitlines()[-1] == "… and 6 more"


def test_a_tensor_nothing_brings_to_the_device() -> None:
    lone = Problem((*_light().tensors, Tensor("w", MIB, "weight", "host")), _light().ops)
    plan = Plan(start=(Start("x", "device"), Start("p", "device"), Start("w", "host")))
    fate = next(f for f in made(plan, lone).fates() if f.tensor.id == "w")
    assert fate.modes == (ELSEWHERE,)


def test_json_holds_everything_and_reads_back(report: PlanReport) -> None:
    report.observe("forward", 1.0)
    obj = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert loads_problem(json.dumps(obj["problem"])) == report.problem
    assert loads_machine(json.dumps(obj["machine"])) == report.machine
    assert loads_plan(json.dumps(obj["plan"])) == report.plan
    assert obj["planned_peak_bytes"] == report.planned_peak_bytes
    assert obj["measured_us"] is None
    assert len(obj["timeline"]["spans"]) == len(report.timeline.spans)
    assert obj["timeline"]["stalls"][0]["waited_for"]


def test_timeline_text_lists_every_span_of_the_step(report: PlanReport) -> None:
    text = print_timeline(report.machine, report.timeline)
    for span in report.timeline.spans:
        assert span.id in text
    assert "peak device" in text
    assert "waits: " in text


def test_the_trace_has_a_row_for_each_lane(report: PlanReport, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    report.save_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(rows) == {"compute", "d2h", "h2d"}
    (out,) = [e for e in events if e["name"] == "a out"]
    assert (out["tid"], out["ts"], out["dur"]) == (rows["d2h"], 100.0, 400.0)
    assert out["args"]["nbytes"] == 4 * MIB
    (wait,) = [e for e in events if e["name"] == "wait before ba"]
    assert wait["args"]["waited_for"] == ["a in"]
    with pytest.raises(OffloadError, match="cannot be written"):
        report.save_trace(tmp_path / "nowhere" / "trace.json")


def test_reports_of_the_process_in_order(
    report: PlanReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_remembered", [])
    other = replace(report, name="graph 1")
    remember(report)
    remember(other)
    assert reports() == [report, other]
    reports().clear()
    assert len(reports()) == 2


class Shown(HTMLParser):
    """The text of a notebook's cell, and the tags that are open at its end."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.open = "", list[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in ("div", "b", "span", "table", "tr", "td", "pre")
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_the_facts_of_a_report() -> None:
    found = made()
    shown = Shown(found._repr_html_())
    assert not shown.open
    assert found.name in shown.text
    told = [*(word for fact in facts(found) for word in fact), *traffic(found)]
    assert len(told) > 10
    assert all(word in shown.text for word in told)
    assert f"{size(found.planned_peak_bytes)} of {size(found.budget_bytes)}" in shown.text


def test_names_of_a_report_cannot_write_html_of_their_own() -> None:
    found = replace(made(), name="<script>alert(1)</script>")
    assert "<script>" not in found._repr_html_()
    assert "<script>alert(1)</script>" in Shown(found._repr_html_()).text
