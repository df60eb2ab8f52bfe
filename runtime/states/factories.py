"""torch's factory functions, and how each fills the tensor that it creates.

With the same generator state, a filled tensor holds the values that the function itself would give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: fill(made, args, kwargs): fills `made` as the function would, given the function's arguments
Fill = Callable[[torch.Tensor, tuple[Any, ...], dict[str, Any]], object]


def _nothing(made: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return None


def _zeros(made: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return made.zero_()


def _ones(made: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return made.fill_(1)


def _full(made: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return made.fill_(kwargs["fill_value"] if "fill_value" in kwargs else args[-1])


# the same calls that torch makes on memory of its own
def _uniform(made: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return made.uniform_(0, 1, generator=kwargs.get("generator"))


def _normal(made: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return made.normal_(0, 1, generator=kwargs.get("generator"))


#: on the default device unless `device` is given
FACTORIES: dict[Any, Fill] = {
    torch.empty: _nothing,
    torch.zeros: _zeros,
    torch.ones: _ones,
    torch.full: _full,
    torch.rand: _uniform,
    torch.randn: _normal,
}
#: on the device of their first argument unless `device` is given
ALIKE: dict[Any, Fill] = {
    torch.empty_like: _nothing,
    torch.zeros_like: _zeros,
    torch.ones_like: _ones,
    torch.full_like: _full,
    torch.rand_like: _uniform,
    torch.randn_like: _normal,
    torch.Tensor.new_empty: _nothing,
    torch.Tensor.new_zeros: _zeros,
    torch.Tensor.new_ones: _ones,
    torch.Tensor.new_full: _full,
}
