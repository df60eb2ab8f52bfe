"""A callback for Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from torch import nn

from .training import TrainingPlans, compile_in_place


class LightningOffcompileCallback(Callback):  # type: ignore[misc]
    """Compiles the module when fitting begins, logs planned and measured steps, keeps the report.

        Trainer(…, callbacks=[LightningOffcompileCallback(memory="8GiB")])

    Compiles in place the LightningModule and its direct children that have parameters, whichever
    its `training_step` calls; so checkpoints are the usual ones. modules: names of submodules to
    compile instead. The page of the plans is saved where the trainer writes its logs.
    """

    def __init__(self, modules: list[str] | None = None, **options: Any) -> None:
        self.modules, self.options = modules, options
        self.plans: TrainingPlans | None = None
        self._compiled: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.plans = TrainingPlans()
        if self._compiled is not pl_module:
            compile_in_place(self._chosen(pl_module), self.options)
            self._compiled = pl_module

    def _chosen(self, pl_module: nn.Module) -> list[nn.Module]:
        if self.modules is not None:
            return [pl_module.get_submodule(name) for name in self.modules]
        trained = (m for m in pl_module.children() if any(True for _ in m.parameters()))
        return [pl_module, *trained]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        if self.plans is not None:
            pl_module.log_dict(self.plans.figures())

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.plans is not None and trainer.is_global_zero:
            self.plans.save(trainer.log_dir or trainer.default_root_dir)
