"""`offcompile.load_weights`: loads weights from files; shows progress if it takes long."""

from __future__ import annotations

import os

from torch import nn

from offcompile.runtime.base.progress import Progress
from offcompile.runtime.states import host_loading


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Copy weights into `model`, whose parameters and persistent buffers stay where they are.

    path: a `.safetensors` file, a `state_dict` written by `torch.save`, the `*.index.json` of
    several files, or a folder with one of these. Needs a few MiB of extra memory, whatever the
    sizes. Converts dtypes to the model's.

    Names and shapes are checked before anything is written; an OffloadError lists all mismatches.
    strict=False: ignores names that only one side has. If several names share a tensor, the file
    needs only one of them.
    """
    with Progress("load_weights") as progress:
        host_loading.load_weights(model, path, strict=strict, tell=progress.bytes_done)
