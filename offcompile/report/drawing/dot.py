"""Draws a graph: computation in one column, movement coloured by lane.

`draw` chooses the boxes (in program order) and edges to show. `to_dot` writes them for Graphviz;
`offcompile.report.drawing.svg` does its own layout, so that any browser can show the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from offcompile.ir.units import show_us, size

if TYPE_CHECKING:
    from torch import fx

NAMESPACE = "offcompile"
INPUT, COMPUTE, MOVEMENT, ORDER, OUTPUT = "input", "compute", "movement", "order", "output"
#: in graphs with more nodes, each run of computation becomes one box
COLLAPSE_ABOVE = 60

#: distinguishable by most people, on white, as a line and as a fill
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#7a3e9d", "#b22222")
PLAIN = "#5f6b7a"


@dataclass(frozen=True)
class Box:
    """One node of the graph, or a run of them."""

    kind: str
    label: str
    #: shown at the end of the label: a duration or a size
    figure: str = ""
    #: full text for the tooltip
    detail: str = ""
    lane: str | None = None


@dataclass(frozen=True)
class Edge:
    """An edge between two indices of `boxes`. `flight`: it spans the time a move is in flight."""

    source: int
    target: int
    lane: str | None = None
    flight: bool = False


@dataclass(frozen=True)
class Drawing:
    """Boxes in program order. `colours` holds every lane that may be drawn."""

    title: str
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    colours: Mapping[str, str]
    collapsed: bool

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The lanes that some box uses, in the order of `colours`."""
        used = {box.lane for box in self.boxes}
        return tuple(lane for lane in self.colours if lane in used)


def draw(
    graph: fx.Graph,
    title: str = "",
    durations_us: Mapping[str, float] | None = None,
    lanes: Sequence[str] = (),
    collapse_above: int = COLLAPSE_ABOVE,
) -> Drawing:
    """Draw a graph. `durations_us` is keyed by node name; `lanes` fixes the order of colours."""
    durations_us = durations_us or {}
    nodes = [n for n in graph.nodes if _source_of_part(n) is None]
    collapsed = len(nodes) > collapse_above
    boxes: list[Box] = []
    box_of: dict[fx.Node, int] = {}
    for group in _groups(nodes, collapsed):
        for node in group:
            box_of[node] = len(boxes)
        boxes.append(_box(group, durations_us))
    for node in graph.nodes:
        if (source := _source_of_part(node)) is not None:
            box_of[node] = box_of[source]
    edges = dict.fromkeys(_edges(boxes, box_of))
    named = dict.fromkeys([*lanes, *sorted({box.lane for box in boxes if box.lane})])
    colours = {lane: COLOURS[i % len(COLOURS)] for i, lane in enumerate(named)}
    return Drawing(title, tuple(boxes), tuple(edges), colours, collapsed)


# --- movement ------------------------------------------------------------------------------


def movement_name(node: fx.Node) -> str | None:
    """The name of a movement op, such as `start_out`; None for other nodes."""
    schema = getattr(node.target, "_schema", None)
    namespace, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
    return name if node.op == "call_function" and namespace == NAMESPACE else None


def argument(node: fx.Node, name: str) -> object:
    """The value passed for a named argument of the op's schema; None if there is none."""
    for place, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name)
    return None


def lane_of(node: fx.Node) -> str | None:
    """The lane of a movement node; a wait has the lane of its start."""
    if movement_name(node) is None:
        return None
    lane = argument(node, "lane")
    if isinstance(lane, str):
        return lane
    start = started_by(node)
    return lane_of(start) if start is not None else None


def started_by(node: fx.Node) -> fx.Node | None:
    """The start that a wait waits for, if it is in the same graph."""
    if not (movement_name(node) or "").startswith("wait"):
        return None
    for given in node.all_input_nodes:
        start = _source_of_part(given) or given
        if (movement_name(start) or "").startswith("start"):
            return start
    return None


def _source_of_part(node: fx.Node) -> fx.Node | None:
    """The node whose output a `getitem` selects; None for other nodes."""
    part = node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"
    return node.all_input_nodes[0] if part and node.all_input_nodes else None


# --- boxes ---------------------------------------------------------------------------------


def _kind(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return INPUT
    if node.op == "output":
        return OUTPUT
    if movement_name(node) is None:
        return COMPUTE
    return ORDER if lane_of(node) is None else MOVEMENT


def _groups(nodes: Sequence[fx.Node], collapsed: bool) -> Iterator[list[fx.Node]]:
    """Yields runs to show as one box each: inputs, and computation between moves."""
    run: list[fx.Node] = []
    for node in nodes:
        together = collapsed and _kind(node) in (INPUT, COMPUTE)
        if run and not (together and _kind(run[0]) == _kind(node)):
            yield run
            run = []
        run.append(node)
    if run:
        yield run


def _box(group: Sequence[fx.Node], durations_us: Mapping[str, float]) -> Box:
    node = group[0]
    kind = _kind(node)
    known = [durations_us[n.name] for n in group if n.name in durations_us]
    took = show_us(sum(known)) if known else ""
    if len(group) > 1:
        noun = "inputs" if kind == INPUT else "ops"
        names = [n.name for n in group]
        figure = ", ".join(filter(None, (f"{len(group)} {noun}", took)))
        return Box(kind, f"{names[0]} … {names[-1]}", figure, ", ".join(names))
    detail = node.format_node() or f"{node.op} {node.name}"
    if kind in (MOVEMENT, ORDER):
        return Box(kind, _movement_label(node), _bytes(node), detail, lane_of(node))
    return Box(kind, node.name, took, detail)


def _movement_label(node: fx.Node) -> str:
    name = movement_name(node) or ""
    start = started_by(node) or node
    tag, tier = argument(start, "tag"), argument(start, "tier")
    codec = argument(start, "codec")
    to = f" → {tier}" if isinstance(tier, str) else ""
    to += f" as {codec}" if isinstance(codec, str) and start is node else ""
    # if another graph started the move, only the ticket has a name
    given = node.all_input_nodes[0].name if node.all_input_nodes else node.name
    return f"{name} {tag if isinstance(tag, str) else given}{to}"


def _bytes(node: fx.Node) -> str:
    """The size of the tensor that a start moves, if it is a plain number; else empty."""
    name = movement_name(node)
    value = node.meta.get("val")
    if name == "start_out" and node.all_input_nodes:
        value = node.all_input_nodes[0].meta.get("val")
    elif name == "start_load" and isinstance(value, tuple | list) and value:
        value = value[0]
    else:
        return ""
    nbytes = getattr(value, "nbytes", None)
    return size(nbytes) if isinstance(nbytes, int) else ""


def _edges(boxes: Sequence[Box], box_of: Mapping[fx.Node, int]) -> Iterator[Edge]:
    for node, target in box_of.items():
        start = started_by(node)
        for given in node.all_input_nodes:
            source = box_of[given]
            if source == target:
                continue
            if start is not None and box_of[start] == source:
                yield Edge(source, target, lane_of(node), flight=True)
            elif start is None or movement_name(start) != "start_out":
                # a wait keeps alive the tensor that its start reads: that edge exists already
                yield Edge(source, target, boxes[source].lane or boxes[target].lane)


# --- Graphviz ------------------------------------------------------------------------------


def to_dot(drawing: Drawing) -> str:
    """The drawing in the DOT language of Graphviz."""
    lines = [
        f"digraph {_quoted(drawing.title or 'graph')} {{",
        "  rankdir=TB;",
        '  node [shape=box, style="filled,rounded", fontname="monospace", fontsize=10];',
        f'  edge [color="{PLAIN}"];',
    ]
    for i, box in enumerate(drawing.boxes):
        label = f"{box.label}\n{box.figure}" if box.figure else box.label
        lane = f", fontcolor=white, group={_quoted(box.lane)}" if box.lane else ""
        dashed = ', style="dashed,rounded"' if box.kind == ORDER else ""
        fill = drawing.colours[box.lane] if box.lane else FILLS[box.kind]
        lines.append(
            f'  n{i} [label={_quoted(label)}, fillcolor="{fill}", '
            f"tooltip={_quoted(box.detail)}{lane}{dashed}];"
        )
    for edge in drawing.edges:
        look = f' [color="{drawing.colours[edge.lane]}"' if edge.lane else ""
        look += ", penwidth=2.5" if edge.lane and edge.flight else ""
        lines.append(f"  n{edge.source} -> n{edge.target}{look}{']' if look else ''};")
    return "\n".join([*lines, "}", ""])


FILLS: Mapping[str, str] = {
    INPUT: "#e8eef4",
    COMPUTE: "#f7f7f7",
    ORDER: "#ffffff",
    OUTPUT: "#e8eef4",
}


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
