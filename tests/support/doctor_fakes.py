"""A card whose clock is reckoned, and machines that are made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from offcompile.cli.doctor.figures import Examination, Gpu, Spill
from offcompile.machine.hardware import HardwareProfile, load_profile
from offcompile.runtime.base.limits import Limits, PciLink
from offcompile.runtime.device.cuda.calls import COMPUTE, LOADS, OUTS, Card, DriverCalls
from offcompile.runtime.measure.cuda import Sizes
from offcompile.runtime.measure.host import AttentionShape

GIB = 1 << 30
TINY = Sizes(
    copy_bytes=1 << 14,
    memory_bytes=1 << 12,
    pin_bytes=1 << 12,
    row_bytes=256,
    matmul_side=32,
    attention=AttentionShape(1, 1, 16, 16),
    launches=3,
    small_copies=3,
    both_copies=4,
    runs=3,
    warm_runs=1,
)
#: kind → amount in a microsecond
RATES: Mapping[str, float] = {
    "h2d": 25e3,
    "d2h": 24e3,
    "latency": 1 / 8.0,
    "h2d_both": 20e3,
    "d2h_both": 10e3,
    "read": 23e3,
    "read_strided": 9e3,
    "read_gather": 11e3,
    "write": 22e3,
    "write_strided": 7e3,
    "memory": 900e3,
    "fp32": 20e3,
    "tf32": 60e3,
    "fp16": 120e3,
    "bf16": 110e3,
    "fp8": 200e3,
    "attention_forward": 80e3,
    "attention_backward": 70e3,
    "launch": 1 / 4.0,
    "warm": 1.0,
}


class FakeCalls(DriverCalls):
    """CPU tensors in place of the card's; work takes as long as `rates` say, on each stream."""

    def __init__(
        self,
        index: int = 0,
        capability: tuple[int, int] = (8, 6),
        rates: Mapping[str, float] = RATES,
        pin_code: int = 0,
        broken: str = "",
    ) -> None:
        self.card = Card(index, "Fake 3090", capability, 24 * GIB, f"0000:0{index}:00.0", "13.0")
        self.device = torch.device("cpu")
        self.rates, self.pin_code, self.broken = rates, pin_code, broken
        self.clock_us = {COMPUTE: 0.0, LOADS: 0.0, OUTS: 0.0}
        self.issued: list[str] = []

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def issue(self, kind: str, amount: float, stream: str, call: Callable[[], object]) -> None:
        if kind == self.broken:
            raise RuntimeError(f"CUDA error: no {kind}\nmore lines")
        call()
        self.issued.append(kind)
        self.clock_us[stream] += amount / self.rates[kind]

    def mark(self, stream: str) -> float:
        return self.clock_us[stream]

    def follow(self, stream: str, mark: float) -> None:
        self.clock_us[stream] = max(self.clock_us[stream], mark)

    def elapsed_us(self, first: float, last: float) -> float:
        return last - first

    def pin_us(self, nbytes: int) -> tuple[float, int]:
        self.issued.append("pin")
        return nbytes * 250_000 / GIB, self.pin_code

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def gather(self, table: torch.Tensor, rows: torch.Tensor) -> None:
        table.index_select(0, rows)

    def link(self) -> PciLink:
        return PciLink(4, 16, 4, 16)

    def settle(self) -> None:
        self.clock_us = dict.fromkeys(self.clock_us, max(self.clock_us.values()))


LIMITS = Limits(
    memory_bytes=256 * GIB,
    physical_bytes=256 * GIB,
    available_bytes=200 * GIB,
    cores=32,
    threads=16,
    memlock_bytes=None,
    data_bytes=None,
    address_bytes=None,
    open_files=65536,
    huge_pages="madvise",
)
SPILL = Spill("/data", "ext4", 900 * GIB, True, 6.0, 5.0, 80.0, 5.5, 4.6)
CPU = HardwareProfile("cpu", "cpu", 256 * GIB, 80.0, 6.0, 5.0, "made up", {"fp32": 1.0, "bf16": 1})


def of_gpu(name: str = "h200", **more: object) -> Gpu:
    given = dict(more)
    link, failed = given.pop("link", None), given.pop("failed", {})
    shipped = load_profile(name)
    values = {f: getattr(shipped, f) for f in shipped.__dataclass_fields__}
    profile = HardwareProfile(**{**values, **given})  # type: ignore[arg-type]
    return Gpu(0, shipped.title, profile, link, failed)  # type: ignore[arg-type]


def machine(**changes: object) -> Examination:
    values: dict[str, object] = {"limits": LIMITS, "cpu": CPU, "spills": (SPILL,)}
    return Examination(**{**values, **changes})  # type: ignore[arg-type]
