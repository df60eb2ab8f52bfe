"""Gives the large blocks of repeated steps fixed places, so that no holes form between them.

Blocks that come and go leave holes in a heap. Where the budget has no room for these, pages go back
to the system and are touched again. But the steps of one plan repeat themselves. So two of them are
recorded, and their blocks are laid out. From then on, a block gets the place of the block of its
size that came as early in the recorded step. If that place is still taken, malloc serves, as it
does for everything else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from sys import is_finalizing
from typing import Protocol

from .placement import Integers, blocks_of, most_bytes, place, table
from .reuse import nearer

#: runs of a plan: the first warms up, the next two are recorded
RECORDED_FROM, PLACED_FROM = 2, 4
#: blocks are left to malloc if places need so much more than the blocks take together, or than the
#: room: if that is a little too small, fewer pages are touched again with places than with holes
MOST_WASTE, MOST_OVER = 1.25, 1.125
#: steps of other graphs after which a graph that does not run counts as gone
MOST_OTHERS = 64
#: such steps of a graph of the same parameters: the model was compiled again, as classifiers from
#: transformers are in their second step
MOST_SUCCESSORS = 3
#: blocks that find their place taken may have this share of the bytes of all places; if they have
#: more in so many steps, steps are recorded again
MISSED_SHARE, MISSED_STEPS = 0.02, 2
#: times that a plan's steps are recorded; then all blocks are left to malloc if those that find
#: their place taken have more than this share
MOST_ATTEMPTS, LEFT_SHARE = 3, 0.2
#: stands for no place; the same value as in the C++ source
NOWHERE = -1


class PlacingAllocator(Protocol):
    """An allocator that records blocks and places them; see `tensor_memory.cpp`."""

    def begin_step(self) -> None: ...
    def record(self, on: bool) -> None: ...
    def events(self) -> Integers: ...
    def lay_out(self, sizes: Integers, offsets: Integers, extent_bytes: int) -> bool: ...
    def missed_bytes(self) -> int: ...
    def trim(self) -> None: ...


class BlockPlaces:
    """Records the steps of one graph, and lays out their blocks. Other graphs that run meanwhile
    are part of its steps."""

    def __init__(self, allocator: PlacingAllocator) -> None:
        self._allocator = allocator
        #: the graph whose runs begin steps, and its plan
        self._graph: weakref.ref[object] | None = None
        self._plan: weakref.ref[object] | None = None
        #: the parameters of that graph
        self._parameters: frozenset[int] = frozenset()
        self._runs = self._others = self._successors = self._attempts = 0
        #: blocks that have a place, and the bytes of all places
        self.blocks = self.extent_bytes = 0
        #: bytes so far of blocks that found their place taken, and the steps with too many
        self._missed_bytes = self._missed_steps = 0

    def begin_step(
        self,
        graph: object,
        plan: object,
        room_bytes: Callable[[], int],
        parameters: frozenset[int] = frozenset(),
    ) -> None:
        """Note that a forward of this graph begins, by this plan.

        room_bytes: tells the room for blocks, asked for only when they are laid out. parameters:
        ids of those that the graph is called with.
        """
        leader = None if self._graph is None else self._graph()
        if leader is not None and leader is not graph and not self._gives_way(parameters):
            return
        if leader is not graph or self._plan is None or self._plan() is not plan:
            self._start(graph, plan)
        self._others = self._successors = 0
        self._parameters = parameters
        self._runs += 1
        if self._runs > PLACED_FROM and self.blocks:
            self._look()
        if self._runs == RECORDED_FROM:
            self._allocator.record(True)
        self._allocator.begin_step()
        if self._runs == PLACED_FROM:
            self._lay_out(room_bytes())

    def begin_other_step(self, graph: object) -> None:
        """Note that a step of this graph begins that is expected to be unlike the others: steps
        recorded so far are not two of a kind."""
        if self._graph is not None and self._graph() is graph and self._runs < PLACED_FROM:
            self._runs = 0
            self._allocator.record(False)

    def _gives_way(self, parameters: frozenset[int]) -> bool:
        """True if a step of another graph, with these parameters, shows that the leader is gone."""
        self._others += 1
        self._successors += bool(parameters) and parameters == self._parameters
        return self._others > MOST_OTHERS or self._successors > MOST_SUCCESSORS

    def _start(self, graph: object, plan: object) -> None:
        self._graph, self._plan = weakref.ref(graph, self._gone), weakref.ref(plan)
        self._runs = self._attempts = 0
        self._allocator.record(False)
        self._leave()

    def _gone(self, graph: weakref.ref[object]) -> None:
        if graph is self._graph and not is_finalizing():
            self._allocator.record(False)
            self._leave()

    def _leave(self) -> None:
        """Leave all blocks to malloc."""
        if self.blocks:
            nothing = table((), (), NOWHERE)
            self._allocator.lay_out(*nothing, 0)
        self.blocks = self.extent_bytes = 0

    def _lay_out(self, room_bytes: int) -> None:
        blocks = blocks_of(self._allocator.events())
        self._allocator.record(False)
        self._attempts += 1
        self._leave()
        made = place(blocks)
        if not blocks or made.extent_bytes > min(
            MOST_OVER * room_bytes, MOST_WASTE * most_bytes(blocks)
        ):
            return
        made = nearer(blocks, made)
        if self._allocator.lay_out(*table(blocks, made.offsets, NOWHERE), made.extent_bytes):
            self.blocks, self.extent_bytes = len(blocks), made.extent_bytes
            self._missed_bytes = self._missed_steps = 0
            self._allocator.trim()  # what malloc has kept of blocks that now have places

    def _look(self) -> None:
        """Record anew, or leave blocks to malloc, if steps are no longer as they were recorded."""
        missed_bytes = self._allocator.missed_bytes()
        share = (missed_bytes - self._missed_bytes) / self.extent_bytes
        self._missed_bytes = missed_bytes
        self._missed_steps = self._missed_steps + 1 if share > MISSED_SHARE else 0
        if self._missed_steps < MISSED_STEPS:
            return
        self._missed_steps = 0
        if self._attempts < MOST_ATTEMPTS:
            self._runs = RECORDED_FROM
        elif share > LEFT_SHARE:
            self._leave()
