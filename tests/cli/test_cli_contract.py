"""The command line as an outside tool sees it: JSON files in, JSON and exit codes out."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from offcompile.cli.command import main

RULES = {
    "unknown-key", "bad-value", "duplicate-id", "unknown-id", "wrong-lane", "stale-read",
    "missing-copy", "read-after-drop", "missing-write-back", "late-move", "no-space", "codec",
    "direct", "recompute", "update", "steady", "lost", "deadlock",
}  # fmt: skip
Obj = dict[str, Any]


def tensor(id: str, nbytes: int, kind: str, home: str | None = None, **more: Any) -> Obj:
    return {"id": id, "nbytes": nbytes, "kind": kind, "home": home, **more}


def op(id: str, us: float, reads: str, writes: str, phase: str = "forward", **more: Any) -> Obj:
    ends = {"reads": reads.split(), "writes": writes.split()}
    return {"id": id, "phase": phase, "duration_us": us, **ends, **more}


def load(id: str, name: str, after: str | None, before: str | None, **more: Any) -> Obj:
    way = {"source": "host", "target": "device", "lane": "h2d"}
    return {"id": id, "tensor": name, **way, "start_after": after, "ready_before": before, **more}


def store(id: str, name: str, after: str | None, **more: Any) -> Obj:
    way = {"source": "device", "target": "host", "lane": "d2h"}
    return {"id": id, "tensor": name, **way, "start_after": after, "ready_before": None, **more}


def drop(name: str, tier: str, after: str | None) -> Obj:
    return {"tensor": name, "tier": tier, "after": after}


def start(*copies: str) -> list[Obj]:
    return [dict(zip(("tensor", "tier"), c.split("@"), strict=True)) for c in copies]


def machine(capacity: int | None = 1000, host: int | None = None, codecs: Any = ()) -> Obj:
    tiers = [{"name": "device", "capacity_bytes": capacity}, {"name": "host"}]
    if host is not None:
        tiers[1]["capacity_bytes"] = host
    rate = {"bytes_per_us": 100.0}
    lanes = [
        {"name": "h2d", "source": "host", "target": "device", **rate},
        {"name": "d2h", "source": "device", "target": "host", **rate},
    ]
    return {"tiers": tiers, "lanes": lanes, "codecs": list(codecs)}


class Tool:
    """Runs the command in process on files in one folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def file(self, name: str, content: Any) -> str:
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
        return str(path)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        try:
            code = main(list(arguments))
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = self.capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    def check(self, problem: Obj, on: Obj, plan: Obj) -> tuple[int, Obj]:
        files = ["--problem", self.file("p.json", problem), "--machine", self.file("m.json", on)]
        code, out, _ = self.run("check", *files, "--plan", self.file("plan.json", plan), "--json")
        return code, json.loads(out)

    def plan(self, problem: Obj, on: Obj, policy: str = "joint") -> tuple[int, Obj]:
        files = ["--problem", self.file("p.json", problem), "--machine", self.file("m.json", on)]
        code, out, _ = self.run("plan", *files, "--policy", policy, "--seconds", "0.05", "--json")
        return code, json.loads(out)

    def refuses(self, rule: str, problem: Obj, on: Obj, plan: Obj) -> None:
        code, said = self.check(problem, on, plan)
        assert code == 1, said
        assert set(said) == {"valid", "violations"} and said["valid"] is False
        assert all(set(v) == {"rule", "where", "detail"} for v in said["violations"])
        assert {v["rule"] for v in said["violations"]} <= RULES
        assert rule in {v["rule"] for v in said["violations"]}, said

    def accepts(self, problem: Obj, on: Obj, plan: Obj, us: float, **peaks: int) -> None:
        code, said = self.check(problem, on, plan)
        assert code == 0 and said["valid"] is True, said
        assert set(said) == {"valid", "makespan_us", "peak_bytes"}
        assert said["makespan_us"] == us
        assert {tier: said["peak_bytes"][tier] for tier in peaks} == peaks


@pytest.fixture
def tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(tmp_path, capsys)


ONE = {
    "tensors": [
        tensor("w", 100, "weight", "host"),
        tensor("x", 10, "input", "device"),
        tensor("y", 20, "output"),
    ],
    "ops": [op("A", 1.0, "w x", "y")],
}
ONE_PLAN = {"start": start("w@host", "x@device"), "moves": [load("m", "w", None, "A")]}
WRITES = {
    "tensors": [tensor("w", 100, "weight", "host"), tensor("y", 20, "output")],
    "ops": [op("A", 1.0, "w", "w"), op("B", 1.0, "w", "y", direct={"w": 3.0})],
}
W_START = start("w@host")
BRING = load("m", "w", None, "A")
UPDATE = {
    "steady": True,
    "tensors": [
        tensor("w", 100, "weight", "host"),
        tensor("g", 100, "gradient"),
        tensor("s", 200, "state", "host"),
        tensor("x", 10, "input", "device"),
    ],
    "ops": [
        op("B", 2.0, "w x", "g", "backward"),
        op("U", 1.0, "w g s", "w s", "update", host_duration_us=4.0),
    ],
}
UPDATE_PLAN = {
    "start": start("w@host", "s@host", "x@device"),
    "moves": [load("m", "w", None, "B"), store("n", "g", "B")],
    "drops": [drop("w", "device", "B"), drop("g", "device", "n"), drop("g", "host", "U")],
    "updates": [{"weight": "w", "where": "host"}],
}
FP16 = {"name": "fp16", "bytes_per_us": 50.0}
CODED = {
    "tensors": [
        tensor("x", 10, "input", "device"),
        tensor("a", 101, "activation", ratios={"fp16": 0.5}),
        tensor("b", 10, "activation"),
        tensor("g", 10, "output"),
    ],
    "ops": [
        op("F1", 2.0, "x", "a", recompute=True),
        op("F2", 10.0, "x", "b"),
        op("B2", 1.0, "b a", "g", "backward"),
    ],
}
CODED_PLAN = {
    "start": start("x@device"),
    "moves": [store("o", "a", "F1", codec="fp16"), load("i", "a", "o", "B2", codec="fp16")],
    "drops": [drop("a", "device", "o")],
}
ROTATE = {
    "steady": True,
    "tensors": [tensor("w", 100, "weight", "host"), tensor("v", 100, "weight", "host")],
    "ops": [op("A", 3.0, "w", ""), op("B", 3.0, "v", "")],
}
ROTATE_PLAN = {
    "start": start("w@host", "v@host", "w@device"),
    "moves": [load("mv", "v", None, "B"), load("mw", "w", "A", "A", wraps=True)],
    "drops": [drop("w", "device", "A"), drop("v", "device", "B")],
}


def test_valid_plans_cost_what_a_hand_computes(tool: Tool) -> None:
    tool.accepts(ONE, machine(130), ONE_PLAN, 2.0, device=130, host=100)
    write_back = {"start": W_START, "moves": [BRING, store("n", "w", "A")]}
    tool.accepts(WRITES, machine(120), write_back, 3.0, device=120, host=100)
    tool.accepts(UPDATE, machine(210), UPDATE_PLAN, 8.0, device=210, host=400)
    tool.accepts(CODED, machine(codecs=[FP16]), CODED_PLAN, 13.0, device=131, host=51)
    again = {"start": start("x@device"), "recomputes": [{"op": "F1", "before": "B2"}]}
    tool.accepts(CODED, machine(131), again, 15.0, device=131)


def test_wrapped_moves_overlap_when_there_is_room_and_wait_when_not(tool: Tool) -> None:
    tool.accepts(ROTATE, machine(200), ROTATE_PLAN, 6.0, device=200, host=200)
    tool.accepts(ROTATE, machine(199), ROTATE_PLAN, 8.0, device=100, host=200)
    tool.refuses("no-space", ROTATE, machine(99), ROTATE_PLAN)


def test_direct_access_needs_no_device_space(tool: Tool) -> None:
    problem = copy.deepcopy(ONE)
    problem["ops"][0]["direct"] = {"w": 5.0, "y": 3.0, "x": 1.0}
    both = [{"op": "A", "tensor": "w"}, {"op": "A", "tensor": "y"}]
    plan = {"start": ONE_PLAN["start"], "directs": both}
    tool.accepts(problem, machine(10), plan, 7.0, device=10, host=120)


def test_two_hops_from_a_disk(tool: Tool) -> None:
    problem = {"tensors": [tensor("w", 100, "weight", "disk")], "ops": [op("A", 1.0, "w", "")]}
    on = machine()
    on["tiers"].append({"name": "disk", "capacity_bytes": None})
    lane = {"name": "k2h", "source": "disk", "target": "host", "bytes_per_us": 10.0}
    on["lanes"].append(lane)
    hop = {"id": "k", "tensor": "w", "source": "disk", "target": "host", "lane": "k2h"}
    hop |= {"start_after": None, "ready_before": None}
    plan = {"start": start("w@disk"), "moves": [hop, load("m", "w", "k", "A")]}
    tool.accepts(problem, on, plan, 12.0, device=100, host=100, disk=100)


@pytest.mark.parametrize(("us", "rounded"), [(0.0005, 0.001), (0.0015, 0.002), (1.0004, 1.0)])
def test_durations_round_to_whole_nanoseconds_halves_up(
    tool: Tool, us: float, rounded: float
) -> None:
    tool.accepts({"ops": [op("A", us, "", "")]}, machine(), {"start": []}, rounded)


BROKEN: list[tuple[str, Obj, Obj, Obj]] = [
    ("missing-copy", ONE, machine(), {**ONE_PLAN, "moves": []}),
    ("wrong-lane", ONE, machine(), {**ONE_PLAN, "moves": [{**BRING, "lane": "d2h"}]}),
    ("late-move", ONE, machine(), {**ONE_PLAN, "moves": [load("m", "w", "A", "A")]}),
    ("deadlock", ONE, machine(), {**ONE_PLAN, "moves": [load("m", "w", "m", "A")]}),
    ("no-space", ONE, machine(129), ONE_PLAN),
    ("no-space", ONE, machine(9), ONE_PLAN),
    ("no-space", ONE, machine(1000, 99), ONE_PLAN),
    ("read-after-drop", ONE, machine(), {**ONE_PLAN, "drops": [drop("w", "device", "m")]}),
    ("missing-write-back", ONE, machine(), {**ONE_PLAN, "drops": [drop("y", "device", "A")]}),
    ("bad-value", ONE, machine(), {"moves": ONE_PLAN["moves"]}),
    ("bad-value", ONE, machine(), {**ONE_PLAN, "moves": [{**BRING, "wraps": True}]}),
    ("duplicate-id", ONE, machine(), {**ONE_PLAN, "moves": [{**BRING, "id": "A"}]}),
    ("duplicate-id", ONE, machine(), {**ONE_PLAN, "moves": [BRING, BRING]}),
    ("unknown-id", ONE, machine(), {**ONE_PLAN, "moves": [{**BRING, "tensor": "?"}]}),
    ("unknown-id", ONE, machine(), {**ONE_PLAN, "drops": [drop("w", "device", "?")]}),
    ("direct", ONE, machine(), {**ONE_PLAN, "directs": [{"op": "A", "tensor": "w"}]}),
    ("recompute", ONE, machine(), {**ONE_PLAN, "recomputes": [{"op": "A", "before": "A"}]}),
    ("update", ONE, machine(), {**ONE_PLAN, "updates": [{"weight": "w", "where": "host"}]}),
    ("lost", {**ONE, "ops": [op("A", 1.0, "w x", "")]}, machine(), ONE_PLAN),
    ("stale-read", WRITES, machine(), {
        "start": W_START, "moves": [BRING], "directs": [{"op": "B", "tensor": "w"}]}),
    ("stale-read", WRITES, machine(), {
        "start": W_START, "moves": [BRING, load("n", "w", "A", "B")],
        "drops": [drop("w", "device", "A")]}),
    ("missing-write-back", WRITES, machine(), {
        "start": W_START, "moves": [BRING], "drops": [drop("w", "device", "B")]}),
    ("codec", CODED, machine(), CODED_PLAN),
    ("codec", CODED, machine(codecs=[FP16]), {
        **CODED_PLAN, "moves": [store("o", "a", "F1", codec="fp16"), load("i", "a", "o", "B2")]}),
    ("steady", UPDATE, machine(), {**UPDATE_PLAN, "drops": []}),
    ("missing-copy", UPDATE, machine(), {
        **UPDATE_PLAN, "moves": UPDATE_PLAN["moves"][:1], "drops": UPDATE_PLAN["drops"][:1]}),
    ("missing-copy", ROTATE, machine(), {**ROTATE_PLAN, "start": start("w@host", "v@host")}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "problem", "on", "plan"), BROKEN)
def test_a_broken_plan_is_refused_by_its_rule(
    tool: Tool, rule: str, problem: Obj, on: Obj, plan: Obj
) -> None:
    tool.refuses(rule, problem, on, plan)


PATHS = ["", "start 0", "moves 0", "drops 0", "updates 0"]


@pytest.mark.parametrize("path", PATHS)
def test_unknown_keys_of_a_plan_are_named(tool: Tool, path: str) -> None:
    plan = copy.deepcopy(UPDATE_PLAN)
    at: Any = plan
    for key in path.split():
        at = at[int(key) if key.isdigit() else key]
    at["zz"] = 1
    tool.refuses("unknown-key", UPDATE, machine(), plan)


@pytest.mark.parametrize(
    "path", ["tensors 0 id", "tensors 0 nbytes", "tensors 0 kind", "ops 0 id", "ops 0 phase",
             "ops 0 duration_us", "ops 0 reads", "ops 0 writes", "lanes 0 source", "tiers 0 name",
             "lanes 0 bytes_per_us", "codecs 0 bytes_per_us", "codecs 0 name"]
)  # fmt: skip
@pytest.mark.parametrize("value", ["gone", None, True, [[]], -1])
def test_wrong_or_missing_input_is_exit_2_and_named(tool: Tool, path: str, value: Any) -> None:
    both = {"p": copy.deepcopy(ONE), "m": machine(codecs=[FP16])}
    key, at, field = path.split()
    item = both["p" if key in ("tensors", "ops") else "m"][key][int(at)]
    if value == "gone":
        del item[field]
    else:
        item[field] = value
    code, said = tool.check(both["p"], both["m"], ONE_PLAN)
    assert code == 2
    assert any(f"{key}[{at}]" in v["where"] for v in said["error"]["violations"])


def test_optional_keys_may_be_left_out(tool: Tool) -> None:
    on = machine()
    del on["tiers"][0]["capacity_bytes"]
    del on["codecs"]
    tool.accepts(ONE, on, ONE_PLAN, 2.0, device=130)
    tool.accepts({}, {"tiers": [{"name": "device"}]}, {"start": []}, 0.0, device=0)


def chain(steady: bool) -> Obj:
    tensors = [tensor("x", 50, "input", "device")]
    forward, backward = [], []
    for i in range(4):
        tensors += [tensor(f"w@{i}", 1000, "weight", "host"), tensor(f"é{i}", 300, "activation")]
        tensors += [tensor(f"g{i}", 1000, "gradient"), tensor(f"s{i}", 900, "state", "host")]
        saved = f"é{i - 1}" if i else "x"
        forward.append(op(f"F{i}", 5.25, f"w@{i} {saved}", f"é{i}", direct={f"w@{i}": 20.0}))
        update = op(f"U{i}", 2, f"w@{i} g{i} s{i}", f"w@{i} s{i}", "update", host_duration_us=9)
        backward[:0] = [op(f"B{i}", 9, f"w@{i} é{i} {saved}", f"g{i}", "backward"), update]
    return {"steady": steady, "tensors": tensors, "ops": forward + backward}


POLICIES = [
    "joint", "weight_rotation", "hybrid_access", "gradient_reserve", "activation_spill",
    "near_memory_update", "recompute",
]  # fmt: skip


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_plan_prints_check_accepts(tool: Tool, policy: str, steady: bool) -> None:
    for capacity in (4300, 20000):
        code, said = tool.plan(chain(steady), machine(capacity), policy)
        if code == 3:
            assert set(said["infeasible"]) == {"reason", "needed_bytes", "smallest_change"}
            assert capacity == 4300 and policy != "joint"
            continue
        assert code == 0, said
        assert set(said) == {
            "plan", "makespan_us", "peak_bytes", "lower_bound_us", "gap", "policy", "seconds"
        }  # fmt: skip
        assert said["lower_bound_us"] <= said["makespan_us"]
        assert said["gap"] == pytest.approx(said["makespan_us"] / said["lower_bound_us"] - 1)
        assert said["peak_bytes"]["device"] <= capacity
        seen = tool.check(chain(steady), machine(capacity), said["plan"])[1]
        assert seen["valid"] is True
        assert seen["makespan_us"] == said["makespan_us"]
        assert seen["peak_bytes"] == said["peak_bytes"]


def test_exit_3_names_the_exact_bytes_for_one_op(tool: Tool) -> None:
    code, said = tool.plan(ONE, machine(7))
    assert code == 3
    needed = said["infeasible"]["needed_bytes"]
    assert tool.plan(ONE, machine(7 + needed))[0] == 0
    assert tool.plan(ONE, machine(7 + needed - 1))[0] == 3


def test_toml_machine_and_text_plan(tool: Tool) -> None:
    toml = 'tiers = [{name="device", capacity_bytes=130}, {name="host"}]\n[[lanes]]\nname="h2d"\n'
    toml += 'source="host"\ntarget="device"\nbytes_per_us=100.0\n'
    files = ["--problem", tool.file("p.json", ONE), "--machine", tool.file("m.toml", toml)]
    written = str(tool.folder / "plan.txt")
    assert tool.run("plan", *files, "--seconds", "0", "--output", written)[0] == 0
    code, out, _ = tool.run("check", *files, "--plan", written)
    assert code == 0 and "2.000 µs" in out


@pytest.mark.parametrize(
    "arguments",
    ["", "bogus", "plan", "plan --seconds nan", "plan --seconds -1", "plan --policy nope",
     "plan --policy joint:nope=1", "plan --policy weight_rotation:variant=zzz"],
)  # fmt: skip
def test_a_bad_command_line_is_exit_2(tool: Tool, arguments: str) -> None:
    files = ["--problem", tool.file("p.json", ONE), "--machine", tool.file("m.json", machine())]
    parts = arguments.split()
    code, _, err = tool.run(*parts, *(files if len(parts) > 1 else []))
    assert code == 2 and err


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 5000, '{"ops":[],"ops":[]}', "[]", "null", "\ufeff{}"]
)
def test_text_that_is_no_problem_is_exit_2(tool: Tool, text: str) -> None:
    files = ["--problem", tool.file("p.json", text), "--machine", tool.file("m.json", machine())]
    code, out, err = tool.run("plan", *files, "--json")
    assert code == 2 and "p.json" in err
    assert json.loads(out)["error"]["violations"]
