"""Checkpoints read into a model where its weights lie, and files that cannot be read, named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules

import offcompile
from offcompile.ir import OffloadError

Inside = Callable[[], offcompile.host_init]


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    yield lambda: offcompile.host_init("cpu", spill=tmp_path)
    assert not torch_modules._global_parameter_registration_hooks
    assert not torch_modules._global_buffer_registration_hooks


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Embedding(1000, 100), "b": nn.Linear(100, 1000, bias=False)})
    model["b"].weight = model["a"].weight
    return model


DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


def write_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names, body = {v: k for k, v in DTYPES.items()}, b""
    for name, value in tensors.items():
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        place = [len(body), len(body) + len(raw)]
        shape = list(value.shape)
        header[name] = {"dtype": names[value.dtype], "shape": shape, "data_offsets": place}
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(300, 300)
        self.convolution = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(5)  # a scalar counter
        self.short = nn.Parameter(torch.randn(700, 3).to(torch.bfloat16))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mask", torch.ones(9, 9).tril().bool())


@pytest.mark.parametrize("chunk_bytes", [1000, 8 << 20])
def test_safetensors_load_where_parameters_lie(
    chunk_bytes: int, tmp_path: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offcompile.runtime.disk.checkpoint_files.CHUNK_BYTES", chunk_bytes)
    saved = Mixed().state_dict()
    write_safetensors(saved, tmp_path / "m.safetensors")
    with inside():
        model = Mixed()
    places = [p.data_ptr() for p in model.parameters()]
    offcompile.load_weights(model, tmp_path / "m.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name
    assert places == [p.data_ptr() for p in model.parameters()]
    doubled = Mixed().double()
    offcompile.load_weights(doubled, tmp_path)  # the only file there
    assert torch.equal(doubled.linear.weight, saved["linear.weight"].double())


def test_a_folder_of_shards_loads(tmp_path: Path) -> None:
    saved = Mixed().state_dict()
    names = list(saved)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, keys in shards.items():
        write_safetensors({k: saved[k] for k in keys}, tmp_path / file)
    index = {"weight_map": {k: file for file, keys in shards.items() for k in keys}}
    with pytest.raises(OffloadError, match=r"2 files of weights .* no index"):
        offcompile.load_weights(Mixed(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = Mixed()
    offcompile.load_weights(model, tmp_path)
    assert all(torch.equal(v, saved[k]) for k, v in model.state_dict().items())
    index["weight_map"]["linear.bias"] = "../one.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OffloadError, match=r'"\.\./one\.safetensors", which is no file beside it'):
        offcompile.load_weights(model, tmp_path)


def test_tied_weights_need_one_name(tmp_path: Path, inside: Inside) -> None:
    saved = torch.randn(1000, 100)
    write_safetensors({"b.weight": saved}, tmp_path / "m.safetensors")
    with inside():
        model = tied()
    offcompile.load_weights(model, tmp_path / "m.safetensors")
    assert torch.equal(model["a"].weight, saved)


def test_all_that_does_not_match_is_told_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = copy.deepcopy(model.state_dict())
    saved = {k: v + 1 for k, v in model.state_dict().items() if k != "1.bias"}
    saved |= {"1.weight": torch.ones(4, 3), "2.weight": torch.ones(1)}
    torch.save(saved, tmp_path / "m.pt")
    with pytest.raises(OffloadError) as told:
        offcompile.load_weights(model, tmp_path / "m.pt")
    for line in (
        "1.weight is (4, 3) in the file and (3, 3) in the model",
        "1.bias is not in the file",
        "2.weight is not in the model",
    ):
        assert line in str(told.value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    del saved["1.weight"]
    torch.save(saved, tmp_path / "m.pt")
    offcompile.load_weights(model, tmp_path / "m.pt", strict=False)
    assert torch.equal(model[0].weight, before["0.weight"] + 1)
    assert torch.equal(model[1].weight, before["1.weight"])
    with pytest.raises(OffloadError, match=r"0\.weight has no memory yet"):
        offcompile.load_weights(nn.Sequential(nn.Linear(3, 3, device="meta")), tmp_path / "m.pt")


def header(**told: Any) -> bytes:
    whole = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | told
    text = json.dumps({"weight": whole}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "no whole safetensors file"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "its header would be"),
        ((2).to_bytes(8, "little") + b"{{", "is no JSON"),
        (header(data_offsets=[0, 32]), "would lie at 0 to 32 of 16 bytes"),
        (header(shape=[2, 3]), "has 16 bytes for"),
        (header(shape="x"), 'has the shape "x"'),
        (header(dtype="F4"), "of type F4"),
    ],
)
def test_broken_files_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(content)
    with pytest.raises(OffloadError, match=message) as told:
        offcompile.load_weights(nn.Linear(2, 2, bias=False), file)
    assert str(file) in str(told.value)


def test_other_files_are_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(OffloadError, match="has no weights"):
        offcompile.load_weights(model, tmp_path)
    with pytest.raises(OffloadError, match="is no file"):
        offcompile.load_weights(model, tmp_path / "nothing.pt")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    with pytest.raises(OffloadError, match=r"junk\.pt cannot be read"):
        offcompile.load_weights(model, tmp_path / "junk.pt")
    torch.save({"model": model.state_dict()}, tmp_path / "nested.pt")
    with pytest.raises(OffloadError, match="'model' is a OrderedDict, not a tensor"):
        offcompile.load_weights(model, tmp_path / "nested.pt")
