"""The rows of `benchmarks.real`: models, hardware, and how much of the memory they may have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OWN = "benchmarks.real_models:"
LAPTOP = "benchmarks/profiles/laptop.toml"
#: a small share of the way from the floor to the plain peak
NEAR_FLOOR = "near the floor"


@dataclass(frozen=True)
class Case:
    """One row. `budget`: a size, a share of the peak when nothing moves, or `NEAR_FLOOR`."""

    model: str
    hardware: str
    batch: int
    #: number of words, or of pixels
    length: int
    budget: str
    optimizer: str | None = None

    @property
    def name(self) -> str:
        optimizer = f" + {self.optimizer}" if self.optimizer else ""
        model = self.model.removeprefix(OWN).removeprefix("hf:")
        return f"{model}{optimizer}, {self.batch} × {self.length}"

    @property
    def place(self) -> str:
        return self.hardware.rpartition("/")[2].removesuffix(".toml")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _hf(
    model: str, hardware: str, batch: int, length: int, budget: str, optimizer: str | None = None
) -> Case:
    return Case(f"hf:{model}", hardware, batch, length, budget, optimizer)


def _own(
    model: str, hardware: str, batch: int, length: int, budget: str, optimizer: str | None = None
) -> Case:
    return Case(OWN + model, hardware, batch, length, budget, optimizer)


CASES = (
    _hf("gpt-1.3b", "rtx4090", 8, 1024, "8GiB"),
    _hf("bert-large", "rtx4090", 32, 512, "8GiB"),
    _hf("tinyllama-1.1b", "rtx4090", 8, 2048, "10GiB"),
    _hf("gpt-1.3b", "rtx4090", 8, 1024, "12GiB", "adamw"),
    _hf("gpt2-xl", "rtx4090", 4, 1024, "10GiB", "adamw"),
    _hf("llama-3.1-8b", "rtx4090", 1, 2048, "23GiB", "adamw"),
    _hf("llama-3.1-70b", "h100", 1, 4096, "79GiB"),
    # encoder and decoder
    _own("t5_large", "rtx4090", 16, 512, "75%"),
    _own("t5_large", "rtx4090", 16, 512, "50%"),
    _own("t5_large", "a100-80g", 64, 512, "33%", "adamw"),
    _own("bart_large", "rtx5090", 16, 1024, "50%"),
    _own("bart_large", "rtx4090", 16, 1024, "33%", "adamw"),
    # images
    _own("vit_large", "rtx4090", 128, 224, "50%"),
    _own("vit_large", "rtx4090", 128, 224, NEAR_FLOOR),
    _own("vit_large", LAPTOP, 32, 224, "33%", "adamw"),
    _own("resnet_50", "rtx4090", 256, 224, "75%"),
    _own("resnet_50", "rtx4090", 256, 224, "33%"),
    _own("resnet_50", LAPTOP, 64, 224, "50%", "momentum"),
    _own("unet", "rtx4090", 32, 64, "50%"),
    _own("unet", "rtx5090", 32, 64, "33%", "adamw"),
    # a mixture of experts
    _own("mixtral_small", "rtx4090", 8, 1024, "50%"),
    _own("mixtral_small", "a100-80g", 16, 1024, "33%", "adamw"),
    # other cards, and more of less
    _hf("gpt2-medium", LAPTOP, 8, 1024, "50%"),
    _hf("gpt2-medium", LAPTOP, 8, 1024, "33%", "adamw"),
    _hf("bert-large", "a100-80g", 128, 512, "33%"),
    _hf("bert-large", "rtx4090", 32, 512, "50%", "adamw"),
    _hf("llama-3.2-1b", "rtx5090", 4, 2048, "75%", "adamw"),
    _hf("llama-3.2-3b", "h100", 4, 4096, NEAR_FLOOR),
    _hf("gpt2-xl", "h100", 16, 1024, "75%"),
    _hf("gpt2-xl", "rtx4090", 4, 1024, NEAR_FLOOR),
)
QUICK = (_hf("gpt2", "rtx4090", 4, 256, "50%"), _hf("gpt2", "rtx4090", 4, 256, "33%", "adamw"))
