"""Tracks the device memory that compiled graphs of the process hold between calls.

A model with graph breaks becomes several compiled graphs, and so does a model whose blocks are
compiled one by one; a process may also compile several models. While one graph runs, the others
hold weights, gradients, and activations saved for backward. A graph may use its budget less all
that. `variants` asks at every call how much that is, and plans again if a plan no longer fits.
Nothing is owned here: dead tensors are no longer counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import torch

from offcompile.passes.step.lighter import Lighter
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.states.updates import (
    Holder,
    StatesOwner,
    all_held_bytes,
    bind,
    holders_of,
    registrations,
)

from .hole_reserve import HoleReserve
from .live_outputs import LiveOutputs
from .outside import GapPeaks, OutsideTensors
from .parameter_memory import ParameterMemory
from .rank_memory import RankMemory
from .spare_room import SpareRoom


class ParameterSet:
    """The ids of the parameters that a graph is called with. Compares by identity."""

    __slots__ = (
        *("__weakref__", "gap_peaks", "host_bytes", "ids", "in_order", "lighter"),
        *("ns_per_byte", "ran"),
    )

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.in_order, self.ids = ids, frozenset(ids)
        #: True if the graph has run with them
        self.ran = False
        #: bytes of the host tier that the plan of its last run takes
        self.host_bytes = 0
        #: asks that plan for its ways to save less for backward. Weak: records of steps outlive it
        self.lighter: Callable[[], Callable[[], Sequence[Lighter]] | None] = lambda: None
        #: the price of a byte saved for backward that its plans should reckon with
        self.ns_per_byte = 0.0
        #: the most that the program holds behind the graph's executions with them
        self.gap_peaks = GapPeaks()


class PendingBackward:
    """A forward run that waits for its backward. The autograd graph keeps it alive."""

    __slots__ = (
        *("__weakref__", "amid_bytes", "binding", "encloses"),
        *("full_bytes", "kept_bytes", "waiting"),
    )

    def __init__(self, binding: ParameterSet, kept_bytes: int, full_bytes: int) -> None:
        self.waiting = True
        #: True if its plan leaves their room to all graphs that run before its backward
        self.encloses = False
        #: the most held so far while it waits, beside what it has left
        self.amid_bytes = 0
        self.binding = binding
        #: bytes that it left on the device, and that it would have left if nothing had moved
        self.kept_bytes, self.full_bytes = kept_bytes, full_bytes


@dataclass(eq=False)
class GraphUsage:
    """Memory that one compiled graph holds while it is not running."""

    usage: DeviceUsage
    #: key of the runtime that moves its tensors
    runtime: str = ""
    #: ids of the live parameters that it has been called with
    parameters: set[int] = field(default_factory=set)
    #: True if its backward makes gradients for them
    trains: bool = False
    #: forwards that wait for their backward, in order
    passes: list[weakref.ref[PendingBackward]] = field(default_factory=list)
    #: True if a backward has run
    has_returned: bool = False
    #: True if others, or itself with other parameters, have run between its runs
    in_turn: bool = False
    #: graphs whose backward, and so whose gradients, came between its forward and its backward
    amid: weakref.WeakSet[GraphUsage] = field(default_factory=weakref.WeakSet)
    #: most bytes held together, if nothing had moved, while one of its forwards ran or waited
    most_wanted_bytes: int = 0
    #: most bytes that one of its forwards saved then
    most_kept_bytes: int = 0
    _bindings: dict[tuple[int, ...], ParameterSet] = field(default_factory=dict)

    def bind(self, parameters: Sequence[torch.Tensor]) -> ParameterSet:
        """Return the binding for the parameters of one call; register new ones."""
        self.usage.drop_dead()
        key = tuple(map(id, parameters))
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = ParameterSet(key)
            self.parameters.update(key)
            self.usage.holdings.add(parameters)
            bind(parameters, self.runtime)
        return binding

    def bound(self) -> list[ParameterSet]:
        """The bindings whose parameters live, in the order of their first call."""
        self.usage.drop_dead()
        return list(self._bindings.values())

    @property
    def bindings(self) -> int:
        """The number of bindings whose parameters live."""
        self.usage.drop_dead()
        return len(self._bindings)

    def forget(self, parameter: int) -> None:
        """Forget a dead parameter, since its id may be reused."""
        if parameter in self.parameters:
            self.parameters.remove(parameter)
            for gone in [k for k, b in self._bindings.items() if parameter in b.ids]:
                del self._bindings[gone]

    def waiting(self) -> list[PendingBackward]:
        """The forwards that wait for their backward, newest last."""
        found = [(ref, one) for ref in self.passes if (one := ref()) is not None and one.waiting]
        if len(found) < len(self.passes):
            self.passes[:] = [ref for ref, _ in found]
        return [one for _, one in found]

    def newest(self, binding: ParameterSet) -> PendingBackward | None:
        """The newest waiting forward with these parameters."""
        return next((p for p in reversed(self.waiting()) if p.binding is binding), None)

    def left_by(self, binding: ParameterSet) -> int:
        """Bytes that the newest waiting forward with these parameters left on the device."""
        newest = self.newest(binding)
        return 0 if newest is None else newest.kept_bytes

    def waiting_bytes(self) -> int:
        return sum(one.kept_bytes for one in self.waiting())

    def begin(
        self, outputs: object, binding: ParameterSet, kept_bytes: int, full_bytes: int
    ) -> PendingBackward | None:
        """Note a forward whose saved tensors stay until its backward. None if it gets none."""
        node = _autograd_node(outputs)
        if node is None:
            return None
        one = PendingBackward(binding, kept_bytes, full_bytes)
        metadata = cast("dict[str, list[PendingBackward]]", node.metadata)
        metadata.setdefault("offcompile", []).append(one)
        self.passes.append(weakref.ref(one))
        self.usage.outside.waits(one)
        return one

    def end(self) -> None:
        """Note that a backward has run, which frees what the newest forward saved."""
        self.has_returned = True
        for one in self.waiting()[-1:]:
            one.waiting = False
        self.usage.returned(self)


def _autograd_node(outputs: object) -> torch.autograd.graph.Node | None:
    several: Sequence[object] = outputs if isinstance(outputs, tuple | list) else (outputs,)
    for out in several:
        if isinstance(out, torch.Tensor) and out.grad_fn is not None:
            return out.grad_fn
    return None


class HeldBeside(NamedTuple):
    """Bytes held by others than one graph: now, and at most during its step."""

    now: int
    in_step: int


class Pool(Protocol):
    """Device memory that a graph's plan keeps between steps, since it was captured."""

    @property
    def entry(self) -> GraphUsage: ...
    @property
    def pool_bytes(self) -> int: ...
    def give_way(self) -> bool: ...


class DeviceUsage:
    """The entries of all graphs that compute on one device, in order of compilation."""

    def __init__(self) -> None:
        self.holdings = ParameterMemory()
        self.results = LiveOutputs()
        self.outside = OutsideTensors()
        self.ranks = RankMemory()
        self.spare = SpareRoom()
        self.pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        #: ids of parameters that were sent to the host to make room for those of other calls
        self.sent: set[int] = set()
        self._entries: list[weakref.ref[GraphUsage]] = []
        #: the binding of the last run
        self._last: weakref.ref[ParameterSet] | None = None
        #: cached result of `held_beside`, until something may have changed
        self._found: tuple[GraphUsage, ParameterSet, HeldBeside] | None = None
        self._holders: tuple[tuple[int, int], list[weakref.ref[Holder]]] = ((-1, -1), [])
        #: those of them that may keep states on the device
        self._owners: list[weakref.ref[StatesOwner]] = []
        self._reserves: dict[int, HoleReserve] = {}

    def hole_reserve(self, budget_bytes: int, nbytes: int) -> HoleReserve:
        """The reserve for holes that all graphs with this budget share; begins with `nbytes`."""
        found = self._reserves.get(budget_bytes)
        if found is None:
            held_bytes = heap().resident_bytes() if heap().gives_back else 0
            found = HoleReserve(budget_bytes, nbytes, held_bytes)
            self._reserves[budget_bytes] = found
        return found

    def open(self, runtime: str = "") -> GraphUsage:
        """Make an entry for a graph. Only a weak reference to it is kept."""
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

    # --- runs -----------------------------------------------------------------------------------

    def begins(self, entry: GraphUsage, binding: ParameterSet) -> None:
        """Note that a run of either half begins."""
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
        """Note that a backward has run between the halves of all graphs that still wait."""
        for other in self.entries():
            if other.waiting():
                other.amid.add(entry)
        self.invalidate()

    def waiting_forwards(self) -> int:
        """The number of forwards that wait for their backward."""
        return sum(len(entry.waiting()) for entry in self.entries())

    def all_enclose(self) -> bool:
        """True if the plans of all waiting forwards leave their room to graphs that run now."""
        return all(p.encloses for entry in self.entries() for p in entry.waiting())

    def invalidate(self) -> None:
        """Drop cached results, since something may have changed unnoticed."""
        self._found = None

    def others(self, entry: GraphUsage, binding: ParameterSet) -> list[list[torch.Tensor]]:
        """Parameters of other calls that the graph's runtime can move, grouped by call, first seen
        first, each once."""
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

    # --- held memory ----------------------------------------------------------------------------

    def most_held(self) -> int:
        """An upper bound of `held_beside` that is quick to compute."""
        # weights and two sets of gradients: present and future ones
        waiting = sum(e.waiting_bytes() for e in self.entries())
        standing = self.results.standing_bytes()
        beside = standing + self.ranks.held_bytes(()) + sum(p.pool_bytes for p in self.pools)
        return 3 * self.holdings.seen_bytes + waiting + all_held_bytes() + beside

    def unmoved_bytes(self) -> int:
        """Bytes that waiting forwards would hold in addition if they had moved nothing."""
        return sum(p.full_bytes - p.kept_bytes for e in self.entries() for p in e.waiting())

    def crowded(
        self, entry: GraphUsage, wanted_bytes: int, kept_bytes: int, budget_bytes: int
    ) -> bool | None:
        """True if this graph and others together save more for backward than the budget holds.
        None if no backward has run yet: the number of graphs that follow is still unknown.

        wanted_bytes: bytes held now if nothing moves. kept_bytes: the part that this run would save
        for backward. If that is a new maximum, the most wanted so far is scaled up in proportion.
        """
        room_bytes = budget_bytes - self.outside.most_bytes
        together = {entry, *(e for e in self.entries() if e.waiting())}
        for one in together:
            one.most_wanted_bytes = max(one.most_wanted_bytes, wanted_bytes)
        if any(e.has_returned for e in together):
            if 0 < entry.most_kept_bytes < kept_bytes:
                entry.most_wanted_bytes *= kept_bytes
                entry.most_wanted_bytes //= entry.most_kept_bytes
            entry.most_kept_bytes = max(entry.most_kept_bytes, kept_bytes)
            return entry.most_wanted_bytes > room_bytes
        entry.most_kept_bytes = max(entry.most_kept_bytes, kept_bytes)
        return None

    def held_beside(self, entry: GraphUsage, binding: ParameterSet) -> HeldBeside:
        """Bytes on the device outside of this graph's plan.

        The plan includes the parameters of the call and the gradients that it makes. Gradients that
        exist already are counted here, since new ones are added to them, and so is the memory of
        our optimizers, of DDP and of FSDP2. Memory of keepers is not counted: they evict it when it
        is in the way.
        """
        known = self._found
        if known is not None and known[0] is entry and known[1] is binding:
            return known[2]
        self.drop_dead()
        held = self.results.standing_bytes() + self.holdings.total_bytes()
        held += sum(h.held_bytes() for h in self._all_holders())
        held += self.ranks.held_bytes(self.holdings.weight)
        held += sum(pool.pool_bytes for pool in self.pools if pool.entry is not entry)
        weight, coming = self.holdings.weight, self.holdings.coming
        mine = binding.ids
        held -= sum(weight.get(key, 0) for key in mine)
        more = 0
        for other in self.entries():
            held += other.waiting_bytes()
            # its backward runs between this graph's halves, so its gradients exist during this step
            if other.trains and other in entry.amid:
                keys = other.parameters - mine
                if other is entry:  # its plan makes gradients of hosted weights leave
                    keys = {key for key in keys if weight.get(key)}
                more += sum(coming.get(key, 0) for key in keys)
        found = HeldBeside(held, held + more)
        self._found = (entry, binding, found)
        return found

    def host_beside(self, entry: GraphUsage, binding: ParameterSet) -> int:
        """Bytes of the host tier that plans of other calls take, without the parameters that they
        share with this call, and their gradients."""
        found = 0
        for other in self.entries():
            if other.runtime == entry.runtime:
                for one in other.bound():
                    if one is not binding and one.host_bytes:
                        shared = self.holdings.size_of(one.ids & binding.ids)
                        found += max(0, one.host_bytes - 2 * shared)
        return found

    def owners(self) -> list[StatesOwner]:
        """The optimizers of these parameters that may keep states on the device."""
        self._all_holders()
        return [h for ref in self._owners if (h := ref()) is not None]

    def give_up_pools(self, entry: GraphUsage) -> None:
        """Have other graphs give up what they keep between steps."""
        for pool in tuple(self.pools):
            if pool.entry is not entry:
                pool.give_way()

    def _all_holders(self) -> list[Holder]:
        """The holders among the optimizers of these parameters."""
        state = registrations(), self.holdings.births
        if self._holders[0] != state:
            trained = [*self.holdings.living(), *self.ranks.shards()]
            found = holders_of(trained)
            self._holders = state, list(map(weakref.ref, found))
            self._owners = [weakref.ref(h) for h in found if isinstance(h, StatesOwner)]
        return [h for ref in self._holders[1] if (h := ref()) is not None]
