"""`torch.compile(model, backend="offcompile", options={…})`: the entry point for Dynamo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from offcompile.ir import InvalidInput, OffloadError, Violation
from offcompile.machine.options import Options
from offcompile.machine.target import target_for
from offcompile.report.dump import check_dump_directory
from offcompile.runtime.base.progress import Progress
from offcompile.runtime.device.vector_math import settle_vector_math

from .accounts.process import process
from .captured_graph import CapturedGraph
from .ranks.agreement import Agreement
from .ranks.reduction import reduce_in_backward

SYSTEMS = {"darwin": "macOS", "win32": "Windows"}


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph. `options` are those of `torch.compile`; see `Options`."""
    agreement = Agreement.on(gm)
    try:
        return _compile(gm, example_inputs, options, mode, agreement)
    except OffloadError as error:
        return refusal(error, agreement)


def _refuse_other_systems() -> None:
    if sys.platform != "linux":
        raise OffloadError(
            f"offcompile trains on Linux, and this is {SYSTEMS.get(sys.platform, sys.platform)}."
            " Compile the model with backend='inductor' here. `offcompile fit`, offcompile.plan and"
            " offcompile.fit work on any system, for hardware that you name."
        )


def refusal(error: OffloadError, agreement: Agreement) -> Callable[..., Any]:
    """Return a call that raises `error`: raised while compiling, Dynamo would wrap it."""
    kept = process.raised(error)  # without the traceback, which holds the model

    def refuse(*args: Any) -> Any:
        agreement.refused(kept)
        raise process.raised(kept)

    return refuse


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, object] | None,
    mode: str | None,
    agreement: Agreement,
) -> Callable[..., Any]:
    _refuse_other_systems()
    settle_vector_math()
    reduce_in_backward()
    if mode not in (None, "default"):
        raise InvalidInput(
            [
                Violation(
                    "bad-value",
                    "mode",
                    f"mode={mode!r} is not for this backend; leave it out, and say what you want"
                    " with options={'memory': …}",
                )
            ]
        )
    settings = Options.read(options)
    if settings.dump is not None:
        check_dump_directory(settings.dump)
    with Progress("this machine") as progress:
        target = target_for(settings, _device_of(gm), progress)
    name, usage = process.next_name(), process.usage_of(target.device)
    compiled = CapturedGraph(name, gm, example_inputs, settings, target, usage, agreement)
    compiled.first(example_inputs)
    return compiled


def _device_of(gm: fx.GraphModule) -> torch.device | None:
    """The accelerator that a graph computes on; None if it uses none."""
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.device
    return None
