"""Rewrites negative log likelihood as row-wise ops, so that its sums over tokens are separate ops.

    loss, weight = nll_loss_forward(scores, labels, …)

        valid = labels != ignored; row = where(valid, -scores[i, labels[i]] · weight, 0)
        weight = Σ where(valid, weight, 0); loss = Σ row / weight

The total weight depends only on labels, so it is available to any piece's backward before any piece
has run.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .builder import Builder
from .layout import args_of, shape_of

aten = torch.ops.aten
MEAN, SUMMED = 1, 2


def take_apart_losses(graph: fx.Graph, build: Builder) -> None:
    """Rewrite each loss of the graph for which this is possible; the others stay."""
    for node in list(graph.nodes):
        if node.target is aten.nll_loss_forward.default and _is_plain(
            args_of(node)[0], args_of(node)[1]
        ):
            with graph.inserting_before(node):
                _forward(node, build)
        elif node.target is aten.nll_loss_backward.default and _is_plain(
            args_of(node)[1], args_of(node)[2]
        ):
            with graph.inserting_before(node):
                _backward(node, build)
    graph.eliminate_dead_code()


def _is_plain(scores: fx.Node, labels: fx.Node) -> bool:
    return len(shape_of(scores)) == 2 and len(shape_of(labels)) == 1


class _Labels:
    """Nodes with each row's validity, its label (0 if invalid) and its weight."""

    def __init__(
        self, labels: fx.Node, weight: fx.Node | None, ignored: int, dtype: Any, build: Builder
    ) -> None:
        self.build, self.dtype = build, dtype
        self.valid = build(aten.ne.Scalar, labels, ignored)
        self.zero = build(aten.full.default, [], 0, dtype=dtype, device=build.device(labels))
        nothing = build(
            aten.full.default, [], 0, dtype=labels.meta["val"].dtype, device=build.device(labels)
        )
        self.safe = build(aten.where.self, self.valid, labels, nothing)
        self.index = build(aten.unsqueeze.default, self.safe, 1)
        self.weight = None
        if weight is not None:
            self.weight = build(aten.index.Tensor, weight, [self.safe])

    def total(self) -> fx.Node:
        build = self.build
        if self.weight is None:
            count = build(aten.sum.default, self.valid)
            return build(aten._to_copy.default, count, dtype=self.dtype)
        counted = build(aten.where.self, self.valid, self.weight, self.zero)
        return build(aten.sum.default, counted)


def _forward(node: fx.Node, build: Builder) -> None:
    scores, labels, weight, reduction, ignored = args_of(node)
    known = _Labels(labels, weight, ignored, scores.meta["val"].dtype, build)
    picked = build(aten.gather.default, scores, 1, known.index)
    row = build(aten.neg.default, build(aten.squeeze.dim, picked, 1))
    if known.weight is not None:
        row = build(aten.mul.Tensor, row, known.weight)
    loss = build(aten.where.self, known.valid, row, known.zero)
    total = known.total() if reduction == MEAN or _reads(node, 1) else known.zero
    if reduction in (MEAN, SUMMED):
        loss = build(aten.sum.default, loss)
    if reduction == MEAN:
        loss = build(aten.div.Tensor, loss, total)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(loss if args_of(user)[1] == 0 else total)


def _reads(node: fx.Node, part: int) -> bool:
    return any(args_of(user)[1] == part for user in node.users)


def _backward(node: fx.Node, build: Builder) -> None:
    gradient, scores, labels, weight, reduction, ignored, total = args_of(node)
    dtype = scores.meta["val"].dtype
    known = _Labels(labels, weight, ignored, dtype, build)
    if reduction == MEAN:
        gradient = build(aten.div.Tensor, gradient, total)
    row = build(aten.neg.default, gradient)
    if known.weight is not None:
        row = build(aten.mul.Tensor, known.weight, row)
    row = build(aten.where.self, known.valid, row, known.zero)
    nothing = build(aten.zeros_like.default, scores)
    made = build(aten.scatter.src, nothing, 1, known.index, build(aten.unsqueeze.default, row, 1))
    node.replace_all_uses_with(made)
