"""Follows the table of a step that comes again, as long as the executions keep its order.

If an order of executions comes again when it is expected (after the order that it followed before,
or twice in a row), it is handed to `plan`, which makes a table or says that there is none. At the
start of each step the table of the order expected now is chosen: the order that followed the last
step's order the last time, or else the newest one that begins with this execution. The first
execution, tensor or size that is not the table's ends it for this step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from .record import Execution, RecordedStep, StepRecord, TensorKey
from .table import StepTable

#: makes the table of a recorded step; None if there is none
Planner = Callable[[RecordedStep], StepTable | None]
Order = tuple[Execution, ...]
#: orders remembered, the one longest unseen is forgotten first
MOST_ORDERS = 32
#: times that one order is planned: rooms that never settle are not worth more
MOST_PLANS = 16
#: a table is made anew if an execution leaves less room than it was made for, or if they leave more
#: on average, by these shares of the memory that it was made for
LESS_ROOM, MORE_ROOM = 1 / 64, 1 / 32
#: while rooms still grow, only so much more makes a table anew: each plan takes time from a step
MUCH_MORE_ROOM = 1 / 8
#: steps after which rooms count as grown
CALM_STEPS = 1


@dataclass(eq=False)
class _Known:
    """An order that has been seen: its last record, and its table."""

    record: RecordedStep
    plans: int = 0
    table: StepTable | None = None
    #: the record that the last plan was made for
    planned: RecordedStep | None = None
    #: True if rooms have hardly changed since
    settled: bool = False
    #: the order of the step that came next, the last time
    followed_by: Order | None = None
    #: bytes by which rooms had been announced to grow when it was planned last
    announced_bytes: int = 0


class StepFollower:
    """Records steps, has them planned, and says what the table of the running one wants."""

    def __init__(self, clock_us: Callable[[], float], plan: Planner) -> None:
        self.record = StepRecord(clock_us)
        self.plan = plan
        #: told of each step that has a table, once its rooms hardly change any more
        self.settled: Callable[[RecordedStep], None] = lambda step: None
        self._known: OrderedDict[Order, _Known] = OrderedDict()
        self._last: _Known | None = None
        #: the order that the running step is expected to have
        self._now: _Known | None = None
        #: the table that holds now; None: the order is not known, or is no longer kept
        self.table: StepTable | None = None
        #: loads that may have begun by now, in order
        self.due: list[TensorKey] = []
        #: the table made last
        self.newest: StepTable | None = None
        #: steps that kept to their table, and those that left it
        self.kept = self.lost = 0
        #: steps that have ended since rooms were last announced to grow
        self._calm_steps = CALM_STEPS
        #: bytes by which rooms were announced to grow so far, and those that the table knows of
        self._announced_bytes = self._used_bytes = 0

    @property
    def position(self) -> int:
        return self.record.position

    @property
    def is_settled(self) -> bool:
        """True if the running step follows a table whose rooms hardly change any more."""
        return self.table is not None and self._now is not None and self._now.settled

    # ---- executions ------------------------------------------------------------------------

    def enter(self, name: Hashable, room_bytes: int, backward: bool, counts_own: bool) -> None:
        """Start an execution that leaves `room_bytes` beside its plan's peak; `counts_own`: the
        peak includes all tensors that it saves or reads."""
        begins = self.record.begins
        done = self.record.enter(name, room_bytes, backward, counts_own)
        if begins:
            self._over(done)
            self._begin(name)
        elif self.table is not None:
            runs, at = self.table.step.executions, self.position
            if at >= len(runs) or runs[at].name != name or runs[at].counts_own != counts_own:
                self.lose()

    def leave(self) -> Sequence[TensorKey]:
        """End the execution. Returns the tensors of earlier ones that leave now."""
        self.record.leave()
        table, at = self.table, self.position
        if table is None:
            return ()
        self.due += table.ins.get(at, ())
        return tuple(key for key in table.outs.get(at, ()) if key.born != at)

    def room_after(self) -> int | None:
        """The bytes that saved tensors may fill once this execution is over, by the record: the
        room that the next execution leaves, and the tensors that it reads itself. None if no table
        holds."""
        if self.table is None:
            return None
        step, following = self.table.step, self.position + 1
        if following >= len(step.executions):
            return 0
        own = step.own_bytes(following) if step.executions[following].backward else 0
        return step.measured[following].room_bytes + own

    def lose(self) -> None:
        """Give the table up for the rest of the step."""
        if self.table is not None:
            self.lost += 1
        self.table = None
        self.due = []

    @property
    def unused_bytes(self) -> int:
        """The room announced that the table does not use yet, since it was made before. 0 without a
        table: then tensors fill whatever room there is."""
        unused = self._announced_bytes - self._used_bytes
        return 0 if self.table is None else max(0, unused)

    def rooms_grow(self, nbytes: int, grown: Callable[[int], int]) -> None:
        """Expect more room in executions than was recorded (less, if `nbytes` is below 0): `grown`
        of the bytes recorded, `nbytes` more at most."""
        if nbytes:
            self._calm_steps = 0
            self._announced_bytes += nbytes
            self.record.rooms_change(grown)
            for known in self._known.values():
                known.record = known.record.with_rooms(grown)

    def spoil(self) -> None:
        """Leave the running step out: it uses the room for more than saved tensors."""
        self.record.spoil()
        self.lose()

    # ---- tensors ---------------------------------------------------------------------------

    def saved(self, block: Hashable, tag: str, nbytes: int) -> bool | None:
        """Note a tensor that the execution saves. True: it stays; False: it leaves at once; None:
        no table says, or no other execution reads it."""
        key = self.record.saved(block, tag, nbytes)
        if self.table is None:
            return None
        made = self.table.step.executions[key.born].saved
        if key.number >= len(made) or made[key.number] != (tag, nbytes):
            self.lose()
            return None
        if key not in self.table.step.wanted:
            return None
        return key not in self.table.leaving_at_once

    def read(self, block: Hashable) -> None:
        key = self.record.read(block)
        if key is not None and key in self.due:
            self.due.remove(key)

    # ---- orders ----------------------------------------------------------------------------

    def _over(self, done: RecordedStep | None) -> None:
        """A step is over: learn from it."""
        table, self.table, self.due = self.table, None, []
        self._calm_steps += 1
        if done is None:
            self._last = None if table is not None else self._last
            return
        if table is not None:
            same = done.executions == table.step.executions
            self.kept, self.lost = self.kept + same, self.lost + (not same)
        known = self._known.get(done.executions)
        if known is None:
            known = self._known[done.executions] = _Known(done)
            if len(self._known) > MOST_ORDERS:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(done.executions)
            if self._last is known or self._expected is known:
                self._consider(known, done)
            known.record = done
        if self._last is not None:
            self._last.followed_by = done.executions
        self._last = known

    @property
    def _expected(self) -> _Known | None:
        """The order that followed the last step's order the last time."""
        order = None if self._last is None else self._last.followed_by
        return None if order is None else self._known.get(order)

    def _consider(self, known: _Known, done: RecordedStep) -> None:
        """Have an order planned that has been seen again, if it has no plan or rooms changed."""
        record, calm = known.record.merged(done), self._calm_steps > CALM_STEPS
        if known.planned is not None:
            least, mean = _growth(known.planned, record)
            worth = MORE_ROOM if calm else MUCH_MORE_ROOM
            if least >= -LESS_ROOM and mean <= worth:
                if calm and not known.settled and known.table is not None:
                    known.settled = True
                    self.settled(record)
                return
            if known.plans >= MOST_PLANS:
                known.table = known.table if least > 0 else None
                return
        known.plans += 1
        known.planned, known.announced_bytes = record, self._announced_bytes
        known.settled = False
        known.table = self.plan(record)
        self.newest = known.table or self.newest

    def _begin(self, name: Hashable) -> None:
        expected = self._expected
        if expected is None or expected.record.names[0] != name:
            newest = reversed(self._known.values())
            begin = (k for k in newest if k.table is not None and k.record.names[0] == name)
            expected = next(begin, None)
        self._now = expected
        if expected is not None:
            self.table, self._used_bytes = expected.table, expected.announced_bytes


def _growth(planned: RecordedStep, now: RecordedStep) -> tuple[float, float]:
    """The growth in the rooms of executions, as shares of the memory planned for: least, mean."""
    most = max(m.room_bytes + planned.own_bytes(p) for p, m in enumerate(planned.measured))
    pairs = zip(planned.measured, now.measured, strict=True)
    grown = [new.room_bytes - old.room_bytes for old, new in pairs]
    return min(grown) / max(1, most), sum(grown) / len(grown) / max(1, most)
