"""Who holds device memory between calls: the graphs of one `torch.compile` share its budget.

A model with graph breaks is several compiled graphs. While one runs, the others hold their
weights, the activations that wait for their backward, and gradients. What a graph may use is the
budget less all that; the books are read at every call, and a plan that no longer fits is made
again (`backend`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from offcompile.runtime.updates import all_held_bytes, held_bytes
from offcompile.runtime.weights import is_on_host


class Pass:
    """One forward run that waits for its backward; dies with the autograd graph."""

    __slots__ = ("__weakref__", "full_bytes", "kept_bytes", "waiting")

    def __init__(self, kept_bytes: int, full_bytes: int) -> None:
        self.waiting = True
        #: what it left on the device, and what it would have if nothing had moved
        self.kept_bytes, self.full_bytes = kept_bytes, full_bytes


@dataclass
class Entry:
    """One compiled graph: what it holds when it is not running."""

    #: parameters that it has been called with, by id
    parameters: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    #: whether its backward makes gradients for them
    trains: bool = False
    #: forwards that wait for their backward, in order
    passes: list[weakref.ref[Pass]] = field(default_factory=list)
    #: bytes of all parameters ever seen
    seen_bytes: int = 0
    #: with which parameters it has been called
    bindings: set[tuple[int, ...]] = field(default_factory=set)
    #: whether a backward has run
    has_returned: bool = False

    def see(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """The parameters of one call, by id; new ones are noted."""
        mine = set()
        for p in parameters:
            mine.add(id(p))
            if id(p) not in self.parameters:
                self.parameters[id(p)] = weakref.ref(p)
                self.seen_bytes += p.untyped_storage().nbytes()
        return mine

    def waiting(self) -> list[Pass]:
        """The forwards that wait for their backward, the newest last."""
        found = [(ref, one) for ref in self.passes if (one := ref()) is not None and one.waiting]
        self.passes[:] = [ref for ref, _ in found]
        return [one for _, one in found]

    def waiting_bytes(self) -> int:
        return sum(one.kept_bytes for one in self.waiting())

    def begin(self, outputs: object, kept_bytes: int, full_bytes: int) -> None:
        """A forward has run: until its backward, what it kept stays."""
        node = _autograd_node(outputs)
        if node is not None and (kept_bytes or full_bytes):
            one = Pass(kept_bytes, full_bytes)
            metadata = cast("dict[str, list[Pass]]", node.metadata)
            metadata.setdefault("offcompile", []).append(one)
            self.passes.append(weakref.ref(one))

    def end(self) -> None:
        """A backward has run: what the newest forward kept is given back."""
        self.has_returned = True
        for one in self.waiting()[-1:]:
            one.waiting = False


def _autograd_node(outputs: object) -> torch.autograd.graph.Node | None:
    several: Sequence[object] = outputs if isinstance(outputs, tuple | list) else (outputs,)
    for out in several:
        if isinstance(out, torch.Tensor) and out.grad_fn is not None:
            return out.grad_fn
    return None


@dataclass
class Books:
    """The entries of all graphs that share one budget, in the order of their first run."""

    entries: list[Entry] = field(default_factory=list)
    #: the most that was ever held together if nothing had moved
    most_wanted_bytes: int = 0

    def most_held(self) -> int:
        """No less than `held_beside` can be; quick to reckon."""
        # weights, and two sets of gradients: those that stand and those that come
        mine = sum(3 * e.seen_bytes + e.waiting_bytes() for e in self.entries)
        return mine + all_held_bytes()

    def several(self) -> bool:
        """Whether more than one graph, or one with more than one set of weights, runs in turn."""
        return sum(max(1, len(e.bindings)) for e in self.entries) > 1

    def unmoved_bytes(self) -> int:
        """What the forwards that wait would hold more if nothing of theirs had moved."""
        return sum(p.full_bytes - p.kept_bytes for e in self.entries for p in e.waiting())

    def crowded(self, wanted_bytes: int, budget_bytes: int) -> bool:
        """Whether what the graphs keep for backward is too much for the budget together.

        wanted_bytes: what is held now, if nothing moves. Until a backward has run nobody knows how
        many graphs follow: then what takes half of the budget is taken for too much.
        """
        self.most_wanted_bytes = max(self.most_wanted_bytes, wanted_bytes)
        if any(e.has_returned for e in self.entries):
            return self.most_wanted_bytes > budget_bytes
        return wanted_bytes > budget_bytes // 2

    def held_beside(self, entry: Entry, mine: set[int]) -> int:
        """Bytes on the device that are not this graph's own, at any time of its step.

        `mine`: the parameters of the call, which the graph's own plan counts, with the gradients
        that it makes. Gradients that stand already come on top: new ones are added to them; so does
        what our optimizers hold.
        """
        held = held_bytes(self._parameters())
        seen: set[int] = set()
        later = False
        for other in self.entries:
            held += other.waiting_bytes()
            for key, ref in list(other.parameters.items()):
                p = ref()
                if p is None:
                    del other.parameters[key]
                    continue
                if key in seen:
                    continue
                seen.add(key)
                standing = 0 if p.grad is None else _bytes_on_device(p.grad)
                weight = _bytes_on_device(p)
                if key in mine:
                    held += standing
                    continue
                # the backward of a later graph runs first: its gradients stand during this one's
                coming = weight if later and other.trains and p.requires_grad else 0
                held += weight + max(standing, coming)
            later = later or other is entry
        return held

    def _parameters(self) -> list[torch.Tensor]:
        found = (ref() for e in self.entries for ref in e.parameters.values())
        return [p for p in found if p is not None]


def _bytes_on_device(tensor: torch.Tensor) -> int:
    return 0 if is_on_host(tensor) else tensor.untyped_storage().nbytes()


_all_books: dict[int, tuple[object, Books]] = {}


def books_of(asked: object) -> Books:
    """The books of one `torch.compile` call, known by the options object that it passes on."""
    found = _all_books.get(id(asked))
    if found is None or found[0] is not asked:
        found = _all_books[id(asked)] = (asked, Books())
    return found[1]
