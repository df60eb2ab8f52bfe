"""Keeps torch from cutting graphs whose gradients are reduced while backward runs.

A compiled backward hands DDP all of its gradients when it is over. So torch's DDPOptimizer cuts the
graph of a DDP module into one for each bucket, and DDP reduces a bucket while the graph before it
runs. Where offcompile reduces gradients itself, it needs no such parts, and loses by them: none of
their plans sees the others' tensors, and holes between tensors that outlive a part cost time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from offcompile.ir import OffloadError

from .agreement import Agreement
from .reduction import ddp_reduces

#: attributes in which torch's wrappers keep the backend that they wrap
_WRAPPED = ("_torchdynamo_orig_backend", "compiler_fn")


def keep_graphs_whole(
    backend: object, refusal: Callable[[OffloadError, Agreement], Callable[..., Any]]
) -> None:
    """Let DDPOptimizer give `backend` whole graphs where DDP does not reduce gradients itself.

    refusal: makes what to return in place of a compiled graph, if a rank is gone.
    """
    if not torch.distributed.is_available():
        return
    from torch._dynamo.backends.distributed import DDPOptimizer

    cutting: Any = DDPOptimizer.compile_fn

    @functools.wraps(cutting)
    def compile_fn(self: Any, gm: fx.GraphModule, *inputs: Any, **configs: Any) -> Any:
        try:
            whole = _is_for(self.backend_compile_fn, backend) and not ddp_reduces()
        except OffloadError as error:
            return refusal(error, Agreement.on(gm))
        if whole:
            return self.backend_compile_fn(gm, *inputs, **configs)
        return cutting(self, gm, *inputs, **configs)

    DDPOptimizer.compile_fn = compile_fn  # type: ignore[method-assign]


def _is_for(compile_fn: object, backend: object) -> bool:
    """True if `compile_fn` is `backend`, as torch wraps it."""
    wrapped = [getattr(compile_fn, name) for name in _WRAPPED if hasattr(compile_fn, name)]
    return compile_fn is backend or any(_is_for(inner, backend) for inner in wrapped)
