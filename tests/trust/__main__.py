"""`python -m trust [NAME …] [--scale S] [--seed N]`, run in tests/: the long runs, and their table.

`make soak` runs them all at full length and keeps their rows in docs/trust.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence

from .rows import Row, keep, table

#: in the order of the table
PARTS = (
    "semantics",
    "modules",
    "models",
    "drawn_modules",
    "wild",
    "inductor",
    "ranks",
    "peaks",
    "simulation",
    "schedules",
    "faults",
    "soak",
    "fuzz",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trust", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="NAME", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--scale", type=float, default=1.0, help="1: the full length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep the rows in docs/trust.md")
    asked = parser.parse_args(arguments)
    if unknown := sorted(set(asked.parts) - set(PARTS)):
        parser.error(f"there is no {', '.join(unknown)} (there are {', '.join(PARTS)})")
    counted: dict[str, list[Row]] = {}
    for name in asked.parts or PARTS:
        began_s = time.process_time()
        part = importlib.import_module(f".{name}", __package__)
        counted[name] = part.rows(asked.scale, asked.seed)
        if asked.write:
            keep({name: counted[name]}, PARTS)
        print(f"{name}: {time.process_time() - began_s:.0f} s of processor time", flush=True)
    rows = [row for part in counted.values() for row in part]
    print(table(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
