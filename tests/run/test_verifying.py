"""`verify=True`: the first step beside the plain run, and faults planted for it to find."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from captured import Attention, Perceptron, capture
from torch import Tensor, fx, nn
from torch._inductor import inductor_prims
from weights_runs import LAYERS, Pair, batch, loss_of, on_host, pair

import offcompile
from offcompile.graph.graphs import outputs_of
from offcompile.machine.options import Options
from offcompile.report.comparing import compare
from offcompile.report.report import PlanReport
from offcompile.report.verified import Verified
from offcompile.run import verifying
from offcompile.run.plain_run import PlainRun, moved
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Load

GIVEN = {"hardware": "cpu", "policy": "gradient_reserve", "seconds": 0.05}


@pytest.fixture(autouse=True)
def warned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The warnings so far."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    torch.manual_seed(0)
    said: list[str] = []
    monkeypatch.setattr(verifying, "warn", said.append)
    yield said
    torch._dynamo.reset()
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0
    torch.set_num_threads(threads)


def ours(model: Any, **more: Any) -> Any:
    options = {**GIVEN, "lowering": "aot_eager", "memory": "minimum", "verify": True, **more}
    return torch.compile(model, backend="offcompile", options=options)


def newest() -> tuple[PlanReport, Verified]:
    report = offcompile.reports()[-1]
    assert report.verified is not None
    return report, report.verified


def test_a_step_whose_activations_move(warned: list[str]) -> None:
    model, x = Perceptron(16, 4), torch.randn(2048, 16)
    compiled = ours(model)
    compiled(x).backward()
    report, verified = newest()
    assert not report.fits
    assert verified.words() == (
        "forward: 1 output equal bit for bit; backward: 8 gradients equal bit for bit"
    )
    assert [c.name for c in verified.compared["backward"]][:2] == [
        "layers.0.weight",
        "layers.0.bias",
    ]
    assert verified.words() in report.to_text() and verified.words() in report.explain()
    assert report.to_json()["verified"]["exact"] is True
    assert warned == []


def test_a_step_whose_weights_are_on_the_host(warned: list[str]) -> None:
    model = nn.Sequential(Pair(), nn.BatchNorm1d(48), nn.Dropout(0.5), Pair())
    torch.manual_seed(3)
    compiled = ours(model)
    torch.manual_seed(1)
    loss = loss_of(compiled(batch(0)))
    drawn = torch.rand(2)
    loss.backward()
    assert {f"0.{name}" for name in LAYERS} <= on_host(model)
    assert newest()[1].words() == (
        "forward: 1 output equal bit for bit, 3 buffers equal bit for bit;"
        " backward: 14 gradients equal bit for bit"
    )
    # the step drew its random numbers once
    torch._dynamo.reset()
    torch.manual_seed(1)
    torch.compile(model, backend="aot_eager")(batch(0))
    assert torch.equal(torch.rand(2), drawn)
    assert int(model[1].num_batches_tracked) == 2
    assert warned == []


def test_after_the_first_step_nothing_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    plain = PlainRun.__call__

    def counted(self: PlainRun, arguments: Any) -> list[Any]:
        runs.append(1)
        return plain(self, arguments)

    monkeypatch.setattr(PlainRun, "__call__", counted)
    compiled = ours(pair())
    loss_of(compiled(batch(0)))  # dropped: its backward cannot be compared
    assert len(runs) == 1
    first, second = loss_of(compiled(batch(1))), loss_of(compiled(batch(2)))
    assert len(runs) == 2
    second.backward()  # whose forward was not the one
    assert len(runs) == 2
    first.backward()
    assert len(runs) == 3
    loss_of(compiled(batch(3))).backward()
    assert len(runs) == 3
    assert newest()[1].words().endswith("backward: 6 gradients equal bit for bit")


def test_without_a_backward_and_where_all_fits(warned: list[str]) -> None:
    compiled = ours(pair(), memory=None)
    with torch.no_grad():
        compiled(batch(0))
    report, verified = newest()
    assert report.fits and verified.words() == "forward: 1 output equal bit for bit"
    assert warned == []


def spoil(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first tensor that comes back has one bit wrong; gives its tag."""
    spoilt: list[str] = []
    load, wait = Mover.start_load, Mover.wait_load
    buffers: dict[str, Tensor] = {}

    def start_load(self: Mover, *args: Any) -> tuple[Tensor, Tensor]:
        buffer, ticket = load(self, *args)
        buffers[args[1]] = buffer
        return buffer, ticket

    def wait_load(self: Mover, entry: Load) -> None:
        wait(self, entry)
        if not spoilt:
            spoilt.append(entry.tag)
            buffers[entry.tag].view(torch.uint8).view(-1)[6] ^= 64
        buffers.pop(entry.tag, None)

    monkeypatch.setattr(Mover, "start_load", start_load)
    monkeypatch.setattr(Mover, "wait_load", wait_load)
    return spoilt


def test_a_bit_that_comes_back_wrong_is_found_and_named(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = spoil(monkeypatch)
    model, x = Perceptron(16, 4), torch.randn(2048, 16)
    ours(model)(x).backward()
    assert spoilt
    report, verified = newest()
    assert verified.words().startswith("forward: 1 output equal bit for bit; backward: ")
    assert verified.differing and all(c.kind == "gradient" for c in verified.differing)
    (text,) = warned
    assert text.startswith(f"{report.name}: backward does not give what the plain run gives:")
    assert f"gradient {verified.differing[0].name}: " in text
    assert str(verified.differing[0]) in report.explain()


def test_rounding_that_was_asked_for_is_said_and_no_fault(warned: list[str]) -> None:
    model, x = Perceptron(64, 4), torch.randn(2048, 64)
    ours(model, lossy="bf16", policy="activation_spill:lossy=true")(x).backward()
    report, verified = newest()
    assert any(move.codec for move in report.plan.moves)
    assert not verified.exact and verified.differing and warned == []


def test_random_numbers_of_inductor_are_not_compared() -> None:
    (graphs,) = capture(pair(), batch(0))
    node = next(n for n in graphs.forward.graph.nodes if n.op == "call_function")
    assert not verifying.own_random_numbers(graphs.forward)
    node.target = inductor_prims.random
    assert verifying.own_random_numbers(graphs.forward)
    verified = Verified(exact=False)
    one = verifying.Verifying("one", graphs, torch.device("cpu"), verified, lambda *_: "")
    assert one.begin("forward", []) is verifying.nothing_to_check
    assert "fallback_random" in verified.words()


def test_a_plain_run_that_fails_is_said_and_training_goes_on(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: PlainRun, arguments: Any) -> list[Any]:
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr(PlainRun, "__call__", fail)
    loss_of(ours(pair())(batch(0))).backward()
    assert newest()[1].words() == "forward: not compared: the plain run failed (no room)"
    assert len(warned) == 1


def test_gradients_that_an_optimizer_used_up_are_counted() -> None:
    (graphs,) = capture(pair(), batch(0))
    assert graphs.backward is not None
    cpu, verified = torch.device("cpu"), Verified(exact=True)
    values = [n.meta["val"] for n in graphs.forward.graph.find_nodes(op="placeholder")]
    given = [torch.randn(v.shape) for v in values]
    one = verifying.Verifying("one", graphs, cpu, verified, lambda *_: "")
    check = one.begin("forward", given)
    result = PlainRun(graphs.forward, cpu, rests=False)(given)
    check(result)
    names = [n.name for n in outputs_of(graphs.forward) if isinstance(n, fx.Node)]
    known = dict(zip(names, result, strict=True))
    wanted = graphs.backward.graph.find_nodes(op="placeholder")
    arguments = [known.get(n.name, torch.ones(result[0].shape)) for n in wanted]
    check = one.begin("backward", arguments)
    gradients = PlainRun(graphs.backward, cpu, rests=False)(arguments)
    gradients[0] = None
    check(gradients)
    assert verified.words() == (
        "forward: 1 output equal bit for bit; backward: 5 gradients equal bit for bit,"
        " 1 gradient not compared, which an optimizer used up while backward ran"
    )


# --- the plain run --------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [Attention(), nn.Sequential(Pair(), nn.BatchNorm1d(48))])
def test_op_by_op_with_everything_at_rest_gives_the_same(module: nn.Module) -> None:
    """The device holds the operands of one op alone; all else is copied away and back."""
    x = torch.randn(2, 5, 32) if isinstance(module, Attention) else batch(0)
    (graphs,) = capture(module, x)
    values = [n.meta["val"] for n in graphs.forward.graph.find_nodes(op="placeholder")]
    torch.manual_seed(0)
    given = [
        torch.randn(v.shape) if v.is_floating_point() else torch.zeros(v.shape, dtype=v.dtype)
        for v in values
    ]
    here, away = [g.clone() for g in given], [g.clone() for g in given]
    plain = PlainRun(graphs.forward, torch.device("cpu"), rests=False)(here)
    resting = PlainRun(graphs.forward, torch.device("cpu"), rests=True)(away)
    for a, b in zip(plain, resting, strict=True):
        if isinstance(a, Tensor):
            assert a.stride() == b.stride() and torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(here, away, strict=True))  # updates in place


def test_copies_lie_as_what_they_are_copies_of() -> None:
    base = torch.arange(24.0).view(4, 6)
    for x in (base.t(), base[1:, ::2], base[:, :1].expand(4, 5), base[:0], base[2, 3]):
        there = moved(x, torch.device("cpu"))
        assert there.stride() == x.stride() and torch.equal(there, x)
        assert not x.numel() or there.data_ptr() != x.data_ptr()


# --- differences ----------------------------------------------------------------------------------


def differ(a: Any, b: Any) -> Any:
    found = compare("x", "output", a, b)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_distances_are_counted_in_numbers_of_the_type(dtype: torch.dtype) -> None:
    one = torch.ones((), dtype=dtype)
    above = torch.nextafter(one.double(), one.double() * 2) if dtype == torch.float64 else one
    if dtype != torch.float64:
        above = one + torch.finfo(dtype).eps
    found = differ(torch.stack([one, above]).to(dtype), torch.stack([one, one]))
    assert (found.differing, found.most_ulp) == (1, 1.0)
    tiny = torch.finfo(dtype).smallest_normal * torch.tensor([1.0, -1.0], dtype=dtype)
    assert differ(tiny[:1], tiny[1:]).most_ulp > 2


def test_what_counts_as_equal_and_what_does_not() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert differ(nan, -nan.abs() * torch.tensor([1.0, -1.0])).equal  # any NaN is a NaN
    assert differ(nan, torch.tensor([0.0, 1.0])).most_ulp == math.inf
    zeros = differ(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (zeros.differing, zeros.most_ulp, zeros.share) == (1, 0.0, 0.0)
    assert differ(torch.tensor([1, 2, 7]), torch.tensor([1, 2, 4])).most_ulp == 3
    assert differ(torch.tensor([True]), torch.tensor([False])).differing == 1
    assert differ(torch.tensor([1j]), torch.tensor([2j])).share == 0.5
    assert differ(torch.empty(0), torch.empty(0)).equal
    assert (
        "float32[2] and would be float64[2]" in differ(torch.ones(2), torch.ones(2).double()).note
    )
    assert compare("n", "output", 3, 3) is None


def test_the_switch_has_a_variable() -> None:
    assert Options.read({}, {"OFFCOMPILE_VERIFY": "1"}).verify
    with pytest.raises(offcompile.InvalidInput, match="verify: 1 is neither True nor False"):
        Options.read({"verify": 1}, {})
