"""Measures the processor and the memory: rates, overheads, and the identity of the machine.

Measuring takes time and memory. It restores the user's random state, gradient mode, dispatch modes
and flags.
"""

from __future__ import annotations

import mmap
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offcompile.runtime.base.posix import usable_cores
from offcompile.runtime.base.process_memory import machine_memory_bytes

from .cold import cool

COPY_BYTES = 64 * 1024**2  # twice this is more than the caches of most processors hold
FRESH_BYTES = 16 * 1024**2
PROBE_SIDE, MATMUL_SIDE = 256, 1024
#: if a product of MATMUL_SIDE would take longer than this, only the probe is run
MATMUL_SECONDS = 0.5
MOST_RUNS = 15
#: other work disturbed a measurement if threads waited for a processor longer than this share
DISTURBED_SHARE = 0.05


@contextmanager
def undisturbed(device: torch.device | None = None) -> Iterator[None]:
    """Use real tensors and plain kernels inside, regardless of tracing and autograd outside.

    The random state of the CPU, and of a CUDA `device`, is restored afterwards.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C._DisableFuncTorch())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        yield


def time_us(
    call: Callable[[], object],
    seconds: float = 0.03,
    runs: int = 3,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Time of the call once it is warm: the mean of the faster half of its runs.

    At least `runs` of them, and more while `seconds` are not used up; only one if a call takes
    longer than ten times that. The slower half says more about other work on the machine. `before`
    runs ahead of each call and is not timed.
    """
    begun = time.perf_counter()
    call()
    if time.perf_counter() - begun > 10 * seconds:
        runs = 1
    taken: list[float] = []
    while len(taken) < runs or (sum(taken) < seconds and len(taken) < MOST_RUNS):
        before()
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.fmean(sorted(taken)[: (len(taken) + 1) // 2]) * 1e6


@dataclass
class Stopwatch:
    """`with Watch() as w: …` sets `w.disturbed` if other work held the processor meanwhile."""

    disturbed: bool = False
    _begun: float = 0.0
    _waited: int = 0

    def __enter__(self) -> Stopwatch:
        self._begun, self._waited = time.perf_counter(), _waited_ns()
        return self

    def __exit__(self, *error: object) -> None:
        waited = (_waited_ns() - self._waited) / 1e9
        # each thread waits on its own
        seconds = (time.perf_counter() - self._begun) * torch.get_num_threads()
        self.disturbed = waited > DISTURBED_SHARE * seconds


def _waited_ns() -> int:
    """Time that this process's threads were runnable but not running; 0 if the kernel is silent."""
    total = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(task.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # the thread has ended, or nothing is counted here
    return total


def machine_identity() -> dict[str, str | int | bool]:
    """Everything that a measurement depends on: processor, memory, torch, threads, its flags."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gib": machine_memory_bytes() >> 30,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def cpu_model() -> str:
    """Name, family, model and stepping of the processor, as the system reports them."""
    wanted = ("model name", "cpu family", "model", "stepping")
    found: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in wanted:
                found.setdefault(key.strip(), value.strip())
    except OSError:
        found = {}
    if len(found) < len(wanted):
        return " ".join([found.get("model name", ""), platform.machine()]).strip()
    name, family, model, stepping = (found[w] for w in wanted)
    return f"{name} (family {family}, model {model}, stepping {stepping})"


def memory_bytes_per_us() -> float:
    """Bytes read plus bytes written per µs by a streaming copy of memory touched before."""
    with undisturbed():
        source = torch.ones(COPY_BYTES // 4, dtype=torch.float32, device="cpu")
        target = torch.zeros_like(source)

        def cold() -> None:
            for tensor in (source, target):
                cool(tensor.data_ptr(), tensor.nbytes)

        return 2 * COPY_BYTES / time_us(lambda: target.copy_(source), 0.1, before=cold)


def matmul_flop_per_us(dtype: torch.dtype) -> float:
    """Rate of a compute-bound matrix product."""
    with undisturbed():
        rate = _matmul_rate(dtype, PROBE_SIDE)
        if 2 * MATMUL_SIDE**3 / rate > MATMUL_SECONDS * 1e6:
            return rate
        return max(rate, _matmul_rate(dtype, MATMUL_SIDE))


def _matmul_rate(dtype: torch.dtype, side: int) -> float:
    left = torch.ones(side, side, device="cpu").to(dtype)
    right = torch.ones(side, side, device="cpu").to(dtype)
    return 2 * side**3 / time_us(lambda: torch.mm(left, right), 0.05)


@dataclass(frozen=True)
class Overheads:
    """The costs of an op beyond arithmetic and memory traffic."""

    #: calling a kernel with next to no work
    op_us: float
    #: creating a view
    view_us: float
    #: filling a large output that was just allocated, and freeing it
    fresh_us_per_mib: float
    #: touching pages that had been returned to the system, and returning them again
    touch_us_per_mib: float = 0.0


def measure_overheads() -> Overheads:
    with undisturbed():
        small = torch.ones(4, 4, device="cpu")
        add, view = torch.ops.aten.add.Tensor, torch.ops.aten.view.default
        repeats = 200

        def many(call: Callable[[], object]) -> float:
            def run() -> None:
                for _ in range(repeats):
                    call()

            return time_us(run) / repeats

        def fresh() -> None:
            torch.empty(FRESH_BYTES // 4, dtype=torch.float32, device="cpu").fill_(1.0)

        return Overheads(
            op_us=many(lambda: add(small, small)),
            view_us=many(lambda: view(small, [16])),
            fresh_us_per_mib=time_us(fresh) / (FRESH_BYTES >> 20),
            touch_us_per_mib=_touch_us_per_mib(),
        )


def _touch_us_per_mib() -> float:
    """The cost of touching returned pages; 0 if pages cannot be returned."""
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return 0.0
    # small pages: few holes between tensors contain a whole huge page
    pages = mmap.mmap(-1, FRESH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)  # keeps them mapped

    def refill() -> None:
        pages.madvise(mmap.MADV_DONTNEED)
        tensor.fill_(1)

    us = time_us(refill) - time_us(lambda: tensor.fill_(1))
    return max(us, 0.0) / (FRESH_BYTES >> 20)
