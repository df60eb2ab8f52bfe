"""Traces a model's graphs for one batch on fake tensors: runs nothing and allocates nothing.

The model is copied onto fake tensors and compiled as in the backend, up to the point where the
backend plans. Compiled code of the real model is not affected: the copies are called by a separate
function, which owns all of Dynamo's cache entries.
"""

from __future__ import annotations

import copy
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map

from offcompile.graph.graphs import outputs_of
from offcompile.graph.lowering.lower import Compiled, Halves, Lowering, Phase, lower
from offcompile.graph.names import argument_names
from offcompile.graph.split import Splits
from offcompile.ir import InvalidInput, OffloadError, Violation
from offcompile.runtime.base.interpreter import rarely_collected


@dataclass(frozen=True)
class Traced:
    #: forward, backward (None: no training), and the number of forward's outputs that users see
    graphs: tuple[fx.GraphModule, fx.GraphModule | None, int]
    #: indices of the arguments that are parameters
    parameters: frozenset[int]
    device: torch.device
    #: argument → its readable name
    names: Mapping[int, str] = field(default_factory=dict)
    #: the same graphs with the loss in pieces; None: no training
    splits: Splits | None = None


class _Seen(Exception):
    """Raised once the graphs are known, to end the compilation."""


class _Catch:
    """Lowering hooks that end the compilation as soon as they have the graphs."""

    no_buffer_reuse = False

    def __init__(self) -> None:
        self.graphs: tuple[fx.GraphModule, fx.GraphModule | None, int] | None = None
        self.splits: Splits | None = None

    def may_split(self, splits: Splits) -> None:
        self.splits = splits

    def training(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, inputs: Any
    ) -> Halves | None:
        self.graphs = forward, backward, num_outputs
        raise _Seen

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | None:
        self.graphs = graph, None, len(outputs_of(graph))
        raise _Seen

    def ready(self, phase: Phase, compiled: Compiled) -> Compiled:
        return compiled


def trace(
    model: Callable[..., Any], make_inputs: Callable[[int], Any], batch: int, lowering: Lowering
) -> Traced:
    """Trace the one graph that a call with `make_inputs(batch)` compiles to.

    Raises OffloadError if the model compiles to several graphs, or to none.
    """
    mode = FakeTensorMode()
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    with mode:
        inputs = as_arguments(make_inputs(batch))
    return trace_call(fake, mode, inputs, {}, lowering, f" for a batch of {batch}")


def trace_call(
    fake: Callable[..., Any],
    mode: FakeTensorMode,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    lowering: Lowering,
    when: str = "",
    loss: Callable[[Any], Any] | None = None,
) -> Traced:
    """Like `trace`, for a model that is on fake tensors already. `when`: for messages. `loss`: maps
    the model's output to the value to differentiate."""
    found: list[Traced] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        catch = _Catch()
        names = argument_names(gm)
        try:
            lower(gm, example_inputs, lowering, catch)
        except _Seen:
            assert catch.graphs is not None
        given = enumerate(example_inputs)
        parameters = frozenset(i for i, x in given if isinstance(x, nn.Parameter))
        if catch.graphs is not None:
            device = _device_of(example_inputs)
            found.append(Traced(catch.graphs, parameters, device, names, catch.splits))
        return gm.forward

    collects = torch._dynamo.config.patch(run_gc_after_compile=False)  # nothing is compiled
    with mode, rarely_collected(), collects:
        given, named = tree_map(_faked(mode), (tuple(inputs), dict(keywords)))
        call = torch.compile(_fresh_caller(), backend=backend, dynamic=False, fullgraph=True)
        try:
            call(fake, given, named, loss)
        except torch._dynamo.exc.TorchDynamoException as error:
            _raise_models_own(fake, given, named, loss)
            told = str(error).strip().partition("\n")[0]
            raise OffloadError(
                f"The model could not be traced as one graph{when}: {told}."
                " torch._dynamo.explain(model)(*inputs) shows where it breaks; give the part that"
                " compiles to one graph."
            ) from error
    if len(found) != 1:
        raise OffloadError(
            f"The model compiles to {len(found)} graphs{when}, not to one: give a"
            " module, or a function, that computes with tensors."
        )
    return found[0]


def _raise_models_own(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    loss: Callable[[Any], Any] | None,
) -> None:
    """Call the model without compiling, to raise its own error, which Dynamo hides.

    Ignores errors that only fake tensors raise because they have no data.
    """
    try:
        result = model(*inputs, **keywords)
        if loss is not None:
            loss(result)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "/torch/" not in f.filename] or frames
        where = f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}"
        raise OffloadError(
            f"The model's own code raises {type(error).__name__}: {error} ({where}). Call"
            " model(*inputs) once as it is, with inputs of these shapes, to see it there."
        ) from error


def _fresh_caller() -> Callable[..., Any]:
    """Make a function with its own code object, so that it shares no compilations."""

    def call(
        model: Callable[..., Any],
        inputs: Sequence[Any],
        keywords: Mapping[str, Any],
        loss: Callable[[Any], Any] | None,
    ) -> Any:
        result = model(*inputs, **keywords)
        return result if loss is None else loss(result)

    return types.FunctionType(call.__code__.replace(), globals(), "offcompile_max_batch")


def _faked(mode: FakeTensorMode) -> Callable[[Any], Any]:
    def one(value: Any) -> Any:
        real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return mode.from_tensor(value) if real else value

    return one


def as_arguments(inputs: Any) -> tuple[Any, ...]:
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    if isinstance(inputs, tuple | list):
        return tuple(inputs)
    detail = (
        f"make_inputs returned {type(inputs).__name__}; return a tensor or a tuple of arguments"
    )
    raise InvalidInput([Violation("bad-value", "make_inputs", detail)])


def _device_of(values: Sequence[Any]) -> torch.device:
    devices = {t.device for t in tree_leaves(list(values)) if isinstance(t, torch.Tensor)}
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
