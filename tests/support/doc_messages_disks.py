"""Messages of directories and disks."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doc_messages import says, told, warned

from offcompile.machine import cost_cache
from offcompile.runtime.base import watchdog
from offcompile.runtime.device import cpu
from offcompile.runtime.device.interface import Label
from offcompile.runtime.device.lanes import Lanes
from offcompile.runtime.memory.malloc import tensor_memory

# --- directories and disks -----------------------------------------------------------------------


def checked(directory: Path) -> str:
    from offcompile.runtime.disk.directories import check_directory

    return told(lambda: check_directory(directory))


@says("the spill directory … does not exist: create it, or …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return checked(place / "missing")


@says("the spill directory … is not a directory")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    (place / "file").write_text("")
    return checked(place / "file")


@says("is on …, which keeps files in RAM, so that moving tensors there frees nothing")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.disk import directories

    patch.setattr(directories, "filesystem_type", lambda path: "tmpfs")
    return checked(place)


@says("belongs to another user (uid …) and anyone may write to it")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.disk import directories

    place.chmod(0o777)
    patch.setattr(directories, "filesystem_type", lambda path: "ext4")
    patch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    return checked(place)


@says("is not writable (…): make it so, or …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.disk import directories

    def refuse(dir: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    patch.setattr(directories, "filesystem_type", lambda path: "ext4")
    patch.setattr(directories.tempfile, "TemporaryFile", refuse)
    return checked(place)


@says("no spill file can be made in …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.disk.spill_file import open_unlinked

    return told(lambda: open_unlinked(place / "missing"))


@says("… bytes at … of the spill file in … failed (…): …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_checksums import PAGE, block
    from test_spill_faults import Disk, refusing

    from offcompile.runtime.disk.spill import SpillStore

    store = SpillStore([place])
    extent = store.allocate(PAGE)
    disk = Disk([store], pwritev=refusing(errno.ENOSPC))
    try:
        return told(lambda: store.write(extent, 0, block(1).view))
    finally:
        disk.mend()
        store.release(extent)
        store.close()


@says("could not be copied out to …: …. The parameters were not touched by this copy")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.device.failures import failure

    slot: Any = SimpleNamespace(nbytes=4096, where=f"the disk tier at {place}")
    return str(failure(OSError(errno.EIO, "Input/output error"), "out", "layer 3", slot))


@says("pages read are not what was written there (their checksums differ)")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_checksums import PAGE, block, swap

    from offcompile.runtime.disk.checksums import VerifiedStore

    store = VerifiedStore([place])
    extent = store.allocate(PAGE)
    store.write(extent, 0, block(1).view)
    swap(store, *store.ranges(extent, 0, PAGE))
    try:
        return told(lambda: store.read(extent, 0, block(1).view))
    finally:
        store.release(extent)
        store.close()


@says("a drive rated for … written lasts … at this rate, without a pause")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.disk.drive_life import DriveWatch

    watch = DriveWatch(10**12)
    return warned(lambda: [watch.step_over(i * 10**10, i * 60.0) for i in range(3)])


def waiting(looks: int) -> None:
    with watchdog.patience(watchdog.DEFAULT_S):
        number = watchdog.begun("reading", 4096, "/mnt/far")
        wait = watchdog.WatchedWait(lambda: "The load of act_3")
        try:
            for _ in range(looks):
                wait.look()
        finally:
            watchdog.over(number)


@says("… is waited for in vain, for … s. …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(watchdog, "warn_once", lambda kind, text: None)
    return told(lambda: waiting(watchdog.LOOKS))


@says("… is waited for longer than usual, for … s. …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return warned(lambda: waiting(watchdog.WARN_AT))


@says("One call takes longer than usual: …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    said: list[str] = []
    heard = threading.Event()
    patch.setattr(watchdog, "warn_once", lambda kind, text: [said.append(text), heard.set()])
    with watchdog.patience(0.08), watchdog.told(), watchdog.calling("saving", 9, place):
        assert heard.wait(30)
    return said[0]


@says("OFFCOMPILE_ALLOCATOR is …: write")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("OFFCOMPILE_ALLOCATOR", "mine")
    return told(tensor_memory.install)


@says("OFFCOMPILE_STALL_SECONDS is …: write after how many seconds")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("OFFCOMPILE_STALL_SECONDS", "soon")
    patch.setattr(watchdog._seen, "limit_s", None)
    return told(watchdog.limit_s)


@says("the thread … died of … (…); another takes its place")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    lanes, deaths = Lanes("test"), iter([MemoryError("no room")])

    def die() -> None:
        for death in deaths:
            raise death

    lanes.before = die
    job = lanes.submit("d2h", lambda: None, (), Label("out", "act_3"))
    lanes.wait(job)
    lanes.close()
    return str(job.error)


@says("the thread … cannot be started (…): raise what bounds this process")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", refuse)
    return told(lambda: Lanes("test").submit("d2h", lambda: None, (), Label("out", "act_3")))


@says("The process is out of memory: a tensor of … bytes could not come back")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    def exhausted(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    patch.setattr(cpu.torch, "empty", exhausted)
    return told(lambda: cpu._room(4096))


@says("measurements cannot be kept in …: they are repeated in every process")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    (place / "file").write_text("")
    patch.setenv("OFFCOMPILE_CACHE_DIR", str(place / "file" / "below"))
    return warned(lambda: cost_cache.write_document("machine", {"cpu": "some"}, {"memory": 1.0}))


@says("The dump of … cannot be written to …: …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.report.dump import dump

    (place / "file").write_text("")
    nothing: Any = None
    return told(lambda: dump(place / "file", "graph 0", nothing))


@says("the operating system refused … bytes of …: lower memory")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.memory.arena import Arena

    return told(lambda: Arena(0).block(1 << 60))
