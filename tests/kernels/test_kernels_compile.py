"""Every kernel compiles for a GPU of each kind, with accesses as wide as streaming needs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lengths import some
from triton_targets import TARGETS, Compiled, compile_launch, needs_compiler, spread

from offcompile.runtime import kernels
from offcompile.runtime.kernels import Architecture, Launch, refusal

pytestmark = needs_compiler
CODE = Path(kernels.__file__).parent / "code"
F32, F16, BF16, I64 = torch.float32, torch.float16, torch.bfloat16, torch.int64
#: a launch, and the bits that one of its threads loads and stores at once
Wanted = tuple[Callable[[], Launch], int, int]


def dense(target: torch.dtype, source: torch.dtype, length: int = 1 << 16) -> Callable[[], Launch]:
    def launch() -> Launch:
        return kernels.copy_launch(
            torch.empty(length, dtype=target), torch.empty(length, dtype=source)
        )

    return launch


def rows(target: torch.dtype, source: torch.dtype, columns: int = 512) -> Callable[[], Launch]:
    def launch() -> Launch:
        wide = torch.empty(64, columns + 16, dtype=source)[:, :columns]
        return kernels.copy_launch(torch.empty(64, columns, dtype=target), wide)

    return launch


def gathered(
    target: torch.dtype, source: torch.dtype, index: torch.dtype, columns: int = 512
) -> Callable[[], Launch]:
    def launch() -> Launch:
        return kernels.gather_launch(
            torch.empty(64, columns, dtype=target),
            torch.empty(100, columns, dtype=source),
            torch.zeros(64, dtype=index),
        )

    return launch


#: bits of a thread's load and of its store; the wider type goes 16 bytes at a time
LAUNCHES: dict[str, Wanted] = {
    "copy-kept": (dense(F32, F32), 128, 128),
    "copy-kept-odd": (dense(torch.uint8, torch.uint8, 99_999), 128, 128),
    "copy-float32-bfloat16": (dense(BF16, F32), 128, 64),
    "copy-float32-float16": (dense(F16, F32, 99_999), 128, 64),
    "copy-bfloat16-float32": (dense(F32, BF16), 64, 128),
    "copy-float16-float32": (dense(F32, F16), 64, 128),
    "copy-bfloat16-float16": (dense(F16, BF16), 128, 128),
    "copy-float16-bfloat16": (dense(BF16, F16), 128, 128),
    "rows-kept": (rows(F32, F32), 128, 128),
    "rows-float32-bfloat16": (rows(BF16, F32), 128, 64),
    "rows-bfloat16-float32": (rows(F32, BF16), 64, 128),
    # rows that do not divide begin at odd addresses: nothing wide is lawful
    "rows-odd": (rows(F16, F32, 511), 32, 16),
    "gather-kept": (gathered(BF16, BF16, I64), 128, 128),
    "gather-bfloat16-float32": (gathered(F32, BF16, torch.int32), 64, 128),
    "gather-float32-float16": (gathered(F16, F32, I64), 128, 64),
}


def streamed(dtype: torch.dtype, rows: int, turned: bool) -> Callable[[], Launch]:
    def launch() -> Launch:
        weight = torch.empty(256, 512, dtype=dtype)
        b = weight.t() if turned else weight
        a = torch.empty(rows, b.shape[0], dtype=dtype)
        bias = torch.empty(b.shape[1], dtype=dtype)
        return kernels.stream_launch(torch.empty(rows, b.shape[1], dtype=dtype), a, b, bias)

    return launch


def written(dtype: torch.dtype) -> Callable[[], Launch]:
    def launch() -> Launch:
        dy, x = torch.empty(300, 256, dtype=dtype), torch.empty(300, 512, dtype=dtype)
        return kernels.write_launch(torch.empty(256, 512, dtype=dtype), dy.t(), x)

    return launch


#: products of one weight with few and many rows, forward and for the input; and gradients of it
PRODUCTS: dict[str, Callable[[], Launch]] = {
    "stream-few-forward": streamed(BF16, 16, True),
    "stream-few-input": streamed(F16, 100, False),
    "stream-few-float32": streamed(F32, 64, True),
    "stream-many-forward": streamed(BF16, 1000, True),
    "stream-many-input": streamed(BF16, 1000, False),
    "stream-many-float32": streamed(F32, 1000, False),
    "write-bfloat16": written(BF16),
    "write-float32": written(F32),
}


@spread([n for n in PRODUCTS if "float32" not in n], "sm_90", "gfx942")
def test_products_compile_and_cross_the_bus_in_wide_accesses(
    name: str, target: str, cache: Path
) -> None:
    made = compile_launch(PRODUCTS[name](), target, cache)
    # AMD joins what neighbours write to whole lines whatever the width
    assert made.store_bits() >= (128 if target.startswith("sm_") else 64)
    assert made.load_bits() == 128
    if "few" in name:
        # the next tiles of the weight are under way while one is multiplied
        assert set(made.pipelined_bits()) <= {128}
        assert made.pipelined_bits() or target in ("sm_100", "gfx942")
    if "many" in name and target.startswith("sm_"):
        streamed = re.findall(r"ld\.global\S*evict_first\S*", made.assembly)
        assert streamed
        assert [load for load in streamed if not load.endswith("v4.b32")] == []


#: the product of float32 that every run of the tests compiles
OF_FLOAT32 = "stream-few-float32"


@pytest.mark.parametrize("target", some(["sm_90", "gfx942"], "sm_90"))
@pytest.mark.parametrize("name", some([n for n in PRODUCTS if "float32" in n], OF_FLOAT32))
def test_products_of_float32_compile(name: str, target: str, cache: Path) -> None:
    made = compile_launch(PRODUCTS[name](), target, cache)
    assert made.load_bits() == made.store_bits() == 128
    assert "tf32" not in made.assembly


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@spread(LAUNCHES, "sm_90")
def test_it_compiles_with_wide_accesses(name: str, target: str, cache: Path) -> None:
    launch, load_bits, store_bits = LAUNCHES[name]
    # the code of an assertion loads and stores as well
    made = compile_launch(replace(launch(), options={}), target, cache)
    assert made.nbytes > 0
    if "gather" in name:  # indices are loaded too
        assert made.load_bits() >= load_bits
    else:
        assert made.load_bits() == load_bits
    assert made.store_bits() == store_bits
    assert refusal(Architecture.named(target), F32, F16, BF16, I64) is None


@pytest.mark.parametrize("target", some([t for t in TARGETS if t.startswith("sm_")], "sm_90"))
@pytest.mark.parametrize("name", ["copy-kept", "copy-float32-bfloat16", "rows-kept"])
def test_every_wide_read_says_that_it_is_the_only_one(name: str, target: str, cache: Path) -> None:
    launch, _, _ = LAUNCHES[name]
    made = compile_launch(launch(), target, cache)
    wide = re.findall(r"ld\.global\S*\.v[248]\S*", made.assembly)
    assert wide
    assert [load for load in wide if "evict_first" not in load] == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_gather_keeps_its_assertion(target: str, cache: Path) -> None:
    launch = LAUNCHES["gather-kept"][0]()
    assert compile_launch(launch, target, cache).stops_on_assertions
    without = compile_launch(replace(launch, options={}), target, cache)
    assert not without.stops_on_assertions


def fp8_copy(target: str, cache: Path) -> Compiled:
    launch = LAUNCHES["copy-float32-bfloat16"][0]()
    eight = torch.empty(1 << 16, dtype=torch.float8_e4m3fn)
    return compile_launch(
        replace(launch, tensors={**launch.tensors, "target": eight}), target, cache
    )


@pytest.mark.parametrize(
    ("target", "refused"), [("sm_80", True), ("sm_89", False), ("gfx942", False)]
)
def test_the_gate_of_fp8_is_the_compilers_own(target: str, refused: bool, cache: Path) -> None:
    from triton.compiler.errors import CompilationError

    reason = refusal(Architecture.named(target), torch.float8_e4m3fn)
    assert (reason is not None) == refused
    if refused:
        with pytest.raises(CompilationError, match="fp8e4nv"):
            fp8_copy(target, cache)
    else:
        assert fp8_copy(target, cache).nbytes > 0


@pytest.mark.parametrize("name", sorted(kernels.AMD_ARCHITECTURES))
def test_every_amd_architecture_that_is_let_through_compiles(name: str, cache: Path) -> None:
    for chosen in ("copy-float32-bfloat16", "gather-kept"):
        assert compile_launch(LAUNCHES[chosen][0](), name, cache).nbytes > 0


def test_no_kernel_is_left_out() -> None:
    from triton.runtime.jit import JITFunction

    defined = set()
    for file in CODE.glob("[!_]*.py"):
        module = __import__(f"offcompile.runtime.kernels.code.{file.stem}", fromlist=["_"])
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and not name.startswith("_"):
                defined.add(f"{file.stem}:{name}")
    known = [launch for launch, _, _ in LAUNCHES.values()] + list(PRODUCTS.values())
    # test_kernels_adamw.py, test_kernels_bitmask.py and test_compact_kernels.py compile these
    rooms = ("packing:", "bits:")
    elsewhere = {"updates:adam_blocks"} | {name for name in defined if name.startswith(rooms)}
    assert {launch().kernel for launch in known} | elsewhere == defined


class Pretended:
    """Answers what Triton asks of a driver before it loads a compiled kernel."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.mark.parametrize("name", ["copy-kept-odd", "rows-float32-bfloat16", "gather-kept"])
def test_a_real_launch_compiles_the_same(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a launch but its end: arguments are taken and specialised as on a device."""
    from triton.runtime import driver

    launch = LAUNCHES[name][0]()
    expected = compile_launch(launch, "sm_90", cache)
    monkeypatch.setattr(driver, "_active", Pretended())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    kernel = kernels.load_kernel(launch.kernel)
    # a real device must not find a kernel compiled for the pretended one, nor the reverse
    monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    made = kernel.warmup(grid=(1,), **launch.arguments())
    assert made.asm["ptx"] == expected.assembly


def test_a_long_length_is_compiled_as_64_bits(cache: Path) -> None:
    short = dense(F32, F32)()
    long = replace(short, numbers={"length": 2**31})
    narrow, wide = (compile_launch(launch, "sm_90", cache) for launch in (short, long))
    assert narrow.assembly.count(".param .u64") + 1 == wide.assembly.count(".param .u64")
