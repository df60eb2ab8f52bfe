"""The common part of all trainers: compiles modules in place, and sums up their plans."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offcompile.ir import OffloadError
from offcompile.machine.options import Options
from offcompile.report.report import PlanReport, reports, save_html

REPORT_NAME = "offcompile.html"
GIB, KIB, US_PER_MS = 1 << 30, 1 << 10, 1e3


def compile_in_place(modules: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    """Make calls of the modules run compiled. Names in their `state_dict()` stay as they are."""
    Options.read(options)  # a bad value is an error now, not at the first step
    for module in modules:
        if module._compiled_call_impl is not None:
            raise OffloadError(
                f"{type(module).__name__} is compiled already: leave out one of the two, its"
                " torch.compile (torch_compile=True of a Trainer) or offcompile's callback"
            )
        module._compiled_call_impl = _compiled(module, options)


def _compiled(module: nn.Module, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Does what `module.compile()` does, which compiles nothing of a container of `torch.nn`."""

    def call(*args: Any, **named: Any) -> Any:
        return module._call_impl(*args, **named)  # type: ignore[no-untyped-call]

    compiled: Callable[..., Any] = torch.compile(call, backend="offcompile", options=dict(options))
    return compiled


class TrainingPlans:
    """The plans made since this object was, for graphs that train."""

    def __init__(self) -> None:
        self._before = {id(report) for report in reports()}

    @property
    def made(self) -> list[PlanReport]:
        return [report for report in reports() if id(report) not in self._before]

    def figures(self) -> dict[str, float]:
        """Planned and measured times and peaks, as trainers log them; empty before any plan."""
        training = [r for r in self.made if any(op.phase == "backward" for op in r.problem.ops)]
        if not training:
            return {}
        found = {
            "planned_step_ms": sum(r.predicted_us for r in training) / US_PER_MS,
            "planned_peak_gib": max(r.planned_peak_bytes for r in training) / GIB,
        }
        measured = [r.measured_us for r in training]
        if all(us is not None for us in measured):
            found["measured_step_ms"] = sum(us or 0.0 for us in measured) / US_PER_MS
        if torch.cuda.is_available():
            found["measured_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        else:
            most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found["process_peak_gib"] = most_kib * KIB / GIB
        return {f"offcompile/{name}": round(value, 3) for name, value in found.items()}

    def save(self, folder: str | Path) -> None:
        """Write the page of the plans into the folder; nothing if there are none."""
        if self.made:
            save_html(Path(folder) / REPORT_NAME, self.made)
