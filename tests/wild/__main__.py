"""`python -m wild [NAME …]`, run in tests/: the programs whose names hold one of these; all.

Prints a verdict for each; with --json, as lines that other processes read.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from .families import load
from .judge import judge, judge_by_inductor


def main() -> int:
    parser = argparse.ArgumentParser(prog="wild", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inductor", action="store_true", help="near, with Inductor's kernels")
    parser.add_argument("--exactly", action="store_true", help="names are whole names")
    parser.add_argument("--list", action="store_true", help="their names, and nothing is run")
    asked = parser.parse_args()
    broken = 0
    for name, program in load().items():
        if asked.names and not _asked_for(name, asked.names, asked.exactly):
            continue
        if asked.list:
            print(name)
            continue
        verdict = (judge_by_inductor if asked.inductor else judge)(program)
        broken += not verdict.holds
        if asked.json:
            print(json.dumps(asdict(verdict)), flush=True)
        else:
            figures = f"{verdict.moves} moves, {verdict.bytes_out:,} bytes out"
            print(f"{name}: {verdict.kind}, {verdict.why or figures}", flush=True)
    return 1 if broken else 0


def _asked_for(name: str, names: list[str], exactly: bool) -> bool:
    return name in names if exactly else any(part in name for part in names)


if __name__ == "__main__":
    sys.exit(main())
