"""Bounds on host memory, where they are read, and how they are named."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from host_fakes import FakeRegistrar, arena_of, isolate

from offcompile.runtime.base import host_limits
from offcompile.runtime.base.host_limits import HostBound
from offcompile.runtime.memory import pinning
from offcompile.runtime.memory.host_arena import HostArena, HostFull

MIB = 1 << 20

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    isolate(monkeypatch)
    yield
    pinning.sweep()


# the function that `isolate` replaces
real_bounds = host_limits.growth_bounds

# -- what bounds it ----------------------------------------------------------------------------


def test_the_tightest_bound_counts_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = [
        HostBound(3 * MIB, "the cgroup", "ask for more"),
        HostBound(9 * MIB, "the RAM", "buy some"),
    ]
    monkeypatch.setattr(host_limits, "growth_bounds", lambda: bounds)
    arena = arena_of(limit_bytes=6 * MIB)
    with pytest.raises(
        HostFull,
        match=f"{4 * MIB} bytes were asked for; of 0 bytes 0 are free, at most 0 in one piece, and "
        f"{3 * MIB} more can be had. The bound is the cgroup: ask for more.",
    ):
        arena.block(4 * MIB)
    held = arena.block(3 * MIB)
    # by now the arena's own limit is the tightest
    held.tensor.fill_(1)
    bounds[0] = HostBound(8 * MIB, "the cgroup", "ask for more")
    with pytest.raises(HostFull, match=f"own limit of {6 * MIB} bytes: raise it with options"):
        arena.block(4 * MIB)
    # little room is used before it is refused
    bounds[0] = HostBound(10_000, "the cgroup", "ask for more")
    assert arena.block(9_000).nbytes == 9_000
    assert arena.capacity_bytes == 3 * MIB + 9_984


def test_without_a_limit_it_leaves_the_machine_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "default_limit_bytes", lambda: 2 * MIB)
    arena = HostArena(None, 0, FakeRegistrar())
    with pytest.raises(HostFull, match=f"85% of this machine's memory \\({2 * MIB} bytes\\)"):
        arena.block(2 * MIB + 1)
    assert arena.block(2 * MIB).nbytes == 2 * MIB


@pytest.fixture
def no_rlimits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)


MOUNT = "30 23 0:26 {root} {at} rw - {kind} {kind} rw{options}\n"


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.usefixtures("no_rlimits")
def test_free_memory_and_cgroups_of_version_two_are_read(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 10000 kB\nMemAvailable: 6000 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    mount = MOUNT.format(root="/", at="/sys/fs/cgroup", kind="cgroup2", options="")
    write(tmp_path, "proc/self/mountinfo", mount)
    outer, inner = "sys/fs/cgroup/job/", "sys/fs/cgroup/job/step/"
    write(tmp_path, outer + "memory.max", "4000000\n")
    write(tmp_path, outer + "memory.current", "3000000\n")
    write(tmp_path, outer + "memory.stat", "anon 1\ninactive_file 500000\nactive_file 100000\n")
    write(tmp_path, inner + "memory.max", "max\n")
    write(tmp_path, inner + "memory.current", "1\n")
    free, group = real_bounds(tmp_path)
    assert free.nbytes == (6000 - 500) * 1024
    assert "free memory (6144000 of 10240000 bytes available" in free.source
    assert group.nbytes == 4_000_000 - (3_000_000 - 600_000) - 200_000
    assert "cgroup's memory limit of 4000000 bytes" in group.source
    assert "memory.max" in group.source


@pytest.mark.usefixtures("no_rlimits")
def test_cgroups_of_version_one_are_read(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n")
    mount = MOUNT.format(
        root="/docker/abc", at="/sys/fs/cgroup/memory", kind="cgroup", options=",memory"
    )
    write(tmp_path, "proc/self/mountinfo", mount)
    top = "sys/fs/cgroup/memory/"
    write(tmp_path, top + "memory.limit_in_bytes", "2000000\n")
    write(tmp_path, top + "memory.usage_in_bytes", "2500000\n")
    (group,) = real_bounds(tmp_path)
    assert group.nbytes == 0
    write(tmp_path, top + "memory.limit_in_bytes", str((1 << 63) - 4096))
    assert real_bounds(tmp_path) == []


def test_the_surroundings_are_recognised(tmp_path: Path) -> None:
    assert not host_limits.in_wsl(tmp_path)
    assert not host_limits.in_container(tmp_path)
    write(tmp_path, "proc/sys/kernel/osrelease", "5.15.90.1-microsoft-standard-WSL2\n")
    write(tmp_path, "run/.containerenv", "")
    assert host_limits.in_wsl(tmp_path)
    assert host_limits.in_container(tmp_path)


def test_the_limit_on_locked_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert host_limits.memlock_bytes() == 65536
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert host_limits.memlock_bytes() is None


LIMITED = f"""
import resource, sys
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.memory.host_arena import HostArena, HostFull
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from host_fakes import FakeRegistrar
which, used = (
    (resource.RLIMIT_DATA, memory.data_bytes())
    if sys.argv[1] == "data"
    else (resource.RLIMIT_AS, int(open("/proc/self/statm").read().split()[0]) * 4096)
)
arena = HostArena(1 << 30, 0, FakeRegistrar())
resource.setrlimit(which, (used + {320 * MIB}, used + {320 * MIB}))
held = arena.block({32 * MIB})
print(arena.capacity_bytes)
try:
    arena.block({512 * MIB})
except HostFull as error:
    print(error)
"""


@linux
@pytest.mark.parametrize(("which", "option"), [("data", "-d"), ("addresses", "-v")])
def test_limits_of_the_process_cut_the_segment_and_are_named(which: str, option: str) -> None:
    done = warm.run([sys.executable, "-c", LIMITED, which])
    assert done.returncode == 0, done.stderr
    capacity, full = done.stdout.splitlines()
    assert 32 * MIB <= int(capacity) < 384 * MIB
    assert f"{512 * MIB} bytes were asked for" in full
    assert f"ulimit {option}" in full
