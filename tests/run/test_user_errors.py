"""Errors that the user's own code raises while it is traced ahead reach the user."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

import offcompile
from offcompile.ir import OffloadError

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}


class Raising(nn.Module):
    def __init__(self, action: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.action = nn.Linear(4, 4), action

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.action(self.layer(x)).sum()


def missing_key(x: torch.Tensor) -> torch.Tensor:
    return x * {"a": 1}["scale"]


def wrong_shape(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(5, 2)


def not_meant(x: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"{x.shape[0]} rows are too many")


def told(model: nn.Module, *inputs: torch.Tensor, **named: object) -> str:
    with pytest.raises(OffloadError) as error:
        offcompile.plan(model, *inputs, memory="1GiB", hardware="rtx4090", **named)
    return str(error.value)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (missing_key, "KeyError: 'scale'"),
        (wrong_shape, "RuntimeError"),
        (not_meant, "ValueError: 3 rows are too many"),
    ],
)
def test_an_exception_is_told_with_its_message_and_place(
    action: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    text = told(Raising(action), torch.ones(3, 4))
    assert said in text
    assert f"{__file__}:" in text and action.__name__ in text


def test_an_encoder_decoder_says_what_its_configuration_lacks() -> None:
    halves = (transformers.BertConfig(**SMALL, intermediate_size=64) for _ in range(2))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*halves)
    words = torch.zeros(2, 8, dtype=torch.long)
    text = told(transformers.EncoderDecoderModel(config), input_ids=words, labels=words)
    assert "ValueError: Make sure to set the decoder_start_token_id" in text


def test_a_model_that_runs_and_cannot_be_one_graph_is_told_apart() -> None:
    def printed(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x

    assert "could not be traced as one graph" in told(Raising(printed), torch.ones(3, 4))
