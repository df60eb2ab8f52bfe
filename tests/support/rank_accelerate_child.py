"""One of two ranks that train through `accelerate`, beside the same script under `aot_eager`.

`python rank_accelerate_child.py RANK STORE CASES` prints a line of JSON per case; CASES is JSON:
fields of `Case`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from freeze_imports import freeze_imports
from torch import Tensor
from weights_runs import on_host, seeded
from zoo import GPT

import offcompile

WORLD, STEPS, WORDS, LENGTH = 2, 3, 96, 32


@dataclass(frozen=True)
class Case:
    """passes: backward passes a step, all but the last without communication. clip: the largest
    norm of the gradients. ours: `offcompile.optim` takes the place of torch's optimizer."""

    memory: str
    in_place: bool = True
    passes: int = 1
    clip: float | None = None
    ours: bool = False
    mixed_precision: str = "no"


def how(memory: str | None) -> dict[str, Any]:
    if memory is None:
        return {"backend": "aot_eager"}
    options = {"memory": memory, "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}
    return {"backend": "offcompile", "options": options}


def trained(case: Case, memory: str | None) -> tuple[list[Tensor], dict[str, Tensor], set[str]]:
    """Returns the losses, the state that `accelerate` gives to be saved, and the weights that were
    on the host."""
    torch._dynamo.reset()
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=case.passes, mixed_precision=case.mixed_precision
    )
    model: Any = seeded(lambda: GPT(WORDS, 64, 2, 4, LENGTH))
    weights = model
    if case.ours and memory is not None:
        optimizer: Any = offcompile.optim.AdamW(model.parameters(), 1e-2, overlap=case.clip is None)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    drawn = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, WORDS, (LENGTH + 1,), generator=drawn) for _ in range(24)]
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    if case.in_place:
        model.compile(**how(memory))
    else:
        model = torch.compile(model, **how(memory))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _, batch in zip(range(STEPS * case.passes), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            if case.clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach().clone())
    state = accelerator.get_state_dict(model)
    return losses, {name: t.clone() for name, t in state.items()}, on_host(weights)


def found(case: Case) -> dict[str, Any]:
    losses, state, _ = trained(case, None)
    sent, known = offcompile.counters()["bytes_out"], len(offcompile.reports())
    ours, saved, hosted = trained(case, case.memory)
    return {
        "steps": len(ours),
        "losses": len(ours) == len(losses) and all(map(torch.equal, ours, losses)),
        "names": list(saved) == list(state),
        "weights": all(torch.equal(saved[name], t) for name, t in state.items()),
        "loss": float(ours[0]),
        "changed": sum(not report.fits for report in offcompile.reports()[known:]),
        "moved": offcompile.counters()["bytes_out"] - sent + len(hosted),
    }


def main() -> None:
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], WORLD)
    torch.set_num_threads(1)
    freeze_imports()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ.update({name: str(value) for name, value in told.items()})  # as torchrun does
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for fields in json.loads(sys.argv[3]):
        print(json.dumps(found(Case(**fields))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
