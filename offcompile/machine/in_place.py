"""The cost of operands that an op accesses in place, in host memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InPlace:
    """The time that each byte of an operand adds to an op that accesses it in place on the host."""

    read_us_per_byte: float = 0.0
    write_us_per_byte: float = 0.0
    #: a product reads its operand once for each so many rows of the other; None: once in all
    rows_a_read: int | None = None

    def us(self, duration_us: float, nbytes: float, writes: bool = False) -> float:
        """The duration of an op that takes `duration_us` without in-place access."""
        return duration_us + nbytes * (self.write_us_per_byte if writes else self.read_us_per_byte)

    def times_read(self, rows: int) -> float:
        """How often a product with so many rows of the other operand reads this one."""
        return 1.0 if self.rows_a_read is None else max(1.0, rows / self.rows_a_read)

    def update_us(self, nbytes: int) -> float:
        """The time to update weights in place: the link moves both ways at once."""
        return nbytes * max(self.read_us_per_byte, self.write_us_per_byte)
