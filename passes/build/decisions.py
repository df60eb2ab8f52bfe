"""What policies decide, apart from when: who leaves the device in which gap, and how.

A *gap* of a tensor lies between two consecutive accesses to it (around the end of the step too
when the problem is steady). Naming the access before the gap names the gap.
"""

from __future__ import annotations

from dataclasses import dataclass

from offcompile.ir import HOST, Direct, Recompute, Update


@dataclass(frozen=True)
class Away:
    """`tensor` gives up its device copy after the op `after`, and is back for its next access.

    `after` None: the gap before the first access of a problem that is not steady. The bytes
    wait on `tier`, compressed with `codec` if one is named.
    """

    tensor: str
    after: str | None
    tier: str = HOST
    codec: str | None = None


@dataclass(frozen=True)
class Decisions:
    """Everything not named stays: on the device, plain, computed once, updated there."""

    away: tuple[Away, ...] = ()
    directs: tuple[Direct, ...] = ()
    recomputes: tuple[Recompute, ...] = ()
    updates: tuple[Update, ...] = ()
