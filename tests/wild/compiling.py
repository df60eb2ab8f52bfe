"""Programs that differ in how they compile, and in what of Python a forward holds."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offcompile

from .parts import Block, Gpt, conv_net, images, labels, mlp, next_word_loss, points, words
from .program import Run, family

program = family("compiling")


@program()
def compiles_in_place(run: Run) -> None:
    """`model.compile()`: the module stays itself."""
    model = Gpt()
    run.compile_in_place(model)
    run.train(model, lambda n: next_word_loss(model(words(n)), words(n)))


@program()
def compiles_a_function(run: Run) -> None:
    model = mlp()

    @run.compile
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    run.train(model, lambda n: loss_of(points(n), labels(n)))


@program()
def compiles_each_block(run: Run) -> None:
    model = Gpt(layers=3)
    for n, block in enumerate(model.blocks):
        model.blocks[n] = run.compile(block)
    run.train(model, lambda n: next_word_loss(model(words(n)), words(n)))


@program()
def compiles_the_body_only(run: Run) -> None:
    body, head = conv_net(out=16), nn.Linear(16, 5)
    model = nn.Sequential(body, head)
    forward = run.compile(body)
    run.train(model, lambda n: F.cross_entropy(head(forward(images(n)).relu()), labels(n, 4)))


@program()
def compiles_the_loss_too(run: Run) -> None:
    model = Gpt()
    forward, loss = run.compile(model), run.compile(next_word_loss)
    run.train(model, lambda n: loss(forward(words(n)), words(n)))


@program()
def compiles_a_method(run: Run) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

    model = Named()
    loss = run.compile(model.loss)
    run.train(model, lambda n: loss(points(n), labels(n)))


@program(moves=False)
def compiles_the_step_with_its_backward(run: Run) -> None:
    """`backward()` inside of what is compiled breaks the graph there."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    for n in range(3):
        optimizer.zero_grad()
        run.keep(f"loss {n}", step(points(n), labels(n)))
        optimizer.step()
    run.keep_state(model)


@program()
def breaks_its_graph(run: Run) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.seen = mlp(out=24), mlp(), []

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            self.seen.append(float(x.detach().mean()))
            scores: Tensor = self.second(x)
            return scores

    model = Broken()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))
    run.keep("means", torch.tensor(model.seen))


@program()
def branches_on_values(run: Run) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.other = mlp(out=24), mlp(), mlp()

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            scores: Tensor = self.one(x) if x.sum() > 0 else self.other(x)
            return scores

    model = Branching()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)), steps=4)


@program(moves=False)
def loops_until_it_is_sure(run: Run) -> None:
    """Adaptive computation: a loop that ends by the data, which Dynamo leaves alone."""

    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.halt, self.out = mlp(out=24), nn.Linear(24, 1), nn.Linear(24, 5)

        def forward(self, x: Tensor) -> Tensor:
            sure = torch.zeros(len(x), 1)
            for _ in range(4):
                x = x + self.cell(x)
                sure = sure + self.halt(x).sigmoid()
                if sure.min().item() > 1.2:
                    break
            scores: Tensor = self.out(x * sure)
            return scores

    model = Adaptive()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))


@program()
def computes_with_numpy(run: Run) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            scale = np.float32(1.0) / np.sqrt(np.float32(x.shape[-1]))
            scores: Tensor = self.net(x * float(scale))
            return scores

    model = Mixed()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))


@dataclass
class Answer:
    scores: Tensor
    hidden: Tensor


Pair = namedtuple("Pair", "first second")


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(out=24), nn.Linear(24, 5)

    def forward(self, given: dict[str, Tensor], *, kind: str = "dict") -> object:
        hidden = self.body(given["x"]) * given.get("scale", 1.0)
        scores = self.head(hidden)
        if kind == "dataclass":
            return Answer(scores, hidden)
        if kind == "pair":
            return Pair(scores, [hidden, None])
        return OrderedDict(scores=scores, hidden=hidden)


@program()
def returns_structures(run: Run) -> None:
    model = Structured()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        given = {"x": points(n)} | ({"scale": torch.tensor(0.5)} if n % 2 else {})
        found = forward(given)
        answer = forward(given, kind="dataclass")
        pair = forward(given, kind="pair")
        used = found["scores"] + answer.scores + pair.first
        return F.cross_entropy(used, labels(n)) + pair.second[0].square().mean()

    run.train(model, step)


@program()
def uses_some_outputs_only(run: Run) -> None:
    model = Structured()
    forward = run.compile(model)
    run.train(model, lambda n: forward({"x": points(n)})["hidden"].square().mean())


@program()
def writes_to_its_input(run: Run) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            seen.add_(x.detach().mean(0))
            scores: Tensor = self.net(x - seen.detach())
            return scores

    model = Writing()
    forward = run.compile(model)
    seen = torch.zeros(24)
    run.train(model, lambda n: F.cross_entropy(forward(points(n), seen), labels(n)))
    run.keep("seen", seen)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x


@program()
def defines_its_own_autograd(run: Run) -> None:
    class Binary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.second(Straight.apply(h) + Squared.apply(h, h.tanh()))

    model = Binary()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))


@torch.library.custom_op("wild::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


@scaled.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.by, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
)


@program()
def calls_its_own_operator(run: Run) -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(out=24), mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(scaled(self.first(x), 0.5))

    model = Scaling()
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))


@program(refused="saved_tensors_hooks")
def saves_tensors_on_the_cpu(run: Run) -> None:
    model = mlp()
    forward = run.compile(model)
    with torch.autograd.graph.save_on_cpu():
        run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))


@program(refused="compiled_autograd")
def compiles_autograd(run: Run) -> None:
    model = mlp()
    with torch._dynamo.config.patch(compiled_autograd=True):
        forward = run.compile(model)
        run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))


@program()
def backs_up_twice(run: Run) -> None:
    """Two losses on one graph, the first keeping it."""
    model = Structured()
    forward = run.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(3):
        optimizer.zero_grad()
        found = forward({"x": points(n)})
        F.cross_entropy(found["scores"], labels(n)).backward(retain_graph=True)
        found["hidden"].square().mean().backward()
        optimizer.step()
    run.keep_state(model)


@program()
def leaves_backward_out(run: Run) -> None:
    """Every other loss is only looked at, though gradients are on."""
    model = Gpt()
    forward = run.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for n in range(5):
        loss = next_word_loss(forward(words(n)), words(n))
        run.keep(f"loss {n}", loss)
        if n % 2 == 0:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    run.keep_state(model)


@program()
def runs_forward_twice_before_backward(run: Run) -> None:
    model = mlp()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        first, second = forward(points(n)), forward(points(n + 9))
        return F.cross_entropy(second, labels(n)) + F.cross_entropy(first, labels(n + 9))

    run.train(model, step)


@program()
def nests_compiled_modules(run: Run) -> None:
    inner = run.compile(Block())
    model = nn.Sequential(nn.Linear(24, 24), inner, nn.Linear(24, 5))
    forward = run.compile(model)
    run.train(model, lambda n: F.cross_entropy(forward(points(n)[:, None])[:, 0], labels(n)))


@program()
def tries_budgets_one_by_one(run: Run) -> None:
    """A notebook: a budget that is too small, then the one that the refusal named."""
    refused = offcompile.OffloadError
    for cell in range(2):
        torch.manual_seed(cell)
        model = mlp()
        if cell == 0:
            tight = torch.compile(
                model,
                backend="offcompile",
                options={"memory": 100, "lowering": "aot_eager", "hardware": "cpu"},
            )
            try:
                tight(points(0)).sum().backward()
            except refused:
                continue
            raise AssertionError("a budget of 100 bytes was kept")
        forward = run.compile(model)
        run.train(model, lambda n, forward=forward: F.cross_entropy(forward(points(n)), labels(n)))


@program()
def trains_in_a_thread(run: Run) -> None:
    import threading

    model = mlp()
    forward = run.compile(model)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run.train(model, lambda n: F.cross_entropy(forward(points(n)), labels(n)))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for error in failed:
        raise error
