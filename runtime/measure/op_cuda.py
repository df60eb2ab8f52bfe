"""Measures one op on a CUDA device: its time by stream events, its workspace by the allocator."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch

from offcompile.runtime.base.clock import timed_event

WARM_RUNS, MOST_RUNS = 2, 20
#: the allocator's granularity: smaller results are rounding
LEAST_WORKSPACE_BYTES = 512


def cuda_time_us(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median time of one run among several that were queued back to back.

    An op that takes longer than `seconds` runs twice: an operand read over the bus may take a
    hundred times as long as one on the card, and then nobody needs to know exactly.
    """
    run()
    first_us = _runs_us(run, device, 1)[0]
    if first_us > seconds * 1e6:
        return first_us
    for _ in range(WARM_RUNS - 1):
        run()
    count = max(3, min(MOST_RUNS, int(seconds * 1e6 / max(first_us, 1.0))))
    return statistics.median(_runs_us(run, device, count))


def _runs_us(run: Callable[[], object], device: torch.device, count: int) -> list[float]:
    stream = torch.cuda.current_stream(device)
    marks = [timed_event() for _ in range(count + 1)]
    marks[0].record(stream)
    for mark in marks[1:]:
        run()
        mark.record(stream)
    marks[-1].synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]


def cuda_workspace_bytes(
    run: Callable[[], object], device: torch.device, made_bytes: Callable[[object], int]
) -> int:
    """Peak allocator bytes of a warm run beyond its inputs and the tensors it returns."""
    run()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    made = run()
    torch.cuda.synchronize(device)
    beyond = torch.cuda.max_memory_allocated(device) - before - made_bytes(made)
    return beyond if beyond > LEAST_WORKSPACE_BYTES else 0
