"""One captured half, and what capturing it asks of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.device.cuda.capture import Capture, HostRoom
from offcompile.runtime.device.graphs import StreamGraph
from offcompile.runtime.device.interface import Device

from .places import Arguments, Geometry, Lent, StaticPlace
from .results import Results

#: larger arguments are copied in only if their addresses have been seen to change
SMALL_BYTES = 16 << 20


@dataclass(eq=False)
class CapturedHalf:
    """One half, captured."""

    graph: StreamGraph
    capture: Capture
    arguments: Arguments
    results: Results
    #: addresses of arguments and of saved results
    addresses: frozenset[int]
    #: the saved results among them that nobody but this forward makes
    own: frozenset[int]
    #: most bytes that it took of the device beside what stood when its capture began
    taken_bytes: int
    #: of a forward: host memory for the gradients of its backward, until that is captured
    rooms: list[HostRoom]
    runs: int = 0

    @property
    def owner(self) -> object:
        """Keeps the memory that results are lent in; not the results, which would keep it."""
        return self.graph, tuple(self.arguments.static.values())


def is_small(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.numel() * x.element_size() <= SMALL_BYTES


def in_words(error: BaseException) -> str:
    """Say what keeps a half from being captured. An error that ends a capture early can bring
    another one with it, of lanes that were not joined: the first of ours tells more."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OffloadError):
        found = found.__context__
    text = str(found or error).partition("\n")[0].rstrip(".")
    if found is not None:
        return text
    return (
        f"capturing failed ({type(error).__name__}: {text}); an op of the model may wait for the"
        " device, as .item() and boolean masks do"
    )


def spare_of(x: Any) -> Any:
    """Note how to bring an argument back without keeping it: by its place; a ticket by itself."""
    return StaticPlace.of(x) if isinstance(x, torch.Tensor) and x.device.type != "cpu" else x


def take_out(device: Device, out: Sequence[Lent], arguments: Sequence[Any]) -> None:
    """Give `.grad` memory of its own, on its tier, where gradients stay over steps. HostFull if
    there is no room for it."""
    for x in arguments:
        grad = x.grad if isinstance(x, torch.nn.Parameter) else None
        if grad is None or not any(one.is_in(grad) for one in out):
            continue
        if device.slot_of(grad) is None:
            grad.data = grad.data.clone()
            continue
        (flat,) = device.addressable([grad.untyped_storage().nbytes()])
        grad.data = Geometry.of(grad).within(flat).copy_(grad.data)
