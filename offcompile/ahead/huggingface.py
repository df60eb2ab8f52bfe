"""`hf:NAME` and `hf:FOLDER`: builds transformers models without weights or network access.

Sizes are from the models' published configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offcompile.ir import InvalidInput, Violation

PREFIX = "hf:"


def _gpt2(layers: int, width: int, heads: int) -> tuple[str, dict[str, int]]:
    return "GPT2Config", {"n_layer": layers, "n_embd": width, "n_head": heads}


def _bert(layers: int, width: int, heads: int) -> tuple[str, dict[str, int]]:
    return "BertConfig", {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


def _llama(
    layers: int, width: int, inner: int, heads: int, groups: int, words: int = 32_000
) -> tuple[str, dict[str, int]]:
    return "LlamaConfig", {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": words,
        "max_position_embeddings": 131_072,
    }


def _decoder(
    kind: str, shape: tuple[int, int, int, int, int, int], **more: int
) -> tuple[str, dict[str, int]]:
    """`shape`: as of `_llama`, whose names for it most decoders share."""
    _, values = _llama(*shape)
    return f"{kind}Config", {**values, "head_dim": shape[1] // shape[3], **more}


#: settings that decoders with mixtures of experts have beside the usual ones
QWEN3_EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
OSS_EXPERTS = {"num_local_experts": 32, "num_experts_per_tok": 4}
#: name → configuration class, and values that differ from its defaults
SIZES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt-1.3b": _gpt2(24, 2048, 16),
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "tinyllama-1.1b": _llama(22, 2048, 5632, 32, 4),
    "llama-2-7b": _llama(32, 4096, 11_008, 32, 32),
    "llama-2-13b": _llama(40, 5120, 13_824, 40, 40),
    "llama-2-70b": _llama(80, 8192, 28_672, 64, 8),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, 128_256),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, 8, 128_256),
    "llama-3.1-8b": _llama(32, 4096, 14_336, 32, 8, 128_256),
    "llama-3.1-70b": _llama(80, 8192, 28_672, 64, 8, 128_256),
    "mistral-7b": _llama(32, 4096, 14_336, 32, 8, 32_768),
    "phi-3-mini": _decoder("Phi3", (32, 3072, 8192, 32, 32, 32_064)),
    "qwen3-8b": _decoder("Qwen3", (36, 4096, 12_288, 32, 8, 151_936)),
    "mixtral-8x7b": _decoder("Mixtral", (32, 4096, 14_336, 32, 8, 32_000)),
    "qwen3-30b-a3b": _decoder(
        "Qwen3Moe", (48, 2048, 6144, 32, 4, 151_936), head_dim=128, **QWEN3_EXPERTS
    ),
    "gpt-oss-20b": _decoder("GptOss", (24, 2880, 2880, 64, 8, 201_088), head_dim=64, **OSS_EXPERTS),
}
#: heads that train a language model, in order of preference → name of their loss; without a name,
#: transformers logs a warning, which would break the graph
HEADS = {
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForMaskedLM": "ForMaskedLM",
    "AutoModelForSeq2SeqLM": None,
}


def build(name: str, length: int, dtype: str) -> tuple[Any, Callable[..., Any], Any]:
    """Build a meta model, its inputs for a batch (and another length), and its loss. `name` comes
    without the prefix."""
    import torch

    config = _config(name)
    most = getattr(config, "max_position_embeddings", None) or length
    if length > most:
        detail = f"{length} is more than the {most} positions of {name}; give that or less"
        raise InvalidInput([Violation("bad-value", "--length", detail)])
    config.use_cache = False  # training generates nothing
    head, loss_type = _head_for(config, name)
    with torch.device("meta"):
        model = head.from_config(config).to(getattr(torch, dtype))
    if loss_type is not None:
        model.loss_type = loss_type
    model.train()

    def inputs(batch: int, length: int = length) -> dict[str, Any]:
        words = torch.zeros(batch, length, dtype=torch.long, device="meta")
        return {"input_ids": words, "labels": words}

    return model, inputs, lambda output: output.loss


def _config(name: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        detail = f"hf:{name} needs transformers, which is not installed: pip install transformers"
        raise InvalidInput([Violation("bad-value", "model", detail)]) from error
    folder = Path(name)
    if folder.is_dir():
        try:
            return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            detail = f"{name} holds no configuration that transformers can read: {error}"
            raise InvalidInput([Violation("bad-value", "model", detail)]) from error
    known = SIZES.get(name.lower())
    if known is None:
        near = get_close_matches(name.lower(), SIZES, n=1, cutoff=0.0)[0]
        detail = (
            f"{name!r} is no folder and no size that is known; the nearest is 'hf:{near}'"
            f" (there are {', '.join(SIZES)})"
        )
        raise InvalidInput([Violation("unknown-id", "model", detail)])
    kind, values = known
    if kind == "GPT2Config":
        values = {**values, "n_positions": 1024 if name.lower() != "gpt-1.3b" else 2048}
    return getattr(transformers, kind)(**values)


def _head_for(config: Any, name: str) -> tuple[Any, str | None]:
    import transformers

    for head, loss_type in HEADS.items():
        found = getattr(transformers, head)
        if type(config) in found._model_mapping:
            return found, loss_type
    detail = f"{name} has no language model to train; give a factory: file.py:function"
    raise InvalidInput([Violation("bad-value", "model", detail)])
