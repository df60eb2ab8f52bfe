"""Architectures of Hugging Face made small by the names that their configurations share.

Most configurations say width, depth and heads in a few ways, so one table shrinks them all; what
only one architecture has is told beside its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDTH, HEADS, LAYERS = 32, 4, 2

_SIZES = (
    (WIDTH, "hidden_size d_model n_embd dim embed_dim decoder_hidden_size word_embed_proj_dim"),
    (2 * WIDTH, "intermediate_size ffn_dim n_inner d_ff d_inner encoder_ffn_dim decoder_ffn_dim"),
    (2 * WIDTH, "hidden_dim dff moe_intermediate_size shared_expert_intermediate_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers"),
    (LAYERS, "decoder_layers num_experts_per_tok"),
    (HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads"),
    (HEADS, "decoder_attention_heads num_key_value_heads num_experts num_local_experts"),
    (HEADS, "n_routed_experts state_size sliding_window"),
    (8, "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim patch_size"),
    (16, "q_lora_rank kv_lora_rank embedding_size num_mel_bins"),
    (32, "image_size"),
    (64, "vocab_size max_position_embeddings n_positions n_ctx"),
    (1, "n_group topk_group n_shared_experts"),
)
_SIZE_OF = {name: size for size, names in _SIZES for name in names.split()}
#: of the words of tests/trust/models.py
_WORDS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}


def settings_of(name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model type that make its model small; `more` of them are as they are."""
    import transformers

    return _small(transformers.AutoConfig.for_model(name).to_dict()) | dict(more)


def _small(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            kept = {k: v for k, v in value.items() if k == "model_type"}
            found[name] = kept | _small(value)
        elif name in _WORDS:
            found[name] = _WORDS[name]
        elif name in _SIZE_OF and isinstance(value, int):
            found[name] = _SIZE_OF[name]
    return found
