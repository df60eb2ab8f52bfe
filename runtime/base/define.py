"""Torch operators of ours, as graphs after AOTAutograd can hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import has_side_effect

NAMESPACE = "offcompile"
# torch gives it no types
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def define(
    name: str,
    signature: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    effect: bool = True,
) -> Any:
    """The overload `offcompile::name`, whose schema is `name + signature`.

    One kernel whatever the device of the tensors, which come in exactly the strides that were
    traced; no gradients pass through. With an `effect` no call is dropped or merged with its like.
    """
    _library.define(name + signature, tags=(torch.Tag.needs_exact_strides,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    if effect:
        has_side_effect(overload)
    return overload
