"""Counts the device memory that DDP and FSDP2 hold beside the graphs of a process.

- **DDP** keeps a bucket for every gradient from its construction on. With
  `gradient_as_bucket_view=True` gradients lie in the buckets once they are reduced. Where
  `ranks.reduction` has taken its place, a few buckets are alive at a time.
- **FSDP2** keeps shards and their gradients; the weights of groups that it does not reshard after
  forward; while a graph runs, the weights of one group that it gathers ahead, and the gradients of
  one group that it reduces. The weights and gradients of the graph itself are in its plan.

Both are found by names that torch does not document. Where a version of torch lacks one, nothing is
counted, and one warning says so.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch

from offcompile.report.log import warn
from offcompile.run.ranks.torch_state import running_replica
from offcompile.runtime.base.once import first_time
from offcompile.runtime.ranks.gradient_reducer import reducer_in_place_of


class RankMemory:
    """Counts the bytes that the wrappers of one process hold on one kind of device."""

    def __init__(self) -> None:
        #: DDP modules whose forward has run a graph
        self._replicated: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        #: cached groups, and the number of wrapped modules when they were looked up
        self._groups: tuple[int, list[weakref.ref[Any]]] = (0, [])

    def _look(self) -> None:
        """Note the DDP module whose forward is running: torch has no list of them."""
        active = running_replica()
        if active is not None:
            self._replicated.add(active)

    def held_bytes(self, known: Collection[int]) -> int:
        """Bytes held beside a graph in a step. known: ids of parameters counted elsewhere."""
        self._look()
        buckets = sum(map(_bucket_bytes, self._replicated))
        return buckets + _sharded_bytes(self._fsdp_groups(), known)

    def shards(self) -> list[torch.Tensor]:
        """The parameters of FSDP2 that optimizers have, and that no graph sees."""
        return [one.sharded_param for g in self._fsdp_groups() for one in g.fsdp_params]

    def _fsdp_groups(self) -> list[Any]:
        states: Any = sys.modules.get("torch.distributed._composable_state")
        if states is None:
            return []
        number = len(getattr(states, "_module_state_mapping", ()))
        if number != self._groups[0]:
            self._groups = number, [weakref.ref(g) for g in _groups(states)]
        return [g for ref in self._groups[1] if (g := ref()) is not None]


def _groups(states: Any) -> Iterator[Any]:
    """Groups of parameters that FSDP2 gathers together."""
    for ref in list(states._module_state_mapping.values()):
        state = ref()
        if type(state).__name__ != "FSDPState":
            continue
        found = _groups_of(state)
        if found is None:
            if first_time("FSDP2 is not counted"):
                warn(
                    f"torch {torch.__version__} does not say which parameters FSDP2 gathers"
                    " together: what it holds is not counted against the budget. Leave room for"
                    " shards, their gradients and twice the largest group"
                )
            continue
        yield from found


def _groups_of(state: Any) -> list[Any] | None:
    """The groups of one wrapped module; None if this torch does not say. Up to 2.11, it is one."""
    several: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if several is not None or not hasattr(state, "_fsdp_param_group"):
        return several
    group = state._fsdp_param_group
    return [] if group is None else [group]


def _bucket_bytes(ddp: Any) -> int:
    ours = reducer_in_place_of(ddp)
    if ours is not None:
        return int(ours.held_bytes())
    trained = [p for p in ddp.module.parameters() if p.requires_grad]
    nbytes: int = sum(p.numel() * p.element_size() for p in trained)
    if not ddp.gradient_as_bucket_view:
        return nbytes
    # counted with the parameters already
    lying: int = sum(p.grad.nbytes for p in trained if p.grad is not None)
    return nbytes - lying


def _sharded_bytes(groups: Collection[Any], known: Collection[int]) -> int:
    shards, standing, moving = 0, 0, [0]
    for group in groups:
        whole = unseen = 0
        for one in group.fsdp_params:
            shard = one.sharded_param
            local = shard.to_local().detach()
            if local.device.type == group.device.type and id(shard) not in known:
                shards += local.nbytes * (2 if shard.requires_grad else 1)
            dtype = getattr(one, "param_dtype", None) or local.dtype
            nbytes = one._orig_size.numel() * dtype.itemsize
            whole += nbytes
            unseen += 0 if id(getattr(one, "_unsharded_param", None)) in known else nbytes
        moving.append(whole)
        standing += 0 if group._reshard_after_forward else unseen
    # one group gathered ahead, and one that is being reduced
    return shards + standing + 2 * max(moving)
