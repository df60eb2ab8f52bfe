"""A CUDA card as a hardware profile: measured once, cached, and extended by the doctor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from offcompile.runtime.base.host_limits import default_limit_bytes
from offcompile.runtime.base.posix import usable_cores
from offcompile.runtime.device.cuda.calls import Card, CudaCalls, DriverCalls
from offcompile.runtime.measure import cuda as measure_cuda
from offcompile.runtime.measure.cuda import Measure, Sizes
from offcompile.runtime.measure.timing import cpu_model, undisturbed

from .cost_cache import Identity
from .hardware import BYTES_PER_US_PER_GBPS, DIRECT_WAYS, HardwareProfile
from .optional_figures import More, kept_more, measure_more
from .this_machine import (
    FLOP_PER_US_PER_TFLOPS,
    Progress,
    attention_tflops,
    disks_profile,
    figures_of,
    with_disks,
    with_host,
)

BASE_OF_CARD, MORE_OF_CARD = "cuda", "cuda-more"


def gpu_profile(
    index: int,
    directories: Sequence[Path] = (),
    refresh: bool = False,
    progress: Progress | None = None,
    calls: DriverCalls | None = None,
    sizes: Sizes | None = None,
) -> HardwareProfile:
    """Returns the profile of the card `cuda:index` and its links, cached or measured now.

    Takes a few seconds the first time. With directories, the profile includes figures of their
    disks. `calls` accesses the card (default: CUDA).
    """
    tell = progress or (lambda text: None)
    reached = calls or CudaCalls(index)
    rates = _rates(reached, sizes or Sizes(), refresh, tell)
    card = reached.card
    more = kept_more(MORE_OF_CARD, card_identity(card))

    def gbps(name: str) -> float | None:
        return more[name] / BYTES_PER_US_PER_GBPS if name in more else None

    profile = HardwareProfile(
        name=f"cuda-{card.index}",
        title=card.name,
        device_memory_bytes=card.memory_bytes,
        memory_gbps=rates["memory"] / BYTES_PER_US_PER_GBPS,
        h2d_gbps=rates["h2d"] / BYTES_PER_US_PER_GBPS,
        d2h_gbps=rates["d2h"] / BYTES_PER_US_PER_GBPS,
        source=f"measured here with torch {torch.__version__} and CUDA {card.cuda}",
        matmul_tflops={n: rates[n] / FLOP_PER_US_PER_TFLOPS for n in card.matmul_dtypes},
        latency_us=rates["latency"],
        host_memory_bytes=default_limit_bytes(),
        measured=True,
        h2d_both_gbps=gbps("h2d_both"),
        d2h_both_gbps=gbps("d2h_both"),
        direct_gbps={w: more[w] / BYTES_PER_US_PER_GBPS for w in DIRECT_WAYS if w in more},
        attention_tflops=attention_tflops(more),
        launch_us=more.get("launch"),
        pin_us_per_gib=more.get("pin"),
    )
    if directories:
        profile = with_disks(profile, disks_profile(directories, False, tell))
    return with_host(profile)


def measure_card(
    calls: DriverCalls, sizes: Sizes, quick: bool, refresh: bool, tell: Progress
) -> More:
    """Measures figures of a card that planning does not need, and caches them for `gpu_profile`."""
    name = f"cuda:{calls.card.index}"
    steps = {
        step: partial(_run, measure, calls, sizes) for step, measure in measure_cuda.MORE.items()
    }
    identity = card_identity(calls.card)
    return measure_more(
        MORE_OF_CARD, identity, steps, quick, refresh, lambda text: tell(f"{name}: {text}")
    )


def card_identity(card: Card) -> Identity:
    """Includes the address, since equal cards in different slots may have different links."""
    return {
        "card": card.name,
        "memory": card.memory_bytes,
        "address": card.address or str(card.index),
        "cuda": card.cuda,
        "torch": torch.__version__,
        "cpu": cpu_model(),
        "cores": usable_cores(),
    }


def _rates(calls: DriverCalls, sizes: Sizes, refresh: bool, tell: Progress) -> dict[str, float]:
    names = ("memory", "h2d", "d2h", "latency", *calls.card.matmul_dtypes)
    steps: Mapping[str, Measure] = {
        **measure_cuda.LINK,
        **measure_cuda.DEVICE,
        **measure_cuda.matmuls(calls),
    }

    def measure() -> dict[str, float]:
        found: dict[str, float] = {}
        with undisturbed(calls.device):
            measure_cuda.warm_up(calls, sizes)
        for step, one in steps.items():
            tell(f"cuda:{calls.card.index}: measuring {step}")
            found |= _run(one, calls, sizes)
        return found

    return figures_of(BASE_OF_CARD, card_identity(calls.card), names, measure, refresh)


def _run(
    measure: Callable[[DriverCalls, Sizes], dict[str, float]], calls: DriverCalls, sizes: Sizes
) -> dict[str, float]:
    with undisturbed(calls.device):
        return measure(calls, sizes)
