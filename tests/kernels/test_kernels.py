"""Kernels without Triton or a GPU: meaning, refusals, gates, tiles, and launches as values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import CASTS, named

from offcompile.ir import OffloadError
from offcompile.runtime import kernels
from offcompile.runtime.kernels import Architecture, Config, Launch, gates, refusal
from offcompile.runtime.kernels import launch as launching
from offcompile.runtime.kernels.shapes import as_integers, dense, dense_alike, unit_of

ROOT = Path(__file__).parents[2]


def without_triton(script: str) -> str:
    hidden = "import sys\nsys.modules['triton'] = None\nimport torch\n"
    done = subprocess.run(
        [sys.executable, "-c", hidden + script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_triton_torch_does_the_work_and_a_kernel_says_what_to_install() -> None:
    told = without_triton(
        "from offcompile.ir import OffloadError\n"
        "from offcompile.runtime import kernels\n"
        "source, target = torch.randn(5), torch.zeros(5, dtype=torch.bfloat16)\n"
        "kernels.copy_into(target, source)\n"
        "assert torch.equal(target, source.bfloat16()) and not kernels.has_triton()\n"
        "table = torch.randn(4, 3)\n"
        "assert torch.equal(kernels.gather_rows(table, torch.tensor([2])), table[2:3])\n"
        "launch = kernels.copy_launch(target, source)\n"
        "try:\n    launch.run()\n"
        "except OffloadError as error:\n    print(error)\n"
    )
    assert 'pip install "offcompile[cuda]"' in told


def test_importing_the_kernels_imports_no_triton() -> None:
    script = (
        "import sys, torch\nbefore = 'triton' in sys.modules\n"
        "import offcompile.runtime.kernels\nprint('triton' in sys.modules and not before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(not kernels.has_triton(), reason="Triton is not installed")
def test_a_kernel_refuses_tensors_of_the_cpu() -> None:
    launch = kernels.copy_launch(torch.zeros(4), torch.ones(4))
    with pytest.raises(OffloadError, match="kernels run on CUDA devices, and this is cpu"):
        launch.run()


# --- what the operations mean ------------------------------------------------------------------


@pytest.mark.parametrize("source_type", CASTS, ids=named)
@pytest.mark.parametrize("target_type", CASTS, ids=named)
def test_a_copy_is_torchs(target_type: torch.dtype, source_type: torch.dtype) -> None:
    source = torch.tensor([0.0, -0.0, 1e-40, 1.0, 65520.0, -7e4, float("inf"), 3.3e38, 1e-8])
    source = source.to(source_type).requires_grad_()
    target = torch.ones(9, dtype=target_type, requires_grad=True)
    kernels.copy_into(target, source)
    assert torch.equal(target, source.detach().to(target_type))
    assert target.is_leaf


def test_a_copy_goes_where_no_kernel_fits() -> None:
    target = torch.zeros(3, 4, dtype=torch.complex64)
    kernels.copy_into(target, torch.arange(12).view(4, 3).t())
    assert target[1, 2] == 7


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_a_gather_is_torchs(index_type: torch.dtype) -> None:
    table = torch.randn(10, 6)[:, :5]
    indices = torch.tensor([[9, 0, 3], [3, 3, 1]], dtype=index_type)
    found = kernels.gather_rows(table, indices, torch.float16)
    assert torch.equal(found, table[indices].half())
    assert found.shape == (2, 3, 5)


def test_a_gather_refuses_indices_outside() -> None:
    with pytest.raises((IndexError, RuntimeError), match="range"):
        kernels.gather_rows(torch.zeros(4, 2), torch.tensor([4]))


def test_a_gather_of_nothing_is_empty() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert kernels.gather_rows(torch.zeros(0, 7), none).shape == (0, 7)
    assert kernels.gather_launch(torch.zeros(0, 7), torch.zeros(3, 7), none).tiles == 0


# --- refusals ----------------------------------------------------------------------------------


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


INDICES = torch.tensor([0])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: kernels.copy_into(matrix(3), matrix(4)), r"from shape \(4,\) to \(3,\)"),
        (
            lambda: kernels.copy_launch(matrix(3), matrix(3, dtype=torch.int32)),
            "int32 to .*float32",
        ),
        (
            lambda: kernels.copy_launch(matrix(3), matrix(3, dtype=torch.float8_e5m2)),
            "float8_e5m2 to .*float32",
        ),
        (lambda: kernels.copy_launch(matrix(3, 4), matrix(4, 3).t()), r"strides \(1, 3\)"),
        (lambda: kernels.copy_launch(matrix(1, 4).expand(3, 4), matrix(3, 4)), "overlaps"),
        (lambda: kernels.copy_launch(matrix(2, 2, 4)[..., :3], matrix(2, 2, 3)), "dense"),
        (lambda: kernels.gather_rows(matrix(3), INDICES), "rows of a matrix"),
        (lambda: kernels.gather_rows(matrix(3, 2), INDICES.short()), "not torch.int16"),
        (lambda: kernels.gather_rows(matrix(0, 2), INDICES), "that has none"),
        (lambda: kernels.gather_launch(matrix(2, 2), matrix(3, 2), INDICES), r"target of \(1, 2\)"),
        (lambda: kernels.gather_launch(matrix(1, 2), matrix(2, 3).t(), INDICES), "rows .* dense"),
        (lambda: Config(tile_bytes=1000, warps=4), "1000 .* power of two >= 16"),
        (lambda: Config(tile_bytes=1024, warps=0), "warps of 0"),
        (lambda: kernels.copy_launch(matrix(3), matrix(3)).run(0), "0 programs run nothing"),
        (lambda: Architecture.named("H200"), "'H200' names no architecture"),
    ],
)
def test_what_cannot_be_is_said(make: object, said: str) -> None:
    with pytest.raises(OffloadError, match=said):
        make()  # type: ignore[operator]


def test_tensors_on_two_devices_are_named() -> None:
    launch = Launch(
        "movement:copy_blocks",
        {"target": torch.zeros(3, device="meta"), "source": torch.zeros(3)},
        {"length": 3},
        tiles=1,
        warps=1,
    )
    with pytest.raises(OffloadError, match="target on meta, source on cpu"):
        _ = launch.device


# --- gates -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("sm_75", torch.float32, "older than sm_80"),
        ("sm_80", torch.bfloat16, None),
        ("sm_86", torch.float8_e4m3fn, "needs sm_89, and this is sm_86"),
        ("sm_89", torch.float8_e4m3fn, None),
        ("sm_90a", torch.float8_e5m2, None),
        ("sm_120", torch.float8_e4m3fn, None),
        ("sm_90", torch.complex64, "know no torch.complex64"),
        ("sm_90", torch.float8_e8m0fnu, "know no torch.float8_e8m0fnu"),
        ("gfx942", torch.bfloat16, None),
        ("gfx906", torch.float32, "gfx906 is not among"),
    ],
)
def test_the_gates(name: str, dtype: torch.dtype, said: str | None) -> None:
    reason = refusal(Architecture.named(name), torch.int64, dtype)
    assert (said is None and reason is None) or (reason is not None and said and said in reason)


def test_devices_are_known_by_capability_or_by_amds_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gates._of.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (12, 0))
    assert Architecture.of(torch.device("cuda", 1)) == Architecture("sm_120", 120)
    gates._of.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert not Architecture.of(torch.device("cuda", 1)).nvidia
    assert Architecture.of(torch.device("cuda", 1)).name == "gfx942"
    gates._of.cache_clear()


def test_a_device_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(launching, "has_triton", lambda: True)
    monkeypatch.setattr(Architecture, "of", lambda device: Architecture("sm_86", 86))
    assert kernels.why_not(device, torch.float32) is None
    assert "sm_89" in (kernels.why_not(device, torch.float8_e4m3fn) or "")
    monkeypatch.setattr(launching, "has_triton", lambda: False)
    assert "pip install" in (kernels.why_not(device) or "")


# --- tiles and widths --------------------------------------------------------------------------


def test_settings_follow_the_size() -> None:
    chosen = [
        kernels.config_for(nbytes) for nbytes in (0, 1 << 20, (1 << 20) + 1, 1 << 25, 1 << 40)
    ]
    small, medium, large = kernels.CANDIDATES
    assert chosen == [small, small, medium, medium, large]


def test_the_fastest_is_measured_only_when_asked() -> None:
    took = {4096: 3.0, 8192: 1.0, 16384: 1.0}
    assert kernels.fastest(lambda config: took[config.tile_bytes]) == kernels.CANDIDATES[1]


def test_a_unit_divides_all_counts() -> None:
    assert [unit_of(16, *counts) for counts in ((48, 32), (20,), (7, 8), (0, 64), (0,))] == [
        16,
        4,
        1,
        16,
        16,
    ]


def test_bits_are_kept_by_the_widest_integers_that_divide() -> None:
    even = torch.zeros(6, dtype=torch.bfloat16)
    assert as_integers(even)[0].dtype == torch.int32
    assert as_integers(even, torch.zeros(8, dtype=torch.int64))[0].dtype == torch.int32
    assert as_integers(even[1:5])[0].dtype == torch.int16
    pitched = torch.zeros(4, 12)[:, :8]
    assert as_integers(pitched)[0].shape == (4, 4)
    assert as_integers(pitched)[0].stride() == (6, 1)
    assert as_integers(torch.zeros(3, dtype=torch.bool))[0].dtype == torch.uint8


def test_dense_memory_is_told_from_gaps_and_from_overlaps() -> None:
    base = torch.zeros(4, 5, 6)
    assert dense(base)
    assert dense(base.permute(2, 0, 1))
    assert dense(base[:, :1, :1].contiguous().expand(4, 1, 1))
    assert not dense(base[:, :3])
    assert not dense(torch.zeros(1).expand(4))
    assert dense_alike(base, torch.ones(4, 5, 6, dtype=torch.int8))
    assert not dense_alike(base, torch.zeros(4, 6, 5).transpose(1, 2))


def test_programs_cover_tensors_beyond_31_bits() -> None:
    length = 2**40 + 1
    source = torch.empty(length, dtype=torch.bfloat16, device="meta")
    launch = kernels.copy_launch(torch.empty(length, device="meta"), source)
    assert launch.numbers == {"length": length}
    assert (launch.tiles - 1) * launch.constants["BLOCK"] < length
    assert launch.tiles * launch.constants["BLOCK"] >= length
    assert launch.tiles > launching.MOST_PROGRAMS


@pytest.mark.parametrize("columns", [1, 5, 256, 1000, 10_000])
def test_tiles_cover_all_rows_and_columns(columns: int) -> None:
    rows = 77
    launch = kernels.copy_launch(matrix(rows, columns), matrix(rows, columns + 3)[:, :columns])
    across = launch.numbers["column_tiles"] * launch.constants["COLUMNS"]
    down = launch.tiles // launch.numbers["column_tiles"] * launch.constants["ROWS"]
    assert columns <= across < columns + launch.constants["COLUMNS"]
    assert rows <= down < rows + launch.constants["ROWS"]
    elements = launch.constants["COLUMNS"] * launch.constants["ROWS"]
    assert elements * 4 == kernels.config_for(rows * columns * 4).tile_bytes
