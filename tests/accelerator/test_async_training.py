"""Training on the asynchronous device by the CUDA device's own code, bit for bit."""

from __future__ import annotations

import pytest
from async_checks import LIKE_A_GPU, PLANTED_SEEDS, SEEDS
from async_planted import ALWAYS, SHOWN_BY
from async_runs import needs_the_device, run_checks
from async_seeds import BLOCKS, FEW
from async_states import ALWAYS as OF_STATES
from async_states import CHECKS as ALL_OF_STATES
from zoo import ZOO

pytestmark = needs_the_device


def test_an_mlp_is_plain_s_to_the_bit_and_keeps_its_budget() -> None:
    run_checks("least-mlp", "peak", "excess", "loss_outside", "loss_apart")


@pytest.mark.long
def test_graph_breaks_files_and_other_streams() -> None:
    run_checks("least-mixture", "through_files", "full_host_tier", "on_a_side_stream", "own_thread")


@pytest.mark.soak
def test_a_host_without_room_and_verification() -> None:
    run_checks("host_without_room", "verified")


@pytest.mark.long
def test_plans_place_states_of_optimizers() -> None:
    # after a model whose host tier is small, which is nothing to optimizers of others
    run_checks("shared_host_tier", *OF_STATES)


def test_delays_of_some_seeds_change_no_bit() -> None:
    run_checks(*FEW)


@pytest.mark.long
def test_an_order_taken_away_shows_in_the_bits() -> None:
    run_checks("nothing_planted, few", *(f"without {name}" for name in ALWAYS))


@pytest.mark.soak
@pytest.mark.parametrize("seed", PLANTED_SEEDS)
def test_an_order_taken_away_shows_whatever_the_delays(seed: int) -> None:
    run_checks(*(f"without {name}" + (f"-{seed}" if seed else "") for name in SHOWN_BY))


@pytest.mark.soak
def test_with_every_order_in_place_all_programs_are_right() -> None:
    run_checks("nothing_planted")


@pytest.mark.soak
@pytest.mark.parametrize("block", BLOCKS)
def test_delays_of_a_thousand_seeds_change_no_bit(block: str) -> None:
    run_checks(block)


@pytest.mark.soak
def test_plans_place_states_in_every_way() -> None:
    run_checks("shared_host_tier, other limits", *(n for n in ALL_OF_STATES if n not in OF_STATES))


@pytest.mark.soak
def test_backward_as_autograd_allows_it() -> None:
    run_checks(*LIKE_A_GPU)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", [s.name for s in ZOO])
def test_the_zoo(model: str, seed: int) -> None:
    run_checks(f"bitwise-{model}-{seed}")
