"""Training with weights and gradients on the host is the plain training, bit for bit.

Each test trains a model as it is, then the same model compiled with all that may leave on the host,
by a policy that uses weights in place, by one that copies them to the device, or by both in turn.
"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offcompile
from offcompile.runtime.weights import is_on_host

WIDTH, ROWS, WORDS = 48, 8, 64
#: how ops get at weights: in place, or from copies
IN_PLACE, COPIED = "joint", "gradient_reserve"
ACCESS = (IN_PLACE, COPIED)

Train = Callable[[Any, Any], list[Tensor]]
Build = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0
    torch.set_num_threads(threads)


class Pair(nn.Module):
    """Two layers of 9 KiB, with a norm and biases that are too small to move."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def pair() -> Pair:
    return Pair()


def seeded(build: Build) -> Any:
    torch.manual_seed(0)
    return build()


def batch(seed: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int) -> Tensor:
    return torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(seed))


def ours(model: Any, policy: str = COPIED, **more: Any) -> Any:
    options = {"memory": "minimum", "lowering": "aot_eager", "hardware": "cpu"}
    options |= {"policy": policy, "seconds": 0.05}
    return torch.compile(model, backend="offcompile", options=options, **more)


def loss_of(out: Tensor) -> Tensor:
    return (out.float() * torch.arange(out.numel()).view(out.shape).cos()).sum()


def results(model: nn.Module) -> list[Tensor]:
    """Gradients and all that a state_dict has."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*grads, *model.state_dict().values())]


def on_host(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if is_on_host(p)}


def descend(model: nn.Module) -> None:
    """SGD by hand, dropping gradients."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05)
                p.grad = None


def same(
    train: Train,
    build: Build = pair,
    hosted: set[str] | None = None,
    against: str | None = None,
    access: tuple[str, ...] = ACCESS,
    **more: Any,
) -> None:
    """All tensors that `train(forward, model)` gives, and the model it leaves, are the plain ones.

    `hosted`: names of the parameters that must be on the host after it; None: some are. `against`:
    the backend of the plain model, where that alone changes last bits; None: it is not compiled.
    """
    plain = seeded(build)
    forward = plain if against is None else torch.compile(plain, backend=against)
    expected = [*train(forward, plain), *results(plain)]
    for policy in access:
        torch._dynamo.reset()
        model = seeded(build)
        found = [*train(ours(model, policy, **more), model), *results(model)]
        where = on_host(model)
        assert where == hosted if hosted is not None else where, f"{policy}: {where} on the host"
        assert len(found) == len(expected)
        for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert mine.dtype == theirs.dtype and mine.device == theirs.device
            assert mine.stride() == theirs.stride(), f"{policy}, tensor {i}"
            assert torch.equal(mine, theirs), f"{policy}, tensor {i}"
        assert [p.requires_grad for p in model.parameters()] == [
            p.requires_grad for p in plain.parameters()
        ]


LAYERS = {"up.weight", "down.weight"}


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
def test_different_micro_batches_add_up(to_none: bool) -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen: list[Tensor] = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            for micro in range(3):
                (loss_of(forward(batch(10 * step + micro))) / 3).backward()
                seen += results(model)
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
        return seen

    same(train, hosted=LAYERS)


def test_gradients_are_ordinary_tensors_on_the_host() -> None:
    model = seeded(pair)
    forward = ours(model)
    loss_of(forward(batch(0))).backward()
    kept = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in kept]
    assert is_on_host(model.up.weight.grad) and is_on_host(model.down.weight.grad)
    assert all(type(g) is Tensor and g.is_leaf and not g.requires_grad for g in kept)
    for step in range(3):  # room of gradients that somebody holds is not given to others
        model.zero_grad(set_to_none=True)
        loss_of(forward(batch(1 + step))).backward()
    assert all(torch.equal(g, c) for g, c in zip(kept, copies, strict=True))


def test_gradients_asked_for_by_autograd_grad() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        x = batch(0).requires_grad_()
        found = torch.autograd.grad(loss_of(forward(x)), [x, *model.parameters()])
        some = torch.autograd.grad(loss_of(forward(x)), [model.down.weight])
        return [*found, *some]

    same(train, hosted=LAYERS)


def test_hooks_see_and_change_gradients() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        seen: list[Tensor] = []
        model.up.weight.register_hook(lambda g: g * 2)
        model.down.weight.register_hook(lambda g: seen.append(g.clone()))
        model.down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for step in range(2):
            loss_of(forward(batch(step))).backward()
        return seen

    same(train, hosted=LAYERS)


def test_weights_updated_by_hooks_while_backward_runs() -> None:
    """Each update changes the weight in place, and its gradient dies, before backward is over."""

    def train(forward: Any, model: Pair) -> list[Tensor]:
        def update(p: Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)  # type: ignore[arg-type]
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        seen = []
        for step in range(3):
            loss = loss_of(forward(batch(step)))
            loss.backward()
            seen.append(loss.detach())
        return seen

    same(train, hosted=LAYERS)


class Interrupted(Exception):
    pass


def test_training_goes_on_after_an_exception_in_a_hook() -> None:
    def interrupt(gradient: Tensor) -> None:
        raise Interrupted

    def train(forward: Any, model: Pair) -> list[Tensor]:
        for layer in (model.up, model.down):
            handle = layer.weight.register_hook(interrupt)
            with pytest.raises(Interrupted):
                loss_of(forward(batch(0))).backward()
            handle.remove()
            model.zero_grad()
            loss_of(forward(batch(1))).backward()
            descend(model)
        return []

    same(train, hosted=LAYERS)
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0


def test_graphs_kept_two_forwards_and_a_dropped_loss() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        first, second = loss_of(forward(batch(0))), loss_of(forward(batch(1)))
        loss_of(forward(batch(2)))
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        both = loss_of(forward(batch(3))) + 2 * loss_of(forward(batch(4)))
        both.backward()
        return [first.detach(), second.detach(), both.detach()]

    same(train, hosted=LAYERS)


# --- optimizers ---------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": ("Adam", {"lr": 1e-2, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 1e-2, "foreach": False}),
    "AdamW foreach": ("AdamW", {"lr": 1e-2, "foreach": True}),
    "AdamW fused": ("AdamW", {"lr": 1e-2, "fused": True}),
    "Adagrad": ("Adagrad", {"lr": 1e-2}),
    "Adadelta": ("Adadelta", {}),
    "RMSprop": ("RMSprop", {"lr": 1e-2, "momentum": 0.5}),
    "Rprop": ("Rprop", {"lr": 1e-2}),
    "NAdam": ("NAdam", {"lr": 1e-2}),
    "RAdam": ("RAdam", {"lr": 1e-2}),
    "Adamax": ("Adamax", {"lr": 1e-2, "foreach": True}),
    "ASGD": ("ASGD", {"lr": 1e-2}),
    "Adafactor": ("Adafactor", {"lr": 1e-2}),
    "Muon": ("Muon", {"lr": 1e-2}),
    "LBFGS": ("LBFGS", {"lr": 0.1, "max_iter": 3, "line_search_fn": "strong_wolfe"}),
}


def test_every_optimizer_of_torch() -> None:
    start = {k: v.clone() for k, v in seeded(pair).state_dict().items()}

    def train(forward: Any, model: Pair) -> list[Tensor]:
        seen: list[Tensor] = []
        for kind, settings in OPTIMIZERS.values():
            if not hasattr(torch.optim, kind):
                continue
            model.load_state_dict(start)
            matrices = [p for p in model.parameters() if p.dim() == 2]
            moved = matrices if kind == "Muon" else model.parameters()
            optimizer = getattr(torch.optim, kind)(moved, **settings)
            for step in range(3):

                def closure(seed: int = step, optimizer: Any = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(forward(batch(seed)))
                    loss.backward()
                    return loss

                seen.append(optimizer.step(closure).detach())
            seen += results(model)
        return seen

    same(train, hosted=LAYERS)


def test_an_optimizer_s_state_goes_across() -> None:
    """A checkpoint of ours goes on in the plain model, and the other way, as if never changed."""

    def step(forward: Any, model: nn.Module, optimizer: Any, seed: int) -> None:
        optimizer.zero_grad()
        loss_of(forward(batch(seed))).backward()
        optimizer.step()

    def begin(compiler: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
        torch._dynamo.reset()
        model = seeded(pair)
        return compiler(model), model, torch.optim.AdamW(model.parameters(), 1e-2)

    def through(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        return torch.load(io.BytesIO(file.getvalue()))

    one = begin(lambda m: m)
    for seed in range(4):
        step(*one, seed)
    for first, second in [(ours, lambda m: m), (lambda m: m, ours), (ours, ours)]:
        before = begin(first)
        for seed in range(2):
            step(*before, seed)
        weights, states = through(*before[1:])
        after = begin(second)
        if second is ours:
            loss_of(after[0](batch(9)))  # its weights are on the host when they are loaded
            assert on_host(after[1]) == LAYERS
        after[1].load_state_dict(weights)
        after[2].load_state_dict(states)
        for seed in range(2, 4):
            step(*after, seed)
        for mine, theirs in zip(results(after[1]), results(one[1]), strict=True):
            assert torch.equal(mine, theirs)


# --- which weights ------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen base and small trainable parts."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.base.requires_grad_(False)
        self.a = nn.ParameterList(torch.randn(WIDTH, 24) * 0.1 for _ in range(2))
        self.b = nn.ParameterList(torch.zeros(24, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, a, b in zip(self.base, self.a, self.b, strict=True):
            x = torch.tanh(layer(x) + x @ a @ b)
        return x


def some_steps(forward: Any, model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    seen: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(forward(batch(step)))
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *results(model)]
    return seen


def test_small_trainable_parts_on_a_frozen_base() -> None:
    names = {f"{part}.{i}" for part in ("a", "b", "base") for i in range(2)}
    same(some_steps, LoRA, {f"{n}.weight" if "base" in n else n for n in names})


def test_all_frozen_but_the_input() -> None:
    def build() -> nn.Module:
        return pair().requires_grad_(False)

    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        x = batch(0).requires_grad_()
        loss_of(forward(x)).backward()
        assert x.grad is not None
        return [x.grad]

    same(train, build, LAYERS)


def test_a_parameter_frozen_and_thawed_in_between() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        seen = []
        for step, frozen in enumerate((False, True, False)):
            model.up.weight.requires_grad_(not frozen)
            loss_of(forward(batch(step))).backward()
            assert (model.up.weight.grad is None) == frozen
            seen += results(model)
            descend(model)
        return seen

    same(train, hosted=LAYERS)


class Tied(nn.Module):
    """Embedding and head are one weight; one layer is used by two modules; one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList([nn.Sequential(self.layer, nn.GELU()) for _ in range(2)])
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for part in self.parts:
            x = part(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def test_tied_shared_and_unused_parameters() -> None:
    def train(forward: Any, model: Tied) -> list[Tensor]:
        seen = []
        for step in range(3):
            loss = forward(tokens(step))
            loss.backward()
            seen += [loss.detach(), *results(model)]
            descend(model)
        assert model.head.weight is model.embedding.weight and model.idle.weight.grad is None
        return seen

    same(train, Tied, {"embedding.weight", "layer.weight"}, against="aot_eager")


class Views(nn.Module):
    """Looks at parameters through views: parts, a transposed one, a flat one that is cut up."""

    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 8)
        self.table = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 8)
        self.flat = nn.Parameter(torch.randn(WIDTH * WIDTH + WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (x @ part.t() for part in self.three.chunk(3))
        x = torch.tanh(query * key) + value @ self.table[: x.shape[0]].sum(0).diag()
        weight, bias = self.flat.split([WIDTH * WIDTH, WIDTH])
        return F.linear(x, weight.view(WIDTH, WIDTH).t(), bias)


def test_views_of_parameters() -> None:
    same(some_steps, Views, {"three", "table", "flat"}, against="aot_eager")


class Parts(nn.Module):
    """Two parameters that are parts of one tensor, as flattened models have them."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(2 * WIDTH * WIDTH) / 8
        halves = flat.view(2, WIDTH, WIDTH).unbind()
        self.first, self.second = (nn.Parameter(half) for half in halves)
        self.third = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second @ self.third


def test_parts_of_one_tensor_stay_together() -> None:
    def train(forward: Any, model: Parts) -> list[Tensor]:
        some_steps(forward, model)
        there = model.first.untyped_storage().data_ptr()
        assert model.second.untyped_storage().data_ptr() == there
        return []

    same(train, Parts, {"third"})


def convolutions() -> nn.Module:
    layers = (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def test_weights_in_channels_last_and_buffers() -> None:
    def train(forward: Any, model: Any) -> list[Tensor]:
        seen = []
        for step in range(3):
            x = batch(step, 16 * 8).view(2, 16, 24, 8)
            loss = loss_of(forward(x.to(memory_format=torch.channels_last)))
            loss.backward()
            seen += [loss.detach(), *(p.grad for p in model.parameters())]
            descend(model)
        assert not model[0].weight.is_contiguous()
        return seen

    same(train, convolutions, {"0.weight", "3.weight"}, against="aot_eager")


def test_transposed_weights() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    same(some_steps, Transposed, {"weight"})


# --- other modes --------------------------------------------------------------------------------


def test_scores_between_steps() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Pair(), nn.Dropout(0.3), Pair())

    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen = []
        for step in range(2):
            torch.manual_seed(step)
            loss_of(forward(batch(step))).backward()
            descend(model)
            model.eval()
            with torch.no_grad():
                seen.append(forward(batch(step)))
            with torch.inference_mode():
                seen.append(forward(batch(step)).clone())
            loss_of(forward(batch(step + 5))).backward()
            model.train()
        return seen

    same(train, build, access=(COPIED,))


def test_scores_alone() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        model.requires_grad_(False).eval()
        seen = [forward(batch(0))]
        with torch.inference_mode():
            seen += [forward(batch(1)).clone(), forward(batch(2)).clone()]
        with torch.no_grad():
            model.up.weight.mul_(0.5)
            seen.append(forward(batch(1)))
        return seen

    same(train, hosted=LAYERS)


def test_weights_that_scores_brought_to_the_host_are_trained() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        with torch.no_grad():
            seen = [forward(batch(0))]
        with torch.inference_mode():
            seen.append(forward(batch(0)).clone())
        return [*seen, *some_steps(forward, model)]

    same(train, hosted=LAYERS, access=(COPIED,))


def test_weights_first_placed_in_inference_mode_are_trained() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        with torch.inference_mode():
            seen = [forward(batch(0)).clone()]
        assert not any(p.is_inference() for p in model.parameters())
        return [*seen, *some_steps(forward, model)]

    same(train, hosted=LAYERS, access=(COPIED,))


def test_autocast() -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen = []
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(forward(batch(step)))
            loss.backward()
            seen += [loss.detach(), *results(model)]
            descend(model)
        return seen

    same(train, hosted=LAYERS, against="aot_eager")


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [(torch.float64, COPIED), (torch.bfloat16, IN_PLACE), (torch.float16, COPIED)],
)
def test_another_type_after_the_first_step(dtype: torch.dtype, policy: str) -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        loss_of(forward(batch(0))).backward()
        descend(model)
        model.to(dtype)
        seen = []
        for step in range(2):
            loss_of(forward(batch(step).to(dtype))).backward()
            seen += results(model)
            descend(model)
        return seen

    same(train, lambda: nn.Sequential(Pair(), Pair()), access=(policy,))


def test_batches_of_many_sizes() -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen = []
        for step, rows in enumerate((8, 40, 3, 200, 8)):
            loss = loss_of(forward(batch(step, rows)))
            loss.backward()
            seen += [loss.detach(), *results(model)]
            descend(model)
        return seen

    same(train, hosted=LAYERS, dynamic=True)


# --- weights changed from outside ---------------------------------------------------------------


def test_weights_changed_by_their_owner() -> None:
    saved = {k: v.clone() for k, v in seeded(pair).state_dict().items()}

    def train(forward: Any, model: Pair) -> list[Tensor]:
        seen = []

        def step() -> None:
            loss = loss_of(forward(batch(0)))
            loss.backward()
            seen.extend([loss.detach(), *results(model)])
            descend(model)

        step()
        model.up.weight.data.add_(0.1)
        step()
        model.down.weight.data = torch.full((WIDTH, WIDTH), 0.01)  # other memory altogether
        step()
        with torch.no_grad():
            model.up.weight.copy_(model.down.weight.t())
        step()
        nn.init.orthogonal_(model.up.weight, generator=torch.Generator().manual_seed(1))
        step()
        model.load_state_dict(saved)
        step()
        model.load_state_dict({k: v * 0.5 for k, v in saved.items()}, assign=True)
        step()
        model.up = nn.Linear(WIDTH, WIDTH)  # another parameter
        nn.init.constant_(model.up.weight, 0.02)
        nn.init.zeros_(model.up.bias)
        step()
        return seen

    same(train, hosted=LAYERS)


def test_weights_on_the_host_are_changed_through_what_looks_at_them() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        loss_of(forward(batch(0))).backward()
        flat = model.up.weight.data.view(-1)
        state = model.state_dict()
        array = model.down.weight.detach().numpy()
        flat[::3] = 0.5
        state["norm.bias"].fill_(0.25)
        array *= 2.0
        loss_of(forward(batch(1))).backward()
        return []

    same(train, hosted=LAYERS)


@pytest.mark.parametrize("policy", ACCESS)
def test_a_weight_replaced_between_forward_and_backward(policy: str) -> None:
    """Backward sees the new weight, as the plain one does, or still has forward's copy of it."""

    def train(forward: Any, model: Pair) -> list[Tensor]:
        forward(batch(0))
        loss = loss_of(forward(batch(1)))
        model.down.weight.data = torch.ones(WIDTH, WIDTH)
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model, plain, untouched = seeded(pair), seeded(pair), seeded(pair)
    found = train(ours(model, policy), model)
    as_new = train(torch.compile(plain, backend="aot_eager"), plain)
    loss_of(untouched(batch(1))).backward()
    as_old = [p.grad for p in untouched.parameters()]
    assert any(all(map(torch.equal, found, wanted)) for wanted in (as_new, as_old))
    assert torch.equal(model.down.weight, torch.ones(WIDTH, WIDTH))
    loss_of(ours(model, policy)(batch(2)))
    assert on_host(model) == LAYERS


@pytest.mark.parametrize("policy", ACCESS)
def test_a_weight_changed_in_place_between_forward_and_backward(policy: str) -> None:
    """Refused, as by the plain run, unless backward still has forward's copy: never wrong."""
    model, untouched = seeded(pair), seeded(pair)
    forward = ours(model, policy)
    loss = loss_of(forward(batch(0)))
    with torch.no_grad():
        model.down.weight.mul_(2.0)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert policy == COPIED, "an op used the new weight for the old loss"
        loss_of(untouched(batch(0))).backward()
        pairs = zip(model.parameters(), untouched.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    model.zero_grad()
    loss_of(forward(batch(0))).backward()
    assert on_host(model) == LAYERS


# --- several models -----------------------------------------------------------------------------


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        loss_of(forward(batch(0))).backward()
        twin = copy.deepcopy(model)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
        descend(model)
        again = twin if forward is model else ours(twin)
        for seed in range(2):
            loss_of(forward(batch(seed))).backward()
            loss_of(again(batch(seed + 5))).backward()
            descend(twin)
        assert on_host(model) == on_host(twin)
        return results(twin)

    same(train, hosted=LAYERS)


def test_two_models_take_turns() -> None:
    def build() -> nn.Module:
        return nn.ModuleList([Pair(), Pair()])

    def alternate(first: Any, second: Any, models: Any) -> list[Tensor]:
        seen = []
        for step in range(3):
            middle = first(batch(step))
            loss = loss_of(second(middle)) + loss_of(second(batch(step + 5)))
            loss.backward()
            seen.append(loss.detach())
            descend(models)
        return [*seen, *results(models)]

    plain = seeded(build)
    expected = alternate(*plain, plain)
    models = seeded(build)
    halves = [ours(m, policy) for m, policy in zip(models, ACCESS, strict=True)]
    for mine, theirs in zip(alternate(*halves, models), expected, strict=True):
        assert torch.equal(mine, theirs)
    assert len(on_host(models)) == 4


class Broken(nn.Module):
    """One weight in two graphs, for Dynamo breaks between its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        torch._dynamo.graph_break()
        return self.after(torch.tanh(self.layer(x)))


def test_one_weight_in_two_graphs() -> None:
    same(some_steps, Broken, {"layer.weight", "after.weight"})


def test_two_compilations_of_one_model() -> None:
    model, plain = seeded(pair), seeded(pair)
    forwards = [ours(model, policy) for policy in ACCESS]
    for step in range(4):
        for forward, of in ((forwards[step % 2], model), (plain, plain)):
            loss_of(forward(batch(step))).backward()
            descend(of)
    assert on_host(model) == LAYERS
    for mine, theirs in zip(results(model), results(plain), strict=True):
        assert torch.equal(mine, theirs)


def test_a_plain_run_and_a_compiled_one_take_turns() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        for step in range(4):
            (loss_of(forward(batch(step))) + loss_of(model(batch(step + 9)))).backward()
            descend(model)
        return []

    same(train, hosted=LAYERS, against="aot_eager")


# --- functions ----------------------------------------------------------------------------------


def functions(compiler: Callable[[Any], Any], model: Pair) -> list[Tensor]:
    """Compiled functions around the model, with torch.func inside."""

    def scaled(x: Tensor, factor: Tensor) -> Tensor:
        weights = {name: p * factor for name, p in model.named_parameters()}
        return torch.func.functional_call(model, weights, (x,))

    def inner(x: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        of = lambda w: torch.func.functional_call(model, w, (x,)).square().mean()  # noqa: E731
        slopes = torch.func.grad(of)(weights)
        return sum(slope.sum() for slope in slopes.values()) + model(x).sum()

    one, two = compiler(scaled), compiler(inner)
    for step in range(2):
        loss_of(one(batch(step), torch.tensor(1.5))).backward()
    with torch.no_grad():
        slope = two(batch(3))
    return [slope, *results(model)]


def test_functional_calls_and_gradients_inside() -> None:
    plain, model = seeded(pair), seeded(pair)
    expected = functions(lambda f: torch.compile(f, backend="aot_eager"), plain)
    torch._dynamo.reset()
    found = functions(ours, model)
    assert on_host(model) == LAYERS
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


# --- processes and files ------------------------------------------------------------------------


class Batches(torch.utils.data.Dataset[Tensor]):
    """Batches made by the model itself, in a worker forked when its weights are on the host."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            out: Tensor = self.model(batch(index))
        return out


def test_workers_forked_while_weights_are_on_the_host() -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        loss_of(forward(batch(0))).backward()
        loader = torch.utils.data.DataLoader(
            Batches(copy.deepcopy(model)),
            batch_size=None,
            num_workers=1,
            multiprocessing_context="fork",
        )
        for x in loader:
            loss_of(forward(x)).backward()
            descend(model)
        direct = torch.utils.data.DataLoader(
            Batches(model), batch_size=None, num_workers=1, multiprocessing_context="fork"
        )
        return [x.clone() for x in direct]

    same(train, hosted=LAYERS, access=(COPIED,))


def test_checkpoints_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model, plain = seeded(pair), seeded(pair)
    loss_of(ours(model)(batch(0)))
    assert on_host(model) == LAYERS
    torch.save(model.state_dict(), tmp_path / "ours.pt")
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    size = (tmp_path / "plain.pt").stat().st_size
    assert abs((tmp_path / "ours.pt").stat().st_size - size) < 1024
    found, expected = torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "plain.pt")
    assert list(found) == list(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name]) and not is_on_host(value)
    mapped = torch.load(tmp_path / "ours.pt", mmap=True)
    plain.load_state_dict(mapped, assign=True)
    loss_of(ours(plain)(batch(1))).backward()
    assert on_host(plain) == LAYERS
