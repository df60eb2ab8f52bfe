"""Reduces the gradients of a DDP module inside backward, in place of DDP, if all ranks agree.

DDP goes on sending buffers and following `no_sync()`. It tells its reducer when the gradients of a
forward are to be reduced, and that reducer is replaced. Ranks that replaced it alone would wait for
each other's collectives for ever. So each writes into the store of the group whether it can, at its
first forward that runs a graph; the first that knows the vote of all, or has waited for too long,
writes the decision, which all obey. No rank can have passed a collective meanwhile that another has
yet to meet, because none of them leaves that forward before the decision is made.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.report.log import tell_once, warn
from offcompile.runtime.base.once import made_once
from offcompile.runtime.ranks.buckets import bucket_bytes, cut
from offcompile.runtime.ranks.exchange import AllReduce
from offcompile.runtime.ranks.gradient_reducer import GradientReducer

from .absence import Ranks
from .neighbourhood import Neighbourhood
from .torch_state import default_store, running_replica

#: how long a rank waits for the votes of the others
LONGEST_S = 120.0
YES, NO = "yes", "no"


@dataclass
class _Past:
    """Keeps what this process has decided so far."""

    modules: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    #: modules decided on, by content: ranks count those of equal content alike
    alike: Counter[str] = field(default_factory=Counter)


def _past() -> _Past:
    return made_once("which DDP modules are reduced in backward", None, _Past)


class InPlaceOfDDPs:
    """Stands where DDP has its reducer, and does what DDP asks it for in a step.

    gradients: None in a group of one rank, whose gradients are those of all.
    """

    def __init__(self, gradients: GradientReducer | None) -> None:
        self.gradients = gradients

    def prepare_for_forward(self) -> None:
        """Do nothing: DDP's reducer counts iterations here."""

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Reduce the gradients of the forward that has just run; DDP says so outside of no_sync."""
        if self.gradients is not None:
            self.gradients.expect()

    def _rebuild_buckets(self) -> bool:
        return False

    def held_bytes(self) -> int:
        return 0 if self.gradients is None else self.gradients.held_bytes()

    def __getattr__(self, name: str) -> Any:
        raise OffloadError(
            f"DistributedDataParallel was asked for something ({name}) that its gradients cannot"
            " have once offcompile reduces them inside backward. Ask for it before the first"
            " forward (communication hooks, static_graph, join): DDP then reduces them itself"
        )


def reduce_in_backward() -> None:
    """Take over the gradients of the DDP module whose forward is running, at its first graph."""
    ddp = running_replica()
    if ddp is None or not torch.is_grad_enabled() or ddp in _past().modules:
        return
    _past().modules.add(ddp)
    if torch.distributed.get_world_size(ddp.process_group) == 1:
        obstacle = _asked_of_ddp(ddp)
        taken = obstacle is None
        if taken:
            _give_up_buckets(ddp)
            _replace(ddp, None)
    else:
        obstacle, ranks = _obstacle(ddp), _ranks_of(ddp)
        taken = ranks is not None and _take_over(ddp, ranks, obstacle is None)
    if not taken:
        tell_once(
            "DistributedDataParallel reduces its gradients itself, after backward:"
            f" {obstacle or 'other ranks need it to'}"
        )


def ddp_reduces() -> bool:
    """True if DDP itself is to reduce the gradients of the module whose forward is running."""
    reduce_in_backward()
    ddp = running_replica()
    if ddp is None or not torch.is_grad_enabled():
        return False
    alone = torch.distributed.get_world_size(ddp.process_group) == 1
    return not alone and not isinstance(ddp.reducer, InPlaceOfDDPs)


def _obstacle(ddp: Any) -> str | None:
    """Say why DDP has to reduce the gradients of this module itself; None: it need not."""
    trained = [p for p in ddp._module_parameters if p.requires_grad]
    if torch.distributed.get_backend(ddp.process_group) != "gloo":
        return "its process group is not gloo"
    if any(type(p) is not torch.nn.Parameter or p.device.type != "cpu" for p in trained):
        return "not all of its parameters are plain ones on the CPU"
    return _asked_of_ddp(ddp)


def _asked_of_ddp(ddp: Any) -> str | None:
    """Say what DDP alone can do and was asked for; None: nothing."""
    if not any(p.requires_grad for p in ddp._module_parameters):
        return "none of its parameters is trained any more"
    if any(getattr(m, "sparse", False) for m in ddp.module.modules()):
        return "it has sparse gradients"
    for name in ("find_unused_parameters", "static_graph"):
        if getattr(ddp, name):
            return f"{name}=True, so parameters may get no gradient"
    if ddp._get_ddp_logging_data().get("comm_hook"):
        return "it has a communication hook"
    asked = ("mixed_precision", "_delay_all_reduce_params", "_use_python_reducer")
    if any(getattr(ddp, name) for name in asked) or ddp._join_config.enable:
        return "its settings (mixed precision, delayed parameters, join) need it to"
    if any(hasattr(p, "_in_backward_optimizers") for p in ddp._module_parameters):
        return "torch updates its parameters in backward"
    return None


def _ranks_of(ddp: Any) -> Ranks | None:
    distributed: Any = torch.distributed
    store = default_store()
    if store is None:
        return None
    members = distributed.get_process_group_ranks(ddp.process_group)
    return Ranks(store, distributed.get_rank(), members)


def _all_can(ranks: Ranks, key: str, mine: bool) -> bool:
    """Tell the other ranks if this one can take over, and hear what is decided."""
    store, rank = ranks.store, ranks.rank
    ranks.arrive()
    store.set(f"{key}/{rank}", YES if mine else NO)
    votes, vote = [f"{key}/{r}" for r in ranks.members], NO
    if mine:
        ended = ranks.wait(votes, LONGEST_S)
        if ended is not None:
            raise ranks.error(f"{ended}. Gradients cannot be reduced without it")
        if store.check(votes):
            vote = YES if all(store.get(v).decode() == YES for v in votes) else NO
        else:
            warn(
                f"rank {rank} has waited {LONGEST_S:.0f} s for the other ranks to run"
                " the same DistributedDataParallel module for the first time, and goes on"
            )
    # the first decision stands
    return bool(store.compare_set(f"{key}/decided", "", vote).decode() == YES)


def _key(ddp: Any, members: Sequence[int]) -> str:
    said = [(n, tuple(p.shape), str(p.dtype)) for n, p in ddp.module.named_parameters()]
    content = f"{said} {ddp.bucket_bytes_cap} {list(members)}"
    digest = hashlib.sha256(content.encode()).hexdigest()[:32]
    _past().alike[digest] += 1
    return f"offcompile/reduction/{digest}/{_past().alike[digest]}"


def _take_over(ddp: Any, ranks: Ranks, mine: bool) -> bool:
    """Reduce gradients in place of DDP. mine: this rank can. False if not all ranks can."""
    trained = [p for p in ddp._module_parameters if p.requires_grad]
    key, group = _key(ddp, ranks.members), ddp.process_group
    size = bucket_bytes(trained, ddp.bucket_bytes_cap)
    buckets = cut(trained, size)
    beside = Neighbourhood(ranks, key, buckets, size) if mine else None
    if not _all_can(ranks, key, mine) or beside is None:
        return False
    _give_up_buckets(ddp)
    exchange = beside.meet(group, LONGEST_S) or AllReduce(group, buckets, size)
    _replace(ddp, GradientReducer(trained, buckets, exchange, ranks.failed))
    return True


def _give_up_buckets(ddp: Any) -> None:
    """Have torch free DDP's buckets, which it does only for another reducer: of one parameter."""
    trained = (p for p in ddp._module_parameters if p.requires_grad)
    least = min(trained, key=lambda p: p.numel())
    ddp._ddp_init_helper([least], [False], {0: "the smallest parameter"}, False)


def _replace(ddp: Any, gradients: GradientReducer | None) -> None:
    ddp.reducer = InPlaceOfDDPs(gradients)
    ddp.register_comm_hook = _too_late


def _too_late(*args: Any, **more: Any) -> None:
    raise OffloadError(
        "Register communication hooks of DistributedDataParallel before its first forward:"
        " offcompile reduces its gradients inside backward by now"
    )
