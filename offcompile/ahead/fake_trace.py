"""Traces a call of a model on fake CPU tensors, as the device planned for would run it.

The model and its arguments are copied without memory, so they may be on any device, the meta device
included.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from offcompile.graph.lowering.lower import Lowering

from .batch_trace import Traced, trace_call

#: position of the dropout probability in the arguments of attention
DROPOUT_AT = 4


def trace_ahead(
    model: nn.Module,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
    lowering: Lowering,
    loss: Callable[[Any], Any] | None,
    for_card: bool,
) -> Traced:
    """Trace the graphs of a call, and of its backward."""
    mode = FakeTensorMode()
    fake = _without_memory(mode, model)
    inputs, keywords = tree_map_only(torch.Tensor, partial(_faked, mode), (inputs, dict(keywords)))
    with fused_attention() if for_card else nullcontext(), warnings.catch_warnings():
        # a warning about transformers' own code, which nobody who asks for a forecast can change
        warnings.filterwarnings("ignore", r"Dynamo detected a call to a `functools\.lru_cache`")
        return trace_call(fake, mode, inputs, keywords, lowering, "", loss)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Trace attention as on GPUs, fused even with dropout; the CPU would decompose it."""
    plain = functional.scaled_dot_product_attention

    def fused(*given: Any, **named: Any) -> torch.Tensor:
        if "dropout_p" in named:
            named["dropout_p"] = 0.0
        if len(given) > DROPOUT_AT:
            given = (*given[:DROPOUT_AT], 0.0, *given[DROPOUT_AT + 1 :])
        return plain(*given, **named)

    functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


def _faked(mode: FakeTensorMode, given: torch.Tensor) -> torch.Tensor:
    with mode:
        found = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype)
    return found.requires_grad_(given.requires_grad)


def _without_memory(mode: FakeTensorMode, model: nn.Module) -> nn.Module:
    """Copy the model with fake parameters and buffers."""
    known: dict[int, torch.Tensor] = {}
    for t in (*model.parameters(), *model.buffers()):
        made = _faked(mode, t)
        if isinstance(t, nn.Parameter):
            made = nn.Parameter(made.detach(), requires_grad=t.requires_grad)
        known[id(t)] = made
    # tensors in the memo are not copied
    return copy.deepcopy(model, dict(known))
