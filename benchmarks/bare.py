"""Run from a bare checkout: nothing installed, and `backend="offcompile"` found all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import offcompile

ROOT = Path(__file__).parent.parent
#: package → what cannot be done without it
NEEDED = {
    "torch": "anything",
    "numpy": "planning and the runtime",
    "sympy": "planning (sizes)",
    "highspy or scipy": "planning (offcompile/bounds/highs.py: linear programs)",
    "rich": "the backend (runtime/base/progress.py and offcompile/cli/tables.py)",
}
USEFUL = {
    "triton": "Inductor on a GPU, and kernels",
    "pytest": "the tests marked gpu; without it only tests/support/gpu_checks.py runs",
}


def missing(packages: dict[str, str]) -> list[str]:
    """One line for each package that is not there."""
    return [
        f"{name} is not installed; needed for {why}"
        for name, why in packages.items()
        if not any(find_spec(one) for one in name.split(" or "))
    ]


def driver() -> str | None:
    """The version of NVIDIA's driver; None: there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else None


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Variables under which child processes find offcompile and its entry point.

    Where it is not installed, the entry point is written as an installation would, into a folder
    that lives as long as the block.
    """
    with tempfile.TemporaryDirectory(prefix="offcompile-") as folder:
        path = [str(ROOT)]
        if not any(e.name == "offcompile" for e in entry_points(group="torch_dynamo_backends")):
            _write_entry_point(Path(folder))
            path.append(folder)
        path += [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        yield {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _write_entry_point(folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], offcompile.__version__
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
