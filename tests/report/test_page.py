"""The page: what memory holds over time, what the data say, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import subprocess
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html import unescape
from itertools import accumulate
from math import floor
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from golden_problems import PROBLEMS
from hypothesis import given, settings
from hypothesis import strategies as st
from test_laws import SPECS
from test_report import MIB, PROBLEM, made

from offcompile.ir import Infeasible, OffloadError, Plan, Problem, Start, Tensor, Timeline
from offcompile.ir.units import show_us, size
from offcompile.passes.registry import make
from offcompile.planning.feedback.measured import MeasuredSpan, MeasuredStep, MeasuredWait
from offcompile.planning.planner import certify, judge_for
from offcompile.planning.splitting import SplitPart, Splitting, StepEstimate
from offcompile.report.figures import RunFigures
from offcompile.report.page import page
from offcompile.report.page.data import report_data, verdict
from offcompile.report.page.occupancy import occupancy, peak_bytes
from offcompile.report.report import PlanReport, save_html
from offcompile.report.simple_way import SimpleWay
from offcompile.simulate import simulate
from offcompile.testing import plans, problems_with_machines

#: one of each policy
ONE_EACH = list({spec.partition(":")[0]: spec for spec in SPECS}.values())


# --- memory over time ------------------------------------------------------------------------


def peaks(problem: Problem, plan: Plan, timeline: Timeline) -> dict[str, int]:
    return {t: peak_bytes(c) for t, c in occupancy(problem, plan, timeline).items()}


@pytest.mark.parametrize("problem_name", PROBLEMS)
def test_the_most_that_is_held_is_the_timelines_peak(problem_name: str) -> None:
    problem, machine = PROBLEMS[problem_name]()
    planned = 0
    for spec in ONE_EACH:
        try:
            plan = make(spec, judge_for(problem, machine)).apply(problem, machine, Plan())
            timeline = certify(problem, machine, plan, spec)
        except Infeasible:
            continue
        planned += 1
        assert peaks(problem, plan, timeline) == timeline.peak_bytes, spec
    assert planned > 2


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_same_for_any_plan(data: st.DataObject) -> None:
    problem, machine = data.draw(problems_with_machines())
    plan = data.draw(plans(problem, machine))
    timeline = simulate(problem, machine, plan)
    if timeline.valid:
        assert peaks(problem, plan, timeline) == timeline.peak_bytes
        for changes in occupancy(problem, plan, timeline).values():
            assert [c.time_ns for c in changes] == sorted(c.time_ns for c in changes)


# --- the data --------------------------------------------------------------------------------

HOSTILE = "</script><script>window.intruders = 1</script><img src=x onerror='intruders=1'>"


class Seen:
    """A step that took half as long again as planned."""

    def median(self) -> MeasuredStep:
        spans = (
            MeasuredSpan("forward", "compute", 0, 4_000_000),
            MeasuredSpan("a out", "d2h", 150_000, 900_000),
            MeasuredSpan("a in", "h2d", 5_000_000, 5_700_000),
            MeasuredSpan("backward", "compute", 4_000_000, 8_000_000),
        )
        return MeasuredStep(spans, (MeasuredWait("ba", "a in", 5_000_000, 700_000),), 8_000_000)

    def watch(self, steps: int) -> None:
        raise AssertionError("the page asks for no recording")


@pytest.fixture(scope="module")
def moving() -> PlanReport:
    problem = replace(
        PROBLEM,
        ops=tuple(replace(op, reads=("a", "b")) if op.id == "ba" else op for op in PROBLEM.ops),
    )
    labels = {"a": f"layers.{HOSTILE} 64×512 float32", "fa": "layers.0 64×512 float32"}
    report = made(
        problem=problem,
        labels=labels,
        names={"w": "layers.0.weight"},
        running=RunFigures(steps=Seen()),
    )
    report.observe("forward", 4000.0)
    report.observe("backward", 4000.0)
    memory = replace(report.memory, holes_bytes=MIB)
    return replace(report, name=f"graph 0 {HOSTILE}", memory=memory)


@pytest.fixture(scope="module")
def fitting() -> PlanReport:
    start = tuple(Start(t.id, "device") for t in PROBLEM.tensors if t.home)
    tensors = tuple(replace(t, home="device") if t.home else t for t in PROBLEM.tensors)
    return replace(made(Plan(start), replace(PROBLEM, tensors=tensors)), name="graph 1")


@pytest.fixture(scope="module")
def split(moving: PlanReport) -> PlanReport:
    """A step in pieces, compared with simpler ways."""
    large = Tensor("logits", 64 * MIB, "activation")
    whole = replace(moving.problem, tensors=(*moving.problem.tensors, large))
    parts = (
        SplitPart("loss", 4096, 32_000, 8, ("mm_9",), 1, returned=True),
        SplitPart("chain", 4096, 1024, 2, ("mm", "mm_1"), 12, reruns=True),
    )
    ways = (
        SimpleWay("every block checkpointed", 9000.0, 5 * MIB),
        SimpleWay("torch's activation_memory_budget", 8500.0, 9 * MIB, 3 * MIB),
        SimpleWay("ZeRO-Offload", None, None, reason="there is no optimizer"),
    )
    made = Splitting(
        8, parts, StepEstimate(whole, 80 * MIB), StepEstimate(moving.problem, 10 * MIB)
    )
    return replace(moving, name="graph 2", splitting=made, simple_ways=ways)


def test_data_of_a_split_tell_before_and_after(split: PlanReport, moving: PlanReport) -> None:
    assert report_data(moving)["split"] is None
    assert report_data(moving)["ways"] == []
    data = report_data(split)
    assert data["split"]["parts"] == [
        "loss mm_9 (4,096 tokens by 32,000) in 8 pieces, and its result returned",
        "12 chains such as mm (4,096 tokens by 1,024), each in 2 pieces, computed again in"
        " backward",
    ]
    rows = {row[0]: row[1:] for row in data["split"]["rows"][:3]}
    assert rows["floor"] == ("80.00 MiB", "10.00 MiB")
    assert rows["time of the ops, estimated"][1].endswith("(+0.0%)")
    (largest, *_) = [row for row in data["split"]["rows"] if row[0] == "one of the largest"]
    assert largest[1] == "logits, 64.00 MiB"


def test_data_of_simpler_ways_begin_with_this_plan(split: PlanReport) -> None:
    assert report_data(split)["ways"] == [
        ("this plan", show_us(split.planned_us), ""),
        ("every block checkpointed", "9.000 ms", ""),
        ("torch's activation_memory_budget", "8.500 ms", "3.00 MiB missing"),
        ("ZeRO-Offload", "no plan", "there is no optimizer"),
    ]


def test_data_agree_with_the_report(moving: PlanReport) -> None:
    data = report_data(moving)
    json.dumps(data, allow_nan=False)
    device, host = data["memory"]
    assert (device["tier"], host["tier"]) == ("device", "host")
    assert device["limit"] == moving.budget_bytes
    assert host["limit"] is None
    held = list(accumulate(device["d"], initial=sum(device["base"])))
    assert max(held) == moving.timeline.peak_bytes["device"]
    lanes = {lane["lane"]: lane for lane in data["lanes"]}
    assert list(lanes) == ["compute", "d2h", "h2d"]
    (out,) = lanes["d2h"]["planned"]["thing"]
    assert data["things"][out][0] == "a out"
    assert data["things"][out][-2:] == ["a", 4 * MIB]
    assert len(lanes["compute"]["planned"]["thing"]) == len(moving.problem.ops) + 1
    assert lanes["d2h"]["measured"]["duration"] == [750_000]
    assert data["stalls"]["measured"][0][:3] == [5_000_000, 700_000, "ba"]
    assert data["waits"]["steps"]["measured"] == (8_000_000, 7_300_000)
    ((_, direction, tensor, planned_ns, measured_ns),) = data["waits"]["rows"]
    assert (direction, tensor, planned_ns, measured_ns) == ("load", "a", 400_000, 700_000)
    said = data["waits"]["said"]
    assert said["measured"].startswith("step 8.000 ms: compute 7.300 ms, waiting 700.000 µs: ")
    assert said["planned"].endswith("load 400.000 µs.")


def test_every_tensor_stands_in_one_module(moving: PlanReport) -> None:
    modules = report_data(moving)["modules"]
    tensors = [t["id"] for m in modules for t in m["tensors"]]
    assert sorted(tensors) == sorted(t.id for t in moving.problem.tensors)
    by_name = {m["name"]: m for m in modules}
    assert [t["id"] for t in by_name["layers.0"]["tensors"]] == ["w"]
    costs = [m["cost_us"] for m in modules]
    assert costs == sorted(costs, reverse=True)
    assert sum(costs) == pytest.approx(sum(f.cost_us for f in moving.fates()))


def test_the_verdict_is_one_sentence(moving: PlanReport, fitting: PlanReport) -> None:
    assert verdict(fitting).startswith("Everything fits: ")
    for method, who in (("compute", "no plan"), ("lp", "no plan with weights in these places")):
        bounded = replace(moving, result=replace(moving.result, bound_method=method))
        assert f"above the bound that {who} can beat" in verdict(bounded)
        best = replace(bounded, result=replace(bounded.result, lower_bound_us=moving.planned_us))
        assert f"and {who} can be faster" in verdict(best)


# --- the file --------------------------------------------------------------------------------


def test_the_page_loads_nothing_and_names_stay_words(
    moving: PlanReport, fitting: PlanReport, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    save_html(file, [moving, fitting])
    text = file.read_text("utf-8")
    assert "{{" not in text.replace("${{", "")
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", text)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\(", text)
    assert text.count("<script") == text.count("</script>") == 2
    assert "default-src 'none'" in text
    assert HOSTILE not in text
    embedded = re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)
    assert embedded is not None
    data = json.loads(embedded[1])
    assert [report["name"] for report in data["reports"]] == [moving.name, "graph 1"]


def test_what_cannot_be_written_is_said(fitting: PlanReport, tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="There is nothing to report yet"):
        save_html(tmp_path / "x.html", [])
    with pytest.raises(OffloadError, match=r"The page cannot be written: .*x\.html"):
        fitting.save_html(tmp_path / "no such folder" / "x.html")


# --- in a browser ----------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None)
FIGURES = [0, 0.4, 999.9994, 1234.5678, 1e6, 76543210.1, 1023, 1024, 3.5 * MIB, 12.345e9]
# Time is simulated there (--virtual-time-budget), and when a frame comes in it is anybody's guess:
# frames are due by the clock that the probe waits by.
WATCH = """const wrong = [];
window.requestAnimationFrame = (draw) => setTimeout(() => draw(performance.now()), 16);
addEventListener("error", (event) => wrong.push(String(event.message)));
addEventListener("unhandledrejection", (event) => wrong.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => wrong.push(event.blockedURI));"""


def probed(text: str, folder: Path) -> dict[str, Any]:
    """Open the page with the probe in it, under the page's own policy; return what it finds."""
    assert CHROMIUM is not None
    probe = f"const FIGURES = {FIGURES};\n" + (Path(__file__).parent / "page_probe.js").read_text()
    for script in (WATCH, probe):
        digest = b64encode(sha256(script.encode()).digest()).decode()
        text = text.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    text = text.replace("<style>", f"<script>{WATCH}</script>\n<style>", 1)
    text = text.replace("</body>", f"<script>{probe}</script>\n</body>", 1)
    file = folder / "probed.html"
    file.write_text(text, "utf-8")
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync", "extensions")
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            *(f"--disable-{what}" for what in quiet),
            "--no-first-run",
            f"--user-data-dir={folder / 'chromium'}",
            "--window-size=360,800",
            "--virtual-time-budget=8000",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = re.search(r'<pre id="probed">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(unescape(told[1]))
    return found


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium or Chrome")
def test_a_browser_shows_it_and_obeys(
    moving: PlanReport, fitting: PlanReport, split: PlanReport, tmp_path: Path
) -> None:
    found = probed(page([moving, fitting, split]), tmp_path)
    assert found.get("thrown") is None
    assert found["wrong"] == []
    assert found["intruders"] == 0
    assert found["name"] == moving.name
    assert moving.name in found["title"]
    assert len(found["cards"]) >= 6
    assert min(found["inks"]) > 5
    assert found["moment"].startswith("Fullest at ")
    assert found["overflow"] <= 0
    assert found["figures"] == [[show_us(v), size(floor(v + 0.5))] for v in FIGURES]

    whole, nearer, later = (found["zoom"][key] for key in ("whole", "nearer", "later"))
    assert whole == found["zoom"]["again"]
    assert nearer[1] - nearer[0] < whole[1] - whole[0]
    assert later[0] > nearer[0]
    assert "Waiting before ba" in found["wait"]
    assert found["next"] != found["wait"]
    assert "a out" in found["stepped"]
    assert found["tip"].startswith("layers.")
    assert found["picked"] == ["a"]
    assert found["focused"] == "a"
    assert found["wheeled"]

    assert found["byName"] == found["byNameBack"][::-1]
    assert set(found["byName"]) == set(found["modules"])
    assert found["sorted"] == ["descending"]
    assert found["none"] == []
    assert len(found["searched"]) == 1
    assert found["unfolded"][1] >= 1
    assert found["tiers"] == ["device", "host"]
    assert size(moving.timeline.peak_bytes["host"]) in found["hostMoment"]
    assert found["faint"] == []
    assert found["nameless"] == []
    assert set(found["theme"]) == {"light", "dark"}
    assert found["paper"][2] == "light"
    assert found["paper"][0] == found["paper"][1]
    assert found["after"] == found["theme"][1]
    assert found["second"] == ["graph 1", verdict(fitting)]
    assert found["unchanged"] == [True, True]
    data = report_data(split)
    assert found["changed"] == [True, True]
    assert found["parts"] == data["split"]["parts"]
    assert found["beforeAfter"] == [[cell or "–" for cell in row] for row in data["split"]["rows"]]
    assert found["ways"] == [[cell or "–" for cell in way] for way in data["ways"]]
    assert found["changesOverflow"] <= 0
