"""Measures host rates other than matrix products: attention, AdamW, one-thread copies, files.

Each function takes sizes, so that tests can be fast; the defaults give steady figures.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.disk.spill_space import Extent
from offcompile.runtime.memory.arena import Arena
from offcompile.runtime.memory.blocks import MemoryBlock

from .timing import time_us, undisturbed

ADAM_PARAMETERS = 1 << 24
COPY_BYTES = 64 << 20
FILE_BYTES = 128 << 20
_CHUNK_BYTES = 8 << 20


class AttentionShape(NamedTuple):
    batch: int
    heads: int
    sequence: int
    head_size: int

    @property
    def forward_flop(self) -> int:
        """Two matrix products (scores and values), without a mask."""
        return 4 * self.batch * self.heads * self.sequence**2 * self.head_size

    @property
    def backward_flop(self) -> int:
        """Five matrix products, one of which recomputes the scores."""
        return self.forward_flop * 5 // 2


ATTENTION_SHAPE = AttentionShape(1, 8, 1024, 64)


def attention_passes(
    operand: Callable[[], torch.Tensor],
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward of scaled dot product attention; call them while gradients are enabled.

    operand: makes queries, keys and values.
    """
    q, k, v = (operand().requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v)
    grad = torch.ones_like(out)

    def forward() -> None:
        F.scaled_dot_product_attention(q, k, v)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return forward, backward


def attention_flop_per_us(
    shape: AttentionShape = ATTENTION_SHAPE, dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    """Rates of scaled dot product attention, forward and backward."""
    with undisturbed(), torch.enable_grad():
        forward, backward = attention_passes(lambda: torch.randn(shape).to(dtype))
        return (
            shape.forward_flop / time_us(forward, 0.1),
            shape.backward_flop / time_us(backward, 0.1),
        )


def adam_parameters_per_us(parameters: int = ADAM_PARAMETERS) -> float:
    """Rate of torch's fused AdamW on float32 in memory, all threads."""
    with undisturbed():
        weight = torch.nn.Parameter(torch.ones(parameters))
        weight.grad = torch.full_like(weight, 1e-3)
        optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)
        optimizer.step()
        return parameters / time_us(optimizer.step, 0.1)


def copy_bytes_per_us(nbytes: int = COPY_BYTES) -> float:
    """Rate of copies from memory to memory by one thread."""
    with undisturbed():
        source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
        pointers = target.data_ptr(), source.data_ptr()
        return nbytes / time_us(lambda: ctypes.memmove(*pointers, nbytes), 0.1)


# --- files ---------------------------------------------------------------------------------


class FileSpeed(NamedTuple):
    """Bytes per microsecond; `measure_disk` measures the other file rates."""

    read_buffered: float
    write_buffered: float
    read_both: float
    write_both: float


def passes_page_cache(directory: str | os.PathLike[str]) -> bool:
    """True if direct I/O works in the directory."""
    with SpillStore([directory], reserve_bytes=0) as store:
        return store.direct


def measure_files(
    directory: str | os.PathLike[str], seconds: float = 1.0, nbytes: int = FILE_BYTES
) -> FileSpeed:
    """Rates through the page cache, and of reads beside writes as lanes do; leaves no files."""
    chunk = min(_CHUNK_BYTES, nbytes)
    blocks = [Arena(chunk).block(chunk) for _ in range(2)]
    for block in blocks:
        block.tensor.random_(0, 256)  # some disks are quicker on zeros
    read_buffered, write_buffered = _buffered(directory, blocks[0], nbytes // chunk)
    with SpillStore([directory], reserve_bytes=0) as store:
        extents = [store.allocate(nbytes // chunk * chunk) for _ in range(2)]
        for extent in extents:
            for at in range(0, extent.nbytes, chunk):
                store.write(extent, at, blocks[0].view)
        if not store.direct:
            store.flush()
        read_both, write_both = _both(store, extents, blocks, seconds)
    return FileSpeed(read_buffered, write_buffered, read_both, write_both)


def _buffered(
    directory: str | os.PathLike[str], block: MemoryBlock, chunks: int
) -> tuple[float, float]:
    """Rates of reading and writing: writes end on the disk, and reads find nothing cached."""
    nbytes = chunks * len(block.view)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        # once to allocate the disk space, once for the time
        for _ in range(2):
            file.seek(0)
            begun = time.perf_counter()
            for _ in range(chunks):
                file.write(block.view)
            os.fdatasync(file.fileno())
            writing = time.perf_counter() - begun
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun = time.perf_counter()
        for _ in range(chunks):
            file.readinto(block.view)
        reading = time.perf_counter() - begun
    return nbytes / (reading * 1e6), nbytes / (writing * 1e6)


def _both(
    store: SpillStore, extents: list[Extent], blocks: list[MemoryBlock], seconds: float
) -> tuple[float, float]:
    """Read one extent on a thread while another writes the other; each for the whole time."""
    begin = threading.Barrier(2)
    rates = [0.0, 0.0]
    errors: list[BaseException] = []

    def run(which: int, move: Callable[[Extent, int, memoryview], None]) -> None:
        extent, view = extents[which], blocks[which].view
        offsets = range(0, extent.nbytes, len(view))
        moved = 0
        try:
            begin.wait()
            begun = time.perf_counter()
            while not moved or time.perf_counter() - begun < seconds:
                move(extent, offsets[moved % len(offsets)], view)
                moved += 1
            taken = time.perf_counter() - begun
        except Exception as error:
            begin.abort()
            errors.append(error)
        else:
            rates[which] = moved * len(view) / (taken * 1e6)

    # without direct I/O, reads may come from memory; `passes_page_cache` reports that
    threads = [
        threading.Thread(target=run, args=pair) for pair in ((0, store.read), (1, store.write))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return rates[0], rates[1]
