"""Training whose activations move packed gives what plain training gives, bit for bit.

Plans are made without codecs here and get one for each activation that leaves afterwards.
"""

from __future__ import annotations

import errno
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import Perceptron
from lengths import some
from torch import Tensor, nn
from zoo import BY_NAME, MLP, Specimen, Trace, train

import offcompile
from offcompile.graph.lowering.rewrite import rewrite
from offcompile.ir import DEVICE, OffloadError, Plan
from offcompile.planning.timelines import moved_bytes
from offcompile.run.plan import carry_out
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.moves.registry import close_all, runtimes

QUICK = {"hardware": "cpu", "memory": "minimum", "lowering": "aot_eager", "seconds": 0.1}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From here on, activations that leave are packed with this codec."""

    def use(codec: str) -> None:
        def with_codec(graphs: Any, annotated: Any, plan: Plan, *rest: Any) -> Any:
            tensor = annotated.problem.tensor
            moves = tuple(
                replace(m, codec=codec) if tensor[m.tensor].kind == "activation" else m
                for m in plan.moves
            )
            return rewrite(graphs, annotated, replace(plan, moves=moves), *rest)

        monkeypatch.setattr(carry_out, "rewrite", with_codec)

    return use


def ours(**more: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend="offcompile", options={**QUICK, **more})


def plain(lowering: str = "aot_eager") -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend=lowering)


@functools.cache
def plain_run(specimen: Specimen, lowering: str = "aot_eager") -> Trace:
    return train(specimen, plain(lowering))


def moved() -> tuple[int, int]:
    found = offcompile.counters()
    return int(found["raw_bytes_out"]), int(found["bytes_out"])


@pytest.mark.parametrize(
    "name",
    ["mlp", *(pytest.param(n, marks=pytest.mark.soak) for n in ("mixture", "conv", "gpt"))],
)
def test_packed_moves_change_no_bit(name: str, packed: Callable[[str], None]) -> None:
    packed("bitmask")
    before = moved()
    found = train(BY_NAME[name], ours())
    assert not found.differences(plain_run(BY_NAME[name]))
    raw, crossed = (after - b for after, b in zip(moved(), before, strict=True))
    assert raw > 0 and crossed != raw
    if name == "mlp":  # half of what a ReLU gives is zero
        assert crossed < 0.75 * raw


#: alike with aot_eager: `test_packed_moves_change_no_bit`; bits under Inductor: `test_compact`
@pytest.mark.soak
def test_packed_moves_under_inductor(packed: Callable[[str], None]) -> None:
    """Inductor's own results, with movement but without packing, are the measure."""
    specimen = BY_NAME["mlp"].double()
    unpacked = train(specimen, ours(lowering="inductor"))
    packed("bitmask")
    before = moved()
    found = train(specimen, ours(lowering="inductor"))
    assert not found.differences(unpacked)
    raw, crossed = (after - b for after, b in zip(moved(), before, strict=True))
    assert 0 < crossed < raw


def gradients(
    steps: Callable[[Callable[[int], Tensor]], None], compiler: Callable[[nn.Module], Any]
) -> dict[str, Tensor | None]:
    torch._dynamo.reset()
    specimen = BY_NAME["mlp"]
    model = specimen.fresh()
    forward = compiler(model)
    steps(lambda seed: specimen.loss(forward(*specimen.inputs(seed))))
    return {n: p.grad for n, p in model.named_parameters()}


def twice(loss: Callable[[int], Tensor]) -> None:
    kept = loss(0)
    kept.backward(retain_graph=True)
    kept.backward()


def crossed(loss: Callable[[int], Tensor]) -> None:
    first, second = loss(0), loss(1)
    second.backward()
    first.backward()


def dropped(loss: Callable[[int], Tensor]) -> None:
    loss(0)
    gc.collect()
    loss(1).backward()


@pytest.mark.parametrize(
    "steps", some([twice, crossed, dropped], crossed), ids=lambda f: f.__name__
)
def test_lifetimes_of_packed_activations(
    steps: Callable[..., None], packed: Callable[[str], None]
) -> None:
    want = gradients(steps, plain())
    packed("bitmask")
    torch.testing.assert_close(gradients(steps, ours()), want, rtol=0, atol=0)


def test_sizes_that_change(packed: Callable[[str], None]) -> None:
    packed("bitmask")
    results = []
    for backend, options in (("aot_eager", None), ("offcompile", QUICK)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = MLP(64, 4)
        run = torch.compile(model, backend=backend, options=options, dynamic=True)
        for rows in (1024, 700, 1300, 33):
            generator = torch.Generator().manual_seed(rows)
            run(torch.randn(rows, 64, generator=generator)).square().mean().backward()
        results.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("codec", some(["fp16", "bf16", "bitmask+bf16"], "bitmask+bf16"))
def test_a_stash_rounds_what_backward_reads_and_nothing_else(
    codec: str, packed: Callable[[str], None]
) -> None:
    specimen = BY_NAME["mlp"]
    exact = train(specimen, plain(), steps=1)
    packed(codec)
    found = train(specimen, ours(), steps=1)
    assert torch.equal(found.losses[0], exact.losses[0])
    assert found.differences(exact)
    assert found.distance(exact) < 0.02


def test_what_a_plan_says_will_cross_does() -> None:
    """Here the planner chose the codec itself, by ratios that hold whatever the data."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    run = ours(lossy="bf16")(MLP(128, 6))
    before = moved()
    run(torch.randn(1024, 128)).square().mean().backward()
    for runtime in runtimes():
        runtime.device.drain()
    report = offcompile.reports()[-1]
    out = [m for m in report.plan.moves if m.source == DEVICE]
    assert "bf16" in {m.codec for m in out}
    raw = sum(report.problem.tensor[m.tensor].nbytes for m in out)
    packed = sum(moved_bytes(report.problem, m.tensor, m.codec) for m in out)
    assert [after - b for after, b in zip(moved(), before, strict=True)] == [raw, packed]


class Failing:
    """The calls of the open runtimes' files; from the n-th on they fail."""

    def __init__(self, kind: str, after: int) -> None:
        self.left, self.kept = (
            after,
            [f for r in runtimes() for s in r.stores.values() for f in s._files],
        )
        self.before = [file._files for file in self.kept]
        self.real = getattr(Files(), kind)
        for file in self.kept:
            file._files = replace(file._files, **{kind: self.call})

    def call(self, descriptor: int, views: Any, offset: int) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "the disk does not want to")
        return int(self.real(descriptor, views, offset))

    def mend(self) -> None:
        for file, files in zip(self.kept, self.before, strict=True):
            file._files = files


@pytest.mark.parametrize("kind", ["pwritev", "preadv"])
@pytest.mark.parametrize("after", some([0, 2], 2))
def test_a_disk_that_fails_fails_the_step_and_loses_nothing(
    kind: str, after: int, tmp_path: Path, packed: Callable[[str], None]
) -> None:
    packed("bitmask")
    close_all()
    torch._dynamo.reset()
    model, x = Perceptron(64, 6), torch.randn(4096, 64)
    run = ours(spill=tmp_path)(model)
    run(x).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    failing = Failing(kind, after)
    with pytest.raises(OffloadError, match="does not want to") as raised:
        run(x).backward()
    assert str(tmp_path) in str(raised.value)
    failing.mend()
    del raised
    gc.collect()
    model.zero_grad()
    run(x).backward()
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
    gc.collect()
    assert offcompile.counters()["spill_bytes"] == 0
