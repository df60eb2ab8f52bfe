"""Finds the user's names for graph arguments, such as `layers.0.up.weight` for `primals_3`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import zip_longest
from types import MappingProxyType

from torch import fx

from offcompile.ir import BACKWARD, FORWARD
from offcompile.runtime.states import update_ops

from .graphs import Graphs, argument_name, outputs_of

#: one step of a path in Dynamo's notation: `._modules['up']`, `._parameters['weight']`, `['x']`
_STEP = re.compile(r"(?:\._(?:modules|parameters|buffers))?\['?([^'\]]*)'?\]")


def argument_names(gm: fx.GraphModule) -> Mapping[int, str]:
    """Position of each placeholder with an origin known to Dynamo → the path to it."""
    found = {}
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        source = getattr(node, "_dynamo_source", None)
        # a method in torch 2.11, a property in later versions
        name = getattr(source, "name", None)
        text = name() if callable(name) else name
        if isinstance(text, str):
            found[i] = plain_path(text)
    return MappingProxyType(found)


def plain_path(source: str) -> str:
    """`L['self']._modules['up']._parameters['weight']` → `up.weight`.

    The model itself is omitted if it is a local variable, as when a module is compiled.
    """
    scope, rest = source[:1], source[1:]
    path = _STEP.sub(r".\1", rest).strip(".")
    _, _, below = path.partition(".")
    return below if scope == "L" and below else path


def tensor_names(graphs: Graphs, storage_of: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Storage of a named argument → its name; storage of a gradient → its argument's name."""
    found: dict[str, str] = {}
    wanted = graphs.forward.graph.find_nodes(op="placeholder")
    made = [] if graphs.backward is None else outputs_of(graphs.backward)
    for argument, gradient in zip_longest(wanted, made):
        name = argument_name(argument, graphs) if argument is not None else ""
        if not name:
            continue
        found[storage_of.get((FORWARD, argument.name), "")] = name
        if isinstance(gradient, fx.Node):
            if gradient.target is update_ops.offer:
                gradient = gradient.all_input_nodes[1]
            found.setdefault(storage_of.get((BACKWARD, gradient.name), ""), name)
    found.pop("", None)
    return found
