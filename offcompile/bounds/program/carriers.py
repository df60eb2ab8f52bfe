"""Rows of lanes and of shared links: a slot is at least as long as each of them is busy in it."""

from __future__ import annotations

from offcompile.bounds.highs import Ints
from offcompile.bounds.links import Links
from offcompile.bounds.survey import Survey

from .matrix import MatrixRows


class Carriers:
    """`tau`: for each slot, the column of its length."""

    def __init__(self, survey: Survey, rows: MatrixRows, tau: Ints) -> None:
        self.rows, self.links = rows, Links(survey.problem, survey.machine)
        self._of_lane = {lane.name: self._reserve(tau) for lane in survey.lanes}
        self._of_link = [(link, self._reserve(tau)) for link in self.links.figures]

    def _reserve(self, tau: Ints) -> Ints:
        rows = self.rows.reserve(len(tau))
        self.rows.put(rows, tau, -1.0)
        return rows

    def carry(self, lane: str, slots: Ints, flow: Ints, cost: float) -> None:
        """Makes each unit of flow in a slot occupy the lane, and its links, for a time."""
        self.rows.put(self._of_lane[lane][slots], flow, cost)
        for link, rows in self._of_link:
            share = self.links.share(link, lane)
            if share:
                self.rows.put(rows[slots], flow, share * cost)

    def access(self, slot: int, column: int, op: int, tensor: str, unit_ns: float) -> None:
        """Makes access in place by an op of the slot take time on the links."""
        for link, rows in self._of_link:
            cost = self.links.access_ns(link, op, tensor) / unit_ns
            self.rows.put(int(rows[slot]), column, cost)
