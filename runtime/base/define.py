"""Defines the package's torch operators, in the form that graphs after AOTAutograd can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import has_side_effect

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
