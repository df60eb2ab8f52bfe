"""Checkpoints of the user's own inside of what is compiled: the same bits, whatever leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from lengths import some
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import offcompile

WIDTH, ROWS, STEPS = 64, 96, 3
Wrap = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Dropping(nn.Module):
    """x + b(dropout(relu(a(x))))"""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(functional.dropout(torch.relu(self.a(x)), 0.1, self.training))


class Smooth(nn.Module):
    """Whose inside is cheap to make again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(functional.gelu(torch.tanh(self.a(x))))


class Attending(nn.Module):
    """Attention that drops some of what it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(4, -1, 3, WIDTH).unbind(2)
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return x + self.out(seen.reshape(x.shape))


class Normed(nn.Module):
    """A buffer that forward updates, twice where a checkpoint runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.dropout(torch.tanh(self.a(self.norm(x))), 0.3, self.training)


def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)


def careless(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Without the random state of the first run."""
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def nested(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, functional.dropout(x, 0.1), use_reentrant=False)

    return checkpoint(inner, x, use_reentrant=False)


def products_saved(context: object, op: object, *args: object, **kwargs: object) -> object:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    saved = op in products
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    contexts = partial(create_selective_checkpoint_contexts, products_saved)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], wrap: Wrap, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.wrap, self.breaks = wrap, breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.wrap(block, x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x.square().mean()


def trained(net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Losses, gradients of inputs, and at the end weights and buffers."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        loss = run(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        seen += [loss.detach(), x.grad]
    return [*seen, *(t.detach().clone() for t in net.state_dict().values())]


def runs_of(make: Callable[[], nn.Module], by_block: bool = False, **options: object) -> tuple:
    """The same training by the plain backend, and with tensors that leave."""
    # nothing is measured, and plans need not be good here
    options = {"hardware": "cpu", "seconds": 0.1, **options}
    found = []
    for backend in ({"backend": "aot_eager"}, {"backend": "offcompile", "options": options}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = make()
        if by_block:
            for block in net.blocks:
                block.compile(**backend)
            found.append(trained(net, net))
        else:
            found.append(trained(net, torch.compile(net, **backend)))
    return tuple(found)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def moved() -> int:
    counted = offcompile.counters()
    return counted["moves"] + counted["direct_reads"]


BLOCKS = {"dropping": Dropping, "attending": Attending, "normed": Normed}
WRAPS = (plain, reentrant, careless, nested, selective)


#: one block by each way, the others by those that differ for them; `make soak` has all
ALWAYS = ("dropping-minimum",)
BETWEEN = {
    ("normed-1MiB", reentrant),
    ("attending-minimum", nested),
}


@pytest.mark.parametrize(
    ("block", "memory", "wrap"),
    [
        pytest.param(
            *case.split("-"),
            wrap,
            id=f"{case}-{wrap.__name__}",
            marks=() if case in ALWAYS or (case, wrap) in BETWEEN else pytest.mark.soak,
        )
        for case in ("dropping-minimum", "dropping-1MiB", "attending-minimum", "normed-1MiB")
        for wrap in WRAPS
    ],
)
def test_a_checkpoint_in_the_graph_gives_the_same_bits(block: str, memory: str, wrap: Wrap) -> None:
    before = moved()
    make = partial(Net, BLOCKS[block], wrap)
    plainly, ours = runs_of(make, memory=memory, lowering="aot_eager")
    assert same(plainly, ours)
    assert memory != "minimum" or moved() > before


def name_of(wrap: Wrap) -> str:
    return wrap.__name__


@pytest.mark.parametrize("wrap", some([plain, reentrant, selective], selective), ids=name_of)
def test_checkpoints_over_several_graphs_give_the_same_bits(wrap: Wrap) -> None:
    make = partial(Net, Dropping, wrap, breaks=True)
    plainly, ours = runs_of(make, memory="minimum", lowering="aot_eager")
    assert same(plainly, ours)


@pytest.mark.parametrize("wrap", some([plain, reentrant], reentrant), ids=name_of)
def test_blocks_compiled_inside_of_an_eager_checkpoint_give_the_same_bits(wrap: Wrap) -> None:
    make = partial(Net, Dropping, wrap)
    plainly, ours = runs_of(make, by_block=True, memory="minimum", lowering="aot_eager")
    assert same(plainly, ours)


@pytest.mark.parametrize("wrap", some([plain, selective], selective), ids=name_of)
def test_our_recomputation_beside_a_checkpoint_gives_the_same_bits(wrap: Wrap) -> None:
    """One block is the user's to run again, the others ours."""

    def first_only(block: nn.Module, x: torch.Tensor, net: Net) -> torch.Tensor:
        return wrap(block, x) if block is net.blocks[0] else block(x)

    def make() -> nn.Module:
        net = Net(Smooth, plain)
        net.blocks.insert(0, Dropping())
        net.wrap = partial(first_only, net=net)
        return net

    plainly, ours = runs_of(make, memory="minimum", policy="recompute", lowering="aot_eager")
    assert same(plainly, ours)
    assert any(report.plan.recomputes for report in offcompile.reports()[-2:])


def test_a_verified_step_knows_random_states_from_gradients() -> None:
    make = partial(Net, Dropping, plain)
    plainly, ours = runs_of(make, memory="minimum", lowering="aot_eager", verify=True)
    assert same(plainly, ours)
    verified = offcompile.reports()[-1].verified
    assert verified is not None and not verified.differing
    assert verified.compared.keys() == {"forward", "backward"}
