"""Checks the asynchronous device by itself: order, memory, errors."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import torch
from async_device import NAME, Controls
from torch import Tensor, nn

from offcompile.runtime.memory.alias import alias_bytes

DEVICE = f"{NAME}:0"
#: delays of a kernel, each ten times the last: a fault that a loaded machine hides shows at more
DELAYS_US = (3e3, 30e3, 300e3)
MIB = 1 << 20
Check = Callable[[Controls], None]


def there(*values: float) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def settle() -> None:
    torch.accelerator.synchronize()


def side_stream() -> torch.Stream:
    return torch.Stream(DEVICE)


def it_is_torch_s_accelerator(controls: Controls) -> None:
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device(NAME)
    x = there(1, 2)
    assert x.device == torch.device(DEVICE) and x.queued().device == x.device
    assert torch.equal((x * 2).cpu(), torch.tensor([2.0, 4.0]))


def kernels_run_behind_the_host(controls: Controls) -> None:
    x = there(1)
    settle()
    with controls.stalled(torch.accelerator.current_stream()):
        y = x + 1
        done = torch.Event(DEVICE)
        done.record()
        assert not done.query(), "a kernel has run while its stream was held up"
    done.synchronize()
    assert done.query() and y.item() == 2


def a_missing_wait_gives_wrong_bits(controls: Controls) -> None:
    for waits in (False, True):
        x = torch.zeros(64, device=DEVICE)
        settle()
        side, added = side_stream(), torch.Event(DEVICE)
        with controls.slow(torch.accelerator.current_stream(), DELAYS_US[1]):
            x += 1
            added.record()
            with side:
                if waits:
                    side.wait_event(added)
                seen = x.clone().cpu()
        settle()
        assert bool(seen.sum() == 64) is waits


def seeds_reorder_streams(controls: Controls) -> None:
    """Without a wait, the results depend on the seed; with it, on nothing."""

    def run(seed: int, waits: bool) -> float:
        x = torch.zeros(64, device=DEVICE)
        settle()
        controls.seed(seed, longest_us=DELAYS_US[0])
        side, added = side_stream(), torch.Event(DEVICE)
        for _ in range(3):
            x += 1
        added.record()
        with side:
            if waits:
                side.wait_event(added)
            seen = x.clone().cpu()
        controls.seed(0)
        settle()
        return float(seen.sum())

    seeds = range(1, 13)
    assert {run(seed, True) for seed in seeds} == {192.0}
    assert any(run(seed, False) != 192.0 for seed in seeds)


def memory_goes_round_at_once(controls: Controls) -> None:
    """On its own stream in order; on another, memory that nobody keeps is overwritten."""
    x = torch.ones(4096, device=DEVICE)
    address = x.data_ptr()
    with controls.stalled(torch.accelerator.current_stream()):
        total = x.sum()
        del x
        y = torch.full((4096,), 3.0, device=DEVICE)
        assert y.data_ptr() == address
    assert total.item() == 4096 and y.sum().item() == 3 * 4096
    side = side_stream()
    for keeps in (True, False):
        x = torch.ones(4096, device=DEVICE)
        settle()
        with controls.stalled(side):
            with side:
                copy = x.clone()
            if keeps:
                x.record_stream(side)
            del x
            torch.accelerator.current_stream().synchronize()
        side.synchronize()
        assert bool((copy == 1).all().cpu()) is keeps


def the_allocator_counts(controls: Controls) -> None:
    gc.collect()
    settle()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
    y = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.memory_allocated() - before == 1024 + MIB
    del y
    assert torch.accelerator.memory_allocated() - before == 1024
    assert torch.accelerator.max_memory_allocated() - before == 1024 + MIB
    assert torch.accelerator.memory_reserved() >= torch.accelerator.memory_allocated()
    del x
    whole = torch.accelerator.get_memory_info()[1]
    controls.limit(torch.accelerator.memory_reserved() + 4 * MIB)
    try:
        torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
    except torch.OutOfMemoryError as error:
        assert str(64 * MIB) in str(error)
    else:
        raise AssertionError("more was given out than there is")
    finally:
        controls.limit(whole)
    torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)


def pinned_copies_are_asynchronous(controls: Controls) -> None:
    x, pinned, pageable = there(1, 2, 3), torch.zeros(3).pin_memory(), torch.zeros(3)
    assert pinned.is_pinned() and not pageable.is_pinned()
    settle()
    stream = torch.accelerator.current_stream()
    with controls.stalled(stream):
        pinned.copy_(x, non_blocking=True)
        assert not pinned.any(), "the copy did not wait for its stream"
        y = pageable.add(5).to(DEVICE, non_blocking=True)  # read before it returns
    stream.synchronize()
    assert torch.equal(pinned, x.cpu()) and torch.equal(y.cpu(), torch.full((3,), 5.0))


def shapes_that_depend_on_data_wait(controls: Controls) -> None:
    before = controls.waits()
    x = there(1, 0, 2, 0)
    assert torch.equal(x.nonzero().cpu(), torch.tensor([[0], [2]]))
    assert x[x > 0].tolist() == [1.0, 2.0]
    _ = torch.addmm(there(1), x[:, None], x[None]).relu().sum(0)
    waited = {n for n, count in controls.waits().items() if count > before.get(n, 0)}
    assert waited == {"aten::nonzero", "aten::index.Tensor_out"} or waited == {
        "aten::nonzero",
        "aten::index.Tensor",
    }, waited


def errors_of_kernels_come_later(controls: Controls) -> None:
    bad = torch.zeros(3, device=DEVICE)[torch.tensor([7], device=DEVICE)]
    try:
        bad.cpu()
    except RuntimeError as error:
        assert "index 7 is out of bounds" in str(error)
    else:
        raise AssertionError("an index out of bounds was no error")


def random_numbers_are_drawn_in_the_host_s_order(controls: Controls) -> None:
    def drawn() -> list[Tensor]:
        torch.manual_seed(5)
        dropped = nn.functional.dropout(torch.ones(64, device=DEVICE))
        return [x.cpu() for x in (torch.rand(9, device=DEVICE), dropped)]

    first = drawn()
    controls.seed(3)
    assert all(torch.equal(a, b) for a, b in zip(first, drawn(), strict=True))
    controls.seed(0)
    state = torch.queued.get_rng_state()
    again = torch.rand(9, device=DEVICE).cpu()
    torch.queued.set_rng_state(state)
    assert torch.equal(again, torch.rand(9, device=DEVICE).cpu())


def touched_by_the_host(controls: Controls) -> None:
    """Ends the process: the host reads a tensor's memory."""
    address = there(1).data_ptr()
    settle()
    print("alive", flush=True)
    ctypes.string_at(address, 4)
    print("read", flush=True)


def read_without_pinning(controls: Controls) -> None:
    """A kernel reaches no host memory that was not pinned."""
    host = torch.zeros(64, dtype=torch.uint8)
    alias = alias_bytes(host, host.data_ptr(), 64, torch.device(DEVICE))
    try:
        alias.add_(1)
    except RuntimeError as error:
        assert "neither device memory nor pinned" in str(error)
    else:
        raise AssertionError("a kernel wrote pageable memory")


OF_THE_DEVICE: tuple[Check, ...] = (
    it_is_torch_s_accelerator,
    kernels_run_behind_the_host,
    a_missing_wait_gives_wrong_bits,
    seeds_reorder_streams,
    memory_goes_round_at_once,
    the_allocator_counts,
    pinned_copies_are_asynchronous,
    shapes_that_depend_on_data_wait,
    errors_of_kernels_come_later,
    random_numbers_are_drawn_in_the_host_s_order,
    read_without_pinning,
)
