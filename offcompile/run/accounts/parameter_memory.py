"""Counts the device memory of parameters and their gradients; cheap to query repeatedly."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offcompile.runtime.base.weak import WeakTensor
from offcompile.runtime.device.owners import device_bytes
from offcompile.runtime.moves.weights import is_on_host
from offcompile.runtime.states.updates import optimizer_of


class ParameterMemory:
    """Device memory by id of the parameter. Does not keep parameters alive.

    A parameter is looked at again only if an address has changed, since memory never changes its
    tier in place.
    """

    def __init__(self) -> None:
        #: bytes of the live parameters, each as large as when first seen
        self.seen_bytes = 0
        #: increases with every new parameter
        self.births = 0
        #: parameter → bytes on the device
        self.weight: dict[int, int] = {}
        #: parameter → bytes that its gradient will take there beyond an existing one
        self.coming: dict[int, int] = {}
        self._total = 0
        self._refs: dict[int, WeakTensor] = {}
        self._seen: dict[int, int] = {}
        #: parameters whose gradient was on the host when it was last seen
        self._leaving: set[int] = set()
        #: ids of dead parameters; filled at any time, by any thread
        self._dead: deque[int] = deque()
        #: findings of the last look: addresses of weights and gradients; gradient bytes by id
        self._addresses: tuple[list[int], list[int]] | None = None
        self._standing: dict[int, int] = {}

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add parameters that are not known yet."""
        for p in parameters:
            key = id(p)
            if key not in self._refs:
                self._seen[key] = device_bytes(p)
                self._refs[key] = WeakTensor(p, partial(self._dead.append, key))
                self.seen_bytes += self._seen[key]
                self.births += 1
                self._addresses = None

    def drop_dead(self) -> list[int]:
        """Forget dead parameters; return their ids, which may be reused by now."""
        gone = []
        while self._dead:
            key = self._dead.popleft()
            gone.append(key)
            del self._refs[key]
            self.seen_bytes -= self._seen.pop(key)
            self._leaving.discard(key)
            self._addresses = None
        return gone

    def living(self) -> list[torch.Tensor]:
        return [p for ref in tuple(self._refs.values()) if (p := ref()) is not None]

    def total_bytes(self) -> int:
        """Bytes of all weights and gradients on the device now. Updates `weight` and `coming`."""
        parameters = self.living()
        found = _addresses(parameters) if len(parameters) == len(self._refs) else None
        if found is None:
            self._look_at_all()
        elif self._addresses is None:
            self._look_at_all()
            self._addresses = found
        elif found != self._addresses:
            keys = tuple(self._refs)
            for i, (a, b, c, d) in enumerate(zip(*found, *self._addresses, strict=True)):
                p = parameters[i]
                if (a, b) != (c, d) and p is not None:
                    self._look(keys[i], p)
            self._addresses = found
        return self._total

    def weight_bytes(self) -> int:
        """Bytes of all weights on the device, when last looked at."""
        return sum(self.weight.values())

    def size_of(self, keys: Iterable[int]) -> int:
        """Bytes of these parameters, each as large as when first seen."""
        return sum(self._seen.get(key, 0) for key in keys)

    def takes(self, parameter: torch.Tensor) -> int:
        """Bytes of the parameter and of its coming gradient, when last looked at."""
        return self.weight.get(id(parameter), 0) + self.coming.get(id(parameter), 0)

    def expect_on_host(self, parameters: Iterable[torch.Tensor]) -> None:
        """Expect gradients of hosted parameters on the host until one is seen on the device."""
        self._leaving.update(id(p) for p in parameters if not _bytes_on_device(p))
        self._addresses = None

    def _look_at_all(self) -> None:
        self.weight.clear()
        self.coming.clear()
        self._standing.clear()
        self._total = 0
        for key, ref in tuple(self._refs.items()):
            p = ref()
            if p is not None:
                self._look(key, p)

    def _look(self, key: int, parameter: torch.Tensor) -> None:
        self._total -= self.weight.get(key, 0) + self._standing.get(key, 0)
        weight = _bytes_on_device(parameter)
        standing = 0 if parameter.grad is None else _gradient_bytes(parameter.grad)
        if parameter.grad is not None:
            (self._leaving.discard if standing else self._leaving.add)(key)
        self.weight[key], self._standing[key] = weight, standing
        comes = parameter.requires_grad and key not in self._leaving
        if comes and not weight:  # an optimizer takes the gradient of a hosted weight at once
            comes = optimizer_of(parameter) is None
        self.coming[key] = max(0, self._seen[key] - standing) if comes else 0
        self._total += weight + standing


def _addresses(parameters: Sequence[torch.Tensor]) -> tuple[list[int], list[int]] | None:
    """Addresses of weights and of gradients (0: none); None if a tensor has no single address."""
    gradients = [p.grad for p in parameters]
    try:
        if any(map(is_traceable_wrapper_subclass, parameters)):
            return None
        weights = [p.data_ptr() for p in parameters]
        return weights, [0 if g is None else g.data_ptr() for g in gradients]
    except RuntimeError:  # raised for sparse tensors, and for subclasses without memory
        return None


def _gradient_bytes(gradient: torch.Tensor) -> int:
    """Bytes of one gradient, even if several gradients are views of one bucket, as in DDP."""
    nbytes = _bytes_on_device(gradient)
    strided = gradient.layout is torch.strided
    return min(nbytes, gradient.numel() * gradient.element_size()) if strided else nbytes


def _bytes_on_device(tensor: torch.Tensor) -> int:
    return 0 if is_on_host(tensor) else device_bytes(tensor)
