"""Costs of captured graphs: estimates are arithmetic, measurements are kept and disturb nothing."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import offcompile.graph.costs.op_costs as costs_module
from offcompile.graph.costs.calls import call_of
from offcompile.graph.costs.op_costs import CostModel, OpCost, costs_of_graph, open_cost_cache
from offcompile.graph.costs.roofline import USUAL_OVERHEADS, roofline_us, work_of
from offcompile.machine.cost_cache import (
    MEASURED,
    CostCache,
    cache_folder,
    document_path,
    write_document,
)
from offcompile.machine.hardware import HardwareProfile, load_profile
from offcompile.runtime.base import once
from offcompile.runtime.measure.op import Measured, OpCall, Operands, TensorSpec, measure_call
from offcompile.runtime.measure.timing import Overheads, undisturbed
from offcompile.runtime.moves.registry import close_all

aten = torch.ops.aten
CPU = load_profile("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def graph_of(fn: Callable[..., object], *inputs: torch.Tensor, mode: str = "fake") -> fx.Graph:
    return make_fx(fn, tracing_mode=mode)(*inputs).graph


def gradients(loss: Callable[..., torch.Tensor]) -> Callable[..., object]:
    """The loss and its gradients, traced in one graph."""

    def step(*inputs: torch.Tensor) -> object:
        taken = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        result = loss(*taken)
        wanted = [x for x in taken if x.requires_grad]
        return result, torch.autograd.grad(result, wanted)

    return step


def mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ a).mm(b).square().sum()


def conv(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = nn.functional.max_pool2d(torch.relu(nn.functional.conv2d(x, w, padding=1)), 2)
    return nn.functional.cross_entropy(z.mean((2, 3)), y)


def attention(i: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    x = nn.functional.embedding(i, table).unflatten(-1, (4, 32)).transpose(1, 2)
    x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    return nn.functional.layer_norm(x.transpose(1, 2).flatten(2), (128,)).square().mean()


def mlp_graph(rows: int = 256) -> fx.Graph:
    return graph_of(gradients(mlp), *(torch.rand(s) for s in ((rows, 256), (256, 512), (512, 64))))


def conv_graph() -> fx.Graph:
    inputs = torch.rand(8, 16, 48, 48), torch.rand(32, 16, 3, 3), torch.zeros(8, dtype=torch.int64)
    return graph_of(gradients(conv), *inputs)


def attention_graph() -> fx.Graph:
    return graph_of(
        gradients(attention), torch.zeros(2, 128, dtype=torch.int64), torch.rand(500, 128)
    )


GRAPHS = {"mlp": mlp_graph, "conv": conv_graph, "attention": attention_graph}


def model(lowering: str = "aot_eager", **more: object) -> CostModel:
    return CostModel(CPU, False, lowering, **more)  # type: ignore[arg-type]


def node_of(graph: fx.Graph, target: object, place: int = 0) -> fx.Node:
    return [n for n in graph.nodes if n.target is target][place]


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


# --- measuring -----------------------------------------------------------------------------


class Bench:
    """In place of running ops: counts what is asked, and answers by size."""

    def __init__(self, disturbed: bool = False) -> None:
        self.asked: list[str] = []
        self.disturbed = disturbed

    def __call__(self, call: OpCall, operands: Operands, seconds: float = 0.03) -> Measured:
        self.asked.append(call.key)
        return Measured(1000.0 + len(self.asked), 4096, self.disturbed)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    monkeypatch.setattr(costs_module, "measure_call", made)
    monkeypatch.setattr(costs_module, "measure_overheads", lambda: Overheads(2.0, 1.0, 300.0))
    monkeypatch.setattr(costs_module, "WORTH_MEASURING_US", 20.0)
    return made


def measuring(lowering: str = "aot_eager", **more: object) -> CostModel:
    return CostModel(CPU, True, lowering, open_cost_cache(), **more)  # type: ignore[arg-type]


def test_every_distinct_large_op_is_measured_once_and_remembered(bench: Bench) -> None:
    graph = graph_of(lambda x: (x @ x) @ (x @ x), torch.rand(256, 256))
    first = costs_of_graph(graph, measuring(), hint)
    assert len(bench.asked) == 1
    assert first["mm"] == first["mm_1"] == first["mm_2"] == OpCost(1001.0, 4096)
    assert costs_of_graph(graph, measuring(), hint) == first
    assert len(bench.asked) == 1
    assert costs_of_graph(graph, CostModel(CPU, True, "aot_eager"), hint) != first


def test_keys_tell_shapes_strides_types_and_scalars_apart(bench: Bench) -> None:
    def fn(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ x, x.t() @ x, h @ h, x.sum(0), x.sum(1), torch.cumsum(x, 0), torch.cumsum(x, 1)

    inputs = torch.rand(600, 600), torch.rand(600, 600, dtype=torch.bfloat16)
    costs_of_graph(graph_of(fn, *inputs), measuring(), hint)
    assert len(bench.asked) == len(set(bench.asked)) == 7


def test_under_inductor_only_library_kernels_are_measured(bench: Bench) -> None:
    graph = graph_of(lambda x: (x.sin() @ x).cos().sum(), torch.rand(900, 900))
    costs_of_graph(graph, measuring("inductor"), hint)
    assert [key.partition("(")[0] for key in bench.asked] == ["aten.mm.default"]


def test_what_has_no_room_or_no_time_is_estimated(bench: Bench) -> None:
    graph = mlp_graph()
    costs_of_graph(graph, measuring(room_bytes=1000), hint)
    costs_of_graph(graph, measuring(seconds=0.0), hint)
    assert bench.asked == []


def test_measuring_tells_how_far_it_is(bench: Bench) -> None:
    told: list[str] = []
    costs_of_graph(mlp_graph(), measuring(progress=told.append), hint)
    assert told[0] == f"measuring ops: 1 of {len(bench.asked)} (mm)"


def test_a_disturbed_measurement_is_taken_again_a_few_times(bench: Bench) -> None:
    graph = graph_of(torch.mm, torch.rand(256, 256), torch.rand(256, 256))
    bench.disturbed = True
    for tries in (1, 2, 3, 3, 3):
        for _ in range(2):  # once per process
            cost = costs_of_graph(graph, measuring(), hint)["mm"]
            assert len(bench.asked) == tries
        once.forget(MEASURED)
        assert cost.duration_us == 1001.0  # the least


def test_an_undisturbed_measurement_replaces_disturbed_ones(bench: Bench) -> None:
    graph = graph_of(torch.mm, torch.rand(256, 256), torch.rand(256, 256))
    bench.disturbed = True
    costs_of_graph(graph, measuring(), hint)
    once.forget(MEASURED)
    bench.disturbed = False
    for _ in range(2):
        assert costs_of_graph(graph, measuring(), hint)["mm"].duration_us == 1002.0
    assert len(bench.asked) == 2


def calls_in(graph: fx.Graph) -> list[OpCall]:
    model = CostModel(CPU, False, "aot_eager")
    found = [call_of(n, hint) for n in graph.nodes if n.op == "call_function"]
    assert model.overheads == USUAL_OVERHEADS
    return [c for c in found if c is not None and c.target.namespace == "aten"]


@pytest.mark.parametrize("name", GRAPHS)
def test_every_op_of_ordinary_models_runs_by_itself(name: str) -> None:
    operands = Operands()
    for call in calls_in(GRAPHS[name]()):
        found = measure_call(call, operands, seconds=0.0)
        assert found is not None, call.key
        assert found.duration_us > 0
        assert found.workspace_bytes >= 0


def test_measuring_leaves_the_users_state_alone() -> None:
    spec = TensorSpec(torch.float32, (64, 64), (64, 1))
    before = torch.random.get_rng_state()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        for call in (
            OpCall(aten.native_dropout.default, (spec, 0.5, True), {}, (spec,)),
            OpCall(aten.bernoulli_.float, (spec, 0.5), {}, (spec,)),
        ):
            assert measure_call(call, Operands(), seconds=0.0) is not None
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_real_kernels_run_while_something_is_traced() -> None:
    seen = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        with undisturbed():
            seen.append(type(torch.ones(2, device="cpu") + 1))
        return x + 1

    graph = graph_of(torch.func.vmap(traced), torch.rand(3, 4))
    assert seen == [torch.Tensor]
    assert len([n for n in graph.nodes if n.op == "call_function"]) == 1


def test_an_op_that_fails_by_itself_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec(torch.float32, (4, 5), (5, 1))
    assert measure_call(OpCall(aten.mm.default, (spec, spec), {}, ()), Operands()) is None
    huge = TensorSpec(torch.float32, (2**50,), (1,))
    assert measure_call(OpCall(aten.relu.default, (huge,), {}, ()), Operands()) is None


def test_workspace_is_what_the_system_counts() -> None:
    # what other tests left behind is not to go while the system counts: it would be taken off
    close_all()
    gc.collect()
    source = TensorSpec(torch.bfloat16, (4 << 20,), (1,))
    result = TensorSpec(torch.float32, (4 << 20,), (1,))
    free = [torch.ones(1 << 20) for _ in range(16)]  # a heap with room, as after some steps
    keep = free[::2]
    del free
    # dropout's backward makes the mask a number, and multiplies, and multiplies again
    mask = TensorSpec(torch.bool, (4 << 20,), (1,))
    call = OpCall(aten.native_dropout_backward.default, (result, mask, 2.0), {}, (result,))
    found = measure_call(call, Operands(), seconds=0.0)
    assert found is not None and found.workspace_bytes >= 12 << 20
    plain = measure_call(
        OpCall(aten.neg.default, (source,), {}, (source,)), Operands(), seconds=0.0
    )
    assert plain is not None and plain.workspace_bytes <= 2 << 20
    assert len(keep) == 8


def test_operands_have_the_asked_layout_and_sane_values() -> None:
    table = TensorSpec(torch.float32, (50, 8), (1, 50))
    index = TensorSpec(torch.int64, (3, 1000), (0, 1))
    mask = TensorSpec(torch.bool, (100_000,), (1,))
    call = OpCall(aten.embedding.default, (table, index, mask), {}, ())
    (weights, indices, flags), _ = Operands().make(call)
    assert isinstance(weights, torch.Tensor) and isinstance(indices, torch.Tensor)
    assert isinstance(flags, torch.Tensor)
    assert weights.stride() == (1, 50) and indices.stride() == (0, 1)
    assert weights.min() > 0 and weights.max() <= 1
    assert indices.min() >= 0 and 40 <= indices.max() < 50
    assert 0.4 < flags.float().mean() < 0.6


# --- the cache -----------------------------------------------------------------------------

HERE = {"cpu": "x", "cores": 2}


def test_the_cache_survives_processes_and_tells_machines_apart() -> None:
    cache = CostCache(HERE)
    cache.put("a", 1.25, 8)
    cache.save()
    other = CostCache(HERE)
    other.put("b", 2.5)
    cache.put("c", 3.5)
    cache.save()
    other.save()
    again = CostCache(HERE)
    assert [again.get(k) for k in "abc"] == [(1.25, 8), (2.5, 0), (3.5, 0)]
    assert CostCache({**HERE, "cores": 4}).get("a") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 99}', "\udcff", "[" * 100_000],
)
def test_a_broken_cache_file_counts_as_absent_and_is_replaced(text: str) -> None:
    path = document_path("costs", HERE)
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    cache = CostCache(HERE)
    assert len(cache) == 0
    cache.put("a", 1.0)
    cache.save()
    assert CostCache(HERE).get("a") == (1.0, 0)


def test_a_foreign_document_and_senseless_rows_are_left_out() -> None:
    rows = [["a", 1.0, 0, 0], ["b", -1, 0, 0], ["c", 1.0, -5, 0], ["d", 1.0], 7, ["e", "1", 0, 0]]
    write_document("costs", HERE, {"ops": rows})
    assert len(CostCache(HERE)) == 1
    path = document_path("costs", HERE)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"identity": {"cpu": "y"}}))
    assert len(CostCache(HERE)) == 0


def test_a_folder_that_refuses_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    cache = CostCache(HERE)
    cache.put("a", 1.0)
    with pytest.warns(UserWarning, match="OFFCOMPILE_CACHE_DIR"):
        cache.save()
    cache.put("b", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        cache.save()
    assert cache.get("b") == (1.0, 0)


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    assert cache_folder() == own_cache
    monkeypatch.delenv("OFFCOMPILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/offcompile")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_folder() == Path("/h/.cache/offcompile")


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
