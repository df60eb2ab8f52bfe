"""Exact arithmetic for the two units of the contract: integer nanoseconds and whole bytes.

Figures arrive as decimal numbers (`1.0005` µs), so they are read as the decimals that were
written, not as the binary fractions nearest to them: 1.0005 µs is 1000.5 ns and rounds up.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

Number = int | float


@lru_cache(maxsize=65536)
def exact(value: Number) -> Fraction:
    """The decimal number as a person wrote it, as an exact fraction."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


@lru_cache(maxsize=65536)
def round_ns(duration_us: Number | Fraction) -> int:
    """Microseconds rounded to whole nanoseconds, halves up."""
    us = duration_us if isinstance(duration_us, Fraction) else exact(duration_us)
    return math.floor(us * 1000 + Fraction(1, 2))


def compressed_bytes(nbytes: int, ratio: Number) -> int:
    """The bytes of a copy stored at `ratio` of its size, rounded up."""
    return math.ceil(nbytes * exact(ratio))


@lru_cache(maxsize=65536)
def move_ns(
    moved_bytes: int,
    lane_bytes_per_us: Number,
    latency_us: Number,
    nbytes: int = 0,
    codec_bytes_per_us: Number | None = None,
) -> int:
    """The time for which one move holds its lane: latency, then the slower of link and codec."""
    work_us = moved_bytes / exact(lane_bytes_per_us)
    if codec_bytes_per_us is not None:
        work_us = max(work_us, nbytes / exact(codec_bytes_per_us))
    return round_ns(exact(latency_us) + work_us)


_STEPS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def show_bytes(nbytes: int) -> str:
    """Bytes for people: the exact figure, and a rounded one in the largest unit that fits."""
    for name, size in _STEPS:
        if abs(nbytes) >= size:
            return f"{nbytes:,} bytes ({nbytes / size:.2f} {name})"
    return f"{nbytes:,} bytes"


def size(nbytes: int) -> str:
    """Bytes in the unit that fits; exact figures are for `--json`."""
    for name, unit in _STEPS:
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} B"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """The text with unprintable characters escaped, except line ends."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def show_us(duration_us: float) -> str:
    """A duration for people."""
    if duration_us >= 1e6:
        return f"{duration_us / 1e6:.3f} s"
    if duration_us >= 1e3:
        return f"{duration_us / 1e3:.3f} ms"
    return f"{duration_us:.3f} µs"


def size_to_ask(nbytes: int) -> str:
    """A size to type in: three digits, rounded up."""
    for name, unit in _STEPS:
        if nbytes >= unit:
            digits = 2 if nbytes < 10 * unit else 1 if nbytes < 100 * unit else 0
            return f"{math.ceil(nbytes / unit * 10**digits) / 10**digits:.{digits}f}{name}"
    return str(nbytes)
