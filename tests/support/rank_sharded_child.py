"""One of several ranks that share out the states of an optimizer, beside the same run without.

`python rank_sharded_child.py RANK STORE ASKED` prints a line of JSON per case; ASKED is JSON, too:
the number of ranks, and names of cases.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_cases import run_cases
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from offcompile import optim
from offcompile.ir import OffloadError
from offcompile.optim import checkpoints
from offcompile.optim.ranks import roll_call

WIDTH, DEPTH, STEPS = 96, 3, 3
OPTIONS = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05, "memory": "minimum"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, WIDTH))


def strided(dtype: torch.dtype) -> nn.Module:
    """One weight is not contiguous, and one fills no range of memory."""
    model = build().to(dtype)
    model[0].up.weight.data = model[0].up.weight.data.t().contiguous().t()
    wide = torch.empty(WIDTH, 2 * WIDTH, dtype=dtype)
    model[3].weight.data = wide[:, ::2].copy_(model[3].weight.data)
    return model


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    mine = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(16, WIDTH, generator=mine).to(dtype)


def adamw(model: nn.Module, **how: Any) -> Any:
    return optim.AdamW(model.parameters(), 1e-2, **how)


def backward(forward: Any, step: int) -> None:
    forward(batch(step, next(forward.parameters()).dtype)).pow(2).mean().backward()


def train(forward: Any, optimizer: Any, steps: range = range(STEPS)) -> list[Tensor]:
    """Weights after each step."""
    seen = []
    for step in steps:
        backward(forward, step)
        optimizer.step()
        optimizer.zero_grad()
        seen += [p.detach().clone() for p in forward.parameters()]
    return seen


def flat_states(saved: dict[str, Any]) -> dict[tuple[int, str], Any]:
    return {(n, name): v for n, state in saved["state"].items() for name, v in state.items()}


def same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return list(a) == list(b) and all(
        torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k] for k in a
    )


def compared(make: Callable[..., Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Train with all states on each rank, then shared out: weights, states and shares."""
    found = []
    for more in ({}, {"sharded": True}):
        forward = DistributedDataParallel(strided(dtype))
        optimizer = make(forward, **more)
        weights = train(forward, optimizer)
        stores = optimizer.facts().stores.values()
        held = sum(s.host_bytes + s.disk_bytes for s in stores)
        found.append((weights, flat_states(optimizer.state_dict()), held, optimizer))
    (whole, states, all_bytes, plain), (mine, gathered, own_bytes, optimizer) = found
    return {
        "weights": all(map(torch.equal, whole, mine)),
        "states": same(states, gathered) and bool(states),
        "share": own_bytes / all_bytes,
        "norm": plain.last_norm is None or torch.equal(plain.last_norm, optimizer.last_norm),
        "updated": optimizer.facts().updated_in_step,
        "of": plain.facts().updated_in_step,
    }


def host() -> dict[str, Any]:
    return compared(lambda f, **more: adamw(f, states="host", **more))


def disk() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return compared(lambda f, **more: adamw(f, states="disk", directory=folder, **more))


def clipped() -> dict[str, Any]:
    return compared(lambda f, **more: adamw(f, max_norm=0.05, **more))


def held_back() -> dict[str, Any]:
    """DDP reduces after backward: with overlap, all updates wait for step()."""
    return compared(lambda f, **more: adamw(f, overlap=True, max_norm=0.05, **more))


def masters() -> dict[str, Any]:
    return compared(adamw, torch.bfloat16)


def sgd() -> dict[str, Any]:
    return compared(lambda f, **more: optim.SGD(f.parameters(), 0.1, momentum=0.9, **more))


def muon() -> dict[str, Any]:
    def make(forward: nn.Module, **more: Any) -> Any:
        return optim.Muon([p for p in forward.parameters() if p.ndim == 2], 1e-2, **more)

    return compared(make)


def of_others() -> dict[str, Any]:
    kind = torch.optim.RMSprop
    return compared(lambda f, **more: optim.offload(kind, f.parameters(), lr=1e-2, **more))


def groups() -> dict[str, Any]:
    """A group that comes later, frozen parameters that are thawed, a scheduler."""

    def make(forward: nn.Module, **more: Any) -> Any:
        first, *others = list(forward.module)
        for parameter in others[0].parameters():
            parameter.requires_grad_(False)
        optimizer = adamw(first, **more)
        rest = [p for layer in others for p in layer.parameters()]
        optimizer.add_param_group({"params": rest, "lr": 1e-3})
        for parameter in others[0].parameters():
            parameter.requires_grad_(True)
        return optimizer

    return compared(make)


def compiled() -> dict[str, Any]:
    """Updates inside backward, on the owner alone, as soon as a bucket is reduced."""
    found = []
    for how in ({}, {"sharded": True}):
        torch._dynamo.reset()
        inner: Any = torch.compile(build(), backend="offcompile", options=OPTIONS)
        forward = DistributedDataParallel(inner, bucket_cap_mb=1)
        optimizer = adamw(forward, overlap=True, **how)
        found.append((train(forward, optimizer), optimizer.facts(), optimizer))
    (whole, plain, _), (mine, facts, optimizer) = found
    return failed_in_backward(forward, optimizer) | {
        "weights": all(map(torch.equal, whole, mine)),
        "of": plain.updated_in_backward,
        "updated": facts.updated_in_backward,
    }


def failed_in_backward(forward: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The updates of the last rank fail while gradients are being reduced."""
    fails = patch.object(optimizer.rule, "update", side_effect=OSError(28, "no space"))
    with fails if dist.get_rank() == dist.get_world_size() - 1 else nullcontext():
        backward(forward, 0)
    raised = said(optimizer.step)
    optimizer.discard()
    train(forward, optimizer)
    return {"raised": raised, "equal": equal_on_ranks(forward)}


def equal_on_ranks(forward: nn.Module) -> bool:
    weights = torch.cat([p.detach().flatten() for p in forward.parameters()])
    theirs = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, weights)
    return all(torch.equal(weights, other) for other in theirs)


def resumed() -> dict[str, Any]:
    """Save after two steps, load into fresh objects in several ways, and go on."""
    folder = sys.argv[2] + ".checkpoint"
    forward = DistributedDataParallel(build())
    optimizer = adamw(forward, sharded=True)
    train(forward, optimizer, range(2))
    weights = {k: v.clone() for k, v in forward.module.state_dict().items()}
    whole, mine = deepcopy((optimizer.state_dict(), optimizer.local_state_dict()))
    saved = get_state_dict(forward.module, optimizer)
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)
    torch.save(whole, f"{sys.argv[2]}.{dist.get_rank()}")
    expected = train(forward, optimizer, range(2, 4))

    def goes_on(load: Callable[[nn.Module, Any], None], **how: Any) -> bool:
        model = DistributedDataParallel(build())
        model.module.load_state_dict(weights)
        other = adamw(model, **how)
        load(model.module, other)
        return all(map(torch.equal, expected, train(model, other, range(2, 4))))

    def from_dcp(model: nn.Module, other: Any) -> None:
        theirs = get_state_dict(model, other)
        both = {"model": theirs[0], "optimizer": theirs[1]}
        dcp.load(both, checkpoint_id=folder)
        set_state_dict(
            model, other, model_state_dict=both["model"], optim_state_dict=both["optimizer"]
        )

    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    file = torch.load(f"{sys.argv[2]}.{dist.get_rank()}")
    return {
        "whole": goes_on(lambda _, other: other.load_state_dict(file), sharded=True),
        "unsharded": goes_on(lambda _, other: other.load_state_dict(whole)),
        "one rank": goes_on(
            lambda _, o: o.load_state_dict(whole), sharded=True, process_group=alone
        ),
        "own": goes_on(lambda _, other: other.load_state_dict(mine), sharded=True),
        "torch.distributed.checkpoint": goes_on(from_dcp, sharded=True),
        "has": [len(mine["state"]), len(whole["state"]), len(mine["elsewhere"])],
    }


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (OSError, OffloadError) as error:
        return str(error)
    return "nothing"


def refusals() -> dict[str, Any]:
    rank, model = dist.get_rank(), build()
    odd = build() if rank == 0 else nn.Sequential(build(), nn.Linear(3, 3))
    sharded = fully_shard(build(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = adamw(model, sharded=True)
    overlapped = adamw(model, sharded=True, overlap=True)
    first = [optimizer.state_dict, optimizer.discard][rank]
    found = {
        "parameters": said(lambda: adamw(odd, sharded=True)),
        "arguments": said(lambda: adamw(model, sharded=True, amsgrad=rank == 1)),
        "DTensor": said(lambda: adamw(sharded, sharded=True)),
        "reduced by nobody": said(lambda: backward(model, 0)),
        "mixed up": said(first),
        "pickled": said(lambda: optimizer.__getstate__()),
    }
    fails = patch.object(checkpoints, "own_state", side_effect=OSError(28, "no space"))
    with fails if rank == 0 else nullcontext():
        found["failed"] = said(optimizer.state_dict)
    roll_call.LONGEST_S = 0.2
    if rank == 0:
        found["alone"] = said(optimizer.state_dict)
    dist.barrier()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, optimizer.local_state_dict())
    found["of another"] = said(lambda: optimizer.load_state_dict(told[1 - rank]))
    del overlapped
    return found


def failing() -> dict[str, Any]:
    """The update of one parameter fails on the last rank; all go on after discard()."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    forward = DistributedDataParallel(build())
    optimizer = adamw(forward, sharded=True)
    update = optimizer.rule.update

    def fails(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    backward(forward, 0)
    if rank == last:
        optimizer.rule.update = fails
    try:
        optimizer.step()
        raised = "nothing"
    except (OSError, OffloadError) as error:
        raised = f"{type(error).__name__}: {error}"
    optimizer.rule.update = update
    again = said(optimizer.step)
    optimizer.discard()
    equal = equal_on_ranks(forward)
    train(forward, optimizer)
    return {"raised": raised, "again": again, "equal": equal}


def dying() -> dict[str, Any]:
    """The last rank is killed amid its updates."""
    forward = DistributedDataParallel(build())
    optimizer = adamw(forward, sharded=True)
    train(forward, optimizer)
    if dist.get_rank() == dist.get_world_size() - 1:
        optimizer.rule.update = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    backward(forward, 0)
    print(json.dumps({"said": said(optimizer.step)}), flush=True)
    os._exit(0)  # no goodbye: the group is broken


TRAINED = (host, disk, clipped, held_back, masters, sgd, muon, of_others, groups)
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    case.__name__: case for case in (*TRAINED, compiled, resumed, refusals, failing, dying)
}


if __name__ == "__main__":
    run_cases(CASES)
