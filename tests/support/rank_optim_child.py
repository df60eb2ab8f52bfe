"""One of two ranks that train with the optimizers here and with torch's, without compiling.

`python rank_optim_child.py RANK STORE CASES` prints a line of JSON per case; CASES: keyword
arguments of AdamW, by name, with how the model is wrapped under "wrap".
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from freeze_imports import freeze_imports
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from offcompile.optim import AdamW

WORLD, WIDTH, STEPS = 2, 33, 4  # an odd width: the shards are not equal


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Mlp(), Mlp(), nn.Linear(WIDTH, 1, bias=False))


def sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    """Norms and the head stay plain: torch cannot clip such a mixture, and the optimizer can."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model[:2]:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def alone(model: nn.Sequential) -> nn.Module:
    return model


WRAPS: dict[str, Callable[[Any], nn.Module]] = {
    "alone": alone,
    "ddp": DistributedDataParallel,
    "ddp_views": lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
    "fsdp": sharded,
    "tp": tensor_parallel,
}


def step(forward: nn.Module, optimizer: Any, number: int, rank: int) -> Tensor:
    mine = torch.Generator().manual_seed(10 * number + rank)
    loss = forward(torch.randn(16, WIDTH, generator=mine)).pow(2).mean()
    loss.backward()
    return loss.detach()


def reference(wrap: str, case: dict[str, Any], rank: int) -> list[Tensor]:
    model = build()
    forward, seen = WRAPS[wrap](model), []
    optimizer = made(torch.optim, model, case)
    for number in range(STEPS):
        seen.append(step(forward, optimizer, number, rank))
        if case.get("max_norm"):
            seen.append(full(nn.utils.clip_grad_norm_(model.parameters(), case["max_norm"])))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *weights(model), *states(model, optimizer)]


def found(wrap: str, case: dict[str, Any], rank: int) -> tuple[list[Tensor], int]:
    model = build()
    forward, seen = WRAPS[wrap](model), []
    with tempfile.TemporaryDirectory() as folder:
        more = {"directory": folder} if case.get("states") == "disk" else {}
        optimizer = made(sys.modules["offcompile.optim"], model, case | more)
        for number in range(STEPS):
            seen.append(step(forward, optimizer, number, rank))
            optimizer.step()
            if case.get("max_norm"):
                seen.append(optimizer.last_norm)
            optimizer.zero_grad()
        last = optimizer.facts().updated_in_backward
        return [*seen, *weights(model), *states(model, optimizer)], last


def made(module: Any, model: nn.Module, case: dict[str, Any]) -> Any:
    if module is not torch.optim:
        return module.AdamW(model.parameters(), 1e-2, **case)
    # torch's kernels take plain tensors or DTensors, not both
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is s] for s in (False, True)]
    groups = [{"params": kind} for kind in kinds if kind]
    return torch.optim.AdamW(groups, 1e-2, fused=True)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(model: nn.Module) -> list[Tensor]:
    return [full(p) for p in model.parameters()]


def states(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """States by the optimizer's own state_dict: DTensors where the parameters are."""
    saved, seen = optimizer.state_dict()["state"], []
    order = [id(p) for group in optimizer.param_groups for p in group["params"]]
    for parameter in model.parameters():
        number = order.index(id(parameter))
        for name in ("exp_avg", "exp_avg_sq"):
            state = saved[number][name]
            assert type(state) is (DTensor if isinstance(parameter, DTensor) else Tensor)
            if isinstance(state, DTensor):
                assert state.placements == parameter.placements
            seen.append(full(state))
    return seen


def resumed(rank: int) -> dict[str, Any]:
    """Save with torch.distributed.checkpoint under FSDP2, load into fresh objects, go on."""
    folder = sys.argv[2] + ".checkpoint"
    values = []
    for interrupted in (False, True):
        model = build()
        forward = sharded(model)
        optimizer: Any = AdamW(model.parameters(), 1e-2)
        for number in range(STEPS):
            if interrupted and number == 2:
                saved = get_state_dict(model, optimizer)
                dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)
                torch.manual_seed(7)
                model = nn.Sequential(Mlp(), Mlp(), nn.Linear(WIDTH, 1, bias=False))
                forward = sharded(model)
                optimizer = AdamW(model.parameters(), 1e-2)
                mine = get_state_dict(model, optimizer)
                both = {"model": mine[0], "optimizer": mine[1]}
                dcp.load(both, checkpoint_id=folder)
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=both["model"],
                    optim_state_dict=both["optimizer"],
                )
            step(forward, optimizer, number, rank)
            optimizer.step()
            optimizer.zero_grad()
        values.append([*weights(model), *states(model, optimizer)])
    return {"equal": all(map(torch.equal, *values))}


def from_torch(rank: int) -> dict[str, Any]:
    """Take over the state_dict of torch's optimizer, sharded as it is, and hand it back."""
    model, twin = build(), build()
    forward, other = sharded(model), sharded(twin)
    theirs: Any = torch.optim.AdamW(twin.parameters(), 1e-2, fused=True)
    step(other, theirs, 0, rank)
    theirs.step()
    ours: Any = AdamW(model.parameters(), 1e-2)
    model.load_state_dict(twin.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for number in range(1, STEPS):
        for module, optimizer in ((forward, ours), (other, theirs)):
            optimizer.zero_grad()
            step(module, optimizer, number, rank)
            optimizer.step()
    back: Any = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    back.load_state_dict(ours.state_dict())
    for module, optimizer in ((forward, back), (other, theirs)):
        optimizer.zero_grad()
        step(module, optimizer, STEPS, rank)
        optimizer.step()
    return {"equal": all(map(torch.equal, weights(model), weights(twin)))}


def main() -> None:
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], WORLD)
    torch.set_num_threads(1)
    freeze_imports()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for name, case in json.loads(sys.argv[3]).items():
        wrap = case.pop("wrap")
        said: dict[str, Any] = {"case": name}
        if wrap in ("resumed", "from_torch"):
            said |= {"resumed": resumed, "from_torch": from_torch}[wrap](rank)
        else:
            of = 0 if wrap == "tp" else rank  # ranks of one tensor parallel group share a batch
            mixed = wrap == "tp" and "max_norm" in case
            expected = reference("alone" if mixed else wrap, case, of)
            values, in_backward = found(wrap, case, of)
            if (
                mixed
            ):  # Adam makes much of the last bits of small gradients: compare losses and norms
                values, expected = values[: 2 * STEPS], expected[: 2 * STEPS]
            equal = (lambda a, b: torch.allclose(a, b, rtol=1e-3)) if mixed else torch.equal
            same = list(map(equal, values, expected))
            said |= {"equal": all(same) and len(values) == len(expected), "last": in_backward}
        print(json.dumps(said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
