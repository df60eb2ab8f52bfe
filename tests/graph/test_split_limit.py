"""Under a limit of the kernel in which the whole step dies, the one in pieces trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from split_child import TOKENS, WORDS, Model, step, tokens
from split_losses import furthest
from torch.nn import functional as F

HERE = Path(__file__).parents[1] / "support"
MIB = 1 << 20
#: the logits alone take 128 MiB, and a step three times that
LIMIT = 192 * MIB
BUDGET = 96 * MIB


def child(tmp_path: Path, **task: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    file = tmp_path / "found.pt"
    task = {"options": {}, "limit": LIMIT, "file": str(file)} | task
    command = [sys.executable, str(HERE / "split_child.py"), json.dumps(task)]
    done = warm.run(command, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    return said, torch.load(file) if file.exists() else {}


def exact() -> list[torch.Tensor]:
    """Loss and gradients in float64, some tokens at a time."""
    model, given = Model(WORDS).double(), tokens(WORDS, TOKENS)
    hidden = model.hidden(given)
    leaf = hidden.detach().requires_grad_()
    labels = F.pad(given, (0, 1), value=-100)[..., 1:].reshape(-1)
    count = (labels != -100).sum()
    total = torch.zeros((), dtype=torch.float64)
    for rows, wanted in zip(leaf.view(TOKENS, -1).split(256), labels.split(256), strict=True):
        loss = F.cross_entropy(model.head(rows), wanted, reduction="sum") / count
        loss.backward(retain_graph=True)
        total += loss.detach()
    hidden.backward(leaf.grad)
    return [total, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.soak  # `test_budget_real` and `test_weights_budget` die and live alike
def test_a_split_step_trains_where_the_whole_one_dies(tmp_path: Path) -> None:
    options = {"memory": BUDGET, "lowering": "aot_eager", "split": True}
    options |= {"hardware": "cpu", "seconds": 0.5}
    said, found = child(tmp_path, backend="offcompile", options=options)
    assert said["error"] is None, said
    assert "pieces" in said["split"]

    (tmp_path / "found.pt").unlink()
    died, nothing = child(tmp_path, backend="aot_eager")
    assert "allocate" in died["error"]
    assert not nothing

    model = Model(WORDS)
    plain = step(model, model, tokens(WORDS, TOKENS))
    assert list(found) == list(plain)
    wanted = exact()
    assert furthest(list(found.values()), list(plain.values())) < 1e-5
    off, plains = furthest(list(found.values()), wanted), furthest(list(plain.values()), wanted)
    assert off <= 1.1 * plains  # pieces add in another order, so single errors differ
