"""Host memory that ops use in place: it is a file's, found by address, and gone with its tensor."""

from __future__ import annotations

import gc
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.device import mapped
from offcompile.runtime.device.mapped import MappedStore

MIB = 1 << 20


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_tensor_and_its_file_are_one(tmp_path: Path) -> None:
    store = MappedStore(tmp_path)
    first, second = (t.view(torch.float32) for t in store.tensors([4000, 8192]))
    first.copy_(torch.arange(1000.0))
    second.fill_(7.0)
    found = store.slot_of(first.view(10, 100)[3])
    assert found is not None and found.nbytes == 4000
    read = bytearray(400)
    found.read(400, memoryview(read))
    assert np.frombuffer(read, np.float32).tolist() == list(range(100, 200))
    found.write(0, memoryview(np.full(100, -1.0, np.float32)).cast("B"))
    assert first[:101].tolist() == [-1.0] * 100 + [100.0]
    assert bool((second == 7.0).all())


def test_other_memory_is_not_found(tmp_path: Path) -> None:
    store = MappedStore(tmp_path)
    (mine,) = store.tensors([64])
    assert store.slot_of(torch.ones(3)) is None
    assert store.slot_of(mine.clone()) is None


def test_the_last_tensor_takes_the_file_along(tmp_path: Path) -> None:
    before = open_files()
    store = MappedStore(tmp_path)
    tensors = store.tensors([MIB, MIB])
    assert open_files() > before and store.used_bytes == 2 * MIB
    view = tensors[0].view(torch.float32)[5:]
    slot = store.slot_of(view)
    tensors.clear()
    gc.collect()
    assert store.slot_of(torch.ones(1)) is None and store.used_bytes == MIB
    view.fill_(3.0)  # still mapped
    del view
    gc.collect()
    assert store.slot_of(torch.ones(1)) is None and store.used_bytes == 0
    assert slot is not None
    read = bytearray(4)
    slot.read(20, memoryview(read))  # a copy that still needs the slot has the file
    assert np.frombuffer(read, np.float32).tolist() == [3.0]
    del slot
    assert open_files() == before


def test_room_is_kept_for_the_next_of_its_size_while_as_much_is_in_use(tmp_path: Path) -> None:
    store = MappedStore(tmp_path)
    weight, gradient = store.tensors([2 * MIB, MIB])
    address = gradient.data_ptr()
    del gradient
    gc.collect()
    (again,) = store.tensors([MIB])
    assert again.data_ptr() == address and store.spare_bytes == 0
    del weight, again
    gc.collect()
    assert store.slot_of(torch.ones(1)) is None
    assert store.used_bytes == store.spare_bytes == 0


def test_room_is_kept_for_an_owner_though_nothing_is_in_use(tmp_path: Path) -> None:
    class Owner:
        """A step of which only the gradients are here."""

    store, owner = MappedStore(tmp_path), Owner()
    store.keep_room(owner, 2 * MIB)
    gradients = store.tensors([MIB, MIB, MIB])
    addresses = {t.data_ptr() for t in gradients}
    gradients.clear()
    gc.collect()
    assert store.slot_of(torch.ones(1)) is None
    assert (store.used_bytes, store.spare_bytes) == (0, 2 * MIB)
    assert {t.data_ptr() for t in store.tensors([MIB, MIB])} < addresses
    del owner
    gc.collect()
    assert store.slot_of(torch.ones(1)) is None
    assert store.used_bytes == store.spare_bytes == 0


def test_what_lies_there_is_not_the_process_s_own(tmp_path: Path) -> None:
    store = MappedStore(tmp_path)
    before = memory.resident().anon_bytes
    (large,) = store.tensors([64 * MIB])
    large.fill_(1)
    assert memory.resident().anon_bytes - before < 16 * MIB


def test_the_file_has_no_name_and_is_the_user_s_alone(tmp_path: Path) -> None:
    store = MappedStore(tmp_path)
    (tensor,) = store.tensors([4096])
    slot = store.slot_of(tensor)
    assert slot is not None and list(tmp_path.iterdir()) == []
    told = os.fstat(slot._file._descriptor)
    assert told.st_nlink == 0 and stat.S_IMODE(told.st_mode) == 0o600


def test_a_disk_without_room_is_named_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "free_bytes", lambda path: 4096)
    with pytest.raises(OffloadError, match=r"1048576 bytes are needed in .* 4096 are free"):
        MappedStore(tmp_path).tensors([MIB])


def test_a_failing_disk_is_named(tmp_path: Path) -> None:
    store = MappedStore(tmp_path)
    (tensor,) = store.tensors([4096])
    slot = store.slot_of(tensor)
    assert slot is not None

    def nothing(*asked: object) -> int:
        return 0

    with pytest.raises(OffloadError, match=r"failed at byte 16 \(nothing was moved\)"):
        slot._file.transfer(nothing, 16, memoryview(bytearray(8)))
