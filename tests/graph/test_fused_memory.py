"""Values that count as written are those that Inductor allocates, by the code that it generates."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.utils import get_code

from offcompile.graph.costs.calls import value_bytes
from offcompile.graph.costs.fusion import is_extern
from offcompile.graph.costs.op_costs import CostModel, costs_of_graph
from offcompile.graph.graphs import is_getitem
from offcompile.graph.lowering.lower import lower
from offcompile.machine.hardware import load_profile

ALLOCATED = re.compile(r"= empty_strided_cpu\(\((.*?)\), \(.*?\), torch\.(\w+)\)")
#: smaller ones are of rows: Inductor may compute them in more than one way
LEAST_BYTES = 64 << 10


class Noting:
    """Keeps the graph that Inductor compiles."""

    no_buffer_reuse = False
    graph: fx.Graph

    def training(self, forward: Any, backward: Any, num_outputs: int, inputs: Any) -> Any:
        raise AssertionError("nothing here is trained")

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.graph = graph.graph

    def ready(self, phase: str, compiled: Any) -> Any:
        return compiled


def allocated(function: Callable[..., Any], *inputs: Tensor) -> tuple[list[int], fx.Graph]:
    """Bytes of each large buffer in Inductor's code, and the graph that the code was made from."""
    torch._dynamo.reset()
    noting = Noting()
    backend = functools.partial(lower, lowering="inductor", hooks=noting)
    # every buffer by itself, so that each value has one or none
    with inductor_config.patch(
        allow_buffer_reuse=False, inplace_buffers=False, fx_graph_cache=False
    ):
        code = get_code(torch.compile(function, backend=backend), *inputs)[0]
    found = [
        math.prod(int(n) for n in sizes.split(",") if n.strip()) * getattr(torch, dtype).itemsize
        for sizes, dtype in ALLOCATED.findall(code)
    ]
    return sorted(n for n in found if n >= LEAST_BYTES), noting.graph


def planned(graph: fx.Graph) -> list[int]:
    """Bytes of each large value that counts as written."""

    def hint(size: Any) -> int:
        return int(size)

    costs = costs_of_graph(graph, CostModel(load_profile("cpu"), False, "inductor"), hint)
    found = [
        value_bytes(node.meta["val"], hint)
        for node in graph.nodes
        if node.op == "call_function"
        and not is_getitem(node)
        and costs[node.name].materialises
        and (is_extern(node) or costs[node.name].duration_us > 0)
    ]
    return sorted(n for n in found if n >= LEAST_BYTES)


def loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ head).float(), targets)


def test_the_logits_of_a_language_model_are_never_held_in_float32() -> None:
    hidden = torch.randn(256, 64, dtype=torch.bfloat16)
    head = torch.randn(64, 2048, dtype=torch.bfloat16)
    targets = torch.randint(2048, (256,))
    written, graph = allocated(torch.func.grad(loss), hidden, head, targets)
    # the logits and their gradient
    assert written == [2 * 256 * 2048] * 2
    assert planned(graph) == written


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x.float() + 1, (512,))).to(x.dtype) @ weight


def gated(x: Tensor, weight: Tensor) -> Tensor:
    y = (x @ weight).float()
    return (F.silu(y) * y.cos()).relu().sum(1) + (y * y).mean(1)


@pytest.mark.parametrize("function", [normed, gated])
def test_planned_buffers_are_allocated_ones(function: Callable[..., Tensor]) -> None:
    written, graph = allocated(function, torch.randn(256, 512), torch.randn(512, 512))
    assert planned(graph) == written


def attention(x: Tensor, weight: Tensor) -> Tensor:
    scores = (x @ weight) @ x.t()
    return scores.masked_fill(scores < -2, -10.0).softmax(1) @ x


def exponentials(x: Tensor, weight: Tensor) -> Tensor:
    y = (x @ weight).exp() * 2  # has a heavy op in it, and two users
    return (y - y.sum(1, keepdim=True)).cos() @ weight


@pytest.mark.parametrize("function", [attention, exponentials])
def test_no_allocated_buffer_is_left_out(function: Callable[..., Tensor]) -> None:
    written, graph = allocated(function, torch.randn(256, 512), torch.randn(512, 512))
    # a CPU holds exponentials, but Inductor may hold those of a few rows alone
    more = Counter(planned(graph)) - Counter(written)
    assert not Counter(written) - Counter(planned(graph))
    assert more.total() <= 1
