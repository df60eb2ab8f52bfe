"""Executions of several graphs become one step: recorded, stitched, planned, followed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offcompile.ir import BACKWARD, DEVICE, HOST, Infeasible, Lane, Machine, Tier
from offcompile.ir.verify import check_structure, check_timeline
from offcompile.passes.step import follow
from offcompile.passes.step.follow import StepFollower
from offcompile.passes.step.record import RecordedStep, StepRecord, TensorKey
from offcompile.passes.step.stitch import OPTIMIZER, op_id, stitch, tensor_id
from offcompile.passes.step.table import StepTable, table_of
from offcompile.planning.planner import plan_problem
from offcompile.simulate import Simulator

RUN_US = 100.0


def machine(nbytes: int) -> Machine:
    lanes = (Lane("out", DEVICE, HOST, 1.0), Lane("in", HOST, DEVICE, 1.0))
    return Machine((Tier(DEVICE, nbytes), Tier(HOST)), lanes)


def planned(step: RecordedStep) -> StepTable:
    stitched = stitch(step)
    found = plan_problem(stitched.problem, machine(stitched.capacity_bytes), seconds=0.1)
    return table_of(stitched, found.plan)


@dataclass
class Steps:
    """Runs blocks, all forwards and then all backwards, and tells a record or a follower."""

    heard: StepFollower | StepRecord
    rooms: Sequence[int]
    sizes: Sequence[int] = (30, 10)
    now_us: float = 0.0
    #: the answer for each tensor when it was saved, and the tensors that left later, by execution
    said: list[bool | None] = field(default_factory=list)
    out: list[tuple[Hashable, TensorKey]] = field(default_factory=list)
    #: executions during which a table held
    followed: list[Hashable] = field(default_factory=list)

    def clock(self) -> float:
        return self.now_us

    def run(self, name: Hashable, room: int, backward: bool, blocks: Iterable[Hashable]) -> None:
        heard = self.heard
        heard.enter(name, room, backward, True)
        following = heard if isinstance(heard, StepFollower) else None
        if following is not None and following.table is not None:
            self.followed.append(name)
        for i, block in enumerate(blocks):
            if backward:
                heard.read(block)
            elif following is not None:
                self.said.append(following.saved(block, f"t{i}", self.sizes[i]))
            else:
                heard.saved(block, f"t{i}", self.sizes[i])
        self.now_us += RUN_US
        left = heard.leave()
        self.out += [(name, key) for key in left or ()]
        if backward:
            record = following.record if following is not None else heard
            assert isinstance(record, StepRecord)
            for block in blocks:
                record.dead(block)

    def step(self, layers: Sequence[int]) -> None:
        """The layers of one step, in the order in which they run forward."""
        for at, layer in enumerate(layers):
            blocks = [(at, layer, k) for k in range(len(self.sizes))]
            self.run(("F", layer), self.rooms[at], False, blocks)
        for at, layer in reversed(list(enumerate(layers))):
            blocks = [(at, layer, k) for k in range(len(self.sizes))]
            self.run(("B", layer), self.rooms[at], True, blocks)
        self.now_us += RUN_US / 2  # the optimizer


def recorded(rooms: Sequence[int], layers: Sequence[int] | None = None) -> RecordedStep:
    steps = Steps(None, rooms)  # type: ignore[arg-type]
    record = steps.heard = StepRecord(steps.clock)
    steps.step(range(len(rooms)) if layers is None else layers)
    done = record.enter("next", 0, False, True)
    assert done is not None
    return done


def followed(rooms: Sequence[int]) -> tuple[Steps, StepFollower, list[RecordedStep]]:
    asked: list[RecordedStep] = []

    def plan(step: RecordedStep) -> StepTable:
        asked.append(step)
        return planned(step)

    steps = Steps(None, rooms)  # type: ignore[arg-type]
    follower = steps.heard = StepFollower(steps.clock, plan)
    return steps, follower, asked


# ---- stitching -------------------------------------------------------------------------------


def test_executions_become_ops_in_their_order_with_the_optimizer_at_the_end() -> None:
    step = recorded([50, 40, 30])
    problem = stitch(step).problem
    assert [op.id for op in problem.ops] == ["F0", "F1", "F2", "B3", "B4", "B5", OPTIMIZER]
    assert [op.duration_us for op in problem.ops] == [RUN_US] * 6 + [RUN_US / 2]
    assert [op.phase == BACKWARD for op in problem.ops] == [False] * 3 + [True] * 4
    assert sorted(t.nbytes for t in problem.tensors) == [10] * 3 + [30] * 3
    for layer in range(3):
        made = problem.op[f"F{layer}"].writes
        assert (
            problem.op[f"B{5 - layer}"].reads
            == made
            == tuple(tensor_id(step, TensorKey(layer, k)) for k in range(2))
        )


def test_beside_an_execution_stands_as_much_as_it_was_seen_to_leave() -> None:
    rooms = [50, 40, 30]
    step = recorded(rooms)
    stitched = stitch(step)
    for p, measured in enumerate(step.measured):
        op = stitched.problem.op[op_id(step, p)]
        own = sum(stitched.problem.tensor[t].nbytes for t in op.operands)
        assert own == step.own_bytes(p) == 40
        assert stitched.capacity_bytes - op.workspace_bytes - own == measured.room_bytes


def test_a_plan_that_does_not_count_own_tensors_takes_their_room() -> None:
    record = StepRecord(lambda: 0.0)
    for name, backward in (("F", False), ("B", True)):
        record.enter(name, 40, backward, False)
        if backward:
            record.read("a")
            record.dead("a")
        else:
            record.saved("a", "a", 30)
        record.leave()
    step = record.enter("next", 0, False, False)
    assert step is not None
    stitched = stitch(step)
    assert stitched.capacity_bytes == 40
    assert all(op.workspace_bytes == 0 for op in stitched.problem.ops)


def test_what_nobody_reads_again_is_no_tensor_of_the_step() -> None:
    record = StepRecord(lambda: 0.0)
    record.enter("F", 100, False, True)
    record.saved("a", "a", 30)
    record.saved("never", "never", 50)
    record.leave()
    record.enter("B", 100, True, True)
    record.read("a")
    record.leave()
    record.dead("a")
    record.dead("never")
    step = record.enter("next", 0, False, True)
    assert step is not None
    problem = stitch(step).problem
    assert [t.nbytes for t in problem.tensors] == [30]
    assert table_of(stitch(step), plan_problem(problem, machine(200)).plan).moved_bytes == 0


def test_a_tensor_that_one_execution_saves_and_reads_itself_does_not_travel() -> None:
    asked: list[RecordedStep] = []
    follower = StepFollower(lambda: 0.0, lambda step: asked.append(step) or planned(step))
    for _ in range(4):
        follower.enter("F", 100, False, False)
        follower.saved("a", "a", 30)
        follower.leave()
        follower.enter("B", 100, True, False)
        said = follower.saved("own", "own", 50)
        follower.read("own")
        follower.read("a")
        follower.leave()
        for block in ("a", "own"):
            follower.record.dead(block)
    assert said is None  # no table decides if it stays
    assert (follower.kept, follower.lost) == (1, 0)
    (step,) = asked
    assert [t.nbytes for t in stitch(step).problem.tensors] == [30]


ROOMS_AND_SIZES = (
    st.lists(st.integers(0, 160), min_size=2, max_size=6),
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
)


@settings(max_examples=30)
@given(*ROOMS_AND_SIZES)
def test_every_plan_of_a_step_is_legal_and_its_table_keeps_to_the_rooms(
    rooms: list[int], sizes: list[int]
) -> None:
    check_plan_and_table(rooms, sizes)


@pytest.mark.soak
@settings(max_examples=300)
@given(*ROOMS_AND_SIZES)
def test_plans_of_many_steps_are_legal_and_their_tables_keep_to_the_rooms(
    rooms: list[int], sizes: list[int]
) -> None:
    check_plan_and_table(rooms, sizes)


def check_plan_and_table(rooms: list[int], sizes: list[int]) -> None:
    steps = Steps(None, rooms, sizes)  # type: ignore[arg-type]
    record = steps.heard = StepRecord(steps.clock)
    steps.step(range(len(rooms)))
    step = record.enter("next", 0, False, True)
    assert step is not None
    stitched = stitch(step)
    problem, device = stitched.problem, machine(stitched.capacity_bytes)
    plan = plan_problem(problem, device, seconds=0.05).plan
    assert not check_structure(problem, device, plan)
    timeline = Simulator(problem, device).run(plan)
    assert timeline.valid
    assert not check_timeline(problem, device, plan, timeline)
    table = table_of(stitched, plan)
    away: set[TensorKey] = set()
    for p, run in enumerate(step.executions):
        # tensors of other executions that stay through this one fit in the room that it leaves
        born = {key for key in step.wanted if key.born < p}
        dead = {key for q in range(p) for key in step.executions[q].read}
        there = born - dead - away - set(run.read)
        assert sum(map(step.nbytes, there)) <= step.measured[p].room_bytes
        away |= set(table.outs.get(p, ()))
        away -= set(table.ins.get(p, ()))
    assert not away


# ---- following -------------------------------------------------------------------------------


def test_a_step_that_comes_again_is_planned_once_and_then_obeyed() -> None:
    steps, follower, asked = followed([60] * 4)
    for _ in range(5):
        steps.step(range(4))
    assert len(asked) == 1
    assert (
        steps.followed == [*(("F", i) for i in range(4)), *(("B", i) for i in range(3, -1, -1))] * 3
    )
    assert follower.lost == 0
    table = planned(asked[0])
    made = [TensorKey(p, n) for p in range(4) for n in range(2)]
    assert steps.said[:16] == [None] * 16
    assert steps.said[16:24] == [key not in table.leaving_at_once for key in made]
    assert False in steps.said and True in steps.said


def test_the_loads_of_a_table_come_due_in_its_order() -> None:
    steps, follower, asked = followed([60] * 4)
    for _ in range(3):
        steps.step(range(4))
    table = planned(asked[0])
    wanted = [key for p in range(8) for key in table.ins.get(p, ())]
    assert wanted
    seen: list[TensorKey] = []
    leave = follower.leave

    def watched() -> Sequence[TensorKey]:
        before = list(follower.due)
        found = leave()
        seen.extend(key for key in follower.due if key not in before)
        return found

    follower.leave = watched  # type: ignore[method-assign]
    steps.step(range(4))
    assert seen == wanted
    assert not follower.due


def test_another_order_ends_the_table_for_this_step_only() -> None:
    steps, follower, asked = followed([60] * 4)
    for _ in range(4):
        steps.step(range(4))
    before = len(steps.followed)
    steps.step([0, 1, 3, 2])
    assert steps.followed[before:] == [("F", 0), ("F", 1)]
    assert follower.lost == 1
    steps.step(range(4))
    assert len(steps.followed) == before + 2 + 8
    assert len(asked) == 1


def test_a_tensor_of_another_size_ends_the_table_for_this_step() -> None:
    steps, follower, _ = followed([60] * 3)
    for _ in range(3):
        steps.step(range(3))
    steps.sizes = (30, 11)
    steps.said.clear()
    steps.step(range(3))
    assert steps.said[0] is not None
    assert steps.said[1:] == [None] * 5
    assert follower.lost == 1


def test_two_orders_in_turn_have_a_table_each() -> None:
    steps, follower, asked = followed([60] * 4)
    orders = ([0, 1, 2, 3], [0, 2, 1, 3])  # they begin alike
    for _ in range(3):
        for order in orders:
            steps.step(order)
    assert len(asked) == 2
    steps.followed.clear()
    for order in orders:
        steps.step(order)
    assert len(steps.followed) == 16
    assert follower.lost == 0


def test_executions_that_save_nothing_do_not_stand_between() -> None:
    """An evaluation every other step, and the same step goes on to have its table."""
    steps, follower, asked = followed([60] * 3)
    for number in range(6):
        if number % 2:
            for layer in range(3):
                steps.run(("I", layer), 60, False, ())
        steps.step(range(3))
    assert len(asked) == 1
    assert follower.lost == 0
    assert len(steps.followed) == 4 * 6


def test_orders_that_never_come_when_expected_are_not_planned() -> None:
    steps, _, asked = followed([60] * 3)
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0], [0, 1, 2], [2, 0, 1], [1, 0, 2]):
        steps.step(order)
    assert not asked


def test_a_table_is_made_anew_when_rooms_change_and_given_up_when_they_never_settle() -> None:
    steps, _, asked = followed([60] * 3)
    for _ in range(3):
        steps.step(range(3))
    assert len(asked) == 1
    steps.rooms = [40] * 3
    steps.step(range(3))
    steps.step(range(3))
    assert len(asked) == 2
    assert all(m.room_bytes == 40 for m in asked[1].measured)
    for room in range(2 * follow.MOST_PLANS):
        steps.rooms = [40 - 2 * room] * 3
        steps.step(range(3))
    assert len(asked) == follow.MOST_PLANS
    steps.followed.clear()
    steps.step(range(3))
    assert not steps.followed


def test_much_more_room_that_is_announced_is_planned_with_at_once() -> None:
    steps, follower, asked = followed([60] * 3)
    for _ in range(3):
        steps.step(range(3))
    follower.rooms_grow(60, lambda room: room + 60)
    steps.rooms = [120] * 3
    steps.step(range(3))
    assert [m.room_bytes for m in asked[-1].measured] == [120] * 6


def test_a_little_more_room_is_planned_with_once_it_grows_no_more() -> None:
    steps, follower, asked = followed([60] * 3)
    for _ in range(3):
        steps.step(range(3))
    for room in (66, 72):
        follower.rooms_grow(6, lambda room: room + 6)
        steps.rooms = [room] * 3
        steps.step(range(3))
    assert len(asked) == 1 and follower.unused_bytes == 12
    for _ in range(follow.CALM_STEPS + 1):
        steps.step(range(3))
    assert [m.room_bytes for m in asked[-1].measured] == [72] * 6
    assert len(asked) == 2 and follower.unused_bytes == 0


def test_room_that_grows_in_most_executions_is_planned_with() -> None:
    steps, follower, asked = followed([60] * 3)
    for _ in range(3):
        steps.step(range(3))
    follower.rooms_grow(60, lambda room: room)
    steps.rooms = [60, 120, 120]
    for _ in range(follow.CALM_STEPS + 2):
        steps.step(range(3))
    assert [m.room_bytes for m in asked[-1].measured] == [60, 120, 120, 120, 120, 60]


def test_room_that_shrinks_in_one_execution_is_planned_with_although_others_have_more() -> None:
    steps, _, asked = followed([60] * 3)
    for _ in range(3):
        steps.step(range(3))
    steps.rooms = [40, 120, 120]
    for _ in range(2):
        steps.step(range(3))
    assert [m.room_bytes for m in asked[-1].measured] == [40, 60, 60, 60, 60, 40]


def test_each_order_knows_of_the_room_that_it_was_planned_with() -> None:
    steps, follower, asked = followed([60] * 3)
    for _ in range(4):
        steps.step(range(3))
        steps.step(range(2))
    follower.rooms_grow(60, lambda room: room + 60)
    steps.rooms = [120] * 3
    steps.step(range(3))
    assert [len(s.executions) for s in asked] == [4, 6, 4]
    assert follower.unused_bytes == 60, "the longer step ran by its old table"
    steps.step(range(2))
    assert [len(s.executions) for s in asked] == [4, 6, 4, 6]
    assert follower.unused_bytes == 0


def test_without_a_table_all_room_counts_as_used() -> None:
    _, follower, _ = followed([60] * 3)
    follower.rooms_grow(60, lambda room: room + 60)
    assert follower.unused_bytes == 0


def test_a_step_that_uses_its_room_otherwise_has_no_table() -> None:
    steps, follower, asked = followed([60] * 2)
    for _ in range(4):
        follower.enter("weights", 60, False, True)
        follower.saved("w", "w", 4)
        follower.spoil()
        follower.leave()
        steps.step(range(2))
        follower.record.dead("w")
    assert not asked


def test_without_a_plan_the_step_goes_on_without_a_table() -> None:
    steps = Steps(None, [60] * 3)  # type: ignore[arg-type]
    steps.heard = StepFollower(steps.clock, lambda step: None)
    for _ in range(4):
        steps.step(range(3))
    assert not steps.followed


def test_too_long_a_step_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offcompile.passes.step.record.MOST_EXECUTIONS", 5)
    steps, _, asked = followed([60] * 3)
    for _ in range(4):
        steps.step(range(3))
    assert not asked
    steps.rooms = [60] * 2
    for _ in range(3):
        steps.step(range(2))
    assert len(asked) == 1


def test_a_plan_in_less_than_a_tensor_is_refused() -> None:
    record = StepRecord(lambda: 0.0)
    for name, backward in (("F", False), ("other", False), ("B", True)):
        record.enter(name, 10, backward, False)
        if backward:
            record.read("a")
            record.dead("a")
        elif name == "F":
            record.saved("a", "a", 30)
        record.leave()
    step = record.enter("next", 0, False, False)
    assert step is not None
    with pytest.raises(Infeasible):
        planned(step)
