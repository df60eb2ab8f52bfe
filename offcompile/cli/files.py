"""Reads and writes the command line's files: problems, machines and plans in all formats.

Unreadable or unusable files raise `InvalidInput`, whose violations name the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from offcompile.ir import DEVICE, HOST, InvalidInput, Machine, Plan, Problem, Violation
from offcompile.ir.jsonio import (
    check_homes,
    loads_machine,
    loads_plan,
    loads_problem,
    machine_from_toml,
    plan_to_json,
)
from offcompile.ir.reading import MOST_BYTES, read_bounded
from offcompile.ir.textio import parse_machine, parse_plan, parse_problem, print_plan
from offcompile.ir.traceio import loads_trace, parse_trace
from offcompile.machine.hardware import load_profile, parse_bytes, to_machine

_T = TypeVar("_T")


class BadPlan(Exception):
    """Raised for JSON that is no valid plan, which is a result of `check`, not a bad input."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__()
        self.violations = violations


def read_inputs(options: argparse.Namespace) -> tuple[Problem, Machine]:
    def size(flag: str, text: str | None) -> int | None:
        return None if text is None else _named(flag, lambda: parse_bytes(text))

    memory_bytes = size("--memory", options.memory)
    host_bytes = size("--host-memory", options.host_memory)
    problem = _problem(options)
    machine = _machine(options, memory_bytes, host_bytes)
    if homeless := check_homes(problem, machine):
        raise _in(options.problem or options.trace, homeless)
    return problem, machine


def _problem(options: argparse.Namespace) -> Problem:
    if options.trace is None:
        return _read(options.problem, "problem", {".json": loads_problem, ".txt": parse_problem})
    from offcompile.passes.correlation.problem import problem_of

    return problem_of(_read(options.trace, "trace", {".json": loads_trace, ".txt": parse_trace}))


def _machine(
    options: argparse.Namespace, memory_bytes: int | None, host_bytes: int | None
) -> Machine:
    if options.hardware is not None:
        return to_machine(load_profile(options.hardware), memory_bytes, host_bytes, options.disk)
    if options.disk:
        raise invalid("bad-value", "--disk", "goes with --hardware; a machine file has its tiers")
    forms = {".json": loads_machine, ".toml": machine_from_toml, ".txt": parse_machine}
    machine = _read(options.machine, "machine", forms)
    for flag, tier, budget in (
        ("--memory", DEVICE, memory_bytes),
        ("--host-memory", HOST, host_bytes),
    ):
        if budget is not None and tier not in machine.tier:
            raise invalid("unknown-id", flag, f"{options.machine} has no tier named {tier!r}")
        if budget is not None:
            machine = machine.with_capacity(tier, budget)
    return machine


def read_plan(path: str) -> Plan:
    def loads(text: str) -> Plan:
        try:
            return loads_plan(text)
        except InvalidInput as error:
            if _is_json(text):
                raise BadPlan(error.violations) from None
            raise

    return _read(path, "plan", {".json": loads, ".txt": parse_plan})


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _read(path: str, noun: str, forms: Mapping[str, Callable[[str], _T]]) -> _T:
    """Parse a file by its suffix, as JSON if the suffix is unknown."""
    try:
        text = read_bounded(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise invalid("bad-value", path, f"the {noun} cannot be read: {reason}") from None
    parse = forms.get(Path(path).suffix.lower(), forms[".json"])
    return _named(path, lambda: parse(text))


def _named(where: str, read: Callable[[], _T]) -> _T:
    """Call `read`; prefix its violations with `where`."""
    try:
        return read()
    except InvalidInput as error:
        raise _in(where, error.violations) from None


def _in(path: str, violations: Sequence[Violation]) -> InvalidInput:
    return InvalidInput([Violation(v.rule, f"{path}: {v.where}", v.detail) for v in violations])


def invalid(rule: str, where: str, detail: str) -> InvalidInput:
    return InvalidInput([Violation(rule, where, detail)])


def open_output(path: str) -> Path:
    """Check the output path before the search. Raises `InvalidInput`."""
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise invalid("bad-value", path, "the plan cannot be written there; name a file")
    return target


def write_plan(target: Path, plan: Plan) -> None:
    if target.suffix.lower() == ".txt":
        text = print_plan(plan)
    else:
        text = json.dumps(plan_to_json(plan), indent=1) + "\n"
    try:
        target.write_text(text, "utf-8")
    except OSError as error:
        raise invalid(
            "bad-value", str(target), f"the plan cannot be written: {error.strerror}"
        ) from None
