"""Measures how much compute loses to a concurrent copy, if the processor does the copy.

With a core to spare, it loses next to nothing. If every core computes, each op is split evenly
among its threads, and all of them wait for the thread whose core the copy is on. Then compute loses
nearly as long as the copy would have taken alone.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .timing import Stopwatch, matmul_flop_per_us, undisturbed

#: target time of one matrix product
PRODUCT_US = 8_000.0
SIDE = 1024
#: each round times PRODUCTS products twice, once alone and once beside copies
ROUNDS, PRODUCTS = 5, 4
COPY_BYTES, PIECE_BYTES = 64 << 20, 8 << 20


def copy_toll_share(
    product_us: float = PRODUCT_US, rounds: int = ROUNDS, copy_bytes: int = COPY_BYTES
) -> float | None:
    """The time that compute with all of torch's threads loses to one more thread's copies, over the
    time that the copies take alone: from 0 (nothing) to 1.

    None if other processes held the processor, so that nothing can be said.
    """
    with undisturbed():
        flop = product_us * matmul_flop_per_us(torch.float32)
        left = torch.ones(max(1, int(flop / (2 * SIDE**2))), SIDE, device="cpu")
        right = torch.ones(SIDE, SIDE, device="cpu")
        copies = _Copies(copy_bytes)

        def product_s() -> float:
            begun = time.perf_counter()
            for _ in range(PRODUCTS):
                torch.mm(left, right)
            return (time.perf_counter() - begun) / PRODUCTS

        product_s()
        alone_s = copies.alone_s()
        shares = []
        for _ in range(rounds):
            with Stopwatch() as watch:
                free_s = product_s()
            if watch.disturbed:
                continue
            with copies.running():
                beside_s = product_s()
            if copies.mean_s > 0:
                lost = 1 - free_s / beside_s
                shares.append(lost * copies.mean_s / alone_s)
    if 2 * len(shares) <= rounds:
        return None
    return min(max(statistics.median(shares), 0.0), 1.0)


class _Copies:
    """Copies memory again and again on a thread of its own, in pieces as lanes copy."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
        self._nbytes = nbytes
        self._stop = threading.Event()
        #: mean time of a piece in the last run
        self.mean_s = 0.0

    def alone_s(self) -> float:
        taken = list(self._pieces())
        return statistics.median(taken)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._stop.clear()
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        taken: list[float] = []
        while not self._stop.is_set():
            for piece_s in self._pieces():
                taken.append(piece_s)
                if self._stop.is_set():
                    break
        self.mean_s = statistics.fmean(taken) if taken else 0.0

    def _pieces(self) -> Iterator[float]:
        to, source = self._target.data_ptr(), self._source.data_ptr()
        piece = min(PIECE_BYTES, self._nbytes)
        for start in range(0, self._nbytes - piece + 1, piece):
            begun = time.perf_counter()
            ctypes.memmove(to + start, source + start, piece)
            yield time.perf_counter() - begun
