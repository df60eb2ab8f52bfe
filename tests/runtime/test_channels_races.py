"""Updates on the host beside a device that computes on: every order that is needed is there.

The CUDA device's own code, carrier and channels run on simulated streams: gradients are made and
sent, the host updates weights while backward goes on, and forward uses them again. No races
whatever the timing, and races with any order taken away.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from cuda_bench import NOTHING, Bench, bench_of, fill
from lengths import some
from simulated import SimulatedDevice
from simulated_streams import Faults
from update_bench import KINDS, SimulatedCarrier, produce, updates_of, use, weight_of

from offcompile.ir import OffloadError
from offcompile.runtime.device import tickets
from offcompile.runtime.device.cuda.copies import CudaCopy
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.interface import Copy, Filled, Point, Slot, Waited
from offcompile.runtime.device.lanes import LaneJob
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Load, Saved

SIZES = (64, 200, 64)


def learn(bench: Bench, seed: int, steps: int = 2) -> None:
    dice, updates = random.Random(seed), updates_of(bench)
    on_host = [dice.random() < 0.6 for _ in SIZES]
    values = [10 * n for n in range(len(SIZES))]
    weights = [weight_of(bench, *w) for w in zip(SIZES, values, on_host, strict=True)]
    for step in range(steps):
        for n, weight in enumerate(weights):
            use(bench, weight, values[n], dice.random() < 0.5, f"forward {step} w{n}")
        waits = []
        for n in reversed(range(len(weights))):
            weight = weights[n]
            use(bench, weight, values[n], dice.random() < 0.5, f"backward {step} w{n}")
            kind = dice.choice(KINDS)
            gradient = produce(bench, SIZES[n], n + 1, kind)
            brought = updates.carrier.bring(weight, gradient, f"g{n}", lent=kind == "lent")
            if kind == "lent":
                bench.streams.launch(fill(77), (), (gradient,), "reuse")
            wait = updates.start(weight, brought, f"w{n}")
            values[n] += n + 1
            late = on_host[n] and dice.random() < 0.5
            if late:
                bench.device.hold(weight, wait)
            else:
                waits.append(wait)
            del gradient, brought, wait
            if dice.random() < 0.5:
                bench.full(64, 99)
        for wait in waits:
            wait()
        updates.carrier.finish()
        waits.clear()
    for n, weight in enumerate(weights):
        use(bench, weight, values[n], dice.random() < 0.5, f"after w{n}")
    updates.channels.close()


def run(program: Callable[[Bench], None], bench: Bench) -> list[str]:
    """Run the program; list its kinds of races, wrong values, and what it left behind."""
    program(bench)
    bench.settle()
    bench.device.shadows.release()
    left = bench.left()
    bench.close()
    kinds = {race.kind for race in bench.streams.races}
    return [*sorted(kinds), *bench.wrong, *([] if left == NOTHING else [str(left)])]


@pytest.mark.parametrize("part", some(range(16), 0))
def test_no_race_whatever_the_timing(part: int) -> None:
    for seed in range(part, 2000, 16):
        bench = bench_of(seed, in_flight_bytes=None if seed % 3 else 600)
        assert run(partial(learn, seed=seed), bench) == [], seed


def test_no_race_with_a_thread_for_each_stream() -> None:
    for seed in range(30):
        bench = bench_of(seed, pace_s=0.0002)
        assert run(partial(learn, seed=seed), bench) == [], seed


# -- with one order taken away -------------------------------------------------------------------


def one_update(
    bench: Bench,
    carrier: type[SimulatedCarrier] = SimulatedCarrier,
    *,
    on_host: bool = True,
    kind: str = "kept",
    read: bool = False,
    used: bool = False,
) -> None:
    """read: the weight, by compute, after its gradient was sent. used: at once, by forward."""
    updates = updates_of(bench, carrier)
    weight = weight_of(bench, 64, 1, on_host)
    updates.carrier.place(weight)
    gradient = produce(bench, 64, 2, kind)
    if read:
        bench.expect(weight, 1, "backward")
    brought = updates.carrier.bring(weight, gradient, "g", lent=kind == "lent")
    if kind == "lent":
        bench.streams.launch(fill(77), (), (gradient,), "reuse")
    wait = updates.start(weight, brought, "w")
    del gradient, brought
    if used and on_host:
        bench.device.hold(weight, wait)
    else:
        wait()
    updates.carrier.finish()
    if used:
        use(bench, weight, 3, in_place=not on_host, tag="next forward")
    updates.channels.close()


PROGRAMS: dict[str, Callable[..., None]] = {
    "sent gradient": partial(one_update),
    "written gradient": partial(one_update, kind="written"),
    "gradient added to": partial(one_update, kind="added"),
    "weight read meanwhile": partial(one_update, kind="sent", read=True),
    "copied weight read meanwhile": partial(one_update, on_host=False, kind="sent", read=True),
    "lent gradient": partial(one_update, kind="lent"),
    "weight used at once": partial(one_update, used=True),
    "copied weight used at once": partial(one_update, on_host=False, used=True),
}


class NothingArrives(CudaDevice):
    def _reach(self, points: Sequence[Point]) -> None:
        return None


class NobodyReads(CudaDevice):
    def _users(self, slot: Slot) -> Sequence[Point | None]:
        return []


class NothingHolds(CudaDevice):
    def claim(self, host: torch.Tensor) -> None:
        return None


class NotDuplicated(SimulatedCarrier):
    def _duplicate(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class BackAtOnce(SimulatedCarrier):
    def updated(self, parameter: torch.Tensor, label: str) -> None:
        copied = self._copied(parameter)
        if copied is not None:
            copied.used = None
        super().updated(parameter, label)


class NotFinished(SimulatedCarrier):
    def finish(self) -> None:
        return None


class NoVersions(CudaDevice):
    """Does not wait for what autograd added to a gradient after it was sent."""

    def await_on_host(
        self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor] = ()
    ) -> Callable[[], None]:
        for tensor in read:
            filled = self._slot(tensor).filled
            assert filled is not None
            self._slot(tensor).filled = Filled(filled.point, tensor._version)
        return super().await_on_host(read, [])


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_for_planted_faults_are_clean(program: str) -> None:
    for seed in range(40):
        assert run(PROGRAMS[program], bench_of(seed)) == [], seed


@pytest.mark.parametrize(
    ("fault", "program"),
    [
        (NothingArrives, "sent gradient"),
        (NothingArrives, "written gradient"),
        (NoVersions, "gradient added to"),
        (NobodyReads, "weight read meanwhile"),
        (NothingHolds, "weight used at once"),
        (NotDuplicated, "lent gradient"),
        (BackAtOnce, "copied weight read meanwhile"),
        (NotFinished, "copied weight used at once"),
    ],
)
def test_an_order_taken_away_is_found_every_time(fault: type, program: str) -> None:
    for seed in range(40):
        if issubclass(fault, CudaDevice):
            bench = bench_of(seed, device=fault)
            PROGRAMS[program](bench)
        else:
            bench = bench_of(seed)
            PROGRAMS[program](bench, fault)
        bench.device.drain()
        bench.close()
        assert bench.streams.races != [], seed


# -- what else can happen --------------------------------------------------------------------------


def test_a_gradient_that_does_not_arrive_is_told_and_nothing_is_updated() -> None:
    for seed in range(20):
        bench = bench_of(seed, faults=Faults(running=frozenset({0})))
        updates = updates_of(bench)
        weight = weight_of(bench, 64, 1, on_host=True)
        brought = updates.carrier.bring(weight, bench.full(64, 2), "blocks.7.weight")
        updates.start(weight, brought, "blocks.7.weight")
        with pytest.raises(OffloadError, match=r"blocks\.7\.weight did not arrive.*copy 0 failed"):
            updates.channels.settle()
        bench.expect(weight, 1)
        bench.settle()
        updates.channels.close()
        bench.close()
        assert (bench.wrong, bench.streams.races) == ([], [])


def test_a_weight_that_does_not_come_back_is_named_once_and_the_others_are_waited_for() -> None:
    for seed in range(20):
        # two weights and a gradient go out, and the first weight comes back
        bench = bench_of(seed, faults=Faults(running=frozenset({3})))
        updates = updates_of(bench)
        weights = [weight_of(bench, 64, value, on_host=False) for value in (1, 2)]
        for weight in weights:
            updates.carrier.place(weight)
        for n, weight in enumerate(weights):
            brought = updates.carrier.bring(weight, bench.full(64, 5), f"g{n}")
            updates.start(weight, brought, f"w{n}")()
            del brought
        with pytest.raises(OffloadError, match=r"w0 \(64 bytes\) could not be loaded.*copy 3 fail"):
            for _ in range(2):  # at once, or when both are waited for
                updates.carrier.finish()
                bench.device.drain()
        updates.carrier.finish()
        bench.expect(weights[1], 7)
        bench.settle()
        updates.channels.close()
        bench.close()
        assert (bench.wrong, bench.streams.races) == ([], []), seed


def test_a_load_that_failed_does_not_fail_the_update_of_its_weight() -> None:
    for seed in range(20):
        bench = bench_of(seed, faults=Faults(running=frozenset({0})))
        updates = updates_of(bench)
        weight = weight_of(bench, 64, 1, on_host=True)
        with pytest.raises(OffloadError, match=r"w \(64 bytes\) could not be loaded"):
            bench.wait_load(bench.mover.start_fetch(weight, "w", "h2d")[1])
            bench.device.drain()
        brought = updates.carrier.bring(weight, bench.full(64, 2), "g")
        updates.start(weight, brought, "w")()
        bench.expect(weight, 3)
        del brought
        bench.settle()
        updates.channels.close()
        bench.close()
        assert (bench.wrong, bench.streams.races) == ([], []), seed


def test_what_a_hold_raises_leaves_it_held() -> None:
    bench = bench_of(0)
    weight, calls = weight_of(bench, 64, 1, on_host=True), list[str]()

    def broken() -> None:
        calls.append("broken")
        if len(calls) == 1:
            raise OffloadError("not updated")

    bench.device.hold(weight, broken)
    bench.device.hold(weight, lambda: calls.append("second"))
    with pytest.raises(OffloadError, match="not updated"):
        bench.mover.start_fetch(weight, "w", "h2d")
    use(bench, weight, 1, in_place=False, tag="again")
    use(bench, weight, 1, in_place=False, tag="once more")
    assert calls == ["broken", "broken", "second"]
    bench.close()


def test_memory_that_goes_round_is_neither_held_nor_filled() -> None:
    bench = bench_of(0)
    kept, weight = (weight_of(bench, 64, value, on_host=True) for value in (1, 2))
    slot = bench.device.slot_of(weight)
    assert slot is not None
    bench.device.sent(weight, bench.device.mark())
    bench.device.hold(weight, lambda: None)
    assert slot.filled is not None
    del weight
    again = weight_of(bench, 64, 3, on_host=True)
    assert bench.device.slot_of(again) is slot
    assert (slot.filled, slot.holds, slot.planned) == (None, (), False)
    bench.expect(kept, 1)
    bench.close()


def test_what_is_not_on_the_host_is_refused() -> None:
    bench = bench_of(0)
    x = bench.full(64, 1)
    for refused in (partial(bench.device.await_on_host, [x]), partial(bench.device.on_host, x)):
        with pytest.raises(OffloadError, match=r"shape \(64,\).*does not lie on the host tier"):
            refused()
    with pytest.raises(OffloadError, match="does not lie on the host tier"):
        bench.device.hold(x, lambda: None)
    bench.close()


def test_a_host_view_has_the_shape_and_order_of_its_tensor() -> None:
    bench = bench_of(0)
    (flat,) = bench.device.addressable([4 * 6 * 4])
    weight = flat.view(torch.float32).as_strided((6, 4), (1, 6))
    seen = bench.device.on_host(weight[1:])
    assert (seen.shape, seen.stride(), seen.data_ptr()) == ((5, 4), (1, 6), flat.data_ptr() + 4)
    bench.close()


# -- the other simulation: threads, and clocks of what the program asked for ----------------------


class NoReach(SimulatedDevice):
    def reached(self, point: Point) -> None:
        if isinstance(point, LaneJob) and point.label.direction != "host":
            return
        super().reached(point)


def train_by_threads(kind: type[SimulatedDevice], seed: int) -> tuple[list[str], list[str]]:
    device = kind(seed, longest_pause_s=0.0001)
    mover, wrong = Mover(device), list[str]()
    (weight,) = device.addressable([64])
    device.compute(fill(1), (), (weight,), "place")
    value = 1

    def expect(found: np.ndarray, wanted: int) -> None:
        if not (found == wanted).all():
            wrong.append(f"{found[0]}, not {wanted}")

    for _ in range(3):
        buffer, load = mover.start_fetch(weight, "w", "in")
        mover.wait_load(tickets.find(load, Load))
        device.compute(lambda b, v=value: expect(b, v), (buffer,), (), "forward")
        gradient = device.empty(64)
        device.compute(fill(2), (), (gradient,), "backward")
        ticket = mover.start_store(gradient, "g", "out")
        host = tickets.find(ticket, Saved).host
        assert host is not None
        arrive = device.await_on_host([host], [weight])
        mover.wait_out(tickets.find(ticket, Saved))
        del gradient
        device.hold(weight, partial(_update, device, arrive, host, weight))
        value += 2
        del buffer, load, ticket, host
    device.claim(weight)
    device.drain()
    kinds = sorted({race.kind for race in device.races})
    mover.close()
    return kinds, wrong


def _update(
    device: SimulatedDevice, arrive: Callable[[], None], host: torch.Tensor, weight: torch.Tensor
) -> None:
    arrive()
    device.touch(lambda g, w: w.__iadd__(g), (host,), (weight,), "update")


def test_by_threads_it_is_clean_and_a_planted_fault_is_found() -> None:
    for seed in range(20):
        assert train_by_threads(SimulatedDevice, seed) == ([], []), seed
        kinds, _ = train_by_threads(NoReach, seed)
        assert "write then read" in kinds, seed


def test_a_failure_that_its_waiter_raises_is_raised_once() -> None:
    class FailsMeanwhile(CudaDevice):
        """A load fails after compute has passed it, and before its waiter looks."""

        def wait(self, copy: Copy) -> Waited:
            waited = super().wait(copy)
            assert isinstance(copy, CudaCopy)
            self._in_flight.failed(copy, RuntimeError("too late"))
            return waited

    bench = bench_of(0, device=FailsMeanwhile)
    weight = weight_of(bench, 64, 1, on_host=True)
    with pytest.raises(OffloadError, match=r"w \(64 bytes\) could not be loaded.*too late"):
        bench.wait_load(bench.mover.start_fetch(weight, "w", "h2d")[1])
    bench.device.drain()
    bench.close()
