"""Runs cases on one of several ranks: `python CHILD RANK STORE ASKED`.

ASKED is JSON: the number of ranks, and names of cases. Each case prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from freeze_imports import freeze_imports


def run_cases(cases: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    world, names = json.loads(sys.argv[3])
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], world)
    torch.set_num_threads(1)
    freeze_imports()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in names:
        print(json.dumps(cases[name]()), flush=True)
    dist.destroy_process_group()
