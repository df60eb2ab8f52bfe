"""Builds the model and inputs that are named on the command line.

A name is `file.py:function` or `package.module:function`. The function is called with the meta
device as default and returns `(model, inputs)` or `(model, inputs, loss)`; inputs are a tensor, a
tuple or a dictionary of keywords. If it takes `batch` or `length`, it is called for each that is
tried.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offcompile.ir import InvalidInput, OffloadError, Violation

from . import huggingface

#: length of sequences if none is asked for
USUAL_LENGTH = 1024
#: arguments of a factory that can be asked for
ASKED = ("batch", "length")


@dataclass(frozen=True)
class Built:
    """A model, its inputs for a batch and, where it may be asked for, a length, and its loss."""

    model: Any
    inputs: Callable[..., Any]
    loss: Any
    #: arguments that `inputs` takes, of `ASKED`
    takes: frozenset[str]


def build(name: str, batch: int, length: int | None, dtype: str) -> Built:
    """Build the model that the command line names. A model that depends on the length of sequences
    is that for the given one."""
    long = USUAL_LENGTH if length is None else length
    if name.startswith(huggingface.PREFIX):
        made = huggingface.build(name.removeprefix(huggingface.PREFIX), long, dtype)
        return Built(*made, frozenset(ASKED))
    factory = _factory(name)
    parameters = inspect.signature(factory).parameters
    asked: dict[str, int] = {"batch": batch} if "batch" in parameters else {}
    if "length" in parameters:
        # without one asked for, the factory's own
        needs = parameters["length"].default is inspect.Parameter.empty
        asked |= {"length": long} if needs or length is not None else {}
    model, inputs, loss = _called(factory, name, asked)

    def inputs_for(batch: int, length: int | None = None) -> Any:
        given = {"batch": batch, "length": length}
        changed = {k: v for k, v in given.items() if k in parameters and v is not None}
        wanted = asked | changed
        return inputs if wanted == asked else _called(factory, name, wanted)[1]

    return Built(model, inputs_for, loss, frozenset(ASKED) & parameters.keys())


def _called(
    factory: Callable[..., Any], name: str, asked: Mapping[str, int]
) -> tuple[Any, Any, Any]:
    import torch

    try:
        with torch.device("meta"):
            made = factory(**asked)
    except InvalidInput:
        raise
    except Exception as error:
        raise OffloadError(f"{name} failed: {type(error).__name__}: {error}") from error
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module):
        return made[0], made[1], made[2] if len(made) == 3 else None
    detail = (
        f"{name} returned {type(made).__name__}; return (model, inputs) or (model, inputs, loss)"
    )
    raise InvalidInput([Violation("bad-value", name, detail)])


def _factory(name: str) -> Callable[..., Any]:
    place, _, function = name.rpartition(":")
    if not place or not function:
        detail = f"{name!r} names no factory; write file.py:function, module:function or hf:NAME"
        raise InvalidInput([Violation("bad-value", "model", detail)])
    found = _names_in(place).get(function)
    if callable(found):
        return found  # type: ignore[no-any-return]
    detail = f"{place} has no function {function!r}"
    raise InvalidInput([Violation("unknown-id", "model", detail)])


def _names_in(place: str) -> dict[str, Any]:
    path = Path(place)
    if place.endswith(".py"):
        if not path.is_file():
            raise InvalidInput([Violation("bad-value", "model", f"there is no file {place}")])
        sys.path.insert(0, str(path.resolve().parent))  # like `python file.py`
        return runpy.run_path(place, run_name=path.stem)
    sys.path.insert(0, "")
    try:
        return vars(importlib.import_module(place))
    except ImportError as error:
        detail = f"{place} cannot be imported: {error}"
        raise InvalidInput([Violation("bad-value", "model", detail)]) from error
