"""Defines the package's torch operators, in the form that graphs after AOTAutograd can hold.

A compiled graph calls them with tensors and numbers alone. Anything else that they need to know
about a run is set by `inside` around it, and asked for by `current`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.fx.node import has_side_effect

Value = TypeVar("Value")

NAMESPACE = "offcompile"
# untyped in torch
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def define(
    name: str,
    signature: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    effect: bool = True,
) -> Any:
    """Define the overload `offcompile::name` with the schema `name + signature`.

    One kernel serves tensors of every device. They arrive with exactly the strides that were
    traced, and no gradients pass through. If `effect`, no call is eliminated or merged with an
    equal one.
    """
    _library.define(name + signature, tags=(torch.Tag.needs_exact_strides,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    if effect:
        has_side_effect(overload)
    return overload


class _Scopes(threading.local):
    """The innermost value of each kind on one thread."""

    def __init__(self) -> None:
        self.innermost: dict[type, Any] = {}


# per thread: several may run compiled graphs at once
_scopes = _Scopes()


def current(kind: type[Value]) -> Value | None:
    """The value of the innermost `inside` of this kind on this thread; None outside of any."""
    found: Value | None = _scopes.innermost.get(kind)
    return found


@contextmanager
def inside(kind: type[Value], value: Value | None) -> Iterator[None]:
    """Inside the context, `current(kind)` is `value` on this thread; None: as outside of any."""
    innermost = _scopes.innermost
    outer = innermost.get(kind)
    innermost[kind] = value
    try:
        yield
    finally:
        innermost[kind] = outer
