"""Weights that are born on the host: the same numbers, in memory the process does not hold."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch import nn
from torch.nn.modules import module as torch_modules

import offcompile
from offcompile.ir import InvalidInput, OffloadError
from offcompile.runtime.device.mapped import MappedStore
from offcompile.runtime.moves.registry import Runtime, runtimes
from offcompile.runtime.moves.weights import is_on_host

CHILD = Path(__file__).parents[1] / "support" / "host_init_child.py"
MIB = 1 << 20
Inside = Callable[[], offcompile.host_init]


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    yield lambda: offcompile.host_init("cpu", spill=tmp_path)
    assert not torch_modules._global_parameter_registration_hooks
    assert not torch_modules._global_buffer_registration_hooks


def runtime_of(path: Path) -> Runtime:
    (found,) = [r for r in runtimes() if r.settings.directories == (str(path),)]
    return found


def store_of(path: Path) -> MappedStore:
    store = runtime_of(path).device.mapped  # type: ignore[attr-defined]
    assert isinstance(store, MappedStore)
    return store


def zoo() -> nn.Module:
    """Modules that make their parameters in different ways: factories, old constructors, copies."""
    torch.manual_seed(0)
    old = nn.Module()
    old.weight = nn.Parameter(torch.Tensor(300, 300).normal_())
    old.scaled = nn.Parameter(torch.randn(300, 300) * 0.02)
    old.table = nn.Parameter(torch.full((300, 300), 3, dtype=torch.float64))
    old.columns = nn.Parameter(torch.rand(300, 400).t())
    old.register_buffer("mask", torch.ones(600, 600).tril().bool())
    old.register_buffer("small", torch.ones(3))
    nn.init.orthogonal_(old.weight)
    set_later = nn.Linear(64, 64)
    set_later.weight.data = torch.randn(64, 64)
    return nn.ModuleDict(
        {
            "old": old,
            "set_later": set_later,
            "embedding": nn.Embedding(1000, 128, padding_idx=3),
            "encoder": nn.TransformerEncoder(
                nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2
            ),
            "lstm": nn.LSTM(128, 128, 2),
            "norm": nn.BatchNorm2d(8),
            "convolution": nn.Conv2d(64, 128, 3),
            "parametrized": nn.utils.parametrizations.orthogonal(nn.Linear(300, 300)),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(300, 300)),
            "list": nn.ParameterList([torch.ones(3), torch.zeros(400, 400)]),
        }
    )


def test_numbers_and_strides_are_those_of_ordinary_building(inside: Inside) -> None:
    plain, after = zoo(), torch.rand(3)
    with inside():
        model = zoo()
    assert torch.equal(torch.rand(3), after)
    expected, found = plain.state_dict(), model.state_dict()
    assert list(expected) == list(found)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert (found[name].stride(), found[name].dtype) == (value.stride(), value.dtype), name


def test_parameters_and_large_buffers_are_on_the_host(inside: Inside) -> None:
    with inside():
        model = zoo()
        activation = torch.randn(10, 128) @ torch.randn(128, 128)
        assert not is_on_host(activation)
    assert [name for name, p in model.named_parameters() if not is_on_host(p)] == []
    assert [n for n, b in model.named_buffers() if is_on_host(b) and b.nbytes < 1000] == []
    assert is_on_host(model["old"].mask)
    assert not is_on_host(nn.Linear(512, 512).weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(512, 512, memory_format=torch.contiguous_format).fill_(2),
        lambda: torch.empty((8, 8, 64, 64), memory_format=torch.channels_last).normal_(),
        lambda: torch.zeros(512, 512, dtype=torch.bfloat16),
        lambda: torch.ones(size=(512, 512), requires_grad=True),
        lambda: torch.full((512, 512), fill_value=7),
        lambda: torch.rand(512, 512, generator=torch.Generator().manual_seed(1)),
        lambda: torch.randn(512, 512, dtype=torch.complex64),
        lambda: torch.randn_like(torch.zeros(512, 512).t()),
        lambda: torch.ones(512, 512).new_full((400, 400), True),
        lambda: torch.rand_like(torch.zeros(512, 512, dtype=torch.float64)),
    ],
)
def test_factories(make: Callable[[], torch.Tensor], inside: Inside) -> None:
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    with inside():
        made = make()
    assert is_on_host(made) and torch.equal(made, plain)
    assert (made.stride(), made.dtype) == (plain.stride(), plain.dtype)
    assert made.requires_grad == plain.requires_grad and made.is_leaf


def test_what_is_asked_for_elsewhere_stays_there(inside: Inside) -> None:
    with inside():
        out = torch.ones(512, 512).tril()
        assert torch.zeros(512, 512, out=out) is out and not is_on_host(out)
        assert torch.empty(512, 512, device="meta").is_meta
        with torch.device("meta"):
            nowhere = nn.Linear(512, 512)
        assert nowhere.weight.is_meta
        nowhere.to_empty(device="cpu")
        assert is_on_host(nowhere.weight) and is_on_host(nowhere.bias)
        with pytest.raises(RuntimeError, match="nonsense"):
            torch.empty(512, 512, device="nonsense")
        with pytest.raises(TypeError, match="empty"):
            torch.empty("512", 512)
        lazy = nn.LazyLinear(512)
        lazy(torch.ones(1, 512))
        assert is_on_host(lazy.weight)
        mapped = torch.vmap(lambda row: row + torch.zeros(512, 512))(torch.ones(2, 512, 512))
        assert mapped.shape == (2, 512, 512)


def test_it_nests_and_is_entered_again(tmp_path: Path, inside: Inside) -> None:
    context = inside()
    with context, context:
        first = nn.Linear(512, 512)
    with context:
        with pytest.raises(ZeroDivisionError), context:
            1 / 0  # noqa: B018
        second = nn.Linear(512, 512)
        (tmp_path / "inner").mkdir()
        with offcompile.host_init("cpu", spill=tmp_path / "inner"):
            third = nn.Linear(512, 512)
    assert is_on_host(first.weight) and is_on_host(second.weight)
    assert runtime_of(tmp_path).device.slot_of(third.weight) is None
    assert runtime_of(tmp_path / "inner").device.slot_of(third.weight) is not None
    assert not is_on_host(torch.empty(512, 512))


def test_other_threads_notice_nothing(inside: Inside) -> None:
    made: list[nn.Module] = []
    with inside():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(512, 512)))
        thread.start()
        thread.join()
    assert not is_on_host(made[0].weight)


def test_many_small_parameters_take_few_files(tmp_path: Path, inside: Inside) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with inside():
        model = nn.ParameterList(torch.full((1,), float(i)) for i in range(3000))
    assert all(is_on_host(p) for p in model)
    assert [p.item() for p in model] == list(range(3000))
    assert len(os.listdir("/proc/self/fd")) - before < 32
    store = store_of(tmp_path)
    assert store.used_bytes == 4 * 3000
    del model
    gc.collect()
    assert store.slot_of(torch.ones(1)) is None
    assert store.used_bytes == 0


def test_memory_of_dropped_tensors_is_used_again(tmp_path: Path, inside: Inside) -> None:
    with inside():
        kept = nn.Linear(1024, 1024, bias=False)
        places = {torch.empty(1024, 1024 - 128 * (i % 4)).data_ptr() for i in range(40)}
        files = {id(store_of(tmp_path).slot_of(kept.weight)._file)}  # type: ignore[union-attr]
        for _ in range(20):
            one = nn.Linear(700, 700, bias=False)
            slot = store_of(tmp_path).slot_of(one.weight)
            assert slot is not None
            files.add(id(slot._file))
            del one, slot
    assert len(places) <= 4 and len(files) <= 3


def test_a_compiled_step_uses_the_weights_where_they_were_born(
    tmp_path: Path, inside: Inside
) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = [m for _ in range(3) for m in (nn.Linear(384, 384), nn.GELU())]
        return nn.Sequential(*layers, nn.LayerNorm(384))

    def train(forward: Any, model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses = []
        for step in range(3):
            x = torch.randn(16, 384, generator=torch.Generator().manual_seed(step))
            loss = forward(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *model.parameters()]

    torch._dynamo.reset()
    plain = build()
    expected = train(torch.compile(plain, backend="aot_eager"), plain)
    torch._dynamo.reset()
    with inside():
        model = build()
    places = [p.data_ptr() for p in model.parameters() if p.dim() > 1]
    options = {"memory": "minimum", "lowering": "aot_eager", "spill": str(tmp_path)}
    found = train(torch.compile(model, backend="offcompile", options=options), model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert places == [p.data_ptr() for p in model.parameters() if p.dim() > 1]
    runtime_of(tmp_path)  # the only one there
    torch._dynamo.reset()


def test_code_compiled_within_it_runs(inside: Inside) -> None:
    torch._dynamo.reset()
    with inside():
        model = nn.Linear(512, 512)
        x = torch.ones(4, 512)
        forward = torch.compile(lambda x: model(x) + torch.zeros(4, 512), backend="aot_eager")
        assert torch.equal(forward(x), model(x))
    torch._dynamo.reset()


def test_such_a_model_is_like_any_other(tmp_path: Path, inside: Inside) -> None:
    with inside():
        model = zoo()
        within = copy.deepcopy(model)
        model.half()
        assert [n for n, p in model.named_parameters() if not is_on_host(p)] == []
        model.to("cpu", torch.float32)
        assert [n for n, p in within.named_parameters() if not is_on_host(p)] == []
        assert [n for n, p in model.named_parameters() if not is_on_host(p)] == []
    twin = copy.deepcopy(model["lstm"])
    expected = model.state_dict()
    torch.save(expected, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt")
    again = pickle.loads(pickle.dumps(model["embedding"]))
    assert all(torch.equal(loaded[k], v) for k, v in expected.items())
    assert torch.equal(again.weight, model["embedding"].weight)
    with torch.no_grad():
        model["lstm"].weight_ih_l0.zero_()
    assert bool(twin.weight_ih_l0.any())
    before = model["embedding"].weight.clone()
    model["embedding"].share_memory()
    assert model["embedding"].weight.is_shared() and torch.equal(model["embedding"].weight, before)
    model["convolution"].bfloat16()
    assert model["convolution"].weight.dtype == torch.bfloat16


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Embedding(1000, 100), "b": nn.Linear(100, 1000, bias=False)})
    model["b"].weight = model["a"].weight
    return model


def test_ties_hold(tmp_path: Path, inside: Inside) -> None:
    with inside():
        model = tied()
        assert model["a"].weight is model["b"].weight
        torch.save(model.state_dict(), tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", mmap=True)
        model.load_state_dict(loaded, assign=True)
        del loaded
        # two parameters on the same memory, just like without the context
        assert model["a"].weight.data_ptr() == model["b"].weight.data_ptr()
        assert is_on_host(model["a"].weight)
        moved = tied().double()
        assert moved["a"].weight is moved["b"].weight and is_on_host(moved["a"].weight)


@pytest.mark.parametrize("kind", ["GPT2Config", "BertConfig", "T5Config"])
def test_hugging_face_models(kind: str, tmp_path: Path, inside: Inside) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2Config": {"n_embd": 64, "n_layer": 2, "n_head": 2, "eos_token_id": 1},
        "BertConfig": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        "T5Config": {"d_model": 64, "num_layers": 2, "num_heads": 2, "d_ff": 128},
    }
    config = getattr(transformers, kind)(vocab_size=2000, bos_token_id=1, **sizes[kind])
    makers = {
        "GPT2Config": transformers.AutoModelForCausalLM,
        "BertConfig": transformers.AutoModelForMaskedLM,
        "T5Config": transformers.AutoModelForSeq2SeqLM,
    }
    torch.manual_seed(0)
    plain = makers[kind].from_config(config)
    torch.manual_seed(0)
    with inside():
        model = makers[kind].from_config(config)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    with inside():
        loaded = makers[kind].from_pretrained(tmp_path)
        streamed = makers[kind].from_config(config)
    offcompile.load_weights(streamed, tmp_path)
    for other in (model, loaded, streamed):
        assert [n for n, p in other.named_parameters() if not is_on_host(p)] == []
        expected, found = plain.state_dict(), other.state_dict()
        assert list(found) == list(expected)
        assert all(torch.equal(found[k], v) for k, v in expected.items())
        # tied parameters stay tied
        assert len(set(map(id, other.parameters()))) == len(set(map(id, plain.parameters())))
        assert len({p.data_ptr() for p in found.values()}) == len(
            {p.data_ptr() for p in expected.values()}
        )


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"host_init\('meta'\): weights can leave"):
        offcompile.host_init("meta")
    with pytest.raises(OffloadError, match="does not exist"):
        offcompile.host_init("cpu", spill=tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="host_memory"):
        offcompile.host_init("cpu", host_memory="much")
    if not torch.cuda.is_available():
        with pytest.raises(OffloadError, match="sees no CUDA device"):
            offcompile.host_init("cuda:1")


def test_weights_that_exceed_memory(tmp_path: Path) -> None:
    limit = 48 * MIB  # of 128 MiB of weights

    def run(born: bool) -> dict[str, Any]:
        task = json.dumps({"born": born, "limit": limit, "directory": str(tmp_path)})
        done = warm.run(
            [sys.executable, str(CHILD), task],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    dead = run(born=False)
    assert dead["error"] is not None and "memory" in dead["error"].lower()
    found = run(born=True)
    assert found["error"] is None and found["equal"]
    stages = ["build", "save", "load safetensors", "load torch", "assign"]
    assert list(found["anon_bytes"]) == stages
    assert max(found["anon_bytes"].values()) < 16 * MIB, found["anon_bytes"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_the_gpu() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024))

    with torch.device("cuda"):
        plain = build()
    with offcompile.host_init("cuda"):
        before = torch.cuda.memory_allocated()
        model = build()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < MIB
    x = torch.randn(8, 1024, device="cuda")
    assert torch.equal(model(x), plain(x))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.is_cuda and is_on_host(mine) and torch.equal(mine, theirs)
