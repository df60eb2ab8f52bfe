"""Hardware profiles: complete, honest about units, and refused by name when wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offcompile.ir import InvalidInput
from offcompile.ir.jsonio import machine_from_json, machine_to_json
from offcompile.machine.hardware import (
    HardwareProfile,
    list_profiles,
    load_measured,
    load_profile,
    parse_bytes,
    to_machine,
)
from offcompile.machine.this_gpu import to_cuda_machine
from offcompile.machine.this_machine import to_cpu_machine

GIB = 1 << 30

MINE = """
name = "mine"
title = "My card"
source = "measured on a Sunday"
measured = true
device_memory_bytes = 8_000_000_000
memory_gbps = 500
h2d_gbps = 12.5
d2h_gbps = 11
"""


def profile_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_measured(profile_file(tmp_path, text))
    return str(caught.value)


def test_the_cards_and_the_cpu_example_are_there() -> None:
    assert set(list_profiles()) == {
        *("h200", "h100-sxm", "h100-pcie", "a100-80g", "v100-16g", "v100-32g"),
        *("l40s", "rtx4090", "rtx5090", "gh200", "cpu"),
    }


@pytest.mark.parametrize("name", list_profiles())
def test_a_shipped_profile_makes_a_machine_that_reads_back(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.source.strip()
    assert not profile.measured
    machine = to_machine(profile, disk=profile.disk_read_gbps is not None)
    assert machine_from_json(machine_to_json(machine)) == machine
    assert machine.tier["device"].capacity_bytes == profile.device_memory_bytes
    # the link is never the faster side of the device's own memory
    assert max(profile.h2d_gbps, profile.d2h_gbps) < profile.memory_gbps


def test_figures_of_a_card_arrive_in_the_machine_s_units() -> None:
    machine = to_machine(load_profile("rtx4090"), 8 * GIB, 64 * GIB, disk=True)
    assert {t.name: t.capacity_bytes for t in machine.tiers} == {
        "device": 8 * GIB,
        "host": 64 * GIB,
        "disk": None,
    }
    ways = {x.name: (x.source, x.target, x.bytes_per_us, x.latency_us) for x in machine.lanes}
    assert ways == {
        "h2d": ("host", "device", 25_000.0, 10.0),
        "d2h": ("device", "host", 25_000.0, 10.0),
        "disk_read": ("disk", "host", 7_000.0, 100.0),
        "disk_write": ("host", "disk", 5_000.0, 100.0),
    }
    assert {c.name: c.lossless for c in machine.codecs} == {
        "bitmask": True,
        "fp16": False,
        "bf16": False,
    }
    # a codec reads and writes device memory, so it is slower than a plain pass over it
    assert all(25_000 < c.bytes_per_us < 1_010_000 for c in machine.codecs)


def test_copies_and_accesses_in_place_share_the_link_of_a_card(tmp_path: Path) -> None:
    into, out = to_machine(load_profile("rtx4090")).shared
    assert (into.lanes, into.bytes_per_us, into.in_place_reads) == (("h2d",), 25_000.0, True)
    assert (out.lanes, out.bytes_per_us, out.in_place_writes) == (("d2h",), 25_000.0, True)
    assert not into.in_place_writes and not out.in_place_reads
    measured = 'base = "rtx4090"\nname = "mine"\nh2d_both_gbps = 20\nd2h_both_gbps = 18\n'
    *_, both = to_machine(load_measured(profile_file(tmp_path, measured))).shared
    assert (both.lanes, both.bytes_per_us) == (("h2d", "d2h"), 38_000.0)
    assert both.in_place_reads and both.in_place_writes


def test_a_link_is_never_slower_than_accesses_were_measured(tmp_path: Path) -> None:
    text = 'base = "rtx4090"\nname = "mine"\n[direct_gbps]\nread = 27\nwrite_strided = 4\n'
    into, out = to_machine(load_measured(profile_file(tmp_path, text))).shared
    assert (into.bytes_per_us, out.bytes_per_us) == (27_000.0, 25_000.0)


def test_a_disk_accessed_from_a_card_shares_the_card_s_link() -> None:
    into, out = to_cuda_machine(load_profile("rtx4090"), disk=True).shared
    assert (into.lanes, out.lanes) == (("h2d", "disk_to_device"), ("d2h", "device_to_disk"))


def test_the_cpu_target_has_no_shared_links() -> None:
    assert not to_cpu_machine(load_profile("cpu")).shared


def test_the_host_is_unlimited_unless_known() -> None:
    assert to_machine(load_profile("a100-80g")).tier["host"].capacity_bytes is None
    assert to_machine(load_profile("gh200")).tier["host"].capacity_bytes == 446 * GIB
    assert "disk" not in to_machine(load_profile("gh200")).tier


def test_a_measured_file_loads_by_path_and_by_name_with_a_suffix(tmp_path: Path) -> None:
    path = profile_file(tmp_path, MINE)
    profile = load_measured(path)
    assert profile.measured
    assert profile.device_memory_bytes == 8_000_000_000
    assert (profile.h2d_gbps, profile.d2h_gbps) == (12.5, 11.0)
    assert load_profile(str(path)) == load_profile(path) == profile
    assert to_machine(profile).lane["d2h"].bytes_per_us == 11_000.0


def test_a_file_may_change_a_few_figures_of_a_shipped_profile(tmp_path: Path) -> None:
    text = 'base = "rtx4090"\nname = "mine"\nh2d_gbps = 21.5\n[codec_gbps]\nbitmask = 99\n'
    profile = load_measured(profile_file(tmp_path, text))
    shipped = load_profile("rtx4090")
    assert (profile.name, profile.h2d_gbps) == ("mine", 21.5)
    assert (profile.d2h_gbps, profile.memory_gbps) == (shipped.d2h_gbps, shipped.memory_gbps)
    assert to_machine(profile).codec["bitmask"].bytes_per_us == 99_000.0
    assert to_machine(profile).codec["fp16"] == to_machine(shipped).codec["fp16"]


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("rtx409", "rtx4090"),
        ("H100_SXM", "h100-sxm"),
        ("a100-40g", "a100-80g"),
        ("v100-33g", "v100-3"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(asked: str, nearest: str) -> None:
    with pytest.raises(InvalidInput, match=f"the nearest is '{nearest}") as caught:
        load_profile(asked)
    assert asked in str(caught.value)


def test_names_are_read_in_any_case() -> None:
    assert load_profile("RTX4090") == load_profile("rtx4090")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("h2d_gbps = 'fast'", "h2d_gbps: 'fast' is not a number"),
        ("h2d_gbps = 0", "h2d_gbps: a rate must be more than 0"),
        ("h2d_gbps = -3.0", "h2d_gbps: -3.0 is not a number of 0 or more"),
        ("h2d_gbps = nan", "h2d_gbps: nan is not a number"),
        ("h2d_gbps = inf", "h2d_gbps: inf is not a number"),
        ("h2d_gbps = true", "h2d_gbps: True is not a number"),
        ("device_memory_bytes = 8.5", "device_memory_bytes: 8.5 is not a size"),
        ("device_memory_bytes = '8 GX'", "'8 GX' is not a size"),
        ("device_memory_bytes = 0", "device_memory_bytes: 0 is not a size"),
        ("measured = 1", "measured: 1 is not true or false"),
        ("name = ''", "name: '' is not a text"),
        ("h2d_gpbs = 3", "'h2d_gpbs' is no key of a profile (h2d_gbps?)"),
        ("matmul_tflops = 3", "matmul_tflops: 3 is not a table"),
        ("matmul_tflops = {bf17 = 3}", "'bf17' is none of"),
        ("matmul_tflops = {bf16 = 0}", "matmul_tflops.bf16: a rate must be more than 0"),
        ("codec_gbps = {zip = 3}", "'zip' is none of bitmask"),
        ("base = 'rtx409'", "the nearest is 'rtx4090'"),
        ("base = 4", "base: 4 is not a text"),
        ("base = ", "not TOML"),
    ],
)
def test_a_wrong_figure_is_named(tmp_path: Path, change: str, said: str) -> None:
    key = change.split(" =")[0]
    kept = [line for line in MINE.splitlines() if not line.startswith(f"{key} ")]
    message = refused(tmp_path, "\n".join([*kept, change]))
    assert said in message
    assert "mine.toml" in message or "base" in change


def test_what_is_missing_is_listed(tmp_path: Path) -> None:
    message = refused(tmp_path, 'name = "mine"\nmemory_gbps = 3\n')
    assert "missing title, device_memory_bytes, h2d_gbps, d2h_gbps, source" in message


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "card.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"card\.toml: the profile cannot be read"):
        load_profile(path)


@pytest.mark.parametrize("asked", [0, -1, 24 * GIB])
def test_more_memory_than_the_card_has_is_refused_with_both_figures(asked: int) -> None:
    with pytest.raises(InvalidInput, match=r"rtx4090.*23\.60 GiB") as caught:
        to_machine(load_profile("rtx4090"), asked)
    assert f"{asked:,} bytes" in str(caught.value)


def test_a_disk_without_figures_is_refused(tmp_path: Path) -> None:
    profile = load_measured(profile_file(tmp_path, MINE))
    with pytest.raises(InvalidInput, match="add disk_read_gbps and disk_write_gbps"):
        to_machine(profile, disk=True)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("1.5 KiB", 1536),
        ("500MB", 500_000_000),
        (" 12 ", 12),
        ("7 bytes", 7),
        ("2TB", 2 * 10**12),
        ("9007199254740993", 9007199254740993),
        ("0.1KB", 100),
    ],
)
def test_sizes_people_write(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "8 G", "1e9", "nan", "8GiB free", "½GiB", "٣"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not a size"):
        parse_bytes(text)


@given(st.integers(0, 10**18), st.sampled_from(["", "B", "KiB", "MB", "TiB"]))
def test_whole_sizes_are_exact(count: int, unit: str) -> None:
    size = {"": 1, "B": 1, "KiB": 1024, "MB": 10**6, "TiB": 1024**4}[unit]
    assert parse_bytes(f"{count}{unit}") == count * size


@given(st.floats(0.001, 1e5), st.floats(0, 1e4))
def test_rates_keep_their_meaning(gbps: float, latency_us: float) -> None:
    profile = HardwareProfile("x", "x", GIB, 1e6, gbps, gbps, "x", latency_us=latency_us)
    lane = to_machine(profile).lane["h2d"]
    # a gigabyte takes 1/gbps seconds
    assert math.isclose(1e9 / lane.bytes_per_us, 1e6 / gbps)
    assert lane.latency_us == latency_us
