"""Trains until Ctrl-C comes, twice, and then as if none had come.

`python interrupt_child.py SPILL` prints "train" where it may be interrupted, and at last one JSON
object: what was found after each interrupt.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
import threading
from typing import Any

import torch
from freeze_imports import freeze_imports
from weights_runs import seeded
from zoo import GPT

import offcompile

WORDS, LENGTH, INTERRUPTS = 96, 32, 2


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    freeze_imports()
    ours: Any = seeded(lambda: GPT(WORDS, 64, 2, 4, LENGTH))
    plain: Any = seeded(lambda: GPT(WORDS, 64, 2, 4, LENGTH))
    options = {"memory": "minimum", "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}
    options["spill"] = sys.argv[1]
    run: Any = torch.compile(ours, backend="offcompile", options=options)
    twin: Any = torch.compile(plain, backend="aot_eager")

    def step(run: Any, model: Any, number: int) -> list[torch.Tensor]:
        drawn = torch.Generator().manual_seed(number)
        model.zero_grad()
        loss = run(torch.randint(0, WORDS, (4, LENGTH + 1), generator=drawn))
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    def is_right(number: int) -> bool:
        return all(map(torch.equal, step(run, ours, number), step(twin, plain, number)))

    def held() -> list[int | float]:
        ours.zero_grad()
        gc.collect()
        now = offcompile.counters()
        return [now[name] for name in ("live_tickets", "in_flight_bytes", "spill_bytes")]

    found: list[dict[str, Any]] = [{"right": is_right(0), "held": held()}]
    alive = {t.name for t in threading.enumerate()}
    for _ in range(INTERRUPTS):
        try:
            print("train", flush=True)
            while True:
                step(run, ours, 1)
        except KeyboardInterrupt:
            pass
        dead = sorted(alive - {t.name for t in threading.enumerate()})
        found.append({"right": is_right(2), "held": held(), "dead": dead})
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
