"""Graphs offer a gradient when it is made, and never before the last op that reads its weight."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from captured import Perceptron, capture
from test_rewrite import Moving
from torch import fx, nn

from offcompile.graph.annotate import annotate
from offcompile.graph.graphs import Graphs, outputs_of, root_of, storage_key
from offcompile.graph.in_backward_updates import Offers, with_early_gradients, with_offers
from offcompile.graph.sizes import hint_of
from offcompile.runtime.states import update_ops

WIDTH, DEPTH = 64, 3


class Products(nn.Module):
    """Layers without bias: the gradient of a weight is made before that of the layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@cache
def captured(model: type[nn.Module]) -> Graphs:
    (graphs,) = capture(model(), torch.randn(8, WIDTH))
    return graphs


def arguments_of(graphs: Graphs) -> frozenset[int]:
    assert graphs.parameters
    return frozenset(graphs.parameters)


def nodes_of(offers: Offers) -> list[fx.Node]:
    assert offers.graphs.backward is not None
    return list(offers.graphs.backward.graph.nodes)


def weights_of(offers: Offers, graphs: Graphs) -> dict[fx.Node, fx.Node]:
    """Map each offer to its weight, by the output that it stands for."""
    assert offers.graphs.backward is not None
    outputs = outputs_of(offers.graphs.backward)
    given = list(graphs.forward.graph.find_nodes(op="placeholder"))
    return {outputs[i]: given[i] for i in offers.outputs}


@pytest.mark.parametrize("model", [Products, Perceptron])
@pytest.mark.parametrize("planned", [True, False], ids=["to an optimizer", "as they are"])
def test_no_op_reads_a_weight_behind_its_offer(model: type[nn.Module], planned: bool) -> None:
    graphs = captured(model)
    found, wanted = annotate(graphs, {}, hint_of(), 1), arguments_of(graphs)
    if planned:
        offers = with_offers(graphs, found, wanted, hint_of(), 4096, "")
    else:
        offers = with_early_gradients(graphs, graphs, found, wanted, "")
    assert offers is not None
    nodes, weights = nodes_of(offers), weights_of(offers, graphs)
    assert len(weights) >= DEPTH
    for offer, weight in weights.items():
        key = storage_key(weight.meta["val"])
        readers = [
            node
            for node in nodes
            if node.op == "call_function"
            and any(
                isinstance(n.meta.get("val"), torch.Tensor) and storage_key(n.meta["val"]) == key
                for n in node.all_input_nodes
            )
        ]
        assert all(nodes.index(reader) < nodes.index(offer) for reader in readers)
    read = {storage_key(w.meta["val"]) for w in weights.values()}
    standing = {storage_key(n.meta["val"]) for n in nodes if n.op == "placeholder"}
    assert read & standing  # or nothing would have been read


def test_rewritten_graphs_offer_a_gradient_as_soon_as_it_is_made() -> None:
    graphs = captured(Products)
    moving = Moving("", 0.5, parameters=graphs.parameters)
    moving.plan(graphs)
    assert moving.made is not None and moving.annotated is not None
    offers = with_early_gradients(
        moving.made.graphs, graphs, moving.annotated, arguments_of(graphs), ""
    )
    assert offers is not None and len(offers.outputs) == DEPTH
    nodes = nodes_of(offers)
    for offer in weights_of(offers, graphs):
        assert offer.target is update_ops.offer
        made = root_of(offer.all_input_nodes[1])
        between = nodes[nodes.index(made) + 1 : nodes.index(offer)]
        assert all(root_of(node) is made for node in between), between
    (begun,) = offers.graphs.forward.graph.find_nodes(
        op="call_function", target=update_ops.begin_call
    )
    assert begun.args[1:] == (True, False)  # counted, and no update until the graph is over
