"""Cases for the update kernel on any device: the interpreter's (CPU) or a real one.

The expected values come from torch's own fused kernel on the CPU. `python adamw_cases.py cpu|cuda`
runs them all; one line of JSON for each: [name, null or what went wrong].
"""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
from kernel_cases import Case, run_all

from offcompile.runtime.kernels import AdamStep, AdamTensors, Config, adam_launch, adam_torch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: a kibibyte in a tile: edges are met with few elements
SMALL = Config(tile_bytes=1024, warps=1)
BLOCK = SMALL.tile_bytes // 4
LENGTHS = (0, 1, 3, 4, BLOCK - 1, BLOCK, BLOCK + 5, 3 * BLOCK + 2)
#: products and sums may be rounded once instead of twice, square roots and quotients be off by a
#: unit in the last place or two: of the change of a weight, and of each sum
TOLERANCE = 2.0**-21


def drawn(dtype: torch.dtype, shape: tuple[int, ...], seed: int, sign: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return (values if sign else values.square()).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, what: str) -> None:
    """Within the tolerance of `size`, and one rounding to the type that is found."""
    rounding = torch.finfo(found.dtype).eps * expected.abs() if found.dtype != F32 else 0.0
    far = (found.cpu().float() - expected).abs() - TOLERANCE * size - rounding
    assert found.numel() == 0 or float(far.max()) <= 1e-37, f"{what} is {float(far.max())} too far"


def update(
    length: int,
    types: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None],
    step: AdamStep,
    coefficient: float | None,
    device: torch.device,
    most_programs: int | None = None,
) -> None:
    """types: of weight, gradient, states, and of the short copy of the weight, if there is one."""
    weight_type, gradient_type, state_type, low_type = types
    weight = drawn(weight_type, (length,), 1)
    gradient = drawn(gradient_type, (length,), 2)
    exp_avg, exp_avg_sq = drawn(state_type, (length,), 3), drawn(state_type, (length,), 4, False)
    wanted = [t.float().clone() for t in (weight, gradient, exp_avg, exp_avg_sq)]
    wanted[1] *= step.scale * (1.0 if coefficient is None else coefficient)
    before = wanted[0].clone()
    fused = torch._fused_adamw_ if step.decoupled else torch._fused_adam_
    fused(
        [wanted[0]],
        [wanted[1]],
        [wanted[2]],
        [wanted[3]],
        [],
        [torch.tensor(float(step.step))],
        lr=step.lr,
        beta1=step.beta1,
        beta2=step.beta2,
        weight_decay=step.weight_decay,
        eps=step.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )
    # views into something larger: what lies around them must stay
    around = [torch.full((length + 64,), 7.0, dtype=t.dtype) for t in (weight, exp_avg, exp_avg_sq)]
    for whole, tensor in zip(around, (weight, exp_avg, exp_avg_sq), strict=True):
        whole[32 : 32 + length] = tensor
    moved = [whole.to(device) for whole in around]
    low = None if low_type is None else torch.zeros(length, dtype=low_type, device=device)
    factor = None if coefficient is None else torch.tensor([coefficient], device=device)
    inner = [whole[32 : 32 + length] for whole in moved]
    tensors = AdamTensors(inner[0], gradient.to(device), inner[1], inner[2], low, factor)
    adam_launch(tensors, step, SMALL).run(most_programs)
    # the weight's own change, and the two halves of each average, are what is rounded
    change = (wanted[0] - before).abs() + step.lr + before.abs()
    halves = exp_avg.float().abs() + wanted[1].abs()
    squares = exp_avg_sq.float() + wanted[1].square()
    if not step.decoupled:
        halves = halves + step.weight_decay * before.abs()
        squares = squares + (step.weight_decay * before).square()
    for found, expected, size, what in (
        (inner[0], wanted[0], change, "weight"),
        (inner[1], wanted[2], halves, "exp_avg"),
        (inner[2], wanted[3], squares, "exp_avg_sq"),
    ):
        assert_near(found, expected, size, what)
    if low is not None:
        assert torch.equal(low.cpu(), inner[0].cpu().to(low.dtype)), "the short copy is not it"
    for whole, first in zip(moved, around, strict=True):
        for part in (slice(None, 32), slice(32 + length, None)):
            assert torch.equal(whole[part].cpu(), first[part]), "something beside was written"


def in_another_order(device: torch.device) -> None:
    """Dense in the same order, if not the usual one; and as `adam_torch` means it."""
    step = AdamStep(3, lr=0.1, weight_decay=0.1)
    made = [drawn(F32, (4, 5, 6), seed, seed < 4).permute(2, 0, 1) for seed in range(1, 5)]
    there = [t.to(device) for t in made]
    adam_torch(AdamTensors(*made), step)
    adam_launch(AdamTensors(*there), step, SMALL).run()
    for found, expected in zip(there, made, strict=True):
        assert_near(found, expected, 1.0 + expected.abs(), "a tensor")


def infinite_gradients_pass_through(device: torch.device) -> None:
    gradient = torch.tensor([float("inf"), float("nan"), -1.0, 0.0])
    tensors = [t.to(device) for t in (torch.ones(4), gradient, torch.zeros(4), torch.zeros(4))]
    adam_launch(AdamTensors(*tensors), AdamStep(1), SMALL).run()
    weight = tensors[0].cpu()
    assert weight[:2].isnan().all() and weight[2] > 1 and weight[3] == 1, f"{weight}"


def _cases() -> dict[str, Case]:
    decayed = AdamStep(1, lr=1e-2, weight_decay=0.1)
    coupled = AdamStep(7, lr=1e-3, eps=0.1, weight_decay=0.1, decoupled=False)
    late = AdamStep(100_000, lr=3e-4, beta1=0.95, beta2=0.95, eps=1e-6, scale=-1.0)
    cases: dict[str, Case] = {
        f"length-{length}": partial(update, length, (F32, F32, F32, None), decayed, None)
        for length in LENGTHS
    }
    for name, step in (("decayed", decayed), ("coupled", coupled), ("late", late)):
        for clipped, factor in (("", None), ("-clipped", 0.125)):
            for types in (
                (F32, F32, F32, None),
                (F32, BF16, F32, BF16),
                (BF16, BF16, F32, None),
                (F32, F16, F32, F16),
                (F32, F32, BF16, None),
            ):
                said = "-".join(str(t).removeprefix("torch.") for t in types)
                cases[f"{name}{clipped}-{said}"] = partial(update, 301, types, step, factor)
    cases["looped"] = partial(update, 5000, (F32, F32, F32, None), late, 0.5, most_programs=2)
    cases["another-order"] = in_another_order
    cases["infinite"] = infinite_gradients_pass_through
    return cases


CASES = _cases()


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        import interpreter_rounding

        assert interpreter_rounding.KNOWN
    run_all(CASES, torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
