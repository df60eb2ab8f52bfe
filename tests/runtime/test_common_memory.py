"""Memory that ranks have in common: what a rank writes is its own until it is published."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.device.common import CommonFile, CommonSlot
from offcompile.runtime.device.mapped import MappedFile, MappedStore
from offcompile.runtime.disk.page_cache import own_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files in /proc")

PAGE, NBYTES = 4096, 3 * 4096 + 100


@pytest.fixture
def ranks(tmp_path: Path) -> tuple[CommonSlot, CommonSlot]:
    """The same range as two ranks have it; the second has opened what the first has made."""
    made = CommonFile.make(tmp_path, 16 * PAGE)
    files = (made, CommonFile.open(made.address))
    first, second = (CommonSlot(file, PAGE, NBYTES, "host") for file in files)
    return first, second


def test_a_rank_writes_for_itself(ranks: tuple[CommonSlot, CommonSlot]) -> None:
    first, second = ranks
    first.array()[:2] = 7
    assert first.is_written and own_pages(first.address, NBYTES) == 1
    assert not second.is_written and not second.array().any()
    first.write(NBYTES - 2, memoryview(b"ab"))
    found = bytearray(4)
    first.read(NBYTES - 4, memoryview(found))
    assert found == b"\0\0ab" and not second.array().any()


def test_all_ranks_see_what_one_publishes(ranks: tuple[CommonSlot, CommonSlot]) -> None:
    first, second = ranks
    first.array()[5] = 1
    second.array()[9] = 2
    assert first.publish() and not first.publish()
    assert not first.is_written
    # the page that the second has written to is its own still
    assert second.array()[5] == 0 and second.array()[9] == 2
    assert second.drop_own() and not second.drop_own()
    assert second.array()[5] == 1 and second.array()[9] == 0
    second.shared_array()[-1] = 3
    assert first.array()[-1] == 3 and not first.is_written and not second.is_written


def test_a_file_that_is_another_is_refused(tmp_path: Path) -> None:
    file = CommonFile.make(tmp_path, PAGE)
    at = file.address
    with pytest.raises(OffloadError, match="is another file"):
        CommonFile.open(replace(at, inode=(at.inode[0], at.inode[1] + 1)))
    with pytest.raises(OffloadError, match="cannot be opened"):
        CommonFile.open(replace(at, descriptor=1 << 20))
    assert not list(tmp_path.iterdir())


def test_a_store_finds_tensors_there_and_forgets_their_writes(
    tmp_path: Path, ranks: tuple[CommonSlot, CommonSlot]
) -> None:
    store, (slot, _) = MappedStore(tmp_path), ranks
    tensor = store.tensor_on(slot)
    assert store.slot_of(tensor.view(-1)) is slot and not store.is_free(slot)
    tensor.fill_(5)
    assert slot.is_written and store.used_bytes == 0
    del tensor
    gc.collect()
    assert store.is_free(slot)
    assert not slot.is_written and not slot.array().any() and store.spare_bytes == 0


def allocated_bytes(file: MappedFile) -> int:
    return 512 * os.fstat(file._descriptor).st_blocks


def test_space_that_is_not_used_again_goes_back_to_the_system(tmp_path: Path) -> None:
    store = MappedStore(tmp_path)
    kept, left = store.tensors([4 * PAGE, 4 * PAGE])
    kept.fill_(1)
    left.fill_(2)
    slot = store.slot_of(left)
    assert slot is not None
    file = slot._file
    before = allocated_bytes(file)
    slot.is_reused = False
    del left
    gc.collect()
    assert store.slot_of(kept) is not None and store.spare_bytes == 0
    assert allocated_bytes(file) == before - 4 * PAGE
    del slot
    (other,) = store.tensors([4 * PAGE])
    found = store.slot_of(other)
    assert found is not None and found._file is not file  # not in the hole
    assert torch.equal(kept, torch.ones_like(kept))
