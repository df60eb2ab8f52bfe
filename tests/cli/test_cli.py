"""The command line: what it prints, how it ends, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offcompile.cli import command as cli
from offcompile.ir import DEVICE
from offcompile.ir.jsonio import loads_machine, loads_plan, loads_problem, machine_from_toml
from offcompile.ir.textio import print_machine, print_plan, print_problem
from offcompile.ir.units import printable
from offcompile.planning.planner import check_plan

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "examples" / "plans"
TINY = PLANS / "tiny.json"
MACHINE = PLANS / "tiny.machine.toml"
GOOD_PLAN = PLANS / "tiny.plan.json"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=pytest.fail)


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Ended:
        code = cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return Ended(code, out, err)

    return run


def command(*arguments: object, env: dict[str, str] | None = None) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "offcompile", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def tiny_plan(*more: object) -> tuple[object, ...]:
    return ("plan", "--problem", TINY, "--machine", MACHINE, "--seconds", "0.5", *more)


def tiny_check(plan: object = GOOD_PLAN, *more: object) -> tuple[object, ...]:
    return ("check", "--problem", TINY, "--machine", MACHINE, "--plan", plan, *more)


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
    # what lacks room may be said as such or as what then waits for ever
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


# --- refusals ------------------------------------------------------------------------------


def refuse(ended: Ended, *said: str) -> None:
    """Exit 2, the words on stderr, no traceback."""
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
    for words in said:
        assert words in ended.err
    assert all(line.startswith("offcompile: ") for line in ended.err.splitlines())


BROKEN = {
    "empty": b"",
    "blank": b" \n",
    "not JSON": b"{'ops': []}",
    "cut off": b'{"ops": [',
    "two values": b"{} {}",
    "not UTF-8": b"\xff\xfe{}",
    "a NUL": b"\x00",
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "null": b"null",
    "a number": b"17",
    "a long number": b'{"tensors": [], "ops": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("noun", ["problem", "machine"])
def test_a_broken_file_is_refused(run: Run, tmp_path: Path, noun: str, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    files = {"problem": TINY, "machine": MACHINE} | {noun: path}
    given = ("--problem", files["problem"], "--machine", files["machine"], "--json")
    for arguments in (("plan", *given), ("check", *given, "--plan", GOOD_PLAN)):
        ended = run(*arguments)
        refuse(ended, "broken.json")
        assert list(ended.json) == ["error"]
        (first, *_) = ended.json["error"]["violations"]
        assert set(first) == {"rule", "where", "detail"}


@pytest.mark.parametrize(
    "content", [c for name, c in BROKEN.items() if name not in ("a list", "null", "a number")]
)
def test_a_plan_that_is_not_json_is_refused(run: Run, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    ended = run(*tiny_check(path, "--json"))
    refuse(ended, "broken.json")
    assert list(ended.json) == ["error"]


def test_a_plan_in_text_that_cannot_be_taken_apart_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text("mvoe m0 w0 host -> device on h2d\n")
    refuse(run(*tiny_check(path)), "plan.txt: line 1", "move")


@pytest.mark.parametrize("noun", ["problem", "machine", "plan"])
def test_missing_files_and_folders_are_named(run: Run, tmp_path: Path, noun: str) -> None:
    for path, why in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        files = {"problem": TINY, "machine": MACHINE, "plan": GOOD_PLAN} | {noun: path}
        arguments = [a for flag, file in files.items() for a in (f"--{flag}", file)]
        refuse(run("check", *arguments), f"{path}: the {noun} cannot be read: {why}")


@pytest.mark.parametrize("path", ["", "bad\0name"])
def test_names_that_are_no_files_are_refused(run: Run, path: str) -> None:
    refuse(run("plan", "--problem", path, "--machine", MACHINE), "the problem cannot be read")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"id": "w", "nbytes": -1, "kind": "weight"}', "nbytes"),
        ('{"id": "w", "nbytes": "4", "kind": "weight"}', "nbytes"),
        ('{"id": "w", "nbytes": 4.5, "kind": "weight"}', "nbytes"),
        ('{"id": "w", "nbytes": NaN, "kind": "weight"}', "nbytes"),
        ('{"id": "w", "nbytes": true, "kind": "weight"}', "nbytes"),
        ('{"id": "w", "nbytes": 4}', "kind"),
        ('{"id": "w", "nbytes": 4, "kind": "wieght"}', "weight"),
        ('{"id": "w", "nbytes": 4, "kind": "weight", "hom": "host"}', "hom"),
        ('{"id": "w", "nbytes": 4, "kind": "weight", "home": "hots"}', "hots"),
        ('{"id": "w", "id": "v", "nbytes": 4, "kind": "weight"}', "id"),
        ('{"id": 7, "nbytes": 4, "kind": "weight"}', "id"),
        ('{"id": "w", "nbytes": 4, "kind": "weight", "ratios": {"fp16": Infinity}}', "fp16"),
        ("7", "tensors[0]"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(
    run: Run, tmp_path: Path, row: str, said: str
) -> None:
    path = tmp_path / "problem.json"
    path.write_text(f'{{"tensors": [{row}], "ops": []}}')
    refuse(run("plan", "--problem", path, "--machine", MACHINE), "problem.json: tensors[0]", said)


def test_many_faults_are_counted_on_stderr_and_all_in_json(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps({"tensors": [7] * 50, "ops": []}))
    ended = run("plan", "--problem", path, "--machine", MACHINE, "--json")
    refuse(ended, "… and 30 more")
    assert len(ended.json["error"]["violations"]) == 50


def test_a_machine_in_toml_that_is_not_toml_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text('{"tiers": []}')
    refuse(run("plan", "--problem", TINY, "--machine", path), "machine.toml", "not TOML")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "required: COMMAND"),
        (("pln",), "invalid choice: 'pln'"),
        (("plan",), "--problem"),
        (("plan", "--problem", TINY), "--machine --hardware"),
        (("plan", "--problem", TINY, "--machine", MACHINE, "--hardware", "h200"), "not allowed"),
        (("check", "--problem", TINY, "--machine", MACHINE), "--plan"),
        (tiny_plan("--sconds", "3"), "--sconds"),
        (tiny_plan("--seconds", "-1"), "'-1' is not a number of seconds"),
        (tiny_plan("--seconds", "nan"), "'nan' is not a number of seconds"),
        (tiny_plan("--seconds", "inf"), "'inf' is not a number of seconds"),
        (tiny_plan("--seconds", "soon"), "'soon' is not a number of seconds"),
        (tiny_plan("--policy", "jiont"), "'joint'"),
        (tiny_plan("--policy", ""), "policy"),
        (tiny_plan("--policy", "weight_rotation:varaint=l2l"), "'variant'"),
        (tiny_plan("--policy", "weight_rotation:variant"), "needs a value"),
        (tiny_plan("--policy", "weight_rotation:variant=l3l"), "l3l"),
        (tiny_plan("--memory", "8 gigs"), "--memory: size: '8 gigs' is not a size"),
        (tiny_plan("--host-memory", "-1"), "--host-memory"),
        (tiny_plan("--disk"), "--disk: goes with --hardware"),
        (tiny_plan("--output", "/no/such/folder/plan.json"), "cannot be written there"),
        (("plan", "--problem", TINY, "--hardware", "rtx409"), "the nearest is 'rtx4090'"),
        (("plan", "--problem", TINY, "--hardware", "none.toml"), "cannot be read"),
        (("plan", "--problem", TINY, "--hardware", "l40s", "--memory", "1TB"), "44.40 GiB"),
    ],
)
def test_wrong_usage_is_refused_in_words(
    run: Run, arguments: tuple[object, ...], said: str
) -> None:
    refuse(run(*arguments), said)
    with_json = run(*arguments, "--json")
    refuse(with_json, said)
    assert with_json.json["error"]["violations"]


def test_a_budget_for_a_tier_the_machine_lacks_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"tiers": [{"name": "device"}]}')
    problem = tmp_path / "problem.json"
    problem.write_text('{"tensors": [], "ops": []}')
    arguments = ("--problem", problem, "--machine", path, "--host-memory", "1GiB")
    refuse(run("plan", *arguments), "no tier named 'host'")


NOISE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "nbytes", "kind", "tensors", "ops", "tiers", "name", "moves"])
            | st.text(max_size=5),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=NOISE, noun=st.sampled_from(["problem", "machine", "plan"]))
def test_no_json_brings_a_traceback(run: Run, tmp_path: Path, noise: object, noun: str) -> None:
    path = tmp_path / "noise.json"
    path.write_text(json.dumps(noise))
    files = {"problem": TINY, "machine": MACHINE, "plan": GOOD_PLAN} | {noun: path}
    arguments = [a for flag, file in files.items() for a in (f"--{flag}", file)]
    ended = run("check", *arguments, "--json")
    assert ended.code in (0, 1, 2)
    assert ("valid" in ended.json) == (ended.code < 2)


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
