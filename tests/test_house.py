"""The rooms keep their doors: who may import whom, what gets packaged, what stays unimported."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STANDARD = frozenset(sys.stdlib_module_names)


@dataclass(frozen=True)
class Room:
    """The files of a room, what it may import beside the standard library, and its own name."""

    files: str
    package: str
    may: tuple[str, ...] = ()


NUMBERS = ("numpy", "scipy", "sympy")
JUDGES = ("offcompile.ir", "offcompile.passes", *NUMBERS)
ROOMS = (
    Room("offcompile/ir", "offcompile.ir"),
    Room("passes", "offcompile.passes", ("offcompile.ir",)),
    Room("offcompile/simulate", "offcompile.simulate", JUDGES),
    Room("offcompile/bounds", "offcompile.bounds", JUDGES),
    Room("offcompile/planning/coarsen.py", "offcompile.planning.coarsen", JUDGES),
    Room("offcompile/planning/order.py", "offcompile.planning.order", ("offcompile.ir",)),
    Room(
        "offcompile/planning/order_ledger.py",
        "offcompile.planning.order_ledger",
        ("offcompile.ir",),
    ),
    Room("offcompile/planning/presence.py", "offcompile.planning.presence", ("offcompile.ir",)),
    Room("offcompile/machine/hardware.py", "offcompile.machine.hardware", JUDGES),
    Room(
        "offcompile/planning/planner.py",
        "offcompile.planning.planner",
        (*JUDGES, "offcompile.simulate", "offcompile.bounds", "offcompile.planning.coarsen"),
    ),
    Room(
        "runtime",
        "offcompile.runtime",
        # the predictor is a decision, and the runtime drives it
        ("offcompile.ir", "offcompile.passes.correlation", "torch", "triton", "numpy"),
    ),
)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(f"{p}.") for p in packages)


def imports(source: str, where: str) -> Iterator[tuple[str, str]]:
    """(place, module) of every import by absolute name, wherever in the file it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield f"{where}:{node.lineno}", alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                # `from offcompile import planner` imports offcompile.planning.planner
                whole = f"{node.module}.{alias.name}" if node.module == "offcompile" else ""
                yield f"{where}:{node.lineno}", whole or node.module
        elif isinstance(node, ast.ImportFrom) and node.level > 1:
            yield f"{where}:{node.lineno}", f"{'.' * node.level}{node.module or ''}"


def trespasses(source: str, may: tuple[str, ...], where: str) -> list[str]:
    return [
        f"{place} imports {module}"
        for place, module in imports(source, where)
        if module.split(".")[0] not in STANDARD and not within(module, may)
    ]


def sources(room: Room) -> list[Path]:
    path = ROOT / room.files
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.package)
def test_a_room_imports_only_what_it_may(room: Room) -> None:
    found = sources(room)
    assert found, f"{room.files} has no files"
    wrong = []
    for file in found:
        # a folder inside the room reaches the room by its whole name
        nested = file.parent not in (ROOT / room.files, (ROOT / room.files).parent)
        may = (*room.may, room.package) if nested else room.may
        wrong += trespasses(file.read_text(), may, str(file.relative_to(ROOT)))
    assert not wrong


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("import torch", "torch"),
        ("import numpy as np", "numpy"),
        ("def f():\n    import torch.cuda", "torch.cuda"),
        ("from offcompile.simulate import simulate", "offcompile.simulate"),
        ("from offcompile.planning import planner", "offcompile.planning.planner"),
        ("from offcompile.passes.build.contract import Pass", "offcompile.passes.build.contract"),
        ("from ..planner import plan_problem", "..planner"),
        ("if True:\n    from offcompile.irrelevant import x", "offcompile.irrelevant"),
    ],
)
def test_the_guard_of_passes_catches(source: str, caught: str) -> None:
    (passes,) = [room for room in ROOMS if room.files == "passes"]
    (found,) = trespasses(source, passes.may, "x.py")
    assert found.endswith(f"imports {caught}")


def test_the_guard_of_passes_lets_the_ir_the_room_and_the_standard_library_in() -> None:
    (passes,) = [room for room in ROOMS if room.files == "passes"]
    source = "import math\nfrom offcompile.ir import Op\nfrom .contract import Pass\n"
    assert trespasses(source, passes.may, "x.py") == []


@pytest.mark.parametrize(
    ("modules", "unimported"),
    [
        ("offcompile.ir, offcompile.passes, offcompile.passes.registry", "torch numpy scipy rich"),
        ("offcompile.simulate, offcompile.bounds, offcompile.planning.planner", "torch rich"),
        ("offcompile.machine.hardware, offcompile.cli", "torch numpy scipy sympy rich"),
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
    assert {"demo", "test", "lint", "bench", "gpu"} <= explained
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
        for f in (ROOT / "offcompile/page").iterdir()
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
