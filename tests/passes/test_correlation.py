"""The tables, the window and the predictor: hand-made cases, and what holds for any sequence."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offcompile.passes.correlation.blocks import BlockTable, Item
from offcompile.passes.correlation.executions import ExecutionTable
from offcompile.passes.correlation.learned import Learned, LearnedLimits
from offcompile.passes.correlation.predictor import Predictor, Reach
from offcompile.passes.correlation.tables import Numbers, Sets, Shape, Successors
from offcompile.passes.correlation.window import Victim, Wanted

SMALL = LearnedLimits(
    executions=Shape(32, 4, 2),
    blocks=Shape(8, 2, 2),
    known_executions=6,
    known_blocks=40,
    block_table_bytes=12_000,
)


def visit(table: BlockTable, *blocks: str, born: str = "") -> list[str]:
    table.begin()
    for block in blocks:
        table.touch(block, 10, block in born.split())
    table.end_visit(set(blocks))
    return [str(item.block) for item in table.items()]


def block_table(rows: int = 64, ways: int = 2) -> BlockTable:
    return BlockTable(Shape(rows, ways, 4), Numbers(1000))


def run(predictor: Predictor, execution: str, *blocks: str, nbytes: int = 10) -> list[str]:
    """One execution on a device where everything that is missed fits."""
    predictor.enter(execution)
    outcomes = []
    for block in blocks:
        outcomes.append(predictor.touch(block, nbytes))
        if block not in predictor.window.held:
            predictor.fetching(block, nbytes)
            predictor.arrived(block)
    predictor.leave()
    return outcomes


# --- tables ----------------------------------------------------------------------------------


def test_a_full_set_forgets_the_row_longest_unused() -> None:
    sets: Sets[str, int] = Sets(Shape(rows=4, associativity=2, successors=1))
    for number, key in ((0, "a"), (2, "b")):
        sets.put(number, key, number)
    assert sets.get(0, "a") == 0
    sets.put(4, "c", 4)  # the same set as a and b
    assert (sets.get(0, "a"), sets.get(2, "b"), sets.get(4, "c")) == (0, None, 4)
    assert sets.rows == 2


@pytest.mark.parametrize("shape", [(0, 1, 1), (4, 0, 1), (4, 1, 0), (2, 4, 1)])
def test_a_shape_that_cannot_be_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|as many\s+rows as ways"):
        Shape(*shape)


def test_a_settled_successor_gives_way_only_to_one_that_comes_again() -> None:
    successors: Successors[str] = Successors()
    said = []
    for name in ("a", "a", "b", "a", "b", "b"):
        successors.saw(name, 2)
        best = successors.best()
        assert best is not None
        said.append(best.name)
    assert said == ["a", "a", "a", "a", "a", "b"]
    successors.saw("c", 2)
    assert len(successors.entries) == 2


def test_the_longest_history_decides_and_shorter_ones_stand_in() -> None:
    table = ExecutionTable(Shape(256, 4, 4))
    for history, following in (((1, 2, 3, 9), 10), ((4, 5, 6, 9), 20)):
        for _ in range(3):
            table.learn(history, following)
    for history, following in (((1, 2, 3, 9), 10), ((4, 5, 6, 9), 20), ((7, 7, 6, 9), 20)):
        guess = table.next(history)
        assert guess is not None and guess.execution == following
    assert table.next((42,)) is None


def test_a_kind_of_record_that_is_wrong_is_no_longer_believed() -> None:
    table = ExecutionTable(Shape(256, 4, 4))
    table.learn((1,), 2)
    guess = table.next((1,))
    assert guess is not None
    for _ in range(12):
        table.scores.note(guess, 0.0)
    assert table.next((1,)) is None
    for _ in range(12):
        table.scores.note(guess, 1.0)
    assert table.next((1,)) == guess


def test_blocks_come_back_first_to_last() -> None:
    table = block_table()
    assert visit(table, "a", "b", "c") == ["a", "b", "c"]
    assert (table.start, table.end) == ("a", "c")
    assert visit(table, "a", "b", "c", born="c") == ["a", "b", "c"]
    assert [item.born for item in table.items()] == [False, False, True]
    assert table.items()[0] == Item("a", 10, False)


def test_blocks_chosen_by_data_are_left_out_and_do_not_break_the_walk() -> None:
    table = block_table()
    visit(table, "a", "b", "c")
    for i in range(6):
        got = visit(table, "a", f"page{i}", f"page{i + 20}", "b", "c")
    assert got == ["a", "b", "c"]
    for _ in range(2):
        visit(table, "a", "new", "b", "c")
    assert visit(table, "a", "new", "b", "c") == ["a", "new", "b", "c"]
    for _ in range(3):
        got = visit(table, "a", "c")
    assert got == ["a", "c"]


def test_sixteen_rows_lose_a_graph_of_a_hundred_blocks() -> None:
    names = [f"b{i}" for i in range(100)]
    few, enough = block_table(rows=16), block_table(rows=128)
    for _ in range(2):
        visit(few, *names)
        visit(enough, *names)
    assert len(few.items()) < 20
    assert len(enough.items()) == 100


# --- predictor --------------------------------------------------------------------------------


def taught() -> Predictor:
    predictor = Predictor()
    for _ in range(4):
        for name in "ABC":
            run(predictor, name, f"{name}1", f"{name}2")
    return predictor


def empty(predictor: Predictor) -> None:
    for block in list(predictor.window.held):
        predictor.left(block)


def test_predictions_name_the_executions_that_want_them_within_the_free_bytes() -> None:
    predictor = taught()
    empty(predictor)
    predictor.enter("A")
    found = predictor.predictions(45)
    assert [(w.block, w.execution) for w in found] == [
        ("A1", "A"),
        ("A2", "A"),
        ("B1", "B"),
        ("B2", "B"),
    ]
    assert predictor.predictions(45, limit=1) == found[:1]
    lack = predictor.shortfall(45)
    assert lack is not None and (lack[0].block, lack[1]) == ("C1", 5)
    predictor.fetching("B1", 10, prefetch=True)
    assert "B1" not in [w.block for w in predictor.predictions(45)]


def test_the_same_graph_bound_to_another_layer_is_another_execution() -> None:
    predictor = Predictor()
    for _ in range(3):
        for layer in range(4):
            run(predictor, ("block", layer), f"w{layer}")  # type: ignore[arg-type]
    empty(predictor)
    predictor.enter(("block", 2))
    assert [w.block for w in predictor.predictions(20)] == ["w2", "w3"]


def test_hits_misses_late_and_waste_are_counted() -> None:
    predictor = taught()
    empty(predictor)
    predictor.enter("A")
    predictor.fetching("A1", 10, prefetch=True)
    assert predictor.touch("A1", 10) == "late"
    predictor.arrived("A1")
    assert predictor.touch("A1", 10) == "hit"
    assert predictor.touch("A2", 10) == "miss"
    assert predictor.touch("new", 10, reads=False) == "born"
    predictor.fetching("B1", 10, prefetch=True)
    predictor.arrived("B1")
    predictor.left("B1")
    counters = predictor.counters
    assert (counters.late, counters.wasted_bytes, counters.prefetches) == (1, 10, 2)


def test_what_nothing_expects_leaves_first_and_then_what_is_needed_last() -> None:
    predictor = taught()
    predictor.fetching("old", 10)
    predictor.arrived("old")
    for _ in range(4):
        for name in "ABC":
            run(predictor, name, f"{name}1", f"{name}2")
    predictor.enter("A")
    for block in ("A1", "A2"):
        predictor.touch(block, 10)
    gone = predictor.victims(35)
    assert [v.block for v in gone] == ["old", "C2", "C1", "B2"]
    assert gone[0] == Victim("old", 10, False)


def test_nothing_goes_for_the_sake_of_what_is_needed_later() -> None:
    predictor = taught()
    predictor.left("B1")
    predictor.enter("A")
    wanted = predictor.predictions(10)[0]
    assert wanted.block == "B1"
    before = {"A1", "A2", "B1"}
    gone = [v.block for v in predictor.victims(20, wanted)]
    assert len(gone) == 2 and not before & set(gone)
    later = Wanted("x", 10, "Z", (predictor.window.position + 10_000, 0), False)
    assert predictor.victims(10, later) == []


def test_a_changed_block_is_written_back_a_dead_one_never() -> None:
    predictor = Predictor()
    predictor.enter("A")
    for block in ("w", "a"):
        predictor.touch(block, 10, reads=False)
        predictor.fetching(block, 10)
        predictor.arrived(block)
        predictor.wrote(block)
    assert predictor.victims(20) == []  # both are in use
    predictor.leave()
    assert {v.block: v.write_back for v in predictor.victims(20)} == {"w": True, "a": True}
    assert predictor.dead("a") == 10
    assert predictor.counters.invalidated_bytes == 10
    predictor.leaving("w")
    assert predictor.victims(20) == []
    predictor.cleaned("w")
    predictor.left("w")
    assert predictor.dead("w") == 0


def test_a_block_on_its_way_out_stays_if_it_is_used_again() -> None:
    predictor = taught()
    predictor.leaving("A1")
    predictor.enter("A")
    assert predictor.touch("A1", 10) == "hit"
    assert not predictor.is_leaving("A1")


def test_dead_blocks_are_not_fetched_before_they_are_born_again() -> None:
    predictor = Predictor()
    for _ in range(4):
        predictor.enter("forward")
        if predictor.touch("a", 10, reads=False) and "a" not in predictor.window.held:
            predictor.fetching("a", 10)
            predictor.arrived("a")
        predictor.leave()
        run(predictor, "backward", "a", "w")
        predictor.dead("a")
    predictor.left("w")
    predictor.enter("update")
    predictor.leave()
    predictor.enter("forward")
    assert [w.block for w in predictor.predictions(100)] == ["w"]
    assert predictor.predictions(15) == []  # the birth needs its room first


# --- what holds for any sequence ----------------------------------------------------------------

events = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=6),
        st.integers(0, 60),
    ),
    max_size=60,
)


def drive(sequence: list, capacity: int = 60) -> list[object]:  # type: ignore[type-arg]
    """A runtime in miniature, that checks every answer; what it saw."""
    predictor = Predictor(Learned(SMALL), Reach(8))
    held = predictor.window.held
    seen: list[object] = []

    def room(nbytes: int, wanted: Wanted | None = None) -> bool:
        free = capacity - sum(h.nbytes for h in held.values())
        if free < nbytes:
            victims = predictor.victims(nbytes - free, wanted)
            assert len({v.block for v in victims}) == len(victims)
            for victim in victims:
                assert victim.block in held and victim.block not in predictor.window.busy
                predictor.left(victim.block)
            seen.append(victims)
        return capacity - sum(h.nbytes for h in held.values()) >= nbytes

    for execution, touches, offered in sequence:
        predictor.enter(execution)
        for block, reads in touches:
            nbytes = 1 + block % 7
            predictor.touch(block, nbytes, reads)
            if block not in held and room(nbytes):
                predictor.fetching(block, nbytes)
                predictor.arrived(block)
        predictor.leave()
        found = predictor.predictions(offered)
        assert sum(w.nbytes for w in found) <= offered
        assert not [w for w in found if w.block in held]
        assert len({w.block for w in found}) == len(found)
        seen.append(found)
        lack = predictor.shortfall(offered)
        if lack is not None:
            assert lack[1] > 0 and lack[0].block not in held
        for wanted in found[:2]:
            if room(wanted.nbytes, wanted):
                predictor.fetching(wanted.block, wanted.nbytes, prefetch=True)
                predictor.arrived(wanted.block)
        assert predictor.table_bytes <= SMALL.most_bytes
        assert len(predictor.window.chain) <= 8
    return [*seen, predictor.counters.as_dict(), predictor.table_bytes]


@given(events)
@settings(max_examples=60, deadline=None)
def test_no_prefetch_of_what_is_there_nor_beyond_the_free_bytes_and_always_the_same(
    sequence: list,  # type: ignore[type-arg]
) -> None:
    assert drive(sequence) == drive(sequence)


def test_tables_stay_below_their_bound_and_take_no_more_than_they_say() -> None:
    limits = LearnedLimits(
        executions=Shape(256, 4, 4),
        known_executions=200,
        known_blocks=500,
        block_table_bytes=90_000,
    )
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        learned = Learned(limits)
        for i in range(1500):
            learned.begin(("graph", i % 497), False)
            for k in range(5):
                learned.touch(("block", i * 7 + k), 10, False)
            learned.end()
            assert learned.table_bytes <= limits.most_bytes
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert limits.most_bytes / 4 < learned.table_bytes
    assert held <= learned.table_bytes
