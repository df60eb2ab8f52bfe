"""Builds the model and inputs that are named on the command line.

A name is `file.py:function` or `package.module:function`. The function is called with the meta
device as default and returns `(model, inputs)` or `(model, inputs, loss)`; inputs are a tensor, a
tuple or a dictionary of keywords. If it takes `batch`, it is called once per batch size.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offcompile.ir import InvalidInput, OffloadError, Violation

from . import huggingface

Built = tuple[Any, Callable[[int], Any], Any]


def build(name: str, batch: int, length: int, dtype: str) -> tuple[Built, bool]:
    """Return (model, inputs for a batch, loss), and True if other batch sizes can be asked for."""
    if name.startswith(huggingface.PREFIX):
        return huggingface.build(name.removeprefix(huggingface.PREFIX), length, dtype), True
    factory = _factory(name)
    several = "batch" in inspect.signature(factory).parameters
    model, inputs, loss = _called(factory, name, batch, several)

    def inputs_for(wanted: int) -> Any:
        return inputs if wanted == batch else _called(factory, name, wanted, several)[1]

    return (model, inputs_for, loss), several


def _called(
    factory: Callable[..., Any], name: str, batch: int, several: bool
) -> tuple[Any, Any, Any]:
    import torch

    try:
        with torch.device("meta"):
            made = factory(batch=batch) if several else factory()
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
