"""Lanes that reach something else than was measured: what is noticed, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offcompile
from offcompile.ir import DEVICE, HOST, Lane, Machine, SharedLink, Tier
from offcompile.machine import target
from offcompile.machine.hardware import DISK, HardwareProfile
from offcompile.planning.feedback import profiling
from offcompile.planning.feedback.lane_watch import FORGOTTEN_AFTER, LEAST_MOVES, MARGIN, LaneWatch
from offcompile.planning.feedback.lane_watch import reached_bytes_per_us as reached
from offcompile.planning.feedback.profiling import FIRST_STEPS, Profile
from offcompile.runtime.device.cpu import CpuDevice, CpuSlot
from offcompile.runtime.device.lane_rates import LaneRates, Moved

MACHINE = Machine(
    (Tier(DEVICE, 1 << 20), Tier(HOST, None), Tier(DISK, None)),
    (
        Lane("d2h", DEVICE, HOST, 1000.0, 10.0),
        Lane("device_to_disk", DEVICE, DISK, 500.0, 100.0),
    ),
)
MOVES = 10


class Traffic:
    """Totals of a runtime whose lanes move a million bytes at a time at made-up rates."""

    def __init__(self) -> None:
        self.rates = LaneRates()

    def step(self, **bytes_per_us: float) -> dict[str, Moved]:
        for name, rate in bytes_per_us.items():
            for _ in range(MOVES):
                took_us = MACHINE.lane[name].latency_us + 1e6 / rate
                self.rates.add(name, 1_000_000, round(took_us * 1000))
        return dict(self.rates.totals())


def watched(traffic: Traffic) -> LaneWatch:
    watch = LaneWatch()
    watch.begin(traffic.step(d2h=3.0))
    return watch


def test_a_rate_is_that_of_bytes_beyond_the_latency() -> None:
    lane = Lane("x", DEVICE, HOST, 1000.0, 50.0)
    assert reached(lane, Moved(10, 10_000_000, 10_500_000)) == pytest.approx(1000.0)
    assert reached(lane, Moved(LEAST_MOVES - 1, 10_000_000, 10_500_000)) is None
    assert reached(lane, Moved(10, 100_000, 900_000)) is None
    assert reached(lane, Moved(0, 0, 0)) is None


def test_what_was_moved_before_does_not_count_and_little_is_no_change() -> None:
    traffic = Traffic()
    watch = watched(traffic)
    assert watch.look(MACHINE, traffic.step(d2h=1000 / MARGIN + 1)) is None
    assert watch.look(MACHINE, traffic.step(d2h=1000 * MARGIN - 1)) is None
    assert watch.applied(MACHINE) is MACHINE


def test_a_crowded_lane_changes_the_machine_until_it_is_free_again() -> None:
    traffic = Traffic()
    watch = watched(traffic)
    told = watch.look(MACHINE, traffic.step(d2h=400.0, device_to_disk=500.0))
    assert told == "d2h reaches 0.4 GB/s, not 1"
    crowded = watch.applied(MACHINE)
    assert crowded.lane["d2h"].bytes_per_us == pytest.approx(400, rel=1e-3)
    assert crowded.lane["d2h"].latency_us == 10.0
    assert crowded.lane["device_to_disk"] == MACHINE.lane["device_to_disk"]
    assert watch.look(MACHINE, traffic.step(d2h=1000.0)) == "d2h reaches 1 GB/s, not 0.4"
    assert watch.applied(MACHINE).lane["d2h"].bytes_per_us == pytest.approx(1000, rel=1e-3)


def test_a_machine_with_observed_rates_keeps_its_shared_links() -> None:
    traffic = Traffic()
    watch = watched(traffic)
    machine = replace(MACHINE, shared=(SharedLink("port", 1500.0, ("d2h", "device_to_disk")),))
    assert watch.look(machine, traffic.step(d2h=400.0)) == "d2h reaches 0.4 GB/s, not 1"
    crowded = watch.applied(machine)
    assert crowded != machine and crowded.shared == machine.shared


def test_rates_that_swing_within_the_margin_of_the_last_decision_change_nothing() -> None:
    traffic = Traffic()
    watch = watched(traffic)
    assert watch.look(MACHINE, traffic.step(d2h=700.0)) is not None
    for rate in (600, 880, 560, 900, 760):
        assert watch.look(MACHINE, traffic.step(d2h=rate)) is None
    assert watch.rates["d2h"] == pytest.approx(700, rel=1e-3)


def test_a_lane_that_rests_counts_as_measured_again_after_a_while() -> None:
    traffic = Traffic()
    watch = watched(traffic)
    assert watch.look(MACHINE, traffic.step(d2h=100.0)) is not None
    for _ in range(FORGOTTEN_AFTER - 1):
        assert watch.look(MACHINE, traffic.step(device_to_disk=500.0)) is None
    told = watch.look(MACHINE, traffic.step(device_to_disk=500.0))
    assert told == "d2h has rested, and counts as 1 GB/s again"
    assert watch.rates == {} and watch.applied(MACHINE) is MACHINE


def test_a_runtime_that_was_made_anew_begins_again() -> None:
    traffic = Traffic()
    watch = watched(traffic)
    for _ in range(3):
        traffic.step(d2h=1000.0)
    assert watch.look(MACHINE, traffic.rates.totals()) is None
    assert watch.look(MACHINE, Traffic().step(d2h=100.0)) is not None
    assert watch.rates["d2h"] == pytest.approx(100, rel=1e-3)


def test_work_that_fails_is_not_counted() -> None:
    rates = LaneRates()

    def fails() -> None:
        raise OSError(5, "planted")

    rates.timed("d2h", 100, lambda: None)()
    with pytest.raises(OSError, match="planted"):
        rates.timed("d2h", 100, fails)()
    assert rates.totals()["d2h"][:2] == (1, 100)


def steps_of(profile: Profile, rates: list[float], traffic: Traffic, again: bool) -> list[int]:
    """In which steps lanes asked for a decision; each brings a new plan, or none does."""
    asked = []
    for step, rate in enumerate(rates):
        if profile.lanes_due(MACHINE, traffic.rates.totals()):
            asked.append(step)
            profile.decided("planted", again)
            profile._every = 2
        profile.begin_step()
        traffic.step(d2h=rate)
    return asked


def test_first_steps_do_not_count_and_decisions_are_bounded() -> None:
    swinging = [100.0 if (i // 2) % 2 else 1000.0 for i in range(200)]
    for again, most in ((True, profiling.MOST_REPLANS), (False, profiling.MOST_DECISIONS)):
        profile = Profile(_every=2)
        asked = steps_of(profile, [*[1.0] * (FIRST_STEPS + 1), *swinging], Traffic(), again)
        assert asked[0] > FIRST_STEPS + 2
        assert len(asked) == most
        assert all("d2h reaches" in line for line in profile.said)


def test_steady_lanes_ask_for_nothing() -> None:
    profile = Profile(_every=2)
    assert steps_of(profile, [10.0, 20.0, 30.0, *[900.0] * 60], Traffic(), True) == []


# -- a model whose host lane is throttled ----------------------------------------------------------


def throttle(monkeypatch: pytest.MonkeyPatch, tier: str, pause_s: float) -> None:
    """Put a pause into moves of one tier of the CPU target."""

    def paused(does: Callable[..., None]) -> Callable[..., None]:
        def move(device: CpuDevice, *given: Any) -> None:
            slot = given[-1]
            if isinstance(slot, CpuSlot) and slot.tier == tier:
                time.sleep(pause_s)
            does(device, *given)

        return move

    for name in ("_write", "_read"):
        monkeypatch.setattr(CpuDevice, name, paused(getattr(CpuDevice, name)))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers)


@pytest.mark.long
def test_tensors_move_to_the_disk_when_the_way_to_the_host_is_crowded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = HardwareProfile(
        "cpu", "cpu", None, 10.0, 0.4, 0.4, "made up", {"fp32": 0.05}, latency_us=100.0
    )
    monkeypatch.setattr(target, "_measured", lambda directories, progress: made_up)
    monkeypatch.setattr(profiling, "WATCH_EVERY", 2)
    throttle(monkeypatch, "host", 0.03)
    options = {
        "spill": tmp_path,
        "memory": "minimum",
        "host_memory": "1GiB",
        "lowering": "aot_eager",
        "policy": "activation_spill",
        "seconds": 0.1,
    }
    model, plain = network(), network()
    torch._dynamo.reset()
    before = len(offcompile.reports())
    run = torch.compile(model, backend="offcompile", options=options)
    random = torch.Generator().manual_seed(1)
    for _ in range(8):
        x = torch.randn(2048, 64, generator=random)
        for net in (run, plain):
            net(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, theirs.grad)
    first, second, *_ = offcompile.reports()[before:]
    profile = second.profile
    assert profile is not None and profile.replans >= 1
    said = next(line for line in profile.said if line.endswith("it is taken"))
    assert "d2h reaches" in said and "for these rates" in said
    outs = [[m.lane for m in r.plan.moves if m.source == DEVICE] for r in (first, second)]
    assert outs[1].count("d2h") < outs[0].count("d2h")
    assert outs[1].count("device_to_disk") > outs[0].count("device_to_disk")
    assert second.machine.lane["d2h"].bytes_per_us < 100 < made_up.d2h_gbps * 1000
