"""Finds parameters whose gradients DistributedDataParallel reduces, so that updates wait for that.

DDP puts gradients into buckets and reduces these when autograd has already called the hooks of the
parameters: in a hook, a gradient is still that of one rank alone. It is final when backward is
over. Where gradients are reduced in backward in DDP's place (`runtime/ranks/gradient_reducer.py`),
they come to the optimizer when that is done, and FSDP2 calls hooks after its reduce-scatter.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch

from offcompile.runtime.ranks.gradient_reducer import reducer_in_place_of
from offcompile.runtime.states import updates


def reduced_after_backward(parameters: Iterable[torch.Tensor]) -> bool:
    """True if a DDP module of this process reduces the gradient of any of these parameters.

    Looks at every object of the process, because torch has no list of its DDP modules. It is quick
    to say no where torch.distributed is not in use.
    """
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    if module is None or not torch.distributed.is_available():
        return False
    if not torch.distributed.is_initialized():
        return False
    mine = {id(p) for p in parameters if updates.reducer_of(p) is None}
    kind = module.DistributedDataParallel
    # a proxy's `__class__` may lie, and reading it may run its code
    wrapped = (found for found in gc.get_objects() if issubclass(type(found), kind))
    reducing = (ddp for ddp in wrapped if reducer_in_place_of(ddp) is None)
    return any(id(p) in mine for ddp in reducing for p in ddp.module.parameters())
