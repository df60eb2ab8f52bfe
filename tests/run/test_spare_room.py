"""Room that no call uses goes to states that nothing has placed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from offcompile.run.accounts.spare_room import SPARE_SHARE, STEPS_BEFORE, SpareRoom

BUDGET = SPARE_SHARE * 10
FREE = BUDGET
DEVICE = torch.device("meta")


class Owner:
    """An optimizer with states of 10 bytes each beside the device."""

    def __init__(self, beside: int) -> None:
        self.made, self.beside, self.asked = 0, beside, list[int]()

    def free_states(self, parameters: object) -> int:
        return 0

    def keep(self, share: float) -> None:
        raise AssertionError

    def give_way(self) -> int:
        return 0

    def held_bytes(self) -> int:
        return 0

    def steps(self) -> int:
        return self.made

    def beside_bytes(self, device: torch.device) -> int:
        return 10 * self.beside

    def fill(self, device: torch.device, room_bytes: int) -> int:
        self.asked.append(room_bytes)
        return 10 * min(self.beside, max(0, room_bytes) // 10)


def trained(owner: Owner, rooms: Sequence[Sequence[int]], free: int = FREE) -> list[int]:
    """Make steps whose calls leave these rooms; return what moved before each call."""
    room, moved = SpareRoom(), list[int]()
    for step in rooms:
        for nbytes in step:
            moved.append(room.filled([owner], DEVICE, BUDGET, lambda: free))
            if room.is_watched:
                room.note(nbytes)
        owner.made += 1
    return moved


def test_states_take_the_least_room_of_a_whole_step() -> None:
    owner, first = Owner(100), [[1, 1]] * STEPS_BEFORE
    moved = trained(owner, [*first, [70, 50, 90], [5, 5], [5, 5]])
    assert owner.asked == [50 - BUDGET // SPARE_SHARE]
    assert sum(moved) == 40 and moved[2 * STEPS_BEFORE + 3] == 40


def test_they_take_no_more_than_the_allocator_never_gave() -> None:
    owner, first = Owner(100), [[1]] * STEPS_BEFORE
    trained(owner, [*first, [120], [0]], free=30)
    assert owner.asked == [30 - BUDGET // SPARE_SHARE]


def test_nothing_is_watched_before_a_step_is_over() -> None:
    """Scores, or a forward without an optimizer's step, cost nothing."""
    room, owner = SpareRoom(), Owner(1)
    for _ in range(10):
        assert room.filled([owner], DEVICE, BUDGET, lambda: FREE) == 0
        assert not room.is_watched


def test_an_optimizer_without_states_beside_the_device_is_not_watched() -> None:
    room, owner = SpareRoom(), Owner(0)
    for _ in range(6):
        room.filled([owner], DEVICE, BUDGET, lambda: FREE)
        assert not room.is_watched
        owner.made += 1
    assert not owner.asked


@pytest.mark.parametrize("ends", [1, 2])
def test_an_optimizer_that_is_gone_is_forgotten(ends: int) -> None:
    room, owner = SpareRoom(), Owner(5)
    for _ in range(STEPS_BEFORE + ends):
        room.filled([owner], DEVICE, BUDGET, lambda: FREE)
        owner.made += 1
    del owner
    assert not room.is_watched
