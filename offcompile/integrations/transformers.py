"""A callback for the Trainer of Hugging Face transformers, and for trainers built on it (TRL)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from offcompile.ir import OffloadError

from .training import TrainingPlans, compile_in_place


class OffcompileCallback(TrainerCallback):
    """Compiles the model when training begins, logs planned and measured steps, keeps reports.

        Trainer(…, callbacks=[OffcompileCallback(memory="8GiB")])

    `options`: those of `torch.compile(backend="offcompile", options=…)`. The model is compiled in
    place, so checkpoints are the usual ones. The page of its plans is saved into each checkpoint.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.plans: TrainingPlans | None = None
        self._compiled: nn.Module | None = None
        self._use_cache: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = given["model"]
        if args.torch_compile:
            raise OffloadError(
                "torch_compile=True and OffcompileCallback both compile the model: leave out"
                " torch_compile"
            )
        self.plans = TrainingPlans()
        if self._compiled is not model:
            compile_in_place([model], self.options)
            self._compiled = model
        config: Any = getattr(model, "config", None)
        self._use_cache = getattr(config, "use_cache", None)
        if self._use_cache:  # keys and values of a cache would be results of each step
            config.use_cache = False

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._use_cache:
            given["model"].config.use_cache = self._use_cache

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        logs = given.get("logs")
        if self.plans is None or logs is None or "loss" not in logs:
            return
        figures = self.plans.figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.plans is not None and state.is_world_process_zero and folder.is_dir():
            self.plans.save(folder)
