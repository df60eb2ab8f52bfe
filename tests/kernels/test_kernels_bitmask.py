"""Packing kernels: the reference's bytes in the interpreter; compiled for targets; on a GPU."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import warm
from bitmask_cases import CASES, FEW
from codec_cases import BF16, F16, F32
from lengths import asked_of, some
from triton_targets import TARGETS, compile_launch, needs_compiler

from benchmarks import gpu_codecs
from offcompile.ir import OffloadError
from offcompile.runtime import kernels
from offcompile.runtime.kernels import BitmaskPlan, Config, Launch, signs_launch, unsigns_launch

HERE = Path(__file__).parents[1] / "support"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str | None]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "bitmask_cases.py"), "cpu", *asked_of(request, "case")]
    done = warm.run(command, env=environment, imported=warm.LITTLE)
    found: dict[str, str | None] = dict(json.loads(line) for line in done.stdout.splitlines())
    if done.returncode:
        pytest.fail(f"the interpreter ended after {[*found][-1:]}:\n{done.stderr[-4000:]}")
    return found


@pytest.mark.skipif(not kernels.has_triton(), reason="Triton is not installed")
@pytest.mark.parametrize("case", some(CASES, *FEW))
def test_the_kernel_gives_the_reference_s_bytes(case: str, outcomes: dict[str, str | None]) -> None:
    if wrong := outcomes[case]:
        pytest.fail(wrong, pytrace=False)


# --- compiled for targets -------------------------------------------------------------------------

ALL_LAUNCHES = {
    "float32": (F32, None),
    "bfloat16": (BF16, None),
    "uint8": (torch.uint8, None),
    "float64": (torch.float64, None),
    "float32-as-float16": (F32, F16),
    "float32-as-bfloat16": (F32, BF16),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


def launches(name: str, staged: bool, length: int = 99_999) -> list[Launch]:
    dtype, stash = ALL_LAUNCHES[name]
    plan = BitmaskPlan(length, dtype, stash, staged, config=Config(16384, 8))
    x = torch.empty(length, dtype=dtype)
    packed, workspace = (
        torch.empty(n, dtype=torch.uint8) for n in (plan.layout.worst_bytes, plan.workspace_bytes)
    )
    return [*plan.pack_launches(x, packed, workspace), plan.unpack_launch(packed, x, workspace)]


NVIDIA = [target for target in TARGETS if target.startswith("sm_")]
#: every type for one target, and every target for one type
PAIRS = [
    *(("float32", target) for target in NVIDIA),
    *((name, "sm_90") for name in ALL_LAUNCHES if name != "float32"),
    ("float32-as-float16", "sm_80"),
    ("uint8", "sm_100"),
]


@needs_compiler
@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_the_bus_is_met_in_wide_accesses(name: str, target: str, cache: Path) -> None:
    """Whatever the density: values go through staging, and cross 16 bytes a thread."""
    for launch in launches(name, staged=True):
        made = compile_launch(launch, target, cache)
        if "scan" not in launch.kernel:
            assert made.load_bits() == 128, launch.kernel
        if launch.kernel.endswith(("pack_tiles", "unpack_tiles")):
            assert made.store_bits() == 128, launch.kernel


@needs_compiler
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_threads_wait_for_what_others_staged(target: str, cache: Path) -> None:
    """s and l: narrow stores and loads, of single elements; S and L: wide ones; B: a barrier."""
    *_, pack, unpack = launches("float32", staged=True)
    order = {}
    for launch in (pack, unpack):
        assembly = compile_launch(launch, target, cache).assembly
        found = re.finditer(r"(st|ld)\.global\S*?(\.v4)?\.b32|bar\.sync", assembly)
        letters = ({"st": "s", "ld": "l", None: "B"}[f[1]] for f in found)
        found = re.finditer(r"(?:st|ld)\.global\S*?(\.v4)?\.b32|bar\.sync", assembly)
        order[launch.kernel] = "".join(
            letter.upper() if f[1] else letter for letter, f in zip(letters, found, strict=True)
        )
    # sixteen elements a thread are scattered, then read on in four wide loads; before the next tile
    # there is a barrier again
    assert re.search(r"s{16}BL{4}S{4}(ls)*B", order[pack.kernel]), order
    assert re.search(r"S{4}(ls)*Bl{16}B", order[unpack.kernel]), order


def test_nothing_is_staged_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a barrier, as Triton makes it, does not wait for what was written to memory."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    *_, pack, unpack = launches("float32", staged=True)
    assert pack.constants["STAGED"] == unpack.constants["STAGED"] == 0
    assert BitmaskPlan(1 << 24, F32).workspace_bytes < 1 << 16


def widest_bits(name: str, target: str) -> int:
    """A tile of bytes is too small for AMD's groups, of twice as many threads, at 16 bytes each."""
    return 64 if name == "uint8" and target == "gfx942" else 128


@needs_compiler
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("name", ["float32", "uint8", "float32-as-bfloat16"])
def test_within_the_device_nothing_is_staged(name: str, target: str, cache: Path) -> None:
    *_, pack, unpack = launches(name, staged=False)
    assert compile_launch(pack, target, cache).load_bits() == widest_bits(name, target)
    assert compile_launch(unpack, target, cache).store_bits() == widest_bits(name, target)


@needs_compiler
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_registers_suffice(target: str, cache: Path) -> None:
    for staged in (True, False):
        for launch in launches("float32", staged):
            assembly = compile_launch(launch, target, cache).assembly
            assert not re.search(r"(ld|st)\.local", assembly), launch.kernel


@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_signs_compile(dtype: torch.dtype, target: str, cache: Path) -> None:
    x, packed = torch.empty(1 << 16, dtype=dtype), torch.empty(1 << 13, dtype=torch.uint8)
    assert compile_launch(signs_launch(x, packed), target, cache).load_bits() == 128
    assert compile_launch(unsigns_launch(packed, x), target, cache).store_bits() == 128


@needs_compiler
def test_lengths_are_no_constants(cache: Path) -> None:
    """Batches of another size must not compile anew."""
    for short, long in zip(
        launches("float32", True), launches("float32", True, 77_777), strict=True
    ):
        one, other = (compile_launch(made, "sm_90", cache) for made in (short, long))
        assert one.assembly == other.assembly


# --- what is refused ------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    plan = BitmaskPlan(256, F32)
    x = torch.zeros(256)
    packed, workspace = (
        torch.zeros(n, dtype=torch.uint8) for n in (plan.layout.worst_bytes, plan.workspace_bytes)
    )
    with pytest.raises(OffloadError, match=r"must be flat, contiguous, of 256 elements"):
        plan.pack(x.view(2, 128), packed, workspace)
    with pytest.raises(OffloadError, match=r"packed side is \d+ elements.*at least \d+ contig"):
        plan.pack(x, packed[:-16], workspace)
    with pytest.raises(OffloadError, match=r"the workspace is 0 elements.*at least"):
        plan.pack(x, packed, workspace[:0])
    with pytest.raises(OffloadError, match=r"the packed side is .* multiple of 16"):
        plan.unpack(packed[1:], x, workspace)
    with pytest.raises(OffloadError, match=r"torch.float16 is not rounded.*only torch.float32"):
        BitmaskPlan(256, F16, BF16)
    with pytest.raises(OffloadError, match=r"complex128 has 16: view it as real"):
        BitmaskPlan(256, torch.complex128)
    with pytest.raises(OffloadError, match=r"not torch.float64"):
        BitmaskPlan(256, F32, torch.float64)
    with pytest.raises(OffloadError, match="0 programs run nothing"):
        BitmaskPlan(256, F32, programs=0)
    with pytest.raises(OffloadError, match=r"signs are packed of .*not of torch.int32"):
        signs_launch(torch.zeros(8, dtype=torch.int32), packed)
    with pytest.raises(OffloadError, match="kernels run on CUDA devices, and this is cpu"):
        plan.pack(x, packed, workspace)


def test_staging_is_bounded_by_programs() -> None:
    few, many = (BitmaskPlan(1 << 24, F32, programs=n) for n in (8, 128))
    assert few.workspace_bytes < many.workspace_bytes < 4 << 20
    assert BitmaskPlan(1 << 24, F32, staged=False).workspace_bytes < 1 << 16


def test_a_table_of_rates_says_what_share_of_a_copy_they_are() -> None:
    rates = [gpu_codecs.Rate("copy", "device", 0.5, 100.0, 100.0)]
    rates.append(gpu_codecs.Rate("bitmask: pack", "device", 0.5, 80.0, 100.0))
    assert "| bitmask: pack | device | 50% | 80.0 | 80% |" in gpu_codecs.text_of(rates)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_the_reference_s_bytes(name: str) -> None:
    CASES[name](torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.gpu
@needs_gpu
def test_rates_of_packing_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints GB/s of raw bytes for a tensor of which half is zero, beside a copy of it all."""
    with capsys.disabled():
        rates = gpu_codecs.measure(length=1 << 20)
        print("\n" + gpu_codecs.text_of(rates))
    assert all(rate.gbps > 0 for rate in rates)
