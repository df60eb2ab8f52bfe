"""The two halves of a captured graph, and the classification of their nodes.

A node is an *op* (it computes), an *alias* (a view: it costs nothing and shares the storage of
one of its inputs), a *part* (one output of an op that returns several), or irrelevant here
(sizes, constants). The other modules on graphs use these terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from offcompile.ir import BACKWARD, FORWARD

Size = int | torch.SymInt
#: maps a size to the number that the plan assumes
Hint = Callable[[Size], int]


@dataclass(frozen=True)
class Graphs:
    """The forward and backward graphs of one compiled function; inference has no backward."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    #: number of forward's outputs that go to the user; the rest are saved for backward
    num_outputs: int
    #: indices of the captured function's arguments that are parameters
    parameters: frozenset[int] = frozenset()
    #: device type that the plan is for; storages elsewhere use none of its memory and do not move
    device: str = "cpu"
    #: argument of the captured function → the user's name for it
    names: Mapping[int, str] = field(default_factory=dict)
    #: parameters whose memory may not be replaced (`runtime.owners`)
    fixed: frozenset[int] = frozenset()

    def __iter__(self) -> Iterator[tuple[str, fx.GraphModule]]:
        yield FORWARD, self.forward
        if self.backward is not None:
            yield BACKWARD, self.backward


def is_parameter(node: fx.Node, graphs: Graphs) -> bool:
    """True if a placeholder is a parameter, by the argument index that AOTAutograd recorded."""
    return getattr(node.meta.get("desc"), "idx", None) in graphs.parameters


def may_leave(node: fx.Node, graphs: Graphs) -> bool:
    """True for a parameter whose weight and gradient may live off the device."""
    return is_parameter(node, graphs) and node.meta["desc"].idx not in graphs.fixed


def argument_name(node: fx.Node, graphs: Graphs) -> str:
    """The user's name for the argument of a placeholder; "" if unknown."""
    return graphs.names.get(getattr(node.meta.get("desc"), "idx", -1), "")


def outputs_of(module: fx.GraphModule) -> list[object]:
    (node,) = module.graph.find_nodes(op="output")
    return list(node.args[0])


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph, with the same node names and attributes. Change it, then call `closed`."""
    graph = fx.Graph()
    outputs = graph.graph_copy(module.graph, {})
    (old,) = module.graph.find_nodes(op="output")
    graph.output(outputs).meta.update(old.meta)
    return around(graph, module)


@contextmanager
def codeless() -> Iterator[None]:
    """Let torch write the code of a graph only when it is called: most graphs are only read."""
    with _use_lazy_graph_module(True):
        yield


def around(graph: fx.Graph, module: fx.GraphModule) -> fx.GraphModule:
    """Put a graph into a module with the attributes of another."""
    with codeless():
        made = _make_graph_module(module, graph)
    made.meta.update(module.meta)
    return made


def closed(module: fx.GraphModule) -> fx.GraphModule:
    module.graph.lint()
    module.recompile()
    return module


def name_saved_alike(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Give forward's saved outputs the names of backward's arguments for them.

    Partitioned graphs use one name for a saved tensor on both sides, and so do we. Random states
    are the exception: torch adds them after the partition, under a different name in backward.

        forward    getitem_6 = run_and_save_rng_state[0]; return y, add, getitem_6
        backward   (add, rng_state_output_0, tangents_1)
    """
    saved = [out for out in outputs_of(forward)[num_outputs:] if _is_saved_tensor(out)]
    taken = [n for n in backward.graph.find_nodes(op="placeholder") if _is_saved_tensor(n)]
    known = {n.name for n in forward.graph.nodes}
    for out, argument in zip(saved, taken, strict=False):
        if argument.name not in known and not is_tangent(argument):
            assert isinstance(out, fx.Node)
            out._rename(argument.name)
    forward.recompile()


def is_tangent(node: fx.Node) -> bool:
    """True if a placeholder of backward is the gradient of an output, by torch's naming."""
    return "tangent" in node.name


def _is_saved_tensor(node: object) -> bool:
    return isinstance(node, fx.Node) and is_tensor(node.meta.get("val"))


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors in a node's value: the value itself, or the elements of a tuple or list."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [t for v in value for t in tensors_in(v)]
    return []


def storage_key(value: torch.Tensor) -> int | None:
    """A key that identifies the tensor's storage; None if it has no plain storage."""
    if value.layout is not torch.strided:
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except RuntimeError:  # torch raises this for wrappers without a storage of their own
        return None


def is_getitem(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") == "getitem"
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[0].meta.get("val"), tuple | list)
    )


def aliased_input(node: fx.Node) -> fx.Node | None:
    """The input whose storage the node's value shares; None if it has its own storage."""
    if node.op != "call_function":
        return None
    value = node.meta.get("val")
    if is_getitem(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return _shared(value, source.all_input_nodes) or _by_schema(source)
    if isinstance(value, tuple | list) and tensors_in(value):
        return _shared(tensors_in(value)[0], node.all_input_nodes) or _by_schema(node)
    return _shared(value, node.all_input_nodes) or _by_schema(node)


def root_of(node: fx.Node) -> fx.Node:
    """The node that made the storage of a view, or of a view of a view."""
    while (source := aliased_input(node)) is not None:
        node = source
    return node


def _shared(value: object, inputs: list[fx.Node]) -> fx.Node | None:
    if not isinstance(value, torch.Tensor) or (key := storage_key(value)) is None:
        return None
    for node in inputs:
        theirs = node.meta.get("val")
        if isinstance(theirs, torch.Tensor) and storage_key(theirs) == key:
            return node
    return None


def _by_schema(node: fx.Node) -> fx.Node | None:
    """The input that the op returns as a view, according to its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    given = (node.args[i] for i in _viewed_arguments(node.target) if i < len(node.args))
    return next((n for n in given if isinstance(n, fx.Node)), None)


@cache
def _viewed_arguments(target: Any) -> tuple[int, ...]:
    """Positions of the arguments of an op that it returns, or of which it returns views."""
    schema = target._schema
    returned = {
        name
        for result in schema.returns
        if result.alias_info is not None
        for name in result.alias_info.before_set | result.alias_info.after_set
    }
    aliases = ((i, argument.alias_info) for i, argument in enumerate(schema.arguments))
    return tuple(i for i, info in aliases if info is not None and returned & info.before_set)


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs that the node writes to in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        several = given if isinstance(given, tuple | list) else [given]
        found += [g for g in several if isinstance(g, fx.Node)]
    return found


def bookkeeping(graph: fx.Graph) -> frozenset[str]:
    """Names of nodes that only serve to update inputs, such as running statistics. The graph's
    other results are the same without them."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        changes = node.op != "placeholder" and node.is_impure() and not mutated_inputs(node)
        if node.op == "output" or changes:
            continue
        ends_here = not node.users and bool(mutated_inputs(node))
        if ends_here or (node.users and found.issuperset(node.users)):
            found.add(node)
    return frozenset(node.name for node in found)


def may_repeat(node: fx.Node) -> bool:
    """True if rerunning the op gives the same bits and has no other effect."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if target.namespace not in ("aten", "prims"):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return _drops_nothing(node)
    return not node.is_impure()


def _drops_nothing(node: fx.Node) -> bool:
    """True if the op uses random numbers only for dropout, at probability 0, as attention may."""
    schema = node.target._schema  # type: ignore[union-attr]
    for at, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) == 0.0)
    return False


def covers_its_storage(value: torch.Tensor, hint: Hint) -> bool:
    """True if the tensor is dense and covers every byte of its storage."""
    if value.storage_offset() != 0:
        return False
    if hint(value.untyped_storage().nbytes()) != hint(value.numel()) * value.element_size():
        return False
    # in a dense tensor, sorted by stride, each stride is the product of the sizes below it
    expected = 1
    dims = sorted((hint(st), hint(s)) for s, st in zip(value.shape, value.stride(), strict=True))
    for stride, size in dims:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def storage_bytes(value: torch.Tensor, hint: Hint) -> int:
    """Bytes of the value's storage; 0 if it has no plain storage."""
    if storage_key(value) is None:
        return 0
    return hint(value.untyped_storage().nbytes())
