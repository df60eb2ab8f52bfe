"""A loss over many words in pieces is the same loss, and its logits never exist as a whole."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from lengths import some
from split_losses import (
    AT_ONCE,
    IGNORED,
    IGNORING,
    IN_TWO_TURNS,
    LEFT_ALONE,
    WIDTH,
    WORDS,
    Head,
    InPieces,
    Loss,
    compiled,
    furthest,
    gradients,
    summed,
)

BATCH, LENGTH, PIECES = 3, 14, 5
TOKENS = BATCH * LENGTH


def batch(loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    labels = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    if loss in IGNORING:
        labels[0, 3] = IGNORED
        labels[2, 5:] = IGNORED
    return x, labels


def named(loss: Loss) -> str:
    return loss.__name__


@pytest.mark.parametrize("bias", some([False, True], True), ids=["no bias", "bias"])
@pytest.mark.parametrize("loss", [*AT_ONCE, *IN_TWO_TURNS], ids=named)
def test_a_split_loss_is_the_same_loss(loss: Loss, bias: bool) -> None:
    model = Head(loss, bias)
    x, labels = batch(loss)
    plain = gradients(model, model, x, labels)
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, exact_model, x.double(), labels)

    run, hooks = compiled(model, PIECES)
    found = gradients(run, model, x, labels)

    assert hooks.splits
    assert furthest(found, plain) < 1e-5
    assert furthest(found, exact) < 4 * furthest(plain, exact) + 1e-7
    (halves,) = hooks.made
    assert hooks.seen[0].found is not None
    at_once = [region.at_once for region in hooks.seen[0].found.regions]
    assert at_once == [loss in AT_ONCE] * len(at_once)
    piece = -(-TOKENS // PIECES)
    small = max(WORDS * WIDTH, TOKENS * WIDTH)
    assert hooks.largest_elements <= max(piece * WORDS, small)
    assert len(_products(halves[0])) > PIECES


@pytest.mark.parametrize("loss", LEFT_ALONE, ids=named)
def test_what_needs_all_tokens_is_left_alone(loss: Loss) -> None:
    model = Head(loss)
    x, labels = batch(loss)
    plain = gradients(model, model, x, labels)

    run, hooks = compiled(model, PIECES)

    assert furthest(gradients(run, model, x, labels), plain) < 1e-6
    assert not hooks.splits


def test_at_once_multiplies_by_the_weight_as_often_as_the_whole() -> None:
    """One product for the logits and two for gradients, over all pieces together."""
    loss = summed
    model = Head(loss)
    x, labels = batch(loss)
    sizes = []
    for pieces in (1, PIECES):
        run, hooks = compiled(model, pieces)
        gradients(run, model, x, labels)
        sizes.append(sum(_work(node) for half in hooks.made[0] for node in _products(half)))
    assert sizes[0] == sizes[1]


def test_pieces_run_one_after_the_other() -> None:
    loss = summed
    model = Head(loss)
    x, labels = batch(loss)
    run, hooks = compiled(model, PIECES)
    gradients(run, model, x, labels)
    forward, backward = hooks.made[0]
    place = {node: i for i, node in enumerate(forward.graph.nodes)}
    logits = [node for node in _products(forward) if node.meta["val"].shape[-1] == WORDS]
    logits = [node for node in logits if node.meta["val"].shape[0] != WIDTH]
    assert len(logits) == PIECES
    for node, after in itertools.pairwise(logits):
        assert max(place[user] for user in node.users) < place[after]
    assert not [node for node in _products(backward) if WORDS in node.meta["val"].shape]


def test_gradients_of_bfloat16_are_summed_in_float32() -> None:
    """Many small sums, which bfloat16 would lose beside a large one."""
    loss = summed
    model = Head(loss).bfloat16()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 32, WIDTH, generator=generator).bfloat16()
    labels = torch.randint(0, WORDS, (64, 32), generator=generator)
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, exact_model, x.double(), labels)
    plain = gradients(model, model, x, labels)

    run, hooks = compiled(model, 64)
    found = gradients(run, model, x, labels)

    assert [t.dtype for t in found] == [t.dtype for t in plain]
    assert furthest(found, exact) < 2 * furthest(plain, exact)
    sums = [node for node in hooks.made[0][0].graph.nodes if node.target is _add]
    assert {node.meta["val"].dtype for node in sums} == {torch.float32}


_add = torch.ops.aten.add.Tensor


def test_half_precision_keeps_its_scaled_tangent() -> None:
    """With a tangent of one, small gradients would be nothing in float16."""
    loss = summed
    model = Head(loss).half()
    x, labels = batch(loss)
    run, hooks = compiled(model, PIECES)
    plain = gradients(model, model, x.half(), labels)
    assert furthest(gradients(run, model, x.half(), labels), plain) < 2e-2
    assert hooks.seen[0].found is not None
    assert [region.at_once for region in hooks.seen[0].found.regions] == [False]


def test_frozen_heads_and_inputs_get_no_gradients() -> None:
    model = Head(summed)
    model.head.requires_grad_(False)
    x, labels = batch(summed)
    plain = gradients(model, model, x, labels)
    run, hooks = compiled(model, PIECES)
    assert furthest(gradients(run, model, x, labels), plain) < 1e-5
    assert hooks.splits


def test_tied_weights_get_one_gradient() -> None:
    class Tied(Head):
        def __init__(self) -> None:
            super().__init__(summed)
            self.words = torch.nn.Embedding(WORDS, WIDTH)
            self.head.weight = self.words.weight

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().forward(x + self.words(labels), labels)

    model = Tied()
    x, labels = batch(summed)
    plain = gradients(model, model, x, labels)
    run, hooks = compiled(model, PIECES)
    assert furthest(gradients(run, model, x, labels), plain) < 1e-5
    assert hooks.splits


def test_a_second_backward_finds_what_the_first_one_found() -> None:
    model = Head(summed)
    x, labels = batch(summed)
    run, _ = compiled(model, PIECES)
    loss = run(x, labels)
    loss.backward(retain_graph=True)
    assert model.head.weight.grad is not None
    once = model.head.weight.grad.clone()
    loss.backward()
    assert furthest([model.head.weight.grad], [2 * once]) < 1e-6


def test_a_tangent_of_nothing_gives_gradients_of_nothing() -> None:
    model = Head(summed)
    x, labels = batch(summed)
    run, _ = compiled(model, PIECES)
    (run(x, labels) * 0).backward()
    assert model.head.weight.grad is not None
    assert not model.head.weight.grad.any()


def _products(half: Any) -> list[Any]:
    aten = torch.ops.aten
    kinds = (aten.mm.default, aten.addmm.default)
    return [node for node in half.graph.nodes if node.target in kinds]


def _work(node: Any) -> int:
    a, b = (operand.meta["val"].shape for operand in node.args[-2:])
    return a[0] * a[1] * b[1]  # type: ignore[no-any-return]


def test_hooks_that_ask_for_pieces_are_told_of_them() -> None:
    from offcompile.graph.lowering.lower import SplitHooks

    assert isinstance(InPieces(2), SplitHooks)
