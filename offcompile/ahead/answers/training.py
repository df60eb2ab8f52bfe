"""How many parameters of a model train."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainedParameters:
    trained: int
    #: all of the model, with those of adapters
    total: int
    #: LoRA: the rank of adapters, and the layers that have one; 0: there are none
    rank: int = 0
    adapted_layers: int = 0

    def words(self) -> str:
        share = 100 * self.trained / max(self.total, 1)
        found = f"{self.trained:,} of {self.total:,} parameters ({share:.2f}%)"
        if not self.rank:
            return found
        return f"{found}: adapters of rank {self.rank} on {self.adapted_layers} layers"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
