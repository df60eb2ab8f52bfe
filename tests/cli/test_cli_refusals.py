"""The command line refuses broken files, wrong values and wrong usage, and names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_run import GOOD_PLAN, MACHINE, TINY, Run, refuse, running, tiny_check, tiny_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return running(capsys)


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
