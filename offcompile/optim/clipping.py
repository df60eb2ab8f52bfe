"""Computes the total gradient norm from single norms, like `torch.nn.utils.clip_grad_norm_`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from .ranks.shards import is_sharded, mesh_of, whole


def norm(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of one gradient; of a sharded one, a DTensor that no rank has summed up yet."""
    if is_sharded(gradient):
        # torch does the same, as it has no `_foreach_norm` for them
        of_shard: torch.Tensor = torch.linalg.vector_norm(gradient.detach(), 2.0)
        return of_shard
    found: torch.Tensor = torch._foreach_norm([gradient.detach()], 2.0)[0]
    return found


def total_norm(gradients: Sequence[torch.Tensor], norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients from their norms; bit for bit torch's result for this order.

    With sharded gradients it is the norm over all ranks, by a collective that every rank must call.
    """
    if not gradients:
        return torch.tensor(0.0)
    if len({(g.device, g.dtype) for g in gradients}) > 1:
        # torch groups by device and dtype, in an order of its own
        found = _group_tensors_by_device_and_dtype([list(gradients)], with_indices=True)
        norms = [norms[i] for _, indices in found.values() for i in indices]
    if len(set(map(mesh_of, gradients))) > 1:  # torch has no norm of these
        norms = [whole(n) for n in norms]
    together = torch.stack([n.to(gradients[0].device) for n in norms])
    result: torch.Tensor = torch.linalg.vector_norm(together, 2.0)
    return whole(result)


def coefficient(max_norm: float, total: torch.Tensor) -> torch.Tensor | None:
    """The factor to multiply gradients by; None if no clipping is needed."""
    found = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    return None if found.item() == 1.0 else found
