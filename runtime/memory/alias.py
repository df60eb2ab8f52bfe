"""CUDA tensors that alias host memory: kernels read and write it in place, over the bus.

Rules for users. `record_stream` does nothing for such a storage: hold the tensor until the work is
done. It shares no version counter with the host tensor: show autograd only one of the two.
`.to("cuda")` returns the alias itself: `clone()` copies it to the device. Kernels must not use
atomics on it. Every read crosses the bus again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import torch
from torch.utils.dlpack import from_dlpack

from offcompile.ir import OffloadError

from . import pinning
from .accelerators import accelerator, device_module
from .blocks import MemoryBlock
from .host_arena import HostArena

#: DLPack's device type codes
DLPACK_DEVICES = {"cpu": 1, "cuda": 2}
_CHECKED_BYTES = 4096


def cuda_alias(
    source: MemoryBlock | torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> torch.Tensor:
    """Returns a tensor on `device` over the first bytes of `source`, which it keeps alive.

    source: a block of a pinned HostArena, or a contiguous CPU tensor over (part of) one.
    stride: in elements, none negative; None: contiguous. If the shape has no elements, returns
    fresh memory instead. A CPU `device` gives a CPU tensor in the same way, for tests. Raises
    OffloadError, with the reason, if the memory cannot be aliased.
    """
    shape, stride = tuple(shape), _contiguous(shape) if stride is None else tuple(stride)
    if len(shape) != len(stride) or any(n < 0 for n in (*shape, *stride)):
        raise OffloadError(
            f"no alias of shape {shape} and stride {stride}: give as many of both, none negative"
        )
    if device.type not in DLPACK_DEVICES and accelerator(device.type) is None:
        raise OffloadError(f"no alias of host memory on {device}: CUDA devices have them")
    if not prod(shape):
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    reach = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    nbytes = reach * dtype.itemsize
    owner = source.tensor if isinstance(source, MemoryBlock) else source.detach()
    address = _address(owner, nbytes, dtype)
    flat = alias_bytes(owner, address, nbytes, device)
    return flat.view(dtype).as_strided(shape, stride)


def alias_bytes(owner: object, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns a flat uint8 tensor on `device` over memory that `owner` keeps alive, made by the
    first protocol that torch accepts."""
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, device_module(device.type).current_device())
    ways = [_by_interface, _by_dlpack] if device.type == "cuda" else [_by_dlpack]
    said: list[str] = []
    for way in ways:
        try:
            alias = way(owner, address, nbytes, device)
        except (RuntimeError, TypeError, ValueError, BufferError, SystemError) as error:
            said.append(str(error).partition("\n")[0])
            continue
        # torch may have made a copy
        if alias.data_ptr() == address and alias.device == device:
            return alias
        said.append(f"torch made a copy on {alias.device}")
    raise OffloadError(
        f"torch {torch.__version__} made no alias of host memory on {device}: {'; '.join(said)}. "
        "Copies work without it: turn direct access off."
    )


class ArrayInterface:
    """Describes memory to `torch.as_tensor`, whose storage keeps this object alive."""

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),  # not read-only
            "version": 3,
        }


def _by_interface(owner: object, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(ArrayInterface(owner, address, nbytes), device=device)


# -- DLPack ------------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_UNSIGNED = 1
_NAME = b"dltensor"
# per process: these must live until C++ calls the deleter with the address of their structure
_lent: dict[int, tuple[_Managed, object, object]] = {}


def _deleter(address: int, lent: dict[int, tuple[_Managed, object, object]] = _lent) -> None:
    lent.pop(address, None)


_delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_deleter)
# storages may outlive this module, so the deleter that they call must never be freed
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_delete))
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def dlpack_capsule(
    owner: object, address: int, nbytes: int, device: torch.device
) -> tuple[object, int]:
    """Returns a capsule of flat bytes on `device`, and its number for `return_capsule`.

    The consumer of the capsule keeps `owner` alive until it calls the deleter.
    """
    shape = (ctypes.c_int64 * 1)(nbytes)
    added = accelerator(device.type)
    kind = DLPACK_DEVICES[device.type] if added is None else added.dlpack_code
    pointer = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    tensor = _DLTensor(address, kind, device.index or 0, 1, _UNSIGNED, 8, 1, pointer, None, 0)
    managed = _Managed(tensor, None, ctypes.cast(_delete, ctypes.c_void_p))
    number = ctypes.addressof(managed)
    _lent[number] = (managed, shape, owner)
    return _new_capsule(number, _NAME, None), number


def return_capsule(number: int) -> None:
    """Release the objects kept for a capsule that nothing consumed."""
    _lent.pop(number, None)


def _by_dlpack(owner: object, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    capsule, number = dlpack_capsule(owner, address, nbytes, device)
    try:
        alias: torch.Tensor = from_dlpack(capsule)
    except BaseException:
        return_capsule(number)
        raise
    return alias


# -- check that it works on this machine -------------------------------------------------------


def check_alias(device: torch.device) -> None:
    """Check, once per process and device, that host and device see each other's writes.

    Raises an OffloadError that says what does not work.
    """
    problem = _problem_of_aliases(device)
    if problem is not None:
        raise OffloadError(problem)


@cache
def _problem_of_aliases(device: torch.device) -> str | None:
    added = accelerator(device.type)
    arena = HostArena(_CHECKED_BYTES, registrar=None if added is None else added.registrar())
    try:
        module = device_module("cuda" if device.type == "cpu" else device.type)
        block = arena.block(_CHECKED_BYTES)
        alias = cuda_alias(block, device, torch.uint8, (_CHECKED_BYTES,))
        prove_alias(block.tensor, alias, lambda: module.synchronize(device))
        del alias, block
    except (OffloadError, RuntimeError) as error:
        return str(error)
    finally:
        arena.close()
    return None


def prove_alias(host: torch.Tensor, alias: torch.Tensor, synchronize: Callable[[], None]) -> None:
    """Raise OffloadError unless `host` and `alias`, flat bytes, show each other's writes."""
    pattern = torch.arange(host.numel(), dtype=torch.int64).remainder(251).to(torch.uint8)
    host.zero_()
    # uses kernels here and below: the driver might perform a copy from either side
    torch.bitwise_xor(pattern.to(alias.device), 0, out=alias)
    synchronize()
    if not torch.equal(host, pattern):
        raise OffloadError(
            f"what {alias.device} writes through an alias does not show in host memory: this "
            "machine cannot access host memory in place; turn direct access off"
        )
    host.copy_(pattern.flip(0))
    seen = alias.bitwise_xor(0).cpu()
    if not torch.equal(seen, pattern.flip(0)):
        raise OffloadError(
            f"what the host writes does not show on {alias.device} through an alias: this machine "
            "cannot access host memory in place; turn direct access off"
        )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _address(owner: torch.Tensor, nbytes: int, dtype: torch.dtype) -> int:
    """Returns the address of the bytes; OffloadError if they are too few, unpinned or unaligned."""
    if owner.device.type != "cpu" or not owner.is_contiguous():
        raise OffloadError(
            f"only contiguous CPU tensors over host memory can be aliased, not one of strides "
            f"{tuple(owner.stride())} on {owner.device}"
        )
    found = owner.numel() * owner.element_size()
    if found < nbytes:
        raise OffloadError(
            f"an alias of {nbytes} bytes does not fit: there are {found} bytes of host memory"
        )
    address = owner.data_ptr()
    if not pinning.is_registered(address, nbytes):
        raise OffloadError(
            f"{nbytes} bytes of host memory cannot be aliased: they are not in a pinned arena, and "
            "a GPU reaches only memory that is registered with CUDA. Take a block of a HostArena "
            "whose `pinned` is true (a warning has said why if yours is not)."
        )
    if address % dtype.itemsize:
        raise OffloadError(
            f"an alias of {dtype} must begin at a multiple of {dtype.itemsize} bytes: "
            f"{address:#x} is not one"
        )
    return address
