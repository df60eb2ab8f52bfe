"""Models that people train and that `hf:NAME` does not reach, as factories for `offcompile fit`.

Each takes a batch and is called where tensors have no memory. Sizes are those of the published
configurations; `mixtral_small` is Mixtral made narrower.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Made = tuple[nn.Module, Any, Any]
DTYPE = torch.bfloat16
WORDS, PIXELS, CLASSES = 512, 224, 1000


def _loss(output: Any) -> Any:
    return output.loss


def hub() -> Any:
    return import_module("transformers")


def _itself(loss: Any) -> Any:
    return loss


def _words(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def _ready(model: Any) -> nn.Module:
    made: nn.Module = model.to(DTYPE)
    return made.train()


def _without_cache(config: Any) -> Any:
    config.use_cache = False
    return config


def t5_large(batch: int = 16) -> Made:
    config = hub().T5Config(
        d_model=1024, d_ff=4096, num_layers=24, num_heads=16, decoder_start_token_id=0
    )
    words = _words(batch, WORDS)
    model = _ready(hub().T5ForConditionalGeneration(_without_cache(config)))
    return model, {"input_ids": words, "labels": words}, _loss


def bart_large(batch: int = 16) -> Made:
    words = _words(batch, 2 * WORDS)
    model = _ready(hub().BartForConditionalGeneration(_without_cache(hub().BartConfig())))
    return model, {"input_ids": words, "labels": words}, _loss


def vit_large(batch: int = 64) -> Made:
    config = hub().ViTConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=CLASSES,
    )
    return _of_images(hub().ViTForImageClassification(config), batch)


def resnet_50(batch: int = 256) -> Made:
    return _of_images(
        hub().ResNetForImageClassification(hub().ResNetConfig(num_labels=CLASSES)), batch
    )


class Classifier(nn.Module):
    """With a loss of one kind: the models' own choose theirs by what labels hold."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(images).logits.float(), classes)


def _of_images(model: nn.Module, batch: int) -> Made:
    images = torch.zeros(batch, 3, PIXELS, PIXELS, dtype=DTYPE)
    classes = torch.zeros(batch, dtype=torch.long)
    return _ready(Classifier(model)), (images, classes), _itself


def mixtral_small(batch: int = 4) -> Made:
    config = hub().MixtralConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    # experts as one product over groups of words: nothing depends on who is asked
    config._experts_implementation = "grouped_mm"
    words = _words(batch, 2 * WORDS)
    model = _ready(hub().MixtralForCausalLM(_without_cache(config)))
    return model, {"input_ids": words, "labels": words}, _loss


# --- a U-Net as of latent diffusion -------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, come: int, go: int, times: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, come), nn.SiLU(), nn.Conv2d(come, go, 3, 1, 1))
        self.time = nn.Linear(times, go)
        self.second = nn.Sequential(nn.GroupNorm(32, go), nn.SiLU(), nn.Conv2d(go, go, 3, 1, 1))
        self.beside = nn.Identity() if come == go else nn.Conv2d(come, go, 1)

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        made = self.first(x) + self.time(times)[:, :, None, None]
        return self.second(made) + self.beside(x)


class Attention(nn.Module):
    def __init__(self, width: int, head: int = 40) -> None:
        super().__init__()
        self.heads = width // head
        self.norm, self.inner = nn.GroupNorm(32, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (
            self.qkv(words).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        words = words + self.out(mixed)
        words = words + self.down(F.gelu(self.up(self.inner(words))))
        return x + words.transpose(1, 2).unflatten(-1, x.shape[-2:])


class Level(nn.Module):
    def __init__(self, come: int, go: int, times: int, attends: bool) -> None:
        super().__init__()
        self.residual = Residual(come, go, times)
        self.attention = Attention(go) if attends else nn.Identity()

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.attention(self.residual(x, times))
        return made


class UNet(nn.Module):
    """Four levels of two blocks each way, attention in the upper three, skips between."""

    def __init__(self, width: int = 320, grows: tuple[int, ...] = (1, 2, 4, 4)) -> None:
        super().__init__()
        self.times = 4 * width
        sizes = [width * g for g in grows]
        self.enter = nn.Conv2d(4, width, 3, 1, 1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        here, skips = width, [width]
        for i, size in enumerate(sizes):
            for _ in range(2):
                self.down.append(Level(here, size, self.times, i < len(sizes) - 1))
                here = size
                skips.append(size)
            last = i == len(sizes) - 1
            self.shrink.append(nn.Identity() if last else nn.Conv2d(size, size, 3, 2, 1))
            skips += [] if last else [size]
        self.middle = Level(here, here, self.times, True)
        for i, size in reversed(list(enumerate(sizes))):
            for _ in range(3):
                self.up.append(Level(here + skips.pop(), size, self.times, i < len(sizes) - 1))
                here = size
            self.grow.append(nn.Conv2d(size, size, 3, 1, 1) if i else nn.Identity())
        self.leave = nn.Sequential(nn.GroupNorm(32, here), nn.SiLU(), nn.Conv2d(here, 4, 3, 1, 1))

    def forward(self, x: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        skips = [x]
        for i, shrink in enumerate(self.shrink):
            for level in self.down[2 * i : 2 * i + 2]:
                x = level(x, times)
                skips.append(x)
            if i < len(self.shrink) - 1:
                x = shrink(x)
                skips.append(x)
        x = self.middle(x, times)
        for i, grow in enumerate(self.grow):
            for level in self.up[3 * i : 3 * i + 3]:
                x = level(torch.cat([x, skips.pop()], 1), times)
            if i < len(self.grow) - 1:
                x = grow(F.interpolate(x, scale_factor=2.0))
        return F.mse_loss(self.leave(x), noise)


def unet(batch: int = 16) -> Made:
    model = UNet()
    x = torch.zeros(batch, 4, 64, 64, dtype=DTYPE)
    times = torch.zeros(batch, model.times, dtype=DTYPE)
    return _ready(model), (x, times, x.clone()), _itself
