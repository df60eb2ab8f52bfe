"""Fine-tune a Hugging Face causal language model within a budget, in full or by LoRA.

    python examples/finetune_hf.py --memory 600MiB
    python examples/finetune_hf.py --memory minimum --lora --model /path/to/folder

Without --model a small Llama is made from a configuration; nothing is fetched. With `accelerate`
installed the Trainer trains, and a callback compiles the model; otherwise a plain loop does. (The
Trainer's own option torch_compile_backend takes only what accelerate lists: "offcompile"
ends there with "is not a valid DynamoBackend".)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from demo.gpt import batches
from torch import nn

import offcompile

if not find_spec("transformers"):
    sys.exit("this example needs transformers: pip install transformers")
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class LoRA(nn.Module):
    """A linear layer that stays as it is, and a product of low rank beside it that learns."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.down), self.up)


def add_lora(model: nn.Module, rank: int, names: tuple[str, ...] = ("q_proj", "v_proj")) -> None:
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child, rank))


def load(asked: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if asked.model:
        return AutoModelForCausalLM.from_pretrained(asked.model, local_files_only=True)
    width, layers = (64, 1) if asked.quick else (512, 8)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=asked.length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def by_trainer(
    model: nn.Module,
    asked: argparse.Namespace,
    data: list[dict[str, Any]],
    options: dict[str, Any],
) -> float:
    """The mean loss that the Trainer tells."""
    from transformers import Trainer, TrainingArguments

    from offcompile.integrations.transformers import OffcompileCallback

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=asked.steps,
            per_device_train_batch_size=asked.batch,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        within = OffcompileCallback(**options)
        trainer = Trainer(model, settings, train_dataset=data, callbacks=[within])
        return float(trainer.train().training_loss)


def by_loop(model: nn.Module, asked: argparse.Namespace, data: list[dict[str, Any]]) -> float:
    """The same by hand; the last loss."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    value = 0.0
    for step in range(asked.steps):
        chosen = data[step * asked.batch : (step + 1) * asked.batch]
        tokens = torch.stack([one["input_ids"] for one in chosen])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        print(f"step {step + 1} of {asked.steps}: loss {value:.4f}")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a local folder with a model")
    parser.add_argument("--memory", default="minimum", help="as the option 'memory'")
    parser.add_argument("--lora", action="store_true", help="train matrices of low rank only")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--loop", action="store_true", help="no Trainer, even where it would run")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps")
    asked = parser.parse_args()
    options = {"memory": asked.memory, "lowering": "aot_eager"}
    if asked.quick:
        asked.steps, asked.batch, asked.length = 2, 4, 64
        options["hardware"] = "cpu"  # a shipped profile: nothing is measured

    model = load(asked)
    if asked.lora:
        add_lora(model, asked.rank)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")
    texts = next(batches(asked.batch * asked.steps, asked.length - 1, "cpu"))
    data = [{"input_ids": text, "labels": text} for text in texts]
    if asked.loop or not find_spec("accelerate"):
        if not asked.loop:
            print("a plain loop, since the Trainer needs accelerate: pip install accelerate")
        model.compile(backend="offcompile", options=options)
        loss = by_loop(model, asked, data)
    else:
        loss = by_trainer(model, asked, data, options)
    print(f"loss {loss:.4f}\n")
    print(offcompile.reports()[0])


if __name__ == "__main__":
    main()
