"""`offcompile record`: runs a script, and writes a trace of its compiled graphs."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from .files import invalid


def add_record(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    record = commands.add_parser(
        "record", help="run a Python script and write a trace of its compiled graphs"
    )
    record.add_argument(
        "--output", required=True, metavar="FILE", help="the trace (.json, or .txt for lines)"
    )
    record.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module")
    record.add_argument("script", metavar="SCRIPT", help="what to run, as after `python`")
    record.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="its arguments")
    record.set_defaults(run=_record)


def _record(options: argparse.Namespace) -> int:
    script: str = options.script
    if not options.module and not os.path.isfile(script):
        raise invalid("bad-value", script, "there is no such script")
    from offcompile.run.recording import record

    before = sys.argv, sys.path[:]
    # like Python: the script can import modules beside it
    sys.path.insert(0, os.getcwd() if options.module else str(Path(script).resolve().parent))
    sys.argv = [script, *options.arguments]
    try:
        with record(options.output) as recording:
            if options.module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
    runs = len(recording.trace().runs)
    print(f"offcompile: {runs} runs of compiled graphs in {options.output}", file=sys.stderr)
    return 0
