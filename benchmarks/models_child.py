"""The child process of `benchmarks.models`: models of Hugging Face, built from configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activations_child import serve

#: ways of compiling, besides the whole model with its loss
LAYERS, OUTSIDE = "layers", "outside"
WORDS = 8000
CLASSES = 100


class Library(nn.Module):
    """A model of the library, fed by names, with the loss that it computes itself."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.names, self.fixed = model, names, dict(fixed)
        self.routed = False

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The model's layers, for those who compile them one by one."""
        lists = [list(m) for m in self.model.modules() if isinstance(m, nn.ModuleList)]
        return max(lists, key=len)

    @property
    def again(self) -> bool:
        """True if the library's own checkpointing is on."""
        return bool(self.model.is_gradient_checkpointing)

    @again.setter
    def again(self, on: bool) -> None:
        if on:
            enable: Any = self.model.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, *inputs: Tensor) -> Tensor:
        fed = dict(zip(self.names, inputs, strict=True))
        loss: Tensor = self.model(**fed, **self.fixed).loss
        return loss


class LossOutside(Library):
    """A language model that is compiled without its loss, which the training loop computes."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [self.model]

    def forward(self, *inputs: Tensor) -> Tensor:
        fed = dict(zip(self.names, inputs, strict=True))
        labels = fed.pop("labels")
        logits = self.model(**fed, **self.fixed).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """A model type with its configuration and its batch."""

    title: str
    maker: str
    config: str
    settings: Mapping[str, Any]
    names: tuple[str, ...]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    fixed: Mapping[str, Any]

    kind: type[Library] = Library

    def build(self) -> Library:
        import transformers

        config = getattr(transformers, self.config)(**self.settings)
        return self.kind(getattr(transformers, self.maker)(config).train(), self.names, self.fixed)


def _words(rows: int, *lengths: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Token ids, one tensor for each length."""
    return lambda random: tuple(
        torch.randint(4, WORDS, (rows, length), generator=random) for length in lengths
    )


def _images(rows: int, side: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda random: (
        torch.randn(rows, 3, side, side, generator=random),
        torch.randint(CLASSES, (rows,), generator=random),
    )


def _speech(rows: int, frames: int, length: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda random: (
        torch.randn(rows, 80, frames, generator=random),
        torch.randint(4, WORDS, (rows, length), generator=random),
    )


TEXT, IMAGE = ("input_ids", "labels"), ("pixel_values", "labels")
UNCACHED = {"use_cache": False}

CASES = {
    "gpt2": Case(
        "GPT-2, 512 × 6, batch 4 × 256",
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": WORDS,
            "n_embd": 512,
            "n_layer": 6,
            "n_head": 8,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
        TEXT,
        _words(4, 256, 256),
        UNCACHED,
    ),
    "llama": Case(
        "Llama, 512 × 6, groups of 2, batch 4 × 256",
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "vocab_size": WORDS,
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        TEXT,
        _words(4, 256, 256),
        UNCACHED,
    ),
    "bert": Case(
        "BERT, 512 × 6, batch 8 × 128",
        "BertForMaskedLM",
        "BertConfig",
        {
            "vocab_size": WORDS,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
        },
        TEXT,
        _words(8, 128, 128),
        {},
    ),
    "t5": Case(
        "T5-small, batch 8 × (128 + 64)",
        "T5ForConditionalGeneration",
        "T5Config",
        {"decoder_start_token_id": 0},
        TEXT,
        _words(8, 128, 64),
        UNCACHED,
    ),
    "vit": Case(
        "ViT-S/16, batch 8 × 224 × 224",
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "num_labels": CLASSES,
        },
        IMAGE,
        _images(8, 224),
        {},
    ),
    "swin": Case(
        "Swin-T, batch 8 × 224 × 224",
        "SwinForImageClassification",
        "SwinConfig",
        {"num_labels": CLASSES},
        IMAGE,
        _images(8, 224),
        {},
    ),
    "mixtral": Case(
        "Mixtral, 384 × 4, 4 experts, batch 4 × 256",
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            "vocab_size": WORDS,
            "hidden_size": 384,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        TEXT,
        _words(4, 256, 256),
        UNCACHED,
    ),
    "whisper": Case(
        "Whisper-tiny, batch 2 × (3000 + 128)",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "d_model": 384,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
            "encoder_ffn_dim": 1536,
            "decoder_ffn_dim": 1536,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        ("input_features", "labels"),
        _speech(2, 3000, 128),
        UNCACHED,
    ),
}


def serve_library(task: dict[str, Any]) -> None:
    # else two plain runs differ: index_put adds from several threads in no fixed order
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    case = CASES[task["case"]]
    if task["way"] == OUTSIDE:
        case = replace(case, kind=LossOutside)
    case.build()  # brings in the library, whose own memory is not the model's
    serve(task, case)  # type: ignore[arg-type]
