"""Codecs on the CPU: what is packed comes back, and every engine gives the reference's bytes."""

from __future__ import annotations

import threading

import pytest
import torch
from codec_cases import BF16, DTYPES, F16, F32, activations, as_bytes, bits
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.codecs import measure, table
from offcompile.ir import OffloadError
from offcompile.runtime.codecs import CODEC_NAMES, codec, density, engine, sampled_density
from offcompile.runtime.codecs import engines as engines_module
from offcompile.runtime.codecs.engines import CodecEngine, check_engine
from offcompile.runtime.codecs.layout import MOST_ELEMENTS, PackedLayout
from offcompile.runtime.codecs.native import Native
from offcompile.runtime.codecs.reference import Reference

#: empty, one element, about one row and several, and about a vector of each width
SIZES = st.one_of(
    st.sampled_from((0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 1280)),
    st.integers(0, 2000),
)
DENSITIES = st.sampled_from((0.0, 0.01, 0.3, 0.5, 0.95, 1.0))
SEEDS = st.integers(0, 2**31)
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(scope="module", params=["reference", "64", "256", "512"])
def any_engine(request: pytest.FixtureRequest) -> CodecEngine:
    if request.param == "reference":
        return Reference()
    return Native(int(request.param))


def packed(name: str, x: torch.Tensor) -> torch.Tensor:
    """Just the bytes that were used, with nothing behind them."""
    worst = codec(name).worst_bytes(x.numel(), x.dtype)
    room = torch.full((worst + 64,), 0xA5, dtype=torch.uint8)
    used = codec(name).pack(x, room)
    assert used <= worst
    assert bool((room[used if used == worst else worst :] == 0xA5).all())
    return room[:used].clone()


def unpacked(name: str, x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    around = torch.full((x.nbytes + 64,), 0x5A, dtype=torch.uint8)
    out = around[32 : 32 + x.nbytes].view(x.dtype)
    codec(name).unpack(held, out)
    assert bool((around[:32] == 0x5A).all() and (around[32 + x.nbytes :] == 0x5A).all())
    return out


@QUICK
@given(st.sampled_from(DTYPES), SIZES, DENSITIES, SEEDS)
@example(torch.uint8, 128, 1.0, 0)
def test_bitmask_gives_back_every_bit(
    dtype: torch.dtype, numel: int, share: float, seed: int
) -> None:
    x = bits(dtype, numel, share, seed)
    held = packed("bitmask", x)
    assert torch.equal(as_bytes(unpacked("bitmask", x, held)), as_bytes(x))
    assert len(held) == codec("bitmask").packed_bytes(numel, dtype, density(x))


@QUICK
@given(st.sampled_from(("fp16", "bf16")), SIZES, DENSITIES, SEEDS)
def test_a_stash_is_what_torch_rounds_to(name: str, numel: int, share: float, seed: int) -> None:
    x = bits(F32, numel, share, seed)
    dtype = {"fp16": F16, "bf16": BF16}[name]
    expected = x.to(dtype).float()
    for chosen in (name, f"bitmask+{name}"):
        found = unpacked(chosen, x, packed(chosen, x))
        assert torch.equal(found.isnan(), expected.isnan())
        kept = ~found.isnan()
        assert torch.equal(as_bytes(found[kept]), as_bytes(expected[kept]))
    assert len(packed(name, x)) == 2 * numel


@QUICK
@given(st.sampled_from((F32, F16, BF16, torch.float64)), SIZES, DENSITIES, SEEDS)
def test_signs_answer_whether_it_is_at_most_zero(
    dtype: torch.dtype, numel: int, share: float, seed: int
) -> None:
    x = bits(dtype, numel, share, seed)
    held = packed("sign", x)
    assert len(held) == 16 * -(-numel // 128)
    back = unpacked("sign", x, held)
    assert torch.equal(back <= 0, x <= 0)
    assert bool(((back == 0) | (back == 1)).all())


@pytest.mark.parametrize("dtype", [F32, F16, torch.float64])
def test_signs_are_enough_for_the_gradient_of_a_relu(dtype: torch.dtype) -> None:
    x, gradient = bits(dtype, 1111, 0.6, 5), bits(dtype, 1111, 1.0, 6)
    back = unpacked("sign", x, packed("sign", x))
    backward = torch.ops.aten.threshold_backward
    assert torch.equal(as_bytes(backward(gradient, back, 0)), as_bytes(backward(gradient, x, 0)))


@settings(QUICK, max_examples=40)
@given(st.sampled_from(DTYPES), SIZES, DENSITIES, SEEDS)
def test_engines_give_the_same_bytes(
    any_engine: CodecEngine, dtype: torch.dtype, numel: int, share: float, seed: int
) -> None:
    x = bits(dtype, numel, share, seed)
    room = PackedLayout.of(numel, dtype).worst_bytes
    found, expected = (torch.full((room,), 3, dtype=torch.uint8) for _ in range(2))
    used = any_engine.pack(x, found, None)
    assert used == Reference().pack(x, expected, None)
    assert torch.equal(found[:used], expected[:used])
    back = torch.empty_like(x)
    any_engine.unpack(found[:used].clone(), back, None)
    assert torch.equal(as_bytes(back), as_bytes(x))
    assert any_engine.count(x, None) == Reference().count(x, None)


@pytest.mark.parametrize("numel", [0, 1, 31, 127, 128, 129, 4000])
def test_engines_round_and_tell_signs_alike(any_engine: CodecEngine, numel: int) -> None:
    for seed, dtype in enumerate((F16, BF16)):
        x = activations(numel, seed)
        room = PackedLayout.of(numel, dtype).worst_bytes
        found, expected = (torch.zeros(room, dtype=torch.uint8) for _ in range(2))
        used = any_engine.pack(x, found, dtype)
        assert used == Reference().pack(x, expected, dtype)
        assert torch.equal(found[:used], expected[:used])
        back = torch.empty_like(x)
        any_engine.unpack(found, back, dtype)
        assert torch.equal(as_bytes(back), as_bytes(x.to(dtype).float()))
    for dtype in (F32, F16, BF16, torch.float64):
        x = bits(dtype, numel, 0.7, numel)
        found, expected = (torch.ones(16 * -(-numel // 128), dtype=torch.uint8) for _ in range(2))
        any_engine.pack_signs(x, found)
        Reference().pack_signs(x, expected)
        assert torch.equal(found, expected)
        ones, meant = torch.empty_like(x), torch.empty_like(x)
        any_engine.unpack_signs(found, ones)
        Reference().unpack_signs(found, meant)
        assert torch.equal(ones, meant)


def test_every_pattern_is_rounded_as_torch_rounds(any_engine: CodecEngine) -> None:
    # every value of each 16-bit type, and values beside and between neighbours
    halves = torch.arange(1 << 16, dtype=torch.int32)
    patterns = [(halves << 16) | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    exact = halves.to(torch.int16).view(F16).float().view(torch.int32)
    patterns += [exact + low for low in (-1, 1, 0xFFF, 0x1000, 0x1001)]
    patterns.append((torch.arange(-4097, 4097).float() * 2.0**-25).view(torch.int32))
    x = torch.cat(patterns).view(F32)
    for dtype in (F16, BF16):
        narrow, wide = torch.empty(x.shape, dtype=dtype), torch.empty_like(x)
        any_engine.cast(x, narrow)
        any_engine.cast(narrow, wide)
        expected = x.to(dtype)
        number = ~expected.isnan()
        assert torch.equal(narrow.isnan(), ~number)
        assert torch.equal(as_bytes(narrow[number]), as_bytes(expected[number]))
        assert torch.equal(as_bytes(wide[number]), as_bytes(expected[number].float()))
        assert torch.equal(wide.isnan(), ~number)


@settings(QUICK, max_examples=30)
@given(st.integers(1, 20), st.integers(0, 127), SEEDS)
def test_pieces_of_whole_rows_are_independent(rows: int, ragged: int, seed: int) -> None:
    x = bits(BF16, 3 * 128 * rows + ragged, 0.4, seed)
    pieces = x.split(128 * rows)
    back = torch.cat([unpacked("bitmask", p, packed("bitmask", p)) for p in pieces])
    assert torch.equal(as_bytes(back), as_bytes(x))


@settings(QUICK, max_examples=150)
@given(st.integers(1, 700), SEEDS, st.data())
def test_damaged_bytes_do_no_harm(
    any_engine: CodecEngine, numel: int, seed: int, data: st.DataObject
) -> None:
    """Whatever the bytes: an error or some values, and nothing beside the output is written."""
    x = bits(F32, numel, 0.5, seed)
    held = packed("bitmask", x)
    at = data.draw(st.integers(0, len(held) - 1))
    if data.draw(st.booleans()):
        held = held[:at].clone()
    else:
        held[at] ^= data.draw(st.integers(1, 255))
    around = torch.full((x.nbytes + 1024,), 0x5A, dtype=torch.uint8)
    out = around[512 : 512 + x.nbytes].view(F32)
    layout = PackedLayout.of(numel, F32)
    changes_masks = layout.masks_at <= at < layout.values_at or len(held) < layout.bytes_for(0)
    try:
        any_engine.unpack(held, out, None)
    except OffloadError as error:
        assert "changed since they were packed" in str(error)
    else:
        # one byte of a mask changed, and as many bits set as before
        assert not changes_masks or bits_set(held, layout) == bits_set(packed("bitmask", x), layout)
    assert bool((around[:512] == 0x5A).all() and (around[512 + x.nbytes :] == 0x5A).all())


def bits_set(held: torch.Tensor, layout: PackedLayout) -> int:
    masks = held[layout.masks_at : layout.values_at].to(torch.int64)
    return sum(int((masks >> bit & 1).sum()) for bit in range(8))


def test_cut_short_is_told(any_engine: CodecEngine) -> None:
    x = torch.ones(300)
    held = packed("bitmask", x)
    with pytest.raises(OffloadError, match=rf"{len(held) - 1} packed bytes of 300 elements"):
        any_engine.unpack(held[:-1], torch.empty(300), None)


# --- densities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_density_counts_bits(dtype: torch.dtype) -> None:
    x = bits(dtype, 5000, 0.4, 1)
    width = min(dtype.itemsize, 8)
    words = as_bytes(x).view(-1, width)
    assert density(x) == float((words != 0).any(1).double().mean())
    assert sampled_density(x) == density(x)


def test_density_of_shapes_and_of_nothing() -> None:
    x = activations(4 * 6 * 10 * 12).view(4, 6, 10, 12)
    assert density(x) == density(x.contiguous(memory_format=torch.channels_last))
    assert density(x[:, ::2]) == density(x[:, ::2].clone())
    assert density(torch.empty(0)) == sampled_density(torch.empty(0, 3)) == 0.0
    assert density(torch.tensor([0.0, -0.0, float("nan"), 1e-45])) == 0.75
    assert density(torch.ones(3, requires_grad=True)) == 1.0


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_a_sample_is_near(
    any_engine: CodecEngine, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offcompile.runtime.codecs.densities.engine", lambda: any_engine)
    x = bits(F16, 1 << 20, share, 3)
    assert abs(sampled_density(x) - share) < 0.01
    # channels of which every other one is empty: rows at equal steps would meet but one kind
    x = torch.ones(1 << 14, 128)
    x[::2] = 0
    assert abs(sampled_density(x) - 0.5) < 0.02


# --- the contract ---------------------------------------------------------------------------------


def test_names_and_what_is_lossless() -> None:
    assert CODEC_NAMES == ("bitmask", "fp16", "bf16", "bitmask+fp16", "bitmask+bf16", "sign")
    assert [n for n in CODEC_NAMES if codec(n).lossless] == ["bitmask"]
    assert [codec(n).name for n in CODEC_NAMES] == list(CODEC_NAMES)
    with pytest.raises(OffloadError, match=r'no codec "zip".*bitmask, fp16'):
        codec("zip")


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_worst_is_what_full_tensors_take(name: str) -> None:
    for numel in (0, 1, 128, 1000):
        x = torch.ones(numel)
        assert len(packed(name, x)) == codec(name).worst_bytes(numel, F32)


@pytest.mark.parametrize("name", [n for n in CODEC_NAMES if n != "bitmask"])
def test_what_a_codec_does_not_take_is_refused(name: str) -> None:
    assert not codec(name).takes(torch.int32)
    with pytest.raises(OffloadError, match=rf'"{name.replace("+", ".")}" takes torch.*int32'):
        codec(name).worst_bytes(10, torch.int32)


def test_bad_tensors_are_refused() -> None:
    mask = codec("bitmask")
    x, room = torch.ones(256), torch.zeros(5000, dtype=torch.uint8)
    with pytest.raises(OffloadError, match=r"shape \(16, 16\).*give a flat contiguous"):
        mask.pack(x.view(16, 16), room)
    with pytest.raises(OffloadError, match=r"strides \(2,\)"):
        mask.pack(x[::2], room)
    worst = mask.worst_bytes(256, F32)
    with pytest.raises(OffloadError, match=rf"has 100 elements.*at least {worst} of torch.uint8"):
        mask.pack(x, room[:100])
    with pytest.raises(OffloadError, match=r"torch.int8: give at least"):
        mask.pack(x, room.view(torch.int8))
    with pytest.raises(OffloadError, match="to be unpacked has 10 elements"):
        mask.unpack(room[:10], x)
    with pytest.raises(OffloadError, match=rf"at most {MOST_ELEMENTS} go at once"):
        mask.worst_bytes(2**31, F32)


def test_threads_pack_at_the_same_time() -> None:
    xs = [activations(100_000, seed) for seed in range(4)]
    alone = [packed("bitmask", x) for x in xs]
    found: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        for _ in range(5):
            found[i] = packed("bitmask", xs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], alone[i]) for i in range(4))


def test_calls_release_the_interpreter_s_lock() -> None:
    python_api = 4  # ctypes: the lock is kept
    calls = Native()._calls
    assert calls
    assert [name for name, call in calls.items() if call._flags_ & python_api] == []


def test_rates_are_told_beside_a_copy() -> None:
    row = measure("bitmask", F16, 4096, 0.5, rounds=3)
    assert len(row.rates) == 4
    assert all(rate > 0 for rate in row.rates + row.shares)
    head, _, line = table([row])
    assert head.count("|") == line.count("|")
    assert line.startswith("| bitmask | float16 | 4 KiB | 50% | ")


# --- which engine ---------------------------------------------------------------------------------


def test_compiled_code_is_what_runs_here() -> None:
    check_engine(engine())
    assert engine().name.startswith("C++"), engine().name


@pytest.fixture
def unchosen() -> object:
    engines_module._chosen.cache_clear()
    yield
    engines_module._chosen.cache_clear()


def test_without_a_compiler_numpy_does_it_with_one_warning(
    unchosen: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> CodecEngine:
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(engines_module, "Native", missing)
    with pytest.warns(RuntimeWarning, match=r"NumPy.*no working C\+\+ compiler.*g\+\+") as told:
        assert engine().name == "NumPy"
    assert engine().name == "NumPy"
    assert len(told) == 1
    x = activations(1000)
    assert torch.equal(unpacked("bitmask", x, packed("bitmask", x)), x)


def test_modes_of_the_caller_do_not_matter(unchosen: object) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert engine().name.startswith("C++")
    with torch.device("meta"):
        engines_module._chosen.cache_clear()
        assert engine().name.startswith("C++")


def test_an_engine_that_errs_is_not_used(unchosen: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Reference):
        name = "wrong"

        def pack(self, x: torch.Tensor, out: torch.Tensor, stash: torch.dtype | None) -> int:
            used = super().pack(x, out, stash)
            if x.dtype == torch.float64:
                out[used - 1] ^= 1
            return used

    monkeypatch.setattr(engines_module, "Native", Wrong)
    with pytest.warns(RuntimeWarning, match=r"wrong packs torch.float64 otherwise"):
        assert engine().name == "NumPy"


def test_compiling_leaves_arithmetic_as_it_is() -> None:
    """Some flags make a processor take denormals for zero as soon as a library is loaded."""
    assert engine().name
    assert float(torch.tensor([1e-40]) * 1) != 0.0
