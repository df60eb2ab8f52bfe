"""Costs of captured graphs, as estimated: by arithmetic, traffic and fusion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cost_graphs import CPU, GRAPHS, graph_of, hint, model, node_of
from torch import nn
from torch._inductor import inductor_prims

from offcompile.graph.costs.calls import call_of
from offcompile.graph.costs.fusion import NS_PER_US, RANDOM_NS
from offcompile.graph.costs.op_costs import CostModel, OpCost, costs_of_graph
from offcompile.graph.costs.roofline import USUAL_OVERHEADS, roofline_us, work_of
from offcompile.machine.hardware import HardwareProfile
from offcompile.runtime.measure.op import OpCall, Operands, TensorSpec, measure_call
from offcompile.runtime.measure.timing import Overheads

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- estimates -----------------------------------------------------------------------------


def test_a_product_costs_its_arithmetic() -> None:
    graph = graph_of(torch.mm, torch.rand(512, 1024), torch.rand(1024, 2048))
    cost = model().cost(node_of(graph, aten.mm.default), hint)
    flop_per_us = 0.1e6  # of the profile
    assert cost == OpCost(pytest.approx(4.0 + 2 * 512 * 1024 * 2048 / flop_per_us))


def test_a_pointwise_op_costs_its_traffic() -> None:
    graph = graph_of(torch.add, torch.rand(1000, 1000), torch.rand(1000, 1))
    cost = model().cost(node_of(graph, aten.add.Tensor), hint)
    assert cost.duration_us == pytest.approx(4.0 + 4 * 2_001_000 / 15_000)


def test_a_gather_reads_what_it_returns() -> None:
    graph = graph_of(
        lambda i, t: nn.functional.embedding(i, t),
        torch.zeros(10, dtype=torch.int64),
        torch.rand(100_000, 64),
    )
    call = call_of(node_of(graph, aten.embedding.default), hint)
    assert call is not None
    assert work_of(call).read_bytes == 10 * 8 + 10 * 64 * 4


@pytest.mark.parametrize(
    ("fn", "shapes", "flop"),
    [
        (lambda c, a, b: torch.addmm(c, a, b), [(8,), (4, 6), (6, 8)], 2 * 4 * 6 * 8),
        (torch.bmm, [(3, 4, 5), (3, 5, 6)], 2 * 3 * 4 * 5 * 6),
        (lambda x, w: torch.conv2d(x, w), [(2, 3, 8, 8), (5, 3, 3, 3)], 2 * 2 * 5 * 36 * 27),
        (
            lambda x, w: torch.conv_transpose2d(x, w),
            [(2, 3, 8, 8), (3, 5, 3, 3)],
            2 * 2 * 3 * 64 * 45,
        ),
        (
            lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v),
            [(1, 2, 16, 8)] * 3,
            2 * 2 * 16 * 16 * 16,
        ),
    ],
    ids=["addmm", "bmm", "convolution", "transposed", "attention"],
)
def test_arithmetic_is_counted(
    fn: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]], flop: int
) -> None:
    graph = graph_of(fn, *(torch.rand(shape) for shape in shapes))
    calls = [c for n in graph.nodes if (c := call_of(n, hint)) is not None]
    assert sum(work_of(call).flop for call in calls) == flop


def grouped(tokens: int, groups: int) -> OpCall:
    """Tokens in groups, each of which is multiplied by its own weight."""
    bf16 = torch.bfloat16
    a = TensorSpec(bf16, (tokens, 16), (16, 1))
    b = TensorSpec(bf16, (groups, 16, 32), (512, 32, 1))
    ends = TensorSpec(torch.int32, (groups,), (1,))
    out = TensorSpec(bf16, (tokens, 32), (32, 1))
    return OpCall(aten._grouped_mm.default, (a, b, ends), {}, (out,))


def test_a_grouped_product_costs_the_arithmetic_of_its_tokens() -> None:
    assert work_of(grouped(40, 4)).flop == 2 * 40 * 16 * 32


def test_a_grouped_product_is_measured_with_all_tokens_in_some_group() -> None:
    args, _ = Operands().make(grouped(42, 4))
    assert isinstance(args[2], torch.Tensor)
    assert args[2].tolist() == [10, 21, 31, 42]
    assert measure_call(grouped(42, 4), Operands()) is not None


def test_first_touches_of_large_outputs_count() -> None:
    spec = TensorSpec(torch.float32, (1024, 1024), (1024, 1))
    work = work_of(OpCall(aten.relu.default, (spec,), {}, (spec,)))
    touched = roofline_us(work, CPU, Overheads(4.0, 1.5, fresh_us_per_mib=1000.0))
    assert touched == pytest.approx(4.0 + 4000.0 + 4 * 2**20 / 15_000)
    assert roofline_us(work, CPU, USUAL_OVERHEADS) == pytest.approx(4.0 + 8 * 2**20 / 15_000)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_estimates_are_the_same_every_time_and_never_negative(name: str, lowering: str) -> None:
    graph = GRAPHS[name]()
    costs = costs_of_graph(graph, model(lowering), hint)
    assert costs == costs_of_graph(GRAPHS[name](), model(lowering), hint)
    assert costs.keys() == {n.name for n in graph.nodes}
    assert all(c.duration_us >= 0 and c.workspace_bytes >= 0 for c in costs.values())
    assert sum(c.duration_us for c in costs.values()) > 10.0


def test_views_parts_and_sizes_cost_next_to_nothing() -> None:
    graph = graph_of(
        lambda x: torch.relu(x.t()[:2].split(1)[0]), torch.rand(999, 9), mode="symbolic"
    )
    costs = costs_of_graph(graph, model(), hint)
    cheap = [n for n in graph.nodes if n.target is not aten.relu.default]
    assert max(costs[n.name].duration_us for n in cheap) == USUAL_OVERHEADS.view_us
    assert costs[node_of(graph, aten.relu.default).name].duration_us > USUAL_OVERHEADS.view_us


def test_symbolic_sizes_are_priced_at_the_hint() -> None:
    graph = graph_of(
        lambda x, w: (x @ w).relu(), torch.rand(300, 64), torch.rand(64, 32), mode="symbolic"
    )
    fixed = graph_of(lambda x, w: (x @ w).relu(), torch.rand(300, 64), torch.rand(64, 32))
    node, same = node_of(graph, aten.mm.default), node_of(fixed, aten.mm.default)
    assert model().cost(node, hint) == model().cost(same, hint)
    twice = model().cost(node, lambda size: 2 * hint(size))
    assert twice.duration_us > 3 * model().cost(node, hint).duration_us


def test_an_unknown_op_and_a_higher_order_op_cost_their_traffic() -> None:
    def cond(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin() @ y, lambda y: y.cos(), (x,))

    graph = graph_of(cond, torch.rand(300, 300), mode="symbolic")
    (node,) = [n for n in graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]
    cost = costs_of_graph(graph, model(), hint)[node.name]
    assert cost.duration_us > 2 * 300**3 / 0.1e6  # the dearer branch has a product

    with torch.library._scoped_library("offcompile_test_costs", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
        custom = graph_of(torch.ops.offcompile_test_costs.twice, torch.rand(1000, 1000))
        (op,) = [n for n in custom.nodes if n.op == "call_function"]
        assert model().cost(op, hint).duration_us == pytest.approx(4.0 + 8e6 / 15_000)


# --- fusion --------------------------------------------------------------------------------


def test_chains_of_pointwise_ops_are_read_and_written_once() -> None:
    graph = graph_of(lambda x: torch.tanh(torch.exp(x) + 1).sqrt(), torch.rand(1000, 1000))
    costs = costs_of_graph(graph, model("inductor"), hint)
    ops = [n.name for n in graph.nodes if n.op == "call_function"]
    assert [costs[name].materialises for name in ops] == [False] * (len(ops) - 1) + [True]
    assert sum(c.duration_us for c in costs.values()) == pytest.approx(4.0 + 8e6 / 15_000)


def test_random_numbers_take_a_processor_their_time() -> None:
    def noisy(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return x + inductor_prims.random([1000, 1000], seed, "rand")

    given = torch.rand(1000, 1000), torch.tensor(3)
    costs = costs_of_graph(graph_of(noisy, *given), model("inductor"), hint)
    drawn_us = 1e6 * RANDOM_NS / NS_PER_US / torch.get_num_threads()
    assert sum(c.duration_us for c in costs.values()) == pytest.approx(
        4.0 + 8e6 / 15_000 + drawn_us, rel=1e-3
    )


def test_values_that_others_need_are_written() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x.sin()
        b = a.cos()  # goes to the product
        c = b.exp()
        return b @ w, c.sqrt(), a[:10].tan()  # a is needed in part, by another loop

    graph = graph_of(fn, torch.rand(64, 64), torch.rand(64, 64))
    costs = costs_of_graph(graph, model("inductor"), hint)
    written = {
        n.name for n in graph.nodes if n.op == "call_function" and costs[n.name].materialises
    }
    assert written >= {"sin", "cos", "mm", "sqrt", "tan"}
    assert not costs["exp"].materialises


def test_what_is_needed_again_after_a_reduction_is_written() -> None:
    def softmax(x: torch.Tensor) -> torch.Tensor:
        e = (x - x.amax(1, keepdim=True)).exp()
        return e / e.sum(1, keepdim=True)

    costs = costs_of_graph(graph_of(softmax, torch.rand(64, 64)), model("inductor"), hint)
    assert not costs["sub"].materialises
    assert costs["exp"].materialises


def test_no_kernel_spans_a_product() -> None:
    graph = graph_of(lambda x: (x.sin() @ x).cos() + x.sin(), torch.rand(64, 64))
    costs = costs_of_graph(graph, model("inductor"), hint)
    assert costs["sin"].materialises  # read by the product
    assert not costs["cos"].materialises


def test_a_profile_without_rates_for_products_still_prices_them() -> None:
    profile = HardwareProfile("x", "x", 2**30, 10.0, 1.0, 1.0, "x")
    graph = graph_of(torch.mm, torch.rand(512, 512), torch.rand(512, 512))
    cost = CostModel(profile, False, "aot_eager").cost(node_of(graph, aten.mm.default), hint)
    assert cost.duration_us == pytest.approx(4.0 + 3 * 2**20 / 10_000)


@pytest.mark.parametrize("channels", [1, 3, 8, 12])
def test_convolutions_take_workspace_for_channels_in_blocks(channels: int) -> None:
    image, weight = torch.rand(4, channels, 32, 32), torch.rand(16, channels, 3, 3)
    graph = graph_of(lambda x, w: F.conv2d(x, w, padding=1), image, weight)
    node = node_of(graph, aten.convolution.default)
    made, in_blocks = 4 * 16 * 32 * 32 * 4, 4 * 32 * 32 * 4 * -(-channels // 8) * 8
    on_cpu = costs_of_graph(graph, model(), hint)[node.name].workspace_bytes
    assert on_cpu >= made + in_blocks
