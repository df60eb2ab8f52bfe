"""The reserve for holes shrinks by what steps leave free, and grows when pages go back for it."""

from __future__ import annotations

from offcompile.run.accounts.hole_reserve import (
    MARGIN,
    MOST_UNKNOWN,
    PLACED,
    WORTH,
    HoleReserve,
)
from offcompile.run.accounts.usage import DeviceUsage

BUDGET, AT_FIRST = 1200, 400
#: bytes that the process holds when the first graph is compiled, and the weights' among them
FIRST, WEIGHTS = 5000, 300


class Process:
    """Holds so much beside the reserve; pages go back when little enough of the budget is left."""

    def __init__(self, held: int, unknown: int = 0) -> None:
        self.reserve = HoleReserve(BUDGET, AT_FIRST, first_bytes=FIRST)
        self.held, self.unknown, self.trims = held, unknown, 0

    @property
    def left(self) -> int:
        """Return the bytes left of the budget, as the keeper fills what the reserve leaves."""
        return BUDGET - self.held - (AT_FIRST - self.reserve.nbytes) - self.reserve.free_bytes

    def step(self, backward: bool = True, placed: bool = False) -> int:
        self.trims += self.left < 0
        for spare in (100, 0):
            left = max(self.left, 0) + spare
            accounted = BUDGET - self.reserve.free_bytes - left
            resident = FIRST - WEIGHTS + self.unknown + accounted
            self.reserve.ran(left, resident, WEIGHTS, backward and not spare)
        return self.reserve.step_over(self.trims, placed=placed)


def test_the_reserve_gives_up_what_steps_leave_free_and_says_how_much() -> None:
    process = Process(held=1000)
    before = process.reserve.nbytes
    given = sum(process.step() for _ in range(10))
    assert given == before - process.reserve.nbytes
    assert 0 <= process.left < 2 * BUDGET * WORTH
    assert process.trims == 0


def test_what_was_given_up_and_is_not_used_yet_is_not_given_up_twice() -> None:
    process = Process(held=800)
    left = process.left
    given = 0
    for _ in range(20):
        process.reserve.ran(left, FIRST, 0, True)
        given += process.reserve.step_over(0, unused_bytes=given)
    assert left - 2 * BUDGET * WORTH < given <= left


def test_a_part_stays_reserved_whatever_is_free() -> None:
    process = Process(held=100)
    for _ in range(20):
        process.step()
    assert process.reserve.nbytes == process.reserve.free_bytes == int(BUDGET * MARGIN)


def test_the_reserve_grows_back_while_pages_go_back_step_after_step() -> None:
    process = Process(held=1000)
    for _ in range(5):
        process.step()
    shrunk = process.reserve.nbytes
    process.held = 1100
    grown = [process.step() for _ in range(30)]
    assert min(grown) < 0
    assert shrunk < process.reserve.nbytes <= AT_FIRST
    trims = process.trims
    for _ in range(10):
        process.step()
    assert process.trims == trims, "and then pages go back no more"


def test_little_is_left_to_holes_while_blocks_have_places() -> None:
    process, before = Process(held=1300), AT_FIRST
    process.step()
    assert process.reserve.nbytes == before
    little = process.reserve.free_bytes + int(BUDGET * PLACED)
    assert process.step(placed=True) == before - little > 0
    assert process.step(placed=True) == 0 and process.reserve.nbytes == little
    for _ in range(40):  # they have lost them
        process.step()
    assert process.reserve.nbytes == before


def test_pages_that_go_back_once_change_nothing() -> None:
    process = Process(held=1000)
    for _ in range(5):
        process.step()
    before = process.reserve.nbytes
    process.trims += 1
    assert process.step() == 0
    assert process.step() == 0
    assert process.reserve.nbytes == before


def test_evaluations_change_nothing() -> None:
    process = Process(held=100, unknown=20)
    assert process.step(backward=False) == 0
    assert process.reserve.step_over(0) == 0
    assert (process.reserve.nbytes, process.reserve.unknown_bytes) == (AT_FIRST, 0)


def test_what_no_account_knows_stays_free_beside_the_holes() -> None:
    process = Process(held=900, unknown=40)
    for _ in range(10):
        process.step()
    assert process.reserve.unknown_bytes == 40
    assert process.reserve.free_bytes == int(BUDGET * MARGIN) + 40
    assert process.trims == 0
    assert 0 <= process.left < 2 * BUDGET * WORTH
    process.held = 100
    for _ in range(20):
        process.step()
    assert process.reserve.nbytes == process.reserve.free_bytes
    process.unknown = 60
    assert process.step() == -20


def test_short_steps_between_long_ones_do_not_give_up_what_the_long_ones_need() -> None:
    process = Process(held=1000, unknown=40)
    for number in range(30):
        short = number % 3 != 0
        process.held, process.unknown = (600, 0) if short else (1000, 40)
        process.step()
    assert process.trims == 0
    assert process.reserve.unknown_bytes == 40


def test_a_measurement_that_cannot_be_true_takes_little() -> None:
    process = Process(held=1000, unknown=10_000)
    process.step()
    assert process.reserve.unknown_bytes == int(BUDGET * MOST_UNKNOWN)


def test_where_no_holes_form_nothing_is_reserved() -> None:
    reserve = HoleReserve(BUDGET, 0, first_bytes=FIRST)
    for _ in range(3):
        reserve.ran(100, FIRST + BUDGET, WEIGHTS, True)
        assert reserve.step_over(0) == 0
    assert reserve.nbytes == reserve.free_bytes == 0


def test_graphs_with_one_budget_share_a_reserve() -> None:
    usage = DeviceUsage()
    reserve = usage.hole_reserve(BUDGET, AT_FIRST)
    assert usage.hole_reserve(BUDGET, AT_FIRST) is reserve
    assert usage.hole_reserve(2 * BUDGET, AT_FIRST) is not reserve
