"""Plans are made on any system; training elsewhere than on Linux is refused in words.

A process that lacks what Windows lacks stands in for it: modules, calls and /proc.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import builtins, io, os, sys
import torch, torch._dynamo, torch._functorch.aot_autograd, torch._inductor.compile_fx

sys.platform = "win32"
del os.sched_getaffinity, os.register_at_fork, os.fork
sys.modules |= {"resource": None, "fcntl": None}
real = builtins.open

def opened(file, *more, **how):
    if str(file).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "no such file", str(file))
    return real(file, *more, **how)

builtins.open = io.open = opened
import offcompile

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
asked = dict(memory="3MiB", hardware="rtx4090", loss=torch.sum, optimizer="adamw")
asked["options"] = {"lowering": "aot_eager", "seconds": 0.1}
print(offcompile.plan(model, torch.zeros(64, 256), **asked).planned_peak_bytes)
answer = offcompile.fit(model, lambda n: torch.zeros(n, 256), 64, table=False, **asked)
print(answer.fits, answer.largest_batch > 64)
try:
    torch.compile(model, backend="offcompile", options={"memory": "3MiB"})(torch.zeros(64, 256))
except offcompile.OffloadError as error:
    print(error)
"""


@pytest.mark.long
def test_windows_plans_and_says_that_training_needs_linux() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    peak, fits, refused = done.stdout.splitlines()
    assert 0 < int(peak) <= 3 << 20
    assert fits == "True True"
    assert refused.startswith("offcompile trains on Linux, and this is Windows.")
    assert "work on any system" in refused
