"""Lays out a drawing as SVG: program order from top to bottom, one column per lane."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import pairwise

from .dot import FILLS, INPUT, ORDER, OUTPUT, PLAIN, Box, Drawing, Edge

ROW, BOX_HEIGHT = 28, 20
COMPUTE_WIDTH, LANE_WIDTH, GAP = 330, 320, 60
#: space on the left for edges that pass boxes of their own column
SIDE, TOP, MARGIN = 150, 74, 20
#: moves of one lane that overlap in time each get their own line
TRACK, TRACKS = 7, 12
LETTER = 6.65  # width of a monospace letter of 11 px
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


def to_svg(drawing: Drawing) -> str:
    """A self-contained picture; each box shows its full text as a tooltip."""
    return "\n".join(_Layout(drawing).lines()) + "\n"


@dataclass(frozen=True)
class _Layout:
    drawing: Drawing

    # --- places -----------------------------------------------------------------------------

    @cached_property
    def column_x(self) -> dict[str | None, int]:
        """Lane → the left edge of its column; None is computation."""
        places: dict[str | None, int] = {None: SIDE}
        x = SIDE + COMPUTE_WIDTH + GAP
        for lane in self.drawing.lanes:
            places[lane] = x
            x += LANE_WIDTH + self._tracks(lane) * TRACK + GAP
        return places

    @cached_property
    def track_of(self) -> dict[Edge, int]:
        """Flight → its line beside the lane's column: the first one free at its start."""
        places: dict[Edge, int] = {}
        ends: dict[str | None, list[int]] = {}
        flights = (e for e in self.drawing.edges if e.flight)
        for edge in sorted(flights, key=lambda e: (e.source, e.target)):
            free = ends.setdefault(edge.lane, [])
            track = next((i for i, end in enumerate(free) if end <= edge.source), len(free))
            free[track : track + 1] = [edge.target]
            places[edge] = min(track, TRACKS - 1)
        return places

    def _tracks(self, lane: str) -> int:
        return 1 + max((t for e, t in self.track_of.items() if e.lane == lane), default=0)

    @property
    def width(self) -> int:
        lanes = self.drawing.lanes
        if not lanes:
            return SIDE + COMPUTE_WIDTH + MARGIN
        last = lanes[-1]
        return self.column_x[last] + LANE_WIDTH + (self._tracks(last) + 1) * TRACK + MARGIN

    @property
    def height(self) -> int:
        return TOP + ROW * len(self.drawing.boxes) + MARGIN

    def _left(self, place: int) -> int:
        return self.column_x[self.drawing.boxes[place].lane]

    def _right(self, place: int) -> int:
        lane = self.drawing.boxes[place].lane
        return self._left(place) + (COMPUTE_WIDTH if lane is None else LANE_WIDTH)

    def _middle(self, place: int) -> int:
        return TOP + ROW * place + BOX_HEIGHT // 2

    def _colour(self, lane: str | None) -> str:
        return PLAIN if lane is None else self.drawing.colours[lane]

    # --- the picture ------------------------------------------------------------------------

    def lines(self) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="{FONT}" font-size="11">'
        )
        yield f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>'
        yield from self._arrows()
        yield from self._headings()
        next_compute = self._next_in_compute()
        for edge in self.drawing.edges:
            if self._worth_drawing(edge, next_compute):
                yield self._edge(edge, next_compute)
        for place, box in enumerate(self.drawing.boxes):
            yield from self._box(place, box)
        yield "</svg>"

    def _headings(self) -> Iterator[str]:
        title = escape(self.drawing.title)
        yield f'<text x="{MARGIN}" y="26" font-size="15" font-weight="bold">{title}</text>'
        for lane in (None, *self.drawing.lanes):
            x, colour = self.column_x[lane], self._colour(lane)
            width = COMPUTE_WIDTH if lane is None else LANE_WIDTH
            yield (
                f'<rect x="{x - 6}" y="{TOP - 8}" width="{width + 12}" '
                f'height="{self.height - TOP}" rx="6" fill="{colour}" fill-opacity="0.06"/>'
            )
            yield (
                f'<text x="{x}" y="{TOP - 16}" font-size="13" font-weight="bold" '
                f'fill="{colour}">{escape(lane or "computation")}</text>'
            )

    def _arrows(self) -> Iterator[str]:
        yield "<defs>"
        for lane in (None, *self.drawing.lanes):
            yield (
                f'<marker id="{self._arrow(lane)}" viewBox="0 0 8 8" refX="8" refY="4" '
                'markerWidth="7" markerHeight="7" orient="auto">'
                f'<path d="M0 0L8 4L0 8z" fill="{self._colour(lane)}"/></marker>'
            )
        yield "</defs>"

    def _arrow(self, lane: str | None) -> str:
        return f"arrow{self.drawing.lanes.index(lane) + 1 if lane else 0}"

    def _next_in_compute(self) -> dict[int, int]:
        places = [i for i, box in enumerate(self.drawing.boxes) if box.lane is None]
        return dict(pairwise(places))

    def _worth_drawing(self, edge: Edge, next_compute: dict[int, int]) -> bool:
        """False for edges between runs of computation that would hide moves in a large graph."""
        if not self.drawing.collapsed:
            return True
        source, target = (self.drawing.boxes[i] for i in (edge.source, edge.target))
        if source.lane is None and target.lane is None:
            return next_compute.get(edge.source) == edge.target
        return source.kind != INPUT and target.kind != OUTPUT

    def _edge(self, edge: Edge, next_compute: dict[int, int]) -> str:
        colour, arrow = self._colour(edge.lane), f'marker-end="url(#{self._arrow(edge.lane)})"'
        y1, y2 = self._middle(edge.source), self._middle(edge.target)
        if edge.flight:
            x = self._right(edge.source)
            out = x + TRACK * (1 + self.track_of[edge])
            path = f"M{x} {y1}H{out}V{y2}H{x}"
            return (
                f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5" '
                'stroke-linejoin="round" stroke-opacity="0.8"/>'
            )
        left1, left2 = self._left(edge.source), self._left(edge.target)
        if left1 < left2:
            x1, x2 = self._right(edge.source), left2
            path = f"M{x1} {y1}C{x1 + GAP} {y1} {x2 - GAP} {y2} {x2} {y2}"
        elif left1 > left2:
            x1, x2 = left1, self._right(edge.target)
            path = f"M{x1} {y1}C{x1 - GAP} {y1} {x2 + GAP} {y2} {x2} {y2}"
        elif next_compute.get(edge.source) == edge.target:
            x, half = left1 + 24, BOX_HEIGHT // 2
            path = f"M{x} {y1 + half}V{y2 - half}"
        else:
            out = left1 - min(20 + 5 * (edge.target - edge.source), SIDE + 40)
            path = f"M{left1} {y1}C{out} {y1} {out} {y2} {left2} {y2}"
        strong = "0.75" if edge.lane else "0.35"
        return (
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.2" '
            f'stroke-opacity="{strong}" {arrow}/>'
        )

    def _box(self, place: int, box: Box) -> Iterator[str]:
        x, y, right = self._left(place), TOP + ROW * place, self._right(place)
        fill = self._colour(box.lane) if box.lane else FILLS[box.kind]
        ink = "#ffffff" if box.lane else "#1f2933"
        edge = self._colour(box.lane) if box.lane else "#9aa5b1"
        dashed = ' stroke-dasharray="4 3"' if box.kind == ORDER else ""
        yield (
            f'<g><title>{escape(box.detail)}</title><rect x="{x}" y="{y}" '
            f'width="{right - x}" height="{BOX_HEIGHT}" rx="4" fill="{fill}" '
            f'stroke="{edge}"{dashed}/>'
        )
        room = right - x - 16 - LETTER * (len(box.figure) + 2 if box.figure else 0)
        label = escape(_cut(box.label, int(room / LETTER)))
        yield f'<text x="{x + 8}" y="{y + 14}" fill="{ink}">{label}</text>'
        if box.figure:
            yield (
                f'<text x="{right - 8}" y="{y + 14}" fill="{ink}" fill-opacity="0.85" '
                f'text-anchor="end">{escape(box.figure)}</text>'
            )
        yield "</g>"


def _cut(text: str, letters: int) -> str:
    """The text, or its two ends if it is too long, because names differ at the end."""
    if len(text) <= letters:
        return text
    tail = max(0, letters - 1) // 3
    return f"{text[: letters - 1 - tail]}…{text[len(text) - tail :]}"
