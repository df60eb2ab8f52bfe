"""Saved masks as bits: the same to the last bit, less saved, and only where it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lengths import some
from torch import Tensor, fx, nn
from torch.nn import functional as F
from zoo import Encoder, Specimen, Trace, train

import offcompile
from offcompile.graph.graphs import Graphs
from offcompile.graph.lowering.lower import Lowering, lower
from offcompile.graph.mask_bits import Compacted, compact, has_bits
from offcompile.graph.sizes import hint_of
from offcompile.runtime.kernels import bit_ops


class Pooled(nn.Module):
    """ReLUs whose output goes to pooling alone: backward asks for its sign, and its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.avg_pool2d(F.relu(self.second(x)), 4)
        return self.head(x.flatten(1))


def noise(*size: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda s: (torch.randn(*size, generator=torch.Generator().manual_seed(s)),)


def images(s: int) -> tuple[Tensor, ...]:
    return (noise(8, 3, 32, 32)(s)[0].contiguous(memory_format=torch.channels_last),)


def dropped() -> nn.Module:
    layers = (nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1))
    return nn.Sequential(*layers, nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.2))


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


POOLED = Specimen("pooled", Pooled, noise(8, 3, 32, 32), mean_square)
LAST = Specimen(
    "channels_last", lambda: Pooled().to(memory_format=torch.channels_last), images, mean_square
)
DROPPED = Specimen("dropped", dropped, noise(256, 128), mean_square)
ENCODER = Specimen("encoder", lambda: Encoder(64, 1, 4), noise(4, 96, 64), mean_square)


class Compacting:
    """Hooks that put compacted graphs in place of those that come by."""

    no_buffer_reuse = False

    def __init__(self, fuses: bool = False) -> None:
        self.fuses = fuses
        self.made: list[Compacted | None] = []

    def training(self, forward: fx.GraphModule, backward: fx.GraphModule, n: int, _: Any) -> Any:
        made = compact(Graphs(forward, backward, n), hint_of(), 1024, self.fuses)
        self.made.append(made)
        return None if made is None else (made.graphs.forward, made.graphs.backward)

    def inference(self, graph: fx.GraphModule, _: Any) -> None:
        return None

    def ready(self, phase: str, compiled: Any) -> Any:
        return compiled


def compacted(
    lowering: Lowering = "aot_eager", dynamic: bool | None = None
) -> tuple[Compacting, Callable[[nn.Module], Any]]:
    hooks = Compacting(lowering == "inductor")

    def compiler(model: nn.Module) -> Any:
        def backend(graph: fx.GraphModule, inputs: Any) -> Any:
            return lower(graph, inputs, lowering, hooks)

        return torch.compile(model, backend=backend, dynamic=dynamic)

    return hooks, compiler


def plain(specimen: Specimen, lowering: str = "aot_eager", dynamic: bool | None = None) -> Trace:
    return train(specimen, lambda m: torch.compile(m, backend=lowering, dynamic=dynamic), 2)


def test_less_is_saved_and_nothing_changes() -> None:
    expected = {
        # the ReLU of 16 channels of 32 × 32, and of 16 × 16
        POOLED: [(524_288, 16_384), (131_072, 4096)],
        LAST: [(524_288, 16_384), (131_072, 4096)],
        # two masks, and two ReLUs whose outputs dropout has taken
        DROPPED: [(32_768, 4096), (32_768, 4096), (131_072, 4096), (131_072, 4096)],
        ENCODER: [(24_576, 3072), (24_576, 3072)],
    }
    for specimen, sizes in expected.items():
        hooks, compiler = compacted()
        found = train(specimen, compiler, 2)
        (made,) = hooks.made
        assert made is not None and sorted(made.saved_bytes.values()) == sorted(sizes), specimen
        assert made.matters
        assert not found.differences(plain(specimen)), specimen


@pytest.mark.parametrize("specimen", some([POOLED, DROPPED], DROPPED), ids=str)
def test_sizes_may_change(specimen: Specimen) -> None:
    def resized(s: int) -> tuple[Tensor, ...]:
        return tuple(x[: len(x) - 3 * s] for x in specimen.inputs(s))

    other = Specimen("resized", specimen.build, resized, specimen.loss)
    hooks, compiler = compacted(dynamic=True)
    found = train(other, compiler, 2)
    assert hooks.made and None not in hooks.made
    assert not found.differences(plain(other, dynamic=True))


def test_a_retained_graph_reads_its_bits_again() -> None:
    found = []
    for compiler in (compacted()[1], lambda m: torch.compile(m, backend="aot_eager")):
        torch._dynamo.reset()
        model = DROPPED.fresh()
        torch.manual_seed(5)
        loss = mean_square(compiler(model)(*DROPPED.inputs(0)))
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_inductor_reads_bits_too() -> None:
    # in float64 sums in another order differ by next to nothing; Inductor lays convolutions out
    # in another order than was traced, and bits must not follow it
    specimen = POOLED.double()
    hooks, compiler = compacted("inductor")
    found = train(specimen, compiler, 2)
    (made,) = hooks.made
    assert made is not None and len(made.saved_bytes) == 2
    assert found.distance(plain(specimen)) < 1e-9


# --- what stays as it is --------------------------------------------------------------------------


def found_in(model: Callable[..., Any], *inputs: Tensor) -> Compacted | None:
    torch._dynamo.reset()
    hooks, compiler = compacted()
    compiler(model)(*inputs)  # type: ignore[arg-type]
    (made,) = hooks.made
    return made


def test_what_is_wanted_otherwise_too_is_left_alone() -> None:
    x, weight = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    # the next product's input, the user's, a threshold that is not 0
    assert found_in(lambda x, w: F.relu(x @ w) @ w, x, weight) is None
    assert found_in(lambda x, w: F.relu(x @ w), x, weight) is None
    assert found_in(lambda x, w: F.threshold(x @ w, 0.5, 0.0).sum(), x, weight) is None
    assert found_in(lambda x, w: F.relu(x @ w).sum(), x, weight) is not None


def test_the_given_graphs_are_left_as_they_are() -> None:
    class Looking(Compacting):
        def training(self, forward: Any, backward: Any, n: int, _: Any) -> Any:
            before = str(forward.graph), str(backward.graph)
            super().training(forward, backward, n, _)
            assert (str(forward.graph), str(backward.graph)) == before
            return None

    hooks = Looking()
    train(POOLED, lambda m: torch.compile(m, backend=lambda g, i: lower(g, i, "aot_eager", hooks)))
    (made,) = hooks.made
    assert made is not None and made.graphs.backward is not None
    order = [n.target for n in made.graphs.forward.graph.nodes]
    # right behind what they are made of
    assert [order[i - 1] for i, t in enumerate(order) if t is bit_ops.pack_bits] == [
        torch.ops.aten.relu.default,
        torch.ops.aten.relu.default,
    ]


# --- under a budget -------------------------------------------------------------------------------


def trained(specimen: Specimen, memory: int | str | None) -> tuple[Trace, Any, int]:
    before = offcompile.counters()["bytes_out"]
    options = {"memory": memory, "lowering": "aot_eager", "seconds": 0.5}
    found = train(specimen, lambda m: torch.compile(m, backend="offcompile", options=options), 2)
    return found, offcompile.reports()[-1], offcompile.counters()["bytes_out"] - before


def test_bits_are_used_where_a_budget_asks_for_it_and_not_before() -> None:
    expected = plain(POOLED)
    found, ample, moved = trained(POOLED, None)
    assert not found.differences(expected)
    assert ample.fits and not has_bits(ample.problem) and moved == 0
    # with bits everything fits, and nothing has to move
    found, tight, moved = trained(POOLED, ample.planned_peak_bytes * 9 // 10)
    assert not found.differences(expected)
    assert tight.fits and has_bits(tight.problem) and moved == 0
    assert tight.planned_peak_bytes < ample.planned_peak_bytes * 9 // 10
    found, least, moved = trained(POOLED, "minimum")
    assert not found.differences(expected)
    assert has_bits(least.problem) and moved > 0
