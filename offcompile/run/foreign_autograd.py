"""Refuses, before a step, autograd features that do not work with graphs that move tensors."""

from __future__ import annotations

import torch
from torch._dynamo import compiled_autograd
from torch._dynamo import config as dynamo_config

from offcompile.ir import OffloadError


def refuse_foreign_autograd(graph: str) -> None:
    """Raise OffloadError under compiled autograd or under hooks on saved tensors."""
    if not torch.is_grad_enabled():
        return
    if dynamo_config.compiled_autograd or compiled_autograd.compiled_autograd_enabled:
        raise OffloadError(
            f"{graph} moves tensors to keep its budget, and compiled autograd is on. It would trace"
            " backward anew, and cannot trace moves. Set torch._dynamo.config.compiled_autograd ="
            " False (leave compiled_autograd._enable) or raise `memory` until nothing moves."
        )
    # The argument True returns the hooks even while they are disabled inside a hook.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    # Checkpoint's own hooks keep no copy: they recompute forward, which makes new tickets.
    if hooks is not None and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        name = getattr(hooks[0], "__qualname__", repr(hooks[0]))
        raise OffloadError(
            f"{graph} moves tensors to keep its budget, and is called under"
            f" torch.autograd.graph.saved_tensors_hooks (pack hook {name})."
            " A hook would copy the tickets that stand for what was moved, and not the tensors."
            " Call the model outside of the hooks (save_on_cpu is not needed beside offcompile)"
            " or raise `memory` until nothing moves."
        )
