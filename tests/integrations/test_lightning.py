"""The callback in Lightning's Trainer: the plain Trainer's weights, and ordinary checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offcompile

pytest.importorskip("lightning")

import lightning

from offcompile.integrations.lightning import LightningOffcompileCallback


class Classifier(lightning.LightningModule):
    def __init__(self, calls_itself: bool) -> None:
        super().__init__()
        layers = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU())]
        self.model = nn.Sequential(*layers)
        self.calls_itself = calls_itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(x)
        return found

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy((self if self.calls_itself else self.model)(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(folder: Path, calls_itself: bool, *callbacks: Any) -> Any:
    torch.manual_seed(0)
    module = Classifier(calls_itself)
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 32, generator=drawn), torch.randint(32, (24,), generator=drawn)
    data = torch.utils.data.TensorDataset(x, y)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    return trainer


@pytest.mark.parametrize("calls_itself", [True, False])
def test_it_trains_as_the_plain_trainer_does(tmp_path: Path, calls_itself: bool) -> None:
    plain = trained(tmp_path / "plain", calls_itself)
    before = len(offcompile.reports())
    callback = LightningOffcompileCallback(memory="minimum", lowering="aot_eager")
    ours = trained(tmp_path / "ours", calls_itself, callback)
    assert any(not report.fits for report in offcompile.reports()[before:])
    (saved,) = (tmp_path / "ours").rglob("*.ckpt")
    found = torch.load(saved, weights_only=False)["state_dict"]
    wanted = plain.lightning_module.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(wanted[name], t) for name, t in found.items())
    assert "offcompile/planned_step_ms" in ours.callback_metrics
    assert (tmp_path / "ours" / "offcompile.html").exists()


def test_named_modules_alone_are_compiled(tmp_path: Path) -> None:
    before = len(offcompile.reports())
    trained(
        tmp_path,
        False,
        LightningOffcompileCallback(["model.0"], memory="1GiB", lowering="aot_eager"),
    )
    (report,) = offcompile.reports()[before:]
    assert sum(t.kind == "weight" for t in report.problem.tensors) == 2
