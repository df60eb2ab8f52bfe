"""Explains what limits a GPU and its link; see `words`."""

from __future__ import annotations

from collections.abc import Iterator

from offcompile.machine.hardware import ADAM_BYTES_PER_PARAMETER, HardwareProfile

from .figures import Examination, Gpu
from .models import (
    GB,
    GIB,
    HOST_SHARE,
    KERNELS_PER_LAYER,
    LARGE,
    STATE_BYTES_PER_PARAMETER,
    Finding,
    compute_seconds,
    exposed,
    moving,
    say_free,
    say_size,
    say_time,
)

#: PCIe generation → copy rate of a link with 16 lanes
PCIE_GBPS = {3: 12.5, 4: 25.0, 5: 53.0, 6: 105.0}
#: above this rate, CPU and GPU are linked directly, not by PCIe
FASTEST_PCIE_GBPS = 130.0


def of_gpu(found: Examination, gpu: Gpu) -> Iterator[Finding]:
    profile = gpu.profile
    if profile is None:
        why = "; ".join(gpu.failed.values()) or "no reason was given"
        yield Finding(
            10.0, gpu.place, f"{gpu.name} could not be measured: {why}.", "Look at `nvidia-smi`."
        )
        return
    compute = compute_seconds(LARGE, profile)
    for one in (_link, _both_ways, _pinning, _direct, _direct_files, _launches):
        finding = one(found, gpu, profile, compute)
        if finding is not None:
            yield finding
    yield from _optimizer(found, gpu, profile, compute)


def _link(found: Examination, gpu: Gpu, p: HardwareProfile, compute: float) -> Finding:
    out, back, free = moving(LARGE, p.h2d_gbps, p.d2h_gbps, compute)
    effect = exposed(out, back, compute)
    says = (
        f"The link moves {p.h2d_gbps:.3g} GB/s to the card and {p.d2h_gbps:.3g} GB/s back, "
        f"{_pcie(gpu, min(p.h2d_gbps, p.d2h_gbps))}. The weights of {LARGE.name} "
        f"({LARGE.weight_bytes / GB:.1f} GB) take {say_time(LARGE.weight_bytes / p.h2d_gbps / GB)} "
        f"per pass. All that a step of {LARGE.tokens:,} tokens saves "
        f"({LARGE.saved_bytes / GB:.1f} GB) takes {say_time(out)} out and {say_time(back)} back, "
        f"beside {say_time(compute)} of compute: {say_free(free)}."
    )
    link = gpu.link
    if link is not None:
        now, most = (
            _pcie_gbps(link.generation, link.width),
            _pcie_gbps(link.most_generation, link.most_width),
        )
        if most > 1.2 * now:
            return Finding(
                max(effect, 0.05),
                gpu.place,
                says,
                f"Card and slot could do Gen{link.most_generation} x{link.most_width}, about "
                f"{most:.3g} GB/s: look at the slot, a riser, and the firmware's PCIe settings.",
            )
    helps = ""
    if effect > 0:
        helps = (
            "Give the plan a larger budget, or let it compute again what is cheap "
            "(the policy `joint` weighs that)."
        )
    return Finding(effect, gpu.place, says, helps)


def _pcie(gpu: Gpu, gbps: float) -> str:
    if gpu.link is not None:
        return f"over PCIe Gen{gpu.link.generation} x{gpu.link.width}"
    if gbps > FASTEST_PCIE_GBPS:
        return "more than PCIe does: processor and card are wired directly"
    if gbps < PCIE_GBPS[3] / 1.5:
        return "less than PCIe Gen3 x16 gives"
    near = min(PCIE_GBPS, key=lambda g: abs(PCIE_GBPS[g] / gbps - 1))
    return f"about what PCIe Gen{near} x16 gives"


def _pcie_gbps(generation: int, width: int) -> float:
    whole = PCIE_GBPS.get(generation) or PCIE_GBPS[3] / 2.0 ** (3 - generation)
    return whole * width / 16


def _both_ways(found: Examination, gpu: Gpu, p: HardwareProfile, compute: float) -> Finding | None:
    if p.h2d_both_gbps is None or p.d2h_both_gbps is None:
        return None
    share = min(p.h2d_both_gbps / p.h2d_gbps, p.d2h_both_gbps / p.d2h_gbps)
    says = (
        f"While both ways run the link moves {p.h2d_both_gbps:.3g} GB/s to the card and "
        f"{p.d2h_both_gbps:.3g} GB/s back"
    )
    if share > 0.85:
        return Finding(0.0, gpu.place, f"{says}: they hardly hinder each other.")
    return Finding(
        0.1 * (1 - share),
        gpu.place,
        f"{says}, {100 * share:.0f}% of a way alone: what leaves and what returns compete.",
        "Host memory may be the narrow place: fill all its channels, and keep the process on the "
        "card's NUMA node (`numactl --cpunodebind`).",
    )


def _pinning(found: Examination, gpu: Gpu, p: HardwareProfile, compute: float) -> Finding | None:
    why = next((text for text in gpu.failed.values() if "register host memory" in text), None)
    if why is not None:
        out, back, _ = moving(LARGE, p.h2d_gbps / 2, p.d2h_gbps / 2, compute)
        return Finding(
            max(0.2, (out + back) / compute),
            gpu.place,
            f"Host memory cannot be pinned: {why}.{_locked(found)} Copies from pageable memory run "
            "at about half the rate and not beside compute.",
            _unlock(found),
        )
    if p.pin_us_per_gib is None:
        return None
    arena = HOST_SHARE * found.limits.memory_bytes / GIB
    return Finding(
        0.0,
        gpu.place,
        f"Pinning takes {say_time(p.pin_us_per_gib / 1e6)} a GiB, once: "
        f"{say_time(arena * p.pin_us_per_gib / 1e6)} for all that a host tier may take here "
        f"({arena:.0f} GiB).",
    )


def _locked(found: Examination) -> str:
    limit = found.limits.memlock_bytes
    return "" if limit is None else f" `ulimit -l` is {say_size(limit)}."


def _unlock(found: Examination) -> str:
    if found.wsl:
        return "Under WSL Windows bounds what can be pinned: raise `memory` in .wslconfig."
    if found.container:
        return "Start the container with `--ulimit memlock=-1`."
    if found.limits.memlock_bytes is not None:
        return "Run `ulimit -l unlimited` first, or raise memlock in /etc/security/limits.conf."
    return "Free host memory, and look at what the driver says (`dmesg`)."


def _direct(found: Examination, gpu: Gpu, p: HardwareProfile, compute: float) -> Finding | None:
    rates = p.direct_gbps
    if "read" not in rates:
        return None
    share = rates["read"] / p.h2d_gbps
    gather = f", rows by index {rates['read_gather']:.3g}" if "read_gather" in rates else ""
    strided = f", parts of rows {rates['read_strided']:.3g}" if "read_strided" in rates else ""
    write = f"; they write {rates['write']:.3g} GB/s" if "write" in rates else ""
    judged = (
        "weights that a step uses once need no copy"
        if share >= 0.8
        else "copy what is used whole; read in place only what is used in part"
    )
    return Finding(
        0.0,
        gpu.place,
        f"Kernels read host memory in place at {rates['read']:.3g} GB/s{strided}{gather}{write}: "
        f"{100 * share:.0f}% of a copy's rate, so {judged}.",
    )


def _direct_files(
    found: Examination, gpu: Gpu, p: HardwareProfile, compute: float
) -> Finding | None:
    if gpu.index:  # the same for all GPUs
        return None
    why = found.no_direct_files
    says = "GPUDirect Storage is there: large tensors go between card and disk past host memory."
    return Finding(0.0, gpu.place, says if why is None else f"{why[0].upper()}{why[1:]}.")


def _launches(found: Examination, gpu: Gpu, p: HardwareProfile, compute: float) -> Finding | None:
    if p.launch_us is None:
        return None
    spent = p.launch_us * LARGE.layers * KERNELS_PER_LAYER / 1e6
    # launches run ahead of kernels, and cost time only if they take longer than the kernels
    if spent < 0.5 * compute:
        return None
    return Finding(
        max(0.0, spent / compute - 1),
        gpu.place,
        f"A kernel takes {p.launch_us:.3g} µs to launch: {say_time(spent)} for the some "
        f"{LARGE.layers * KERNELS_PER_LAYER:,} of a step, of {say_time(compute)}.",
        "A faster processor core, larger batches, or CUDA graphs help.",
    )


def _optimizer(
    found: Examination, gpu: Gpu, p: HardwareProfile, compute: float
) -> Iterator[Finding]:
    if p.host_adam_gbps is not None:
        rate = p.host_adam_gbps * GB / ADAM_BYTES_PER_PARAMETER
        taken, hidden = LARGE.parameters / rate, 2 * compute / 3
        beyond = max(0.0, taken - hidden)
        yield Finding(
            beyond / compute,
            gpu.place,
            f"AdamW on the host updates {rate / 1e9:.2g} billion parameters a second "
            f"({p.host_adam_gbps:.3g} GB/s): {say_time(taken)} for {LARGE.name}, "
            + (
                f"of which the backward pass hides {say_time(hidden)}."
                if beyond
                else "which the backward pass hides."
            ),
            "More threads or memory channels help; so do more tokens between updates."
            if beyond
            else "",
        )
    room = HOST_SHARE * found.limits.memory_bytes
    needed = STATE_BYTES_PER_PARAMETER * LARGE.parameters
    largest = room / STATE_BYTES_PER_PARAMETER / 1e9
    says = (
        f"Host memory ({say_size(found.limits.memory_bytes)}) holds weights, gradients and AdamW's "
        f"moments in fp32 of {largest:.2g} billion parameters"
    )
    if needed <= room or p.disk_read_gbps is None or p.disk_write_gbps is None:
        yield Finding(0.2 if needed > room else 0.0, gpu.place, f"{says}.")
        return
    over = needed - room
    beyond = over / GB * (1 / p.disk_read_gbps + 1 / p.disk_write_gbps)
    yield Finding(
        beyond / compute,
        gpu.place,
        f"{says}; {LARGE.name} needs {needed / GB:.0f} GB, and the rest takes {say_time(beyond)} a "
        "step to the disk and back.",
        "More host memory helps most.",
    )
