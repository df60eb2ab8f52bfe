"""The child process of `benchmarks.spill`: measures a step with moves forced through a codec, the
rates of codecs, and those of spill files."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import activations_child
from offcompile.graph.lowering.rewrite import rewrite
from offcompile.ir import Plan
from offcompile.planning.feedback import profiling
from offcompile.run.plan import carry_out
from offcompile.runtime.base.mapping import Mapping
from offcompile.runtime.codecs import TensorCodec, codec
from offcompile.runtime.device import tickets
from offcompile.runtime.device.cpu import CpuDevice
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.memory.arena import Arena
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Load, Saved

MIB = 1 << 20
CHUNK_BYTES = 8 * MIB
#: sizes of what a conv net and a GPT save, MiB; most do not begin on a page
SAVED_MIB = (1, 3, 6, 6, 6, 12, 12, 12, 24, 24)
IN_FLIGHT = 4
#: most that a step holds of arriving tensors; a plan leaves a quarter of it to holes where it can
BUDGET_BYTES = IN_FLIGHT * max(SAVED_MIB) * MIB * 4 // 3


def serve(task: dict[str, Any]) -> None:
    """Serve as `benchmarks.activations_child` does, with `codec` for all activations that leave.

    "chosen" leaves it to the planner, which profiles; None moves them as they are.
    """
    if task["kind"] == "ours" and task["codec"] != "chosen":
        profiling.MOST_DECISIONS = profiling.FIRST_STEPS = 0
        carry_out.rewrite = _forcing(task["codec"])  # type: ignore[attr-defined]
    activations_child.serve(task)


def _forcing(codec: str | None) -> Callable[..., Any]:
    def with_codec(graphs: Any, annotated: Any, plan: Plan, *rest: Any) -> Any:
        dtypes = annotated.dtypes
        kinds = {t.id: t.kind for t in annotated.problem.tensors}

        def packed(tensor: str) -> bool:
            return kinds[tensor] == "activation" and dtypes.get(tensor) == torch.float32

        moves = (replace(m, codec=codec if packed(m.tensor) else None) for m in plan.moves)
        return rewrite(graphs, annotated, replace(plan, moves=tuple(moves)), *rest)

    return with_codec


# -- rates -----------------------------------------------------------------------------------------


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def codec_rates(nbytes: int, rounds: int) -> list[tuple[str, float, float, float]]:
    """(codec, share of zeros, pack and unpack over memcpy's rate) of raw bytes, on one thread."""
    torch.set_num_threads(1)
    x = torch.randn(nbytes // 4)
    copy = torch.empty_like(x)
    rows = []
    for name in ("bitmask", "fp16", "bitmask+fp16"):
        for zeros in (0.0, 0.5, 0.75):
            given = torch.where(torch.rand_like(x) < zeros, 0.0, x)
            rows.append((name, zeros, *_rates(codec(name), given, copy, rounds)))
    return rows


def _rates(
    one: TensorCodec, x: torch.Tensor, copy: torch.Tensor, rounds: int
) -> tuple[float, float]:
    out = torch.empty(one.worst_bytes(x.numel(), x.dtype), dtype=torch.uint8)
    used = one.pack(x, out)
    packs, unpacks = [], []
    for _ in range(rounds):
        base = _seconds(lambda: copy.copy_(x))
        packs.append(base / _seconds(lambda: one.pack(x, out)))
        unpacks.append(base / _seconds(lambda: one.unpack(out[:used], copy)))
    return statistics.median(packs), statistics.median(unpacks)


class Files:
    """The runtime's moves beside plain sequential direct I/O on the same disk.

    Both from memory in huge pages and of the same amount: the disk reads and writes small pages
    more slowly, whoever asks.
    """

    def __init__(self, directory: str, nbytes: int) -> None:
        heap().prepare()
        self._sizes: list[int] = []
        while sum(self._sizes) < nbytes:
            self._sizes.append(SAVED_MIB[len(self._sizes) % len(SAVED_MIB)] * MIB)
        self._total = sum(self._sizes)
        pages = [size + 4096 for size in self._sizes]
        # a tensor of malloc's begins 64 bytes into a page
        self._room = Arena(sum(pages))
        self._tensors = [self._room.block(page).tensor[64 : page - 4032] for page in pages]
        for tensor in self._tensors:
            tensor.random_(0, 256)
        self._store = SpillStore([directory])
        self._mover = Mover(CpuDevice(Arena(MIB), {"disk": self._store}))
        flags = os.O_RDWR | getattr(os, "O_TMPFILE", 0) | getattr(os, "O_DIRECT", 0)
        self._descriptor = os.open(Path(directory), flags, 0o600)
        self._length = self._total // CHUNK_BYTES * CHUNK_BYTES
        os.posix_fallocate(self._descriptor, 0, self._length)
        # a mapping as large as the tensors, so that caches serve neither
        self._mapping = Mapping(self._length)
        self._mapping.open(0, self._length)
        self._mapping.touch(0, self._length)

    def sequential(self, call: Callable[[int, list[memoryview], int], int]) -> float:
        view = self._mapping.view(0, self._length)

        def work() -> None:
            for at in range(0, self._length, CHUNK_BYTES):
                call(self._descriptor, [view[at : at + CHUNK_BYTES]], at)

        return self._length / _seconds(work) / 1e9

    def ours(self) -> tuple[float, float]:
        """GB/s out and in, in the order of a step: the tensor that left last comes back first.

        Used tensors make room for those that arrive, and the heap keeps a budget, as in a step.
        """
        held: list[torch.Tensor] = []

        def out() -> None:
            for number, tensor in enumerate(self._tensors):
                held.append(self._mover.start_out(tensor, str(number), "disk", "disk_write"))
            for ticket in held:
                self._mover.wait_out(tickets.find(ticket, Saved))

        def back() -> None:
            coming: list[tuple[torch.Tensor, torch.Tensor]] = []
            while held or coming:
                while held and len(coming) < IN_FLIGHT:
                    ticket = held.pop()
                    saved = tickets.find(ticket, Saved)
                    coming.append(self._mover.start_load(saved, saved.tag, "disk_read"))
                arriving = coming.pop(0)
                self._mover.wait_load(tickets.find(arriving[1], Load))

        heap().begin(0, BUDGET_BYTES)
        try:
            return self._total / _seconds(out) / 1e9, self._total / _seconds(back) / 1e9
        finally:
            heap().end()

    def close(self) -> None:
        self._mover.close()
        self._store.close()
        os.close(self._descriptor)


def file_rates(directory: str, nbytes: int, rounds: int) -> dict[str, float]:
    """GB/s of both and ours over sequential, medians of interleaved rounds after a warm one."""
    files = Files(directory, nbytes)
    rows = []
    try:
        for turn in range(rounds + 1):
            write, read = files.sequential(os.pwritev), files.sequential(os.preadv)
            out, back = files.ours()
            if turn:
                rows.append((write, read, out, back, out / write, back / read))
    finally:
        files.close()
    names = ("write", "read", "out", "back", "out share", "back share")
    columns = zip(*rows, strict=True)
    return {n: statistics.median(column) for n, column in zip(names, columns, strict=True)}
