"""Tests that were written for a GPU, on the asynchronous device."""

from __future__ import annotations

import pytest
from async_runs import needs_the_device, run_gpu_tests

pytestmark = needs_the_device

#: file → the tests that apply (not those of Triton's kernels, of CUDA's own calls, of rates, or of
#: what runs beside what), and how many there are
FILES = {
    "test_gpu_device.py": (
        "bits_come_back or wait_for_compute or host_does_not_wait or goes_round or two_compute"
        " or for_good or yields or pageable or lane_streams",
        9,
    ),
    "test_gpu_host.py": (
        "registering_works or exact_in_both or both_sides or in_place or no_elements or unpinned"
        " or alias_keeps or in_autograd",
        8,
    ),
    "test_gpu_weights.py": ("cuda and not inductor and not products and not beside_compute", 6),
    "test_gpu_optim.py": ("cuda and not inductor and not kernel and not rates", 18),
}
#: one of each kind, for every run of the tests
FEW = (
    "wait_for_compute or goes_round or two_compute or both_sides or unpinned or in_autograd"
    " or (sgd and cuda) or overtakes or go_round_in or (compiled_steps and aot_eager-cuda and True)"
    " or still_read or is_held or arrives_while or masters"
)
SEEDS = range(6)


@pytest.mark.long
def test_those_of_each_kind_pass() -> None:
    assert run_gpu_tests(tuple(FILES), FEW, seed=1) == 14


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("file", FILES)
def test_all_pass_whatever_the_delays(file: str, seed: int) -> None:
    chosen, count = FILES[file]
    assert run_gpu_tests((file,), chosen, seed) == count
