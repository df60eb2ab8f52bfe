"""Pinned host memory without CUDA: a registrar that keeps books, and fails when told to."""

from __future__ import annotations

import pytest

from offcompile.runtime.base import host_limits, once
from offcompile.runtime.memory import host_arena
from offcompile.runtime.memory.host_arena import HostArena

OUT_OF_MEMORY = 2
ILLEGAL_ACCESS = 700


class FakeRegistrar:
    """refuse_at: which call of `register` fails, counted from 1; stuck: `unregister` fails."""

    def __init__(self, refuse_at: int | None = None, stuck: bool = False) -> None:
        self.refuse_at = refuse_at
        self.stuck = stuck
        self.asked: list[int] = []
        self.held: dict[int, int] = {}
        self.wrong: list[str] = []

    def register(self, address: int, nbytes: int) -> int:
        self.asked.append(nbytes)
        if len(self.asked) == self.refuse_at:
            return OUT_OF_MEMORY
        for start, size in self.held.items():
            if start < address + nbytes and address < start + size:
                self.wrong.append(f"{address:#x} is registered already")
        self.held[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        if self.stuck:
            return ILLEGAL_ACCESS
        if self.held.pop(address, None) is None:
            self.wrong.append(f"{address:#x} is not registered")
        return 0


def isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 1 MiB, no bounds of this machine, nothing said yet."""
    monkeypatch.setattr(host_arena, "SEGMENT_BYTES", 1 << 20)
    monkeypatch.setattr(host_limits, "growth_bounds", list)
    monkeypatch.setattr(once, "_done", {})


def arena_of(limit_bytes: int = 64 << 20, ready_bytes: int = 0) -> HostArena:
    return HostArena(limit_bytes, ready_bytes, FakeRegistrar())
