"""Finds a place for each large block of a step that repeats itself, so that no holes form.

Each block gets the lowest place that is free during its whole life. The order in which blocks are
placed decides how much memory they need together. So a search changes it: the block that stands in
the way of a smaller layout is placed earlier. The recorded steps of a GPT-2 and of a Swin so need 0
to 4% more memory than the blocks of a moment take together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

#: blocks begin at whole pages, as direct I/O wants them
PAGE_BYTES = 4096
#: smaller blocks get no place; the same value as in the C++ source
LEAST_BYTES = 64 << 10
#: the largest blocks that get a place; with each, finding one takes longer
MOST_BLOCKS = 3000
#: layouts that are tried, and the blocks that are placed for them, which takes a second
ATTEMPTS, MOST_PLACED = 120, 80_000
#: failures in a row before the search begins again, with two of so many blocks exchanged
MOST_FAILURES, MOST_EXCHANGED = 5, 100
#: how often a block that is in the way is placed first of all
TO_FRONT = 0.3
#: a layout is good enough that takes so much more than its blocks take together
ENOUGH = 1.002
#: share of a step by which a block may outlive what was recorded, where a lane frees it
SLACK = 1 / 200
#: share of the bytes of a step that have to come again in the next one
SAME = 0.9


@dataclass(frozen=True)
class PlacedBlock:
    """`nbytes` from position `first` of a step to `last`, inclusive; into the next step if that is
    lower. `number`: of the blocks of this size in the step."""

    nbytes: int
    number: int
    first: int
    last: int


@dataclass(frozen=True)
class BlockLayout:
    """The offsets of blocks; those that live at the same time do not overlap."""

    offsets: tuple[int, ...]
    extent_bytes: int


def place(blocks: Sequence[PlacedBlock], attempts: int = ATTEMPTS) -> BlockLayout:
    """Find places, in as little memory as the search finds.
    attempts: layouts that are tried, where those that fail early count for less."""
    if not blocks:
        return BlockLayout((), 0)
    search = _Search(blocks)
    enough_bytes = ENOUGH * most_bytes(blocks)
    first, lives, sizes = search.first, search.lives, search.sizes
    # the largest first, of one size the longest or the earliest; or the largest for the longest
    keys = ((-lives, first, -sizes), (first, -lives, -sizes), (first, -(lives * sizes)))
    starts = [np.lexsort(key).tolist() for key in keys]
    for order in starts:
        search.attempt(order)
    random, turn, left = Random(0), 0, min(attempts * len(blocks), MOST_PLACED)
    while left > 0 and search.extent_bytes > enough_bytes:
        # from the best order and from those of the beginning by turns, with two blocks exchanged
        order = list(starts[turn // 2 % len(starts)] if turn % 2 else search.order)
        turn += 1
        i, j = (random.randrange(min(MOST_EXCHANGED, len(order))) for _ in range(2))
        order[i], order[j] = order[j], order[i]
        failures = 0
        while failures < MOST_FAILURES and left > 0 and search.extent_bytes > enough_bytes:
            fits, at = search.attempt(order)
            left -= len(order) if fits else at + 1
            failures = 0 if fits else failures + 1
            earlier = 0 if random.random() < TO_FRONT else random.randrange(at + 1)
            order.insert(earlier, order.pop(at))
    return BlockLayout(tuple(search.begins.tolist()), search.extent_bytes)


class _Search:
    """The best layout so far, and the order in which it places the blocks."""

    def __init__(self, blocks: Sequence[PlacedBlock]) -> None:
        padded = [-(-b.nbytes // PAGE_BYTES) * PAGE_BYTES for b in blocks]
        self.sizes = np.array(padded, np.int64)
        self.first = np.array([b.first for b in blocks], np.int64)
        self._last = last = np.array([b.last for b in blocks], np.int64)
        self.lives = last - self.first + (last < self.first) * (last.max(initial=0) + 1)
        self.begins = np.zeros_like(self.sizes)
        self.extent_bytes = int(self.sizes.sum()) + 1
        self.order: list[int] = []

    def attempt(self, order: list[int]) -> tuple[bool, int]:
        """Place blocks in this order, each at the lowest offset that is free during its life.

        Returns True and the position of the block that ends last if that is better than the best
        so far; else False and the position of the first block that stands in the way of this.
        """
        begins, ends = np.zeros_like(self.sizes), np.zeros_like(self.sizes)
        known = np.array(order)
        # in the order of placing
        first, last = self.first[known], self._last[known]
        for position, i in enumerate(order):
            met = meet(first[position], last[position], first[:position], last[:position])
            in_the_way = known[:position][met]
            nbytes = int(self.sizes[i])
            begin = _lowest(begins[in_the_way], ends[in_the_way], nbytes)
            if begin + nbytes >= self.extent_bytes:
                return False, position
            begins[i], ends[i] = begin, begin + nbytes
        self.begins, self.extent_bytes, self.order = begins, int(ends.max()), list(order)
        return True, int(np.argmax(ends[known]))


def meet(first: int, last: int, firsts: Integers, lasts: Integers) -> NDArray[np.bool_]:
    """True for each other life that this one meets."""
    over = lasts < firsts
    before_end, after_begin = firsts <= last, lasts >= first
    if last < first:
        return over | before_end | after_begin
    return np.where(over, before_end | after_begin, before_end & after_begin)


def _lowest(begins: Integers, ends: Integers, nbytes: int) -> int:
    """The lowest offset with so many free bytes."""
    if not len(begins):
        return 0
    order = np.argsort(begins)
    taken_until = np.concatenate(([0], np.maximum.accumulate(ends[order])))
    free = np.flatnonzero(begins[order] - taken_until[:-1] >= nbytes)
    return int(taken_until[free[0]] if len(free) else taken_until[-1])


def blocks_of(events: Integers) -> list[PlacedBlock]:
    """The blocks of the first of two recorded steps; none if the second one differs.

    events: rows of bytes, address and thread, see the C++ source. Blocks that are there for longer
    than a step are left out.
    """
    borders = np.flatnonzero((events[:, 0] == 0) & (events[:, 1] == 0))
    if len(borders) < 3:
        return []
    begin, middle, end = borders[:3].tolist()
    born = _born(events[begin + 1 : middle])
    again = {key: n for key, n, _, _ in _born(events[middle + 1 : end])}
    same = sum(key[0] for key, *_ in born if key in again)
    total = max(sum(key[0] for key, *_ in born), sum(key[0] for key in again))
    if not born or same < SAME * total:
        return []
    length = middle - begin - 1
    freed = _freed(events[middle + 1 : end])
    found = []
    for (nbytes, number), first, address, gone in born:
        last = gone
        if gone is None and address in freed and freed[address] < first:
            last = freed[address]  # in the next step
        elif gone is None:
            continue
        found.append(PlacedBlock(nbytes, number, first, int(last or 0)))
    threads = events[begin + 1 : middle, 2]
    most = sorted(found, key=lambda b: -b.nbytes)[:MOST_BLOCKS]
    return [_with_slack(b, threads, length) for b in most]


def _with_slack(block: PlacedBlock, threads: Integers, length: int) -> PlacedBlock:
    """The block with a longer life if another thread than its own has freed it."""
    if block.last < block.first or threads[block.first] == threads[block.last]:
        return block
    return PlacedBlock(
        block.nbytes, block.number, block.first, min(block.last + int(SLACK * length), length - 1)
    )


Born = tuple[tuple[int, int], int, int, int | None]


def _born(events: Integers) -> list[Born]:
    """For each large block of a step: size and number, when it came, where it lay, when it went."""
    counts: dict[int, int] = defaultdict(int)
    found: list[Born] = []
    there: dict[int, int] = {}
    for position, (nbytes, address) in enumerate(events[:, :2].tolist()):
        if nbytes >= LEAST_BYTES:
            there[address] = len(found)
            found.append(((nbytes, counts[nbytes]), position, address, None))
            counts[nbytes] += 1
        elif address in there:
            n = there.pop(address)
            key, first, _, _ = found[n]
            found[n] = key, first, address, position
    return found


def _freed(events: Integers) -> dict[int, int]:
    """Address → when the block that lay there at the beginning went."""
    found: dict[int, int] = {}
    taken: set[int] = set()
    for position, (nbytes, address) in enumerate(events[:, :2].tolist()):
        if nbytes:
            taken.add(address)
        elif address not in taken:
            found.setdefault(address, position)
    return found


def table(
    blocks: Iterable[PlacedBlock], offsets: Iterable[int], none: int
) -> tuple[Integers, Integers]:
    """Sizes and offsets, with blocks of one size by number; `none` for those without a place."""
    by_size: dict[int, dict[int, int]] = defaultdict(dict)
    for block, offset in zip(blocks, offsets, strict=True):
        by_size[block.nbytes][block.number] = offset
    rows = [
        (nbytes, numbers.get(number, none))
        for nbytes, numbers in by_size.items()
        for number in range(max(numbers) + 1)
    ]
    found = np.array(rows, np.int64).reshape(-1, 2)
    return np.ascontiguousarray(found[:, 0]), np.ascontiguousarray(found[:, 1])


def most_bytes(blocks: Sequence[PlacedBlock]) -> int:
    """The most bytes that blocks take at one position: no placement needs less."""
    changes: dict[int, int] = defaultdict(int)
    for block in blocks:
        changes[block.first] += block.nbytes
        changes[block.last + 1] -= block.nbytes
        if block.last < block.first:
            changes[0] += block.nbytes
    held = most = 0
    for position in sorted(changes):
        held += changes[position]
        most = max(most, held)
    return most
