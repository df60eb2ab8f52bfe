"""Steps that fit: their blocks get fixed places only where the heap has to be trimmed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from offcompile.run import running_step
from offcompile.run.running_step import CLEANING_RUNS, _Places


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A heap whose trims the test counts."""
    made = SimpleNamespace(trims=0)
    monkeypatch.setattr(running_step, "heap", lambda: made)
    return made


def test_trims_of_the_first_runs_are_leftovers_of_compiling(heap: SimpleNamespace) -> None:
    places = _Places(moves=False, watched=True)
    found = []
    for run in range(CLEANING_RUNS + 3):
        found.append(places.wanted())
        heap.trims += run < CLEANING_RUNS - 1
    assert found == [False] * (CLEANING_RUNS + 3)


def test_later_trims_ask_for_places_from_then_on(heap: SimpleNamespace) -> None:
    places = _Places(moves=False, watched=True)
    assert [places.wanted() for _ in range(CLEANING_RUNS + 2)] == [False] * (CLEANING_RUNS + 2)
    heap.trims += 1
    assert [places.wanted() for _ in range(3)] == [True] * 3


def test_steps_that_move_get_them_at_once_and_unwatched_ones_never(heap: SimpleNamespace) -> None:
    moving, alone = _Places(moves=True, watched=True), _Places(moves=False, watched=False)
    for _ in range(CLEANING_RUNS + 2):
        heap.trims += 1
        assert moving.wanted() and not alone.wanted()
