"""Steps captured as graphs on the asynchronous device: plain's bits, refusals, planted faults."""

from __future__ import annotations

import pytest
from async_captures import CHECKS, PLANTED
from async_runs import needs_the_device, run_checks

pytestmark = needs_the_device
#: those that every run of the tests makes
ALWAYS = (
    "captured conv",
    "captured weights of an mlp",
    "captured an_op_that_waits_is_refused",
)
SHOWN_ALWAYS = "captures without compute's waits for copies"


def test_captured_steps_are_plain_s_to_the_bit_or_refused_in_words() -> None:
    run_checks(*ALWAYS)


@pytest.mark.long
def test_an_order_taken_away_shows() -> None:
    run_checks(SHOWN_ALWAYS)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in PLANTED if name != SHOWN_ALWAYS])
def test_every_order_taken_away_shows(name: str) -> None:
    run_checks(name)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in CHECKS if name not in ALWAYS])
def test_whatever_a_program_does_between_steps(name: str) -> None:
    run_checks(name)
