"""Large blocks of repeated steps get fixed places: how they are found, kept and given up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import warm
from hypothesis import given
from hypothesis import strategies as st
from test_runtime_tensor_memory import INSTALLED, environment

import offcompile.runtime.memory.malloc.places as module
from offcompile.runtime.memory.malloc import placement
from offcompile.runtime.memory.malloc.placement import (
    PAGE_BYTES,
    BlockLayout,
    Integers,
    PlacedBlock,
    blocks_of,
    most_bytes,
    place,
    table,
)
from offcompile.runtime.memory.malloc.places import (
    LEFT_SHARE,
    MISSED_SHARE,
    MISSED_STEPS,
    MOST_ATTEMPTS,
    MOST_OTHERS,
    MOST_SUCCESSORS,
    NOWHERE,
    PLACED_FROM,
    RECORDED_FROM,
    BlockPlaces,
)
from offcompile.runtime.memory.malloc.reuse import nearer

MIB = 1 << 20
LENGTH = 12


def positions(block: PlacedBlock) -> set[int]:
    if block.first <= block.last:
        return set(range(block.first, block.last + 1))
    return {*range(block.first, LENGTH), *range(block.last + 1)}


blocks = st.lists(
    st.builds(
        PlacedBlock,
        st.integers(1, 40).map(lambda pages: pages * PAGE_BYTES),
        st.just(0),
        st.integers(0, LENGTH - 1),
        st.integers(0, LENGTH - 1),
    ),
    max_size=12,
)


@given(blocks)
def test_blocks_that_live_at_the_same_time_do_not_overlap(found: list[PlacedBlock]) -> None:
    made = place(found)
    check_apart(found, made)
    held = [sum(b.nbytes for b in found if p in positions(b)) for p in range(LENGTH)]
    assert most_bytes(found) == max(held) <= made.extent_bytes
    nearest = nearer(found, made)
    check_apart(found, nearest)
    assert nearest.extent_bytes == made.extent_bytes


def test_a_search_finds_a_smaller_layout() -> None:
    random = Random(9)
    found = []
    for _ in range(60):
        first = random.randrange(200)
        last = min(199, first + random.randrange(1, 80))
        found.append(PlacedBlock(random.choice((1, 2, 3, 5, 8)) * PAGE_BYTES, 0, first, last))
    begun, searched = place(found, attempts=0), place(found)
    check_apart(found, searched)
    assert most_bytes(found) == searched.extent_bytes < begun.extent_bytes


def check_apart(found: list[PlacedBlock], made: BlockLayout) -> None:
    for (a, at), (b, other) in itertools.combinations(zip(found, made.offsets, strict=True), 2):
        if positions(a) & positions(b):
            assert at + a.nbytes <= other or other + b.nbytes <= at
    ends = [at + b.nbytes for b, at in zip(found, made.offsets, strict=True)]
    assert made.extent_bytes >= max(ends, default=0)
    assert all(at >= 0 and at % PAGE_BYTES == 0 for at in made.offsets)


def test_blocks_move_to_where_others_have_just_died() -> None:
    """The lowest free place of the last block was left long ago, another one just before."""
    found = [
        PlacedBlock(MIB, 0, 0, 1),
        PlacedBlock(8 * MIB, 0, 2, 7),
        PlacedBlock(MIB, 1, 3, 5),
        PlacedBlock(MIB, 2, 6, 7),
    ]
    offsets = (0, MIB, 9 * MIB, 0)
    moved = nearer(found, BlockLayout(offsets, 10 * MIB))
    assert moved.offsets[3] == moved.offsets[2] == 9 * MIB
    check_apart(found, moved)


# -- what was recorded -----------------------------------------------------------------------------

BORDER = (0, 0, 0)
MAIN, LANE = 1, 2


def recorded(*steps: list[tuple[int, int, int]]) -> Integers:
    rows = [row for step in steps for row in (BORDER, *step)]
    return np.array([*rows, BORDER], np.int64)


def came(nbytes: int, address: int) -> tuple[int, int, int]:
    return nbytes, address, MAIN


def went(address: int, thread: int = MAIN) -> tuple[int, int, int]:
    return 0, address, thread


def test_blocks_are_told_apart_by_their_size_and_by_how_many_came_before() -> None:
    step = [came(MIB, 10), came(2 * MIB, 20), went(10), came(MIB, 30), went(20), went(30)]
    assert blocks_of(recorded(step, step)) == [
        PlacedBlock(2 * MIB, 0, 1, 4),
        PlacedBlock(MIB, 0, 0, 2),
        PlacedBlock(MIB, 1, 3, 5),
    ]


def test_a_block_may_live_into_the_next_step_but_not_through_it() -> None:
    first = [came(MIB, 10), came(MIB, 20), came(MIB, 30), went(10)]
    # what lay at 20 goes; what comes there is another one, and what lay at 30 stays
    second = [went(20), came(MIB, 10), came(MIB, 20), came(MIB, 40), went(10), went(20)]
    assert blocks_of(recorded(first, second)) == [
        PlacedBlock(MIB, 0, 0, 3),
        PlacedBlock(MIB, 1, 1, 0),
    ]


def test_a_block_that_a_lane_frees_may_live_a_little_longer() -> None:
    filler = [came(placement.LEAST_BYTES, 99), went(99)] * 100
    step = [came(MIB, 10), came(MIB, 20), went(10, LANE), went(20), *filler]
    lane, own = sorted(blocks_of(recorded(step, step)), key=lambda b: -b.nbytes)[:2]
    assert (own.first, own.last) == (1, 3)
    assert lane.first == 0 and lane.last == 2 + int(len(step) * placement.SLACK)


@pytest.mark.parametrize("second", [[], [came(3 * MIB, 10), went(10)]])
def test_steps_that_differ_are_not_laid_out(second: list[tuple[int, int, int]]) -> None:
    assert blocks_of(recorded([came(MIB, 10), went(10)], second)) == []


def test_small_blocks_get_no_place() -> None:
    step = [came(placement.LEAST_BYTES - 1, 10), came(MIB, 20), went(10), went(20)]
    assert [b.nbytes for b in blocks_of(recorded(step, step))] == [MIB]


def test_a_block_without_a_place_leaves_a_gap_in_the_table() -> None:
    found = [PlacedBlock(MIB, 2, 0, 1), PlacedBlock(MIB, 0, 0, 1)]
    sizes, offsets = table(found, (MIB, 0), NOWHERE)
    assert sizes.tolist() == [MIB] * 3 and offsets.tolist() == [0, NOWHERE, MIB]


# -- when ------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """An allocator that has always recorded the same two steps."""

    second: list[tuple[int, int, int]] | None = None
    recording: bool = False
    extents: list[int] = field(default_factory=list)
    trims: int = 0
    missing_bytes: int = 0

    def begin_step(self) -> None: ...

    def record(self, on: bool) -> None:
        self.recording = on

    def events(self) -> Integers:
        step = [came(MIB, 10), came(2 * MIB, 20), went(10), went(20)]
        return recorded(step, step if self.second is None else self.second)

    def lay_out(self, sizes: Integers, offsets: Integers, extent_bytes: int) -> bool:
        self.extents.append(extent_bytes)
        return True

    def missed_bytes(self) -> int:
        return self.missing_bytes

    def trim(self) -> None:
        self.trims += 1


class Thing:
    """A graph or a plan."""


def room(nbytes: int = 64 * MIB) -> Callable[[], int]:
    return lambda: nbytes


GRAPH, PLAN = Thing(), Thing()


def test_two_steps_are_recorded_and_then_laid_out() -> None:
    allocator = Recorder()
    places, recording = BlockPlaces(allocator), []
    for _ in range(PLACED_FROM + 1):
        places.begin_step(GRAPH, PLAN, room())
        recording.append(allocator.recording)
    assert recording == [RECORDED_FROM <= run < PLACED_FROM for run in range(1, PLACED_FROM + 2)]
    assert allocator.extents == [3 * MIB] and allocator.trims == 1
    assert (places.blocks, places.extent_bytes) == (2, 3 * MIB)


def test_another_plan_begins_anew_and_other_graphs_are_part_of_the_step() -> None:
    allocator, other = Recorder(), Thing()
    places = BlockPlaces(allocator)
    for _ in range(PLACED_FROM):
        places.begin_step(GRAPH, PLAN, room())
        places.begin_step(other, PLAN, room())
    assert allocator.extents == [3 * MIB]
    places.begin_step(GRAPH, other, room())
    assert allocator.extents == [3 * MIB, 0] and places.blocks == 0


def test_a_step_that_is_unlike_the_others_begins_the_record_anew() -> None:
    allocator, other = Recorder(), Thing()
    places = BlockPlaces(allocator)
    for _ in range(PLACED_FROM - 1):
        places.begin_step(GRAPH, PLAN, room())
    assert allocator.recording
    places.begin_other_step(other)
    assert allocator.recording, "it is another graph's"
    places.begin_other_step(GRAPH)
    assert not allocator.recording
    for _ in range(PLACED_FROM - 1):
        places.begin_step(GRAPH, PLAN, room())
    assert not places.blocks
    places.begin_step(GRAPH, PLAN, room())
    assert places.blocks
    places.begin_other_step(GRAPH)
    assert places.blocks, "those that have a place keep it"


def test_a_graph_that_no_longer_runs_gives_way() -> None:
    allocator, other = Recorder(), Thing()
    places = BlockPlaces(allocator)
    places.begin_step(GRAPH, PLAN, room())
    for _ in range(MOST_OTHERS + PLACED_FROM):
        places.begin_step(other, PLAN, room())
    assert places.blocks


@pytest.mark.parametrize(
    ("alternate", "same", "placed"),
    [(False, True, True), (False, False, False), (True, True, False)],
)
def test_a_graph_compiled_again_takes_over_soon(alternate: bool, same: bool, placed: bool) -> None:
    allocator, other = Recorder(), Thing()
    places, ids = BlockPlaces(allocator), frozenset({1, 2})
    places.begin_step(GRAPH, PLAN, room(), ids)
    for _ in range(MOST_SUCCESSORS + PLACED_FROM):
        places.begin_step(other, other, room(), ids if same else frozenset({1}))
        if alternate:
            places.begin_step(GRAPH, PLAN, room(), ids)
    assert (places._plan is not None and places._plan() is other) is placed
    assert bool(places.blocks) is (placed or alternate)


@pytest.mark.parametrize("runs", [RECORDED_FROM, PLACED_FROM])
def test_places_and_records_go_with_their_graph(runs: int) -> None:
    allocator, graph = Recorder(), Thing()
    places = BlockPlaces(allocator)
    for _ in range(runs):
        places.begin_step(graph, PLAN, room())
    del graph
    assert allocator.extents == ([3 * MIB, 0] if runs == PLACED_FROM else [])
    assert places.blocks == 0 and not allocator.recording


def test_nothing_is_undone_at_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, graph = Recorder(), Thing()
    places = BlockPlaces(allocator)
    for _ in range(PLACED_FROM):
        places.begin_step(graph, PLAN, room())
    monkeypatch.setattr(module, "is_finalizing", lambda: True)
    del graph
    assert allocator.extents == [3 * MIB]


def test_blocks_stay_with_malloc_where_places_have_no_room() -> None:
    allocator = Recorder()
    places = BlockPlaces(allocator)
    for _ in range(PLACED_FROM + 1):
        places.begin_step(GRAPH, PLAN, room(2 * MIB))
    assert not allocator.extents and not allocator.trims and not places.blocks


def test_steps_that_differ_stay_with_malloc() -> None:
    allocator = Recorder(second=[])
    places = BlockPlaces(allocator)
    for _ in range(PLACED_FROM + 1):
        places.begin_step(GRAPH, PLAN, room())
    assert not allocator.extents and not allocator.trims and not places.blocks


@pytest.mark.parametrize("share", [LEFT_SHARE + 0.1, LEFT_SHARE - 0.1, MISSED_SHARE / 2])
def test_steps_that_become_others_are_recorded_again_and_in_the_end_left_to_malloc(
    share: float,
) -> None:
    allocator = Recorder()
    places, laid_out = BlockPlaces(allocator), [3 * MIB, 0]
    for _ in range(MOST_ATTEMPTS * (PLACED_FROM + MISSED_STEPS)):
        allocator.missing_bytes += int(share * 3 * MIB)
        places.begin_step(GRAPH, PLAN, room())
    times = MOST_ATTEMPTS if share > MISSED_SHARE else 1
    left = share > LEFT_SHARE
    assert allocator.extents == (laid_out * times)[: None if left else -1]
    assert bool(places.blocks) is not left


# -- the allocator ---------------------------------------------------------------------------------

STEPS = """
import numpy as np
from offcompile.runtime.memory.malloc.placement import blocks_of
guard = heap().guard
placing, places = guard.places._allocator, guard.places
class Thing: ...
graph, plan, ROOM = Thing(), Thing(), lambda: 64 * MIB
def step(n=4, keep=None):
    places.begin_step(graph, plan, ROOM)
    held, found = [], []
    for i in range(n):
        x = torch.empty((i % 3 + 1) * MIB, dtype=torch.uint8)
        x.fill_(i)
        found.append(x.data_ptr())
        held.append(x)
        if keep is not None and i == 1:
            keep.append(x)
        if i % 2:
            del held[0]
    assert all(int(x[0]) == int(x[-1]) for x in held)
    return found
"""


def ran(code: str) -> str:
    import sys

    command = [sys.executable, "-c", INSTALLED + STEPS + code]
    done = warm.run(command, env=environment(), imported=warm.LITTLE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_steps_get_the_same_addresses_within_one_range() -> None:
    out = ran(
        """
for _ in range(4):
    step()
first, second = step(), step()
assert first == second, (first, second)
assert places.blocks == 4
low = min(first)
assert max(first) - low < places.extent_bytes <= 8 * MIB
assert all(a % 4096 == 0 for a in first)
assert guard.placed_bytes() == 0 and placing.missed_bytes() == 0
print("same")
"""
    )
    assert out == "same"


def test_a_place_that_is_taken_is_left_alone_and_counted() -> None:
    out = ran(
        """
for _ in range(4):
    step()
kept = []
first = step(keep=kept)
assert guard.placed_bytes() == 2 * MIB
second = step()
assert second[1] != first[1] and placing.missed_bytes() >= MIB
assert int(kept[0][0]) == int(kept[0][-1]) == 1
del kept[:]
assert guard.placed_bytes() == 0
assert step() == first
print("left alone")
"""
    )
    assert out == "left alone"


def test_blocks_outlive_the_layout_that_placed_them() -> None:
    out = ran(
        """
kept = []
for _ in range(4):
    step()
step(keep=kept)
places.begin_step(Thing, plan, ROOM)  # not yet: the first graph is only a step ago
other = Thing()
places.begin_step(graph, other, ROOM)
assert places.blocks == 0 and guard.placed_bytes() == 2 * MIB
assert int(kept[0][0]) == 1
x = torch.empty(2 * MIB, dtype=torch.uint8)
before = heap().resident_bytes()
del kept[:]
assert guard.placed_bytes() == 0
print(before - heap().resident_bytes() >= 2 * MIB)
"""
    )
    assert out == "True"


def test_pages_of_free_places_go_back_and_live_ones_stay() -> None:
    out = ran(
        """
kept = []
for _ in range(5):
    step()
step(keep=kept)
before = heap().resident_bytes()
heap().trim()
assert before - heap().resident_bytes() >= 2 * MIB
assert int(kept[0].min()) == int(kept[0].max()) == 1
assert heap().live_bytes() >= guard.placed_bytes() == 2 * MIB
print("went")
"""
    )
    assert out == "went"


def test_a_forked_process_can_use_and_free_places() -> None:
    out = ran(
        """
tensor_memory._installed.cache_clear()
assert install()  # a second time, as programs that import again do
torch.set_num_threads(1)  # threads do not come along into the child
for _ in range(4):
    step()
kept = []
step(keep=kept)
child = os.fork()
if child == 0:
    try:
        step()
        del kept[:]
        os._exit(0)
    finally:
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert int(kept[0].min()) == int(kept[0].max()) == 1
print("forked")
"""
    )
    assert out == "forked"
