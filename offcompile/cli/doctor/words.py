"""Explains what limits a machine and what would help most, from figures alone; runs nothing.

An effect is the share of a step's compute time that a fault is expected to add, for a step of a
well-known model. Effects are rough, and serve to rank findings.
"""

from __future__ import annotations

from collections.abc import Iterator

from offcompile.machine.hardware import HardwareProfile

from .figures import Examination, Gpu, Spill
from .models import (
    GB,
    HOST_SHARE,
    LARGE,
    SMALL,
    Finding,
    compute_seconds,
    exposed,
    moving,
    say_free,
    say_size,
    say_time,
)
from .words_gpu import of_gpu

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "fuse"}
)
HOLES_EFFECT, LIMITED_EFFECT, SMALL_PAGES_EFFECT = 0.065, 0.05, 0.03


def findings(found: Examination) -> list[Finding]:
    """All findings, largest effect first."""
    said: list[Finding] = []
    for gpu in found.gpus:
        said += of_gpu(found, gpu)
    if not found.gpus:
        said += _of_cpu_target(found)
    said += _of_process(found)
    for spill in found.spills:
        said += _of_spill(found, spill)
    return sorted(said, key=lambda finding: -finding.effect)


# --- the CPU target ------------------------------------------------------------------------


def _of_cpu_target(found: Examination) -> Iterator[Finding]:
    p = found.cpu
    compute = compute_seconds(SMALL, p)
    out, back, free = moving(SMALL, p.h2d_gbps, p.d2h_gbps, compute)
    effect = exposed(out, back, compute)
    verdict = (
        f"activations to the disk will be the bottleneck: {say_free(free)}"
        if effect
        else "the disk keeps up, and all of it can leave for free"
    )
    yield Finding(
        effect,
        "cpu",
        f"The disk writes {p.d2h_gbps:.3g} GB/s and reads {p.h2d_gbps:.3g} GB/s. All that a step "
        f"of {SMALL.name} with {SMALL.tokens:,} tokens saves ({SMALL.saved_bytes / GB:.1f} GB) "
        f"takes {say_time(out)} out and {say_time(back)} back, beside {say_time(compute)} of "
        f"compute: {verdict}.",
        "Name directories on several disks with `spill`: their rates add up." if effect else "",
    )
    yield from _dtypes(p)
    if found.leaves_holes:
        yield Finding(
            HOLES_EFFECT,
            "cpu",
            f"glibc {found.glibc} leaves holes between freed tensors: steps take 5 to 8% longer.",
            "Install a C++ compiler such as g++, or name one in CXX; or else start with "
            "`offcompile run SCRIPT`.",
        )
    limits = found.limits
    for limit, option in ((limits.data_bytes, "-d"), (limits.address_bytes, "-v")):
        if limit is not None:
            yield Finding(
                LIMITED_EFFECT,
                "cpu",
                f"`ulimit {option}` is {say_size(limit)}: under it each large block goes back to "
                "the system at once and is touched anew, about 5% of a step.",
                "Where a cgroup can bound the memory instead, lift it.",
            )
    if limits.huge_pages == "never":
        yield Finding(
            SMALL_PAGES_EFFECT,
            "cpu",
            "Huge pages are switched off: memory that was given back returns 4 KiB at a time.",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _dtypes(p: HardwareProfile) -> Iterator[Finding]:
    full, half = (p.matmul_tflops.get(name) for name in ("fp32", "bf16"))
    if full is None or half is None:
        return
    rates = f"Matrix products run at {half:.2g} TFLOP/s in bf16 and {full:.2g} in fp32"
    if half < 0.8 * full:
        yield Finding(
            min(0.5, full / half - 1),
            "cpu",
            f"{rates}: bf16 makes steps slower here.",
            "Train in fp32 on this processor.",
        )
    elif half > 1.5 * full:
        yield Finding(
            0.0, "cpu", f"{rates}: bf16 is {half / full:.1f} times as fast.", "Use autocast."
        )


# --- the process and its disks -------------------------------------------------------------


def _of_process(found: Examination) -> Iterator[Finding]:
    limits = found.limits
    if limits.threads * 2 < limits.cores:
        yield Finding(
            min(1.0, limits.cores / 2 / limits.threads - 1) * (0.2 if found.gpus else 1.0),
            "this process",
            f"torch uses {limits.threads} of {limits.cores} cores.",
            "Raise OMP_NUM_THREADS, or torch.set_num_threads.",
        )
    if limits.memory_bytes < limits.physical_bytes:
        yield Finding(
            0.0,
            "this process",
            f"A cgroup allows {say_size(limits.memory_bytes)} of the machine's "
            f"{say_size(limits.physical_bytes)}.",
        )


def _of_spill(found: Examination, spill: Spill) -> Iterator[Finding]:
    model = LARGE if found.gpus else SMALL
    where, kind = spill.directory, spill.filesystem or "unknown"
    speed = f"writes {spill.write_gbps:.3g} GB/s and reads {spill.read_gbps:.3g} GB/s"
    if kind.partition(".")[0] in NETWORK:
        yield Finding(
            0.15,
            where,
            f"The spill directory is on a network file system ({kind}), which {speed}.",
            "Name a directory on a local disk with `spill`.",
        )
    elif kind == "overlay":
        yield Finding(
            0.02,
            where,
            f"The spill directory is in the container's own layers (overlay), which {speed}.",
            "Mount a volume of a local disk and name it with `spill`.",
        )
    if not spill.direct_io:
        yield Finding(
            0.1,
            where,
            f"The spill directory is on a file system ({kind}) that has no direct I/O: what is "
            "moved there stays in the page cache for a while, and copies take processor time.",
            "Name a directory on ext4 or XFS with `spill`.",
        )
    if spill.free_bytes < model.saved_bytes:
        yield Finding(
            0.3,
            where,
            f"{say_size(spill.free_bytes)} are free; a step of {model.name} saves "
            f"{model.saved_bytes / GB:.1f} GB.",
            "Free some, or name another disk as well.",
        )
    for gpu in found.gpus:
        if gpu.profile is not None and spill.write_gbps < gpu.profile.d2h_gbps:
            yield _disk_beside_link(found, gpu, gpu.profile, spill)
    both = _disk_both_ways(found, spill)
    if both is not None:
        yield both


def _disk_both_ways(found: Examination, spill: Spill) -> Finding | None:
    if spill.read_both_gbps is None or spill.write_both_gbps is None:
        return None
    share = min(spill.read_both_gbps / spill.read_gbps, spill.write_both_gbps / spill.write_gbps)
    if share > 0.85:
        return None
    effect = 0.0
    if not found.gpus:
        compute = compute_seconds(SMALL, found.cpu)
        apart, together = (
            exposed(*moving(SMALL, read, write, compute)[:2], compute)
            for read, write in (
                (spill.read_gbps, spill.write_gbps),
                (spill.read_both_gbps, spill.write_both_gbps),
            )
        )
        effect = together - apart
    return Finding(
        effect,
        spill.directory,
        f"While both ways run the disk reads {spill.read_both_gbps:.3g} GB/s and writes "
        f"{spill.write_both_gbps:.3g} GB/s, {100 * share:.0f}% of a way alone.",
        "A second disk in `spill` takes half of it." if effect > 0 else "",
    )


def _disk_beside_link(found: Examination, gpu: Gpu, p: HardwareProfile, spill: Spill) -> Finding:
    compute = compute_seconds(LARGE, p)
    # only tensors that the host cannot hold go on to the disk
    over = max(0.0, 1 - HOST_SHARE * found.limits.memory_bytes / LARGE.saved_bytes)
    out, back, free = moving(LARGE, spill.read_gbps, spill.write_gbps, compute)
    return Finding(
        exposed(out * over, back * over, compute),
        spill.directory,
        f"The disk writes {spill.write_gbps:.3g} GB/s and reads {spill.read_gbps:.3g} GB/s where "
        f"the link of {gpu.place} moves {p.d2h_gbps:.3g}: activations to disk will be the "
        f"bottleneck before those to host memory ({say_free(free)}).",
        "Keep what fits in host memory; more disks in `spill` add up." if over else "",
    )
