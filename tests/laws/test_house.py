"""The rooms keep their doors: who may import whom, what gets packaged, what stays unimported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).parents[2]


FILES = house.modules()
SELECT = "offcompile.passes.select.gap_set"


def test_every_file_is_in_a_room_or_is_a_documented_path() -> None:
    outside = {module for module in FILES if house.room_of(module) is None}
    assert outside == {
        "offcompile",
        "offcompile.__main__",
        "offcompile.runtime",
        "offcompile.backend",
        "offcompile.hardware",
        "offcompile.planner",
    }


def test_the_version_is_written_in_one_place() -> None:
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert read["project"]["dynamic"] == ["version"]
    assert read["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "offcompile.__version__"}
    # tests/e2e/test_wheel.py builds with it


@pytest.mark.parametrize("room", house.ROOMS, ids=lambda room: room.package)
def test_a_room_imports_only_what_it_may(room: house.Room) -> None:
    inside = {m: f for m, f in FILES.items() if house.room_of(m) is room}
    assert inside, f"{room.package} has no files"
    wrong = []
    for module, file in inside.items():
        wrong += house.trespasses(file.read_text(), module, file.name == "__init__.py", FILES)
    assert not wrong


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("import torch", "torch"),
        ("import numpy as np", "numpy"),
        ("def f():\n    import torch.cuda", "torch.cuda"),
        ("from offcompile.simulate import Simulator", "offcompile.simulate.Simulator"),
        ("from offcompile import planner", "offcompile.planner"),
        ("from offcompile.passes import joint", "offcompile.passes.joint"),
        ("from ..search import program_variant", "offcompile.passes.search.program_variant"),
        ("if True:\n    from offcompile.irrelevant import x", "offcompile.irrelevant.x"),
    ],
)
def test_the_guard_catches(source: str, caught: str) -> None:
    (found,) = house.trespasses(source, SELECT, False, FILES)
    assert found.endswith(f"imports {caught}")


def test_the_guard_lets_lower_rooms_the_room_and_the_standard_library_in() -> None:
    source = (
        "import math\nfrom offcompile.ir import Op\nfrom .covering import cover\n"
        "from offcompile.passes.build.decisions import Away\n"
    )
    assert house.trespasses(source, SELECT, False, FILES) == []


def test_the_runtime_makes_no_plans() -> None:
    source = "from offcompile.passes.build.schedule import build"
    assert house.trespasses(source, "offcompile.runtime.moves.mover", False, FILES)
    source = "from offcompile.passes.correlation.predictor import Predictor"
    assert not house.trespasses(source, "offcompile.runtime.moves.mover", False, FILES)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert house.circles(house.graph(FILES)) == []


def test_the_guard_finds_circles() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str]()}
    assert house.circles(edges) == [["a", "b", "c"]]


def test_a_folder_has_no_more_files_than_one_can_see() -> None:
    reasons = {room.package: room.many for room in house.ROOMS if room.many}
    folders = house.files_by_folder(FILES)
    assert {f for f, n in folders.items() if n > house.MOST_FILES} == set(reasons)


def test_a_file_can_be_read_in_one_sitting() -> None:
    assert {module for _, module in house.long_files(FILES)} == set(house.LONG)


def test_the_guard_finds_long_files(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("\n" * (house.MOST_LINES + 1))
    (tmp_path / "n.py").write_text("\n" * house.MOST_LINES)
    found = house.long_files({"m": tmp_path / "m.py", "n": tmp_path / "n.py"})
    assert found == [(house.MOST_LINES + 1, "m")]


def test_a_class_name_means_one_thing() -> None:
    assert len(house.class_names_twice(FILES)) <= 8


def test_state_of_modules_is_rare_and_says_why_it_is_there() -> None:
    found = house.mutable_state(FILES)
    assert len(found) <= 20
    assert [state.name for state in found if not state.says_why] == []


def test_the_guard_finds_state_of_modules(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "class Books: ...\n# why\n_books = Books()\n_seen: set[int] = set()\nNAMES = {}\n"
        "_now = 0\ndef step():\n    global _now\n"
    )
    found = house.mutable_state({"m": tmp_path / "m.py"})
    assert [(state.name, state.says_why) for state in found] == [
        ("m._books", True),
        ("m._seen", False),
        ("m._now", False),
    ]


def test_a_class_can_be_taken_in() -> None:
    wide = house.wide_classes(FILES)
    assert [found.name for found in wide if not found.says_why] == []
    assert [found.name for found in wide] == ["offcompile.machine.hardware.HardwareProfile"]


def test_the_guard_finds_wide_classes(tmp_path: Path) -> None:
    declared = "".join(f"    a{n}: int = 0\n" for n in range(house.MOST_ATTRIBUTES))
    (tmp_path / "m.py").write_text(
        f"# why\n@dataclass\nclass Table:\n{declared}    b: int = 0\n\n"
        f"class Engine:\n{declared}    def go(self): self.b = 1\n"
        f"class Small:\n{declared}"
    )
    assert house.wide_classes({"m": tmp_path / "m.py"}) == [
        house.WideClass("m.Table", 16, True),
        house.WideClass("m.Engine", 16, False),
    ]


def test_a_signature_can_be_taken_in() -> None:
    assert [name for count, name in house.widest(FILES) if count > 8] == []


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    assert house.PICTURE.read_text() == house.draw(), "draw it again with `make house`"


@pytest.mark.parametrize(
    ("modules", "unimported"),
    [
        (
            "offcompile.ir, offcompile.passes, offcompile.passes.registry",
            "torch numpy highspy rich",
        ),
        ("offcompile.simulate, offcompile.bounds, offcompile.planning.planner", "torch rich"),
        ("offcompile.machine.hardware, offcompile.cli", "torch numpy highspy sympy rich"),
        ("offcompile.cli.tables, offcompile.cli.files", "torch"),
    ],
)
def test_importing_leaves_heavy_modules_unimported(modules: str, unimported: str) -> None:
    script = (
        f"import sys, {modules}\nprint([m for m in {unimported.split()} if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("room", ["passes", "runtime"])
def test_the_links_are_relative_and_lead_home(room: str) -> None:
    link = ROOT / "offcompile" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"
    assert link.resolve() == ROOT / room
    assert (ROOT / room / "__init__.py").is_file()


def test_every_folder_of_code_is_a_package() -> None:
    folders = {f.parent for top in ("offcompile", "passes", "runtime") for f in _python(top)}
    assert len(folders) >= 3
    assert not [f for f in folders if not (f / "__init__.py").is_file()]


def _python(top: str) -> Iterator[Path]:
    return (ROOT / top).rglob("*.py")


def test_the_project_promises_what_it_should() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "offcompile"
    assert project["requires-python"] == ">=3.11"
    assert "torch>=2.11,<2.14" in project["dependencies"]
    assert project["scripts"] == {"offcompile": "offcompile.cli:main"}
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_make_alone_explains_every_target() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    explained = {line.split()[1] for line in done.stdout.splitlines() if line.strip()}
    phony = next(
        line.split()[1:]
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith(".PHONY:")
    )
    assert {"demo", "test", "lint", "bench", "gpu", "house"} <= explained
    assert explained == set(phony)


@pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < 77,
    reason="building needs setuptools 77 or later (the `test` extra brings it)",
)
def test_wheel_and_sdist_hold_the_linked_rooms_and_the_profiles(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("offcompile", "passes", "runtime", "pyproject.toml", "README.md", "LICENSE"):
        _copy(ROOT / name, tree / name)
    script = (
        "from setuptools import build_meta as b\n"
        f"print(b.build_wheel({str(tmp_path)!r}), b.build_sdist({str(tmp_path)!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tree, capture_output=True, text=True, check=True
    )
    wheel, sdist = done.stdout.split()[-2:]
    packed = set(zipfile.ZipFile(tmp_path / wheel).namelist())
    with tarfile.open(tmp_path / sdist) as archive:
        shipped = {name.split("/", 1)[-1] for name in archive.getnames()}
    code = {
        f"offcompile/{f.relative_to(ROOT)}" if top != "offcompile" else str(f.relative_to(ROOT))
        for top in ("offcompile", "passes", "runtime")
        for f in _python(top)
    }
    profiles = {
        str(f.relative_to(ROOT)) for f in (ROOT / "offcompile/machine/profiles").glob("*.toml")
    }
    assert len(profiles) > 5
    codecs = {
        f"offcompile/{f.relative_to(ROOT)}"
        for f in (ROOT / "runtime/codecs").iterdir()
        if f.suffix in (".cpp", ".h")
    }
    assert len(codecs) > 1
    pages = {
        str(f.relative_to(ROOT))
        for f in (ROOT / "offcompile/report/page").iterdir()
        if f.suffix in (".html", ".css", ".js")
    }
    assert len(pages) > 2
    wanted = code | profiles | codecs | pages | {"offcompile/py.typed"}
    assert wanted <= packed
    assert wanted <= shipped
    assert not [name for name in packed if name.startswith(("passes/", "runtime/", "tests/"))]


def _copy(source: Path, target: Path) -> None:
    """A copy that keeps links, without what Python left behind."""
    if source.is_dir():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, symlinks=True, ignore=ignore)
    else:
        shutil.copy(source, target)
