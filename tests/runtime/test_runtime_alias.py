"""Tensors over pinned host memory: what torch is told, what they keep alive, what is refused.

There is no GPU here: the way through DLPack is taken for real, on the CPU.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm
from host_fakes import FakeRegistrar
from torch.utils.dlpack import from_dlpack

from offcompile.ir import OffloadError
from offcompile.runtime.base import host_limits, once
from offcompile.runtime.memory import alias as module
from offcompile.runtime.memory import pinning
from offcompile.runtime.memory.alias import (
    ArrayInterface,
    alias_bytes,
    check_alias,
    cuda_alias,
    dlpack_capsule,
    prove_alias,
    return_capsule,
)
from offcompile.runtime.memory.host_arena import HostArena, HostFull

PAGE = 4096
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_limits, "growth_bounds", list)
    monkeypatch.setattr(once, "_done", {})
    module._problem_of_aliases.cache_clear()
    yield
    pinning.sweep()
    assert not module._lent


def pinned_arena(nbytes: int = 4 * PAGE) -> HostArena:
    return HostArena(nbytes, nbytes, FakeRegistrar())


# -- what torch is told ------------------------------------------------------------------------


def test_the_interface_tells_torch_what_it_needs() -> None:
    owner = torch.zeros(64, dtype=torch.uint8)
    told = ArrayInterface(owner, owner.data_ptr(), 64).__cuda_array_interface__
    assert told == {
        "shape": (64,),
        "typestr": "|u1",
        "data": (owner.data_ptr(), False),
        "version": 3,
    }
    assert hasattr(ArrayInterface(owner, 0, 1), "__cuda_array_interface__")


def test_the_interface_keeps_the_memory() -> None:
    arena = pinned_arena()
    block = arena.block(PAGE)
    told = ArrayInterface(block.tensor, block.address, PAGE)
    del block
    assert arena.used_bytes == PAGE
    del told
    assert arena.used_bytes == 0


def test_a_capsule_for_cuda_names_the_device_and_the_bytes() -> None:
    owner = torch.zeros(64, dtype=torch.uint8)
    capsule, number = dlpack_capsule(owner, owner.data_ptr(), 64, CUDA)
    managed, _, kept = module._lent[number]
    tensor = managed.tensor
    assert 'capsule object "dltensor"' in repr(capsule)
    assert (tensor.device_type, tensor.device_id) == (2, 1)
    assert (tensor.data, tensor.ndim, tensor.shape[0]) == (owner.data_ptr(), 1, 64)
    assert (tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset) == (1, 8, 1, 0)
    assert not tensor.strides
    assert kept is owner
    return_capsule(number)


def test_a_capsule_that_nobody_took_lets_go() -> None:
    arena = pinned_arena()
    block = arena.block(PAGE)
    _capsule, number = dlpack_capsule(block.tensor, block.address, PAGE, CPU)
    block.free()
    assert arena.used_bytes == PAGE
    return_capsule(number)
    return_capsule(number)
    assert arena.used_bytes == 0


def test_a_capsule_is_taken_once_and_its_deleter_lets_go() -> None:
    arena = pinned_arena()
    block = arena.block(PAGE)
    capsule, number = dlpack_capsule(block.tensor, block.address, PAGE, CPU)
    taken = from_dlpack(capsule)
    assert "used_dltensor" in repr(capsule)
    assert taken.data_ptr() == block.address
    with pytest.raises(RuntimeError):
        from_dlpack(capsule)
    block.free()
    del capsule
    assert (number in module._lent, arena.used_bytes) == (True, PAGE)
    del taken
    assert (number in module._lent, arena.used_bytes) == (False, 0)


# -- aliases -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex64],
    ids=str,
)
def test_an_alias_is_the_memory_itself(dtype: torch.dtype) -> None:
    arena = pinned_arena()
    block = arena.block(24 * dtype.itemsize)
    alias = cuda_alias(block, CPU, dtype, (4, 6))
    assert (alias.dtype, tuple(alias.shape), alias.stride()) == (dtype, (4, 6), (6, 1))
    assert alias.data_ptr() == block.address
    assert alias.untyped_storage().nbytes() == 24 * dtype.itemsize
    block.tensor.zero_()
    alias.fill_(1)
    assert block.tensor.view(dtype).tolist() == [1] * 24
    block.tensor.zero_()
    assert not alias.to(torch.bool).any()


def test_strides_are_kept_and_only_what_they_reach_is_aliased() -> None:
    arena = pinned_arena()
    block = arena.block(PAGE)
    floats = block.tensor.view(torch.float32).copy_(torch.arange(1024.0))
    alias = cuda_alias(block, CPU, torch.float32, (3, 2), (1, 5))
    assert alias.stride() == (1, 5)
    assert alias.tolist() == [[0.0, 5.0], [1.0, 6.0], [2.0, 7.0]]
    assert alias.untyped_storage().nbytes() == 8 * 4
    assert cuda_alias(block, CPU, torch.float32, (), ()).item() == 0.0
    expanded = cuda_alias(floats[7:8], CPU, torch.float32, (3,), (0,))
    assert expanded.tolist() == [7.0] * 3


def test_a_part_of_a_block_can_be_aliased() -> None:
    arena = pinned_arena()
    block = arena.block(PAGE)
    part = block.tensor[64:128]
    alias = cuda_alias(part, CPU, torch.int32, (16,)).fill_(-1)
    assert alias.data_ptr() == block.address + 64
    assert block.tensor[64:128].tolist() == [255] * 64


def test_an_alias_of_a_parameter_has_no_part_in_its_graph() -> None:
    arena = pinned_arena()
    weight = torch.nn.Parameter(arena.block(64).tensor.view(torch.float32).fill_(1.0))
    alias = cuda_alias(weight, CPU, torch.float32, (4, 4))
    assert not alias.requires_grad
    assert alias.data_ptr() == weight.data_ptr()


def test_what_has_no_elements_is_fresh_memory() -> None:
    for shape in ((0,), (3, 0, 2)):
        # not even a pinned arena is needed for nothing
        alias = cuda_alias(torch.empty(0, dtype=torch.uint8), CPU, torch.float16, shape)
        assert (tuple(alias.shape), alias.dtype) == (shape, torch.float16)
        assert alias.is_contiguous()


# -- lifetime ----------------------------------------------------------------------------------


def test_an_alias_keeps_a_freed_block_from_being_handed_out() -> None:
    arena = pinned_arena(2 * PAGE)
    block = arena.block(PAGE)
    alias = cuda_alias(block, CPU, torch.float32, (1024,)).fill_(4.0)
    block.free()
    other = arena.block(PAGE)
    assert other.address != block.address
    other.tensor.fill_(255)
    with pytest.raises(HostFull):
        arena.block(1)
    assert alias.tolist() == [4.0] * 1024
    view = alias[5:9].view(torch.int32)
    del alias
    assert arena.used_bytes == 2 * PAGE
    del view
    assert arena.block(PAGE).address == block.address


def test_an_alias_outlives_block_and_arena_and_keeps_the_registration() -> None:
    registrar = FakeRegistrar()
    arena = HostArena(PAGE, PAGE, registrar)
    alias = cuda_alias(arena.block(PAGE), CPU, torch.uint8, (PAGE,)).fill_(6)
    arena.close()
    del arena
    gc.collect()
    pinning.sweep()
    assert len(registrar.held) == 1
    assert alias.tolist() == [6] * PAGE
    del alias
    pinning.sweep()
    assert not registrar.held and not registrar.wrong


def test_autograd_that_saved_an_alias_keeps_the_block() -> None:
    arena = pinned_arena()
    saved = cuda_alias(arena.block(16), CPU, torch.float32, (4,)).fill_(2.0)
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * saved).sum()
    del saved
    assert arena.used_bytes == 256
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 4
    del loss
    assert arena.used_bytes == 0


def test_aliases_may_die_on_any_thread() -> None:
    arena = pinned_arena(64 * PAGE)
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(50):
            alias = cuda_alias(arena.block(PAGE), CPU, torch.uint8, (PAGE,)).fill_(value)
            weight = torch.ones(PAGE, requires_grad=True)
            # dies on the thread of autograd's engine
            (weight * alias).sum().backward()
            if weight.grad is None or not bool((weight.grad == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (arena.used_bytes, len(module._lent)) == (0, 0)


def test_interpreters_end_in_peace_while_aliases_live() -> None:
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'support')!r})\n"
        "import torch\n"
        "from host_fakes import FakeRegistrar\n"
        "from offcompile.runtime.memory.alias import cuda_alias\n"
        "from offcompile.runtime.memory.host_arena import HostArena\n"
        "arena = HostArena(1 << 20, 1 << 20, FakeRegistrar())\n"
        "kept = cuda_alias(arena.block(4096), torch.device('cpu'), torch.uint8, (4096,))\n"
        # dies when the modules have been taken apart
        "torch.kept = [kept]\n"
        "torch.kept.append(torch.kept)\n"
        "class Late:\n"
        "    def __del__(self): kept[0] = 1\n"
        "late = Late()\n"
    )
    done = warm.run([sys.executable, "-c", script])
    assert (done.returncode, done.stderr) == (0, "")


# -- refusals ----------------------------------------------------------------------------------


def test_memory_that_is_not_pinned_is_refused() -> None:
    with pytest.raises(OffloadError, match=r"64 bytes .* not in a pinned arena.*registered with"):
        cuda_alias(torch.zeros(64, dtype=torch.uint8), CPU, torch.uint8, (64,))
    with pytest.warns(RuntimeWarning, match="cannot be pinned"):
        arena = HostArena(PAGE, PAGE, FakeRegistrar(refuse_at=1))
    with pytest.raises(OffloadError, match="whose `pinned` is true"):
        cuda_alias(arena.block(64), CPU, torch.uint8, (64,))
    # the CUDA way asks the same question before torch is asked for anything
    with pytest.raises(OffloadError, match="whose `pinned` is true"):
        cuda_alias(arena.block(64), CUDA, torch.uint8, (64,))


def test_what_does_not_fit_or_is_not_possible_is_refused() -> None:
    arena = pinned_arena()
    block = arena.block(100)
    with pytest.raises(OffloadError, match="104 bytes does not fit: there are 100 bytes"):
        cuda_alias(block, CPU, torch.float32, (26,))
    with pytest.raises(OffloadError, match="68 bytes does not fit: there are 64 bytes"):
        cuda_alias(block.tensor[:64], CPU, torch.float32, (2, 2), (15, 1))
    with pytest.raises(OffloadError, match="must begin at a multiple of 4 bytes"):
        cuda_alias(block.tensor[1:], CPU, torch.float32, (4,))
    with pytest.raises(OffloadError, match="as many of both, none negative"):
        cuda_alias(block, CPU, torch.float32, (4,), (1, 1))
    with pytest.raises(OffloadError, match="none negative"):
        cuda_alias(block, CPU, torch.float32, (4,), (-1,))
    with pytest.raises(OffloadError, match="only contiguous CPU tensors"):
        cuda_alias(block.tensor[::2], CPU, torch.uint8, (4,))
    with pytest.raises(OffloadError, match="no alias of host memory on meta"):
        cuda_alias(block, torch.device("meta"), torch.uint8, (4,))
    block.free()
    with pytest.raises(OffloadError, match="100 bytes was used after free"):
        cuda_alias(block, CPU, torch.uint8, (4,))


def test_when_torch_takes_neither_way_both_answers_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def refuse(name: str) -> object:
        def way(owner: object, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
            tried.append(name)
            raise RuntimeError(f"{name} says no\nand more")

        return way

    monkeypatch.setattr(module, "_by_interface", refuse("interface"))
    monkeypatch.setattr(module, "_by_dlpack", refuse("capsule"))
    owner = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(OffloadError, match=r"cuda:1: interface says no; capsule says no\. Copies"):
        alias_bytes(owner, owner.data_ptr(), 8, CUDA)
    assert tried == ["interface", "capsule"]


def test_dlpack_is_taken_where_the_interface_makes_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = torch.zeros(8, dtype=torch.uint8)

    class Pretended:
        """An alias on the device, which there is none of here."""

        device = CUDA

        def data_ptr(self) -> int:
            return owner.data_ptr()

    monkeypatch.setattr(module, "_by_interface", lambda owner, *_: owner.clone())
    monkeypatch.setattr(module, "_by_dlpack", lambda *_: Pretended())
    assert isinstance(alias_bytes(owner, owner.data_ptr(), 8, CUDA), Pretended)


def test_a_capsule_that_torch_refuses_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(capsule: object) -> torch.Tensor:
        raise RuntimeError("no")

    monkeypatch.setattr(module, "from_dlpack", refuse)
    arena = pinned_arena()
    with pytest.raises(OffloadError, match="made no alias of host memory on cpu: no"):
        cuda_alias(arena.block(64), CPU, torch.uint8, (64,))
    assert not module._lent
    gc.collect()
    assert arena.used_bytes == 0


# -- the proof ---------------------------------------------------------------------------------


def test_the_proof_holds_for_a_real_alias() -> None:
    arena = pinned_arena()
    block = arena.block(PAGE)
    alias = cuda_alias(block, CPU, torch.uint8, (PAGE,))
    synchronized: list[bool] = []
    prove_alias(block.tensor, alias, lambda: synchronized.append(True))
    assert synchronized == [True]


def test_the_proof_finds_a_copy_and_a_one_way_view() -> None:
    host = torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(OffloadError, match="what cpu writes through an alias does not show in"):
        prove_alias(host, torch.zeros_like(host), lambda: None)
    late = torch.zeros_like(host)

    def synchronize() -> None:
        host.copy_(late)

    with pytest.raises(OffloadError, match="what the host writes does not show on cpu"):
        prove_alias(host, late, synchronize)


def test_the_check_is_made_once_and_remembers_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeRegistrar] = []

    class Registrar(FakeRegistrar):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr("offcompile.runtime.memory.host_arena.CudaRegistrar", Registrar)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    check_alias(CPU)
    check_alias(CPU)
    assert len(made) == 1
    assert not made[0].held


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_check_says_why() -> None:
    with (
        pytest.warns(RuntimeWarning, match="no CUDA device was found"),
        pytest.raises(OffloadError, match="cannot be aliased: they are not in a pinned"),
    ):
        check_alias(torch.device("cuda", 0))
    with pytest.raises(OffloadError, match="cannot be aliased"):
        check_alias(torch.device("cuda", 0))
