"""The doctor's findings for made-up machines, and their order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor_fakes import CPU, GIB, LIMITS, SPILL, machine, of_gpu

from offcompile.cli.doctor.figures import Examination, Gpu
from offcompile.cli.doctor.models import Finding
from offcompile.cli.doctor.words import findings
from offcompile.runtime.base.limits import PciLink


def said(found: Examination, part: str) -> Finding:
    (one,) = [f for f in findings(found) if part in f.says]
    return one


def unsaid(found: Examination, part: str) -> bool:
    return not [f for f in findings(found) if part in f.says]


def test_a_good_server_has_nothing_to_mend_but_its_link() -> None:
    found = findings(machine(gpus=(of_gpu("h200", pin_us_per_gib=200_000.0),)))
    first, *others = found
    assert first.where == "cuda:0"
    assert "53 GB/s to the card and 53 GB/s back, about what PCIe Gen5 x16 gives" in first.says
    assert "weights of GPT-1.3B (2.6 GB) take 49 ms per pass" in first.says
    # 13.7 GB out in 258 ms beside 81 ms of compute, of which a third is forward
    assert "(13.7 GB) takes 258 ms out" in first.says
    assert "beside 81 ms of compute: 10% can leave free" in first.says
    assert first.effect == pytest.approx((2 * 258.4 - 80.9) / 80.9, rel=0.02)
    assert all(f.effect == 0.0 for f in others)
    assert "43.5 s" in said(machine(gpus=(of_gpu(pin_us_per_gib=200_000.0),)), "Pinning takes").says


def test_a_slow_card_hides_its_link() -> None:
    slow = of_gpu("rtx4090", matmul_tflops={"bf16": 20.0})
    link = said(machine(gpus=(slow,)), "The link moves")
    assert link.effect == 0.0
    assert "all of it can leave for free" in link.says
    assert not link.helps


def test_a_card_in_the_wrong_slot_is_told_of() -> None:
    gpu = of_gpu("a100-80g", h2d_gbps=6.2, d2h_gbps=6.4, link=PciLink(3, 8, 4, 16))
    first = findings(machine(gpus=(gpu,)))[0]
    assert "6.2 GB/s to the card" in first.says
    assert "over PCIe Gen3 x8" in first.says
    assert "could do Gen4 x16, about 25 GB/s" in first.helps


@pytest.mark.parametrize(
    ("gbps", "words"),
    [
        (3.0, "less than PCIe Gen3 x16"),
        (12.0, "PCIe Gen3 x16"),
        (26.0, "PCIe Gen4 x16"),
        (300.0, "wired directly"),
    ],
)
def test_a_rate_is_named(gbps: float, words: str) -> None:
    found = machine(gpus=(of_gpu(h2d_gbps=gbps, d2h_gbps=gbps),))
    assert words in said(found, "The link moves").says


@pytest.mark.parametrize(
    ("around", "helps"),
    [
        ({}, "ulimit -l unlimited"),
        ({"container": True}, "--ulimit memlock=-1"),
        ({"wsl": True}, ".wslconfig"),
    ],
)
def test_memory_that_cannot_be_pinned_comes_first(around: dict[str, object], helps: str) -> None:
    gpu = of_gpu(failed={"pinning": "CUDA refused to register host memory (error 2)"})
    limits = replace(LIMITS, memlock_bytes=64 << 10)
    first = findings(machine(gpus=(gpu,), limits=limits, **around))[0]
    assert "cannot be pinned" in first.says
    assert "(error 2)" in first.says
    assert "`ulimit -l` is 64 KiB" in first.says
    assert helps in first.helps


def test_a_small_limit_on_locked_memory_is_no_fault_where_pinning_works() -> None:
    limits = replace(LIMITS, memlock_bytes=64 << 10)
    found = machine(gpus=(of_gpu(pin_us_per_gib=1e5),), limits=limits)
    assert unsaid(found, "cannot be pinned")


def test_both_ways_direct_access_and_launches() -> None:
    gpu = of_gpu(
        h2d_both_gbps=30.0,
        d2h_both_gbps=26.5,
        direct_gbps={"read": 20.0, "read_gather": 9.0},
        launch_us=100.0,
    )
    found = machine(gpus=(gpu,))
    both = said(found, "While both ways run the link")
    assert "50% of a way alone" in both.says
    assert both.effect > 0
    direct = said(found, "in place at 20 GB/s, rows by index 9")
    assert "38% of a copy's rate, so copy" in direct.says
    assert said(found, "100 µs to launch: 144 ms").effect == pytest.approx(0.78, abs=0.02)
    easy = of_gpu(h2d_both_gbps=53, d2h_both_gbps=50, direct_gbps={"read": 52.0}, launch_us=3.0)
    other = machine(gpus=(easy,))
    assert "hardly hinder" in said(other, "While both").says
    assert "need no copy" in said(other, "in place at").says
    assert unsaid(other, "to launch")


def test_whether_cards_reach_files_past_the_host_is_said_once() -> None:
    there = machine(gpus=(of_gpu(), replace(of_gpu(), index=1)))
    assert said(there, "GPUDirect Storage").where == "cuda:0"
    absent = replace(there, no_direct_files="no GPUDirect Storage: planted")
    found = said(absent, "No GPUDirect Storage: planted.")
    assert found.effect == 0
    assert unsaid(machine(), "GPUDirect Storage")


def test_the_optimizer_on_the_host_is_weighed_against_backward() -> None:
    slow = said(machine(gpus=(of_gpu(host_adam_gbps=28.0),)), "AdamW on the host updates 1 billion")
    assert "1.3 s for GPT-1.3B, of which the backward pass hides 54 ms" in slow.says
    assert slow.effect > 10
    slow_card = of_gpu(host_adam_gbps=280.0, matmul_tflops={"fp16": 10.0})
    assert "which the backward pass hides." in said(machine(gpus=(slow_card,)), "AdamW on").says


def test_little_host_memory_sends_the_rest_to_the_disk() -> None:
    limits = replace(LIMITS, memory_bytes=16 * GIB, physical_bytes=32 * GIB)
    found = machine(gpus=(of_gpu(),), limits=limits)
    host = said(found, "Host memory (16 GiB) holds")
    assert "0.91 billion parameters" in host.says
    assert "needs 21 GB" in host.says
    assert host.effect > 0
    assert said(found, "A cgroup allows 16 GiB of the machine's 32 GiB").effect == 0.0
    assert unsaid(machine(), "cgroup")


def test_a_disk_slower_than_the_link_is_compared_with_it() -> None:
    slow = replace(SPILL, write_gbps=0.4)
    roomy = said(machine(gpus=(of_gpu(),), spills=(slow,)), "bottleneck before")
    assert "The disk writes 0.4 GB/s and reads 6 GB/s where the link of cuda:0 moves 53" in (
        roomy.says
    )
    assert roomy.effect == 0.0  # host memory holds all that a step saves
    limits = replace(LIMITS, memory_bytes=8 * GIB)
    small = said(machine(gpus=(of_gpu(),), spills=(slow,), limits=limits), "bottleneck before")
    assert small.effect > 1


def test_a_card_that_fails_comes_before_all() -> None:
    gpu = Gpu(1, "Broken", None, failed={"all": "CUDA error: out of memory"})
    first = findings(machine(gpus=(of_gpu(), gpu)))[0]
    assert (first.where, "out of memory" in first.says) == ("cuda:1", True)


# --- the CPU target ------------------------------------------------------------------------


def test_a_slow_disk_is_the_cpu_target_s_bottleneck() -> None:
    cpu = replace(CPU, d2h_gbps=0.4, matmul_tflops={"fp32": 5.0})
    first = findings(machine(cpu=cpu, glibc="2.36", leaves_holes=True))[0]
    assert "The disk writes 0.4 GB/s" in first.says
    assert "activations to the disk will be the bottleneck: 3% can leave free" in first.says
    assert "several disks" in first.helps
    fine = said(machine(), "The disk writes 5 GB/s")
    assert (fine.effect, fine.helps) == (0.0, "")
    assert "keeps up" in fine.says


def test_holes_limits_and_huge_pages_cost_what_was_measured() -> None:
    limits = replace(LIMITS, data_bytes=8 * GIB, huge_pages="never")
    found = machine(glibc="2.36", leaves_holes=True, limits=limits)
    holes = said(found, "glibc 2.36 leaves holes")
    assert "offcompile run" in holes.helps
    assert said(found, "`ulimit -d` is 8 GiB").effect == 0.05
    assert said(found, "Huge pages").effect == 0.03
    assert findings(found)[0] == holes
    with_gpu = machine(glibc="2.36", leaves_holes=True, gpus=(of_gpu(),))
    assert unsaid(with_gpu, "leaves holes")


@pytest.mark.parametrize(
    ("half", "words"), [(0.1, "bf16 makes steps slower"), (4.0, "bf16 is 4.0 times as fast")]
)
def test_bf16_on_a_processor_is_weighed(half: float, words: str) -> None:
    cpu = replace(CPU, matmul_tflops={"fp32": 1.0, "bf16": half})
    assert words in said(machine(cpu=cpu), "Matrix products").says
    assert unsaid(machine(), "Matrix products")


def test_idle_cores_are_told_of() -> None:
    found = machine(limits=replace(LIMITS, threads=4))
    assert said(found, "torch uses 4 of 32 cores").effect == 1.0
    assert unsaid(machine(), "torch uses")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"filesystem": "nfs4"}, "network file system (nfs4)"),
        ({"filesystem": "fuse.sshfs"}, "network file system (fuse.sshfs)"),
        ({"filesystem": "overlay"}, "container's own layers"),
        ({"direct_io": False}, "no direct I/O"),
        ({"free_bytes": GIB}, "1 GiB are free; a step of GPT-124M saves 2.6 GB"),
        ({"read_both_gbps": 2.0}, "33% of a way alone"),
    ],
)
def test_a_spill_directory_is_judged(change: dict[str, object], words: str) -> None:
    found = machine(spills=(SPILL, replace(SPILL, directory="/b", **change)))  # type: ignore[arg-type]
    assert said(found, words).where == "/b"


def test_both_ways_of_a_disk_count_only_where_they_show() -> None:
    both = replace(SPILL, read_both_gbps=0.2, write_both_gbps=0.2)
    quick = replace(CPU, matmul_tflops={"fp32": 20.0})
    assert said(machine(spills=(replace(SPILL, write_both_gbps=3.5),)), "a way alone").effect == 0
    assert said(machine(spills=(both,), cpu=quick), "a way alone").effect > 1


def test_slower_links_rank_higher() -> None:
    effects = [
        said(machine(gpus=(of_gpu(h2d_gbps=g, d2h_gbps=g),)), "The link moves").effect
        for g in (100.0, 50.0, 25.0, 12.0, 6.0)
    ]
    assert effects == sorted(effects)
    found = findings(machine(gpus=(of_gpu(),), glibc="2.36", limits=replace(LIMITS, threads=2)))
    assert [f.effect for f in found] == sorted((f.effect for f in found), reverse=True)


def test_a_processor_without_figures_of_arithmetic_still_gets_words() -> None:
    cpu = replace(CPU, matmul_tflops={})
    assert said(machine(cpu=cpu), "The disk writes").effect >= 0
