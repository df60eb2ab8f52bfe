"""`offcompile.load_weights`: weights from files, and a line on the terminal if it takes long."""

from __future__ import annotations

import os

from torch import nn

from offcompile.runtime.base.progress import Progress
from offcompile.runtime.states import host_loading


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Copy weights into `model`: parameters and persistent buffers stay where they lie.

    path: a `.safetensors` file, one that `torch.save` wrote of a `state_dict`, the `*.index.json`
    of several, or a folder with one of these. Holds a few MiB besides, whatever the sizes. Types
    are converted to the model's.

    Names and shapes are checked before anything is written; an OffloadError tells all that is
    wrong. strict=False: names that only one side has are passed over. Of names that share a tensor
    the file needs to have one.
    """
    with Progress("load_weights") as progress:
        host_loading.load_weights(model, path, strict=strict, tell=progress.bytes_done)
