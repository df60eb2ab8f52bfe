"""Replaces ops whose operands the plan uses in place on the host.

There are two tables. `write_of` gives the op that makes a gradient in host memory instead of on the
device. `IN_PLACE` gives, per device type, the op that reads a weight on the host better than the
plain one. An op without an entry can read in place unchanged, but cannot write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from offcompile.ir import FORWARD
from offcompile.runtime.moves import direct_ops

from .graphs import Graphs, Hint, aliased_input, outputs_of, tensors_in
from .stream_products import stream_addmm, stream_mm

aten = torch.ops.aten

#: (node, indices of its arguments on the host) → the op to run with the same arguments
Reader = Callable[[fx.Node, frozenset[int]], Any]
#: device type → op → function that chooses the replacement; it returns None for the op itself
IN_PLACE: dict[str, dict[Any, Reader]] = {
    "cuda": {aten.mm.default: stream_mm, aten.addmm.default: stream_addmm}
}


@dataclass(frozen=True)
class Write:
    """`target(*args, size, stride, dtype, tag, runtime)` writes the node's value to the host."""

    target: Any
    #: nodes of the original graph, or constants
    args: tuple[Any, ...]


def reader_of(node: fx.Node, hosted: frozenset[int], kind: str, exact: bool = True) -> Any:
    """The op to run instead, with the node's own arguments; None to keep the node's op.

    exact: the result must be the same to the last bit, which rules out all replacements.
    """
    choose = None if exact else IN_PLACE.get(kind, {}).get(node.target)
    return None if choose is None else choose(node, hosted)


def write_of(node: fx.Node) -> Write | None:
    """The op that makes the node's value on the host; None if only the device can."""
    make = _WRITES.get(node.target)
    value = node.meta.get("val")
    if make is None or not isinstance(value, torch.Tensor):
        return None
    given = [t for n in node.all_input_nodes for t in tensors_in(n.meta.get("val"))]
    if any(t.device != value.device for t in given):
        return None
    return make(node)


def workspace_of(node: fx.Node, hint: Hint) -> int:
    """Device memory, besides the operands, that writing the node's value in place needs."""
    if not does_less(node):
        return 0
    gradient, indices = (n.meta["val"] for n in node.all_input_nodes[:2])
    rows: int = hint(gradient.numel()) * gradient.element_size()  # if all rows are distinct
    # plus the sorted indices and their positions, to find the distinct rows
    return rows + 4 * hint(indices.numel()) * torch.int64.itemsize


def does_less(node: fx.Node) -> bool:
    """True if making the value in place is less work: only a few rows of a gradient's table."""
    return bool(node.target is aten.embedding_dense_backward.default)


def is_store(node: fx.Node) -> bool:
    return node.target in direct_ops.STORES


def touched_bytes(node: fx.Node, operand: fx.Node, nbytes: int, hint: Hint) -> int:
    """The bytes of an operand that the op reads: a gather reads only some rows."""
    value = node.meta.get("val")
    if not gathers(node, operand) or not isinstance(value, torch.Tensor):
        return nbytes
    looked_at: int = hint(value.numel()) * value.element_size()
    return min(nbytes, looked_at)


def product_rows(node: fx.Node, operand: fx.Node, hint: Hint) -> int:
    """The rows, or columns, that a product multiplies this operand by; 0 for all other ops."""
    if node.target not in (aten.mm.default, aten.addmm.default):
        return 0
    left, right = node.args[-2:]
    if operand is right and isinstance(left, fx.Node):
        return int(hint(left.meta["val"].shape[0]))
    if operand is left and isinstance(right, fx.Node):
        return int(hint(right.meta["val"].shape[1]))
    return 0


def gathers(node: fx.Node, operand: fx.Node) -> bool:
    """True if the op reads only the rows of this operand that another operand selects."""
    return node.target is aten.embedding.default and node.args[0] is operand


def scattered_reads(graphs: Graphs, storage_of: Mapping[tuple[str, str], str]) -> frozenset[str]:
    """The weights of which a step reads only some rows, including any later update.

    This excludes weights with a gradient in these graphs, since an optimizer reads the whole table.
    """
    reads: dict[str, list[bool]] = {}
    for phase, module in graphs:
        for node in module.graph.nodes:
            if node.op != "call_function" or aliased_input(node) is not None:
                continue
            for operand in node.all_input_nodes:
                storage = storage_of.get((phase, operand.name))
                if storage is not None:
                    reads.setdefault(storage, []).append(gathers(node, operand))
    trained = set()
    if graphs.backward is not None:
        wanted = graphs.forward.graph.find_nodes(op="placeholder")
        for of, gradient in zip(wanted, outputs_of(graphs.backward), strict=False):
            if gradient is not None:
                trained.add(storage_of.get((FORWARD, of.name)))
    return frozenset(t for t, found in reads.items() if all(found) and t not in trained)


def _product(target: Any) -> Callable[[fx.Node], Write]:
    return lambda node: Write(target, tuple(node.args))


def _sum(node: fx.Node) -> Write | None:
    a, b = node.args[:2]
    value = node.meta["val"]
    if not all(isinstance(x, fx.Node) and x.meta["val"].dtype == value.dtype for x in (a, b)):
        return None
    return Write(direct_ops.store_add, (a, b, node.kwargs.get("alpha", 1)))


def _cast(node: fx.Node) -> Write:
    return Write(direct_ops.store_copy, (node.args[0],))


def _embedding(node: fx.Node) -> Write:
    return Write(direct_ops.store_embedding, tuple(node.args))


_WRITES: Mapping[Any, Callable[[fx.Node], Write | None]] = {
    aten.mm.default: _product(direct_ops.store_mm),
    aten.bmm.default: _product(direct_ops.store_bmm),
    aten.add.Tensor: _sum,
    aten._to_copy.default: _cast,
    torch.ops.prims.convert_element_type.default: _cast,
    aten.embedding_dense_backward.default: _embedding,
}
