"""The predictor that a runtime drives: chooses prefetches and evictions, and keeps statistics.

    enter(execution) → touch(block, nbytes)… → leave(); dead(block) when a block's tensors died.

Between these calls the runtime asks for `predictions` and `victims`, and reports its actions:
`fetching`, `arrived`, `leaving`, `left`. Not thread-safe; no call blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

from .blocks import BlockId, Item
from .learned import Forecast, Learned
from .window import Victim, Wanted, Window

HIT, MISS, LATE, BORN = "hit", "miss", "late", "born"
#: number of dead blocks remembered, so that none is fetched before it is written again
DEAD_KEPT = 65536


@dataclass(slots=True)
class Counters:
    """Statistics. On use, a hit is on the device, a late block is in flight, a miss is neither."""

    hits: int = 0
    misses: int = 0
    late: int = 0
    births: int = 0
    prefetches: int = 0
    prefetched_bytes: int = 0
    #: bytes prefetched and evicted again without a use
    wasted_bytes: int = 0
    written_back_bytes: int = 0
    dropped_clean_bytes: int = 0
    #: bytes of blocks that died on the device: freed without a copy
    invalidated_bytes: int = 0

    @property
    def touches(self) -> int:
        return self.hits + self.misses + self.late

    @property
    def miss_rate(self) -> float:
        return self.misses / self.touches if self.touches else 0.0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Reach:
    """The predictor's lookahead and its bounds."""

    #: executions looked ahead; 0 disables prediction
    executions: int = 64
    #: the paper's way: no bound by bytes, and victims by age since their last load
    as_printed: bool = False

    def __post_init__(self) -> None:
        if self.executions < 0:
            raise ValueError(f"executions is {self.executions}; it must be 0 or more")


class Predictor:
    """Chained prefetching and pre-eviction over executions (DeepUM, §4.2 and §5)."""

    def __init__(self, forecast: Forecast | None = None, reach: Reach | None = None) -> None:
        self.forecast: Forecast = Learned() if forecast is None else forecast
        self.reach = reach or Reach()
        self.window = Window(self.reach.as_printed)
        self.counters = Counters()
        self._inside = False

    @property
    def table_bytes(self) -> int:
        """The size of the tables; 0 for a forecast without tables."""
        return getattr(self.forecast, "table_bytes", 0)

    # ---- executions -----------------------------------------------------------------------

    def enter(self, execution: Hashable) -> None:
        """Starts an execution: a compiled graph and its binding."""
        if self._inside:
            self.leave()
        self._inside = True
        window = self.window
        expected = bool(window.chain) and window.chain[0][0] == execution
        expected = self.forecast.begin(execution, expected)
        if not expected:
            window.forget()
        if not expected and self.reach.executions:
            window.expect(execution, self.forecast.items(execution))
        while window.chain and len(window.chain) <= self.reach.executions:
            following = self.forecast.ahead()
            if following is None:
                break
            window.expect(*following)

    def touch(self, block: BlockId, nbytes: int, reads: bool = True) -> str:
        """Records a block's use. Returns `hit`, `late` or `miss`, or `born` if it is not read.

        After a miss the caller makes room, calls `fetching`, waits and calls `arrived`. The birth
        of a block that is not held only needs room; `fetching` and `arrived` are called for it too.
        """
        window, counters = self.window, self.counters
        self.forecast.touch(block, nbytes, not reads)
        held = window.held.get(block)
        if not reads:
            outcome = BORN
            counters.births += 1
        elif held is None:
            outcome = MISS
            counters.misses += 1
        elif held.arriving:
            outcome = LATE
            counters.late += 1
        else:
            outcome = HIT
            counters.hits += 1
        if held is None:
            window.busy.add(block)
        else:
            window.use(block)
        return outcome

    def wrote(self, block: BlockId) -> None:
        """Records that the device's copy is now the only valid one."""
        self.window.held[block].dirty = True

    def leave(self) -> None:
        """Ends the execution; none of its blocks is in use any more."""
        self._inside = False
        self.forecast.end()
        self.window.busy.clear()
        self.window.advance()

    def dead(self, block: BlockId) -> int:
        """Invalidates a block whose tensors died: it has no value, and is never written back.

        Returns the device bytes freed: 0 if it was not there.
        """
        window = self.window
        self.forecast.dead(block)
        held = window.held.get(block)
        nbytes = 0
        if held is not None:
            nbytes = held.nbytes
            self.counters.invalidated_bytes += nbytes
            self._waste(block)
            window.release(block)
        window.void[block] = None
        if len(window.void) > DEAD_KEPT:
            del window.void[next(iter(window.void))]
        return nbytes

    def following(self) -> Hashable | None:
        """Returns the execution expected next; None if unknown."""
        following = self._following()
        return None if following is None else following[0]

    def read_next(self) -> list[BlockId]:
        """Returns the blocks that the execution expected next reads."""
        following = self._following()
        return [] if following is None else [i.block for i in following[1] if not i.born]

    def _following(self) -> tuple[Hashable, Sequence[Item]] | None:
        chain, at = self.window.chain, int(self._inside)
        return chain[at] if len(chain) > at else None

    # ---- decisions ------------------------------------------------------------------------

    def predictions(self, free_bytes: int, limit: int | None = None) -> list[Wanted]:
        """Returns the blocks to fetch now, in order, each with the execution that needs it.

        Together with the blocks born before them they fit in `free_bytes`.
        """
        found: list[Wanted] = []
        for wanted, fits in self.window.walk(free_bytes):
            if not fits or (limit is not None and len(found) >= limit):
                break
            if not wanted.born:
                found.append(wanted)
        return found

    def shortfall(self, free_bytes: int) -> tuple[Wanted, int] | None:
        """Returns the first upcoming need that does not fit, and the bytes missing for it."""
        left = free_bytes
        for wanted, fits in self.window.walk(free_bytes):
            left -= wanted.nbytes
            if not fits:
                return wanted, -left
        return None

    def victims(self, needed_bytes: int, wanted: Wanted | None = None) -> list[Victim]:
        """Returns victims that free `needed_bytes`, or all there are if that is less.

        For an upcoming need (`wanted`), it returns no block needed sooner; empty if that is not
        enough.
        """
        before = wanted.due if wanted is not None and not self.reach.as_printed else None
        return self.window.victims(needed_bytes, before)

    # ---- reports --------------------------------------------------------------------------

    def fetching(self, block: BlockId, nbytes: int, prefetch: bool = False) -> None:
        """Records that the block's device bytes are taken and a copy (or a birth) has begun."""
        self.window.hold(block, nbytes, arriving=True, prefetched=prefetch)
        if prefetch:
            self.counters.prefetches += 1
            self.counters.prefetched_bytes += nbytes

    def arrived(self, block: BlockId) -> None:
        self.window.held[block].arriving = False

    def leaving(self, block: BlockId) -> None:
        """Records that an eviction has started; a touch before `left` keeps the block after all."""
        self.window.held[block].leaving = True

    def stays(self, block: BlockId) -> None:
        """Records that an eviction has failed: the block is on the device as before."""
        self.window.held[block].leaving = False

    def is_leaving(self, block: BlockId) -> bool:
        held = self.window.held.get(block)
        return held is not None and held.leaving

    def cleaned(self, block: BlockId) -> None:
        """Records a write-back: another tier now also holds the block's value."""
        held = self.window.held[block]
        self.counters.written_back_bytes += held.nbytes
        held.dirty = False

    def left(self, block: BlockId) -> None:
        """Records that the block is no longer on the device."""
        self._waste(block)
        held = self.window.release(block)
        if not held.leaving:
            self.counters.dropped_clean_bytes += held.nbytes

    def _waste(self, block: BlockId) -> None:
        held = self.window.held[block]
        if held.prefetched:
            self.counters.wasted_bytes += held.nbytes
