"""A checkpoint of states on disk, made and loaded with no memory to hold them. Usage: … FOLDER"""

from __future__ import annotations

import mmap
import resource
import sys
from pathlib import Path

import torch

from offcompile import save
from offcompile.optim import AdamW

ELEMENTS = 8 << 20


def data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def main(folder: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(ELEMENTS))
    optimizer = AdamW([weight], states="disk", directory=folder)
    gradient = torch.full_like(weight, 0.5)
    for _ in range(2):
        weight.grad = gradient
        optimizer.step()
    save(optimizer.state_dict(), folder / "warm.pt")
    # two states of 32 MiB each
    limit_bytes = data_bytes() + (16 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    try:
        torch.ones(ELEMENTS)
    except RuntimeError:
        print("limited")
    for _ in range(2):
        save(optimizer.state_dict(), folder / "states.pt")
    # private mappings count as data, whether or not they are written to
    torch.serialization.set_default_mmap_options(mmap.MAP_SHARED)
    saved = torch.load(folder / "states.pt", mmap=True)
    optimizer.load_state_dict(saved)
    weight.grad = gradient
    optimizer.step()
    print(float(optimizer.state_dict()["state"][0]["exp_avg"][-1]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
