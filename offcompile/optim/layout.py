"""Views tensors as flat ranges of memory, whatever their strides."""

from __future__ import annotations

import torch

from offcompile.runtime.moves.registry import runtimes


def is_dense(tensor: torch.Tensor) -> bool:
    """True if its elements fill a memory range without gaps or overlap, in any dimension order."""
    if tensor.is_contiguous():
        return True
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != end:
            return False
        end *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor's memory as one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Flatten a tensor in the memory order of the parameter, or of its `contiguous()` if the
    parameter is not dense. Returns a view if the order is the same already."""
    if tensor.shape != parameter.shape:
        tensor = tensor.reshape(parameter.shape)
    wanted = parameter.stride() if is_dense(parameter) else _contiguous(parameter)
    sizes = tensor.shape
    lies_so = all(
        size == 1 or a == b for size, a, b in zip(sizes, tensor.stride(), wanted, strict=True)
    )
    if not lies_so:
        moved = torch.empty_strided(sizes, wanted, dtype=tensor.dtype, device=tensor.device)
        tensor = moved.copy_(tensor)
    return flat(tensor)


def shaped_like(flat_state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """View a flat tensor with the parameter's shape and, if it is dense, its strides."""
    strides = parameter.stride() if is_dense(parameter) else _contiguous(parameter)
    return flat_state.as_strided(parameter.shape, strides)


def room_like(parameter: torch.Tensor) -> torch.Tensor:
    """Allocate a gradient where the parameter lives, on the host if it is hosted."""
    strides = parameter.stride() if is_dense(parameter) else _contiguous(parameter)
    nbytes = parameter.numel() * parameter.element_size()
    for runtime in runtimes():
        if runtime.device.slot_of(parameter) is not None:
            (memory,) = runtime.device.addressable([nbytes])
            return memory.view(parameter.dtype).as_strided(parameter.shape, strides)
    return torch.empty_strided(
        parameter.shape, strides, dtype=parameter.dtype, device=parameter.device
    )


def _contiguous(tensor: torch.Tensor) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
