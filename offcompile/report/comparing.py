"""Measures the difference between two tensors, in elements, in ulp and in value."""

from __future__ import annotations

import math

import torch

from .verified import Compared

#: elements compared at a time, to limit memory for large tensors
CHUNK = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(name: str, kind: str, found: object, expected: object) -> Compared | None:
    """Compare `found` with the plain run's result; None if `expected` is not a tensor."""
    if not isinstance(expected, torch.Tensor):
        return None
    elements = expected.numel()
    if not isinstance(found, torch.Tensor):
        return Compared(name, kind, elements, note=f"is {found!r} and no tensor")
    if found.layout is not torch.strided or expected.layout is not torch.strided:
        return Compared(name, kind, elements, note=f"not compared: it is {expected.layout}")
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        note = f"is {_of_type(found)} and would be {_of_type(expected)}"
        return Compared(name, kind, elements, note=note)
    mine, theirs = (x.detach().to("cpu").reshape(-1) for x in (found, expected))
    if mine.dtype.is_complex:
        mine, theirs = (torch.view_as_real(x.resolve_conj()).reshape(-1) for x in (mine, theirs))
    differing, most_ulp, most = 0, 0.0, 0.0
    for a, b in zip(_parts(mine), _parts(theirs), strict=True):
        apart = _apart(a, b)
        if apart is not None:
            differing += apart[0]
            most_ulp, most = max(most_ulp, apart[1]), max(most, apart[2])
    if not differing:
        return Compared(name, kind, elements)
    largest = _largest(theirs)
    share = most / largest if largest else (math.inf if most else 0.0)
    return Compared(name, kind, elements, differing, most_ulp, share)


def _of_type(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _apart(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float, float] | None:
    """The number of differing elements, and the largest distances in ulp and value; None if all
    are equal."""
    bits = _BITS[a.element_size()]
    x, y = a.contiguous().view(bits), b.contiguous().view(bits)
    if torch.equal(x, y):
        return None
    unequal = x != y
    if a.is_floating_point():
        unequal &= ~(_is_nan(a) & _is_nan(b))
    if not unequal.any():
        return None
    a, b, x, y = a[unequal], b[unequal], x[unequal].long(), y[unequal].long()
    distance = (a.double() - b.double()).abs()
    if not a.is_floating_point():
        return len(a), float(distance.max()), float(distance.max())
    ulp = _ulp(x, y, 8 * a.element_size())
    ulp[distance.isnan() | distance.isinf()] = math.inf
    distance[distance.isnan()] = math.inf
    return len(a), float(ulp.max()), float(distance.max())


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[begin : begin + CHUNK] for begin in range(0, len(x), CHUNK)]


def _largest(x: torch.Tensor) -> float:
    """The largest magnitude among the finite values."""
    return max(
        float(torch.where(part.double().isfinite(), part.double(), 0.0).abs().max())
        for part in _parts(x)
    )


def _is_nan(x: torch.Tensor) -> torch.Tensor:
    return x.double().isnan()


def _ulp(x: torch.Tensor, y: torch.Tensor, bits: int) -> torch.Tensor:
    """The distance in ulp between floats given by their bits."""
    mask = (1 << (bits - 1)) - 1
    same_sign = (x < 0) == (y < 0)
    x, y = x & mask, y & mask
    return torch.where(same_sign, (x - y).abs().double(), x.double() + y.double())
