"""Graphs of queued work: a thread's work on streams, captured once and replayed at will.

A replay costs the host one call, however many kernels, copies and waits it queues.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from offcompile.ir import OffloadError


class CannotCapture(OffloadError):
    """Work that a graph cannot hold; the message names the obstacle and the remedy."""


class StreamGraph(ABC):
    """One graph. Its memory belongs to a pool that graphs may share; nothing else is put there,
    and the last of them to die releases it."""

    @abstractmethod
    def capturing(self) -> AbstractContextManager[None]:
        """Inside, keep what the calling thread queues on `compute()`, and on streams that wait for
        that, instead of running it. `compute()` is another stream meanwhile. Before the end,
        `compute()` has to wait for all of those streams.
        """

    @abstractmethod
    def replay(self) -> None:
        """Queue everything on `compute()`, in the captured order."""


class TorchGraph(StreamGraph):
    """A graph of `torch.cuda`, or of another accelerator whose module has the same functions."""

    def __init__(self, module: Any, stream: Any, pool: object) -> None:
        self._module, self._stream, self._pool = module, stream, pool
        self._graph = module.CUDAGraph()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        # An error ends a capture before lanes have joined, so that its end raises too, and then
        # torch leaves this stream in place: work would go on here, and wait for nothing.
        with (
            self._module.stream(self._stream),
            # Other threads ask for events and release memory meanwhile, which "global" forbids.
            self._module.graph(
                self._graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ),
        ):
            yield

    def replay(self) -> None:
        self._graph.replay()


#: functions of a device's module that `TorchGraph` calls
GRAPH_FUNCTIONS = ("CUDAGraph", "graph", "graph_pool_handle")


def why_no_graphs(module: Any) -> str | None:
    """The reason that a device's module makes no graphs; None if it does."""
    missing = [name for name in GRAPH_FUNCTIONS if not hasattr(module, name)]
    if not missing:
        return None
    return f"{getattr(module, '__name__', 'the device module')} has no {', '.join(missing)}"
