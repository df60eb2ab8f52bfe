"""Laws of a loss in pieces, for any shape, type, pattern of ignored labels and number of pieces."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from split_losses import (
    IGNORED,
    WIDTH,
    WORDS,
    Head,
    Loss,
    cast_logits_too,
    causal_lm,
    causal_lm_with_logits,
    compiled,
    furthest,
    gradients,
    nano_gpt,
    per_token,
    shifted_logits,
    smoothed,
    soft_capped,
    z_loss,
)

from offcompile.graph.split.layout import Rows, Space, permuted, reshaped
from offcompile.graph.split.pieces import bounds

LOSSES: tuple[Loss, ...] = (
    causal_lm,
    causal_lm_with_logits,
    cast_logits_too,
    shifted_logits,
    nano_gpt,
    smoothed,
    soft_capped,
    z_loss,
    per_token,
)
#: how many times further from float64 than the whole a loss in pieces may be
NO_WORSE = {torch.float32: (4, 1e-6), torch.float64: (4, 1e-14), torch.bfloat16: (2, 1e-2)}


Drawn = tuple[Loss, torch.dtype, int, int, int, bool, list[int]]
DRAWN = st.tuples(
    st.sampled_from(LOSSES),
    st.sampled_from(list(NO_WORSE)),
    st.integers(1, 4),
    st.integers(3, 17),
    st.integers(2, 60),
    st.booleans(),
    st.lists(st.integers(0, 67), max_size=30),
)


@pytest.mark.long
@settings(deadline=None, max_examples=6, phases=[Phase.generate])
@given(DRAWN)
def test_pieces_are_no_worse_than_the_whole(drawn: Drawn) -> None:
    check_pieces(*drawn)


@pytest.mark.soak
@settings(deadline=None, max_examples=40, phases=[Phase.generate])
@given(DRAWN)
def test_pieces_of_many_are_no_worse_than_the_whole(drawn: Drawn) -> None:
    check_pieces(*drawn)


def check_pieces(
    loss: Loss,
    dtype: torch.dtype,
    batch: int,
    length: int,
    pieces: int,
    bias: bool,
    ignored: list[int],
) -> None:
    exact_model = Head(loss, bias).to(dtype).double()
    model = copy.deepcopy(exact_model).to(dtype)
    generator = torch.Generator().manual_seed(batch * length)
    x = torch.randn(batch, length, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, WORDS, (batch, length), generator=generator)
    if loss not in (nano_gpt, cast_logits_too):
        flat = labels.view(-1)
        flat[[i for i in ignored if 2 <= i < flat.numel()]] = IGNORED
    exact = gradients(exact_model, exact_model, x.double(), labels)
    plain = gradients(model, model, x, labels)

    run, hooks = compiled(model, pieces)
    found = gradients(run, model, x, labels)

    assert hooks.splits
    times, beside = NO_WORSE[dtype]
    assert [t.dtype for t in found] == [t.dtype for t in plain]
    assert furthest(found, exact) <= times * furthest(plain, exact) + beside


@given(st.integers(1, 500), st.integers(1, 600))
def test_pieces_cover_all_tokens_once(tokens: int, size: int) -> None:
    found = bounds(tokens, size)
    assert [i for start, end in found for i in range(start, end)] == list(range(tokens))
    assert {end - start for start, end in found[:-1]} <= {size}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.lists(st.integers(1, 4), max_size=2))
def test_a_view_keeps_its_tokens_together(tokens: list[int], others: list[int]) -> None:
    count = math.prod(tokens)
    shape, flat = (*tokens, *others), (count, *others)
    rows = Rows(0, len(tokens), Space(count))
    once = reshaped(rows, shape, flat)
    assert once is not None
    assert math.prod(once.tokens(flat)) == count
    assert math.prod(once.others(flat)) == math.prod(others)
    back = reshaped(once, flat, shape)
    assert back is not None
    assert math.prod(back.tokens(shape)) == count


@given(st.permutations(range(4)), st.integers(0, 3), st.integers(1, 4))
def test_a_permutation_never_tears_tokens_apart(order: list[int], low: int, width: int) -> None:
    high = min(4, low + width)
    found = permuted(Rows(low, high, Space(1)), order)
    inside = [d for d in order if low <= d < high]
    together = [order.index(d) for d in inside]
    keeps = inside == sorted(inside) and together == list(range(together[0], together[-1] + 1))
    assert (found is not None) == keeps
    if found is not None:
        assert list(order[found.low : found.high]) == list(range(low, high))
