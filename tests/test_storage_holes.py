"""Free blocks of malloc's heap give some of their pages back; what is in use is not touched."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from offcompile.runtime.heap import address_space_is_limited, heap

MIB = 1 << 20

SETUP = """
import threading, torch
from offcompile.runtime.heap import heap
h = heap()
h.prepare()
holes = h._holes
assert holes is not None
holes.stock()
holes.grow(512 << 20)
def take(n): return [torch.full((12 << 18,), float(i)) for i in range(n)]  # 12 MiB each
"""


@pytest.fixture(autouse=True)
def glibc() -> None:
    if heap()._process is None or address_space_is_limited():
        pytest.skip("this allocator is left as it is")


def in_a_process(text: str) -> list[int]:
    body = SETUP + textwrap.dedent(text)
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_another_thread_gives_back_what_is_wanted_and_no_more() -> None:
    before, given, after, right = in_a_process(
        """
        blocks = take(16)
        keep = blocks[::2]
        del blocks
        before, given = h.resident_bytes(), []
        thread = threading.Thread(target=lambda: given.append(holes.give_back(24 << 20)))
        thread.start(); thread.join()
        after = h.resident_bytes()
        right = all(bool((x == 2 * i).all()) for i, x in enumerate(keep))
        print(before, given[0], after, int(right))
        """
    )
    assert right
    assert 24 * MIB <= given <= 72 * MIB
    assert abs(before - after - given) <= 4 * MIB


def test_looking_for_free_blocks_again_and_again_does_not_grow_the_heap() -> None:
    given, left, grown = in_a_process(
        """
        keep = take(1)
        wide = take(8); del wide
        end = h._process.sbrk(0)
        given = 0
        for _ in range(40): holes.stock(); given += holes.give_back(64 << 20)
        print(given, holes.give_back(1 << 40), h._process.sbrk(0) - end)
        """
    )
    assert given >= 80 * MIB
    assert left <= 2 * MIB
    assert grown == 0


def test_without_blocks_to_enlarge_nothing_is_given() -> None:
    (given,) = in_a_process(
        """
        wide = take(8); del wide
        holes._seeds.clear()
        print(holes.give_back(64 << 20))
        """
    )
    assert given == 0
