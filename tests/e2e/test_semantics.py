"""Training keeps its semantics whatever moves: at the smallest budget and at a middling one, with
activations that do not fit, and with weights that do not.
"""

from __future__ import annotations

import ast
import copy
import gc
import io
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from semantics_runs import CASES, PLANNING, Case, Deep, descend, left_by, loss_of, same
from semantics_table import SEMANTICS
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import offcompile

_turn = itertools.cycle(CASES)


def each(test: Callable[..., None]) -> Callable[..., None]:
    """One of the cases, in turn: `make soak ARGS=semantics` runs every test with all of them."""
    return pytest.mark.parametrize("case", [next(_turn)], ids=str)(test)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch._dynamo.reset()
    assert live_tickets() == 0
    torch.set_num_threads(threads)


def live_tickets() -> int:
    gc.collect()
    return int(offcompile.counters()["live_tickets"])


def test_every_semantic_has_tests() -> None:
    for semantic, tests in SEMANTICS.items():
        for test in tests:
            file, _, name = test.partition(".")
            (path,) = Path(__file__).parents[1].rglob(f"{file}.py")
            tree = ast.parse(path.read_text())
            there = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
            assert name in there, f"{semantic}: {test}"


# --- one step and the next ------------------------------------------------------------------------


@each
def test_micro_batches_add_up(case: Case) -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        for to_none in (True, False):
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            for step in range(2):
                optimizer.zero_grad(set_to_none=to_none)
                for micro in range(2):
                    (loss_of(forward(case.batch(10 * step + micro))) / 2).backward()
                    seen += left_by(model)
                optimizer.step()
        return seen

    same(case, train)


@each
def test_graphs_kept_and_dropped(case: Case) -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        first, second = loss_of(forward(case.batch(0))), loss_of(forward(case.batch(1)))
        loss_of(forward(case.batch(2)))  # nobody asks for its gradients
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        both = loss_of(forward(case.batch(3))) + 2 * loss_of(forward(case.batch(4)))
        both.backward()
        return [first.detach(), second.detach(), both.detach()]

    same(case.for_several_runs(), train)


class Interrupted(Exception):
    pass


def interrupt(gradient: Tensor) -> None:
    raise Interrupted


class Looked(nn.Module):
    """Looks rows up in the middle; a number that is not there fails while forward runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = Deep(width), Deep(width)

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        y = self.before(x)
        return self.after(y + y.index_select(0, row))


@each
def test_exceptions_leave_nothing_behind(case: Case) -> None:
    good, bad = torch.zeros(1, dtype=torch.long), torch.full((1,), case.rows)

    def train(forward: Any, model: Any) -> list[Tensor]:
        loss_of(forward(case.batch(0), good)).backward()
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            forward(case.batch(1), bad)
        assert live_tickets() == 0
        out = forward(case.batch(2), good)
        out.register_hook(interrupt)  # before the compiled backward
        with pytest.raises(Interrupted):
            loss_of(out).backward()
        del out
        assert live_tickets() == 0
        handle = model.before.layers[0].weight.register_hook(interrupt)  # behind it
        with pytest.raises(Interrupted):
            loss_of(forward(case.batch(3), good)).backward()
        handle.remove()
        assert live_tickets() == 0
        model.zero_grad()
        loss = loss_of(forward(case.batch(4), good))
        loss.backward()
        return [loss.detach()]

    same(case, train, Looked)


@each
def test_scores_between_steps_with_dropout_and_buffers(case: Case) -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(Deep(width), nn.BatchNorm1d(width), nn.Dropout(0.3), Deep(width))

    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen = []
        for step in range(2):
            torch.manual_seed(step)
            loss_of(forward(case.batch(step))).backward()
            descend(model)
            seen.append(torch.rand(3))  # as many random numbers were drawn
            model.eval()
            with torch.no_grad():
                seen.append(forward(case.batch(5)))
            with torch.inference_mode():
                seen.append(forward(case.batch(6)).clone())
            model.train()
        return seen

    same(case, train, build, against="aot_eager")


# --- models and numbers ---------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen part with small additions, and one layer that is used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base, self.shared, self.again = Deep(width), Deep(width), Deep(width)
        self.base.requires_grad_(False)
        self.again.layers[0].weight = self.shared.layers[0].weight
        self.down, self.up = nn.Linear(width, 2), nn.Linear(2, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x) + self.up(self.down(x))
        return self.again(self.shared(self.shared(x)))


@each
def test_tied_frozen_and_adapted(case: Case) -> None:
    def train(forward: Any, model: Any) -> list[Tensor]:
        seen = []
        for step in range(2):
            loss = loss_of(forward(case.batch(step)))
            loss.backward()
            seen += [loss.detach(), *left_by(model)]
            descend(model)
        assert model.again.layers[0].weight is model.shared.layers[0].weight
        assert all(p.grad is None for p in model.base.parameters())
        return seen

    same(case, train, Adapted)


@each
@pytest.mark.parametrize("whole", [False, True], ids=["autocast", "bfloat16"])
def test_mixed_precision(case: Case, whole: bool) -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen = []
        for step in range(2):
            x = case.batch(step).bfloat16() if whole else case.batch(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=not whole):
                loss = loss_of(forward(x))
            loss.backward()
            seen += [loss.detach(), *left_by(model)]
            descend(model)
        return seen

    def build(width: int) -> nn.Module:
        return Deep(width).bfloat16() if whole else Deep(width)

    least = Case(case.name, case.width, case.rows, 0)  # half as large, it fits a middling budget
    same(least if whole else case, train, build, against="aot_eager")


@each
@pytest.mark.parametrize("dynamic", [True, None])
def test_batches_of_many_sizes(case: Case, dynamic: bool | None) -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen = []
        for step, rows in enumerate((case.rows, case.rows // 2, case.rows // 4 * 3, case.rows)):
            loss = loss_of(forward(case.batch(step, rows)))
            loss.backward()
            seen += [loss.detach(), *left_by(model)]
            descend(model)
        return seen

    same(case, train, compiler=lambda model: case.ours(model, dynamic=dynamic))


class Broken(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = Deep(width), Deep(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.other(x)


def steps(case: Case, forward: Any, model: nn.Module) -> list[Tensor]:
    seen = []
    for step in range(2):
        loss = loss_of(forward(case.batch(step)))
        loss.backward()
        seen += [loss.detach(), *left_by(model)]
        descend(model)
    return seen


@each
def test_graph_breaks(case: Case) -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        return steps(case, forward, model)

    same(case, train, Broken)


@each
def test_block_by_block(case: Case) -> None:
    def compiler(model: Any) -> Any:
        for block in model:
            options = {**PLANNING, "memory": case.memory, "lowering": "aot_eager"}
            block.compile(backend="offcompile", options=options)
        return model

    def build(width: int) -> nn.Module:
        return nn.Sequential(Deep(width), Deep(width))

    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        return steps(case, forward, model)

    same(case, train, build, compiler)


# --- transforms -----------------------------------------------------------------------------------


class Transformed(Deep):
    """Calls itself through `functional_call`, scores rows one by one, and uses a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 1.5 * p for name, p in self.layers[0].named_parameters()}
        scaled = torch.func.functional_call(self.layers[0], weights, (x,))
        slope = torch.func.grad(lambda y: torch.tanh(self.layers[1](y)).sum())(x)
        rows = torch.func.vmap(lambda row: torch.tanh(row) * row.sum())(x)
        return super().forward(scaled + slope + rows)


@each
def test_functional_transforms(case: Case) -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        return steps(case, forward, model)

    same(case, train, Transformed, against="aot_eager")


@each
def test_double_backward_is_refused_and_training_goes_on(case: Case) -> None:
    """Every backend of torch.compile that goes through AOTAutograd refuses it."""

    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        if forward is not model:
            x = case.batch(0).requires_grad_()
            (slope,) = torch.autograd.grad(loss_of(forward(x)), x, create_graph=True)
            with pytest.raises(RuntimeError, match="does not currently support double backward"):
                torch.autograd.grad(slope.square().sum(), x)
            del x, slope
            assert live_tickets() == 0
        return steps(case, forward, model)

    same(case, train)


class Penalized(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Deep(width)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: self.inner(y).square().mean())(x)
        return self.inner(x) + slope.square().sum()


@each
def test_a_gradient_penalty_inside_of_the_compiled_function(case: Case) -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        return steps(case, forward, model)

    same(case, train, Penalized, against="aot_eager")


@each
def test_a_gradient_penalty_of_the_plain_model(case: Case) -> None:
    """The penalty's own forward goes past the compiled function."""

    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen = []
        for step in range(2):
            x = case.batch(step).requires_grad_()
            (slope,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
            loss = loss_of(forward(x)) + slope.square().sum()
            loss.backward()
            seen += [loss.detach(), *left_by(model)]
            descend(model)
        return seen

    same(case, train)


# --- models as objects ----------------------------------------------------------------------------


@each
def test_saved_loaded_and_copied(case: Case) -> None:
    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        loss_of(forward(case.batch(0))).backward()
        descend(model)
        kept = {k: v.clone() for k, v in model.state_dict().items()}
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        twin = copy.deepcopy(model)
        loss_of(forward(case.batch(1))).backward()
        descend(model)
        seen = [*left_by(model), *left_by(twin)]  # the copy did not move
        loaded = torch.load(io.BytesIO(file.getvalue()))
        assert loaded.keys() == kept.keys()
        assert all(torch.equal(loaded[name], kept[name]) for name in kept)
        model.load_state_dict(loaded)
        loss = loss_of(forward(case.batch(2)))
        loss.backward()
        loss_of(twin(case.batch(2))).backward()
        return [*seen, loss.detach(), *left_by(twin)]

    same(case, train)


class Two(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = Deep(width), Deep(width)


@each
def test_two_models(case: Case) -> None:
    def compiler(model: Any) -> Any:
        both = case.ours(model.one), case.ours(model.other)
        return lambda x: both[1](both[0](x))

    def train(forward: Any, model: Any) -> list[Tensor]:
        call = (lambda x: model.other(model.one(x))) if forward is model else forward
        return steps(case, call, model)

    same(case, train, Two, compiler)


class Batches(Dataset[Tensor]):
    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.case.batch(index)


@each
def test_workers_that_are_forked(case: Case) -> None:
    """In the middle of a step, with tensors away, and between steps."""

    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        seen = []
        for _ in range(2):
            workers = DataLoader(
                Batches(case), batch_size=None, num_workers=1, multiprocessing_context="fork"
            )
            for x in workers:
                loss = loss_of(forward(x))
                child = os.fork()
                if child == 0:
                    os._exit(7)
                loss.backward()
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
                seen += [loss.detach(), *left_by(model)]
                descend(model)
        return seen

    same(case, train)
