"""Estimates step times of well-known models, to illustrate the effect of a transfer rate.

Saved activations leave in the forward pass and return in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from offcompile.machine.hardware import HardwareProfile

GB = 1e9
GIB = 1 << 30

#: saved elements per layer, token and unit of width, with fused attention
SAVED_ELEMENTS = 17
#: weight, gradient and two moments in fp32
STATE_BYTES_PER_PARAMETER = 16
#: share of host memory that a host tier may take
HOST_SHARE = 0.85
KERNELS_PER_LAYER = 60


@dataclass(frozen=True)
class DoctorModel:
    """A model and batch for which times are reported."""

    name: str
    parameters: float
    layers: int
    width: int
    tokens: int
    element_bytes: int

    @property
    def flop(self) -> float:
        return 6 * self.parameters * self.tokens

    @property
    def saved_bytes(self) -> float:
        return SAVED_ELEMENTS * self.element_bytes * self.width * self.layers * self.tokens

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.element_bytes


LARGE = DoctorModel("GPT-1.3B", 1.3e9, 24, 2048, 8192, 2)
SMALL = DoctorModel("GPT-124M", 124e6, 12, 768, 4096, 4)


@dataclass(frozen=True)
class Finding:
    #: expected cost as a share of a step's compute time; 0: nothing is wrong, just information
    effect: float
    #: the subject: `cuda:0`, `cpu`, a directory, `this process`
    where: str
    says: str
    #: the remedy; empty if there is none
    helps: str = ""


def compute_seconds(model: DoctorModel, p: HardwareProfile) -> float:
    wanted = ("bf16", "fp16", "fp32") if model.element_bytes == 2 else ("fp32",)
    rate = next((p.matmul_tflops[d] for d in wanted if d in p.matmul_tflops), None)
    if rate is None:
        # assumes ten operations per byte of memory traffic
        rate = p.memory_gbps / 100
    return float(model.flop / (rate * 1e12))


def moving(
    model: DoctorModel, in_gbps: float, out_gbps: float, compute: float
) -> tuple[float, float, float]:
    """Seconds out and back for a step's saved activations, and the share that moves for free.

    They leave in the forward pass, a third of the compute, and return in the backward pass.
    """
    out, back = model.saved_bytes / GB / out_gbps, model.saved_bytes / GB / in_gbps
    return out, back, min(1.0, compute / 3 / out, 2 * compute / 3 / back)


def exposed(out: float, back: float, compute: float) -> float:
    return (max(0.0, out - compute / 3) + max(0.0, back - 2 * compute / 3)) / compute


def say_free(share: float) -> str:
    return "all of it can leave for free" if share >= 1 else f"{100 * share:.0f}% can leave free"


def say_time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def say_size(nbytes: int) -> str:
    for name, unit in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} bytes"
