"""The matrix of two ranks: how the model is wrapped, compiled, stepped and updated, in what budget.

`pair_of_ranks.run(cells)` trains each on two processes over gloo (`rank_child.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

#: budgets of the small model: all that moves fits, half of it, nothing
AMPLE, MIDDLING, MINIMUM = "1GiB", "8MiB", "minimum"
BUDGETS = (AMPLE, MIDDLING, MINIMUM)
#: budget where FSDP2 keeps more: whole gradients between passes in no_sync, whole weights after
#: forward, or the model as one group; 8.34 to 8.93 MiB is the least
WHOLE = "10MiB"


@dataclass(frozen=True)
class Cell:
    """One training run; the same run under `aot_eager` and torch's fused optimizers is its twin.

    wrap: ddp, fsdp (blocks and root), fsdp_root. order: what is compiled, and when: whole (the
    wrapped model), inside (the model, before it is wrapped), blocks (each, before), blocks_after.
    steps: plain, accumulate (two backward passes a step), no_sync (the first of the two without
    communication). optimizer: torch, clipped (torch's, with clip_grad_norm_), or one of ours.
    """

    wrap: str
    order: str
    memory: str
    optimizer: str = "torch"
    steps: str = "plain"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        said = " ".join(f"{k}={v}" for k, v in self.settings.items())
        parts = (self.wrap, self.order, self.optimizer, self.steps, said, self.memory)
        return " ".join(part for part in parts if part)


def _cells() -> tuple[Cell, ...]:
    found = [
        Cell(wrap, order, WHOLE if (wrap, memory) == ("fsdp_root", MIDDLING) else memory)
        for wrap, orders in {
            "ddp": ("whole", "inside", "blocks"),
            "fsdp": ("whole", "blocks", "blocks_after"),
            "fsdp_root": ("whole", "inside"),
        }.items()
        for order, memory in product(orders, BUDGETS)
    ]
    tight = (MIDDLING, MINIMUM)
    for settings in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 1},
        {"find_unused_parameters": True},
    ):
        found += [Cell("ddp", "inside", memory, settings=settings) for memory in tight]
        found.append(Cell("ddp", "whole", MINIMUM, settings=settings))
    for steps in ("accumulate", "no_sync"):
        found += [Cell("ddp", order, MINIMUM, steps=steps) for order in ("whole", "inside")]
        memory = WHOLE if steps == "no_sync" else MIDDLING
        found += [Cell("fsdp", order, memory, steps=steps) for order in ("whole", "blocks_after")]
    for settings in (
        {"mp_policy": "bfloat16"},
        {"offload_policy": "cpu"},
        {"reshard_after_forward": False},
    ):
        some = (WHOLE, MINIMUM) if "reshard_after_forward" in settings else tight
        found += [Cell("fsdp", "blocks_after", memory, settings=settings) for memory in some]
    for optimizer in ("ours", "overlap", "max_norm", "overlap_max_norm"):
        found.append(Cell("ddp", "inside", MINIMUM, optimizer))
        found.append(Cell("ddp", "whole", MIDDLING, optimizer))
        found += [Cell("fsdp", order, MIDDLING, optimizer) for order in ("whole", "blocks_after")]
    for steps in ("accumulate", "no_sync"):
        found.append(Cell("ddp", "inside", MINIMUM, "overlap", steps))
    found.append(Cell("ddp", "whole", MINIMUM, "overlap_max_norm", "accumulate"))
    found.append(Cell("ddp", "inside", MIDDLING, "overlap", "no_sync"))
    for optimizer in ("sharded", "overlap_sharded", "overlap_sharded_max_norm"):
        found += [Cell("ddp", order, MINIMUM, optimizer) for order in ("whole", "blocks")]
        found.append(Cell("ddp", "inside", MIDDLING, optimizer))
    found.append(Cell("ddp", "inside", MINIMUM, "overlap_sharded", "accumulate"))
    found.append(Cell("ddp", "inside", MIDDLING, "overlap_sharded", "no_sync"))
    found.append(Cell("fsdp", "blocks_after", WHOLE, "overlap", "no_sync"))
    found.append(Cell("fsdp", "blocks_after", MIDDLING, "clipped"))
    return tuple(found)


CELLS = _cells()
#: on four ranks. Sums of more than two have other bits where DDP is reduced in its place, so here
#: DDP reduces by itself.
ON_FOUR = (
    Cell("ddp", "inside", MIDDLING, settings={"static_graph": True}),
    Cell("ddp", "whole", MINIMUM, settings={"find_unused_parameters": True}),
    Cell("fsdp", "whole", MIDDLING),
    Cell("fsdp", "blocks_after", MINIMUM, steps="accumulate"),
    Cell("fsdp", "blocks_after", MIDDLING, "overlap_max_norm"),
    Cell("fsdp_root", "whole", WHOLE),
)
#: some that always run, beside those of `trust.ranks`
FEW = (
    Cell("ddp", "inside", MIDDLING, "overlap_sharded"),
    Cell("fsdp", "blocks_after", MIDDLING, "overlap_max_norm"),
)
