"""Creates tensors directly on the host tier, and moves parameters there when a module gets them.

Large tensors from torch's factories (`torch.empty`, `torch.zeros`, …) are allocated in host memory,
so that initializers write there; every parameter, and every large buffer, that a module gets from
elsewhere is moved there. Random numbers are the same as in ordinary memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from offcompile.runtime.device.interface import Device
from offcompile.runtime.memory.accelerators import device_module

from .factories import ALIKE, FACTORIES

#: smaller tensors stay ordinary unless they become parameters
LARGE_BYTES = 256 << 10

#: given a tensor on the host, these create another one there: `deepcopy` and `Module.to` use them
_COPIES = {
    torch.clone,
    torch.Tensor.clone,
    torch.Tensor.to,
    torch.Tensor.half,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.bfloat16,
}
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Birth(TorchFunctionMode):
    """While entered, allocates this thread's new tensors on `home` in `device`'s host tier.

    Enter each object once. Other threads are not affected.
    tell: called with the bytes allocated so far.
    """

    def __init__(
        self, device: Device, home: torch.device, tell: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        super().__init__()
        self._device, self._home = device, home
        self._tell, self._nbytes = tell, 0
        #: (address, offset, bytes) of ordinary memory → a weak reference to its storage, and the
        #: memory that replaced it
        self._moved: dict[
            tuple[int, int, int], tuple[weakref.ref[torch.UntypedStorage], torch.Tensor]
        ] = {}

    def __enter__(self) -> Birth:
        super().__enter__()  # type: ignore[no-untyped-call]
        _births.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _births.leave(self)
        self._moved.clear()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = None
        here = _births.here
        if not torch.compiler.is_compiling() and not here.at_work:
            here.at_work = True
            try:
                if func in FACTORIES or func in ALIKE:
                    made = self._factory(func, args, kwargs)
                elif func in _COPIES:
                    made = self._copy(func, args, kwargs)
            finally:
                here.at_work = False
        if made is not None:
            return made
        result = func(*args, **kwargs)
        if func == _SET_DATA and isinstance(args[0], nn.Parameter):
            _births.take(self, args[0])
        return result

    def take(self, tensor: torch.Tensor) -> None:
        """Move a tensor that a module holds to the host, unless it is there already.

        Tensors on the same bytes of the same storage stay shared; any other sharing is lost.
        """
        if not _plain(tensor) or tensor.device != self._home or not tensor.numel():
            return
        if self._device.slot_of(tensor) is not None:
            return
        nbytes = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), tensor.data_ptr() - storage.data_ptr(), nbytes
        known = self._moved.get(place)
        with torch.no_grad():
            # dense, with the tensor's layout if possible
            shape = torch.empty_like(tensor, device="meta")
            if known is not None and known[0]() is storage:
                tensor.data = _laid_out(known[1], shape)
                return
            flat = self._memory(nbytes)
            moved = _laid_out(flat, shape)
            moved.copy_(tensor)
            self._moved[place] = weakref.ref(storage, lambda _: self._moved.pop(place, None)), flat
            tensor.data = moved

    def _factory(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        asked, least_bytes = kwargs.get("device"), LARGE_BYTES
        if func in ALIKE:
            default, fill = args[0].device if args else None, ALIKE[func]
            if args and args[0].is_meta:  # `Module.to_empty`, which replaces parameters
                least_bytes = 1
        else:
            default, fill = torch.get_default_device(), FACTORIES[func]
        special = [kwargs.get(k) for k in ("out", "pin_memory", "names")]
        if any(v is not None and v is not False for v in special):
            return None
        if self._away(default if asked is None else asked):
            return None
        # the same call on the meta device gives size, strides and dtype
        told = {k: v for k, v in kwargs.items() if k not in ("generator", "requires_grad")}
        made = self._made(_shape(func, args, {**told, "device": "meta"}), least_bytes)
        if made is None:
            return None
        with torch.no_grad():
            fill(made, args, kwargs)
        return made.requires_grad_() if kwargs.get("requires_grad") else made

    def _copy(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        source = args[0] if args else None
        if source is None or not _plain(source) or source.device != self._home:
            return None
        if (source.requires_grad and torch.is_grad_enabled()) or (
            self._device.slot_of(source) is None
        ):
            return None
        shape = torch.empty_strided(
            source.size(), source.stride(), dtype=source.dtype, device="meta"
        )
        rest = [self._as_meta(a) for a in args[1:]]
        if any(isinstance(a, torch.Tensor) for a in (*rest, *kwargs.values())):
            return None
        told = {k: self._as_meta(v) for k, v in kwargs.items()}
        result = _shape(func, (shape, *rest), told)
        if result is shape:  # nothing to do: torch returns the source itself
            return None
        made = self._made(result, 1)
        return None if made is None else made.copy_(source.detach())

    def _made(self, shape: torch.Tensor | None, least_bytes: int) -> torch.Tensor | None:
        """Host memory with the meta tensor's layout; None if the tensor does not qualify."""
        if shape is None or not _plain(shape) or not shape.is_meta:
            return None
        if _nbytes(shape) < least_bytes:
            return None
        if _nbytes(shape) != shape.untyped_storage().nbytes():
            return None
        return _laid_out(self._memory(_nbytes(shape)), shape)

    def _memory(self, nbytes: int) -> torch.Tensor:
        (flat,) = self._device.addressable([nbytes])
        self._nbytes += nbytes
        self._tell(self._nbytes)
        return flat

    def _away(self, device: Any) -> bool:
        try:
            asked = torch.device(device)
        except (TypeError, RuntimeError):  # torch itself reports the invalid device
            return True
        if asked.type != self._home.type or asked.type == "cpu":
            return asked.type != self._home.type
        index = asked.index
        if index is None:
            index = device_module(asked.type).current_device()
        return index != self._home.index

    def _as_meta(self, value: Any) -> Any:
        named = isinstance(value, str | torch.device)
        return torch.device("meta") if named and not self._away(value) else value


def _shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of a call on the meta device; None if the call fails, there or everywhere."""
    try:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    except (RuntimeError, TypeError, ValueError):
        return None


def _plain(tensor: torch.Tensor) -> bool:
    """True for a dense tensor with ordinary memory: not a subclass, not lazy."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return type(tensor) is torch.Tensor or (
        isinstance(tensor, nn.Parameter | nn.Buffer) and type(tensor.data) is torch.Tensor
    )


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _laid_out(flat: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    return flat.view(shape.dtype).as_strided(shape.size(), shape.stride())


class _Here(threading.local):
    """State of a thread: the contexts that it has entered, and whether one of them is working."""

    def __init__(self) -> None:
        self.births: list[Birth] = []
        self.at_work = False


class _Births:
    """The contexts that threads are inside of, and module hooks while there is one."""

    def __init__(self) -> None:
        self.here = _Here()
        self._lock = threading.Lock()
        self._users = 0
        self._handles: list[Any] = []

    def enter(self, birth: Birth) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._handles = [
                    register_module_parameter_registration_hook(self._parameter),
                    register_module_buffer_registration_hook(self._buffer),
                ]
        self.here.births.append(birth)

    def leave(self, birth: Birth) -> None:
        self.here.births.remove(birth)
        with self._lock:
            self._users -= 1
            if not self._users:
                for handle in self._handles:
                    handle.remove()
                self._handles = []

    def take(self, birth: Birth, tensor: torch.Tensor) -> None:
        """Let `birth` take a tensor unless this thread's births are at work already."""
        here = self.here
        if not here.at_work:
            here.at_work = True
            try:
                birth.take(tensor)
            finally:
                here.at_work = False

    def _parameter(self, module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if value is not None and self.here.births:
            self.take(self.here.births[-1], value)

    def _buffer(self, module: nn.Module, name: str, value: torch.Tensor | None) -> None:
        if value is not None and self.here.births and _nbytes(value) >= LARGE_BYTES:
            self.take(self.here.births[-1], value)


# per process, as torch keeps these hooks of modules; and per thread, since a factory is called
# without an argument that could say where to allocate
_births = _Births()
