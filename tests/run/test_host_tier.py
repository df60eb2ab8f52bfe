"""Room on the host tier: plans leave it to each other, and never plan beyond the machine's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offcompile.machine.hardware import load_profile
from offcompile.machine.target import CudaTarget
from offcompile.run.accounts.usage import DeviceUsage, GraphUsage, ParameterSet

SIDE = 8
WEIGHT = SIDE * SIDE * 4


def weights(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(SIDE, SIDE)) for _ in range(count)]


def bound(
    usage: DeviceUsage, parameters: list[torch.nn.Parameter], host_bytes: int, key: str
) -> tuple[GraphUsage, ParameterSet]:
    entry = usage.open(key)
    called = entry.bind(parameters)
    called.host_bytes = host_bytes
    return entry, called


def beside(usage: DeviceUsage, one: tuple[GraphUsage, ParameterSet]) -> int:
    return usage.host_beside(*one)


def test_the_plans_of_other_calls_count() -> None:
    usage, mine, yours = DeviceUsage(), weights(2), weights(2)
    first = bound(usage, mine, 1000, "cuda:0")
    second = bound(usage, yours, 300, "cuda:0")
    other = bound(usage, weights(1), 7, "another runtime")
    assert (beside(usage, first), beside(usage, second), beside(usage, other)) == (300, 1000, 0)


def test_calls_of_one_graph_with_other_weights_count() -> None:
    usage, mine, yours = DeviceUsage(), weights(1), weights(1)
    entry, called = bound(usage, mine, 100, "cuda:0")
    again = entry.bind(yours)
    assert usage.host_beside(entry, again) == 100
    del mine[0]
    assert called.host_bytes == 100
    assert usage.host_beside(entry, again) == 0


def test_weights_that_two_graphs_share_count_once() -> None:
    """Evaluation finds the weights where training has put them."""
    usage, shared = DeviceUsage(), weights(2)
    training = bound(usage, shared, 4 * WEIGHT + 50, "cuda:0")
    scoring = bound(usage, shared[:1], 0, "cuda:0")
    assert beside(usage, scoring) == 2 * WEIGHT + 50
    assert beside(usage, training) == 0


@pytest.mark.parametrize(
    ("asked", "machines", "planned"),
    [(None, 5000, 5000), (700, 5000, 700), (9000, 5000, 9000), (None, None, None)],
)
def test_plans_for_this_machine_take_no_more_than_it_has(
    asked: int | None, machines: int | None, planned: int | None
) -> None:
    profile = load_profile("rtx4090")
    target = CudaTarget(profile, (Path("/tmp"),), 1 << 30, asked, host_limit_bytes=machines)
    assert target.host_room_bytes == planned
    assert target.machine(1 << 20).tier["host"].capacity_bytes == planned
    # the runtime's arena knows the machine's limit itself
    assert target.runtime.host_bytes == asked
