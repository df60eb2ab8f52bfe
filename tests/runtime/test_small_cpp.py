"""Later processes load small C++ libraries without asking Inductor."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._inductor.codecache import CppCodeCache

from offcompile.runtime.base import small_cpp

SOURCE = 'extern "C" int offcompile_seven() { return 7; }'


@pytest.fixture(scope="module")
def compiled() -> Path:
    return Path(CppCodeCache.load(SOURCE)._name)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: Path) -> list[str]:
    """Sources that Inductor is asked for; its cache is empty, and holds the library once asked."""
    found: list[str] = []

    def load(source: str, extra_flags: tuple[str, ...]) -> ctypes.CDLL:
        found.append(source)
        made = tmp_path / "ab" / f"{len(found)}.so"
        made.parent.mkdir(exist_ok=True)
        shutil.copy(compiled, made)
        return ctypes.CDLL(str(made))

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CppCodeCache, "load", load)
    return found


def seven(*flags: str) -> int:
    return int(small_cpp.library(SOURCE, *flags).offcompile_seven())


def test_inductor_is_asked_once(asked: list[str]) -> None:
    assert [seven() for _ in range(3)] == [7] * 3
    assert len(asked) == 1 and asked[0].endswith(SOURCE)


def test_other_flags_another_compiler_and_another_processor_are_asked_for(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seven() == 7
    assert seven("-O1") == 7
    monkeypatch.setenv("CXX", "another")
    assert seven() == 7
    monkeypatch.setattr(small_cpp, "_processor", lambda: "another")
    assert seven() == 7
    monkeypatch.setattr(small_cpp.torch, "__version__", "another")
    assert seven() == 7
    assert len(asked) == 5


def rewrite(note: Path, change: Callable[[dict[str, str]], object]) -> None:
    note.write_text(json.dumps(change(json.loads(note.read_text()))))


@pytest.mark.parametrize(
    "harm",
    [
        lambda note, made: note.unlink(),
        lambda note, made: note.write_text("{"),
        lambda note, made: note.chmod(0o666),
        lambda note, made: rewrite(note, lambda said: {**said, "digest": "0"}),
        lambda note, made: rewrite(note, lambda said: {**said, "path": "nowhere.so"}),
        lambda note, made: rewrite(note, lambda said: [said]),
        lambda note, made: made.unlink(),
        lambda note, made: made.write_bytes(made.read_bytes()[:-1]),
    ],
    ids=["gone", "cut", "open", "other", "nowhere", "a list", "no library", "a cut library"],
)
def test_what_is_damaged_is_asked_for_again(
    asked: list[str], tmp_path: Path, harm: Callable[[Path, Path], object]
) -> None:
    assert seven() == 7
    (note,) = (tmp_path / small_cpp.NOTES).iterdir()
    made = tmp_path / "ab" / "1.so"
    copied = tmp_path / "kept.so"  # a library that is loaded must not be cut: it is mapped
    made.rename(copied)
    shutil.copy(copied, made)
    harm(note, made)
    assert [seven(), seven()] == [7, 7]
    assert len(asked) == 2


def test_a_cache_that_takes_no_notes_serves_all_the_same(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / small_cpp.NOTES).write_text("a file")
    assert [seven(), seven()] == [7, 7]
    assert len(asked) == 2


def test_a_full_disk_leaves_nothing_behind(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert [seven(), seven()] == [7, 7]
    assert len(asked) == 2 and not list((tmp_path / small_cpp.NOTES).iterdir())
