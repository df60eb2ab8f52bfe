"""Logits that the user gets beside a loss in pieces are whole, and all that follows is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from split_losses import (
    IGNORED,
    IN_TWO_TURNS,
    RETURNING,
    WIDTH,
    WORDS,
    Head,
    InPieces,
    Loss,
    capped_logits_too,
    causal_lm_with_logits,
    compiled,
    furthest,
    gradients,
    logits_too,
)
from torch import fx

import offcompile
from offcompile.graph.lowering.lower import Lowering
from offcompile.runtime.moves import row_ops

BATCH, LENGTH, PIECES = 3, 14, 5
TOKENS = BATCH * LENGTH
aten = torch.ops.aten


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    return x, torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)


def of_loss_alone(run: Any, model: Head, used: int = 0) -> list[torch.Tensor]:
    """All outputs, and the gradients of one of them."""
    x, labels = batch()
    x.requires_grad_()
    model.zero_grad()
    found = run(x, labels)
    found[used].float().square().sum().backward()
    assert x.grad is not None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*(o.detach() for o in found), *grads, x.grad]


def large(half: fx.GraphModule) -> list[fx.Node]:
    """The nodes whose memory is as large as the logits."""
    made = [n for n in half.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return [n for n in made if n.meta["val"].untyped_storage().nbytes() >= TOKENS * WORDS * 4]


@pytest.mark.parametrize("loss", RETURNING, ids=lambda loss: loss.__name__)
def test_logits_and_gradients_are_those_of_the_whole(loss: Loss) -> None:
    """A loss of all outputs, which therefore all have a tangent."""
    model = Head(loss, bias=True)
    x, labels = batch()
    if loss is causal_lm_with_logits:
        labels[2, 5:] = IGNORED
    plain = gradients(model, model, x, labels)
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, exact_model, x.double(), labels)

    run, hooks = compiled(model, PIECES)
    found = gradients(run, model, x, labels)

    assert "its result returned" in hooks.said
    assert [t.dtype for t in found] == [t.dtype for t in plain]
    assert furthest(found, plain) < 1e-5
    assert furthest(found, exact) < 4 * furthest(plain, exact) + 1e-7


@pytest.mark.parametrize("loss", RETURNING, ids=lambda loss: loss.__name__)
def test_a_tangent_that_nobody_gave_counts_as_zeros(loss: Loss) -> None:
    model = Head(loss)
    # an output that was detached has no tangent to give
    for used in [i for i in (0, 1) if model(*batch())[i].requires_grad]:
        run, hooks = compiled(model, PIECES)
        found = of_loss_alone(run, model, used)
        assert hooks.splits
        assert furthest(found, of_loss_alone(model, model, used)) < 1e-5


def test_only_the_logits_are_whole() -> None:
    run, hooks = compiled(Head(logits_too), PIECES)
    run(*batch())[0].backward()
    ((forward, backward),) = hooks.made
    assert {_made_by(n) for n in large(forward)} == {aten.empty.memory_format}
    assert all(_made_by(n).startswith("placeholder") for n in large(backward))
    tangents = [n for n in backward.graph.find_nodes(op="placeholder") if "tangent" in n.name]
    assert sorted(t.meta["val"].numel() for t in tangents) == [1, 1]


def _made_by(node: fx.Node) -> Any:
    while node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.target if node.op == "call_function" else node.op


def test_no_zeros_are_made_for_a_whole_tangent(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor | None] = []
    issue = row_ops.tickets.issue_owned
    monkeypatch.setattr(
        row_ops.tickets, "issue_owned", lambda t: (given.append(t.value), issue(t))[1]
    )
    run, _ = compiled(Head(logits_too), PIECES)
    run(*batch())[0].backward()
    assert given == [None]
    loss, logits = run(*batch())
    (loss + logits.sum()).backward()
    assert given[1] is not None


def test_backward_multiplies_again_only_for_what_the_user_did_not_get() -> None:
    for loss, again in ((logits_too, False), (capped_logits_too, True)):
        run, hooks = compiled(Head(loss), PIECES)
        run(*batch())[0].backward()
        assert hooks.seen[0].found is not None
        assert [r.reruns for r in hooks.seen[0].found.regions] == [again], loss


def test_float16_keeps_its_scale() -> None:
    model = Head(logits_too).half()
    x, labels = batch()
    plain = gradients(model, model, x.half(), labels)
    run, hooks = compiled(model, PIECES)
    assert furthest(gradients(run, model, x.half(), labels), plain) < 2e-2
    assert hooks.splits


def test_a_second_backward_and_one_after_a_dropped_output() -> None:
    model = Head(logits_too)
    run, _ = compiled(model, PIECES)
    loss, logits = run(*batch())
    del logits
    loss.backward(retain_graph=True)
    assert model.head.weight.grad is not None
    once = model.head.weight.grad.clone()
    loss.backward()
    assert furthest([model.head.weight.grad], [2 * once]) < 1e-6


def test_logits_changed_before_backward_are_refused() -> None:
    run, _ = compiled(Head(logits_too), PIECES)
    loss, logits = run(*batch())
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


#: `test_lower_order` always runs Inductor with an order of ours, `test_split_chains` with pieces
@pytest.mark.soak
@pytest.mark.parametrize("loss", [causal_lm_with_logits, *IN_TWO_TURNS], ids=lambda f: f.__name__)
def test_inductor_keeps_the_order_of_two_turns(loss: Loss) -> None:
    model = Head(loss)
    x, labels = batch()
    run, hooks = compiled(model, PIECES, "inductor")
    found = gradients(run, model, x, labels)
    assert hooks.splits
    assert furthest(found, gradients(model, model, x, labels)) < 1e-5


@pytest.mark.parametrize(
    "lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)]
)
def test_the_backend_returns_logits(lowering: Lowering) -> None:
    torch._dynamo.reset()
    model = Head(logits_too)
    options = {"lowering": lowering, "split": PIECES, "hardware": "cpu", "verify": True}
    run = torch.compile(model, backend="offcompile", options=options)
    found = of_loss_alone(run, model)
    report = offcompile.reports()[-1]
    assert "its result returned" in report.split
    assert report.verified is not None
    assert report.verified.compared["backward"]
    assert furthest(found, of_loss_alone(model, model)) < 1e-5


def test_hooks_that_ask_for_one_piece_get_the_whole() -> None:
    run, hooks = compiled(Head(logits_too), 1)
    run(*batch())[0].backward()
    assert isinstance(hooks, InPieces)
    assert not any(n.target is row_ops.put_rows for half in hooks.made[0] for n in half.graph.nodes)
