"""MLPs and experts of published models run in pieces, whichever way they are written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from split_losses import compiled, furthest

transformers = pytest.importorskip("transformers")
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "use_cache": False,
}
#: name → what it has beside the above, and how many of its layers are chains
EXPERTS = {"num_experts_per_tok": 2, "_experts_implementation": "grouped_mm"}
MODELS: dict[str, dict[str, Any]] = {
    "Phi3": {"intermediate_size": 224},
    "Mixtral": {"intermediate_size": 224, "num_local_experts": 4, **EXPERTS},
    "Qwen3Moe": {"moe_intermediate_size": 96, "num_experts": 4, **EXPERTS},
    "GptOss": {"intermediate_size": 64, "num_local_experts": 4, "head_dim": 32, **EXPERTS},
    "Llama": {"intermediate_size": 224},
}


def made(name: str) -> torch.nn.Module:
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name])
    config._experts_implementation = MODELS[name].get("_experts_implementation")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.to(torch.bfloat16)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name", [n if n == "GptOss" else pytest.param(n, marks=pytest.mark.soak) for n in MODELS]
)
def test_chains_of_published_models_run_in_pieces(name: str) -> None:
    model = made(name)
    words = torch.randint(2, 96, (2, 24), generator=torch.Generator().manual_seed(0))

    def gradients(run: Any) -> list[torch.Tensor]:
        model.zero_grad()
        run(input_ids=words, labels=words).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = gradients(model)
    run, hooks = compiled(model, 5)
    found = gradients(run)
    splits = hooks.seen[0].found
    assert splits is not None
    assert sum(region.is_chain for region in splits.regions) == SMALL["num_hidden_layers"]
    assert furthest(found, plain) < 0.05
