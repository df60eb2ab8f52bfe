"""The decisions of a policy, without timing: which tensor is evicted in which gap, and how.

A *gap* of a tensor lies between two consecutive accesses to it (also across the end of the step if
the problem is steady). The access before a gap identifies it.
"""

from __future__ import annotations

from dataclasses import dataclass

from offcompile.ir import HOST, Direct, Recompute, Update


@dataclass(frozen=True)
class Away:
    """`tensor` loses its device copy after the op `after`, and is reloaded for its next access.

    `after` None: the gap before the first access in a problem that is not steady. The tensor is
    kept on `tier`, compressed with `codec` if one is named.
    """

    tensor: str
    after: str | None
    tier: str = HOST
    codec: str | None = None


@dataclass(frozen=True)
class Decisions:
    """Tensors and ops not listed stay on the device, uncompressed, computed once, updated there."""

    away: tuple[Away, ...] = ()
    directs: tuple[Direct, ...] = ()
    recomputes: tuple[Recompute, ...] = ()
    updates: tuple[Update, ...] = ()
