"""Checks of training on a GPU: plain functions, which pytest runs and so does this file.

`python tests/support/gpu_checks.py` runs them all where there is no pytest. Each takes the device,
so that those that need no allocator of a GPU also run on the CPU target.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

# cuBLAS adds in one order only with this, and reads it when it starts
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import budget_child
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import BY_NAME, GPT, ZOO, Specimen, Trace, train

import offcompile

Memory = int | str | None
MIB = 1 << 20

# The allocator gives out more than the tensors of the plan: workspaces that matrix products take
# for the length of a call (32 MiB on Hopper), and the rounding of each block to 512 bytes.
OVERHEAD_BYTES = 64 * MIB
# the share of reserved memory that may lie in gaps between blocks, whose layout no plan knows
GAPS_SHARE = 0.1

SANITIZER_SECONDS = 150


class Skipped(Exception):
    """A check that does not apply here; says why."""


class PlacedGPT(GPT):
    """Counts places on the device of the tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(inputs.shape[1], device=tokens.device)
        x = self.embedding(inputs) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def on(specimen: Specimen, device: str) -> Specimen:
    """The same model with its weights and batches on a device."""

    def build() -> nn.Module:
        model = specimen.build()
        if type(model) is GPT:
            model.__class__ = PlacedGPT
        return model.to(device)

    def inputs(seed: int) -> tuple[Tensor, ...]:
        return tuple(x.to(device) for x in specimen.inputs(seed))

    return replace(specimen, build=build, inputs=inputs)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that add in one order, as far as there are any."""
    import torch.utils.deterministic as settings

    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


#: plans need not be good here, and some graphs are planned again after the first steps
SEARCH_SECONDS = 1.0


def ours(memory: Memory, lowering: str = "aot_eager") -> Callable[[nn.Module], Any]:
    options = {"memory": memory, "lowering": lowering, "seconds": SEARCH_SECONDS}
    return lambda model: torch.compile(model, backend="offcompile", options=options)


def plain(lowering: str = "aot_eager") -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend=lowering)


def run(specimen: Specimen, memory: Memory, lowering: str) -> tuple[Trace, tuple[int, ...], int]:
    """The trace, the planned peak of each graph, and the bytes that left the device."""
    known, before = len(offcompile.reports()), offcompile.counters()["bytes_out"]
    trace = train(specimen, ours(memory, lowering))
    last = {r.name.partition(",")[0]: r for r in offcompile.reports()[known:]}
    peaks = tuple(r.planned_peak_bytes for r in last.values())
    assert peaks, "nothing was compiled"
    return trace, peaks, int(offcompile.counters()["bytes_out"] - before)


def nothing_stays() -> None:
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0, "a ticket outlives its graph"


# --- equality -----------------------------------------------------------------------------------


def bitwise(name: str, device: str) -> None:
    """Losses, gradients and weights are plain's to the last bit, at every budget."""
    specimen = on(BY_NAME[name], device)
    with deterministic():
        expected = train(specimen, plain())
        if unsteady := train(specimen, plain()).differences(expected):
            raise Skipped(f"the plain run itself differs from run to run: {unsteady[:3]}")
        ample, ample_peaks, moved = run(specimen, None, "aot_eager")
        assert moved == 0, "it fits, and yet something moved"
        assert not ample.differences(expected), "with ample memory"
        least, least_peaks, moved = run(specimen, "minimum", "aot_eager")
        assert moved > 0, "nothing moved at the minimum"
        assert not (wrong := least.differences(expected)), f"at the minimum: {wrong[:5]}"
        over = sum if specimen.breaks else max
        for share in (0.7, 0.4):
            memory = int(over(least_peaks) + share * (over(ample_peaks) - over(least_peaks)))
            found, peaks, _ = run(specimen, memory, "aot_eager")
            assert not (wrong := found.differences(expected)), f"at {memory} bytes: {wrong[:5]}"
            assert max(peaks) <= memory
    nothing_stays()


# In float64, sums in another order differ by next to nothing (test_zoo.py has the same figure).
INDUCTOR_TOLERANCE = 1e-9


def inductor(name: str, device: str) -> None:
    """Under Inductor, within what Inductor itself differs from eager by."""
    specimen = on(BY_NAME[name].double(), device)
    with deterministic():
        eager, alone = train(specimen), train(specimen, plain("inductor"))
        found, _, moved = run(specimen, "minimum", "inductor")
    assert moved > 0
    assert alone.distance(eager) < INDUCTOR_TOLERANCE
    assert found.distance(eager) < INDUCTOR_TOLERANCE
    assert found.distance(alone) < INDUCTOR_TOLERANCE
    nothing_stays()


Loss = Callable[[int], Tensor]


def same(steps: Callable[[nn.Module, Loss], Any], name: str, device: str) -> None:
    """`steps` leaves the same results, gradients and weights as under the plain backend."""
    specimen = on(BY_NAME[name], device)
    found = []
    with deterministic():
        for compiler in (plain(), ours("minimum")):
            torch._dynamo.reset()
            model = specimen.fresh()
            forward = compiler(model)
            result = steps(model, functools.partial(_loss, specimen, forward))
            gradients = {n: p.grad for n, p in model.named_parameters()}
            found.append((result, gradients, model.state_dict()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    del model, forward
    nothing_stays()


def _loss(specimen: Specimen, forward: Callable[..., Any], seed: int) -> Tensor:
    return specimen.loss(forward(*specimen.inputs(seed)))


def retain_graph(device: str) -> None:
    def steps(model: nn.Module, loss: Loss) -> None:
        kept = loss(0)
        kept.backward(retain_graph=True)
        kept.backward()

    same(steps, "mlp", device)


def two_forwards_before_a_backward(device: str) -> None:
    def steps(model: nn.Module, loss: Loss) -> list[Tensor]:
        losses = [loss(0), loss(1)]
        losses[1].backward()
        losses[0].backward()
        return [value.detach() for value in losses]

    same(steps, "mlp", device)


def accumulation(device: str) -> None:
    def steps(model: nn.Module, loss: Loss) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(2):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for micro in range(3):
                losses.append(loss(10 * step + micro) / 3)
                losses[-1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        return [value.detach() for value in losses]

    same(steps, "mlp", device)


def no_grad_between_steps(device: str) -> None:
    def steps(model: nn.Module, loss: Loss) -> list[Tensor]:
        loss(0).backward()
        scores = []
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                scores.append(loss(1).clone())
        loss(2).backward()
        return scores

    same(steps, "mlp", device)


def a_dropped_loss_frees_its_slots(device: str) -> None:
    def steps(model: nn.Module, loss: Loss) -> None:
        loss(0)
        nothing_stays()
        loss(1).backward()

    same(steps, "mlp", device)


# --- memory, by the allocator's statistics --------------------------------------------------------

SIZES = {
    "mlp": (budget_child.deep_mlp(32768, 1024, 16), budget_child.deep_mlp(64, 32, 2)),
    "gpt": (budget_child.gpt(64, 512, 6), budget_child.gpt(1, 16, 1)),
}


def _needs_a_gpu(device: str) -> None:
    if not device.startswith("cuda"):
        raise Skipped("needs the statistics of a GPU's allocator")


def measured(name: str, memory: int | str, device: str) -> tuple[list[str], int]:
    """Losses of a training run, and what it held at most beside what was there before."""
    large, small = (on(specimen, device) for specimen in SIZES[name])
    # workspaces that stay for as long as the process does
    budget_child.train(small, memory if memory == "plain" else "minimum", 2)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    losses = budget_child.train(large, memory, budget_child.STEPS)
    return losses, torch.cuda.max_memory_allocated(device) - before


def peak_within_plan_within_budget(name: str, device: str) -> None:
    """At 60% of the plain peak: measured ≤ planned (and the stated overhead) ≤ budget."""
    _needs_a_gpu(device)
    with deterministic():
        expected, plain_bytes = measured(name, "plain", device)
        budget = int(0.6 * plain_bytes)
        known = len(offcompile.reports())
        losses, peak = measured(name, budget, device)
    planned = max(r.planned_peak_bytes for r in offcompile.reports()[known:])
    print(
        f"{name}: plain {plain_bytes / MIB:,.0f} MiB, budget {budget / MIB:,.0f}, "
        f"planned {planned / MIB:,.0f}, measured {peak / MIB:,.0f}"
    )
    assert losses == expected
    assert planned <= budget
    assert peak <= planned + OVERHEAD_BYTES


def trains_where_plain_dies(device: str) -> None:
    """Under a hard limit of the allocator that the plain run does not survive."""
    _needs_a_gpu(device)
    with deterministic():
        expected, plain_bytes = measured("mlp", "plain", device)
        budget = int(0.6 * plain_bytes)
        gc.collect()
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved(device) + OVERHEAD_BYTES
        allowed += int((1 + GAPS_SHARE) * budget)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(allowed / total, device)
        try:
            try:
                measured("mlp", "plain", device)
            except torch.OutOfMemoryError:
                died = True
            else:
                died = False
            losses, _ = measured("mlp", budget, device)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert died, "the plain run lived under a limit below what it takes"
    assert losses == expected


def untouched_when_it_fits(device: str) -> None:
    """With ample memory nothing moves, and the step holds what the plain step holds."""
    _needs_a_gpu(device)
    free, _ = torch.cuda.mem_get_info(device)
    with deterministic():
        expected, plain_bytes = measured("mlp", "plain", device)
        known, moves = len(offcompile.reports()), offcompile.counters()["moves"]
        large = on(SIZES["mlp"][0], device)
        gc.collect()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        losses = budget_child.train(large, free, budget_child.STEPS)
        peak = torch.cuda.max_memory_allocated(device) - before
    assert all(r.fits for r in offcompile.reports()[known:])
    assert offcompile.counters()["moves"] == moves
    assert losses == expected
    assert abs(peak - plain_bytes) <= MIB


# --- the sanitizer --------------------------------------------------------------------------------


def one_step(device: str) -> None:
    """A small step in which everything that can leave leaves."""
    specimen = on(BY_NAME["mlp"], device)
    torch._dynamo.reset()
    specimen.loss(ours("minimum")(specimen.fresh())(*specimen.inputs(0))).backward()
    assert offcompile.counters()["bytes_out"] > 0


def sanitized(device: str) -> None:
    """compute-sanitizer finds no access outside of what is allocated, or after it was freed."""
    _needs_a_gpu(device)
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        raise Skipped("compute-sanitizer is not installed")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__]
    # without the cache, memory that is freed is gone, so that its use afterwards shows
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            [*command, "--one-step"],
            capture_output=True,
            text=True,
            timeout=SANITIZER_SECONDS,
            env=env,
        )
    except subprocess.TimeoutExpired:
        raise Skipped(f"it took more than {SANITIZER_SECONDS} s") from None
    said = done.stdout + done.stderr
    if "not supported" in said.lower():
        raise Skipped(f"compute-sanitizer refuses this machine: {said[-300:]}")
    assert done.returncode == 0, said[-4000:]


CHECKS: dict[str, Callable[[str], None]] = {
    **{f"bitwise-{s.name}": functools.partial(bitwise, s.name) for s in ZOO},
    **{f"inductor-{name}": functools.partial(inductor, name) for name in ("mlp", "conv", "gpt")},
    "retain_graph": retain_graph,
    "two_forwards": two_forwards_before_a_backward,
    "accumulation": accumulation,
    "no_grad": no_grad_between_steps,
    "dropped_loss": a_dropped_loss_frees_its_slots,
    **{f"peak-{name}": functools.partial(peak_within_plan_within_budget, name) for name in SIZES},
    "trains_where_plain_dies": trains_where_plain_dies,
    "untouched_when_it_fits": untouched_when_it_fits,
    "sanitized": sanitized,
}


def main(device: str = "cuda:0") -> int:
    """Every check, one line each; how many failed."""
    failed = 0
    for name, check in CHECKS.items():
        began = time.perf_counter()
        try:
            check(device)
            said = "passed"
        except Skipped as reason:
            said = f"skipped: {reason}"
        except Exception:
            failed += 1
            said = "FAILED\n" + traceback.format_exc()
        print(f"{name}: {said} ({time.perf_counter() - began:.1f} s)", flush=True)
    return failed


if __name__ == "__main__":
    if "--one-step" in sys.argv:
        one_step("cuda:0")
    else:
        sys.exit(min(1, main()))
