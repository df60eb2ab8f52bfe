"""Ops over bits: compiled code, torch and Triton against the reference, and against aten."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import warm
from bit_cases import CASES, FLOATS, same_gradient
from codec_cases import BF16, F32, as_bytes, bits
from triton_targets import TARGETS, compile_launch, needs_compiler

from offcompile.ir import OffloadError
from offcompile.runtime.codecs.engines import CodecEngine
from offcompile.runtime.codecs.native import Native
from offcompile.runtime.codecs.reference import Reference
from offcompile.runtime.kernels import bit_ops, has_triton
from offcompile.runtime.kernels import bits as masks

HERE = Path(__file__).parents[1] / "support"
LENGTHS = (0, 1, 63, 64, 128, 1000, 100_003)
aten = torch.ops.aten


@pytest.fixture(scope="module", params=[512, 256, 64, 0])
def any_engine(request: pytest.FixtureRequest) -> CodecEngine:
    return Native(request.param) if request.param else Reference()


@pytest.mark.parametrize("length", LENGTHS)
def test_engines_make_and_use_the_same_bits(any_engine: CodecEngine, length: int) -> None:
    for dtype in (*FLOATS, torch.bool):
        x = bits(dtype, length, 0.6, length)
        mask = torch.full((masks.mask_bytes(length),), 7, dtype=torch.uint8)
        any_engine.pack_bits(x, mask)
        assert torch.equal(mask, masks.pack_bits_torch(x))
        for negated in (False, True):
            truths = torch.empty(length, dtype=torch.bool)
            any_engine.unpack_bits(mask, truths, negated)
            assert torch.equal(truths, masks.unpack_bits_torch(mask, length, negated))
            assert torch.equal(truths ^ negated, x if dtype == torch.bool else ~(x <= 0))
        if dtype != torch.bool:
            grad = bits(dtype, length, 0.9, length + 1)
            kept = torch.empty_like(grad)
            any_engine.keep(mask, grad, kept)
            assert torch.equal(as_bytes(kept), as_bytes(masks.keep_torch(grad, mask)))
            assert same_gradient(kept, aten.threshold_backward(grad, x, 0))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_is_masked_as_a_relu_s_is(layout: torch.memory_format) -> None:
    x = bits(F32, 4 * 6 * 5 * 7, 0.6, 0).view(4, 6, 5, 7).contiguous(memory_format=layout)
    grad = bits(F32, x.numel(), 0.9, 1).view(x.shape)
    mask = bit_ops.pack_bits(x)
    for given in (grad, grad.contiguous(memory_format=layout), grad.expand(2, *x.shape)[0]):
        found = bit_ops.masked_grad(given, mask, x.stride())
        assert found.stride() == x.stride()
        expected = aten.threshold_backward(given, x, 0)
        assert torch.equal(as_bytes(found), as_bytes(expected))
    back = bit_ops.unpack_bits(mask, x.shape, x.stride(), True)
    assert torch.equal(back, x <= 0) and back.stride() == x.stride()
    with pytest.raises(OffloadError, match=r"has gaps.*make it contiguous"):
        bit_ops.pack_bits(x[:, ::2])


def test_the_ops_say_what_they_make() -> None:
    x, grad = torch.randn(40, 30), torch.randn(40, 30)
    mask = bit_ops.pack_bits(x)
    for op, args in (
        (bit_ops.pack_bits, (x,)),
        (bit_ops.unpack_bits, (mask, [40, 30], [30, 1], False)),
        (bit_ops.masked_grad, (grad, mask, [30, 1])),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


# --- Triton ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "bit_cases.py"), "cpu"]
    done = warm.run(command, env=environment, imported=warm.LITTLE)
    found: dict[str, str | None] = dict(json.loads(line) for line in done.stdout.splitlines())
    if done.returncode:
        wrong = {name: error for name, error in found.items() if error}
        pytest.fail(f"the interpreter ended with {wrong}:\n{done.stderr[-4000:]}")
    return found


@pytest.mark.long
@pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
def test_kernels_give_the_reference_s_bits(outcomes: dict[str, str | None]) -> None:
    assert set(outcomes) == set(CASES)
    assert not {name: wrong for name, wrong in outcomes.items() if wrong}


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_with_wide_accesses(target: str, tmp_path: Path) -> None:
    for dtype in (F32, BF16):
        x = torch.empty(1 << 16, dtype=dtype)
        mask = torch.empty(masks.mask_bytes(x.numel()), dtype=torch.uint8)
        made = compile_launch(masks.keep_launch(x, mask, torch.empty_like(x)), target, tmp_path)
        assert made.load_bits() == made.store_bits() == 128
    truths = torch.empty(1 << 16, dtype=torch.bool)
    assert compile_launch(masks.pack_bits_launch(truths, mask), target, tmp_path).load_bits() >= 32
    unpacked = masks.unpack_bits_launch(mask, truths, True)
    assert compile_launch(unpacked, target, tmp_path).store_bits() >= 32


def test_what_does_not_fit_is_refused() -> None:
    x, mask = torch.empty(256), torch.empty(32, dtype=torch.uint8)
    with pytest.raises(OffloadError, match=r"256 elements have a mask of 32 torch.uint8, and 31"):
        masks.keep_launch(x, mask[:31], x)
    with pytest.raises(OffloadError, match=r"float32 is to be kept in torch.float64"):
        masks.keep_launch(x, mask, x.double())
    with pytest.raises(OffloadError, match="flat, contiguous tensors of one length"):
        masks.keep_launch(x.view(16, 16), mask, x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_the_reference_s_bits(name: str) -> None:
    CASES[name](torch.device("cuda", torch.cuda.current_device()))
