"""The system's figures for this process, against what it did; limits of cgroups."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Mapping as Files
from pathlib import Path

import pytest

from offcompile.ir import OffloadError
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.base.mapping import Mapping
from offcompile.runtime.memory.malloc.glibc import return_freed_memory

MIB = 1 << 20
# other threads come and go, and the kernel makes huge pages of small ones when it likes
SLACK_BYTES = 16 * MIB

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def touched(nbytes: int) -> Mapping:
    mapping = Mapping(nbytes)
    mapping.open(0, nbytes)
    mapping.touch(0, nbytes)
    return mapping


@linux
def test_resident_follows_what_is_touched_and_unmapped() -> None:
    before = memory.resident().anon_bytes
    mapping = touched(64 * MIB)
    assert abs(memory.resident().anon_bytes - before - 64 * MIB) < SLACK_BYTES
    mapping.unmap()
    assert abs(memory.resident().anon_bytes - before) < SLACK_BYTES


@linux
@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs huge pages")
def test_small_pages_count_what_is_touched() -> None:
    def taken_by_one_byte_in_each_2_mib() -> int:
        with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE) as mapped:
            mapped.madvise(mmap.MADV_HUGEPAGE)
            before = memory.resident().anon_bytes
            for at in range(0, 64 * MIB, 2 * MIB):
                mapped[at] = 1
            return memory.resident().anon_bytes - before

    with memory.small_pages():
        with memory.small_pages():
            pass
        assert taken_by_one_byte_in_each_2_mib() < SLACK_BYTES
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if enabled.exists() and "[never]" not in enabled.read_text():
        assert taken_by_one_byte_in_each_2_mib() > SLACK_BYTES  # and huge ones come again


@linux
def test_pages_of_files_are_counted_apart(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(32 * MIB))
    before = memory.resident()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 32 * MIB) as mapped:
        assert not any(mapped[::4096])
        after = memory.resident()
    assert abs(after.file_bytes - before.file_bytes - 32 * MIB) < SLACK_BYTES
    assert abs(after.anon_bytes - before.anon_bytes) < SLACK_BYTES


@linux
def test_the_peak_stays_until_it_is_reset() -> None:
    if not memory.reset_peak():
        pytest.skip("this system cannot reset the peak")
    before = memory.peak_bytes()
    touched(64 * MIB).unmap()
    assert abs(memory.peak_bytes() - before - 64 * MIB) < SLACK_BYTES
    assert memory.reset_peak()
    assert memory.peak_bytes() < before + SLACK_BYTES


@linux
def test_data_counts_memory_and_not_mere_addresses() -> None:
    before = memory.data_bytes()
    mapping = Mapping(1 << 30)
    assert memory.data_bytes() - before < SLACK_BYTES
    mapping.open(0, 64 * MIB)
    assert abs(memory.data_bytes() - before - 64 * MIB) < SLACK_BYTES


def test_a_system_without_proc_is_told_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    with pytest.raises(OffloadError, match=r"status \(No such file or directory\): only Linux"):
        memory.resident()
    with pytest.raises(OffloadError, match="only Linux"):
        memory.data_bytes()
    assert memory.peak_bytes() > MIB  # getrusage knows it everywhere
    (tmp_path / "status").write_text("Name:\tpython\nVmData:\t  12 kB\n")
    assert memory.data_bytes() == 12 * 1024
    with pytest.raises(OffloadError, match="has no RssAnon, RssShmem, RssFile"):
        memory.resident()


PHYSICAL_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V1 = "34 28 0:31 {root} /sys/fs/cgroup/memory rw shared:1 - cgroup cgroup rw,memory\n"
V2 = "30 23 0:28 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("group", "mount", "limits", "found"),
    [
        ("0::/a/b\n", V2.format(root="/"), {"a/b/memory.max": "max"}, PHYSICAL_BYTES),
        ("0::/a/b\n", V2.format(root="/"), {"a/b/memory.max": "7000"}, 7000),
        # a group around ours may allow less than ours
        (
            "0::/a/b\n",
            V2.format(root="/"),
            {"a/b/memory.max": "7000", "a/memory.max": "5000"},
            5000,
        ),
        # in a container: the host's path, of which only a part is mounted
        ("0::/docker/x/in\n", V2.format(root="/docker/x"), {"in/memory.max": "6000"}, 6000),
        ("0::/docker/x\n", V2.format(root="/elsewhere"), {"memory.max": "6000"}, 6000),
        (
            "4:memory:/a\n3:cpu:/\n",
            V1.format(root="/"),
            {"memory/a/memory.limit_in_bytes": "8000"},
            8000,
        ),
        (
            "4:memory:/a\n",
            V1.format(root="/"),
            {"memory/a/memory.limit_in_bytes": "9223372036854771712"},
            PHYSICAL_BYTES,
        ),
        (
            "3:cpu:/a\n",
            V1.format(root="/"),
            {"memory/a/memory.limit_in_bytes": "1"},
            PHYSICAL_BYTES,
        ),
    ],
)
def test_the_limits_of_cgroups_bound_the_machine(
    tmp_path: Path, group: str, mount: str, limits: Files[str, str], found: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group)
    (tmp_path / "proc/self/mountinfo").write_text(mount)
    for name, text in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert memory.machine_memory_bytes(tmp_path) == found


def test_the_machine_has_the_memory_that_it_says() -> None:
    assert 0 < memory.machine_memory_bytes() <= PHYSICAL_BYTES


FREEING = """
import ctypes, sys
from offcompile.runtime.base.process_memory import resident
from offcompile.runtime.memory.malloc.glibc import return_freed_memory
if sys.argv[1] == "returned":
    return_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.free(libc.malloc(24 << 20))
blocks = []
for _ in range(4):
    block = libc.malloc(16 << 20)
    ctypes.memset(block, 1, 16 << 20)
    blocks.append((block, libc.malloc(100_000)))
before = resident().anon_bytes
for block, small in blocks:
    libc.free(block)
if sys.argv[1] == "returned later":
    return_freed_memory()
print((before - resident().anon_bytes) >> 20)
"""


@linux
def test_freed_memory_goes_back_to_the_system() -> None:
    if not return_freed_memory().returns_freed:
        pytest.skip("this allocator is left as it is")
    assert return_freed_memory().name.startswith("glibc 2.")

    def freed_mib(how: str) -> int:
        told = subprocess.run(
            [sys.executable, "-c", FREEING, how], check=True, capture_output=True, text=True
        )
        return int(told.stdout)

    assert freed_mib("returned") >= 60
    assert freed_mib("returned later") >= 60
    assert freed_mib("kept") < 60  # else the setting is for nothing
