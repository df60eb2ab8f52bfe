"""Views of tensors for kernels: flat, or rows with a pitch; as integers to preserve bits."""

from __future__ import annotations

import torch

#: casts between these match torch's bit for bit (NaN stays NaN, with the device's sign and
#: payload); fp8 does not: Triton saturates where torch gives NaN
CASTS = frozenset({torch.float32, torch.float16, torch.bfloat16})
INTEGERS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
ACCESS_BYTES = 16  # the widest access of a thread


def castable(target: torch.dtype, source: torch.dtype) -> bool:
    return target == source or {target, source} <= CASTS


def dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill one range of memory, each once, in any order."""
    expected = 1
    sized = [d for d in zip(tensor.stride(), tensor.shape, strict=True) if d[1] != 1]
    for stride, size in sorted(sized):
        if stride != expected:
            return False
        expected *= size
    return True


def dense_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if element i of a's memory corresponds to element i of b's, over the whole of both."""
    differ = [
        size != 1 and p != q for size, p, q in zip(a.shape, a.stride(), b.stride(), strict=True)
    ]
    return not any(differ) and dense(a)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat view of a dense tensor in memory order, detached from autograd."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def has_rows(tensor: torch.Tensor) -> bool:
    """True if it is a matrix whose rows are dense; they may be apart, overlap or be one row."""
    return tensor.dim() == 2 and (tensor.shape[1] <= 1 or tensor.stride(1) == 1)


def rows_apart(tensor: torch.Tensor) -> bool:
    """True if no two rows share an element, which is required of rows to be written."""
    return tensor.shape[0] <= 1 or tensor.stride(0) >= tensor.shape[1]


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the matrix with its pitch as stride(0), even if a size of 1 left it undefined."""
    rows, columns = tensor.shape
    pitch = tensor.stride(0) if rows > 1 else columns
    return tensor.detach().as_strided((rows, columns), (pitch, 1))


def as_integers(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns views as the widest integers that divide the rows, pitches and addresses of all."""
    flats = [t.view(torch.uint8) for t in tensors]
    divided = 0
    for t in flats:
        pitches = t.stride()[:-1]
        divided |= t.data_ptr() | int(t.storage_offset()) | t.shape[-1]
        for pitch in pitches:
            divided |= pitch
    width, dtype = next((w, d) for w, d in INTEGERS if divided % w == 0)
    return tuple(t if width == 1 else t.view(dtype) for t in flats)


def unit_of(elements_most: int, *counts: int) -> int:
    """Returns the largest power of two, at most `elements_most`, that divides all counts."""
    divided = elements_most
    for count in counts:
        divided |= count
    return divided & -divided


def next_power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
