"""Memory of torch's tensors from malloc's plain call: it fits again, and keeps a limit."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm

from offcompile.runtime.memory.malloc import tensor_memory
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.memory.malloc.tensor_memory import MENDED_VERSION, USUAL, VARIABLE

SETUP = """
import gc, os, pickle, sys, threading
import torch
from offcompile.runtime.memory.malloc import tensor_memory
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.memory.malloc.tensor_memory import install, will_fit
MIB = 1 << 20
"""
INSTALLED = SETUP + "assert will_fit() and install() and install()\n"
#: runs each code that it is given, a line of JSON, in a fork, and answers with what that prints
FORKING = (
    INSTALLED
    + """
import contextlib, io, json, traceback
def answer(code):
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(code, globals())
        return 0, out.getvalue().strip()
    except BaseException:
        return 1, traceback.format_exc()
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        print(json.dumps(answer(json.loads(line))), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
)


def environment(**variables: str) -> dict[str, str]:
    given = {k: v for k, v in os.environ.items() if k not in ("CXX", "GLIBC_TUNABLES", VARIABLE)}
    return {**given, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}


def ran(code: str, **variables: str) -> str:
    """The output of the code in a process of its own, since each chooses its allocator once."""
    command = [sys.executable, "-c", code]
    done = warm.run(command, env=environment(**variables), imported=warm.LITTLE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


Forked = Callable[[str], str]


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    """Run code in forks of one process that has installed the allocator: to import torch and to
    install for each would take seconds."""
    # OpenMP does not survive a fork
    given = environment(OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", FORKING]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=given) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(code: str) -> str:
            process.stdin.write(json.dumps(code) + "\n")
            process.stdin.flush()
            failed, said = json.loads(process.stdout.readline())
            assert not failed, said
            return str(said)

        yield run
        process.stdin.close()


SAME_PLACE = """
heap().prepare()
def made():
    return torch.ones(MIB // 4)
first = [made() for _ in range(8)]
beside = [torch.ones(3) for _ in range(64)]  # small ones take what lies about
places = {x.data_ptr() for x in first[2:6]}
del first[2:6]
beside += [torch.ones(3) for _ in range(64)]
several = [made() for _ in range(4)]
print(len(places & {x.data_ptr() for x in several}))
"""


def test_a_place_fits_the_next_of_its_size(forked: Forked) -> None:
    assert forked(SAME_PLACE) == "4"


def test_tensors_are_as_they_were(forked: Forked) -> None:
    code = """
sizes = [0, 1, 7, 63, 64, 65, 4096, 5 * MIB + 3]
for n in sizes:
    x = torch.arange(n, dtype=torch.uint8)
    assert n == 0 or x.data_ptr() % 64 == 0
    assert torch.equal(x, torch.arange(n) % 256)
old = torch.arange(1000.0)
grown = old.clone().untyped_storage()
grown.resize_(80000)
assert torch.equal(torch.tensor(grown[:4000].tolist(), dtype=torch.uint8).view(torch.float32), old)
assert torch.equal(pickle.loads(pickle.dumps(old)), old)
assert old.clone().numpy().sum() == old.sum().item()
assert torch.equal(old.clone().share_memory_(), old)
made = []
threads = [threading.Thread(target=lambda: made.append(torch.ones(MIB))) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
child = os.fork()
if child == 0:
    made.clear()
    os._exit(int(torch.ones(MIB).sum().item()) != MIB)
assert os.waitpid(child, 0)[1] == 0
with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
    x = torch.empty(MIB); del x
print(max(e.self_cpu_memory_usage for e in profile.key_averages()))
"""
    assert forked(code) == str(4 << 20)


def test_what_is_freed_is_free(forked: Forked) -> None:
    code = """
gc.collect()
before = heap().live_bytes()
x = torch.ones(8 * MIB); y = torch.ones(100)
held = heap().live_bytes() - before
del x, y
print(round(held / MIB / 8), round((heap().live_bytes() - before) / MIB / 8))
"""
    assert forked(code) == "4 0"  # of 8 MiB each: others come and go by less


def test_tensors_from_before_are_freed_as_they_were_made() -> None:
    code = (
        SETUP
        + """
old = [torch.ones(n) for n in (3, 1000, MIB)]
assert install()
new = [x + 1 for x in old]
del old
print(sum(x.sum().item() for x in new))
"""
    )
    assert float(ran(code)) == 2.0 * (3 + 1000 + (1 << 20))


@pytest.mark.parametrize("nbytes", [1 << 62, (1 << 63) - 1])
def test_memory_that_is_not_there_is_refused_in_the_words_that_are_looked_for(
    nbytes: int, forked: Forked
) -> None:
    code = f"""
try:
    torch.empty({nbytes}, dtype=torch.uint8)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    told = forked(code)
    assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in told
    assert f"{nbytes} bytes" in told


def test_without_a_compiler_torchs_own_stays(tmp_path: Path) -> None:
    code = (
        SETUP
        + """
import logging
logging.basicConfig(level=logging.INFO)
print(will_fit(), install(), will_fit(), torch.ones(MIB).sum().item())
"""
    )
    found = ran(code, CXX=str(tmp_path / "none"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert found == f"False False False {float(1 << 20)}"


def test_a_compiler_that_fails_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("no such header")

    monkeypatch.setattr(tensor_memory, "_wanted", lambda: True)
    monkeypatch.setattr(tensor_memory, "_compile_and_install", fails)
    tensor_memory._installed.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert not tensor_memory.install()
            assert not tensor_memory.will_fit()
        assert "no such header" in caplog.text
    finally:
        tensor_memory._installed.cache_clear()


def test_who_does_not_want_it_keeps_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, USUAL)
    assert not tensor_memory.will_fit() and not tensor_memory.install()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(tensor_memory, "address_space_is_limited", lambda: True)
    assert not tensor_memory.will_fit() and not tensor_memory.install()
    monkeypatch.setattr(tensor_memory, "address_space_is_limited", lambda: False)
    monkeypatch.setattr(heap(), "_malloc", None)  # another malloc
    assert not tensor_memory.will_fit() and not tensor_memory.install()


def test_which_malloc_leaves_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, leaves in ((None, False), ((2, 38), True), (MENDED_VERSION, False)):
        monkeypatch.setattr(tensor_memory, "glibc_version", lambda found=version: found)
        assert tensor_memory.malloc_leaves_ends() == leaves


# --- the limit --------------------------------------------------------------------------------

LIMITED = """
h = heap()
h.prepare()
h._watch = lambda: None  # who looks now and then
def churn(rounds):
    # each leaves holes where nothing of the next fits
    kept, peak = [], 0
    for i in range(rounds):
        several = [torch.ones((3 + i) * MIB // 4) for _ in range(4)]
        kept.append(several[1])
        peak = max(peak, h.resident_bytes())
        del several
    return peak
"""


def test_holes_go_back_before_a_tensor_is_touched_that_would_exceed_the_limit(
    forked: Forked,
) -> None:
    code = (
        LIMITED
        + """
h.begin(0, 62 * MIB)
start, before = h.resident_bytes(), h.trims
most = churn(6) - start
h.end()
print(most / MIB, h.trims - before, h.trim_ns > 0)
"""
    )
    most, trims, timed = forked(code).split()
    assert 56 <= float(most) <= 63  # 57 live at once, some of them where there were pages before
    assert 1 <= int(trims) <= 24 and timed == "True"


@pytest.mark.parametrize(
    ("comes", "most_trims"),
    [
        ("h.guard.limit(limit, h._statm); x = torch.ones(other // 4)", 1),
        # memory that is no tensor: whoever looks may see it come little by little
        ("h._limit(limit); y = np.ones(other, np.uint8); h.check()", 5),
    ],
)
def test_free_places_lose_no_more_pages_than_have_to_go(
    forked: Forked, comes: str, most_trims: int
) -> None:
    code = (
        LIMITED
        + """
import numpy as np
h.begin(0, 1 << 40)
placed, other = 48 * MIB, 16 * MIB
assert h.guard.places._allocator.lay_out(np.array([placed]), np.array([0]), placed)
x = torch.ones(placed // 4); del x  # the pages stay
start = h.resident_bytes()
limit, before = start + 4 * MIB, h.trims
"""
        + comes
        + """
print((h.resident_bytes() - start) / MIB, h.trims - before)
"""
    )
    more, trims = forked(code).split()
    assert 1 <= int(trims) <= most_trims
    # 16 MiB have come; 12 of them were too many, and 4 more go with these, in huge pages
    assert -3 <= float(more) <= 4


def test_native_code_looks_until_there_is_something_to_do(forked: Forked) -> None:
    code = """
import threading
h = heap()
h.prepare()
here, limit = h.resident_bytes(), 1 << 40
h.guard.limit(limit, h._statm)

def seen_until(beyond_bytes, change):
    seen = []
    arguments = limit, beyond_bytes, 1e9
    looking = threading.Thread(target=lambda: seen.append(h.guard.watch(*arguments)))
    looking.start()
    changed = change()
    looking.join()
    return seen[0] - here

held = seen_until(here // 2, lambda: None)
grown = seen_until(here + 64 * MIB, lambda: torch.ones(32 * MIB))
free = seen_until(here + 1024 * MIB, lambda: h.guard.limit(None, h._statm))
gone = seen_until(here // 2, lambda: None) + here
print(held < 64 * MIB, grown > 64 * MIB, free < 256 * MIB, gone == 0)
"""
    assert set(forked(code).split()) == {"True"}


def test_the_most_that_this_thread_has_taken_since_it_began_to_count(forked: Forked) -> None:
    code = (
        SETUP
        + """
before = torch.ones(4 * MIB)
guard = heap().guard
guard.count()
first = torch.ones(2 * MIB); del first
other = []
thread = threading.Thread(target=lambda: other.append(torch.ones(8 * MIB)))
thread.start(); thread.join()
second = torch.ones(MIB // 4); del before; third = torch.ones(MIB)
most = guard.most_counted()
guard.count()
print(most // MIB, guard.most_counted())
"""
    )
    assert forked(code) == "8 0"


def test_between_steps_nothing_goes_back(forked: Forked) -> None:
    code = (
        LIMITED
        + """
h.begin(0, 8 * MIB); h.end()
before = h.trims
churn(6)
print(h.trims - before)
"""
    )
    assert forked(code) == "0"


def test_what_no_trim_can_take_is_tried_for_once_for_each_mib_that_comes(forked: Forked) -> None:
    code = (
        LIMITED
        + """
h.begin(0, 8 * MIB)
before = h.trims
live = [torch.ones(MIB // 4) for _ in range(64)]
print(h.trims - before)
"""
    )
    assert 1 <= int(forked(code)) <= 64


def test_a_forked_child_has_no_limit_of_its_parents(forked: Forked) -> None:
    code = (
        LIMITED
        + """
h.begin(0, 8 * MIB)
before = h.trims
child = os.fork()
if child == 0:
    churn(6)
    os._exit(min(h.trims - before, 255))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert forked(code) == "0"


def test_a_fork_while_a_thread_gives_pages_back_leaves_no_lock_behind(forked: Forked) -> None:
    code = """
import signal, threading
h = heap()
h.guard.limit(1 << 40, h._statm)
over = threading.Event()

def trimming():
    while not over.is_set():
        h.guard.keep_within(1)

thread = threading.Thread(target=trimming)
thread.start()
ended = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends it if it waits for a lock that nobody opens
        h.guard.keep_within(1)
        os._exit(0)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
thread.join()
print(set(ended))
"""
    assert forked(code) == "{0}"


def test_versions_are_read_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.41")
    assert tensor_memory.glibc_version() == (2, 41)

    def unknown(name: str) -> str:
        raise ValueError(name)

    monkeypatch.setattr(os, "confstr", unknown)
    assert tensor_memory.glibc_version() is None
