"""One of two ranks whose weights on the host are there once for both, beside the run in which each
rank has its own.

`python rank_shared_child.py RANK STORE ASKED` prints a line of JSON per case; ASKED is JSON, too:
the number of ranks, and names of cases.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_cases import run_cases
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from offcompile import optim
from offcompile.ir import OffloadError
from offcompile.optim.ranks import common_weights
from offcompile.runtime.device.common import CommonSlot
from offcompile.runtime.moves.registry import RuntimeSettings, runtime_for
from offcompile.runtime.moves.weights import device_of, is_on_host, live_on_host
from offcompile.runtime.ranks.gradient_reducer import GradientReducer

WIDTH, DEPTH, STEPS = 128, 2, 3
OPTIONS = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05, "memory": "minimum"}
Act = Callable[[nn.Module, int], None]


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)]
    return nn.Sequential(*layers)


def batch(step: int) -> Tensor:
    mine = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(16, WIDTH, generator=mine)


def nothing(model: nn.Module, step: int) -> None:
    pass


class Run:
    """A model under DDP with its weights on the host: once for all ranks, if `shared`.

    With overlap it is compiled, and its plan puts them there. Else they are put there as a graph
    would before each of its calls, which saves compiling.
    """

    def __init__(
        self,
        shared: bool,
        dtype: torch.dtype = torch.float32,
        frozen: Sequence[int] = (),
        **how: Any,
    ) -> None:
        """frozen: layers whose weights are not trained."""
        self.dtype = dtype
        self.model = build().to(dtype)
        for layer in frozen:
            self.model[layer].weight.requires_grad_(False)
        inner: Any = self.model
        self.hosts = not how.get("overlap", False)
        if not self.hosts:
            torch._dynamo.reset()
            inner = torch.compile(inner, backend="offcompile", options=OPTIONS)
        self.forward = DistributedDataParallel(inner, bucket_cap_mb=1)
        refused = patch.object(common_weights, "why_not", lambda: "the test wants it so")
        with nullcontext() if shared else refused:
            self.optimizer: Any = optim.AdamW(
                self.model.parameters(), 1e-2, **{"sharded": True, **how}
            )
        self.seen: list[Tensor] = []

    def backward(self, step: int) -> None:
        if self.hosts:
            device = runtime_for(RuntimeSettings().key).device
            live_on_host(device, [p for p in self.model.parameters() if p.ndim == 2])
        loss = self.forward(batch(step).to(self.dtype)).pow(2).mean()
        self.seen.append(loss.detach().clone())
        loss.backward()

    def step(self, step: int, before: Act = nothing, between: Act = nothing) -> None:
        """before: what the program does before forward; between: after backward."""
        before(self.model, step)
        self.backward(step)
        between(self.model, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += [p.detach().clone() for p in self.model.parameters()]

    def common(self) -> int:
        """How many weights lie in memory that ranks have in common."""
        return sum(isinstance(slot_of(p), CommonSlot) for p in self.model.parameters())


def trained(
    steps: int = STEPS, before: Act = nothing, between: Act = nothing, **how: Any
) -> tuple[dict[str, Any], Run]:
    """Train with memory in common and without: equal bits, weights in common after each step."""
    runs = Run(False, **how), Run(True, **how)
    counts = []
    for step in range(steps):
        for run in runs:
            run.step(step, before, between)
        counts.append(runs[1].common())
    apart, shared = runs
    found = {
        "equal": len(apart.seen) == len(shared.seen)
        and all(map(torch.equal, apart.seen, shared.seen)),
        "common": counts,
        "apart": apart.common(),
    }
    return found, shared


def both(*args: Any, **how: Any) -> dict[str, Any]:
    return trained(*args, **how)[0]


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what the log says of weights."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "weights" in record.getMessage():
                said.append(record.getMessage())

    logger, listener = logging.getLogger("offcompile"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def plain() -> dict[str, Any]:
    with heard() as said:
        return both() | {"said": said}


def clipped() -> dict[str, Any]:
    return both(max_norm=0.05)


def masters() -> dict[str, Any]:
    return both(dtype=torch.bfloat16)


def compiled() -> dict[str, Any]:
    """Ranks take their time in turn, in backward and before step(), while owners update. And what
    the weights take in the end, by the system's account."""
    chance = random.Random(dist.get_rank())
    takes = GradientReducer.take

    def slowly(*args: Any) -> None:
        time.sleep(chance.choice((0, 0, 0.02)))
        takes(*args)

    own = 0

    def rests(model: nn.Module, step: int) -> None:
        nonlocal own
        own += sum(slot.is_written for slot in map(slot_of, model.parameters()) if slot is not None)
        time.sleep(chance.choice((0, 0.05)))

    with patch.object(GradientReducer, "take", slowly):
        found, run = trained(5, between=rests, overlap=True)
    facts = run.optimizer.facts()
    return found | held(run.model) | {"in backward": facts.updated_in_backward, "own": own}


def each_updates() -> dict[str, Any]:
    """Each rank updates all weights: nothing is in common."""
    run = Run(True, sharded=False)
    for step in range(2):
        run.step(step)
    return {"common": run.common(), "hosted": sum(map(is_on_host, run.model.parameters()))}


def frozen() -> dict[str, Any]:
    """Two weights are not trained, and ranks have other bytes in one of them."""

    def act(model: nn.Module, step: int) -> None:
        if step == 0 and dist.get_rank() == 1:
            model[3].weight.data.mul_(0.5)
        if step == 2 and dist.get_rank() == 0:
            model[0].weight.data.mul_(0.5)

    return both(4, before=act, frozen=(0, 3))


# -- a program that writes to weights by itself ----------------------------------------------------


@torch.no_grad()
def _scale(model: nn.Module, by: float) -> None:
    for p in model.parameters():
        p.data.mul_(by)  # which autograd does not count


def one_writes() -> dict[str, Any]:
    """Rank 0 alone writes to its weights: before forward in one step, after backward in another."""

    def writes(when: int) -> Act:
        def act(model: nn.Module, step: int) -> None:
            if step == when and dist.get_rank() == 0:
                _scale(model, 0.9)

        return act

    found = both(5, before=writes(2), between=writes(3))
    run = Run(True)
    for step in range(2):
        run.step(step)
    before = [p.detach().clone() for p in run.model.parameters()]
    dist.barrier()
    if dist.get_rank() == 0:
        _scale(run.model, 0.5)
    dist.barrier()
    same = all(map(torch.equal, before, run.model.parameters()))
    return found | {"in common": run.common(), "kept": same or dist.get_rank() == 0}


def all_write() -> dict[str, Any]:
    """Every rank decays its weights by hand in each step: they are kept apart after a while."""
    return both(7, between=lambda model, step: _scale(model, 0.99))


def loaded() -> dict[str, Any]:
    """Weights are replaced by others for an evaluation, and a checkpoint is loaded."""
    saved: dict[int, Any] = {}

    def act(model: nn.Module, step: int) -> None:
        if step == 1:
            saved[id(model)] = copy.deepcopy(model.state_dict())
        if step == 2:
            mine = [p.detach().clone() for p in model.parameters()]
            _scale(model, 0.5)
            with torch.no_grad():
                model(batch(90))
            for p, value in zip(model.parameters(), mine, strict=True):
                p.data.copy_(value)
        if step == 4:
            model.load_state_dict(saved[id(model)])

    return both(6, before=act)


def looked_at() -> dict[str, Any]:
    """Rank 1 keeps a view of a weight from the start, and one of another from the third step on;
    and gives a third weight other memory."""
    views: list[Any] = []

    def act(model: nn.Module, step: int) -> None:
        if dist.get_rank() == 0:
            return
        if step == 1:
            views.append((model[0].weight.detach(), model[0].weight))
        if step == 2:
            views.append((model[3].weight.detach(), model[3].weight))
            model[5].weight.data = model[5].weight.data.clone()

    def kept(model: nn.Module, step: int) -> None:
        if step == 0 and dist.get_rank() == 1:
            views.append((model[2].weight.detach(), model[2].weight))

    found = both(5, before=act, between=kept)
    return found | {"views": all(torch.equal(view, weight) for view, weight in views)}


def given_up() -> dict[str, Any]:
    """A step that is discarded, and one whose updates fail on rank 1."""
    shared = []
    for once in (False, True):
        run = Run(once)
        for step in range(2):
            run.step(step)
        run.backward(2)
        run.optimizer.discard()
        run.step(3)
        fails = patch.object(run.optimizer.rule, "update", side_effect=OSError(28, "no space"))
        with fails if dist.get_rank() == 1 else nullcontext():
            run.backward(4)
            try:
                run.optimizer.step()
                raised = "nothing"
            except (OSError, OffloadError) as error:
                raised = str(error)
        run.optimizer.discard()
        run.step(5)
        shared.append((run, raised))
    (apart, said), (common, raised) = shared
    equal = all(map(torch.equal, apart.seen, common.seen)) and bool(apart.seen)
    return {"equal": equal, "said": said, "raised": raised, "common": common.common()}


def machines() -> dict[str, Any]:
    """Ranks on two machines: each keeps its own."""
    name = patch.object(common_weights, "machine", lambda: f"machine {dist.get_rank()}")
    with name, heard() as said:
        return both(2) | {"said": said}


def unreachable() -> dict[str, Any]:
    """Rank 1 must not open what rank 0 has made."""
    refused = OffloadError("/proc/1/fd/1 cannot be opened: Permission denied")
    with patch.object(common_weights.CommonFile, "open", side_effect=refused), heard() as said:
        return both(2) | {"said": said}


# -- memory ----------------------------------------------------------------------------------------


def held(model: nn.Module) -> dict[str, Any]:
    """Measure weights on the host in this process and on the file system, over their bytes."""
    with torch.no_grad():
        sum(p.sum() for p in model.parameters())  # every page is mapped here
    dist.barrier()
    hosted = [p for p in model.parameters() if is_on_host(p)]
    nbytes = sum(p.nbytes for p in hosted)
    inodes = {inode_of(p) for p in hosted}
    files = {inode: deleted_files()[inode] / nbytes for inode in inodes}
    found = {"share": proportional_bytes(inodes) / nbytes, "files": files}
    dist.barrier()
    return found


def slot_of(parameter: Tensor) -> Any:
    device = device_of(parameter)
    return None if device is None else device.slot_of(parameter)


def mappings() -> Iterator[tuple[list[str], int]]:
    """Each mapping of this process: its line, and its bytes; a page of n mappings counts 1/n."""
    head: list[str] = []
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if re.match(r"^[0-9a-f]+-[0-9a-f]+$", words[0]):
                head = words
            elif words[0] == "Pss:":
                yield head, 1024 * int(words[1])


def inode_of(parameter: Tensor) -> str:
    """The inode of the file that a parameter lies in."""
    address = parameter.data_ptr()
    for head, _ in mappings():
        start, stop = (int(part, 16) for part in head[0].split("-"))
        if start <= address < stop:
            return head[4]
    raise AssertionError("the parameter lies nowhere")


def proportional_bytes(inodes: set[str]) -> int:
    return sum(nbytes for head, nbytes in mappings() if head[4] in inodes)


def deleted_files() -> dict[str, int]:
    """Bytes on the file system of each file that is open and has no name."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").endswith("(deleted)"):
                told = os.stat(f"/proc/self/fd/{entry}")
                found[str(told.st_ino)] = 512 * told.st_blocks
    return found


# -- ends ------------------------------------------------------------------------------------------


def dying() -> dict[str, Any]:
    """Rank 1 is killed before step(): rank 0 raises, with its weights as they were."""
    run = Run(True)
    for step in range(2):
        run.step(step)
    before = [p.detach().clone() for p in run.model.parameters()]
    run.backward(2)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raised = ""
    try:
        run.optimizer.step()
    except OffloadError as error:
        raised = str(error)
    kept = all(map(torch.equal, before, run.model.parameters()))
    print(json.dumps({"raised": raised, "kept": kept, "common": run.common()}), flush=True)
    os._exit(0)  # no goodbye: the group is broken


TRAINED = (plain, clipped, masters, compiled)
WRITTEN = (one_writes, all_write, loaded, looked_at, given_up)
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    case.__name__: case
    for case in (*TRAINED, frozen, *WRITTEN, each_updates, machines, unreachable, dying)
}

if __name__ == "__main__":
    run_cases(CASES)
