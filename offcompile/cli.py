"""The command line: `offcompile plan`, `offcompile check`, `offcompile hardware`.

Exit codes: 0 done; 1 `check` found violations; 2 bad input or usage; 3 no plan fits; 130
interrupted. Heavy modules are imported where they are used, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from offcompile.ir import (
    DEVICE,
    HOST,
    Infeasible,
    InvalidInput,
    Machine,
    Plan,
    Problem,
    Timeline,
    Violation,
)

DONE, VIOLATIONS, BAD_INPUT, INFEASIBLE, INTERRUPTED = 0, 1, 2, 3, 130

_T = TypeVar("_T")


class _BadPlan(Exception):
    """A plan file that reads as JSON but describes no plan: `check`'s answer, not its failure."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        super().__init__()
        self.violations = violations


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except InvalidInput as error:
        return _refuse(error, as_json="--json" in arguments)
    except KeyboardInterrupt:
        print("offcompile: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader has what it wanted; keep the interpreter from flushing into the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    return code


def _refuse(error: InvalidInput, as_json: bool) -> int:
    for violation in error.violations:
        _complain(f"{violation.where}: {violation.detail}")
    if as_json:
        _print_json({"error": {"violations": _violations_json(error.violations)}})
    return BAD_INPUT


# --- options -------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage like any other bad input."""

    def error(self, message: str) -> NoReturn:
        hint = f"{message} (`{self.prog} --help` shows the options)"
        raise _invalid("bad-value", "command line", hint)


def _parser() -> _Parser:
    parser = _Parser(
        prog="offcompile",
        description="Plan which tensors leave the device, and when, before anything runs.",
    )
    parser.add_argument("--version", action="version", version=f"offcompile {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)

    plan = commands.add_parser("plan", help="make a plan for a problem under a memory budget")
    _add_inputs(plan)
    plan.add_argument(
        "--policy",
        default="joint",
        metavar="NAME[:key=value,…]",
        help="how to decide (default: %(default)s)",
    )
    plan.add_argument(
        "--seconds",
        type=_seconds,
        default=15.0,
        metavar="S",
        help="time for the search (default: %(default)s)",
    )
    plan.add_argument(
        "--output", metavar="FILE", help="also write the plan alone, for `check` (.json or .txt)"
    )
    plan.set_defaults(run=_plan)

    check = commands.add_parser("check", help="say whether a plan is lawful, and what it costs")
    _add_inputs(check)
    check.add_argument("--plan", required=True, metavar="FILE", help="the plan (.json or .txt)")
    check.set_defaults(run=_check)

    hardware = commands.add_parser("hardware", help="list the hardware profiles")
    hardware.set_defaults(run=_hardware)
    return parser


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--problem", required=True, metavar="FILE", help="tensors and ops (.json or .txt)"
    )
    machine = parser.add_mutually_exclusive_group(required=True)
    machine.add_argument("--machine", metavar="FILE", help="the machine (.json, .toml or .txt)")
    machine.add_argument("--hardware", metavar="NAME", help="a profile's name, or its .toml file")
    parser.add_argument("--memory", metavar="SIZE", help="device budget, as in 8GiB")
    parser.add_argument("--host-memory", metavar="SIZE", help="host budget")
    parser.add_argument("--disk", action="store_true", help="with --hardware: add its disk tier")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("offcompile")
    except PackageNotFoundError:
        return "(not installed)"


# --- commands ------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> int:
    problem, machine = _read_inputs(options)
    output = None if options.output is None else _open_output(options.output)
    from offcompile.planner import plan_problem

    try:
        with _progress("planning") as say:
            result = plan_problem(problem, machine, options.policy, options.seconds, say)
    except Infeasible as error:
        return _say_infeasible(error, options.json)
    if output is not None:
        _write_plan(output, result.plan)
    if options.json:
        from offcompile.ir.jsonio import plan_to_json

        _print_json(
            {
                "plan": plan_to_json(result.plan),
                **_cost_json(result.timeline),
                "lower_bound_us": result.lower_bound_us,
                # a bound of zero bounds nothing
                "gap": result.gap if math.isfinite(result.gap) else None,
                "policy": result.policy,
                "seconds": result.seconds,
            }
        )
    else:
        from offcompile.cli_tables import show_plan

        show_plan(problem, machine, result)
    return DONE


def _check(options: argparse.Namespace) -> int:
    problem, machine = _read_inputs(options)
    try:
        plan = _read_plan(options.plan)
    except _BadPlan as error:
        return _say_check(problem, machine, error.violations, None, options.json)
    from offcompile.planner import check_plan

    with _progress("checking"):
        result = check_plan(problem, machine, plan)
    return _say_check(problem, machine, result.violations, result.timeline, options.json)


def _say_check(
    problem: Problem,
    machine: Machine,
    violations: Sequence[Violation],
    timeline: Timeline | None,
    as_json: bool,
) -> int:
    if not as_json:
        from offcompile.cli_tables import show_check

        show_check(problem, machine, violations, timeline)
    elif violations or timeline is None:
        _print_json({"valid": False, "violations": _violations_json(violations)})
    else:
        _print_json({"valid": True, **_cost_json(timeline)})
    return VIOLATIONS if violations else DONE


def _say_infeasible(error: Infeasible, as_json: bool) -> int:
    if as_json:
        _print_json(
            {
                "infeasible": {
                    "reason": error.reason,
                    "needed_bytes": error.needed_bytes,
                    "smallest_change": error.smallest_change,
                }
            }
        )
    else:
        _complain(f"no plan fits: {error.reason}")
        if error.smallest_change:
            _complain(f"what would help: {error.smallest_change}")
    return INFEASIBLE


def _hardware(_: argparse.Namespace) -> int:
    from offcompile.cli_tables import show_profiles
    from offcompile.hardware import list_profiles, load_profile

    show_profiles([load_profile(name) for name in list_profiles()])
    return DONE


# --- input ---------------------------------------------------------------------------------


def _read_inputs(options: argparse.Namespace) -> tuple[Problem, Machine]:
    from offcompile.hardware import parse_bytes
    from offcompile.ir.jsonio import check_homes, loads_problem
    from offcompile.ir.text import parse_problem

    def size(flag: str, text: str | None) -> int | None:
        return None if text is None else _named(flag, lambda: parse_bytes(text))

    memory_bytes = size("--memory", options.memory)
    host_bytes = size("--host-memory", options.host_memory)
    problem = _read(options.problem, "problem", {".json": loads_problem, ".txt": parse_problem})
    machine = _machine(options, memory_bytes, host_bytes)
    if homeless := check_homes(problem, machine):
        raise _in(options.problem, homeless)
    return problem, machine


def _machine(
    options: argparse.Namespace, memory_bytes: int | None, host_bytes: int | None
) -> Machine:
    if options.hardware is not None:
        from offcompile.hardware import load_profile, to_machine

        return to_machine(load_profile(options.hardware), memory_bytes, host_bytes, options.disk)
    from offcompile.ir.jsonio import loads_machine, machine_from_toml
    from offcompile.ir.text import parse_machine

    if options.disk:
        raise _invalid("bad-value", "--disk", "goes with --hardware; a machine file has its tiers")
    forms = {".json": loads_machine, ".toml": machine_from_toml, ".txt": parse_machine}
    machine = _read(options.machine, "machine", forms)
    for flag, tier, budget in (
        ("--memory", DEVICE, memory_bytes),
        ("--host-memory", HOST, host_bytes),
    ):
        if budget is not None and tier not in machine.tier:
            raise _invalid("unknown-id", flag, f"{options.machine} has no tier named {tier!r}")
        if budget is not None:
            machine = machine.with_capacity(tier, budget)
    return machine


def _read_plan(path: str) -> Plan:
    from offcompile.ir.jsonio import loads_plan
    from offcompile.ir.text import parse_plan

    def loads(text: str) -> Plan:
        try:
            return loads_plan(text)
        except InvalidInput as error:
            if _is_json(text):
                raise _BadPlan(error.violations) from None
            raise

    return _read(path, "plan", {".json": loads, ".txt": parse_plan})


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _read(path: str, noun: str, forms: Mapping[str, Callable[[str], _T]]) -> _T:
    """What the file holds; its form goes by the suffix and is JSON where that says nothing."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise _invalid("bad-value", path, f"the {noun} cannot be read: {reason}") from None
    parse = forms.get(Path(path).suffix.lower(), forms[".json"])
    return _named(path, lambda: parse(text))


def _named(where: str, read: Callable[[], _T]) -> _T:
    """What `read` gives; what it refuses is said to stand in `where`."""
    try:
        return read()
    except InvalidInput as error:
        raise _in(where, error.violations) from None


def _in(path: str, violations: Sequence[Violation]) -> InvalidInput:
    return InvalidInput([Violation(v.rule, f"{path}: {v.where}", v.detail) for v in violations])


def _invalid(rule: str, where: str, detail: str) -> InvalidInput:
    return InvalidInput([Violation(rule, where, detail)])


# --- output --------------------------------------------------------------------------------


@contextmanager
def _progress(doing: str) -> Iterator[Callable[[str], None] | None]:
    """A line on stderr with the time gone by and what was found so far; None off a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(), text, TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda found: bar.update(task, description=f"{doing}: {found}")


def _open_output(path: str) -> Path:
    """Refused before the search, not after it."""
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise _invalid("bad-value", path, "the plan cannot be written there; name a file")
    return target


def _write_plan(target: Path, plan: Plan) -> None:
    from offcompile.ir.jsonio import plan_to_json
    from offcompile.ir.text import print_plan

    if target.suffix.lower() == ".txt":
        text = print_plan(plan)
    else:
        text = json.dumps(plan_to_json(plan), indent=1) + "\n"
    try:
        target.write_text(text, "utf-8")
    except OSError as error:
        raise _invalid(
            "bad-value", str(target), f"the plan cannot be written: {error.strerror}"
        ) from None


def _cost_json(timeline: Timeline) -> dict[str, object]:
    return {
        "makespan_us": timeline.makespan_us,
        "peak_bytes": dict(timeline.peak_bytes),
    }


def _violations_json(violations: Sequence[Violation]) -> list[dict[str, str]]:
    return [{"rule": v.rule, "where": v.where, "detail": v.detail} for v in violations]


def _print_json(value: dict[str, object]) -> None:
    print(json.dumps(value, allow_nan=False))


def _complain(text: str) -> None:
    """To stderr, with what could steer a terminal spelt out."""
    from offcompile.cli_tables import printable

    print(f"offcompile: {printable(text)}", file=sys.stderr)
