"""Looks if the connection to another rank is closed, where gloo connects the default group.

The system closes a process's connections when it ends, on another machine too. gloo notices that,
and refuses from then on to receive anything from there. So this asks for a message that no rank
ever sends, under a tag of its own, and leaves the request alone: a wait for it that runs out of
time would close all connections. No collective and no message of the user's is touched.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch

#: no message has this tag
TAG = 0x0FFC
#: gloo's words for a connection whose other end is gone
CLOSED = ("closed by peer", "reset by peer", "broken pipe")


def is_closed(rank: int) -> bool:
    """True if the rank has closed its connection to this one; False if it has not, or there is no
    way to know."""
    distributed: Any = torch.distributed
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        return False  # there may be no connection yet
    with suppress(ValueError):
        try:
            if _is_gloo():
                distributed.irecv(torch.empty(1, dtype=torch.uint8), src=rank, tag=TAG)
        except RuntimeError as error:
            return any(word in str(error).lower() for word in CLOSED)
    return False


def _is_gloo() -> bool:
    distributed: Any = torch.distributed
    found = distributed.get_backend()
    return "gloo" in (found, str(found).partition("cpu:")[2].partition(",")[0])
