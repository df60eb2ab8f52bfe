"""torch's optimizers with their states on the host or on disk, updated while backward runs."""

from .adam import Adam, AdamW
from .muon import Muon
from .offloaded import OptimizerFacts
from .others import offload
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Muon", "OptimizerFacts", "offload"]
