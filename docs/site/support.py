"""Tries this version with several Pythons and torches, and writes the table of docs/support.md.

    make support ARGS='/path/to/venv/bin/python …'

Each interpreter needs torch and the other dependencies, and gets nothing installed: the wheel that
is built here goes into a folder of its own. Without arguments, the interpreter that runs this.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "support.md"
BEGINS, ENDS = "<!-- runs -->", "<!-- /runs -->"
HEAD = "| torch | Python | system | wheel, import | step bit for bit | `fit` | `plan` | when |"
FACTS = """
import json, platform, torch
linux = platform.system() == "Linux"
system = platform.freedesktop_os_release().get("PRETTY_NAME") if linux else ""
print(json.dumps([torch.__version__, platform.python_version(),
                  f"{system or platform.system()}, {platform.machine()}"]))
"""
IMPORT = """
import offcompile, os
assert offcompile.__file__.startswith(os.environ["PYTHONPATH"]), offcompile.__file__
"""
STEP = """
import torch, offcompile

def trained(**how):
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    run, x = torch.compile(model, **how), torch.randn(256, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]

options = {"memory": "minimum", "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.1}
ours = trained(backend="offcompile", options=options)
assert not offcompile.reports()[-1].fits and offcompile.counters()["moves"]
assert all(map(torch.equal, ours, trained(backend="aot_eager")))
"""
PLAN = """
import torch, offcompile
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
report = offcompile.plan(model, torch.empty(64, 512, device="meta"), memory="6MiB",
                         hardware="rtx4090", loss=torch.sum, optimizer="adamw")
assert report.plan.moves and report.planned_peak_bytes <= 6 << 20
"""
MODEL = """
import torch

def build():
    layers = [m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    return torch.nn.Sequential(*layers), torch.empty(8, 64)
"""


def main(interpreters: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        (where / "mine.py").write_text(MODEL)
        wheel = built(where)
        found = [row(python, wheel, where / str(n)) for n, python in enumerate(interpreters)]
    write(found)
    print("\n".join([HEAD, *found]))
    return int(any("no:" in one for one in found))


def built(where: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    alone = ["--no-deps", "--no-build-isolation", "-w", str(where), str(ROOT)]
    subprocess.run([*pip, *alone], check=True)
    (wheel,) = where.glob("*.whl")
    return wheel


def row(python: str, wheel: Path, target: Path) -> str:
    """The result of the checks under one interpreter, as a line of the table."""
    told = subprocess.run([python, "-c", FACTS], check=True, capture_output=True, text=True)
    torch, version, system = json.loads(told.stdout)
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "-q"]
    fit = ["fit", "mine.py:build", "--memory", "1MiB", "--hardware", "rtx4090", "--quick"]
    run = "import sys; from offcompile.cli import main; sys.exit(main(sys.argv[1:]))"
    checks = [
        [[*install, "--target", str(target), str(wheel)], [python, "-c", IMPORT]],
        [[python, "-c", STEP]],
        [[python, "-c", run, *fit]],
        [[python, "-c", PLAN]],
    ]
    said = [outcome(commands, target) for commands in checks]
    today = datetime.date.today().isoformat()
    return "| " + " | ".join([torch, version, system, *said, today]) + " |"


def outcome(commands: list[list[str]], target: Path) -> str:
    quiet = {"PYTHONPATH": str(target), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    for command in commands:
        done = subprocess.run(
            command,
            cwd=target.parent,
            env=os.environ | quiet,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            return f"no: {last[:80]}".replace("|", "/")
    return "yes"


def write(found: list[str]) -> None:
    """Put the rows into the page, in place of those of the same torch, Python and system."""
    before, _, rest = PAGE.read_text().partition(BEGINS)
    old, _, after = rest.partition(ENDS)
    known = {key(line): line for line in old.splitlines() if re.match(r"\| \d", line)}
    known |= {key(line): line for line in found}
    rule = re.sub(r"[^|]+", "---", HEAD)
    rows = "\n".join([HEAD, rule, *(known[name] for name in sorted(known))])
    PAGE.write_text(f"{before}{BEGINS}\n\n{rows}\n\n{ENDS}{after}")


def key(line: str) -> tuple[str, ...]:
    return tuple(line.split(" | ")[:3])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [sys.executable]))
