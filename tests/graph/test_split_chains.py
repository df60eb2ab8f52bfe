"""Chains in the middle of a model, such as MLPs, run piece by piece where they are the largest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from split_losses import compiled, furthest
from torch import nn
from torch.nn import functional as F

WIDTH, INNER, LAYERS, PIECES = 16, 64, 2, 5
BATCH, LENGTH = 3, 14
TOKENS = BATCH * LENGTH


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Gated(Mlp):
    """Resembles Llama: its norm consists of ops that work on each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.norm.weight
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Experts(Mlp):
    """Dense experts, weighed for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.more = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = F.softmax(self.router(x), -1)
        parts = [share[..., i : i + 1] * m(x) for i, m in enumerate(self.more)]
        return x + torch.stack(parts).sum(0)


class Mixed(Mlp):
    """Mixes tokens before each chain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(*x.shape[:2], 2, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)
        return super().forward(x + mixed)


class Fused(Mlp):
    """Computes its gate and what it gates in one product, as Phi-3 does."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Routed(nn.Module):
    """Each token asks two of several experts, which one product computes, sorted by expert."""

    COUNT, ASKED = 5, 2

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, self.COUNT)
        self.both = nn.Parameter(torch.randn(self.COUNT, 2 * INNER, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(self.COUNT, WIDTH, INNER) / INNER**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.reshape(-1, WIDTH)
        share, asked = self.router(h).softmax(-1).topk(self.ASKED)
        expert, order = asked.flatten().sort()
        token = order // self.ASKED
        ends = torch.histc(expert.float(), self.COUNT, 0, self.COUNT - 1).cumsum(0).int()
        made = self.experts(h[token], expert, ends) * share.flatten()[order, None]
        return x + torch.zeros_like(h).index_add(0, token, made).view(x.shape)

    def experts(self, x: torch.Tensor, expert: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, up = self.product(x, self.both, expert, ends).chunk(2, dim=-1)
        return self.product(F.silu(gate) * up, self.down, expert, ends)

    @staticmethod
    def product(
        x: torch.Tensor, weights: torch.Tensor, expert: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        if x.dtype == torch.float64:  # torch has no such kernel
            return torch.einsum("td,tfd->tf", x, weights[expert])
        return torch._grouped_mm(x, weights.transpose(1, 2), ends)


class Biased(Routed):
    """Resembles GPT-OSS: biases of experts, gate and value in turn, no wider than the model."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(self.COUNT, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(self.COUNT, WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(self.COUNT, 2 * WIDTH))

    def experts(self, x: torch.Tensor, expert: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        both = self.product(x, self.both, expert, ends) + self.bias[expert]
        gate, up = both[..., ::2], both[..., 1::2]
        return self.product((up + 1) * gate * torch.sigmoid(gate), self.down, expert, ends)


class Attending(Mlp):
    """Computes queries, keys and values in one product, of which all parts leave."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return super().forward(x + self.out(mixed))


class Leaky(Mlp):
    """Its inner tensor is normalized by the largest element of all tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(self.norm(x)))
        return x + self.down(inner / inner.abs().amax())  # type: ignore[no-any-return]


class Deep(nn.Module):
    def __init__(self, kind: type[nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(kind() for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


def gradients(run: Any, model: Deep, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    loss = run(x)
    loss.backward()
    assert x.grad is not None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads, x.grad]


def exactly(model: Deep, x: torch.Tensor) -> list[torch.Tensor]:
    model = copy.deepcopy(model).double()
    return gradients(model, model, x.double())


def batch(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, WIDTH, generator=generator)


def counted(hooks: Any) -> int:
    found = hooks.seen[0].found
    return 0 if found is None else len(found.regions)


KINDS = [Mlp, Gated, Experts, Mixed, Fused, Attending]


@pytest.mark.parametrize("kind", KINDS)
def test_each_chain_runs_in_pieces(kind: type[Mlp]) -> None:
    model, x = Deep(kind), batch(BATCH, LENGTH)
    plain = gradients(model, model, x)
    exact = exactly(model, x)

    run, hooks = compiled(model, PIECES)
    found = gradients(run, model, x)

    assert counted(hooks) == LAYERS * (2 if kind is Experts else 1)
    assert "pieces, computed again in backward" in hooks.said
    assert hooks.largest_elements < TOKENS * INNER
    assert furthest(found, plain) < 1e-5
    assert furthest(found, exact) < 4 * furthest(plain, exact) + 1e-7


@pytest.mark.parametrize(
    ("kind", "rows", "pieces"),
    [
        pytest.param(Routed, 12, 2, marks=pytest.mark.soak),
        (Routed, 12, 7),
        pytest.param(Routed, 3, 90, marks=pytest.mark.soak),
        (Biased, 12, 7),
    ],
)
def test_experts_that_one_product_computes_run_in_pieces(
    kind: type[Routed], rows: int, pieces: int
) -> None:
    """Pieces end within groups, hold several of them, or none of most."""
    model, x = Deep(kind, 2).bfloat16(), batch(rows, LENGTH).bfloat16()
    plain, exact = gradients(model, model, x), exactly(model, x)
    run, hooks = compiled(model, pieces)
    found = gradients(run, model, x)
    assert counted(hooks) == 2
    asked = rows * LENGTH * kind.ASKED
    assert hooks.largest_elements < asked * model.layers[0].both.shape[1]  # type: ignore[union-attr]
    assert [t.dtype for t in found] == [t.dtype for t in plain]
    assert furthest(found, exact) < 1.5 * furthest(plain, exact)


def test_a_chain_that_mixes_tokens_is_left_alone() -> None:
    model, x = Deep(Leaky), batch(BATCH, LENGTH)
    plain = gradients(model, model, x)
    run, hooks = compiled(model, PIECES)
    assert furthest(gradients(run, model, x), plain) < 1e-5
    assert not hooks.splits


def test_inductor_runs_chains_in_pieces() -> None:
    model, x = Deep(Mlp, 1), batch(BATCH, LENGTH)
    plain = gradients(model, model, x)
    run, hooks = compiled(model, 2, "inductor")
    assert furthest(gradients(run, model, x), plain) < 1e-5
    assert counted(hooks) == 1


def test_gradients_of_bfloat16_are_summed_in_float32() -> None:
    model, x = Deep(Gated).bfloat16(), batch(16, 16).bfloat16()
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, exact_model, x.double())
    plain = gradients(model, model, x)
    run, hooks = compiled(model, 16)
    found = gradients(run, model, x)
    assert counted(hooks) == LAYERS
    assert [t.dtype for t in found] == [t.dtype for t in plain]
    assert furthest(found, exact) < 2 * furthest(plain, exact)


@pytest.mark.long
@settings(deadline=None, max_examples=4, phases=[Phase.generate])
@given(
    st.sampled_from([Mlp, Gated, Mixed]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 4),
    st.integers(3, 17),
    st.integers(2, 60),
)
def test_pieces_are_no_worse_than_the_whole(
    kind: type[Mlp], dtype: torch.dtype, rows: int, length: int, pieces: int
) -> None:
    model, x = Deep(kind).to(dtype), batch(rows, length).to(dtype)
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, exact_model, x.double())
    plain = gradients(model, model, x)
    run, hooks = compiled(model, pieces)
    found = gradients(run, model, x)
    assert counted(hooks) == LAYERS
    beside = 1e-14 if dtype == torch.float64 else 1e-6
    assert furthest(found, exact) <= 4 * furthest(plain, exact) + beside
