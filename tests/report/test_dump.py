"""Dumps and logs of a compiled graph: files, pictures, log lines and artifacts."""

from __future__ import annotations

import ast
import json
import logging
import operator
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from offcompile.ir import InvalidInput, Lane, Machine, OffloadError, Op, Problem, Tensor, Tier
from offcompile.ir.jsonio import loads_machine, loads_plan, loads_problem
from offcompile.ir.textio import parse_plan, parse_problem
from offcompile.planning.planner import plan_problem
from offcompile.report.drawing.dot import COMPUTE, INPUT, MOVEMENT, ORDER, OUTPUT, draw, to_dot
from offcompile.report.drawing.svg import to_svg
from offcompile.report.dump import Dumped, check_dump_directory, dump
from offcompile.report.figures import PlannedMemory
from offcompile.report.log import log_compiled
from offcompile.report.report import PlanReport
from offcompile.runtime.moves import ops as _ops  # noqa: F401  (defines torch.ops.offcompile)

ROOT = Path(__file__).parents[2]
MOVE = torch.ops.offcompile
ATEN = torch.ops.aten
LANES = ("h2d", "d2h")


def graph_with_moves(layers: int, work: int = 1, moves: bool = True) -> fx.GraphModule:
    """`layers` matrix products with `work` ops each, whose results go out and come back."""
    mode, graph = FakeTensorMode(), fx.Graph()
    data = mode.from_tensor(torch.empty(64, 32))
    ticket = mode.from_tensor(torch.empty(1, dtype=torch.int64))

    def call(target: object, *args: object, value: object = data) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = value
        return node

    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = data, mode.from_tensor(torch.empty(32, 32))
    h, sent = x, []
    for i in range(layers):
        h = call(ATEN.mm.default, h, w)
        for _ in range(work):
            h = call(ATEN.relu.default, h)
        if moves:
            start = call(MOVE.start_out.default, h, f"t{i}", "host", "d2h", "key", value=ticket)
            sent.append((start, h))
    away = [call(MOVE.wait_out.default, start, kept, value=ticket) for start, kept in sent]
    for i, gone in reversed(list(enumerate(away))):
        given = (gone, [64, 32], [32, 1], torch.float32, f"t{i}", "h2d", [])
        pair = call(MOVE.start_load.default, *given, value=(data, ticket))
        buffer, load = (
            call(operator.getitem, pair, 0),
            call(operator.getitem, pair, 1, value=ticket),
        )
        h = call(MOVE.barrier.default, h, [load])
        h = call(ATEN.mul.Tensor, h, call(MOVE.wait_load.default, buffer, load))
    graph.output((h,))
    return fx.GraphModule({}, graph)


def compiled(order: str | None = "run mm\nstart t0\n") -> Dumped:
    problem = Problem(
        (Tensor("x", 8192, "input", "device"), Tensor("relu", 8192, "activation")),
        (
            Op("mm", "forward", 12.0, ("x",), ("relu",)),
            Op("relu.bw", "backward", 7.0, ("relu",)),
        ),
    )
    machine = Machine(
        (Tier("device", 1 << 20), Tier("host")),
        (Lane("h2d", "host", "device", 100.0), Lane("d2h", "device", "host", 100.0)),
    )
    result = plan_problem(problem, machine, seconds=0.2)
    report = PlanReport("graph 0", problem, machine, result, PlannedMemory(1 << 20))
    before = {s: graph_with_moves(1, moves=False) for s in ("forward", "backward")}
    after = {"forward": graph_with_moves(1)}
    return Dumped(report, before, after, order)


# --- pictures ------------------------------------------------------------------------------


def test_movement_nodes_carry_their_lane() -> None:
    drawing = draw(graph_with_moves(1).graph, lanes=LANES)
    assert [(box.kind, box.lane, box.label) for box in drawing.boxes] == [
        (INPUT, None, "x"),
        (INPUT, None, "w"),
        (COMPUTE, None, "mm_default"),
        (COMPUTE, None, "relu_default"),
        (MOVEMENT, "d2h", "start_out t0 → host"),
        (MOVEMENT, "d2h", "wait_out t0 → host"),
        (MOVEMENT, "h2d", "start_load t0"),
        (ORDER, None, "barrier relu_default"),
        (MOVEMENT, "h2d", "wait_load t0"),
        (COMPUTE, None, "mul_tensor"),
        (OUTPUT, None, "output"),
    ]
    assert drawing.boxes[4].figure == drawing.boxes[6].figure == "8.00 KiB"
    assert drawing.lanes == LANES
    flights = [(e.source, e.target, e.lane) for e in drawing.edges if e.flight]
    assert flights == [(4, 5, "d2h"), (6, 8, "h2d")]
    assert not [e for e in drawing.edges if (e.source, e.target) == (3, 5)]  # merely kept alive


def test_edges_follow_the_data_and_the_order() -> None:
    gm = graph_with_moves(3)
    drawing = draw(gm.graph, collapse_above=1000)
    assert all(edge.source < edge.target for edge in drawing.edges)
    assert len(set(drawing.edges)) == len(drawing.edges)
    reached = {edge.target for edge in drawing.edges}
    inputs = {i for i, box in enumerate(drawing.boxes) if box.kind == INPUT}
    assert reached | inputs == set(range(len(drawing.boxes)))


def test_a_wait_for_what_another_graph_started_names_its_ticket() -> None:
    graph = fx.Graph()
    ticket = graph.placeholder("ticket_relu")
    graph.output((graph.call_function(MOVE.wait_out.default, (ticket, None)),))
    (_, wait, _) = draw(graph).boxes
    assert (wait.kind, wait.lane, wait.label) == (ORDER, None, "wait_out ticket_relu")


def test_large_graphs_show_runs_of_computation_as_one_box() -> None:
    gm = graph_with_moves(20, work=4)
    durations = {n.name: 100.0 for n in gm.graph.nodes if n.op == "call_function"}
    drawing = draw(gm.graph, "large", durations, LANES)
    assert drawing.collapsed
    first, second = drawing.boxes[:2]
    assert (first.label, first.figure) == ("x … w", "2 inputs")
    assert (second.label, second.figure) == ("mm_default … relu_default_3", "5 ops, 500.000 µs")
    assert second.detail.startswith("mm_default, relu_default, ")
    kinds = [box.kind for box in drawing.boxes]
    assert (COMPUTE, COMPUTE) not in pairwise(kinds)
    assert kinds.count(MOVEMENT) == 80  # not one of them is hidden
    assert not draw(gm.graph, collapse_above=1000).collapsed


def test_dot_is_balanced_and_coloured_by_lane() -> None:
    drawing = draw(graph_with_moves(2).graph, 'a "quoted" \\ title', lanes=LANES)
    text = to_dot(drawing)
    assert text.startswith('digraph "a \\"quoted\\" \\\\ title" {')
    assert text.rstrip().endswith("}")
    assert text.count(" -> ") == len(drawing.edges)
    for lane in LANES:
        colour = drawing.colours[lane]
        boxes = [i for i, box in enumerate(drawing.boxes) if box.lane == lane]
        assert boxes
        for i in boxes:
            assert re.search(rf'n{i} \[.*fillcolor="{colour}"', text)


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("layers", "work"), [(1, 1), (60, 4)])
def test_svg_has_every_box_inside_its_frame(layers: int, work: int) -> None:
    drawing = draw(graph_with_moves(layers, work).graph, "<title> & co", lanes=LANES)
    root = ElementTree.fromstring(to_svg(drawing))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    groups = root.findall(f"{SVG}g")
    assert len(groups) == len(drawing.boxes)
    lane_x: dict[str | None, set[float]] = {}
    last_y = 0.0
    for box, group in zip(drawing.boxes, groups, strict=True):
        rect = group.find(f"{SVG}rect")
        title = group.find(f"{SVG}title")
        assert rect is not None and title is not None
        x, y, w, h = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
        assert x >= 0 and x + w <= width and last_y < y and y + h <= height
        last_y = y + h
        lane_x.setdefault(box.lane, set()).add(x)
        assert title.text == box.detail
        if box.lane:
            assert rect.attrib["fill"] == drawing.colours[box.lane]
        texts = group.findall(f"{SVG}text")
        letters = sum(len(t.text or "") for t in texts)
        assert letters * 6.65 <= w  # nothing runs out of its box
    assert len(lane_x) == 3
    assert all(len(places) == 1 for places in lane_x.values())
    assert len({x for places in lane_x.values() for x in places}) == 3
    shown = [t.text for t in root.findall(f"{SVG}text")]
    assert shown == ["<title> & co", "computation", *LANES]


def test_pictures_are_the_same_every_time() -> None:
    one, two = (draw(graph_with_moves(4).graph, lanes=LANES) for _ in range(2))
    assert to_svg(one) == to_svg(two)
    assert to_dot(one) == to_dot(two)


# --- files ---------------------------------------------------------------------------------


def test_a_dump_holds_what_it_promises(tmp_path: Path) -> None:
    given = compiled()
    folder = dump(tmp_path, given.report.name, given)
    sides = [f"{s}{e}" for s in ("forward", "backward") for e in ("_before.py", "_after.py")]
    pictures = [f"{s}.{e}" for s in ("forward", "backward") for e in ("dot", "svg")]
    nouns = ["problem.json", "problem.txt", "machine.json", "plan.json", "plan.txt"]
    rest = ["timeline.json", "timeline.txt", "report.txt", "order.txt"]
    assert {f.name for f in folder.iterdir()} == {*sides, *pictures, *nouns, *rest}
    text = {f.name: f.read_text() for f in folder.iterdir()}
    for name in sides:
        ast.parse(text[name])
        assert 'x: "f32[64, 32]"' in text[name]
    assert "offcompile.start_out" in text["forward_after.py"]
    assert "offcompile" not in text["forward_before.py"]
    assert text["backward_after.py"] == text["backward_before.py"]  # it stayed as it was
    report = given.report
    assert loads_problem(text["problem.json"]) == parse_problem(text["problem.txt"])
    assert loads_problem(text["problem.json"]) == report.problem
    assert loads_machine(text["machine.json"]) == report.machine
    assert loads_plan(text["plan.json"]) == parse_plan(text["plan.txt"]) == report.plan
    assert json.loads(text["timeline.json"])["makespan_us"] == report.planned_us
    assert "peak device" in text["timeline.txt"]
    assert text["order.txt"] == "run mm\nstart t0\n"


def test_a_dump_never_overwrites(tmp_path: Path) -> None:
    given = compiled(order=None)
    names = [dump(tmp_path / "deep" / "er", "a/b graph", given).name for _ in range(3)]
    assert names == ["a_b_graph-00", "a_b_graph-01", "a_b_graph-02"]
    assert not list(tmp_path.rglob("order.txt"))


def test_an_inference_graph_has_one_side(tmp_path: Path) -> None:
    given = compiled()
    only = Dumped(given.report, {"forward": given.before["forward"]}, {})
    folder = dump(tmp_path, "g", only)
    assert not list(folder.glob("backward*"))
    assert (folder / "forward_after.py").exists()


def test_a_directory_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    check_dump_directory(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InvalidInput, match=r"option dump: .*file.*cannot be written.*another"):
        check_dump_directory(blocked / "below")
    with pytest.raises(OffloadError, match=r"dump of g cannot be written.*leave the option dump"):
        dump(blocked, "g", compiled())


# --- the log -------------------------------------------------------------------------------

PARTS = ("forward before", "backward before", "forward after")
TEXTS = ("problem", "plan", "order", "timeline")


def test_info_is_one_line_and_debug_is_everything(caplog: pytest.LogCaptureFixture) -> None:
    given = compiled()

    def said(level: int) -> list[logging.LogRecord]:
        caplog.clear()
        with caplog.at_level(level, "offcompile"):
            log_compiled(given)
        return [r for r in caplog.records if r.name == "offcompile"]

    summary = given.report.summary()
    assert [r.getMessage() for r in said(logging.INFO)] == [summary]
    assert said(logging.WARNING) == []
    everything = said(logging.DEBUG)
    heads = [r.getMessage().splitlines()[0] for r in everything]
    assert heads == [summary, *(f"graph 0: {title}" for title in (*PARTS, *TEXTS))]
    # the place shown is the caller's
    assert Path(everything[0].pathname).name == "test_dump.py"


SCRIPT = f"""
import logging, os, sys
sys.path[:0] = {[str(ROOT / "tests" / room) for room in ("support", "report")]!r}
import torch
from test_dump import compiled, log_compiled
log_compiled(compiled())
print("then", file=sys.stderr)
del os.environ["TORCH_LOGS"]
torch._logging.set_logs(modules={{"offcompile": logging.INFO}})
log_compiled(compiled())
"""


@pytest.mark.long
def test_torch_logs_reaches_us_before_anything_of_ours_is_imported(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_")}
    asked = {"TORCH_LOGS": "+offcompile", "TORCH_TRACE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**environ, **asked},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    everything, less = done.stderr.split("then\n")
    for text in ("graph 0: fits", "graph 0: forward after", "offcompile.start_out", "peak device"):
        assert text in everything
    (line,) = [x for x in less.splitlines() if "graph 0" in x]
    assert line.startswith("I") and "graph 0: fits" in line
    (trace,) = tmp_path.iterdir()
    names = re.findall(r'"artifact": \{"name": "(offcompile\w*)"', trace.read_text())
    ends = ("_summary", "_explained", "", "_timeline")
    assert names == [f"offcompile_graph_0{end}" for end in ends] * 2
