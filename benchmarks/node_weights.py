"""Weights on the host once for two ranks: their memory, and how long updates take to arrive.

Run `python -m benchmarks.node_weights` (`--quick`: small, print only) for the table in `results/`.
Both ranks run on this machine over gloo. One run sends updated weights, the other has them in
memory that both ranks see; they take steps in turn. Every other step, broadcasts take as long as
over a link of 0.05 GB/s in each direction.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.sharded import read_arguments, run
from benchmarks.turns import MIB, machine

RESULT = Path(__file__).parent / "results" / "node_weights.md"
HOW = {"states": "host", "overlap": True}
RATE_GBPS = 0.05
KINDS = ("sent", "once")


# -- on a rank -------------------------------------------------------------------------------------


class SlowWork:
    """A collective that is over no sooner than a link would have it."""

    def __init__(self, work: Any, ready_at: float) -> None:
        self._work, self._ready_at = work, ready_at

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))


@contextmanager
def slow_link(broadcasts: Any) -> Iterator[None]:
    """Within the block, what a rank broadcasts goes over its link one after the other."""
    free_at: dict[int, float] = defaultdict(float)

    def slowly(tensor: Any, source: int, **how: Any) -> SlowWork:
        seconds = tensor.nbytes / RATE_GBPS / 1e9
        free_at[source] = max(free_at[source], time.perf_counter()) + seconds
        return SlowWork(broadcasts(tensor, source, **how), free_at[source])

    import torch.distributed as dist

    with patch.object(dist, "broadcast", slowly):
        yield


def mapped_bytes(parameters: Any) -> float:
    """Bytes of the files in which parameters lie, as this process maps them; a page of n mappings
    counts 1/n."""
    inodes, starts = set(), []
    found: dict[str, int] = defaultdict(int)
    head: list[str] = []
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if not words[0].endswith(":"):
                head = words
                start, stop = (int(part, 16) for part in words[0].split("-"))
                starts.append((start, stop, words[4]))
            elif words[0] == "Pss:":
                found[head[4]] += 1024 * int(words[1])
    for parameter in parameters:
        address = parameter.data_ptr()
        inodes |= {inode for start, stop, inode in starts if start <= address < stop}
    return sum(found[inode] for inode in inodes - {"0"})


def measured(task: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from benchmarks.activations_child import gpt
    from benchmarks.sharded_child import BATCH, LENGTH, Run
    from offcompile.optim.ranks import common_weights
    from offcompile.runtime.moves.weights import is_on_host

    case = gpt(task["width"], task["layers"], BATCH, LENGTH, 0.0)
    torch._dynamo.reset()
    with patch.object(common_weights, "why_not", lambda: "this run sends weights"):
        runs = {"sent": Run(case, task, sharded=True, **HOW)}
    runs["once"] = Run(case, task, sharded=True, **HOW)
    seconds: dict[str, list[float]] = defaultdict(list)
    broadcasts = dist.broadcast
    for turn in range(2 * task["rounds"]):
        for kind in KINDS if turn % 4 < 2 else reversed(KINDS):
            one, link = runs[kind], turn % 2 == 1
            sharding: Any = one.optimizer._core.sharding
            exchange = sharding.exchange
            name = f"{kind}, {'link' if link else 'here'}"

            def timed(exchange: Any = exchange, name: str = name) -> Any:
                dist.barrier()  # an exchange begins when the last rank comes
                began = time.perf_counter()
                found = exchange()
                seconds[name].append(time.perf_counter() - began)
                return found

            with (
                patch.object(sharding, "exchange", timed),
                slow_link(broadcasts) if link else nullcontext(),
            ):
                one.step()
            if not link:
                seconds[f"{kind}, step"].append(one.seconds[-1])
    held = {}
    for kind, one in runs.items():
        hosted = [p for p in one.forward.parameters() if is_on_host(p)]
        with torch.no_grad():
            sum(p.sum() for p in hosted)  # every page is mapped
        dist.barrier()
        held[kind] = mapped_bytes(hosted)
        dist.barrier()
    return {
        "title": case.title,
        "weight_bytes": sum(p.nbytes for p in hosted),
        "seconds": seconds,
        "held": held,
        "equal": runs["sent"].losses == runs["once"].losses,
    }


def child() -> None:
    import torch
    import torch.distributed as dist

    rank, task = int(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    distributed: Any = dist
    store = distributed.FileStore(f"{task['folder']}/store", task["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task["world"])
    print(json.dumps(measured(task)), flush=True)
    dist.destroy_process_group()


# -- the table -------------------------------------------------------------------------------------


def rows(ranks: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| weights | MiB on the host, of both | × their bytes | step | arrive in | over the link |",
        "|---|---|---|---|---|---|",
    ]
    nbytes = ranks[0]["weight_bytes"]
    for kind in KINDS:
        held = sum(rank["held"][kind] for rank in ranks)
        # a step is over when the slower rank's is
        step, here, link = (
            statistics.median(
                map(max, zip(*(rank["seconds"][f"{kind}, {of}"] for rank in ranks), strict=True))
            )
            for of in ("step", "here", "link")
        )
        name = "each rank its own, sent" if kind == "sent" else "once for both ranks"
        times = f"{step:.2f} s | {here:.3f} s | {link:.3f} s"
        lines.append(f"| {name} | {held / MIB:,.0f} | **{held / nbytes:.2f}** | {times} |")
    return lines


def main() -> None:
    asked = read_arguments(__doc__, rounds=9)
    width, rounds = (128, 3) if asked.quick else (256, asked.rounds)
    task = {"width": width, "layers": 8, "rounds": rounds, "spill": asked.spill}
    ranks = [lines[0] for lines in run(task, "benchmarks.node_weights")]
    text = TEXT.format(
        title=ranks[0]["title"],
        rows="\n".join(rows(ranks)),
        weights=ranks[0]["weight_bytes"] / MIB,
        equal="to the last bit" if all(rank["equal"] for rank in ranks) else "NOT",
        rate=RATE_GBPS,
        rounds=rounds,
        machine=machine(),
        load=os.getloadavg()[0],
    )
    print(text)
    if not asked.quick:
        RESULT.write_text(text)


TEXT = """\
# Weights once per node

{title}: {weights:,.0f} MiB of weights on the host. Two ranks with a core
each, over gloo; DDP around a model that is compiled with the smallest budget; AdamW of
`offcompile.optim` with `states="host"`, `overlap=True`, `sharded=True`.

{rows}

"MiB on the host" is by the system's account (`Pss` of the files in which weights lie, after every
page was read). "Arrive in" is the time in which ranks get the weights that others have updated, of
the slower rank, from when the last one has called `step()`; "over the link" with broadcasts that
take as long as over {rate} GB/s in each direction, which is simulated. Medians over {rounds} steps
of each kind, which took turns. Times are of a machine that other programs share. The losses of both
agree {equal}.

Machine: {machine}; load average {load:.0f} when it ended.
"""

if __name__ == "__main__":
    child() if sys.argv[1:] and sys.argv[1].isdigit() else main()
