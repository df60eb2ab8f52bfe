"""The nodes that `compact` adds: bits made in forward, and their uses in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

from offcompile.runtime.kernels import bit_ops
from offcompile.runtime.kernels.bits import mask_bytes

from .graphs import Graphs
from .sizes import SizeMaker

aten = torch.ops.aten

#: ops that use only the shape and memory format of their second argument
SHAPE_ONLY = frozenset(
    (
        aten.avg_pool2d_backward.default,
        aten.avg_pool3d_backward.default,
        aten.max_pool2d_with_indices_backward.default,
        aten._adaptive_avg_pool2d_backward.default,
    )
)


@dataclass
class MaskCandidate:
    """One storage that forward saves, the saved nodes on it, and their readers in backward."""

    root: fx.Node
    saved: list[fx.Node]
    value: torch.Tensor
    #: (reader in backward, its operand: the placeholder or an alias of it)
    readers: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    @property
    def needs_bits(self) -> bool:
        return any(reader.target not in SHAPE_ONLY for reader, _ in self.readers)


def laid_alike(one: object, other: torch.Tensor) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


# --- forward --------------------------------------------------------------------------------------


def make_bits(candidate: MaskCandidate, fuses: bool) -> fx.Node:
    """Add the node that makes the bits right after the tensor, so that the tensor can be freed
    after its last use in forward."""
    whole, root, value = candidate.saved[0], candidate.root, candidate.value
    if laid_alike(root.meta.get("val"), value):
        whole = root
    inputs, target = root.all_input_nodes, root.target
    pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    compares = value.dtype == torch.bool and pointwise and len(inputs) == 1
    # the partitioner puts comparisons that only backward needs at the end
    if compares and inputs[0].op == "call_function":
        inputs[0].append(root)
    if fuses and value.dtype != torch.bool:
        truths = value.new_empty_strided(value.shape, value.stride(), dtype=torch.bool)
        at_most_zero = _node(whole, aten.le.Scalar, (whole, 0), truths, behind=True)
        whole = _node(at_most_zero, aten.logical_not.default, (at_most_zero,), behind=True)
    packed = value.new_empty((mask_bytes(value.numel()),), dtype=torch.uint8)
    return _node(whole, bit_ops.pack_bits, (whole,), packed, behind=True)


def save(graphs: Graphs, bits: fx.Node) -> None:
    """Save one more tensor, before the existing ones, to match `new_placeholder`."""
    (output,) = graphs.forward.graph.find_nodes(op="output")
    outputs = list(output.args[0])
    outputs.insert(graphs.num_outputs, bits)
    output.args = (tuple(outputs),)
    known = output.meta.get("desc")
    if known is not None:
        new = SavedForBackwardsAOTOutput(0)
        output.meta["desc"] = [*known[: graphs.num_outputs], new, *known[graphs.num_outputs :]]


def forget(graphs: Graphs, names: set[str]) -> None:
    """Remove the named tensors from forward's saved outputs and backward's inputs."""
    assert graphs.backward is not None
    (output,) = graphs.forward.graph.find_nodes(op="output")
    outputs, known = list(output.args[0]), output.meta.get("desc")
    kept = [
        i
        for i, out in enumerate(outputs)
        if i < graphs.num_outputs or not isinstance(out, fx.Node) or out.name not in names
    ]
    output.args = (tuple(outputs[i] for i in kept),)
    if known is not None:
        seen = list(known[: graphs.num_outputs])
        rest = [type(known[i]) for i in kept[graphs.num_outputs :]]
        output.meta["desc"] = [*seen, *(kind(i) for i, kind in enumerate(rest))]
    for node in reversed(graphs.forward.graph.nodes):
        if node.name in names and not node.users:  # an alias that was made only to be saved
            graphs.forward.graph.erase_node(node)
    for node in graphs.backward.graph.find_nodes(op="placeholder"):
        if node.name in names:
            _erase(node)


def _erase(node: fx.Node) -> None:
    for user in list(node.users):  # aliases that are no longer read
        _erase(user)
    node.graph.erase_node(node)


# --- backward -------------------------------------------------------------------------------------


def read_bits(candidate: MaskCandidate, mask: fx.Node | None, sizes: MaskSizes) -> None:
    value = candidate.value
    for reader, source in candidate.readers:
        if reader.target in SHAPE_ONLY:
            reader.replace_input_with(source, _stand_in(reader, value, sizes))
            continue
        assert mask is not None
        size, stride = sizes.make(value.shape), sizes.make(value.stride())
        if reader.target is aten.threshold_backward.default:
            new = _node(reader, bit_ops.masked_grad, (reader.args[0], mask, stride))
        elif reader.target is aten.le.Scalar:
            new = _node(reader, bit_ops.unpack_bits, (mask, size, stride, True))
        else:
            whole = _node(reader, bit_ops.unpack_bits, (mask, size, stride, False), value)
            reader.replace_input_with(source, whole)
            continue
        reader.replace_all_uses_with(new)
        reader.graph.erase_node(reader)


def _stand_in(reader: fx.Node, value: torch.Tensor, sizes: MaskSizes) -> fx.Node:
    """An uninitialized tensor with the shape and memory format of `value`."""
    size = sizes.make(value.shape)
    how = {"dtype": value.dtype, "device": value.device}
    if value.device.type == "cpu" and value.is_contiguous():
        # expand a single element; on a GPU, the reader would make that tensor contiguous in memory
        one = _node(reader, aten.empty.memory_format, ([],), value.new_empty([]), kwargs=how)
        return _node(reader, aten.expand.default, (one, size), _val(one).expand(value.shape))
    stride = sizes.make(value.stride())
    return _node(reader, aten.empty_strided.default, (size, stride), value, kwargs=how)


def _node(
    beside: fx.Node,
    target: Callable[..., object],
    args: tuple[object, ...],
    value: torch.Tensor | None = None,
    behind: bool = False,
    kwargs: dict[str, object] | None = None,
) -> fx.Node:
    """Add a node before or after another, with that node's value unless one is given."""
    graph = beside.graph
    with graph.inserting_after(beside) if behind else graph.inserting_before(beside):
        new = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
    new.meta = {k: v for k, v in beside.meta.items() if k in ("nn_module_stack", "stack_trace")}
    new.meta["val"] = beside.meta["val"] if value is None else value
    if target in bit_ops.BIT_OPS:
        # Inductor honours an op's exact-strides tag only if this entry is present
        new.meta["eager_input_vals"] = (fx.map_arg(new.args, lambda n: n.meta["val"]), {})
    return new


def _val(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


class MaskSizes:
    """The sizes of dropped saved tensors, made in backward from its other inputs."""

    def __init__(self, graph: fx.Graph, gone: set[str]) -> None:
        self.maker = SizeMaker(graph)
        placeholders = list(graph.find_nodes(op="placeholder"))
        for node in placeholders:
            self.maker.learn(node)
        self.first = next(n for n in graph.nodes if n.op != "placeholder")
        self.maker.learn_dims(n for n in placeholders if n.name not in gone)

    def has(self, value: torch.Tensor) -> bool:
        symbols = {
            s
            for size in (*value.shape, *value.stride())
            if isinstance(size, torch.SymInt)
            for s in size.node.expr.free_symbols
        }
        return all(map(self.maker.knows, symbols))

    def make(self, sizes: tuple[int | torch.SymInt, ...]) -> list[int | fx.Node]:
        with self.maker.graph.inserting_before(self.first):
            return self.maker.make(sizes)
