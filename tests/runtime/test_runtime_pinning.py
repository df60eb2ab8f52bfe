"""Registration of host memory with CUDA: refusals, forks, and the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from host_fakes import FakeRegistrar, arena_of, isolate

from offcompile.runtime.base import host_limits, once
from offcompile.runtime.memory import pinning
from offcompile.runtime.memory.host_arena import HostArena

MIB = 1 << 20
PAGE = 4096

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    isolate(monkeypatch)
    yield
    pinning.sweep()


# -- registering fails -------------------------------------------------------------------------


def test_when_a_registration_is_refused_it_goes_on_in_pageable_memory_and_says_so_once() -> None:
    registrar = FakeRegistrar(refuse_at=3)
    arena = HostArena(64 * MIB, 0, registrar)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        blocks = [arena.block(MIB)]
        assert arena.pinned
        blocks += [arena.block(MIB) for _ in range(4)]
        assert not arena.pinned
        # another arena is refused as well: the person knows already
        second = HostArena(64 * MIB, MIB, FakeRegistrar(refuse_at=1))
        assert not second.pinned
    assert [block.pinned for block in blocks] == [True, True, False, False, False]
    assert len(registrar.asked) == 3  # what was refused once is not tried again
    (warning,) = told
    text = str(warning.message)
    assert warning.category is RuntimeWarning
    assert f"refused to register {MIB} bytes (error 2, out of memory)" in text
    assert "pageable memory" in text
    for value, block in enumerate(blocks):
        block.tensor.fill_(value)
    assert [block.tensor[-1].item() for block in blocks] == [0, 1, 2, 3, 4]
    del block
    blocks.clear()
    arena.close()
    assert not registrar.held and not registrar.wrong


def test_many_threads_that_are_refused_say_it_once() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        arenas: list[HostArena] = []

        def make() -> None:
            arenas.append(HostArena(MIB, PAGE, FakeRegistrar(refuse_at=1)))

        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [arena.pinned for arena in arenas] == [False] * 8
    assert len(told) == 1


def told_for(
    monkeypatch: pytest.MonkeyPatch,
    memlock: int | None,
    container: bool = False,
    wsl: bool = False,
    code: int = 2,
) -> str:
    monkeypatch.setattr(host_limits, "memlock_bytes", lambda: memlock)
    monkeypatch.setattr(host_limits, "in_container", lambda: container)
    monkeypatch.setattr(host_limits, "in_wsl", lambda: wsl)
    with pytest.warns(RuntimeWarning) as told:
        pinning.warn_pageable(8 * MIB, code)
    return str(told[0].message)


def test_the_warning_names_ulimit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = told_for(monkeypatch, memlock=65536)
    assert "`ulimit -l` allows 65536 bytes of locked memory: run `ulimit -l unlimited`" in text


def test_the_warning_names_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    text = told_for(monkeypatch, memlock=65536, container=True)
    assert "start the container with `--ulimit memlock=-1`" in text
    monkeypatch.setattr(once, "_done", {})
    text = told_for(monkeypatch, memlock=None, container=True)
    assert "This is a container: its runtime may forbid pinning" in text


def test_the_warning_names_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Under WSL" in told_for(monkeypatch, memlock=None, wsl=True)


def test_the_warning_admits_that_nothing_explains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = told_for(monkeypatch, memlock=16 * MIB, code=4242)
    assert "(error 4242)" in text
    assert "No limit was found that explains it" in text


def test_the_warning_without_a_device_names_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = told_for(monkeypatch, memlock=65536, code=pinning.NO_DEVICE)
    assert "no CUDA device was found" in text
    assert "nvidia-smi" in text
    assert "ulimit" not in text


def test_a_registrar_that_raises_leaves_the_arena_whole() -> None:
    class Raising(FakeRegistrar):
        def register(self, address: int, nbytes: int) -> int:
            if not self.asked:
                self.asked.append(nbytes)
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
            return super().register(address, nbytes)

    registrar = Raising()
    arena = HostArena(8 * MIB, 0, registrar)
    with pytest.raises(RuntimeError, match="re-initialize CUDA"):
        arena.block(1)
    assert (arena.capacity_bytes, arena.used_bytes) == (0, 0)
    assert arena.block(1).pinned


@linux
def test_what_cuda_does_not_let_go_stays_mapped_and_is_told_once() -> None:
    registrar = FakeRegistrar(stuck=True)
    arena = HostArena(8 * MIB, 0, registrar)
    addresses = [arena.block(MIB).address for _ in range(3)]
    pairs = [HostArena(8 * MIB, MIB, registrar) for _ in range(2)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        arena.close()
        for other in pairs:
            other.close()
    assert len(told) == 1
    text = str(told[0].message)
    assert f"did not let go of {MIB} bytes" in text
    assert "error 700, illegal memory access" in text
    assert mapped(addresses[0])
    assert not pinning.is_registered(addresses[0], 1)


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return True
    return False


# -- forks and exit ----------------------------------------------------------------------------

CHILD = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from offcompile.ir import OffloadError
from offcompile.runtime.memory.host_arena import HostArena
class Telling:
    def register(self, address, nbytes):
        os.write(1, f"register {{os.getpid() == parent}}\\n".encode())
        return 0
    def unregister(self, address):
        os.write(1, f"unregister {{os.getpid() == parent}}\\n".encode())
        return 0
parent = os.getpid()
arena = HostArena(64 << 20, 4 << 20, Telling())
block = arena.block(1000)
dropped = arena.block(1000)
tensor = block.tensor
def is_mapped():
    for line in open("/proc/self/maps"):
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= block.address < int(end, 16):
            return True
    return False
child = os.fork()
if not child:
    try:
        arena.block(1)
    except OffloadError as error:
        os.write(1, f"{{'forked from it' in str(error)}} {{is_mapped()}}\\n".encode())
    dropped.free()
    arena.close()
    # memory of the child's own may come to lie where the parent's does not
    own = HostArena(64 << 20, 4 << 20, Telling())
    mine = own.block(1000).tensor.fill_(3)
    del block, tensor, arena, dropped
    import gc; gc.collect()
    own.block(40 << 20)
    assert mine.tolist() == [3] * 1000
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
tensor.fill_(1)
os.write(1, f"{{is_mapped()}} {{tensor.sum().item()}}\\n".encode())
"""


@linux
def test_a_child_leaves_the_registrations_of_its_parent_alone() -> None:
    # newer Pythons warn of forks beside threads, those of torch included
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", CHILD],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "register True",
        "True False",
        # the child's own arena: two segments, both let go at its exit
        "register False",
        "register False",
        "unregister False",
        "unregister False",
        "True 1000",
        "unregister True",
    ]


def test_forks_in_the_middle_of_other_threads_work_leave_no_lock_taken() -> None:
    arena = arena_of()
    stop, running = threading.Event(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            arena.block(PAGE)
            running.set()

    thread = threading.Thread(target=work)
    thread.start()
    running.wait()
    try:
        for _ in range(20):
            child = os.fork()
            if not child:
                os._exit(0 if arena.capacity_bytes == MIB else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()


def test_at_exit_everything_is_unregistered_once_while_tensors_live() -> None:
    script = (
        "from offcompile.runtime.memory.host_arena import HostArena\n"
        "class Telling:\n"
        "    def register(self, address, nbytes): return 0\n"
        "    def unregister(self, address):\n"
        "        print('unregister', flush=True)\n"
        "        return 0\n"
        "arena = HostArena(64 << 20, 1 << 20, Telling())\n"
        "kept = [arena.block(4096).tensor, arena.block(2 << 20).tensor]\n"
        "class Late:\n"
        "    def __del__(self): kept[0][0] = kept[1][0] = 1\n"
        "late = Late()\n"
    )
    done = warm.run([sys.executable, "-c", script])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["unregister", "unregister"]


# -- the real registrar, over a fake of torch.cuda ---------------------------------------------


class FakeCuda:
    """Records what is called; two devices, of which the second has no context."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.code = code
        self.broken = False
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(
            torch._C, "_cuda_hasPrimaryContext", lambda index: index == 0, raising=False
        )
        monkeypatch.setattr(pinning, "_process", SimpleNamespace(cudaGetLastError=self.forget))

    def synchronize(self, index: int) -> None:
        self.calls.append(("synchronize", index))
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.code

    def forget(self) -> None:
        self.calls.append(("forget",))


def test_the_real_registrar_is_portable_and_waits_for_devices_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    registrar = pinning.CudaRegistrar()
    assert registrar.register(8192, 4096) == 0
    assert registrar.unregister(8192) == 0
    assert cuda.calls == [("register", 8192, 4096, 1), ("synchronize", 0), ("unregister", 8192)]


def test_the_real_registrar_does_not_leave_its_errors_to_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch, code=2)
    registrar = pinning.CudaRegistrar()
    assert registrar.register(8192, 4096) == 2
    assert cuda.calls[-1] == ("forget",)
    cuda.broken = True
    cuda.calls.clear()
    assert registrar.unregister(8192) == 2
    assert [call[0] for call in cuda.calls] == ["synchronize", "forget", "unregister", "forget"]


def test_without_a_device_the_real_registrar_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pinning.CudaRegistrar().register(8192, 4096) == pinning.NO_DEVICE
