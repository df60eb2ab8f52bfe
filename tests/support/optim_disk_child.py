"""Runs of a small training, killed at a given moment and resumed, each in a process of its own.

Usage: optim_disk_child.py FOLDER WHICH. Prints one JSON object: what each scenario left behind.
WHICH: all scenarios, each with overlap and without, or few, each in one of the two ways.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # else every child would import it, at its first step

from offcompile.optim import AdamW
from offcompile.optim import state_placement as places
from offcompile.run.saving import Calls, save
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.states.disk_states import DiskStates

STEPS, EVERY = 8, 3


@dataclass
class Fatal:
    """Kills this process at the `at`-th call of `moment`."""

    moment: str = ""
    at: int = 0
    count: int = 0

    def here(self, moment: str) -> None:
        if moment == self.moment:
            self.count += 1
            if self.count > self.at:
                os.kill(os.getpid(), signal.SIGKILL)

    def before(self, moment: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            self.here(moment)
            return real(*given, **more)

        return call


def model_and_data() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 192), torch.nn.Tanh(), torch.nn.Linear(192, 96)]
    return torch.nn.Sequential(*layers), torch.randn(STEPS, 8, 96)


def train(folder: Path, checkpoint: Path, log: Path, fatal: Fatal, overlap: bool) -> None:
    """From the checkpoint, if there is one, to the last step. The log gets every loss, exactly."""
    kernel = fatal.before("update", torch._fused_adamw_)
    torch._fused_adamw_ = kernel  # type: ignore[assignment]
    files = Files(preadv=fatal.before("read", os.preadv), pwritev=fatal.before("write", os.pwritev))
    places.DiskStates = partial(  # type: ignore[attr-defined]
        DiskStates, block_bytes=32768, buffers=3, small_bytes=0, files=files
    )
    calls = Calls(
        fatal.before("save", os.write),
        fatal.before("save-sync", os.fsync),
        fatal.before("save-name", os.replace),
    )
    model, data = model_and_data()
    optimizer = AdamW(model.parameters(), lr=0.05, states="disk", directory=folder, overlap=overlap)
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    model[0].weight.register_hook(lambda gradient: fatal.here("backward"))
    with log.open("a") as lines:
        for step in range(first, STEPS):
            loss = (model(data[step]) - data[step]).square().mean()
            lines.write(f"{step} {loss.item().hex()}\n")
            lines.flush()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save({**state, "step": step + 1}, checkpoint, calls=calls)
        weights = torch.cat([p.detach().view(-1) for p in model.parameters()])
        lines.write(f"end {weights.double().sum().item().hex()}\n")


def in_a_child(work: Callable[[], None]) -> int:
    """Its exit code, negative if a signal ended it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


SCENARIOS = [
    ("backward", 1),
    ("backward", 4),
    ("update", 13),
    ("update", 51),
    ("read", 20),
    ("write", 11),
    ("write", 60),
    ("save", 3),
    ("save", 100),
    ("save-sync", 2),
    ("save-name", 1),
]
#: overlap → those of the few
FEW = {
    False: [("backward", 1), ("write", 60), ("save", 100)],
    True: [("update", 51), ("save-name", 1)],
}


def main(folder: Path, which: str) -> None:
    found = {}
    for overlap in (False, True):
        for moment, at in [("", 0), *(FEW[overlap] if which == "few" else SCENARIOS)]:
            name = f"{moment}-{at}-{overlap}"
            checkpoint, log = folder / f"{name}.pt", folder / f"{name}.log"
            run = partial(train, folder, checkpoint, log)
            codes = [in_a_child(partial(run, Fatal(moment, at), overlap))]
            had_checkpoint = checkpoint.exists()
            if moment:
                codes.append(in_a_child(partial(run, Fatal(), overlap)))
            found[name] = {
                "codes": codes,
                "had_checkpoint": had_checkpoint,
                "log": log.read_text().splitlines(),
            }
    names = {name for name in os.listdir(folder) if not name.endswith((".pt", ".log"))}
    print(json.dumps({"runs": found, "left": sorted(names)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
