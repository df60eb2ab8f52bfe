"""Small modules that hypothesis draws, trained for three steps under budgets and plainly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .conformity import Compiler, Outcome, Tally, left_over, plain, rows_of, run_under, tiny_steps
from .rows import Row

#: modules of a run of full length
MODULES = 2000
STEPS = 3
#: one in so many is run at a middling budget, too
MIDDLING_EVERY = 5
#: every value is [BATCH, TIME, WIDTH]
BATCH, TIME, WIDTH = 2, 4, 8


@dataclass(frozen=True)
class Op:
    """One step of a program: reads two earlier values, counted from the last, and appends one."""

    kind: str
    first: int = 0
    second: int = 0
    #: ops of a checkpoint
    body: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Program:
    """A module and how it is trained; its repr makes it again."""

    ops: tuple[Op, ...]
    optimizer: str = "sgd"
    dtype: str = "float32"
    input_needs_gradient: bool = False
    outputs: int = 1


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class AcrossTime(nn.Module):
    """Runs a module that wants channels before time.

    Contiguous, because AOTAutograd fails on a Linear behind the batch norm of a transposed tensor.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()
        return out


class Counted(nn.Module):
    """Keeps a running sum and a counter in buffers, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.total.mul_(0.9).add_(x.detach().mean((0, 1)))
        self.count.add_(1)
        return x + self.total


def _frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)),
    "frozen": _frozen,
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "conv": lambda: AcrossTime(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "attention": Attend,
    "dropout": lambda: nn.Dropout(0.2),
}
#: layers that change buffers, which a checkpoint would change twice
WITH_BUFFERS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: AcrossTime(nn.BatchNorm1d(WIDTH)),
    "counted": Counted,
}


def _slice_assigned(x: Tensor, y: Tensor) -> Tensor:
    h = x + 1
    h[:, 1:3] = y[:, :2]
    return h


def _in_place_on_view(x: Tensor, y: Tensor) -> Tensor:
    h = x + y
    h.view(BATCH * TIME, WIDTH)[2:].mul_(0.5)
    h.transpose(1, 2)[:, :3].add_(1)
    return h


def _index(x: Tensor) -> Tensor:
    return torch.arange(TIME, device=x.device).flip(0)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "relu": lambda x, y: F.relu(x),
    "softmax": lambda x, y: F.softmax(x, -1),
    "silu": lambda x, y: F.silu(x) * y,
    "function_norm": lambda x, y: F.layer_norm(x, (WIDTH,)),
    "cat": lambda x, y: torch.cat([x[..., :3], y[..., 3:]], -1),
    "chunk": lambda x, y: torch.mul(*x.chunk(2, -1)).repeat(1, 1, 2),
    "split": lambda x, y: torch.cat(x.split([3, 5], -1)[::-1], -1),
    "stack": lambda x, y: torch.stack([x, y]).mean(0),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "gather": lambda x, y: x.gather(1, _index(x)[None, :, None].expand(BATCH, TIME, WIDTH)),
    "index_select": lambda x, y: x.index_select(1, _index(x)),
    "cumsum": lambda x, y: x.cumsum(1),
    "matmul": lambda x, y: torch.softmax(x @ y.transpose(1, 2), -1) @ y,
    "einsum": lambda x, y: torch.einsum("btd,bsd->bsd", x, y) * 0.25,
    "sdpa": lambda x, y: F.scaled_dot_product_attention(x, y, y, dropout_p=0.1),
    "view": lambda x, y: x.reshape(BATCH, TIME * WIDTH).view(BATCH, TIME, WIDTH) * 2,
    "permute": lambda x, y: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "expand": lambda x, y: y + x[:, :1].expand(BATCH, TIME, WIDTH),
    "unsqueeze": lambda x, y: (x.unsqueeze(1) * y.unsqueeze(2)).mean(1),
    "flatten": lambda x, y: x.flatten(1).unflatten(1, (TIME, WIDTH)),
    "add_": lambda x, y: (x * 2).add_(y),
    "mul_": lambda x, y: (x + y).mul_(0.5),
    "relu_": lambda x, y: (x + y).relu_(),
    "masked_fill_": lambda x, y: (x + y).masked_fill_(y > 1, 0.5),
    "in_place_on_view": _in_place_on_view,
    "slice_assigned": _slice_assigned,
    "function_dropout": lambda x, y: F.dropout(x, 0.3, True),
}
#: the same weight twice, as it is and transposed
TIES = ("tied", "transposed")
#: checkpoint → whether it is reentrant
CHECKPOINTS = {"checkpoint": False, "reentrant": True}
IN_CHECKPOINTS = (*LAYERS, *FUNCTIONS, *TIES)
KINDS = (*IN_CHECKPOINTS, *WITH_BUFFERS, *CHECKPOINTS)


class Drawn(nn.Module):
    """The module of a program; `shared.weight` is unused where no op is tied to it."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.shared = nn.Linear(WIDTH, WIDTH)
        makers = LAYERS | WITH_BUFFERS
        named = {path: makers[op.kind]() for path, op in walk(program.ops) if op.kind in makers}
        self.layers = nn.ModuleDict(named)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._values(self.program.ops, x, "op")[-self.program.outputs :])

    def _values(self, ops: tuple[Op, ...], x: Tensor, path: str) -> list[Tensor]:
        values = [x]
        for n, op in enumerate(ops):
            first, second = (values[-1 - k % len(values)] for k in (op.first, op.second))
            values.append(self._value(op, first, second, f"{path}_{n}"))
        return values

    def _value(self, op: Op, x: Tensor, y: Tensor, path: str) -> Tensor:
        if op.kind in FUNCTIONS:
            return FUNCTIONS[op.kind](x, y)
        if op.kind == "tied":
            out: Tensor = self.shared(x)
            return out
        if op.kind == "transposed":
            return x @ self.shared.weight
        if op.kind in CHECKPOINTS:
            again = CHECKPOINTS[op.kind]

            def body(x: Tensor) -> Tensor:
                return self._values(op.body, x, path)[-1]

            # torch refuses dropout in a checkpoint whose output needs no gradient
            kept: Tensor = checkpoint(body, x + self.shared.bias, use_reentrant=again)
            return kept
        made: Tensor = self.layers[path](x)
        return made


def walk(ops: tuple[Op, ...], path: str = "op") -> Iterator[tuple[str, Op]]:
    """Yields every op, those in checkpoints too, with the path that names its layer."""
    for n, op in enumerate(ops):
        yield f"{path}_{n}", op
        yield from walk(op.body, f"{path}_{n}")


# --- drawing ------------------------------------------------------------------------------------


def _ops(kinds: tuple[str, ...]) -> st.SearchStrategy[Op]:
    earlier = st.integers(0, 3)
    return st.builds(Op, st.sampled_from(kinds), earlier, earlier)


def _checkpoints(inner: st.SearchStrategy[Op]) -> st.SearchStrategy[Op]:
    body = st.lists(inner, min_size=1, max_size=4).map(tuple)
    return st.builds(Op, st.sampled_from(tuple(CHECKPOINTS)), st.integers(0, 3), body=body)


def programs() -> st.SearchStrategy[Program]:
    alone = _ops(IN_CHECKPOINTS)
    nested = _checkpoints(alone | alone | alone | _checkpoints(alone))
    op = _ops((*IN_CHECKPOINTS, *WITH_BUFFERS))
    return st.builds(
        Program,
        st.lists(op | op | op | op | nested, min_size=2, max_size=9).map(tuple),
        st.sampled_from(("sgd", "adamw")),
        st.sampled_from(("float32", "float32", "float32", "bfloat16")),
        st.booleans(),
        st.integers(1, 3),
    )


# --- running ------------------------------------------------------------------------------------


def train(program: Program, compiler: Compiler) -> Outcome:
    """Three steps; with the same compiler always the same."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype = getattr(torch, program.dtype)
    model = Drawn(program).to(dtype).train()
    optimizer = _optimizer(program, model)
    forward = compiler(model)
    values: dict[str, Tensor] = {}
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(BATCH, TIME, WIDTH).to(dtype)
        x.requires_grad_(program.input_needs_gradient)
        optimizer.zero_grad()
        try:
            # with a bias of `shared` backward runs where a program has no weight of its own
            outputs = forward(x)
            loss = sum(out.float().square().mean() for out in outputs)
            loss = loss + model.shared.bias.float().sum()
            loss.backward()
        except Exception as error:
            return Outcome(error=error)
        values[f"loss {step}"] = loss.detach().clone()
        gradients = [*model.named_parameters(), ("the input", x)]
        for name, of in gradients:
            if of.grad is not None:
                values[f"gradient of {name} in step {step}"] = of.grad.clone()
        optimizer.step()
        for name, buffer in model.named_buffers():
            values[f"{name} after step {step}"] = buffer.clone()
    return Outcome(values | {n: v.detach().clone() for n, v in model.state_dict().items()})


def _optimizer(program: Program, model: nn.Module) -> Any:
    if program.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def drawn(count: int, seed: int) -> list[Program]:
    """So many programs, no two alike; always the same of a seed."""
    found: dict[Program, None] = {}

    @hypothesis.seed(seed)
    @settings(
        max_examples=2 * count,  # some are drawn twice
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(programs())
    def one(program: Program) -> None:
        found[program] = None

    one()
    return list(found)[:count]


def fails_alone(program: Program) -> bool:
    """True if the program is not the plain run's at the minimum, and plainly it runs."""

    def run(compiler: Compiler) -> Outcome:
        return train(program, compiler)

    with tiny_steps(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = run(plain)
        wrong = alone.error is None and run_under("minimum", run).outcome.differences(alone)
        return bool(wrong or left_over())


def shrunk(program: Program, fails: Callable[[Program], bool] = fails_alone) -> Program:
    """The program with every op left out that its failure does not need."""
    for smaller in _smaller(program):
        if fails(smaller):
            return shrunk(smaller, fails)
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for ops in _fewer(program.ops):
        yield replace(program, ops=ops)
    for plainer in (
        replace(program, outputs=1),
        replace(program, input_needs_gradient=False),
        replace(program, dtype="float32"),
        replace(program, optimizer="sgd"),
    ):
        if plainer != program:
            yield plainer


def _fewer(ops: tuple[Op, ...]) -> Iterator[tuple[Op, ...]]:
    for n, op in enumerate(ops):
        if len(ops) > 1:
            yield ops[:n] + ops[n + 1 :]
        if op.body:
            yield ops[:n] + op.body + ops[n + 1 :]
        for body in _fewer(op.body):
            yield (*ops[:n], replace(op, body=body), *ops[n + 1 :])


def sweep(chosen: list[Program], seed: int) -> tuple[Tally, Tally, list[Program]]:
    """Each at the minimum, a fifth at a middling budget; last those that plainly fail."""
    least, middle, refused = Tally(seed), Tally(seed), []
    with tiny_steps(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, program in enumerate(chosen):

            def run(compiler: Compiler, program: Program = program) -> Outcome:
                return train(program, compiler)

            alone = run(plain)
            if alone.error is not None:
                refused.append(program)
                continue
            found = run_under("minimum", run)
            least.count(repr(program), found, alone, run)
            budget = None if number % MIDDLING_EVERY else found.middling()
            if budget is not None:
                middle.count(repr(program), run_under(budget, run), alone, run)
            del found, alone
            for what in left_over():
                least.fails(f"after {program!r}", what)
    return least, middle, refused


def rows(scale: float, seed: int) -> list[Row]:
    least, middle, refused = sweep(drawn(max(5, round(MODULES * scale)), seed), seed)
    what = f"modules drawn at random, {STEPS} steps,"
    first, second = rows_of(
        {f"{what} at the minimum": least, f"{what} at a middling budget": middle}
    )
    plainly = ("not run, as torch alone cannot", f"{len(refused):,}")
    return [replace(first, figures=(*first.figures, plainly)), second]
