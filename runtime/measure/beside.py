"""Measures how much compute loses to a concurrent copy, or to a concurrent transfer of a disk.

With a core to spare, it loses next to nothing. If every core computes, each op is split evenly
among its threads, and all of them wait for the thread whose core the copy is on. Then compute loses
nearly as long as the copy would have taken alone. Direct I/O bypasses the processor, but not the
memory, and in a virtual machine others work for it on the same cores.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.memory.arena import Arena

from .timing import Stopwatch, matmul_flop_per_us, undisturbed

#: target time of one matrix product
PRODUCT_US = 8_000.0
SIDE = 1024
#: each round times PRODUCTS products beside copies, between two times alone
ROUNDS, PRODUCTS = 5, 4
COPY_BYTES, PIECE_BYTES = 64 << 20, 8 << 20
#: for disks, which take a smaller share: more rounds of shorter products, with GELUs between them
DISK_ROUNDS, DISK_PRODUCT_US, GELU_BYTES = 17, 4_000.0, 16 << 20

Moves = Sequence[Callable[[], object]]


def copy_toll_share(
    product_us: float = PRODUCT_US, rounds: int = ROUNDS, copy_bytes: int = COPY_BYTES
) -> float | None:
    """The time that compute with all of torch's threads loses to one more thread's copies, over the
    time that the copies take alone: from 0 (nothing) to 1.

    None if other processes held the processor, so that nothing can be said.
    """
    with undisturbed():
        source, target = (torch.ones(copy_bytes, dtype=torch.uint8) for _ in range(2))
        piece = min(PIECE_BYTES, copy_bytes)
        copies = [
            partial(ctypes.memmove, target.data_ptr() + start, source.data_ptr() + start, piece)
            for start in range(0, copy_bytes - piece + 1, piece)
        ]
        return _lost_share(_products(product_us), Repeated(copies), rounds)


def disk_toll_share(
    directory: str | os.PathLike[str],
    product_us: float = DISK_PRODUCT_US,
    rounds: int = DISK_ROUNDS,
    nbytes: int = COPY_BYTES,
) -> float | None:
    """The same for reads and writes, in turn, of a spill file in this directory."""
    piece = min(PIECE_BYTES, nbytes)
    block = Arena(piece).block(piece)
    with undisturbed(), SpillStore([directory], reserve_bytes=0) as store:
        block.tensor.random_(0, 256)  # some disks are quicker on zeros
        extent = store.allocate(nbytes)
        moves: list[Callable[[], object]] = []
        for start in range(0, nbytes - piece + 1, piece):
            store.write(extent, start, block.view)  # slower the first time than ever after
            moves += [
                partial(store.write, extent, start, block.view),
                partial(store.read, extent, start, block.view),
            ]
        compute = _products(product_us, gelu_bytes=GELU_BYTES)
        return _lost_share(compute, Repeated(moves), rounds)


def _products(product_us: float, gelu_bytes: int = 0) -> Callable[[], None]:
    """Matrix products, with GELUs of so many bytes between them."""
    flop = product_us * matmul_flop_per_us(torch.float32)
    left = torch.ones(max(1, int(flop / (2 * SIDE**2))), SIDE, device="cpu")
    right = torch.ones(SIDE, SIDE, device="cpu")
    between = torch.ones(gelu_bytes // 4, device="cpu")

    def compute() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right)
            if gelu_bytes:
                torch.nn.functional.gelu(between)

    return compute


def _lost_share(compute: Callable[[], None], moves: Repeated, rounds: int) -> float | None:
    """The share of the moves' own time that compute loses beside them; None if disturbed."""

    def compute_s() -> float:
        begun = time.perf_counter()
        compute()
        return time.perf_counter() - begun

    compute_s()
    alone_s = moves.alone_s()
    shares = []
    for _ in range(rounds):
        with Stopwatch() as early:
            before_s = compute_s()
        with moves.running():
            beside_s = compute_s()
        with Stopwatch() as late:
            after_s = compute_s()
        if moves.mean_s > 0 and not (early.disturbed or late.disturbed):
            lost = 1 - (before_s + after_s) / 2 / beside_s
            shares.append(lost * moves.mean_s / alone_s)
    if 2 * len(shares) <= rounds:
        return None
    shares.sort()
    middle = shares[len(shares) // 4 : len(shares) - len(shares) // 4]
    return min(max(statistics.fmean(middle), 0.0), 1.0)


class Repeated:
    """Makes moves again and again on a thread of its own, one after the other, as lanes do."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._stop = threading.Event()
        #: mean time of a move in the last run
        self.mean_s = 0.0

    def alone_s(self) -> float:
        return statistics.fmean(self._taken())

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
            for move_s in self._taken():
                taken.append(move_s)
                if self._stop.is_set():
                    break
        self.mean_s = statistics.fmean(taken) if taken else 0.0

    def _taken(self) -> Iterator[float]:
        for move in self._moves:
            begun = time.perf_counter()
            move()
            yield time.perf_counter() - begun
