"""Who holds device memory between calls: all compiled graphs of the process, device by device.

A model with graph breaks is several compiled graphs; so is one whose blocks are compiled one by
one; and a process may compile several models. While one graph runs, the others hold their weights,
the activations that wait for their backward, and gradients. What a graph may use is its budget
less all that; the books are read at every call, and a plan that no longer fits is made again
(`compiled`). They own nothing: what has died is no longer counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch

from offcompile.runtime.states.updates import Holder, all_held_bytes, holders_of, registrations

from .holdings import ParameterMemory
from .results import LiveOutputs


class ParameterSet:
    """The parameters that a graph is called with, by id; equal to itself alone."""

    __slots__ = ("__weakref__", "ids", "in_order", "ran")

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.in_order, self.ids = ids, frozenset(ids)
        #: whether the graph has run with them
        self.ran = False


#: before the first call
UNBOUND = ParameterSet(())


class PendingBackward:
    """One forward run that waits for its backward; dies with the autograd graph."""

    __slots__ = ("__weakref__", "binding", "full_bytes", "kept_bytes", "waiting")

    def __init__(self, binding: ParameterSet, kept_bytes: int, full_bytes: int) -> None:
        self.waiting = True
        self.binding = binding
        #: what it left on the device, and what it would have if nothing had moved
        self.kept_bytes, self.full_bytes = kept_bytes, full_bytes


@dataclass(eq=False)
class GraphUsage:
    """One compiled graph: what it holds when it is not running."""

    books: DeviceUsage
    #: the key of what moves its tensors
    runtime: str = ""
    #: ids of the parameters that it has been called with, and that live
    parameters: set[int] = field(default_factory=set)
    #: whether its backward makes gradients for them
    trains: bool = False
    #: forwards that wait for their backward, in order
    passes: list[weakref.ref[PendingBackward]] = field(default_factory=list)
    #: whether a backward has run
    has_returned: bool = False
    #: whether others, or itself with other parameters, have run between its runs
    in_turn: bool = False
    #: graphs whose backward has run between its forward and its backward: their gradients come then
    amid: weakref.WeakSet[GraphUsage] = field(default_factory=weakref.WeakSet)
    #: the most that was held together, if nothing had moved, while a forward of its waited or ran
    most_wanted_bytes: int = 0
    #: the most that one forward of its kept then
    most_kept_bytes: int = 0
    _bindings: dict[tuple[int, ...], ParameterSet] = field(default_factory=dict)

    def bind(self, parameters: Sequence[torch.Tensor]) -> ParameterSet:
        """Those of one call. New ones are noted."""
        self.books.drop_dead()
        key = tuple(map(id, parameters))
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = ParameterSet(key)
            self.parameters.update(key)
            self.books.holdings.add(parameters)
        return binding

    def bound(self) -> list[ParameterSet]:
        """The sets of parameters that live, in the order in which it was called with them."""
        self.books.drop_dead()
        return list(self._bindings.values())

    @property
    def bindings(self) -> int:
        """With how many sets of parameters that live it has been called."""
        self.books.drop_dead()
        return len(self._bindings)

    def forget(self, parameter: int) -> None:
        """It has died, and its id may be another's now."""
        if parameter in self.parameters:
            self.parameters.remove(parameter)
            for gone in [k for k, b in self._bindings.items() if parameter in b.ids]:
                del self._bindings[gone]

    def waiting(self) -> list[PendingBackward]:
        """The forwards that wait for their backward, the newest last."""
        found = [(ref, one) for ref in self.passes if (one := ref()) is not None and one.waiting]
        if len(found) < len(self.passes):
            self.passes[:] = [ref for ref, _ in found]
        return [one for _, one in found]

    def left_by(self, binding: ParameterSet) -> int:
        """Bytes on the device of the newest forward with these parameters."""
        return next((p.kept_bytes for p in reversed(self.waiting()) if p.binding is binding), 0)

    def waiting_bytes(self) -> int:
        return sum(one.kept_bytes for one in self.waiting())

    def begin(
        self, outputs: object, binding: ParameterSet, kept_bytes: int, full_bytes: int
    ) -> PendingBackward | None:
        """A forward has run: until its backward, what it kept stays. None: there will be none."""
        node = _autograd_node(outputs)
        if node is None:
            return None
        one = PendingBackward(binding, kept_bytes, full_bytes)
        metadata = cast("dict[str, list[PendingBackward]]", node.metadata)
        metadata.setdefault("offcompile", []).append(one)
        self.passes.append(weakref.ref(one))
        return one

    def end(self) -> None:
        """A backward has run: what the newest forward kept is given back."""
        self.has_returned = True
        for one in self.waiting()[-1:]:
            one.waiting = False
        self.books.returned(self)


def _autograd_node(outputs: object) -> torch.autograd.graph.Node | None:
    several: Sequence[object] = outputs if isinstance(outputs, tuple | list) else (outputs,)
    for out in several:
        if isinstance(out, torch.Tensor) and out.grad_fn is not None:
            return out.grad_fn
    return None


class HeldBeside(NamedTuple):
    """Bytes that others than one graph hold: now, and at any time of its step."""

    now: int
    in_step: int


class DeviceUsage:
    """The entries of all graphs that compute on one device, in the order of their compilation."""

    def __init__(self) -> None:
        self.holdings = ParameterMemory()
        self.results = LiveOutputs()
        #: ids of parameters that were sent to the host to make room for those of other calls
        self.sent: set[int] = set()
        self._entries: list[weakref.ref[GraphUsage]] = []
        #: with what the last run was
        self._last: weakref.ref[ParameterSet] | None = None
        #: what was found when somebody asked, until something may have changed
        self._found: tuple[GraphUsage, ParameterSet, HeldBeside] | None = None
        self._holders: tuple[tuple[int, int], list[weakref.ref[Holder]]] = ((-1, -1), [])

    def open(self, runtime: str = "") -> GraphUsage:
        """An entry for a graph; it is in the books as long as somebody else holds it."""
        entry = GraphUsage(self, runtime)
        self._entries.append(weakref.ref(entry))
        return entry

    def entries(self) -> list[GraphUsage]:
        found = [(ref, entry) for ref in self._entries if (entry := ref()) is not None]
        if len(found) < len(self._entries):
            self._entries[:] = [ref for ref, _ in found]
        return [entry for _, entry in found]

    def drop_dead(self) -> None:
        """Forget parameters that have died."""
        for key in self.holdings.drop_dead():
            self.sent.discard(key)
            for entry in self.entries():
                entry.forget(key)

    # --- who runs -------------------------------------------------------------------------------

    def begins(self, entry: GraphUsage, binding: ParameterSet) -> None:
        """A run of either half begins."""
        self.invalidate()
        if not entry.in_turn:
            last = None if self._last is None else self._last()
            between = binding.ran and last is not None and last is not binding
            entry.in_turn = between or any(
                p.binding is not binding for e in self.entries() for p in e.waiting()
            )
        binding.ran = True
        self._last = weakref.ref(binding)

    def returned(self, entry: GraphUsage) -> None:
        """A backward has run; forwards that still wait ran before its own, and go on after it."""
        for other in self.entries():
            if other.waiting():
                other.amid.add(entry)
        self.invalidate()

    def invalidate(self) -> None:
        """Something may have changed that these books are not told."""
        self._found = None

    def others(self, entry: GraphUsage, binding: ParameterSet) -> list[list[torch.Tensor]]:
        """Parameters that a graph's runtime can move and that are not the call's: call by call,
        those that were seen first come first, each once."""
        living = {id(p): p for p in self.holdings.living()}
        seen = set(binding.ids)
        found = []
        for other in self.entries():
            if other.runtime == entry.runtime:
                for one in other.bound():
                    mine = [k for k in dict.fromkeys(one.in_order) if k in living and k not in seen]
                    seen.update(mine)
                    found.append([living[k] for k in mine])
        return [call for call in found if call]

    # --- what is held ---------------------------------------------------------------------------

    def most_held(self) -> int:
        """No less than `held_beside` can be; quick to reckon."""
        # weights, and two sets of gradients: those that stand and those that come
        waiting = sum(e.waiting_bytes() for e in self.entries())
        standing = self.results.standing_bytes()
        return 3 * self.holdings.seen_bytes + waiting + all_held_bytes() + standing

    def unmoved_bytes(self) -> int:
        """What the forwards that wait would hold more if nothing of theirs had moved."""
        return sum(p.full_bytes - p.kept_bytes for e in self.entries() for p in e.waiting())

    def crowded(
        self, entry: GraphUsage, wanted_bytes: int, kept_bytes: int, budget_bytes: int
    ) -> bool | None:
        """Whether what this graph and others keep for backward is too much for the budget together;
        None: until a backward has run, nobody knows how many graphs follow.

        wanted_bytes: what is held now, if nothing moves. kept_bytes: what this run would keep of
        that; if no run has kept as much, what follows will take as much more than it did.
        """
        together = {entry, *(e for e in self.entries() if e.waiting())}
        for one in together:
            one.most_wanted_bytes = max(one.most_wanted_bytes, wanted_bytes)
        if any(e.has_returned for e in together):
            if 0 < entry.most_kept_bytes < kept_bytes:
                entry.most_wanted_bytes *= kept_bytes
                entry.most_wanted_bytes //= entry.most_kept_bytes
            entry.most_kept_bytes = max(entry.most_kept_bytes, kept_bytes)
            return entry.most_wanted_bytes > budget_bytes
        entry.most_kept_bytes = max(entry.most_kept_bytes, kept_bytes)
        return None

    def held_beside(self, entry: GraphUsage, binding: ParameterSet) -> HeldBeside:
        """Bytes on the device that are not this graph's own.

        The parameters of the call are in the graph's own plan, with the gradients that it makes.
        Gradients that stand already come on top: new ones are added to them; so does what our
        optimizers hold. What keepers hold is not counted: it leaves when it is in the way.
        """
        known = self._found
        if known is not None and known[0] is entry and known[1] is binding:
            return known[2]
        self.drop_dead()
        held = self.results.standing_bytes() + self.holdings.total_bytes()
        held += sum(h.held_bytes() for h in self._all_holders())
        weight, coming = self.holdings.weight, self.holdings.coming
        mine = binding.ids
        held -= sum(weight.get(key, 0) for key in mine)
        more = 0
        for other in self.entries():
            held += other.waiting_bytes()
            # its backward runs between this graph's halves: its gradients stand during this step
            if other.trains and other in entry.amid:
                keys = other.parameters - mine
                if other is entry:  # whose plan is to have those of hosted weights leave
                    keys = {key for key in keys if weight.get(key)}
                more += sum(coming.get(key, 0) for key in keys)
        found = HeldBeside(held, held + more)
        self._found = (entry, binding, found)
        return found

    def _all_holders(self) -> list[Holder]:
        """Of the optimizers of these parameters."""
        state = registrations(), self.holdings.births
        if self._holders[0] != state:
            self._holders = state, list(map(weakref.ref, holders_of(self.holdings.living())))
        return [h for ref in self._holders[1] if (h := ref()) is not None]


_all_usages: dict[torch.device, DeviceUsage] = {}


def usage_of(device: torch.device) -> DeviceUsage:
    """The books of one device of this process."""
    return _all_usages.setdefault(device, DeviceUsage())
