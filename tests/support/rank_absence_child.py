"""One of two ranks under DDP, one of which ends in the middle of training.

`python rank_absence_child.py RANK STORE ASKED` prints a line of JSON: what the others were told.
ASKED is JSON, too: the number of ranks, and how the last one ends (raises, killed, leaves; with
`first`, before its first forward, and no rank loses patience; late: it begins after the others have
looked for it, and does not end).
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from freeze_imports import freeze_imports
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offcompile.ir import OffloadError
from offcompile.run.ranks import absence, agreement, meeting, reduction

STEPS, LAST, WIDTH = 4, 2, 32
OPTIONS = {"memory": "1GiB", "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}


def end(how: str) -> None:
    if how.startswith("raises"):
        raise ValueError("a bad batch")
    if how.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)


def begin_late(rank: int, world: int, store: dist.Store) -> None:
    """Begin once rank 0 has looked three times if the last rank is still there."""
    absence._WAIT_S = 0.2
    looks, looked = list[bool](), absence.is_closed

    def looking(other: int) -> bool:
        looks.append(looked(other))
        if len(looks) == 3:
            store.set("has looked", str(any(looks)))
        return looks[-1]

    absence.is_closed = looking
    if rank == world - 1:
        assert store.get("has looked") == b"False"


def train(rank: int, world: int, how: str, store: dist.Store) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    ddp = DistributedDataParallel(torch.compile(model, backend="offcompile", options=OPTIONS))
    if how == "late":
        begin_late(rank, world, store)
    last = 0 if how.endswith("first") else LAST
    for step in range(STEPS):
        if step == last and rank == world - 1 and how != "late":
            end(how)
        ddp(torch.randn(8, WIDTH)).pow(2).mean().backward()


def main() -> None:
    world, how = json.loads(sys.argv[3])
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], world)
    torch.set_num_threads(1)
    if how.endswith("first"):
        agreement.LONGEST_S = reduction.LONGEST_S = meeting.LONGEST_PLANNING_S = 1e6
    freeze_imports()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        train(rank, world, how, store)
        print(json.dumps({"said": "nothing"}), flush=True)
    except OffloadError as error:
        print(json.dumps({"said": str(error)}), flush=True)
    # no goodbye: the group is broken


if __name__ == "__main__":
    main()
