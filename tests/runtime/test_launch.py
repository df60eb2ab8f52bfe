"""`offcompile run` starts a script with malloc set up; what the user set stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offcompile.runtime.memory.malloc import tensor_memory
from offcompile.runtime.memory.malloc.advice import malloc_leaves_holes
from offcompile.runtime.memory.malloc.launch import NO_CACHE, VARIABLE, environment

SCRIPT = "import os, sys; print(os.environ['GLIBC_TUNABLES'], *sys.argv[1:]); sys.exit(7)"


def test_the_cache_is_switched_off_beside_what_is_set() -> None:
    assert environment({"A": "b"}) == {"A": "b", VARIABLE: f"{NO_CACHE}=0"}
    given = {VARIABLE: "glibc.malloc.arena_max=2"}
    assert environment(given)[VARIABLE] == f"glibc.malloc.arena_max=2:{NO_CACHE}=0"


def test_what_the_user_set_stays() -> None:
    given = {VARIABLE: f"{NO_CACHE}=3"}
    assert environment(given) == given


@pytest.mark.parametrize(
    ("version", "given", "allocator", "holes"),
    [
        ((2, 36), {}, False, True),
        ((2, 36), {VARIABLE: f"{NO_CACHE}=0"}, False, False),
        ((2, 36), {VARIABLE: f"{NO_CACHE}=7"}, False, True),
        ((2, 36), {}, True, False),
        ((2, 39), {}, False, False),
        (None, {}, False, False),
    ],
)
def test_who_is_told_to_start_otherwise(
    version: tuple[int, int] | None,
    given: dict[str, str],
    allocator: bool,
    holes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_memory, "glibc_version", lambda: version)
    monkeypatch.setattr(tensor_memory, "will_fit", lambda: allocator)
    assert malloc_leaves_holes(given) is holes


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offcompile", "run", *arguments]
    clean = {k: v for k, v in os.environ.items() if k != VARIABLE}
    clean["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=clean, timeout=300)


def test_a_script_runs_with_its_arguments_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for how in (["script.py"], ["-m", "script"]):
        done = run(*how, "--width", "-3", cwd=tmp_path)
        assert done.stdout == f"{NO_CACHE}=0 --width -3\n", done.stderr
        assert done.returncode == 7


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run("nothing.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "offcompile: nothing.py: there is no such script\n"
