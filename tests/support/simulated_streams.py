"""`Streams` without a GPU: queues that advance at random, and races found by vector clocks.

Each stream is a queue in order. Without a pace, queues advance by a random number of steps
whenever something is called, and by whoever waits: a seed repeats itself as far as the program's
own threads do. With `pace_s`, each stream is a thread with random pauses. Memory is ordinary
memory; what died last is handed out first, at once, as by a caching allocator.

A stream's clock grows by its own work and by the events it waits for; a thread's by the events it
has seen end, and by what comes with memory (`simulated_memory` says how races are found). Work
starts from the clocks of its stream and of the thread that queued it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from simulated import Race
from simulated_memory import SimulatedArena, Watch

from offcompile.runtime.codecs import TensorCodec
from offcompile.runtime.device.streams import MemoryUse, Streams

_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
COMPUTE = "compute"
#: most steps that the queues advance by at a call
_STEPS = 3


@dataclass(eq=False)
class SimulatedEvent:
    clock: int
    done: bool = False
    failed: str | None = None
    time_ns: int = 0


@dataclass(eq=False)
class SimulatedStream:
    name: str
    #: work, or an event to wait for
    queue: deque[Callable[[], None] | SimulatedEvent] = field(default_factory=deque)
    clock: int = 0
    #: the failure since the last event
    failed: str | None = None
    thread: threading.Thread | None = None

    def ready(self) -> bool:
        return bool(self.queue) and (callable(head := self.queue[0]) or head.done)


@dataclass(frozen=True)
class Faults:
    """Which copies fail when they are queued, which as they run, and which allocations fail.

    Counted from 0, each kind by itself.
    """

    at_issue: frozenset[int] = frozenset()
    running: frozenset[int] = frozenset()
    allocating: frozenset[int] = frozenset()


class SimulatedStreams(Streams):
    """`races` lists what was found; `launch` queues a kernel on `compute()`."""

    def __init__(
        self, seed: int, faults: Faults | None = None, pace_s: float | None = None
    ) -> None:
        self.name = "simulated:0"
        #: True if kernels may use host memory in place
        self.reaches_host = True
        self.faults = faults or Faults()
        self._dice = random.Random(seed)
        self._pace_s = pace_s
        self._stopped = False
        # never held while anything of the program runs but kernels and finalizers
        self._moved = threading.Condition(threading.RLock())
        self._streams: dict[str, SimulatedStream] = {}
        self._thread = threading.local()
        self._copies = self._allocations = 0
        self._watch = Watch()

    @property
    def races(self) -> list[Race]:
        return self._watch.races

    # -- streams and events ----------------------------------------------------------------------

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """Make it the calling thread's compute stream for a while."""
        before = self.compute()
        self._thread.compute = stream
        try:
            yield
        finally:
            self._thread.compute = before

    def compute(self) -> SimulatedStream:
        current: SimulatedStream | None = getattr(self._thread, "compute", None)
        return current or self.stream(COMPUTE)

    def stream(self, name: str) -> SimulatedStream:
        with self._moved:
            stream = self._streams.get(name)
            if stream is None:
                stream = self._streams[name] = SimulatedStream(name)
                if self._pace_s is not None:
                    stream.thread = threading.Thread(target=self._run, args=(stream,), daemon=True)
                    stream.thread.start()
            return stream

    def record(self, stream: SimulatedStream, timing: bool = False) -> SimulatedEvent:
        with self._moved:
            stream.clock |= self._watch.known
            event = SimulatedEvent(stream.clock)
            self._queue(stream, partial(_reach, stream, event))
        return event

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        with self._moved:
            stream.clock |= event.clock
            self._queue(stream, event)

    def ended(self, event: SimulatedEvent) -> bool:
        """Nothing is learnt from it: an order that needs luck is none."""
        with self._moved:
            self._advance()
            _check_failed(event)
            return event.done

    def synchronize(self, event: SimulatedEvent) -> None:
        with self._moved:
            while not event.done:
                if self._pace_s is not None:
                    self._moved.wait()
                elif not self._step():
                    raise AssertionError("an event is waited for that no stream will reach")
            self._watch.known |= event.clock
            _check_failed(event)

    def elapsed_us(self, begin: SimulatedEvent, end: SimulatedEvent) -> float:
        return (end.time_ns - begin.time_ns) / 1e3

    # -- progress --------------------------------------------------------------------------------

    def _queue(self, stream: SimulatedStream, item: Callable[[], None] | SimulatedEvent) -> None:
        stream.queue.append(item)
        self._moved.notify_all()
        self._advance()

    def _advance(self) -> None:
        if self._pace_s is None:
            for _ in range(self._dice.randrange(_STEPS)):
                self._step()

    def _step(self) -> bool:
        """One step of one stream that can go on; False if none can."""
        ready = [stream for stream in self._streams.values() if stream.ready()]
        if not ready:
            return False
        self._run_head(self._dice.choice(ready))
        return True

    def _run_head(self, stream: SimulatedStream) -> None:
        item = stream.queue.popleft()
        if callable(item):
            item()
        self._moved.notify_all()

    def _run(self, stream: SimulatedStream) -> None:
        assert self._pace_s is not None
        while True:
            time.sleep(self._dice.random() * self._pace_s)
            with self._moved:
                while not stream.ready():
                    if self._stopped:
                        return
                    self._moved.wait()
                self._run_head(stream)

    def drain(self) -> None:
        """Let all streams run empty."""
        for stream in tuple(self._streams.values()):
            self.synchronize(self.record(stream))

    def close(self) -> None:
        """End the threads, once their streams have run empty."""
        with self._moved:
            self._stopped = True
            self._moved.notify_all()
        for stream in self._streams.values():
            if stream.thread is not None:
                stream.thread.join()

    # -- memory ----------------------------------------------------------------------------------

    def empty(self, nbytes: int) -> torch.Tensor:
        with self._moved:
            self._allocations += 1
            if self._allocations - 1 in self.faults.allocating:
                raise torch.OutOfMemoryError(f"Tried to allocate {nbytes} bytes (planted)")
            return self._watch.device_tensor(nbytes, self.compute())

    def scratch(self, stream: SimulatedStream, nbytes: int) -> torch.Tensor:
        with self.on(stream):
            return self.empty(nbytes)

    def why_not_pack(self, in_place: bool) -> str | None:
        return None if self.reaches_host or not in_place else "planted"

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        with self._moved:
            # known by what keeps it, before its first use: the alias itself must be free to die
            self._watch.of(host)
        # another storage, at the same address
        return torch.from_numpy(host.numpy()[:])

    def memory(self) -> MemoryUse:
        with self._moved:
            return self._watch.use()

    def reset_peak(self) -> None:
        with self._moved:
            self._watch.reset_peak()

    def let_go(self, tensor: torch.Tensor) -> None:
        with self._moved:
            self._watch.let_go(tensor)

    def taken(self, tensor: torch.Tensor) -> None:
        with self._moved:
            self._watch.taken(tensor)

    def arena(self, limit_bytes: int = 1 << 30, pinned: bool = True) -> SimulatedArena:
        """Host memory that the detector watches going round."""
        return SimulatedArena(self._watch, self._moved, limit_bytes, pinned)

    # -- work ------------------------------------------------------------------------------------

    def copy(self, stream: SimulatedStream, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(stream, np.copyto, target, source)

    def pack(
        self, stream: SimulatedStream, codec: TensorCodec, flat: torch.Tensor, packed: torch.Tensor
    ) -> None:
        self._copy(stream, partial(_pack, codec, flat.dtype), packed, flat)

    def unpack(
        self, stream: SimulatedStream, codec: TensorCodec, packed: torch.Tensor, flat: torch.Tensor
    ) -> None:
        self._copy(stream, partial(_unpack, codec, flat.dtype), flat, packed)

    def _copy(
        self,
        stream: SimulatedStream,
        how: Callable[[_Bytes, _Bytes], None],
        target: torch.Tensor,
        source: torch.Tensor,
    ) -> None:
        with self._moved:
            number, self._copies = self._copies, self._copies + 1
            if number in self.faults.at_issue:
                raise RuntimeError(f"copy {number} could not be queued (planted)")
            work: Callable[[], None] = partial(
                how, self._watch.part(target), self._watch.part(source)
            )
            if number in self.faults.running:
                work = partial(_fail, stream, f"copy {number} failed (planted)")
            self._access(stream, f"copy {number} on {stream.name}", (source,), (target,))
            self._queue(stream, work)

    def launch(
        self,
        work: Callable[..., None],
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        tag: str = "kernel",
    ) -> None:
        """Queue `work(*read arrays, *written arrays)`; the tensors may die before it runs."""
        with self._moved:
            stream = self.compute()
            arrays = [self._watch.part(tensor) for tensor in (*reads, *writes)]
            self._access(stream, tag, reads, writes)
            self._queue(stream, partial(work, *arrays))

    def touch(self, tensor: torch.Tensor, write: bool, tag: str) -> None:
        """The calling thread reads or writes a tensor itself, now."""
        with self._moved:
            reads, writes = ((), (tensor,)) if write else ((tensor,), ())
            self._watch.known = self._watch.access(tag, reads, writes, self._watch.known)

    def _access(
        self,
        stream: SimulatedStream,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        before = stream.clock | self._watch.known
        stream.clock = self._watch.access(what, reads, writes, before)


def _pack(codec: TensorCodec, dtype: torch.dtype, packed: _Bytes, source: _Bytes) -> None:
    codec.pack(torch.from_numpy(source).view(dtype), torch.from_numpy(packed))


def _unpack(codec: TensorCodec, dtype: torch.dtype, target: _Bytes, packed: _Bytes) -> None:
    codec.unpack(torch.from_numpy(packed), torch.from_numpy(target).view(dtype))


def _reach(stream: SimulatedStream, event: SimulatedEvent) -> None:
    event.failed, stream.failed = stream.failed, None
    event.time_ns = time.perf_counter_ns()
    event.done = True


def _fail(stream: SimulatedStream, why: str) -> None:
    stream.failed = why


def _check_failed(event: SimulatedEvent) -> None:
    if event.failed is not None:
        raise RuntimeError(event.failed)
