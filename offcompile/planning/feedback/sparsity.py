"""Predicts the size of a sparse tensor under each codec, and selects the codecs worth using.

An element is zero if all its bits are: −0.0 is not, since codecs restore it exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from offcompile.ir import DEVICE, PHASES, Codec, Machine, Problem, Tensor
from offcompile.ir.units import compressed_bytes, move_ns
from offcompile.runtime.codecs import CODEC_NAMES, codec, sampled_density

FORWARD = PHASES[0]
#: a codec is offered if both transfers, with what packing takes from compute, need less than this
#: share of their time without it
PAYS_BELOW = 0.95
#: packed sizes are estimated from a tensor of this many elements
_ELEMENTS = 1 << 20
_DIGITS = 4
#: restores only the signs of values: not a codec for tensors that are read otherwise
_SIGN = "sign"


def density_of(x: torch.Tensor) -> float | None:
    """The share of elements that are not bitwise zero, from a sample of rows; None if it cannot
    be determined. `x` is dense; except on the CPU this waits for the device."""
    if x.numel() == 0 or x.layout is not torch.strided:
        return None
    with torch.no_grad():
        return sampled_density(x.detach().as_strided((x.numel(),), (1,), x.storage_offset()))


def ratios_of(
    dtype: torch.dtype, density: float | None, codecs: Iterable[Codec], lossy: str | None
) -> dict[str, float]:
    """Codec → packed over raw bytes, for the codecs that are exact or were requested by `lossy`.
    `density` is None if not known."""
    raw, found = _ELEMENTS * dtype.itemsize, {}
    for name in (c.name for c in codecs if c.lossless or lossy in c.name.split("+")):
        known = name in CODEC_NAMES and name != _SIGN and codec(name).takes(dtype)
        if known and (density is not None or "bitmask" not in name):
            share = 1.0 if density is None else density
            packed = codec(name).packed_bytes(_ELEMENTS, dtype, share)
            found[name] = max(round(packed / raw, _DIGITS), 10**-_DIGITS)
    return found


def those_that_pay(nbytes: int, ratios: Mapping[str, float], machine: Machine) -> dict[str, float]:
    """The codecs with which leaving the device and coming back is worth the packing."""

    def both_ways_ns(ratio: float, rate: float | None) -> float:
        moved = compressed_bytes(nbytes, ratio)
        work_ns = 0.0 if rate is None else nbytes / rate * 1000
        cost_ns = 0.0
        for lane in machine.lanes:
            if DEVICE in (lane.source, lane.target):
                taken_ns = move_ns(moved, lane.bytes_per_us, lane.latency_us, nbytes, rate)
                cost_ns += taken_ns + lane.toll_share * work_ns
                cost_ns += lane.bypass_share * max(0.0, taken_ns - work_ns)
        return cost_ns

    most_ns = PAYS_BELOW * both_ways_ns(1.0, None)
    return {
        name: ratio
        for name, ratio in ratios.items()
        if both_ways_ns(ratio, machine.codec[name].bytes_per_us) < most_ns
    }


def with_combinations(machine: Machine, lossy: str | None) -> Machine:
    """Adds the bit mask of rounded elements if rounding is allowed; its time is the sum of both
    codecs' times."""
    known = machine.codec
    if lossy is None or not {"bitmask", lossy} <= set(known):
        return machine
    rate = 1 / (1 / known["bitmask"].bytes_per_us + 1 / known[lossy].bytes_per_us)
    return replace(machine, codecs=(*machine.codecs, Codec(f"bitmask+{lossy}", False, rate)))


@dataclass(frozen=True)
class Packability:
    """The facts about tensors from which their packed sizes follow."""

    dtypes: Mapping[str, torch.dtype]
    #: tensor → share of nonzero elements, where it is known
    densities: Mapping[str, float]
    #: the codec that may round activations; None: none may
    lossy: str | None


def with_ratios(
    problem: Problem, machine: Machine, facts: Packability, only_paying: bool = True
) -> Problem:
    """The problem, with the sizes of each movable activation under each codec.

    Tensors made by backward stay exact: small gradients would be rounded to zero.
    """
    forwards = {t for op in problem.ops if op.phase == FORWARD for t in op.writes}

    def of(tensor: Tensor) -> Tensor:
        dtype = facts.dtypes.get(tensor.id)
        if tensor.kind != "activation" or tensor.pinned or dtype is None or not tensor.nbytes:
            return tensor
        rounded = facts.lossy if tensor.id in forwards else None
        found = ratios_of(dtype, facts.densities.get(tensor.id), machine.codecs, rounded)
        if only_paying:
            found = those_that_pay(tensor.nbytes, found, machine)
        return replace(tensor, ratios=found) if found or tensor.ratios else tensor

    return replace(problem, tensors=tuple(map(of, problem.tensors)))
