"""States of the optimizer shared out over two ranks: what a rank keeps, and how long a step takes.

Run `python -m benchmarks.sharded` (`--quick`: small, print only) for the table in `results/`. Both
ranks run on this machine over gloo. In each row a run with all states on each rank and one with
half of them take steps in turn, so compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.turns import MIB, machine

RESULT = Path(__file__).parent / "results" / "sharded.md"
WORLD = 2
#: arguments of AdamW, by row
ROWS: dict[str, dict[str, Any]] = {
    "host, overlap": {"states": "host", "overlap": True},
    "host, overlap, clipped": {"states": "host", "overlap": True, "max_norm": 1.0},
    "host, after backward": {"states": "host"},
    "disk, overlap": {"states": "disk", "overlap": True},
}


def run(
    task: dict[str, Any], child: str = "benchmarks.sharded_child"
) -> list[list[dict[str, Any]]]:
    """Return the findings of each rank, one a row."""
    with tempfile.TemporaryDirectory(dir=task["spill"]) as folder:
        told = json.dumps(task | {"world": WORLD, "rows": ROWS, "folder": folder})
        module = [sys.executable, "-m", child]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [*module, str(rank), told], env=environment, stdout=subprocess.PIPE, text=True
            )
            for rank in range(WORLD)
        ]
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank has failed")
    return [[json.loads(line) for line in lines.splitlines()] for lines in said]


def rows(found: list[list[dict[str, Any]]]) -> list[str]:
    lines = [
        "| states | MiB a rank, all | MiB a rank, sharded | step, s | sharded, × |",
        "|---|---|---|---|---|",
    ]
    for name, ranks in zip(ROWS, zip(*found, strict=True), strict=True):
        whole = max(rank["whole_bytes"] for rank in ranks)
        shares = " and ".join(f"{rank['share_bytes'] / MIB:,.0f}" for rank in ranks)
        # a step is over when the slower rank's is
        plain, sharded = (
            [max(of) for of in zip(*(rank[kind] for rank in ranks), strict=True)]
            for kind in ("plain", "sharded")
        )
        ratio = statistics.median(a / b for a, b in zip(sharded, plain, strict=True))
        seconds = statistics.median(plain)
        lines.append(
            f"| {name} | {whole / MIB:,.0f} | {shares} | {seconds:.3f} | **{ratio:.2f}** |"
        )
    return lines


def read_arguments(about: str | None, rounds: int) -> argparse.Namespace:
    """The arguments of a benchmark of two ranks; `rounds`: as many unless told otherwise."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="small, print only")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--spill", default="/var/tmp", help="directory on a disk")
    return parser.parse_args()


def main() -> None:
    asked = read_arguments(__doc__, rounds=19)
    width, rounds = (64, 3) if asked.quick else (512, asked.rounds)
    task = {"width": width, "layers": 8, "rounds": rounds, "spill": asked.spill}
    found = run(task)
    text = TEXT.format(
        title=found[0][0]["title"],
        rows="\n".join(rows(found)),
        weights=found[0][0]["weight_bytes"] / MIB,
        equal="to the last bit" if all(f["equal"] for rank in found for f in rank) else "NOT",
        rounds=rounds,
        machine=machine(),
        load=os.getloadavg()[0],
    )
    print(text)
    if not asked.quick:
        RESULT.write_text(text)


TEXT = """\
# States shared out over ranks

{title}: {weights:,.0f} MiB of weights. Two ranks with a core each,
over gloo; DDP around a model that is compiled with the smallest budget, so its weights are on the
host; AdamW of `offcompile.optim`.

{rows}

"MiB a rank" is by the optimizer's own account. A step is forward, backward, update and `zero_grad`,
of the slower rank; ratios are medians over {rounds} rounds of a step of each kind. The losses of
both agree {equal}. Both ranks are on one machine, so weights on the host are there once
and updated ones need not be sent: over a network that takes as long as the weights take to send.

Machine: {machine}; load average {load:.0f} when it ended.
"""

if __name__ == "__main__":
    main()
