"""Steps captured as graphs on simulated streams: the same orders, no race, and faults that show."""

from __future__ import annotations

import random
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from cuda_bench import NOTHING, Bench, Disk, bench_of, fill
from simulated_graphs import GraphStreams, Illegal

from offcompile.runtime.device import tickets
from offcompile.runtime.device.cuda.capture import Capture, HostRoom, capturing
from offcompile.runtime.device.graphs import CannotCapture
from offcompile.runtime.moves.saved import Saved

LAYERS, NBYTES = 3, 64


def forward(bench: Bench, x: torch.Tensor) -> list[torch.Tensor]:
    """Layers that write over each other's memory once the copy out of it has been waited for."""
    saved = []
    for layer in range(LAYERS):
        bench.streams.launch(lambda x, y: y.fill(x[0] + 1), (x,), (x,), f"F{layer}")
        saved.append(bench.out(x, f"a{layer}"))
        bench.wait_out(saved[-1])
    return saved


def backward(bench: Bench, saved: list[torch.Tensor], first: torch.Tensor) -> None:
    for layer in reversed(range(LAYERS)):
        buffer, load = bench.load(saved[layer], f"a{layer}")
        bench.wait_load(load)

        def kernel(at: torch.Tensor, was: torch.Tensor, layer: int = layer) -> None:
            if (at != was[0] + layer + 1).any():
                bench.wrong.append(f"a{layer}: {at[:2]}, not {was[0] + layer + 1}")

        bench.streams.launch(kernel, (buffer, first), (), f"B{layer}")


class Step:
    """Both halves, each in a graph of its own."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.streams = bench, bench.streams
        assert isinstance(self.streams, GraphStreams)
        self.x = self.streams.empty(NBYTES)
        self.first = self.streams.empty(NBYTES)
        self.graphs = [self.streams.graph(None) for _ in range(2)]
        self.captures: list[Capture] = []
        with capturing(self.streams, self.graphs[0]) as capture:
            self.saved = forward(bench, self.x)
        self.captures.append(capture)
        with capturing(self.streams, self.graphs[1]) as capture:
            backward(bench, self.saved, self.first)
        self.captures.append(capture)

    def begin(self, value: int) -> None:
        for x in (self.x, self.first):
            self.streams.launch(fill(value), (), (x,), f"batch {value}")

    def run(self, value: int) -> None:
        self.begin(value)
        for graph in self.graphs:
            graph.replay()

    def release(self) -> None:
        for graph in self.graphs:
            graph.release()
        for capture in self.captures:
            capture.release()
        self.saved.clear()
        del self.x, self.first


def bench_with_graphs(seed: int, stores: dict[str, Disk] | None = None) -> Bench:
    return bench_of(seed, stores, streams=GraphStreams)


def test_a_replay_gives_the_orders_of_the_step_itself() -> None:
    bench = bench_with_graphs(0)
    streams = bench.streams
    assert isinstance(streams, GraphStreams)
    x, first = (bench.full(NBYTES, 1) for _ in range(2))
    streams.log = plain = []
    backward(bench, forward(bench, x), first)
    del x, first
    streams.log = None
    step = Step(bench)
    step.begin(1)
    streams.log = replayed = []
    for graph in step.graphs:
        graph.replay()
    streams.log = None
    # each half's end joins its lane, so that loads need not wait for copies out
    turn = next(i for i, order in enumerate(replayed) if order[1] == "h2d")
    ends = [turn - 2, len(replayed) - 1]
    joins = [("wait", "compute", "d2h"), ("wait", "compute", "h2d")]
    assert [replayed[i] for i in ends] == joins
    expected = [order for order in plain if order != ("wait", "h2d", "d2h")]
    assert [order for i, order in enumerate(replayed) if i not in ends] == expected
    assert [order[2] for order in plain if order[0] == "launch"] == [
        *(f"F{i}" for i in range(LAYERS)),
        *(f"B{i}" for i in reversed(range(LAYERS))),
    ]
    step.release()
    assert bench.left() == NOTHING
    bench.close()


def test_replays_compute_with_each_batch_and_race_with_nothing() -> None:
    for seed in range(24):
        bench = bench_with_graphs(seed)
        step = Step(bench)
        for value in (10, 20, 30):
            step.run(value)
            other = bench.out(bench.full(NBYTES, value), "other")
            bench.wait_out(other)
            buffer, load = bench.load(other, "other")
            bench.wait_load(load)
            bench.expect(buffer, value, "other")
            del other, buffer, load
        bench.settle()
        step.release()
        left = bench.left()
        bench.close()
        assert (bench.streams.races, bench.wrong, left) == ([], [], NOTHING), seed


def test_without_the_fork_the_capture_is_refused() -> None:
    bench = bench_with_graphs(0)
    streams = bench.streams
    given = streams.wait
    streams.wait = lambda stream, event: stream.name == "d2h" or given(stream, event)  # type: ignore[method-assign]
    with pytest.raises(Illegal, match="captures is captured and waits for an event outside"):
        Step(bench)
    bench.settle()
    bench.close()


def test_without_the_join_the_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_with_graphs(0)
    graph = bench.streams.graph(None)  # type: ignore[attr-defined]
    monkeypatch.setattr(Capture, "end", lambda self: None)
    x = bench.streams.empty(NBYTES)
    with (
        pytest.raises(Illegal, match="d2h was not joined"),
        capturing(bench.streams, graph) as made,
    ):
        ticket = bench.out(x)
    assert [copy.label.tag for copy in made.copies] == ["x"]
    del ticket, x
    graph.release()
    assert bench.left() == NOTHING
    bench.close()


def test_without_a_wait_of_compute_replays_race(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(8):
        bench = bench_with_graphs(seed)
        join = Capture.join
        with monkeypatch.context() as patch:
            patch.setattr(Capture, "wait", lambda self, copy: None)
            patch.setattr(bench.mover, "_wait", lambda copy, load: None)
            step = Step(bench)
        assert Capture.join is join
        step.run(10)
        bench.settle()
        assert bench.streams.races, seed
        bench.close()


def test_host_memory_of_a_graph_is_nobody_else_s_while_it_may_run() -> None:
    bench = bench_with_graphs(0)
    graph = bench.streams.graph(None)  # type: ignore[attr-defined]
    x = bench.streams.empty(NBYTES)
    with capturing(bench.streams, graph) as made:
        ticket = bench.out(x)
        slot = tickets.find(ticket, Saved).slot
    address = slot.block.tensor.data_ptr()  # type: ignore[attr-defined]
    del ticket
    bench.settle()
    other = bench.device.slot(x, "host")
    assert other.block.tensor.data_ptr() != address  # type: ignore[union-attr]
    other.free()
    made.release()
    graph.release()
    del x
    assert bench.left() == NOTHING
    bench.close()


class WeightStep:
    """A step that fetches a weight, and leaves its gradient, one more, on the host."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.streams = bench, bench.streams
        assert isinstance(self.streams, GraphStreams)
        self.weight, flat = bench.device.addressable([NBYTES] * 2)
        slot = bench.device.shadows.find(flat)
        assert slot is not None
        self.streams.launch(fill(0), (), (self.weight,), "place")
        self.graph = self.streams.graph(None)
        with capturing(self.streams, self.graph, [HostRoom(flat, slot)]) as self.capture:
            buffer, load = bench.mover.start_fetch(self.weight, "w", "h2d")
            bench.wait_load(load)
            made = self.streams.empty(NBYTES)
            self.streams.launch(lambda w, g: np.copyto(g, w + 1), (buffer,), (made,), "gradient")
            ticket = bench.mover.start_store(made, "g", "d2h")
            bench.wait_out(ticket)
            self.gradient = tickets.find(ticket, Saved).host

    def run(self, step: int) -> None:
        self.graph.replay()
        self.capture.given_to(self.streams.compute())
        assert self.gradient is not None
        self.bench.expect(self.gradient, step + 1, f"gradient {step}")
        update = (self.gradient,), (self.weight,)
        self.streams.launch(lambda g, w: np.copyto(w, g), *update, f"update {step}")

    def release(self) -> None:
        self.graph.release()
        self.capture.release()
        del self.weight, self.gradient
        self.bench.device.shadows.release()


def steps_of_a_weight(seed: int, holds: bool = True) -> tuple[list[object], list[str]]:
    """Races and wrong values of replays, beside others who take and fill host memory."""
    bench = bench_with_graphs(seed)
    step, dice = WeightStep(bench), random.Random(seed)
    if not holds:
        # an alias that does not keep the memory
        step.gradient = bench.streams.alias(step.capture.written.pop().slot.block.tensor)
        bench.mover.sweep()
    for number in range(4):
        (other,) = bench.device.addressable([NBYTES])
        bench.streams.launch(fill(99), (), (other,), "other")
        step.run(number)
        bench.expect(other, 99, "other")
        if dice.random() < 0.5:
            bench.settle()
        del other
    bench.settle()
    step.release()
    if bench.left() != NOTHING:
        bench.wrong.append(str(bench.left()))
    bench.close()
    return list(bench.streams.races), bench.wrong


def test_replays_fetch_each_update_and_leave_gradients_in_memory_of_their_own() -> None:
    for seed in range(24):
        assert steps_of_a_weight(seed) == ([], []), seed


def test_host_memory_that_a_graph_does_not_hold_goes_to_others() -> None:
    races, wrong = steps_of_a_weight(0, holds=False)
    assert races or wrong


def test_gradients_that_the_plan_does_not_list_are_refused() -> None:
    bench = bench_with_graphs(0)
    graph = bench.streams.graph(None)  # type: ignore[attr-defined]
    x = bench.streams.empty(NBYTES)
    with (
        pytest.raises(CannotCapture, match="a gradient of 64 bytes leaves that the plan does not"),
        capturing(bench.streams, graph),
    ):
        bench.mover.start_store(x, "g", "d2h")
    del x
    graph.release()
    assert bench.left() == NOTHING
    bench.close()


def test_a_move_to_the_disk_is_refused_by_name(tmp_path: object) -> None:
    with ExitStack() as stack:
        store = stack.enter_context(Disk([tmp_path], reserve_bytes=0))  # type: ignore[list-item]
        bench = bench_with_graphs(0, {"disk": store})
        x = bench.streams.empty(NBYTES)
        graph = bench.streams.graph(None)  # type: ignore[attr-defined]
        with (
            pytest.raises(CannotCapture, match=r"far moves to .* give host_memory enough room"),
            capturing(bench.streams, graph),
        ):
            bench.out(x, "far", "disk", "device_to_disk")
        del x
        graph.release()
        assert bench.left()["disk"] == 0
        bench.close()
