"""Classifies graph nodes as Inductor sees them: views, library calls, and uses of operands."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

#: views to Inductor, regardless of their schemas
_SILENT_VIEWS = {aten._unsafe_view.default, aten.alias.default}
#: views that show the whole operand
WHOLE_VIEWS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t,
    aten.squeeze, aten.unsqueeze, aten.alias,
}  # fmt: skip
#: ops that use only an operand's shape, and so do not wait for its data
SHAPE_ONLY = {
    aten.full_like, aten.zeros_like, aten.ones_like, aten.empty_like, aten.rand_like,
    aten.randn_like, aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full,
    aten.new_empty_strided,
}  # fmt: skip
#: one op in fx, but several kernels in Inductor, some of which read only one operand
IN_PIECES = {
    aten.cat, aten.stack, aten.index_put, aten._unsafe_index_put, aten.scatter, aten.scatter_add,
    aten.scatter_reduce, aten.select_scatter, aten.slice_scatter,
}  # fmt: skip
#: ops that never fuse into their readers, so passing on their results costs nothing
_EXTERN = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward,
}  # fmt: skip
#: prefix of ops that make a gradient on the host; they never fuse into their readers either
_STORES = "offcompile.store_"
#: the operand that stays with the main kernel when Inductor decomposes the op
MAIN_OPERAND = {aten.addmm: 1, aten.baddbmm: 1}


def is_view(node: fx.Node) -> bool:
    """True if a node only views memory that another made (or takes it out of a tuple)."""
    if node.target is operator.getitem or node.target in _SILENT_VIEWS:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    if schema.is_mutable:
        return False
    return any(r.alias_info is not None for r in schema.returns)


def root_of(node: fx.Node) -> fx.Node:
    while passes_on(node):
        node = node.all_input_nodes[0]
    return node


def last_uses(graph: fx.Graph) -> dict[fx.Node, int]:
    """Node → position of the last node that needs its memory, directly or through views."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        uses = (last[u] if passes_on(u, node) else position[u] for u in node.users)
        last[node] = max(uses, default=position[node])
    return last


def passes_on(node: fx.Node, memory_of: fx.Node | None = None) -> bool:
    """True if a node is a view of its first operand's memory (of `memory_of`, if given)."""
    if node.op != "call_function" or not is_view(node):
        return False
    return memory_of is None or node.all_input_nodes[0] is memory_of


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def makes_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or (
        isinstance(value, tuple | list) and any(isinstance(v, torch.Tensor) for v in value)
    )


def packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def is_extern_op(node: fx.Node) -> bool:
    packet = packet_of(node)
    name = str(packet)
    return packet in _EXTERN or "scaled_dot_product" in name or name.startswith(_STORES)


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    if isinstance(node.target, torch._ops.OpOverload):
        for spec, arg in zip(node.target._schema.arguments, node.args, strict=False):
            alias = spec.alias_info
            if alias is not None and alias.is_write and isinstance(arg, fx.Node):
                yield arg
