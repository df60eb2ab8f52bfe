"""GPUDirect Storage against a library that is not one: the calls, the errors, the way back."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cufile import FakeLibrary, driver, opened

from offcompile.ir import OffloadError
from offcompile.runtime.disk import gds
from offcompile.runtime.disk.gds import CHUNK_BYTES, GdsStore, open_cufile
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.memory.arena import Arena

pytestmark = pytest.mark.usefixtures("on_a_disk")

MIB = 1 << 20


def test_bytes_come_back_from_several_directories(tmp_path: Path) -> None:
    library = FakeLibrary()
    cufile = opened(tmp_path, library)
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    arena = Arena(0)
    nbytes = 40 * MIB
    source, target = arena.block(nbytes), arena.block(nbytes)
    values = np.frombuffer(source.view, np.uint8)
    values[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    addresses = [block.tensor.data_ptr() for block in (source, target)]
    with SpillStore(places) as store:
        direct = GdsStore(store, cufile)
        extent = store.allocate(nbytes)
        direct.write(extent, 0, addresses[0], nbytes)
        direct.read(extent, 4096, addresses[1], nbytes - 4096)
        assert bytes(target.view[: nbytes - 4096]) == bytes(source.view[4096:])
        # bytes written this way can be read the ordinary way
        store.read(extent, 0, target.view)
        assert target.view == source.view
        assert store.bytes_written == nbytes and store.bytes_read == 2 * nbytes - 4096
        assert len(library.files) == 2
        direct.close()
        assert not library.files
    cufile.close()
    assert not library.is_open


def test_large_moves_go_in_parts(tmp_path: Path) -> None:
    library = FakeLibrary()
    cufile = opened(tmp_path, library)
    block = Arena(0).block(2 * CHUNK_BYTES + MIB)
    with SpillStore([tmp_path]) as store:
        direct = GdsStore(store, cufile)
        direct.write(
            store.allocate(block.nbytes), 0, block.tensor.data_ptr(), 2 * CHUNK_BYTES + MIB
        )
        assert [nbytes for _, nbytes in library.calls] == [CHUNK_BYTES, CHUNK_BYTES, MIB]
        direct.close()


@pytest.mark.parametrize(
    ("result", "said"),
    [(-1, "Input/output error|No space|Success"), (-5011, "cuFile error 5011"), (4096, "4096 b")],
)
def test_what_goes_wrong_names_the_place_and_counts_nothing(
    tmp_path: Path, result: int, said: str
) -> None:
    library = FakeLibrary()
    cufile = opened(tmp_path, library)
    with SpillStore([tmp_path]) as store:
        direct = GdsStore(store, cufile)
        extent = store.allocate(MIB)
        library.fails = result
        ctypes.set_errno(errno.EIO)
        with pytest.raises(OffloadError, match=f"spill file in .*{tmp_path.name}.*({said})"):
            direct.read(extent, 0, 4096, MIB)
        assert store.bytes_read == 0
        with pytest.raises(OffloadError, match="multiples of 4096"):
            direct.read(extent, 0, 4096, 5000)
        with pytest.raises(OffloadError, match="do not lie in an extent"):
            direct.read(extent, 0, 4096, 2 * MIB)
        store.release(extent)
        with pytest.raises(OffloadError, match="was released"):
            direct.write(extent, 0, 4096, MIB)
        direct.close()


def test_where_it_is_not_there_one_line_says_why(tmp_path: Path) -> None:
    def missing() -> Any:
        raise OffloadError("no GPUDirect Storage: libcufile.so: cannot open shared object file")

    no_module = open_cufile(missing, tmp_path / "absent")
    assert isinstance(no_module, str) and "modprobe nvidia-fs" in no_module
    no_library = open_cufile(missing, driver(tmp_path))
    assert isinstance(no_library, str) and "libcufile.so" in no_library
    no_driver = open_cufile(lambda: FakeLibrary(opens=(5011, 100)), driver(tmp_path))
    assert isinstance(no_driver, str) and "error 5011, CUDA error 100" in no_driver
    assert "\n" not in no_module + no_library + no_driver


def test_a_directory_is_tried_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeLibrary()
    cufile = opened(tmp_path, library)
    monkeypatch.setattr(gds, "this_cufile", lambda: cufile)
    assert gds.why_not_direct([tmp_path]) is None
    assert not library.files
    library.refuses = 5030
    why = gds.why_not_direct([tmp_path])
    assert why is not None and "error 5030" in why and "\n" not in why
    monkeypatch.setattr(gds, "this_cufile", lambda: "no GPUDirect Storage: planted")
    assert gds.why_not_direct([tmp_path]) == "no GPUDirect Storage: planted"


def test_files_in_the_page_cache_are_refused(tmp_path: Path) -> None:
    cufile = opened(tmp_path, FakeLibrary())
    with SpillStore([tmp_path]) as store:
        store.direct = False
        with pytest.raises(OffloadError, match="name a directory on a local disk"):
            GdsStore(store, cufile)
