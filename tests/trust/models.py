"""Architectures of Hugging Face, built from configurations, trained under budgets and plainly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .conformity import Compiler, Outcome, Tally, left_over, rows_of, run_under, tiny_steps
from .rows import Row
from .shrunk import settings_of

STEPS = 3
WORDS, LENGTH, ROWS, WIDTH, CLASSES = 64, 10, 2, 32, 5
PIXELS = 32

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A model type of the library, what its configuration is given, and what it is fed."""

    name: str
    #: class that makes a model from a configuration
    maker: str
    inputs: Callable[[torch.Generator], Inputs]
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: True if `settings` leave its size to `shrunk`
    shrunk: bool = False

    def build(self) -> nn.Module:
        import transformers

        settings = settings_of(self.name, self.settings) if self.shrunk else self.settings
        config = transformers.AutoConfig.for_model(self.name, **settings)
        maker = getattr(transformers, self.maker)
        return maker.from_config(config) if "Auto" in self.maker else maker(config)

    def run(self, seed: int, compiler: Compiler) -> Outcome:
        """Three steps with AdamW; with the same compiler always the same."""
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model = WithLoss(self.build()).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        forward = compiler(model)
        values: dict[str, Tensor] = {}
        for step in range(STEPS):
            torch.manual_seed(seed + step)
            inputs = self.inputs(torch.Generator().manual_seed(seed + 10 * step))
            optimizer.zero_grad()
            try:
                loss = forward(inputs)
                loss.backward()
            except Exception as error:
                return Outcome(error=error)
            values[f"loss {step}"] = loss.detach().clone()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    values[f"gradient of {name} in step {step}"] = p.grad.clone()
            optimizer.step()
        return Outcome(values | {n: x.detach().clone() for n, x in model.state_dict().items()})


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


# --- what they are fed --------------------------------------------------------------------------


def _words(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(4, WORDS, (ROWS, length), generator=generator)


def _image(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)


def _class(generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (ROWS,), generator=generator)


def causal(generator: torch.Generator) -> Inputs:
    words = _words(generator)
    return {"input_ids": words, "labels": words, "use_cache": False}


def masked(generator: torch.Generator) -> Inputs:
    present = torch.ones(ROWS, LENGTH, dtype=torch.long)
    present[1, -3:] = 0
    return {
        "input_ids": _words(generator),
        "labels": _words(generator),
        "attention_mask": present,
    }


def translated(generator: torch.Generator) -> Inputs:
    return {"input_ids": _words(generator), "labels": _words(generator, 7), "use_cache": False}


def seen(generator: torch.Generator) -> Inputs:
    return {"pixel_values": _image(generator), "labels": _class(generator)}


def outlined(generator: torch.Generator) -> Inputs:
    regions = torch.randint(CLASSES, (ROWS, PIXELS, PIXELS), generator=generator)
    return {"pixel_values": _image(generator), "labels": regions}


def captioned(generator: torch.Generator) -> Inputs:
    return {
        "pixel_values": _image(generator),
        "input_ids": _words(generator),
        "return_loss": True,
    }


def heard(generator: torch.Generator) -> Inputs:
    return {
        "input_values": torch.randn(ROWS, 800, generator=generator),
        "labels": _class(generator),
    }


def transcribed(generator: torch.Generator) -> Inputs:
    return {
        "input_features": torch.randn(ROWS, 16, 40, generator=generator),
        "labels": _words(generator, 7),
        "use_cache": False,
    }


# --- which --------------------------------------------------------------------------------------

_TEXT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
#: attention in groups: torch's own decomposition of it adds in another order than its eager kernel
_GROUPED = _TEXT | {"num_key_value_heads": 2}
#: one head of keys for each head of queries
_EVEN = _TEXT | {"num_key_value_heads": 4}
_VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": PIXELS,
    "patch_size": 8,
    "num_labels": CLASSES,
}
_PAIR = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}
_SWIN = {
    "image_size": PIXELS,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 1],
    "num_heads": [2, 2],
    "window_size": 4,
    "num_labels": CLASSES,
}
_RESNET = {
    "embedding_size": 16,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "layer_type": "basic",
    "num_labels": CLASSES,
}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}


def _causal(name: str, settings: Mapping[str, Any] = _TEXT, **more: Any) -> Architecture:
    return Architecture(name, "AutoModelForCausalLM", causal, {**settings, **more})


def _masked(name: str, **more: Any) -> Architecture:
    return Architecture(name, "AutoModelForMaskedLM", masked, {**_TEXT, **more})


def _seen(name: str, **settings: Any) -> Architecture:
    return Architecture(name, "AutoModelForImageClassification", seen, settings)


def _shrunk(
    maker: str, inputs: Callable[[torch.Generator], Inputs], names: str
) -> Iterator[Architecture]:
    for name in names.split():
        labels = {"num_labels": CLASSES} if "Classification" in maker else {}
        yield Architecture(name, maker, inputs, labels | _OF_ONE.get(name, {}), shrunk=True)


#: what only this architecture has
_OF_ONE: Mapping[str, Mapping[str, Any]] = {
    "bit": {"num_groups": 4, "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "focalnet": {"embed_dim": 16, "depths": [1] * 4, "hidden_sizes": [16, 16, 32, 32]},
    "poolformer": {"hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4},
    "regnet": {"hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
    "swinv2": {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
    | {"patch_size": 4},
}

ARCHITECTURES = (
    _causal("gpt2", n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4),
    _causal("llama", _GROUPED),
    _causal("mistral", _GROUPED, sliding_window=4),
    _causal("qwen2", _EVEN),
    _causal("qwen3", _GROUPED, head_dim=8),
    _causal("gemma", _EVEN, head_dim=8),
    _causal("gemma2", _EVEN, head_dim=8, sliding_window=4),
    _causal("phi"),
    _causal("opt", ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH),
    _causal("bloom", n_layer=2, n_head=4),
    _causal("gpt_neox"),
    _causal("gpt_neo", num_hidden_layers=2, attention_types=[[["global", "local"], 1]]),
    _causal("falcon"),
    _causal("olmo2", _EVEN),
    _causal("stablelm", _EVEN),
    _causal("mixtral", _EVEN, num_local_experts=4),
    _causal("qwen2_moe", _EVEN | _MIXTURE, shared_expert_intermediate_size=WIDTH),
    _causal("mamba", state_size=4),
    _masked("bert", num_hidden_layers=2),
    _masked("roberta"),
    _masked("distilbert", dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=2 * WIDTH),
    _masked("albert", embedding_size=16),
    _masked("electra", embedding_size=16),
    _masked("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    Architecture(
        "t5",
        "AutoModelForSeq2SeqLM",
        translated,
        {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 1}
        | {"num_heads": 4, "decoder_start_token_id": 0},
    ),
    Architecture(
        "bart", "AutoModelForSeq2SeqLM", translated, _PAIR | {"max_position_embeddings": 32}
    ),
    _seen("vit", **_VISION),
    _seen("swin", **_SWIN),
    _seen("convnext", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=CLASSES),
    _seen("resnet", **_RESNET),
    Architecture(
        "segformer",
        "AutoModelForSemanticSegmentation",
        outlined,
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
        | {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2]}
        | {"mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": CLASSES},
    ),
    Architecture(
        "clip",
        "CLIPModel",
        captioned,
        {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 16},
    ),
    Architecture(
        "wav2vec2",
        "AutoModelForAudioClassification",
        heard,
        {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4}
        | {"intermediate_size": 2 * WIDTH, "conv_dim": [16, 16], "conv_kernel": [10, 4]}
        | {"conv_stride": [5, 4], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8}
        | {"num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16, "layerdrop": 0.0}
        | {"mask_time_prob": 0.0, "num_labels": CLASSES},
    ),
    Architecture(
        "whisper",
        "AutoModelForSpeechSeq2Seq",
        transcribed,
        _PAIR
        | {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 16}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    *_shrunk(
        "AutoModelForCausalLM",
        causal,
        "ctrl deepseek_v3 falcon_mamba gemma3_text gpt_bigcode gpt_oss granitemoe"
        " jamba llama4_text mpt olmoe openai-gpt phi3 phimoe qwen3_moe recurrent_gemma rwkv xglm",
    ),
    *_shrunk(
        "AutoModelForSeq2SeqLM",
        translated,
        "bigbird_pegasus blenderbot led mbart mt5 mvp pegasus plbart prophetnet umt5",
    ),
    *_shrunk("AutoModelForMaskedLM", masked, "big_bird camembert convbert"),
    *_shrunk(
        "AutoModelForImageClassification",
        seen,
        "beit bit convnextv2 data2vec-vision dinov2 focalnet mobilenet_v1 mobilevit poolformer"
        " pvt_v2 regnet siglip swinv2 vit_msn",
    ),
)
BY_NAME = {a.name: a for a in ARCHITECTURES}


def sweep(chosen: list[Architecture], seed: int) -> tuple[Tally, Tally]:
    """Each at the minimum, and at a middling budget."""
    least, middle = Tally(seed), Tally(seed)
    with tiny_steps(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in chosen:

            def run(compiler: Compiler, one: Architecture = one) -> Outcome:
                return one.run(seed, compiler)

            eager = run(lambda model: model)
            found = run_under("minimum", run)
            least.count(one.name, found, eager, run)
            budget = found.middling()
            if budget is not None:
                middle.count(one.name, run_under(budget, run), eager, run)
            del found, eager
            for what in left_over():
                least.fails(f"after {one.name}", what)
    return least, middle


def rows(scale: float, seed: int) -> list[Row]:
    wanted = max(1, min(len(ARCHITECTURES), round(scale * len(ARCHITECTURES))))
    step = len(ARCHITECTURES) / wanted
    chosen = [ARCHITECTURES[int(n * step + seed) % len(ARCHITECTURES)] for n in range(wanted)]
    return counted(chosen, seed)


def counted(chosen: list[Architecture], seed: int) -> list[Row]:
    least, middle = sweep(chosen, seed)
    what = f"architectures of Hugging Face, {STEPS} steps with AdamW,"
    return rows_of({f"{what} at the minimum": least, f"{what} at a middling budget": middle})
