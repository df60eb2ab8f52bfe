"""Converts nodes of a captured graph to calls, with shapes for tensors and numbers for sizes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from offcompile.graph.graphs import Hint, aliased_input, mutated_inputs, tensors_in
from offcompile.runtime.measure.op import OpCall, TensorSpec


def is_view(node: fx.Node) -> bool:
    """True if the node is only a view of one of its inputs."""
    return aliased_input(node) is not None and not mutated_inputs(node)


def call_of(node: fx.Node, hint: Hint) -> OpCall | None:
    """The node as a call with shapes for tensors; None if that does not fully describe it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    try:
        args = tuple(_plain(a, hint) for a in node.args)
        kwargs = {k: _plain(v, hint) for k, v in node.kwargs.items()}
        outputs = tuple(_spec(t, hint) for t in tensors_in(node.meta.get("val")))
    except _Indescribable:
        return None
    return OpCall(node.target, args, kwargs, outputs)


class _Indescribable(Exception):
    pass


def _plain(value: object, hint: Hint) -> object:
    if isinstance(value, fx.Node):
        if "val" not in value.meta:
            raise _Indescribable
        return _plain(value.meta["val"], hint)
    if isinstance(value, torch.Tensor):
        return _spec(value, hint)
    if isinstance(value, torch.SymInt):
        return _number(value, hint)
    if isinstance(value, list | tuple):
        return [_plain(v, hint) for v in value]
    if isinstance(value, torch.SymFloat | torch.SymBool | fx.GraphModule | Mapping):
        raise _Indescribable
    return value


def _number(size: int | torch.SymInt, hint: Hint) -> int:
    try:
        return int(hint(size))
    except Exception as error:  # for a data-dependent size, the hint may raise anything
        raise _Indescribable from error


def _spec(tensor: torch.Tensor, hint: Hint) -> TensorSpec:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise _Indescribable
    return TensorSpec(
        tensor.dtype,
        tuple(_number(n, hint) for n in tensor.shape),
        tuple(_number(n, hint) for n in tensor.stride()),
        tensor.device.type,
    )


def value_bytes(value: object, hint: Hint) -> int:
    """Bytes that a node's value spans, without tensors of unknown size."""
    total = 0
    for tensor in tensors_in(value):
        try:
            total += _spec(tensor, hint).nbytes
        except _Indescribable:
            continue  # unknown size
    return total


def has_tensors(node: fx.Node) -> bool:
    """True if the node takes or returns tensors, rather than computing sizes."""
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    return any(tensors_in(value) for value in values)
