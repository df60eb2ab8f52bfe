"""Cases for the packing kernels on any device: the interpreter's (CPU) or a real one.

The expected bytes come from the codecs' reference on the CPU. `python bitmask_cases.py cpu|cuda`
runs them all, or those named after the device; one line of JSON for each: [name, null or what went
wrong].
"""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
from codec_cases import BF16, F16, F32, activations, as_bytes, bits
from kernel_cases import Case, run_all

from offcompile.runtime.codecs.reference import Reference
from offcompile.runtime.kernels import (
    BitmaskPlan,
    Config,
    Launch,
    kept_at,
    signs_launch,
    unsigns_launch,
)

#: one kibibyte in a tile: edges are met with few elements
SMALL = Config(tile_bytes=1024, warps=1)
LENGTHS = (0, 1, 127, 128, 129, 1000, 1285)
BESIDE = 64


def room(nbytes: int, device: torch.device) -> torch.Tensor:
    """A view of uint8 into something larger, that must stay as it is around it."""
    return torch.full((nbytes + 2 * BESIDE,), 0xA5, dtype=torch.uint8, device=device)


def inner(whole: torch.Tensor) -> torch.Tensor:
    return whole[BESIDE : whole.numel() - BESIDE]


def assert_around(whole: torch.Tensor, what: str) -> None:
    ends = torch.cat([whole[:BESIDE], whole[-BESIDE:]])
    assert bool((ends == 0xA5).all()), f"something beside {what} was written"


def packs_and_unpacks(
    dtype: torch.dtype,
    stash: torch.dtype | None,
    length: int,
    density: float,
    staged: bool,
    device: torch.device,
    programs: int = 128,
    config: Config | None = SMALL,
) -> None:
    if stash is None:
        x = bits(dtype, length, density, length)
    else:
        x = activations(length, length, 1 - density)
    plan = BitmaskPlan(length, dtype, stash, staged, programs, config)
    expected = torch.zeros(plan.layout.worst_bytes, dtype=torch.uint8)
    used = Reference().pack(x, expected, stash)
    packed, workspace = (room(n, device) for n in (len(expected), plan.workspace_bytes))
    plan.pack(x.to(device), inner(packed), inner(workspace))
    found = inner(packed).cpu()
    assert torch.equal(found[:used], expected[:used]), (
        f"bytes differ at {(found != expected).nonzero().flatten()[:8].tolist()} of {used}"
    )
    # nothing more than needed was written: it would have crossed the bus
    assert bool((found[used:] == 0xA5).all())
    at = kept_at(length, dtype, stash)
    assert plan.layout.bytes_for(int(found[at : at + 4].view(torch.int32))) == used
    # only what was used, so that any access beyond it meets other bytes
    short = room(used, device)
    inner(short).copy_(found[:used])
    back = room(x.nbytes, device)
    out = inner(back).view(dtype)
    plan.unpack(inner(short), out, inner(workspace))
    assert torch.equal(as_bytes(out.cpu()), as_bytes(x if stash is None else x.to(stash).float()))
    for whole, what in ((packed, "packed"), (workspace, "workspace"), (back, "out")):
        assert_around(whole.cpu(), what)


def packs_signs(dtype: torch.dtype, length: int, device: torch.device) -> None:
    x = bits(dtype, length, 0.7, length)
    expected = torch.zeros(16 * -(-length // 128), dtype=torch.uint8)
    Reference().pack_signs(x, expected)
    packed, back = room(len(expected), device), room(x.nbytes, device)
    signs_launch(x.to(device), inner(packed), SMALL).run()
    assert torch.equal(inner(packed).cpu(), expected)
    unsigns_launch(inner(packed), inner(back).view(dtype), SMALL).run()
    ones = torch.empty_like(x)
    Reference().unpack_signs(expected, ones)
    assert torch.equal(inner(back).view(dtype).cpu(), ones)
    for whole, what in ((packed, "packed"), (back, "out")):
        assert_around(whole.cpu(), what)


def sums_many_tiles(device: torch.device) -> None:
    """More tiles than a block of the scan: what goes before is carried on."""
    counts = torch.randint(0, 4097, (2500,), generator=torch.Generator().manual_seed(0)).int()
    for rows in (5, 6, 7, 8):
        starts = counts.to(device, copy=True)
        words = torch.full((16,), 7, dtype=torch.int32, device=device)
        tensors = {"starts": starts, "words": words}
        numbers = {"count": len(counts), "rows": rows}
        Launch("packing:scan_tiles", tensors, numbers, 1, 4, {"BLOCK": 1024}).run()
        ends = counts.cumsum(0)
        assert torch.equal(starts.cpu(), (ends - counts).int())
        # the sum, then zeros to a multiple of four words
        filled = [7] * rows + [int(ends[-1])] + [0] * (-(rows + 1) % 4)
        assert words.tolist() == filled + [7] * (16 - len(filled))


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    kept = (F32, F16, BF16, torch.float64, torch.uint8, torch.int8, torch.bool, torch.complex64)
    for staged in (True, False):
        place = "host" if staged else "device"
        for dtype in (F32, F16, torch.float64, torch.uint8):
            for length in LENGTHS:
                cases[f"{place}-{dtype}-{length}"] = partial(
                    packs_and_unpacks, dtype, None, length, 0.5, staged
                )
        for dtype in kept:
            for density in (0.0, 0.1, 1.0):
                cases[f"{place}-{dtype}-density-{density}"] = partial(
                    packs_and_unpacks, dtype, None, 777, density, staged
                )
        for stash in (F16, BF16):
            for length in (0, 1, 300, 1024):
                cases[f"{place}-{stash}-stash-{length}"] = partial(
                    packs_and_unpacks, F32, stash, length, 0.5, staged
                )
        cases[f"{place}-looped"] = partial(
            packs_and_unpacks, F32, None, 4001, 0.6, staged, programs=2
        )
        cases[f"{place}-large-tiles"] = partial(
            packs_and_unpacks, F32, None, 9001, 0.5, staged, config=None
        )
    cases["many-tiles"] = sums_many_tiles
    for dtype in (F32, F16, BF16, torch.float64):
        for length in (1, 128, 1000):
            cases[f"signs-{dtype}-{length}"] = partial(packs_signs, dtype, length)
    return {name.replace("torch.", ""): case for name, case in cases.items()}


CASES = _cases()
#: float32 at every length and density, and a case or two of each other kind
FEW = [
    name
    for name in CASES
    if "float32" in name or name.endswith(("-1285", "-density-0.1", "-stash-300", "-128"))
]
FEW += [name for name in CASES if "-" not in name or name.endswith(("looped", "tiles"))]


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        import interpreter_rounding

        assert interpreter_rounding.KNOWN
    run_all(CASES, torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda"), sys.argv[2:])
