"""Errors for tensors that cannot be packed or unpacked."""

from __future__ import annotations

import torch

from offcompile.ir import OffloadError

from .layout import PackedLayout


def damaged(nbytes: int, layout: PackedLayout) -> OffloadError:
    return OffloadError(
        f"{nbytes} packed bytes of {layout.elements} elements of {layout.width} bytes do not add "
        "up: they were cut short or changed since they were packed. Nothing can be restored from "
        "them; check the drive that they came from"
    )


def check_flat(tensor: torch.Tensor, what: str) -> None:
    if not tensor.is_cpu or tensor.dim() != 1 or not tensor.is_contiguous():
        raise OffloadError(
            f"{what} is of shape {tuple(tensor.shape)} with strides {tensor.stride()} on "
            f"{tensor.device}: give a flat contiguous tensor in the processor's memory"
        )


def check_room(tensor: torch.Tensor, least_bytes: int, what: str) -> None:
    check_flat(tensor, what)
    if tensor.dtype != torch.uint8 or tensor.numel() < least_bytes:
        raise OffloadError(
            f"{what} has {tensor.numel()} elements of {tensor.dtype}: give at least {least_bytes} "
            "of torch.uint8"
        )
