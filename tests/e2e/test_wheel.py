"""A stranger's path: what is built is installed, and does what the README says, away from here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT

import offcompile

README = (ROOT / "README.md").read_text()


def run(words: list[str], where: Path, **env: str) -> str:
    environment = os.environ | env
    done = subprocess.run(words, cwd=where, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel was installed into; what it depends on is here already."""
    built, target = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    alone = ["--no-deps", "--quiet"]
    run([*pip, "wheel", *alone, "--no-build-isolation", "-w", str(built), str(ROOT)], built)
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith(f"offcompile-{offcompile.__version__}-py3-none-any")
    run([*pip, "install", *alone, "--target", str(target), str(wheel)], built)
    return target


@pytest.mark.long
def test_the_readme_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "backend" in b)
    program = f"""
import torch
import offcompile
assert offcompile.__file__.startswith({str(installed)!r}), offcompile.__file__
torch.manual_seed(0)
layers = [m for _ in range(6) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
model = torch.nn.Sequential(*layers)
{block.replace('"8GiB"', '"minimum"')}
model(torch.randn(256, 64)).sum().backward()
report = offcompile.reports()[-1]
report.save_html("report.html")
print(report.fits, len(report.plan.moves))
"""
    quick = {"OFFCOMPILE_LOWERING": "aot_eager", "OFFCOMPILE_HARDWARE": "cpu"}
    told = run(
        [sys.executable, "-c", program], tmp_path, PYTHONPATH=str(installed), **quick
    ).split()
    assert told[-2] == "False"
    assert int(told[-1]) > 0
    assert "</html>" in (tmp_path / "report.html").read_text()


MINE = """
import torch

def build():
    layers = [m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    return torch.nn.Sequential(*layers), torch.empty(8, 64)
"""


@pytest.mark.long
def test_the_command_line_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    (script,) = (installed / "bin").glob("offcompile")
    (tmp_path / "mine.py").write_text(MINE)
    asked = ["fit", "mine.py:build", "--memory", "1MiB", "--hardware", "rtx4090", "--batch", "8"]
    told = run([sys.executable, str(script), *asked], tmp_path, PYTHONPATH=str(installed))
    assert "fits: a batch of 8 in 1.00 MiB of rtx4090" in told
