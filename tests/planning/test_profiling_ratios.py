"""The ratios that densities give codecs, where codecs may be used, and how fast they are here."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import offcompile.machine.this_machine as this_machine_module
from offcompile.ir import DEVICE, HOST, Codec, Lane, Machine, Op, Problem, Tensor, Tier
from offcompile.machine.hardware import load_profile, to_machine
from offcompile.machine.target import CpuTarget
from offcompile.passes.build.decisions import Decisions
from offcompile.passes.build.gaps import find_gaps
from offcompile.passes.build.program import Program
from offcompile.passes.select.pressure import pressure
from offcompile.passes.select.spill_options import gaps_of
from offcompile.planning.feedback.profiling import Profile
from offcompile.planning.feedback.sparsity import (
    Packability,
    density_of,
    ratios_of,
    those_that_pay,
    with_combinations,
    with_ratios,
)
from offcompile.runtime.codecs import codec
from offcompile.runtime.measure.codecs import codec_bytes_per_us
from offcompile.runtime.moves.probes import show, watching

MIB = 1 << 20


def machine(codec_gbps: float = 100.0) -> Machine:
    rate = 1000.0 * codec_gbps
    return Machine(
        (Tier(DEVICE, 10 * MIB), Tier(HOST, None)),
        (Lane("h2d", HOST, DEVICE, 1000.0), Lane("d2h", DEVICE, HOST, 1000.0)),
        (Codec("bitmask", True, rate), Codec("fp16", False, rate), Codec("bf16", False, rate)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_ratios_are_what_packing_gives(dtype: torch.dtype, density: float) -> None:
    n = 1 << 17
    x = (torch.arange(n) % 1000 < 1000 * density).to(dtype)
    found = density_of(x)
    assert found == pytest.approx(density, abs=0.03)
    out = torch.zeros(codec("bitmask").worst_bytes(n, dtype), dtype=torch.uint8)
    packed = codec("bitmask").pack(x, out) / (n * dtype.itemsize)
    ratios = ratios_of(dtype, found, machine().codecs, None)
    assert ratios == {"bitmask": pytest.approx(packed, abs=0.03)}


def test_any_dense_layout_can_be_looked_at_and_nothing_else() -> None:
    x = torch.zeros(4, 8, 16, 16)
    x[:, ::2] = 1.0
    x[0] = -0.0
    assert density_of(x) == pytest.approx((3 / 4) * 0.5 + 1 / 4)
    assert density_of(x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)) == density_of(x)
    assert density_of(torch.empty(0)) is None


def test_only_what_was_asked_for_may_lose_precision() -> None:
    wide = with_combinations(machine(), "fp16")
    assert with_combinations(machine(), None) == machine()
    assert set(ratios_of(torch.float32, None, wide.codecs, None)) == set()
    assert ratios_of(torch.float32, None, wide.codecs, "fp16") == {"fp16": 0.5}
    both = ratios_of(torch.float32, 0.5, wide.codecs, "fp16")
    assert set(both) == {"bitmask", "fp16", "bitmask+fp16"}
    assert both["bitmask+fp16"] < both["fp16"] < both["bitmask"]
    assert set(ratios_of(torch.float16, 0.5, wide.codecs, "fp16")) == {"bitmask"}


def test_a_codec_is_offered_only_where_it_pays() -> None:
    assert set(those_that_pay(MIB, {"bitmask": 0.5, "fp16": 0.99}, machine())) == {"bitmask"}
    assert those_that_pay(MIB, {"bitmask": 0.5}, machine(codec_gbps=0.9)) == {}


@pytest.mark.parametrize(("share", "pays"), [(0.0, True), (0.8, True), (1.0, False)])
def test_a_codec_pays_for_the_compute_time_that_it_takes(share: float, pays: bool) -> None:
    packing = machine(codec_gbps=2.0)  # takes half the time of the way, and packed bytes the other
    lanes = tuple(replace(lane, toll_share=share) for lane in packing.lanes)
    found = those_that_pay(MIB, {"bitmask": 0.5}, replace(packing, lanes=lanes))
    assert found == ({"bitmask": 0.5} if pays else {})


def skip() -> Problem:
    """`a` waits twice: for the last op of forward, and for backward, which makes `g`."""
    tensors = (
        Tensor("x", MIB, "input", DEVICE, pinned=True),
        *(Tensor(t, MIB, "activation", None) for t in ("a", "b", "c", "d", "g")),
        Tensor("out", MIB, "gradient", None, pinned=True),
    )
    ops = (
        Op("F0", "forward", 10.0, ("x",), ("a",)),
        Op("F1", "forward", 10.0, ("x",), ("b",)),
        Op("F2", "forward", 10.0, ("b",), ("c",)),
        Op("F3", "forward", 10.0, ("c", "a"), ("d",)),
        Op("B0", "backward", 10.0, ("d",), ("g",)),
        Op("B1", "backward", 10.0, ("d",), ("c",)),
        Op("B2", "backward", 10.0, ("g", "a", "c"), ("out",)),
    )
    return Problem(tensors, ops)


def test_forward_never_reads_what_was_rounded() -> None:
    dtypes = dict.fromkeys("abcdg", torch.float32)
    problem = with_ratios(skip(), machine(), Packability(dtypes, {}, "fp16"))
    assert problem.tensor["a"].ratios == {"fp16": 0.5}
    assert problem.tensor["g"].ratios == {} and problem.tensor["x"].ratios == {}
    gaps = find_gaps(Program(problem, Decisions()), machine(), lossy=True).gaps
    assert {g.after: g.codec for g in gaps if g.tensor.id == "a"} == {"F0": None, "F3": "fp16"}
    found = gaps_of(machine(), pressure(problem, Decisions()), [HOST], lossy=True)
    codecs = {g.candidate.id: {d.codec for d in g.decisions} for g in found}
    assert codecs["a@F0"] == {None} and codecs["a@F3"] == {None, "fp16"}


def test_only_this_thread_and_only_inside_is_shown_what_leaves() -> None:
    seen: list[str] = []
    x = torch.zeros(2)
    show(x, "before")
    with watching(lambda tensor, move: seen.append(move)):
        show(x, "mine")
        with watching(lambda tensor, move: seen.append(f"inner {move}")):
            show(x, "b")
        other = threading.Thread(target=show, args=(x, "another's"))
        other.start()
        other.join()
        show(x, "mine too")
    show(x, "after")
    assert seen == ["mine", "inner b", "mine too"]


def test_a_profile_looks_at_first_steps_then_rarely_and_at_each_tensor_once() -> None:
    profile, x = Profile(_every=4), torch.zeros(256)
    looked = []
    for step in range(12):
        profile.begin_step()
        with profile.watching({"m": "t"}):
            show(x, "m")
            show(torch.ones(256), "m")
            show(x, "not ours")
        if profile.due():
            profile.decided("nothing to do", False)
            profile._every = 4
        looked.append(profile._looking)
        assert profile.densities == {"t": 0.0}
        assert len(profile.said) == (step > 0)
    assert [i for i, one in enumerate(looked) if one] == [0, 1, 2, 6, 10]


def test_codecs_are_measured_beside_compute_which_then_ends() -> None:
    before = threading.active_count()
    rates = codec_bytes_per_us(["bitmask", "fp16"], nbytes=MIB, seconds=0.001)
    assert set(rates) == {"bitmask", "fp16"} and min(rates.values()) > 0
    assert threading.active_count() == before


def test_rates_of_codecs_are_measured_once_and_reach_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    asked = []

    def rates(names: tuple[str, ...]) -> dict[str, float]:
        asked.append(names)
        return dict.fromkeys(names, 4000.0)

    monkeypatch.setattr(this_machine_module, "codec_bytes_per_us", rates)
    target = CpuTarget(load_profile("cpu"), (tmp_path,), 1 << 30, None)
    for _ in range(2):
        known = target.with_codecs().machine(MIB)
        assert {c.bytes_per_us for c in known.codecs} == {4000.0}
    assert len(asked) == 1
    assert this_machine_module._kept_codecs() == dict.fromkeys(asked[0], 4.0)
    # figures of a profile are not measured again
    assert to_machine(load_profile("cpu")).codec["bitmask"].bytes_per_us == 7000.0
