"""What one parameter and its gradient take of their device; quick to ask again."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from offcompile.runtime.weights import is_on_host


class Holding:
    """Of one parameter, which it does not keep alive; `died` is called with its id.

    What is remembered is asked anew when memory has another address. Memory that stands does not
    go from one tier to another where it stands.
    """

    __slots__ = (
        "_address",
        "_grad",
        "_grad_address",
        "_grad_bytes",
        "_nbytes",
        "ref",
        "seen_bytes",
    )

    def __init__(self, parameter: torch.Tensor, died: Callable[[int], None]) -> None:
        key = id(parameter)
        self.ref = weakref.ref(parameter, lambda _: died(key))
        #: its size when it was first seen, wherever it was
        self.seen_bytes = parameter.untyped_storage().nbytes()
        self._address, self._nbytes = -1, 0
        self._grad: weakref.ref[torch.Tensor] | None = None
        self._grad_address, self._grad_bytes = -1, 0

    def weight_bytes(self, parameter: torch.Tensor) -> int:
        """Of the device; 0 where it lives on the host."""
        if type(parameter) is not torch.nn.Parameter:
            return _bytes_on_device(parameter)
        address = parameter.data_ptr()
        if address != self._address:
            self._nbytes, self._address = _bytes_on_device(parameter), address
        return self._nbytes

    def gradient_bytes(self, parameter: torch.Tensor) -> int:
        """Of the gradient that stands, on the device."""
        grad = parameter.grad
        if grad is None:
            return 0
        if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
            return _bytes_on_device(grad)
        address = grad.data_ptr()
        known = None if self._grad is None else self._grad()
        if known is not grad or address != self._grad_address:
            self._grad_bytes = _bytes_on_device(grad)
            self._grad, self._grad_address = weakref.ref(grad), address
        return self._grad_bytes


def _bytes_on_device(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return tensor.values().nbytes if tensor.is_coalesced() else tensor._values().nbytes
    return 0 if is_on_host(tensor) else tensor.untyped_storage().nbytes()
