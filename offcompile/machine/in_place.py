"""The cost of operands that an op uses in place, in host memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InPlace:
    """What each byte of an operand adds to an op that uses it in place on the host."""

    read_us_per_byte: float = 0.0
    write_us_per_byte: float = 0.0

    def us(self, duration_us: float, nbytes: int, writes: bool = False) -> float:
        """Of an op that takes `duration_us` otherwise."""
        return duration_us + nbytes * (self.write_us_per_byte if writes else self.read_us_per_byte)
