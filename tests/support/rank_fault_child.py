"""One of several ranks under DDP, one of which fails at a drawn moment.

`python rank_fault_child.py RANK STORE ASKED` prints a line of JSON when the fault happens here, and
one with what this rank has raised; ASKED is JSON, too: a directory, and fields of `Fault`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rank_faults import LONG_S, SHORT_S, STEPS, Fault
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from offcompile import optim
from offcompile.optim import checkpoints
from offcompile.optim.core import Core
from offcompile.optim.ranks import roll_call
from offcompile.run.ranks import agreement, meeting, reduction
from offcompile.run.ranks.agreement import Agreement
from offcompile.runtime.ranks.gradient_reducer import GradientReducer

WIDTH = 64
#: how long a slow rank takes
SLOW_S = 1.0


class Net(nn.Module):
    def __init__(self, is_odd: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.is_odd = is_odd

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(torch.sigmoid(x) if self.is_odd else torch.relu(x))


def tell(**said: Any) -> None:
    # ranks of one machine have this clock in common
    print(json.dumps({"at": time.monotonic(), **said}), flush=True)


class Failing:
    """Fails when the moment of its fault has come."""

    def __init__(self, fault: Fault, rank: int) -> None:
        self.fault, self.is_here, self.step = fault, rank == fault.who, 0

    def at(self, moment: str) -> None:
        fault = self.fault
        if not self.is_here or (moment, self.step) != (fault.moment, fault.step):
            return
        if fault.kind not in ("killed", "raises", "slow", "stuck"):
            return
        self.is_here = False
        tell(fault=fault.kind)
        if fault.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "raises":
            raise ValueError("a drawn fault")
        time.sleep(SLOW_S if fault.kind == "slow" else LONG_S)

    def before(self, owner: Any, name: str, moment: str) -> None:
        """Have the moment come whenever this function is called."""
        function: Callable[..., Any] = getattr(owner, name)

        def called(*args: Any, **more: Any) -> Any:
            self.at(moment)
            return function(*args, **more)

        setattr(owner, name, called)


def optimizer_for(fault: Fault, model: nn.Module) -> Any:
    if fault.optimizer == "torch":
        return torch.optim.AdamW(model.parameters(), 1e-3)
    overlap, sharded = "overlap" in fault.optimizer, "sharded" in fault.optimizer
    return optim.AdamW(model.parameters(), 1e-3, overlap=overlap, sharded=sharded)


def train(fault: Fault, failing: Failing, folder: str) -> None:
    here = failing.is_here
    torch.manual_seed(0)
    model = Net(is_odd=here and fault.kind == "odd graph")
    memory = "100KiB" if here and fault.kind == "infeasible" else fault.memory
    options = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05, "spill": folder}
    options["memory"] = memory
    failing.before(Agreement, "meeting", "compile")
    failing.before(Agreement, "stands", "planned")
    failing.before(GradientReducer, "_send", "backward")
    failing.before(GradientReducer, "_receive", "reducing")
    failing.before(Core, "begin", "updating")
    failing.before(checkpoints, "own_state", "state_dict")
    inner: Any = torch.compile(model, backend="offcompile", options=options)
    forward = DistributedDataParallel(inner)
    optimizer = optimizer_for(fault, model)
    rows = 6 if here and fault.kind == "odd batch" else 4
    for step in range(STEPS):
        failing.step = step
        failing.at("forward")
        forward(torch.randn(rows, WIDTH)).pow(2).mean().backward()
        failing.at("step")
        if fault.optimizer == "torch":
            failing.at("updating")
        optimizer.step()
        optimizer.zero_grad()
        if fault.optimizer == "torch":
            failing.at("state_dict")
        optimizer.state_dict()
        failing.at("between")


def main() -> None:
    os.setsid()  # so that what it leaves behind can be found
    rank = int(sys.argv[1])
    folder, fields = json.loads(sys.argv[3])
    fault = Fault(**fields)
    torch.set_num_threads(1)
    if fault.kind in ("stuck", "odd graph"):
        for module in (agreement, reduction, roll_call, meeting):
            for name in ("LONGEST_S", "LONGEST_PLANNING_S"):
                if hasattr(module, name):
                    setattr(module, name, SHORT_S / 2)
    seconds = SHORT_S if fault.kind == "stuck" else LONG_S
    store = dist.FileStore(sys.argv[2], fault.world)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=fault.world,
        timeout=timedelta(seconds=seconds),
    )
    try:
        train(fault, Failing(fault, rank), folder)
    except Exception as error:
        tell(raised=type(error).__name__, said=str(error))
        if rank == fault.who and fault.kind == "raises":
            raise  # nobody has caught it
    else:
        tell(raised="nothing", said="")
    # no goodbye: the group may be broken


if __name__ == "__main__":
    main()
