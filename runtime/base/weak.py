"""Weak references to parameters that do not stop torch from swapping their contents.

`torch.utils.swap_tensors` gives a parameter another tensor's content: `Module.to` does so for
tensor subclasses, and for all parameters after `set_swap_module_params_on_conversion(True)`. It
refuses a tensor that has weak references. So the references below are removed for the swap and
restored after it: the parameter lives on with other memory, as after `p.data = …`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef


class WeakTensor:
    """Calling it returns the tensor while it lives, then None. The thread that drops the last
    reference calls `died`."""

    __slots__ = ("__weakref__", "_died", "_link")

    def __init__(self, tensor: torch.Tensor, died: Callable[[], object] | None = None) -> None:
        _allow_swaps()
        self._died = died
        self._link: _Link | None = _Link(tensor, self)

    def __call__(self) -> torch.Tensor | None:
        link = self._link
        return None if link is None else link()


class _Link(weakref.ref[torch.Tensor]):
    """The underlying weak reference, which can be found from its tensor."""

    __slots__ = ("of",)

    def __new__(cls, tensor: torch.Tensor, of: WeakTensor) -> _Link:
        return super().__new__(cls, tensor, None if of._died is None else _tell)

    def __init__(self, tensor: torch.Tensor, of: WeakTensor) -> None:
        self.of = weakref.ref(of)


def _tell(link: weakref.ref[torch.Tensor]) -> None:
    of = link.of()  # type: ignore[attr-defined]
    if of is not None and of._died is not None:
        of._died()


class _Key(WeakIdRef):
    """A mapping's weak reference to a key; the mapping can be found from it."""

    __slots__ = ("of",)
    of: weakref.ref[Any]


def tensor_keys() -> MutableMapping[torch.Tensor, Any]:
    """Create a mapping with weak keys, compared by identity."""
    _allow_swaps()
    made: MutableMapping[torch.Tensor, Any] = WeakIdKeyDictionary()
    made.ref_type = functools.partial(_key, weakref.ref(made))  # type: ignore[attr-defined]
    return made


def _key(
    of: weakref.ref[Any], tensor: torch.Tensor, removed: Callable[[Any], object] | None = None
) -> WeakIdRef:
    if removed is None:  # for a look-up
        return WeakIdRef(tensor)
    key = _Key(tensor, removed)
    key.of = of
    return key


@functools.cache
def _allow_swaps() -> None:
    swap: Any = torch.utils.swap_tensors  # untyped

    @functools.wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        restore = [*_let_go(t1), *_let_go(t2)]
        try:
            swap(t1, t2)
        finally:
            for again in restore:
                again()

    torch.utils.swap_tensors = swap_tensors  # Module looks it up here


def _let_go(tensor: torch.Tensor) -> list[Callable[[], object]]:
    """Remove our references to a tensor; returns the functions that restore them."""
    restore: list[Callable[[], object]] = []
    for link in weakref.getweakrefs(tensor):
        of = link.of() if isinstance(link, _Link | _Key) else None
        if isinstance(of, WeakTensor):
            of._link = None
            restore.append(functools.partial(_link_again, of, tensor))
        elif of is not None and tensor in of:
            restore.append(functools.partial(of.__setitem__, tensor, of.pop(tensor)))
    return restore


def _link_again(of: WeakTensor, tensor: torch.Tensor) -> None:
    of._link = _Link(tensor, of)
