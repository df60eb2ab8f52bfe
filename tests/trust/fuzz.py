"""Hostile files and command lines: each is refused in words, or is valid; nothing else happens.

Seeds replay: case N of a run is spoilt by `random.Random(f"{seed}:{N}")`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from offcompile.cli import command as cli
from offcompile.cli.files import BadPlan, read_inputs, read_plan
from offcompile.ir import OffloadError
from offcompile.machine.cost_cache import CostCache, document_path
from offcompile.machine.hardware import load_profile
from offcompile.runtime.disk import checkpoint_files

from .bombs import BOMBS, defuse
from .hostile import CACHE_IDENTITY, EXAMPLES, NAMES, File, good_files, safetensors, spoil
from .rows import Row

READ_CASES, COMMAND_CASES = 50_000, 4_000
#: a small file may not take longer: a thousand times what most take, on a busy machine
MOST_S = 20.0
_MOST_COPIED = 1 << 16
TINY, MACHINE = str(EXAMPLES / "tiny.json"), str(EXAMPLES / "tiny.machine.toml")

# --- nothing is written ----------------------------------------------------------------------

_EFFECTS = frozenset(
    [
        *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link"),
        *("os.truncate", "os.chmod", "os.system", "os.exec", "os.posix_spawn"),
        *("subprocess.Popen", "socket.connect", "pickle.find_class"),
    ]
)
_seen: list[str] | None = None
_hooks: list[Callable[[str, tuple[Any, ...]], None]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
    if event in _EFFECTS or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _seen.append(f"{event} {arguments[:1]}")


@contextlib.contextmanager
def effects() -> Iterator[list[str]]:
    """List what this process writes, starts or unpickles meanwhile."""
    global _seen
    if not _hooks:  # there is no way to take one out again
        _hooks.append(_audit)
        sys.addaudithook(_audit)
    _seen = seen = []
    try:
        yield seen
    finally:
        _seen = None


# --- readers ---------------------------------------------------------------------------------


def place(file: File, folder: Path) -> Path:
    """The path at which its reader looks for it."""
    if file.kind == "cache":
        return document_path("costs", CACHE_IDENTITY)
    return folder / f"{file.kind}{'.safetensors.index' * (file.kind == 'index')}{file.suffix}"


def reader(file: File, path: Path) -> Callable[[], object]:
    """A call that reads a file of that kind."""
    return {
        "problem": lambda: _inputs(problem=str(path), machine=MACHINE),
        "trace": lambda: _inputs(trace=str(path), machine=MACHINE),
        "machine": lambda: _inputs(problem=TINY, machine=str(path)),
        "plan": lambda: read_plan(str(path)),
        "profile": lambda: load_profile(path),
        "index": lambda: _weights(path),
        "weights": lambda: _weights(path),
        "cache": _cache,
    }[file.kind]


def _inputs(**given: str) -> object:
    names = ("problem", "trace", "machine", "hardware", "memory", "host_memory")
    return read_inputs(argparse.Namespace(**{**dict.fromkeys(names), "disk": False, **given}))


def _weights(path: Path) -> None:
    """Read all tensors as `load_weights` does, except big ones."""
    for entry in checkpoint_files.entries(path).values():
        if torch.Size(entry.shape).numel() <= _MOST_COPIED:
            entry.copy_to(torch.empty(entry.shape))


def _cache() -> None:
    """A document that makes no sense counts as absent: there is no error, and no strange figure."""
    cache = CostCache(CACHE_IDENTITY)
    found = [entry for key in ("a", "b", *NAMES) if (entry := cache.get(key)) is not None]
    if not all(0 < duration_us < 1e31 and 0 <= nbytes < 1e31 for duration_us, nbytes in found):
        raise AssertionError(f"strange figures were taken for measured ones: {found}")


def read_hostile(cases: int, seed: int, folder: Path) -> Row:
    """Give each spoilt file to its reader once."""
    files = good_files()
    (folder / "a.safetensors").write_bytes(safetensors(8))
    for file in files:  # as they are they are good; and everything is imported now
        place(file, folder).write_bytes(file.content)
        reader(file, place(file, folder))()
    said: Counter[str] = Counter()
    wrong = []
    for case, file in zip(range(cases), itertools.cycle(files)):
        path = place(file, folder)
        path.write_bytes(spoil(file, random.Random(f"{seed}:{case}")))
        outcome = judged(reader(file, path))
        said[outcome] += 1
        if outcome not in ("refused", "valid"):
            wrong.append(f"case {case} of seed {seed}, a {file.kind}{file.suffix}: {outcome}")
    _raise(wrong)
    figures = (("refused", f"{said['refused']:,}"), ("valid still", f"{said['valid']:,}"))
    return Row("hostile files read without harm", cases, cases, figures=figures)


def judged(read: Callable[[], object]) -> str:
    """`refused`, `valid`, or what went wrong."""
    began_s = time.perf_counter()
    with effects() as seen:
        try:
            read()
            outcome = "valid"
        except (OffloadError, BadPlan):
            outcome = "refused"
        except Exception as error:
            outcome = f"{type(error).__name__}: {str(error)[:200]}"
    took_s = time.perf_counter() - began_s
    if seen:
        outcome = f"effects: {seen[:3]}"
    return outcome if took_s < MOST_S else f"took {took_s:.0f} s"


# --- command lines ---------------------------------------------------------------------------


def command(file: File, path: Path, rng: random.Random) -> list[str]:
    """A command line that a person would give with that file."""
    plan = ["plan", "--seconds", "0"]
    tiny = ["--problem", TINY, "--machine", MACHINE]
    return {
        "problem": [*plan, "--problem", str(path), "--machine", MACHINE],
        "trace": [*plan, "--trace", str(path), "--machine", MACHINE],
        "machine": [*plan, "--problem", TINY, "--machine", str(path)],
        "plan": ["check", *tiny, "--plan", str(path)],
        "profile": [*plan, "--problem", TINY, "--hardware", str(path), "--memory", "8MB"],
    }[file.kind] + ["--json"] * (rng.random() < 0.3)


def arguments(rng: random.Random) -> list[str]:
    """A command line with something in it that nobody should write."""
    odd = rng.choice((*NAMES, "9" * 5000, "1e999GiB", "-1", "nan", "0", "8GiB" * 2000, "hf:", "/"))
    odd = odd.encode("utf-8", "replace").decode()
    flag = rng.choice(("--memory", "--host-memory", "--policy", "--seconds", "--hardware", "--no"))
    tail = ["--problem", TINY] + ["--machine", MACHINE] * (flag != "--hardware")
    return rng.choice(
        (
            ["plan", *tail, flag, odd],
            ["plan", *tail, "--policy", f"joint:{odd}=1"],
            ["plan", "--problem", odd, "--machine", odd],
            ["check", *tail, "--plan", odd],
            ["record", "--output", odd, f"/nonexistent/{odd}"],
            ["doctor", "--spill", f"/nonexistent/{odd}"],
            ["doctor", "--output", f"/nonexistent/{odd}"],
            ["fit", odd, "--batch", "0"],
            ["run", f"nothing{odd}"],
            [odd],
        )
    )


def called(given: list[str]) -> str:
    """Runs one command line: its exit code in words, or what went wrong."""
    out, err = io.StringIO(), io.StringIO()

    def run() -> None:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(given)
        text = out.getvalue() + err.getvalue()
        if strange := sorted({c for c in text if not c.isprintable() and c != "\n"}):
            raise AssertionError(f"control characters reach the terminal: {strange}")
        if code not in (cli.DONE, cli.VIOLATIONS, cli.BAD_INPUT, cli.INFEASIBLE):
            raise AssertionError(f"exit code {code}")
        if code == cli.BAD_INPUT and not err.getvalue().startswith("offcompile: "):
            raise AssertionError(f"exit code 2 without a word: {err.getvalue()[:100]!r}")
        if code != cli.DONE:
            raise OffloadError("as it should be")

    return judged(run)


def call_hostile(cases: int, seed: int, folder: Path) -> Row:
    """Each spoilt file, or argument, once through a command."""
    files = [
        f for f in good_files() if f.kind in ("problem", "trace", "machine", "plan", "profile")
    ]
    for file in files:
        place(file, folder).write_bytes(file.content)
        assert called(command(file, place(file, folder), random.Random(0))) == "valid", file.kind
    for given in (["doctor", "--spill", "/nonexistent"], ["fit", "nothing"]):
        called(given)  # imports what they need, which may make folders of its own
    said: Counter[str] = Counter()
    wrong = []
    for case, file in zip(range(cases), itertools.cycle(files)):
        rng = random.Random(f"{seed}:{case}")
        path = place(file, folder)
        path.write_bytes(spoil(file, rng))
        given = arguments(rng) if rng.random() < 0.3 else command(file, path, rng)
        outcome = called(given)
        said[outcome] += 1
        if outcome not in ("refused", "valid"):
            wrong.append(f"case {case} of seed {seed}, {[a[:60] for a in given]}: {outcome}")
    _raise(wrong)
    figures = (("refused", f"{said['refused']:,}"), ("exit code 0", f"{said['valid']:,}"))
    return Row("hostile command lines answered", cases, cases, figures=figures)


def _raise(wrong: list[str]) -> None:
    if wrong:
        more = f"\n… and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise AssertionError("\n".join(wrong[:10]) + more)


# --- the table -------------------------------------------------------------------------------


def rows(scale: float, seed: int) -> list[Row]:
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.dict(os.environ, {"OFFCOMPILE_CACHE_DIR": name}),
    ):
        folder = Path(name)
        spoilt = read_hostile(max(1, int(READ_CASES * scale)), seed, folder)
        lines = call_hostile(max(1, int(COMMAND_CASES * scale)), seed, folder)
        wrong = defuse(folder)
    _raise(wrong)
    return [spoilt, lines, Row("files made to exhaust a reader", len(BOMBS), len(BOMBS))]
