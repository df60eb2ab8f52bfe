"""Train a small GPT with several processes, as torchrun starts them.

    torchrun --nproc-per-node 2 examples/train_ranks.py --memory 200MiB
    torchrun --nproc-per-node 2 examples/train_ranks.py --memory 200MiB --fsdp --save checkpoint

With DDP, each rank keeps a share of AdamW's states on its host; `--fsdp` shards weights, too.
`--memory` is the budget of each rank. With `--save` training goes on from the checkpoint if there
is one, and ends with a new one. The number of ranks and the budget may differ from those before.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from demo.gpt import GPT, SEED, batches
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offcompile


def join() -> str:
    """Join the other processes. Returns the device of this one."""
    on_cards = torch.cuda.is_available()
    backend = "nccl" if on_cards else "gloo"
    if "RANK" in os.environ:  # torchrun has set it
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not on_cards:
        return "cpu"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return "cuda"


def train(asked: argparse.Namespace, device: str) -> float:
    """Returns the mean of the ranks' last losses."""
    torch.manual_seed(SEED)
    model = GPT(asked.layers, asked.width, asked.length).to(device)
    options = {"memory": asked.memory, "lowering": "aot_eager"}
    if asked.quick:
        options["hardware"] = "cpu"  # a shipped profile: nothing is measured
    if asked.fsdp:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    step = torch.compile(model, backend="offcompile", options=options)
    if not asked.fsdp:
        step = DistributedDataParallel(step)
    # FSDP2 shards the states itself
    optimizer = offcompile.optim.AdamW(
        model.parameters(), lr=1e-3, states="host", overlap=True, sharded=not asked.fsdp
    )
    if asked.save is not None and asked.save.exists():
        weights, states = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": states}
        dcp.load(saved, checkpoint_id=asked.save)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
    data = batches(asked.batch, asked.length, device, dist.get_rank())
    mean = torch.zeros((), device=device)
    for number in range(1, asked.steps + 1):
        loss = step(next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {number} of {asked.steps}: loss {mean.item():.4f}")
    if asked.save is not None:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=asked.save)
    return mean.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--memory", default="minimum", help="of each rank; as the option 'memory'")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--save", type=Path, help="folder of the checkpoint")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="of each rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps")
    asked = parser.parse_args()
    if asked.quick:
        asked.layers, asked.width, asked.length, asked.steps = 2, 64, 32, 2
    device = join()
    try:
        train(asked, device)
        if dist.get_rank() == 0:
            print(offcompile.reports()[-1].summary())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
