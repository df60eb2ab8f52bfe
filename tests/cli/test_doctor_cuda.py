"""Measuring a card, on a fake one: every figure by the events of the right stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doctor_fakes import GIB, RATES, TINY, FakeCalls

from offcompile.machine.gpu_figures import gpu_profile, measure_card
from offcompile.machine.hardware import DIRECT_WAYS
from offcompile.runtime.base.limits import PciLink, pci_link
from offcompile.runtime.device.cuda.calls import Card, CudaCalls, count_cards, why_no_cards
from offcompile.runtime.measure import cuda as measure_cuda
from offcompile.runtime.measure.cuda import PinningFailed, rates_together


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path / "cache"))


def quiet(text: str) -> None:
    assert text


def test_each_figure_comes_out_as_the_card_was_made() -> None:
    calls = FakeCalls()
    found: dict[str, float] = {}
    steps = {
        **measure_cuda.LINK,
        **measure_cuda.DEVICE,
        **measure_cuda.matmuls(calls),
        **measure_cuda.MORE,
    }
    for measure in steps.values():
        found |= measure(calls, TINY)
    per_call = {"latency", "launch"}
    wanted = {
        name: 1 / rate if name in per_call else rate
        for name, rate in RATES.items()
        if name not in ("warm", "fp8")
    }
    assert found == pytest.approx(wanted | {"pin": 250_000}, rel=1e-6)


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ((7, 0), {"fp32", "fp16"}),
        ((8, 0), {"fp32", "fp16", "tf32", "bf16"}),
        ((9, 0), {"fp32", "fp16", "tf32", "bf16", "fp8"}),
    ],
)
def test_only_what_a_card_supports_is_measured(
    capability: tuple[int, int], dtypes: set[str]
) -> None:
    assert set(Card(0, "x", capability, GIB, "", "13.0").matmul_dtypes) == dtypes
    profile = gpu_profile(0, calls=FakeCalls(capability=capability), sizes=TINY)
    assert set(profile.matmul_tflops) == dtypes
    assert profile.matmul_tflops["fp16"] == pytest.approx(0.12)


def test_precision_and_random_numbers_stay_as_they_were() -> None:
    before = torch.get_float32_matmul_precision()
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    gpu_profile(0, calls=FakeCalls(), sizes=TINY)
    assert torch.equal(torch.rand(2), wanted)
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("first", "second", "rates"),
    [
        # both busy from 0 to 40: copies of 10 and 20 units of time
        ([0, 10, 20, 30, 40], [0, 20, 40, 60, 80], (10.0, 5.0)),
        # alone from 20 on the first runs twice as fast: that does not count
        ([0, 10, 20, 25, 30, 35], [0, 10, 20], (10.0, 10.0)),
        # the second begins late
        ([0, 5, 10, 20, 30], [10, 20, 30], (10.0, 10.0)),
        # they never meet: better all than nothing
        ([0, 10], [20, 30], (10.0, 10.0)),
    ],
)
def test_only_copies_beside_others_count(
    first: list[float], second: list[float], rates: tuple[float, float]
) -> None:
    assert rates_together(first, second, 100) == rates


def test_memory_that_is_refused_is_an_error_with_its_code() -> None:
    with pytest.raises(PinningFailed, match=r"register host memory \(error 2\)") as caught:
        measure_cuda.pinning(FakeCalls(pin_code=2), TINY)
    assert caught.value.code == 2


def test_a_card_is_measured_once_and_the_doctor_adds_to_it() -> None:
    calls = FakeCalls()
    profile = gpu_profile(0, calls=calls, sizes=TINY)
    assert (profile.h2d_gbps, profile.d2h_gbps) == (pytest.approx(25), pytest.approx(24))
    assert (profile.latency_us, profile.memory_gbps) == (pytest.approx(8), pytest.approx(900))
    assert (profile.measured, profile.name) == (True, "cuda-0")
    assert (profile.h2d_both_gbps, dict(profile.direct_gbps)) == (None, {})
    before = list(calls.issued)
    assert gpu_profile(0, calls=calls, sizes=TINY) == profile
    assert calls.issued == before

    more = measure_card(calls, TINY, False, False, quiet)
    assert not more.failed
    known = gpu_profile(0, calls=calls, sizes=TINY)
    assert (known.h2d_both_gbps, known.d2h_both_gbps) == (pytest.approx(20), pytest.approx(10))
    assert known.direct_gbps == pytest.approx({w: RATES[w] / 1000 for w in DIRECT_WAYS})
    assert known.attention_tflops == pytest.approx({"forward": 0.08, "backward": 0.07})
    assert (known.launch_us, known.pin_us_per_gib) == (pytest.approx(4), pytest.approx(250_000))
    before = list(calls.issued)
    measure_card(calls, TINY, False, False, quiet)
    assert calls.issued == before


def test_equal_cards_in_two_slots_have_figures_of_their_own() -> None:
    gpu_profile(0, calls=FakeCalls(0), sizes=TINY)
    slow = FakeCalls(1, rates={**RATES, "h2d": 12e3})
    assert gpu_profile(1, calls=slow, sizes=TINY).h2d_gbps == pytest.approx(12)
    assert gpu_profile(0, calls=FakeCalls(0), sizes=TINY).h2d_gbps == pytest.approx(25)


def test_what_fails_is_named_and_tried_again_and_the_rest_stands() -> None:
    more = measure_card(FakeCalls(pin_code=801, broken="read_gather"), TINY, False, False, quiet)
    assert more.failed == {
        "kernels that read and write host memory": "CUDA error: no read_gather",
        "making host memory known to the device": "CUDA refused to register host memory "
        "(error 801)",
    }
    assert more.figures["h2d_both"] == pytest.approx(20e3)
    again = FakeCalls()
    assert not measure_card(again, TINY, False, False, quiet).failed
    assert set(again.issued) == {*DIRECT_WAYS, "pin"}


def test_what_was_measured_in_a_hurry_is_measured_again_when_there_is_time() -> None:
    for quick, refresh, measured in (
        (True, False, True),
        (True, False, False),
        (False, False, True),
        (True, False, False),
        (False, True, True),
    ):
        calls = FakeCalls()
        measure_card(calls, TINY, quick, refresh, quiet)
        assert bool(calls.issued) == measured


def test_a_link_is_read_where_the_system_tells_it(tmp_path: Path) -> None:
    place = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    place.mkdir(parents=True)
    told = {
        "current_link_speed": "8.0 GT/s PCIe\n",
        "current_link_width": "8\n",
        "max_link_speed": "16.0 GT/s PCIe\n",
        "max_link_width": "16\n",
    }
    for name, text in told.items():
        (place / name).write_text(text)
    assert pci_link("0000:01:00.0", tmp_path) == PciLink(3, 8, 4, 16)
    assert pci_link("0000:02:00.0", tmp_path) is None
    for broken in ("Unknown", "", "7.0 GT/s"):
        (place / "max_link_speed").write_text(broken)
        assert pci_link("0000:01:00.0", tmp_path) is None


def test_without_a_kernel_torch_s_own_reads_in_place_and_pageable_memory_is_refused() -> None:
    calls = CudaCalls.__new__(CudaCalls)
    calls.device = torch.device("cpu")
    matrix = torch.arange(64.0).view(8, 8)
    for source in (matrix.view(-1), matrix[:, :2]):
        target = torch.empty(source.shape)
        calls.move(target, source)
        assert torch.equal(target.abs(), source)
    with pytest.raises(RuntimeError, match="could not be pinned"):
        calls.alias(torch.zeros(8, dtype=torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_card_can_be_measured() -> None:
    calls = CudaCalls(0)
    host = calls.pinned(4096)
    calls.alias(host).fill_(7)
    calls.settle()
    assert bool((host == 7).all())
    gpu_profile(0, calls=calls, sizes=measure_cuda.QUICK)
    assert not measure_card(calls, measure_cuda.QUICK, True, False, quiet).failed
    profile = gpu_profile(0, calls=calls, sizes=measure_cuda.QUICK)
    print(profile)
    assert profile.h2d_gbps < profile.memory_gbps
    assert set(profile.direct_gbps) == set(DIRECT_WAYS)
    assert profile.h2d_both_gbps is not None and profile.h2d_both_gbps < 1.2 * profile.h2d_gbps


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_a_machine_without_cards_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_cards() == 0
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "built without it" in why_no_cards()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-smi" in why_no_cards()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in why_no_cards()
    assert "\n" not in why_no_cards()
