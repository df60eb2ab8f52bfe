"""Gradients made on the host, tables gathered there: the same bits, and less in memory."""

from __future__ import annotations

import copy
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lengths import some
from torch import nn

import offcompile
from offcompile.report.report import PlanReport
from offcompile.runtime.base.mapping import PAGE_BYTES
from offcompile.runtime.device.mapped import MappedSlot
from offcompile.runtime.disk.page_cache import resident_pages
from offcompile.runtime.measure.in_place import InPlaceCall, Slowdown, measure_in_place
from offcompile.runtime.measure.op import OpCall, Operands, TensorSpec
from offcompile.runtime.moves import direct_ops, ops
from offcompile.runtime.moves.registry import Runtime, RuntimeSettings, close_all, runtime_for
from offcompile.runtime.moves.weights import is_on_host

aten = torch.ops.aten
ROWS, WIDTH, CLASSES = 500, 64, 96


# --- the ops --------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path) -> Iterator[str]:
    yield RuntimeSettings(directories=(str(tmp_path),)).key
    close_all()


@pytest.fixture
def runtime(key: str) -> Runtime:
    return runtime_for(key)


def stored(op: Any, args: tuple[Any, ...], like: torch.Tensor, key: str) -> torch.Tensor:
    """The op's result on the host, laid out like `like`."""
    ticket = op(*args, like.size(), like.stride(), like.dtype, "g", key)
    return ops.host_of(ticket, like.size(), like.stride(), like.dtype)


def products() -> dict[str, tuple[Any, Any, tuple[Any, ...]]]:
    torch.manual_seed(0)
    a, b, batch = torch.randn(64, 300), torch.randn(64, 200), torch.randn(3, 40, 50)
    return {
        "mm": (direct_ops.store_mm, aten.mm, (a.t(), b)),
        "mm bf16": (direct_ops.store_mm, aten.mm, (a.t().bfloat16(), b.bfloat16())),
        "bmm": (direct_ops.store_bmm, aten.bmm, (batch.transpose(1, 2), batch)),
        "add": (direct_ops.store_add, aten.add, (a, a.flip(0), 2)),
    }


@pytest.mark.parametrize("name", products())
def test_products_are_made_on_the_host_bit_for_bit(name: str, key: str, runtime: Runtime) -> None:
    op, plain, args = products()[name]
    expected = plain(*args[:2], alpha=args[2]) if name == "add" else plain(*args)
    made = stored(op, args, expected, key)
    assert torch.equal(made, expected)
    assert isinstance(runtime.device.slot_of(made), MappedSlot)


def test_a_cast_keeps_the_strides_of_what_was_traced(key: str) -> None:
    x = torch.randn(30, 70).bfloat16().t()
    expected = aten._to_copy(x, dtype=torch.float32)
    made = stored(direct_ops.store_copy, (x,), expected, key)
    assert torch.equal(made, expected) and made.stride() == expected.stride() == (1, 70)


@pytest.mark.parametrize("padding", [-1, 7, 499])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table_add_up_as_ever(
    padding: int, by_frequency: bool, dtype: torch.dtype, key: str
) -> None:
    generator = torch.Generator().manual_seed(padding + 2)
    indices = torch.randint(0, 40, (16, 33), generator=generator)  # each row many times
    gradient = torch.randn(16, 33, WIDTH, generator=generator).to(dtype)
    args = (gradient, indices, ROWS, padding, by_frequency)
    expected = aten.embedding_dense_backward(*args)
    assert torch.equal(stored(direct_ops.store_embedding, args, expected, key), expected)


def test_a_table_in_memory_that_was_used_before_is_zero_again(key: str, runtime: Runtime) -> None:
    gradient, rows = torch.ones(4, WIDTH), torch.tensor([1, 2, 3, 4])
    for first in (1, 11, 21):
        args = (gradient, rows + first, ROWS, -1, False)
        expected = aten.embedding_dense_backward(*args)
        made = stored(direct_ops.store_embedding, args, expected, key)
        assert torch.equal(made, expected)
        slot = runtime.device.slot_of(made)
        assert isinstance(slot, MappedSlot)
        made.fill_(3.0)  # what is left there for the next
        del made
        gc.collect()


def test_only_a_table_in_memory_is_written_to_be_zero(runtime: Runtime) -> None:
    (flat,) = runtime.device.addressable([1 << 20])
    slot = runtime.device.slot_of(flat)
    assert isinstance(slot, MappedSlot)
    flat.fill_(5)
    assert not slot.clear_absent() and int(flat.min()) == 5
    runtime.device.clear(flat)
    assert int(flat.max()) == 0
    flat.fill_(5)
    if drop_from_memory(slot, flat) and slot.clear_absent():
        assert pages(flat) == 0
    else:
        runtime.device.clear(flat)
    assert int(flat.max()) == 0


def pages(tensor: torch.Tensor) -> int:
    found = resident_pages(tensor.data_ptr(), tensor.untyped_storage().nbytes())
    if found is None:
        pytest.skip("this system does not tell which pages are in memory")
    return found


def drop_from_memory(slot: MappedSlot, tensor: torch.Tensor) -> bool:
    """Drop the slot's pages from memory; True if they are now on the disk alone."""
    file = slot._file
    os.fsync(file._descriptor)
    file.memory.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(file._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return pages(tensor) == 0


# --- whole steps ----------------------------------------------------------------------------


class Reader(nn.Module):
    """A table, products of two kinds, a tied weight whose gradients are added, norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.heads = nn.Parameter(torch.randn(2 * WIDTH, 4, 16) / WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.table(x))
        y = torch.einsum("btd,dhk->bthk", torch.relu(self.up(y)), self.heads).flatten(2)
        y = self.tied(torch.tanh(self.tied(y)))
        return self.out(y).square().mean()


@pytest.fixture
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0


def compiled(model: nn.Module, spill: Path, **more: Any) -> Any:
    options = {"memory": "minimum", "lowering": "aot_eager", "spill": str(spill)} | more
    return torch.compile(model, backend="offcompile", options=options)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (4, 12), generator=torch.Generator().manual_seed(step))


def train(forward: Callable[..., Any], model: nn.Module, mixed: bool) -> list[torch.Tensor]:
    """Two micro-batches added up, then a step, three times."""
    optimizer, seen = torch.optim.AdamW(model.parameters(), 1e-2), []
    for step in range(3):
        for micro in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = forward(batch(2 * step + micro))
            loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("mixed", some([False, True], True))
def test_every_gradient_that_can_be_is_born_on_the_host(
    mixed: bool, tmp_path: Path, clean: None
) -> None:
    torch.manual_seed(0)
    plain = Reader()
    ours = copy.deepcopy(plain)
    expected = train(torch.compile(plain, backend="aot_eager"), plain, mixed)
    torch._dynamo.reset()
    found = train(compiled(ours, tmp_path, policy="gradient_reserve:reserve=0"), ours, mixed)
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {i}"
    report: PlanReport = offcompile.reports()[-1]
    kind = {t.id: t.kind for t in report.problem.tensors}
    born = [d.tensor for d in report.plan.directs if kind[d.tensor] == "gradient"]
    large = [p for p in ours.parameters() if p.nbytes >= 4096]
    assert len(born) == len(large) == 5
    assert not {m.tensor for m in report.plan.moves}.intersection(born)
    compiled_again = compiled(ours, tmp_path, policy="gradient_reserve:reserve=0")
    compiled_again(batch(0)).backward()
    assert all(is_on_host(p.grad) for p in large if p.grad is not None)


def test_joint_has_a_table_larger_than_the_budget(tmp_path: Path, clean: None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(20_000, WIDTH), nn.Linear(WIDTH, WIDTH))
    ours = copy.deepcopy(plain)
    table = plain[0].weight.nbytes
    x = batch(0)
    expected = plain(x).square().mean()
    expected.backward()
    loss = compiled(ours, tmp_path, memory=table // 4)(x).square().mean()
    loss.backward()
    assert torch.equal(loss, expected)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    report: PlanReport = offcompile.reports()[-1]
    assert report.planned_peak_bytes <= table // 4
    assert {d.op for d in report.plan.directs} >= {"embedding", "embedding_dense_backward"}


def test_inductor_writes_products_on_the_host(tmp_path: Path, clean: None) -> None:
    torch.manual_seed(0)
    plain = Reader().double()
    ours = copy.deepcopy(plain)
    plain(batch(0)).backward()
    forward = compiled(ours, tmp_path, lowering="inductor", policy="gradient_reserve:reserve=0")
    forward(batch(0)).backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    assert ours.up.weight.grad is not None and is_on_host(ours.up.weight.grad)


def test_a_gather_from_a_cold_table_reads_its_rows_only(tmp_path: Path, clean: None) -> None:
    model = nn.Embedding(16_384, 1024).requires_grad_(False)  # one row a page, 64 MiB
    table = model.weight.clone()
    forward = compiled(model, tmp_path)
    x = torch.arange(0, 16_384, 512).view(2, 16)
    assert torch.equal(forward(x), table[x])
    assert is_on_host(model.weight)
    (slot,) = (
        s
        for r in offcompile.runtime.moves.registry.runtimes()
        if isinstance(s := r.device.slot_of(model.weight), MappedSlot)
    )
    assert slot.scattered
    if not drop_from_memory(slot, model.weight):
        pytest.skip("this file system keeps the pages in memory")
    assert torch.equal(forward(x), table[x])
    assert pages(model.weight) <= 4 * x.numel() < model.weight.nbytes // PAGE_BYTES // 64


def test_a_table_that_is_trained_is_read_ahead(tmp_path: Path, clean: None) -> None:
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, CLASSES))
    compiled(model, tmp_path)(batch(0)).sum().backward()
    runtimes = offcompile.runtime.moves.registry.runtimes()
    slots = [r.device.slot_of(p) for r in runtimes for p in model.parameters()]
    assert not any(s.scattered for s in slots if isinstance(s, MappedSlot))


# --- what it takes ---------------------------------------------------------------------------


def spec(
    *size: int, stride: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> TensorSpec:
    return TensorSpec(dtype, size, stride or (*size[1:], 1))


def test_reading_and_writing_in_place_are_measured(key: str, runtime: Runtime) -> None:
    a, b, out = spec(64, 32, stride=(1, 64)), spec(32, 48), spec(64, 48)
    call = OpCall(aten.mm.default, (a, b), {}, (out,))
    place = ([64, 48], [48, 1], torch.float32, "g", key)
    reads = InPlaceCall(call, aten.mm.default, 0)
    writes = InPlaceCall(call, direct_ops.store_mm, None, 2, place)
    assert reads.operand is a and writes.operand is out and reads.key != writes.key
    for what in (reads, writes):
        seen: list[torch.Tensor] = []

        def addressable(nbytes: int, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen += runtime.device.addressable([nbytes])
            return seen[-1]

        found = measure_in_place(what, Operands(), addressable, seconds=0.0)
        assert found is not None and found.ratio > 0
        # memory that is read in place has the values that the plain op reads elsewhere
        made = 0 if what.index is None else int(seen[0].count_nonzero())
        assert len(seen) == 1 and (made > 0) == (what is reads)


def test_what_does_not_run_on_made_up_data_is_left_to_the_model(runtime: Runtime) -> None:
    call = OpCall(aten.mm.default, (spec(2, 3), spec(2, 3)), {}, (spec(2, 3),))
    addressable = runtime.device.addressable
    what = InPlaceCall(call, aten.mm.default, 0)
    assert measure_in_place(what, Operands(), lambda n: addressable([n])[0]) is None


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(3.0, 3.0), *(pytest.param(r, 1.0, marks=pytest.mark.soak) for r in (1.02, 0.2))],
)
def test_a_plan_goes_by_what_was_measured(
    ratio: float, expected: float, tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path / "costs"))
    asked: list[str] = []

    def slowdown(what: InPlaceCall, *_: object) -> Slowdown:
        asked.append(what.key)
        return Slowdown(ratio, False)

    monkeypatch.setattr("offcompile.graph.costs.in_place.measure_in_place", slowdown)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    compiled(model, tmp_path)(torch.randn(64, 256)).sum().backward()
    report: PlanReport = offcompile.reports()[-1]
    products = [op for op in report.problem.ops if op.id.startswith(("mm", "addmm"))]
    figures = [us / op.duration_us for op in products for us in op.direct.values()]
    assert len(set(asked)) == len(asked) > 0
    assert figures == pytest.approx([expected] * len(figures), rel=1e-3)
    assert len(figures) == 5  # two read forward, one backward, two gradients
