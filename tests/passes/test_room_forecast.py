"""The room that the next execution leaves is forecast from what each execution changed lately."""

from __future__ import annotations

import random

from offcompile.passes.correlation.rooms import RoomForecast

TAKES = {layer: 10 * layer for layer in range(8)}


def forwards(rooms: RoomForecast, layers: list[int]) -> int:
    """Run forwards in this order, each of which takes some of the room; returns what is left."""
    left = 1000
    for number, layer in enumerate(layers):
        rooms.enter(("forward", layer), left, backward=False, counts_own=False, begins=not number)
        left -= TAKES[layer]
    return left


def test_what_an_execution_takes_is_known_in_whatever_order_they_come() -> None:
    rooms, chosen = RoomForecast(), random.Random(0)
    for _ in range(3):
        forwards(rooms, chosen.sample(range(8), 8))
    left = forwards(rooms, [5, 3])
    assert rooms.after(None, 0) == rooms.after(("forward", 1), 64) == left


def test_the_room_behind_the_first_run_of_an_execution_is_that_beside_it() -> None:
    rooms = RoomForecast()
    rooms.enter("a", 70, backward=False, counts_own=True, begins=True)
    assert rooms.after(None, 0) == 70


def test_room_never_falls_below_nothing() -> None:
    rooms = RoomForecast()
    for room in (70, 10):
        rooms.enter("a" if room == 70 else "b", room, False, True, begins=room == 70)
    rooms.enter("a", 20, False, True, begins=True)
    assert rooms.after("b", 0) == 0


def test_tensors_that_the_next_execution_reads_count_only_if_its_room_leaves_them_out() -> None:
    rooms = RoomForecast()
    rooms.enter("own", 50, backward=True, counts_own=True, begins=True)
    rooms.enter("beside", 50, backward=True, counts_own=False, begins=False)
    assert rooms.after("own", 8) == 58
    assert rooms.after("beside", 8) == rooms.after("never seen", 8) == 50


def test_at_the_turn_the_first_backward_leaves_what_it_left_last() -> None:
    rooms = RoomForecast()
    for room in (100, 60):
        rooms.enter("forward", room, backward=False, counts_own=True, begins=True)
        if room == 60:
            assert rooms.after("backward", 5) == 35
        rooms.enter("backward", 30, backward=True, counts_own=True, begins=False)
    assert rooms.after("forward", 0) == 60
