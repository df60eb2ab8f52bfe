"""Runs the command line, here or in a process of its own, and keeps what it said."""

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

from offcompile.cli import command as cli

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


def running(capsys: pytest.CaptureFixture[str]) -> Run:
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


def refuse(ended: Ended, *said: str) -> None:
    """Exit 2, the words on stderr, no traceback."""
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
    for words in said:
        assert words in ended.err
    assert all(line.startswith("offcompile: ") for line in ended.err.splitlines())
