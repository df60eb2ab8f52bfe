"""Looks up what torch.distributed keeps to itself, by names that a version of torch may lack."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

#: pauses between two looks at a store, for a key that another rank is to write
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1


def running_replica() -> Any:
    """The DDP module whose forward is running; None if there is none."""
    replicas: Any = sys.modules.get("torch.nn.parallel.distributed")
    if replicas is None or not torch.distributed.is_available():
        return None
    return getattr(replicas.DistributedDataParallel, "_active_ddp_module", None)


class QuietStore:
    """Torch's store, but for its `wait`: that prints two warnings each time it waits in vain."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def wait(self, keys: Sequence[str], longest: timedelta) -> None:
        """Wait for all keys. Raises RuntimeError if that takes too long, as torch does."""
        until, pause_s = time.monotonic() + longest.total_seconds(), FIRST_PAUSE_S
        while not self._store.check(keys):
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(f"wait timeout: {', '.join(keys)} did not come")
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def default_store() -> Any:
    """The store of the default group, through which ranks can tell each other things."""
    distributed: Any = torch.distributed
    find = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return None if find is None else QuietStore(find())


def timeout_s(group: Any) -> float:
    """After so many seconds a collective of the group fails; torch's default if it does not say."""
    try:
        found = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return 1800.0
    return float(found.total_seconds())
