"""Looks up what torch.distributed keeps to itself, by names that a version of torch may lack."""

from __future__ import annotations

import sys
from typing import Any

import torch


def running_replica() -> Any:
    """The DDP module whose forward is running; None if there is none."""
    replicas: Any = sys.modules.get("torch.nn.parallel.distributed")
    if replicas is None or not torch.distributed.is_available():
        return None
    return getattr(replicas.DistributedDataParallel, "_active_ddp_module", None)


def default_store() -> Any:
    """The store of the default group, through which ranks can tell each other things."""
    distributed: Any = torch.distributed
    find = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()


def timeout_s(group: Any) -> float:
    """After so many seconds a collective of the group fails; torch's default if it does not say."""
    try:
        found = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return 1800.0
    return float(found.total_seconds())
