"""The cache of measured costs: shared by processes, apart for machines, replaced if broken."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from offcompile.machine.cost_cache import CostCache, cache_folder, document_path, write_document


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


HERE = {"cpu": "x", "cores": 2}


def test_the_cache_survives_processes_and_tells_machines_apart() -> None:
    cache = CostCache(HERE)
    cache.put("a", 1.25, 8)
    cache.save()
    other = CostCache(HERE)
    other.put("b", 2.5)
    cache.put("c", 3.5)
    cache.save()
    other.save()
    again = CostCache(HERE)
    assert [again.get(k) for k in "abc"] == [(1.25, 8), (2.5, 0), (3.5, 0)]
    assert CostCache({**HERE, "cores": 4}).get("a") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 99}', "\udcff", "[" * 100_000],
)
def test_a_broken_cache_file_counts_as_absent_and_is_replaced(text: str) -> None:
    path = document_path("costs", HERE)
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    cache = CostCache(HERE)
    assert len(cache) == 0
    cache.put("a", 1.0)
    cache.save()
    assert CostCache(HERE).get("a") == (1.0, 0)


def test_a_foreign_document_and_senseless_rows_are_left_out() -> None:
    rows = [["a", 1.0, 0, 0], ["b", -1, 0, 0], ["c", 1.0, -5, 0], ["d", 1.0], 7, ["e", "1", 0, 0]]
    write_document("costs", HERE, {"ops": rows})
    assert len(CostCache(HERE)) == 1
    path = document_path("costs", HERE)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"identity": {"cpu": "y"}}))
    assert len(CostCache(HERE)) == 0


def test_a_folder_that_refuses_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    cache = CostCache(HERE)
    cache.put("a", 1.0)
    with pytest.warns(UserWarning, match="OFFCOMPILE_CACHE_DIR"):
        cache.save()
    cache.put("b", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        cache.save()
    assert cache.get("b") == (1.0, 0)


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    assert cache_folder() == own_cache
    monkeypatch.delenv("OFFCOMPILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/offcompile")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_folder() == Path("/h/.cache/offcompile")
