"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_run import (
    GOOD_PLAN,
    MACHINE,
    PLANS,
    ROOT,
    TINY,
    Run,
    command,
    refuse,
    running,
    tiny_check,
    tiny_plan,
)

from offcompile.ir import DEVICE
from offcompile.ir.jsonio import loads_machine, loads_plan, loads_problem, machine_from_toml
from offcompile.ir.textio import print_machine, print_plan, print_problem
from offcompile.ir.units import printable
from offcompile.planning.planner import check_plan


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return running(capsys)


# --- plan ----------------------------------------------------------------------------------


def test_plan_prints_the_object_of_the_contract_and_check_agrees(run: Run, tmp_path: Path) -> None:
    ended = run(*tiny_plan("--json"))
    assert (ended.code, ended.err) == (0, "")
    found = ended.json
    assert list(found) == [
        *("plan", "makespan_us", "peak_bytes", "lower_bound_us", "gap", "policy", "seconds"),
    ]
    # the link needs half the compute time, so nothing need wait
    assert found["makespan_us"] == found["lower_bound_us"] == 3000.0
    assert found["gap"] == 0.0
    assert found["policy"] == "joint"
    assert found["peak_bytes"]["device"] <= 8_000_000
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(found["plan"]))
    checked = run(*tiny_check(plan, "--json"))
    assert checked.code == 0
    assert checked.json == {
        "valid": True,
        "makespan_us": found["makespan_us"],
        "peak_bytes": found["peak_bytes"],
    }


def test_plan_shows_tables_to_people(run: Run) -> None:
    ended = run(*tiny_plan())
    assert ended.code == 0
    for said in ("makespan", "3.000 ms", "lower bound", "gap", "capacity", "h2d", "w1", "memory"):
        assert said in ended.out
    assert ended.err == ""


def test_plan_shows_who_waits_for_what(run: Run) -> None:
    ended = run(*tiny_plan("--memory", "4MB"))
    assert ended.code == 0
    # room for one weight only: each op waits for its own
    assert "4.500 ms" in ended.out
    assert "longest waits" in ended.out
    assert "1.500 ms before 3 ops" in ended.out


def test_plan_for_a_card_by_name(run: Run) -> None:
    arguments = ("--problem", TINY, "--hardware", "RTX4090", "--memory", "8 MB", "--host-memory")
    ended = run("plan", *arguments, "1GiB", "--disk", "--seconds", "0.5", "--json")
    assert ended.code == 0
    assert ended.json["makespan_us"] == 3000.0
    assert set(ended.json["peak_bytes"]) == {"device", "host", "disk"}


@pytest.mark.parametrize("suffix", [".json", ".txt", ".PLAN"])
def test_output_writes_a_plan_that_check_reads(run: Run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    assert run(*tiny_plan("--output", path)).code == 0
    checked = run(*tiny_check(path))
    assert checked.code == 0
    assert checked.out.startswith("valid")


def test_html_writes_a_page_that_shows_the_plan(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert run(*tiny_plan("--html", path)).code == 0
    text = path.read_text("utf-8")
    assert "<title>tiny · offcompile</title>" in text
    assert '"lane":"h2d"' in text


def test_text_forms_go_by_their_suffix(run: Run, tmp_path: Path) -> None:
    forms = {
        "p": print_problem(loads_problem(TINY.read_text())),
        "m": print_machine(machine_from_toml(MACHINE.read_text())),
        "plan": print_plan(loads_plan(GOOD_PLAN.read_text())),
    }
    for name, text in forms.items():
        (tmp_path / f"{name}.txt").write_text(text)
    files = ("--problem", tmp_path / "p.txt", "--machine", tmp_path / "m.txt")
    checked = run("check", *files, "--plan", tmp_path / "plan.txt", "--json")
    assert checked.code == 0
    assert checked.json["makespan_us"] == 3000.0


def test_policies_take_options(run: Run) -> None:
    ended = run(*tiny_plan("--policy", "weight_rotation:variant=l2l", "--json"))
    assert ended.code == 0
    assert ended.json["policy"] == "weight_rotation:variant=l2l"
    assert ended.json["makespan_us"] == 4500.0


def test_infeasible_says_what_is_missing(run: Run) -> None:
    ended = run(*tiny_plan("--memory", "3MB", "--json"))
    assert ended.code == 3
    assert list(ended.json) == ["infeasible"]
    said = ended.json["infeasible"]
    assert list(said) == ["reason", "needed_bytes", "smallest_change"]
    assert said["needed_bytes"] == 1_000_000
    for_people = run(*tiny_plan("--memory", "3MB"))
    assert (for_people.code, for_people.out) == (3, "")
    assert said["reason"] in for_people.err
    assert said["smallest_change"] in for_people.err


# --- check ---------------------------------------------------------------------------------


def test_check_says_valid(run: Run) -> None:
    assert run(*tiny_check(GOOD_PLAN, "--json")).json == {
        "valid": True,
        "makespan_us": 3000.0,
        "peak_bytes": {"device": 8_000_000, "host": 12_000_000},
    }
    assert "3.000 ms" in run(*tiny_check()).out


def mutated(change: Callable[[Any], object]) -> str:
    plan = json.loads(GOOD_PLAN.read_text())
    change(plan)
    return json.dumps(plan)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda p: p["moves"].pop(0), "missing-copy"),
        (lambda p: p["moves"][0].update(lane="d2h"), "wrong-lane"),
        (lambda p: p["moves"][0].update(tensor="w9"), "unknown-id"),
        (lambda p: p["moves"][0].update(spare=1), "unknown-key"),
        (lambda p: p["moves"][0].pop("lane"), "bad-value"),
        (lambda p: p["moves"][0].update(id="F0"), "duplicate-id"),
        (lambda p: p["drops"].clear(), "no-space"),
        (lambda p: p.update(start=3), "bad-value"),
        (lambda p: p["moves"][0].update(start_after=7), "bad-value"),
    ],
)
def test_check_names_the_rule_of_a_broken_plan(
    run: Run, tmp_path: Path, change: Callable[[Any], object], rule: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(mutated(change))
    ended = run(*tiny_check(path, "--json"))
    assert (ended.code, ended.err) == (1, "")
    assert ended.json["valid"] is False
    assert set(ended.json) == {"valid", "violations"}
    rules = {v["rule"] for v in ended.json["violations"]}
    # a lack of room may be named as such, or by the wait that then never ends
    assert rules & ({"no-space", "deadlock", "steady"} if rule == "no-space" else {rule})
    assert all(set(v) == {"rule", "where", "detail"} for v in ended.json["violations"])
    for_people = run(*tiny_check(path))
    assert for_people.code == 1
    assert "not valid" in for_people.out
    assert next(iter(rules)) in for_people.out


def test_a_list_is_json_but_no_plan(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("[]")
    ended = run(*tiny_check(path, "--json"))
    assert (ended.code, ended.json["valid"]) == (1, False)


# --- the process ---------------------------------------------------------------------------


def test_the_module_runs_as_a_command() -> None:
    ended = command(*tiny_check(GOOD_PLAN, "--json"))
    assert (ended.code, ended.json["valid"]) == (0, True)
    refused = command(*tiny_check("none.json"))
    refuse(refused, "none.json")


def test_help_names_every_flag() -> None:
    ended = command("plan", "--help")
    assert ended.code == 0
    for flag in ("--problem", "--machine", "--hardware", "--policy", "--seconds", "--json"):
        assert flag in ended.out


def test_tables_survive_a_locale_without_their_letters() -> None:
    ended = command(*tiny_plan(), env={"PYTHONIOENCODING": "ascii"})
    assert ended.code == 0
    assert "makespan" in ended.out


def test_a_closed_pipe_is_no_failure() -> None:
    script = f"{sys.executable} -m offcompile hardware | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0"
    assert done.stderr == ""


def test_ids_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    assert printable("a\x1b[2Jb\ud800\n") == "a\\x1b[2Jb\\ud800\n"
    text = TINY.read_text().replace("w1", "[red]w1[/red]\\u001b[2J")
    path = tmp_path / "p.json"
    path.write_text(text)
    ended = run("plan", "--problem", path, "--machine", MACHINE, "--seconds", "0.2")
    assert ended.code == 0
    assert "\x1b" not in ended.out
    assert "[red]w1[/red]\\x1b[2J" in ended.out


def test_hardware_lists_the_profiles(run: Run) -> None:
    ended = run("hardware")
    assert ended.code == 0
    for name in ("h200", "rtx4090", "gh200", "cpu"):
        assert name in ended.out


# --- the examples --------------------------------------------------------------------------


def test_the_demo_says_what_is_true_of_its_problem() -> None:
    """12.3 GiB when nothing moves: the claim of `make demo` and the README."""
    problem = loads_problem((PLANS / "gpt.json").read_text())
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(problem.ops):
        for t in op.operands:
            first.setdefault(t, i)
            last[t] = i
    always = ("weight", "state", "input")
    peak = max(
        op.workspace_bytes
        + sum(
            t.nbytes for t in problem.tensors if t.kind in always or first[t.id] <= i <= last[t.id]
        )
        for i, op in enumerate(problem.ops)
    )
    assert round(peak / 2**30, 1) == 12.3


def test_the_generator_still_gives_the_committed_problem() -> None:
    import runpy

    built = runpy.run_path(str(PLANS / "make_gpt.py"))["build"]()
    assert built == json.loads((PLANS / "gpt.json").read_text())


def test_the_examples_are_lawful() -> None:
    problem = loads_problem(TINY.read_text())
    machine = machine_from_toml(MACHINE.read_text())
    assert check_plan(problem, machine, loads_plan(GOOD_PLAN.read_text())).valid
    again = loads_machine(json.dumps({"tiers": [{"name": DEVICE}]}))
    assert again.tier[DEVICE].capacity_bytes is None
