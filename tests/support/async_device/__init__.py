"""A device in torch's dispatcher that runs behind the host, as a GPU does, on any machine.

Its streams are threads with queues and its kernels torch's own for the CPU. The host cannot read
its memory, freed memory is handed out again at once in stream order, and delays that a seed draws
let streams overtake each other: a wait or a reference that is missing shows as wrong bits.

`register()` adds it as torch's accelerator, for as long as the process lives: use processes of
their own (`async_child.py`).
"""

from .backend import NAME, Controls, register
from .build import NoCompiler, library, why_not

__all__ = ["NAME", "Controls", "NoCompiler", "library", "register", "why_not"]
