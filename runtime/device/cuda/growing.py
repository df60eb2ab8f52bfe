"""Lets torch's caching allocator grow its segments, so that few bytes lie in gaps between blocks.

A plan holds tensors of many sizes, each for a time of its own. In segments of fixed size the gaps
between them took half as much again as the tensors (a GPT of 1.3 billion weights at a quarter of
its memory, on an H100).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import torch

from offcompile.runtime.base.once import first_time
from offcompile.runtime.memory.malloc.tensor_memory import USUAL, VARIABLE

log = logging.getLogger(__name__)

#: a user who sets one of these has configured torch's allocator
OF_TORCH = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SETTING = "expandable_segments:True"


def grow_segments(
    environment: Mapping[str, str] = os.environ,
    configure: Callable[[str], None] | None = None,
) -> bool:
    """Tell it, once in a process. False if it was told before, or if the user configured it."""
    configured = any(environment.get(name) for name in OF_TORCH)
    if configured or environment.get(VARIABLE) == USUAL:
        return False
    if torch.version.hip is not None or torch.cuda.get_allocator_backend() != "native":
        return False
    if not first_time("the allocator's segments", SETTING):
        return False
    (configure or torch._C._accelerator_setAllocatorSettings)(SETTING)
    log.info("torch's allocator: %s; set PYTORCH_ALLOC_CONF to have it otherwise", SETTING)
    return True
