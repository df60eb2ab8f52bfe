"""The command line: `offcompile fit`, `plan`, `check`, `hardware`, `doctor`, `record` and `run`.

Exit codes: 0 done; 1 `check` found violations; 2 bad input or usage; 3 no plan fits; 130
interrupted. Commands import heavy modules only when they use them, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from offcompile.ir import (
    Infeasible,
    InvalidInput,
    Machine,
    OffloadError,
    Timeline,
    Violation,
)
from offcompile.ir.jsonio import plan_to_json
from offcompile.ir.units import printable
from offcompile.machine.hardware_toml import write_profile

from .files import (
    BadPlan,
    invalid,
    open_output,
    read_inputs,
    read_plan,
    write_plan,
)
from .fit import add_fit
from .record import add_record

DONE, VIOLATIONS, BAD_INPUT, INFEASIBLE, INTERRUPTED = 0, 1, 2, 3, 130

COMPLAINTS_SHOWN = 20


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a plain C locale has no "µ"
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except InvalidInput as error:
        return _refuse(error, as_json="--json" in arguments)
    except OffloadError as error:
        _complain(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        print("offcompile: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader has closed the pipe; keep the interpreter from flushing into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    return code


def _refuse(error: InvalidInput, as_json: bool) -> int:
    for violation in error.violations[:COMPLAINTS_SHOWN]:
        _complain(f"{violation.where}: {violation.detail}")
    if (more := len(error.violations) - COMPLAINTS_SHOWN) > 0:
        _complain(f"… and {more} more (--json lists all)")
    if as_json:
        _print_json({"error": {"violations": _violations_json(error.violations)}})
    return BAD_INPUT


# --- options -------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage like any other bad input."""

    def error(self, message: str) -> NoReturn:
        hint = f"{message} (`{self.prog} --help` shows the options)"
        raise invalid("bad-value", "command line", hint)


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
    plan.add_argument(
        "--html", metavar="FILE", help="also write a page that shows the plan, for any browser"
    )
    plan.set_defaults(run=_plan)

    check = commands.add_parser("check", help="say whether a plan is lawful, and what it costs")
    _add_inputs(check)
    check.add_argument("--plan", required=True, metavar="FILE", help="the plan (.json or .txt)")
    check.set_defaults(run=_check)

    hardware = commands.add_parser("hardware", help="list the hardware profiles")
    hardware.set_defaults(run=_hardware)

    doctor = commands.add_parser(
        "doctor", help="measure this machine for planning, and say what limits it"
    )
    doctor.add_argument(
        "--spill",
        action="append",
        default=[],
        metavar="DIR",
        help="a directory that tensors may move to; may be given again (default: as in training)",
    )
    doctor.add_argument("--quick", action="store_true", help="measure each figure more briefly")
    doctor.add_argument("--refresh", action="store_true", help="measure again what is known")
    doctor.add_argument(
        "--output", metavar="FILE.toml", help="also write the profile, for `--hardware`"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)

    add_fit(commands)
    add_record(commands)

    run = commands.add_parser(
        "run", help="start a Python script with malloc set up for moving tensors"
    )
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module")
    run.add_argument("script", metavar="SCRIPT", help="what to run, as after `python`")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="its arguments")
    run.set_defaults(run=_run)
    return parser


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--problem", metavar="FILE", help="tensors and ops (.json or .txt)")
    source.add_argument(
        "--trace", metavar="FILE", help="what `record` wrote, taken as one long problem"
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
    problem, machine = read_inputs(options)
    output = None if options.output is None else open_output(options.output)
    page = None if options.html is None else open_output(options.html)
    from offcompile.planning.planner import plan_problem

    try:
        with _progress("planning") as say:
            result = plan_problem(problem, machine, options.policy, options.seconds, say)
    except Infeasible as error:
        return _say_infeasible(error, options.json)
    if output is not None:
        write_plan(output, result.plan)
    if page is not None:
        from offcompile.report.page import save_plan

        save_plan(page, Path(options.problem or options.trace).stem, problem, machine, result)
    if options.json:
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
        from .tables import show_plan

        show_plan(problem, machine, result)
    return DONE


def _check(options: argparse.Namespace) -> int:
    problem, machine = read_inputs(options)
    try:
        plan = read_plan(options.plan)
    except BadPlan as error:
        return _say_check(machine, error.violations, None, options.json)
    from offcompile.planning.planner import check_plan

    with _progress("checking"):
        result = check_plan(problem, machine, plan)
    return _say_check(machine, result.violations, result.timeline, options.json)


def _say_check(
    machine: Machine,
    violations: Sequence[Violation],
    timeline: Timeline | None,
    as_json: bool,
) -> int:
    if not as_json:
        from .tables import show_check

        show_check(machine, violations, timeline)
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


def _run(options: argparse.Namespace) -> int:
    from offcompile.runtime.memory.malloc.launch import start

    if not options.module and not os.path.exists(options.script):
        raise invalid("bad-value", options.script, "there is no such script")
    start([*(["-m"] if options.module else []), options.script, *options.arguments])


def _hardware(_: argparse.Namespace) -> int:
    from offcompile.machine.hardware import list_profiles, load_profile

    from .tables import show_profiles

    show_profiles([load_profile(name) for name in list_profiles()])
    return DONE


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import doctor

    output = None if options.output is None else doctor.open_output(options.output)
    directories = doctor.spill_directories(options.spill)
    try:
        with _progress("examining this machine") as say:
            found = doctor.examine(
                directories, options.quick, options.refresh, say or (lambda text: None)
            )
    except OffloadError as error:
        raise invalid("bad-value", "doctor", str(error)) from None
    paths = {} if output is None else doctor.output_paths(found, output)
    for path, profile in paths.items():
        write_profile(profile, path)
    if options.json:
        _print_json(doctor.to_json(found, list(paths)))
    else:
        from .doctor.tables import show_examination

        show_examination(found, list(paths))
    return DONE


# --- output --------------------------------------------------------------------------------


def _cost_json(timeline: Timeline) -> dict[str, object]:
    return {
        "makespan_us": timeline.makespan_us,
        "peak_bytes": dict(timeline.peak_bytes),
    }


def _violations_json(violations: Sequence[Violation]) -> list[dict[str, str]]:
    return [{"rule": v.rule, "where": v.where, "detail": v.detail} for v in violations]


def _print_json(value: dict[str, object]) -> None:
    print(json.dumps(value, allow_nan=False))


@contextmanager
def _progress(doing: str) -> Iterator[Callable[[str], None] | None]:
    """Show elapsed time and findings so far on one line of stderr; None if not a terminal."""
    from offcompile.runtime.base.progress import Progress

    with Progress(doing) as progress:
        yield progress if progress.shown else None


def _complain(text: str) -> None:
    """Print to stderr, with terminal control characters escaped."""
    print(f"offcompile: {printable(text)}", file=sys.stderr)
