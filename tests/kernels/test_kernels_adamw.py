"""The update kernel: against torch's fused one in Triton's interpreter; compiled for targets."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import warm
from adamw_cases import BF16, CASES, F16, F32
from triton_targets import TARGETS, compile_launch, needs_compiler, spread

from offcompile.ir import OffloadError
from offcompile.runtime import kernels
from offcompile.runtime.kernels import AdamStep, AdamTensors, adam_launch, adam_torch, adam_update

HERE = Path(__file__).parents[1] / "support"
STEP = AdamStep(2, lr=0.1, weight_decay=0.1)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "adamw_cases.py"), "cpu"]
    done = warm.run(command, env=environment, imported=warm.LITTLE)
    found: dict[str, str | None] = dict(json.loads(line) for line in done.stdout.splitlines())
    if done.returncode:
        pytest.fail(f"the interpreter ended after {[*found][-1:]}:\n{done.stderr[-4000:]}")
    return found


@pytest.mark.skipif(not kernels.has_triton(), reason="Triton is not installed")
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_does_what_torch_s_fused_one_does(
    name: str, outcomes: dict[str, str | None]
) -> None:
    if wrong := outcomes[name]:
        pytest.fail(wrong, pytrace=False)


def tensors(
    weight: torch.dtype = F32,
    gradient: torch.dtype = F32,
    state: torch.dtype = F32,
    low: torch.dtype | None = None,
    clipped: bool = False,
    length: int = 1 << 16,
) -> AdamTensors:
    return AdamTensors(
        torch.ones(length, dtype=weight),
        torch.ones(length, dtype=gradient),
        torch.zeros(length, dtype=state),
        torch.zeros(length, dtype=state),
        None if low is None else torch.empty(length, dtype=low),
        torch.full((1,), 0.5) if clipped else None,
    )


#: with the bits of a thread's widest load and store
LAUNCHES = {
    "float32": tensors(),
    "float32-clipped": tensors(clipped=True),
    "float32-odd": tensors(length=99_999),
    "master-bfloat16": tensors(gradient=BF16, low=BF16, clipped=True),
    "master-float16": tensors(gradient=F16, low=F16),
    "bfloat16": tensors(weight=BF16, gradient=BF16),
    "short-states": tensors(state=BF16),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@needs_compiler
@spread(LAUNCHES, "sm_90")
def test_it_compiles_with_wide_accesses(name: str, target: str, cache: Path) -> None:
    made = compile_launch(adam_launch(LAUNCHES[name], STEP), target, cache)
    assert (made.load_bits(), made.store_bits()) == (128, 128)


@needs_compiler
@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm_")])
def test_each_byte_is_read_and_written_once(target: str, cache: Path) -> None:
    made = compile_launch(adam_launch(LAUNCHES["float32"], STEP), target, cache)
    wide = re.findall(r"(ld|st)\.global\S*\.v4\.\S+", made.assembly)
    # per thread and tile: four tensors read, three written, in as many accesses each
    reads, writes = wide.count("ld"), wide.count("st")
    assert reads % 4 == 0 and writes % 3 == 0 and reads // 4 == writes // 3 > 0
    assert "st.local" not in made.assembly, "registers are spilt"


@needs_compiler
def test_numbers_of_the_step_are_no_constants(cache: Path) -> None:
    """A schedule of learning rates must not compile anew at each step."""
    first = compile_launch(adam_launch(LAUNCHES["float32"], STEP), "sm_90", cache)
    later = compile_launch(adam_launch(LAUNCHES["float32"], AdamStep(9, lr=1.0)), "sm_90", cache)
    assert first.assembly == later.assembly


@pytest.mark.parametrize("step", [STEP, replace(STEP, decoupled=False), replace(STEP, scale=-1.0)])
def test_what_an_update_means_is_torch_s_own_to_rounding(step: AdamStep) -> None:
    torch.manual_seed(0)
    weight, gradient = torch.randn(300), torch.randn(300)
    kind = torch.optim.AdamW if step.decoupled else torch.optim.Adam
    other = weight.clone().requires_grad_()
    options = {"lr": step.lr, "weight_decay": step.weight_decay, "maximize": step.scale < 0}
    optimizer = kind([other], **options, fused=True)
    mine = AdamTensors(weight, gradient, torch.zeros(300), torch.zeros(300))
    for number in (1, 2, 3):
        other.grad = gradient.clone()
        optimizer.step()
        adam_torch(mine, replace(step, step=number))
    torch.testing.assert_close(weight, other.detach(), rtol=1e-5, atol=1e-6)
    state = optimizer.state[other]
    torch.testing.assert_close(mine.exp_avg, state["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.exp_avg_sq, state["exp_avg_sq"], rtol=1e-5, atol=1e-6)


def test_without_a_device_the_plain_name_is_torch() -> None:
    mine, meant = tensors(length=10, low=BF16, clipped=True), tensors(length=10, low=BF16)
    adam_update(mine, STEP)
    adam_torch(meant, replace(STEP, scale=0.5))
    for found, expected in zip(mine.elementwise, meant.elementwise, strict=True):
        assert torch.equal(found, expected)


def test_what_does_not_fit_is_refused() -> None:
    one = torch.zeros(4, 4)
    with pytest.raises(OffloadError, match=r"shape \(4, 4\).*strides \(1, 4\).*same order"):
        AdamTensors(one, one.t(), one, one)
    with pytest.raises(OffloadError, match="one number, not 2"):
        AdamTensors(one, one, one, one, None, torch.ones(2))
    with pytest.raises(OffloadError, match=r"torch\.float64: it takes .*bfloat16.*adam_torch"):
        adam_launch(tensors(weight=torch.float64), STEP)
    with pytest.raises(OffloadError, match="step 0 of Adam is not possible"):
        AdamStep(0)
