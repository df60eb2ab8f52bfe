"""`offcompile fit --lora`: only low-rank adapters train."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from lengths import some
from test_ahead import Language, text
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import offcompile
from offcompile.ahead.answers.fit_report import FitReport
from offcompile.ahead.fit import fit
from offcompile.ahead.layers import find_layers
from offcompile.ahead.lora.adapters import LowRank, with_adapters
from offcompile.ahead.lora.request import LoraRequest
from offcompile.cli import command as cli
from offcompile.ir import InvalidInput

CARD, LAYERS = "rtx4090", 2


def language(layers: int = LAYERS) -> Language:
    with torch.device("meta"):
        return Language(layers, dropout=0.0)


def adapted(model: nn.Module, asked: str) -> list[str]:
    made, count = with_adapters(model, LoraRequest.read(asked))
    found = [path for path, module in made.named_modules() if isinstance(module, LowRank)]
    assert len(found) == count
    trained = {path for path, p in made.named_parameters() if p.requires_grad}
    halves = {f"{path}.{half}.weight" for path in found for half in ("down", "up")}
    assert trained == {half.removeprefix(".") for half in halves}
    return found


def test_the_text_is_read() -> None:
    assert LoraRequest.read("r=8") == LoraRequest(8, 16.0)
    asked = LoraRequest.read("r=8, alpha=4, targets=q_proj, v_proj")
    assert asked == LoraRequest(8, 4.0, ("q_proj", "v_proj")) and asked.scale == 0.5
    assert LoraRequest.read("targets=a,b,r=2") == LoraRequest(2, 4.0, ("a", "b"))
    assert LoraRequest.read({"r": 8, "targets": ["q_proj"]}) == LoraRequest(8, 16.0, ("q_proj",))
    assert LoraRequest.read("r=8,targets=all-linear").targets == ()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("", "'' is no key=value"),
        ("16", "'16' is no key=value; write r=16"),
        ("alpha=2", "there is no rank; give one, as in r=16"),
        ("r=0", "r=0 is no rank; give a whole number of 1 or more"),
        ("r=many", "r=many is no rank"),
        ({"r": True}, "r=True is no rank"),
        ("r=1,r=2", "'r' is given twice"),
        ("r=1,alpha=0", "alpha=0 is no factor"),
        ("r=1,alpha=nan", "alpha=nan is no factor"),
        ("r=1,rank=2", "'rank' is no key; there are r, alpha, targets"),
        ("r=1,targets=", "has an empty name"),
        ("r=1,targets=up,all-linear", "leave out the other targets"),
        ("r=1,targets=q_proj", "'q_proj' matches no linear layer; there are down, head, out, qkv"),
        ("r=1,targets=up,gate", "'gate' matches no linear layer"),
    ],
)
def test_bad_requests_are_named(asked: Any, said: str) -> None:
    with pytest.raises(InvalidInput) as error:
        fit(language(), text, hardware=CARD, lora=asked)
    assert said in str(error.value)


def test_layers_are_chosen_by_name() -> None:
    model = language()
    assert adapted(model, "r=2,targets=up,blocks.1.down") == [
        path for i in range(LAYERS) for path in (f"blocks.{i}.up", *["blocks.1.down"][: i == 1])
    ]
    everywhere = adapted(model, "r=2")
    assert len(everywhere) == 4 * LAYERS + 1 and "head" in everywhere
    assert not any(isinstance(module, LowRank) for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    assert adapted(nn.Linear(4, 4), "r=2") == [""]
    shared = nn.Linear(4, 4)
    made, count = with_adapters(nn.Sequential(shared, shared), LoraRequest(1, 1.0))
    assert count == 1 and made[0] is made[1]  # type: ignore[index]
    with pytest.raises(InvalidInput, match="has no linear layers"):
        with_adapters(nn.MultiheadAttention(4, 2), LoraRequest(1, 1.0))


def test_adapters_compute_what_they_should_and_keep_layers_alike() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    made, _ = with_adapters(layer, LoraRequest.read("r=2,alpha=6"))
    made = made.to_empty(device="cpu")
    assert isinstance(made, LowRank) and (made.bias.shape, made.weight.shape) == ((4,), (4, 6))
    made.layer = copy.deepcopy(layer)
    for half in (made.down, made.up):
        nn.init.normal_(half.weight)
    x = torch.randn(3, 6)
    expected = layer(x) + 3.0 * x @ made.down.weight.T @ made.up.weight.T
    torch.testing.assert_close(made(x), expected)
    few, _ = with_adapters(language(8), LoraRequest(2, 4.0))
    found = find_layers(few)
    assert found is not None and found.count == 8


ASKED: dict[str, Any] = {
    "hardware": CARD,
    "memory": "1GiB",
    "optimizer": "adamw",
    "options": {"lowering": "aot_eager", "seconds": 0.1},
}
SHORT: dict[str, Any] = {"table": False, "largest": False}
ADAPTERS = {"lora": "r=4,targets=qkv,out"}


@pytest.fixture(scope="module")
def with_lora() -> FitReport:
    return fit(language(), text, 2, **ADAPTERS, **SHORT, **ASKED)


def test_only_adapters_have_gradients_and_states(with_lora: FitReport) -> None:
    whole, found = fit(language(), text, 2, **SHORT, **ASKED), with_lora
    assert found.report is not None and whole.report is not None and found.training is not None
    trained = LAYERS * 4 * (64 + 192 + 64 + 64)
    total = sum(p.numel() for p in language().parameters()) + trained
    assert (found.training.trained, found.training.total) == (trained, total)
    kinds: dict[str, int] = {}
    for tensor in found.report.problem.tensors:
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + tensor.nbytes
    assert kinds["gradient"] == 4 * trained and kinds["state"] == 2 * 4 * trained
    assert kinds["weight"] == 4 * total
    assert found.tier_bytes["device"] < whole.tier_bytes["device"]
    assert f"trains         {trained:,} of {total:,} parameters" in found.to_text()
    assert f"adapters of rank 4 on {2 * LAYERS} layers" in found.to_text()
    told = json.loads(json.dumps(found.to_json()))["parameters"]
    assert told["trained"] == trained and told["adapted_layers"] == 2 * LAYERS
    assert "trains" not in whole.to_text()
    assert whole.to_json()["parameters"]["trained"] == total - trained


def test_plan_takes_adapters_as_fit_does(with_lora: FitReport) -> None:
    answer, planned = with_lora, offcompile.plan(language(), text(2), **ADAPTERS, **ASKED)
    assert answer.report is not None and planned.problem == answer.report.problem
    assert sum(t.kind == "gradient" for t in planned.problem.tensors) == 2 * 2 * LAYERS
    with pytest.raises(InvalidInput, match="there is no rank; give one, as in r=16"):
        offcompile.plan(language(), text(2), hardware=CARD, lora="alpha=2")


@pytest.mark.parametrize("shard", some(["ddp", "fsdp", "zero1"], "fsdp"))
def test_ranks_send_the_gradients_of_adapters_and_gather_all_weights(shard: str) -> None:
    asked: dict[str, Any] = {"ranks": 2, "shard": shard, "link": "pcie", **SHORT, **ASKED}
    whole = fit(language(), text, 2, **asked)
    found = fit(language(), text, 2, **ADAPTERS, **asked)
    assert found.ranks is not None and whole.ranks is not None and found.training is not None
    trained, total = 4 * found.training.trained, 4 * found.training.total
    sent = {
        "ddp": trained,  # a ring of two passes half of it on, twice around
        "fsdp": trained / 2,
        "zero1": trained * 3 / 2,
    }[shard]
    gathered = found.ranks.chosen.sent_bytes - sent
    if shard == "fsdp":  # in forward and in backward, where the root's are still there
        assert total / 2 < gathered <= total
    else:
        assert gathered == 0
    assert found.ranks.chosen.sent_bytes < whole.ranks.chosen.sent_bytes
    assert found.tier_bytes["device"] < whole.tier_bytes["device"]
    assert "trains" in found.to_text()


@pytest.mark.long
def test_the_command_takes_adapters_and_ranks(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
    config.save_pretrained(tmp_path)
    asked = ["fit", f"hf:{tmp_path}", "--hardware", CARD, "--length", "16", "--optimizer", "adamw"]
    assert cli.main([*asked, "--lora", "r=2", "--ranks", "2", "--quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"]["adapted_layers"] == 8
    assert [way["shard"] for way in told["ranks"]["ways"]] == ["ddp"]


def test_the_linear_layers_of_gpt2_are_conv1d_and_its_head_is_left_out(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    names = {path.rpartition(".")[2] for path in adapted(model, "r=2")}
    assert names == {"c_attn", "c_proj", "c_fc"}
    made, _ = with_adapters(model, LoraRequest.read("r=2,targets=c_attn"))
    adapter = made.transformer.h[0].attn.c_attn  # type: ignore[union-attr]
    assert (adapter.down.in_features, adapter.up.out_features) == (32, 96)
    config.save_pretrained(tmp_path)
    asked = ["fit", f"hf:{tmp_path}", "--hardware", CARD, "--length", "16", "--quick", "--lora"]
    assert cli.main([*asked, "r=2,targets=c_attn", "--optimizer", "adamw", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["parameters"]
    assert told["trained"] == 2 * 2 * (32 + 96) and told["adapted_layers"] == 2
    assert cli.main([*asked, "r=2,targets=q_proj"]) == 2
    assert "there are c_attn, c_fc, c_proj, lm_head" in capsys.readouterr().err
