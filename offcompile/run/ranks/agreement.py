"""Lets the ranks plan a graph together, and tells them that it was refused here.

A rank that refuses a graph (`Infeasible`, say) leaves its training loop; the others would go on to
the first collective of DDP or FSDP2, and wait there until the timeout of the group. So before a new
graph of such a model first runs, each rank writes into the store of the group that its plan stands,
or why it does not, and reads what the others wrote. Graphs are known by their content, not by their
number. If others have not made such a graph after `LONGEST_S`, the rank warns, names the first op
that differs, goes on, and never waits for a graph again. So ranks with graphs of their own lose
that time once. Nothing but the refusal depends on this. Before that, while it compiles, the graph
is planned once for all ranks (`meeting`), with the same patience.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from offcompile.ir import Infeasible, OffloadError
from offcompile.report.log import warn
from offcompile.runtime.base.once import made_once

from .absence import Ranks
from .difference import first_difference, keep
from .meeting import Ballot, FirstMeeting, Known, LaterMeeting, Meeting, RankGroup
from .torch_state import default_store, running_replica

#: how long a rank waits for the others to plan the graph that it has planned
LONGEST_S = 120.0


class Group(NamedTuple):
    """The ranks that meet in collectives, and this one's number."""

    store: Any
    rank: int
    world: int


@dataclass
class _Past:
    """Keeps the messages that this process has exchanged so far."""

    #: graphs made, by content: ranks count those of equal content alike
    alike: Counter[str] = field(default_factory=Counter)
    #: graphs that others were told of
    ran: int = 0
    #: True if others did not make a graph that was made here
    in_vain: bool = False


def _past() -> _Past:
    return made_once("what ranks have told each other", None, _Past)


@dataclass(eq=False)
class Agreement:
    """The exchange about one graph; silent where no wrapper would wait for other ranks."""

    key: str
    #: the graph, an op a line
    text: str
    #: True once this rank has told what became of the graph
    told: bool = False
    #: number of the graph among those that this rank has told others of
    _number: int = field(default=0, init=False)
    #: the ranks that plan the graph; False: this one plans for itself; None: not known yet
    _group: RankGroup | Literal[False] | None = field(default=None, init=False)
    #: True once the ranks have met to plan the graph
    _met: bool = field(default=False, init=False)
    _known: Known | None = field(default=None, init=False)

    @classmethod
    def on(cls, gm: fx.GraphModule) -> Agreement:
        # not its shapes: each rank may have a batch of its own
        text = str(gm.graph)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        _past().alike[digest] += 1
        return cls(f"offcompile/{digest}/{_past().alike[digest]}", text)

    def stands(self) -> None:
        """Say that the graph runs here, and raise what another rank has said instead."""
        group = self._to_tell()
        if group is None:
            return
        store, rank, world = group
        self._begin(group)
        store.set(f"{self.key}/{rank}", "{}")
        others = {r: f"{self.key}/{r}" for r in range(world) if r != rank}
        longest_s = 0.001 if _past().in_vain else LONGEST_S
        ranks = Ranks(store, rank, range(world))
        ended = ranks.wait(list(others.values()), longest_s)
        late = [r for r, key in others.items() if not store.check([key])]
        if ended is None:
            self._missing(group, late)
        for r, key in others.items():
            if store.check([key]):
                _raise(r, json.loads(store.get(key)))
        if ended is not None and late and not _past().in_vain:
            raise ranks.error(f"{ended}. The model cannot be trained without it")

    def refused(self, error: OffloadError) -> None:
        """Tell the others why the graph does not run here."""
        group = self._to_tell()
        if group is None:
            return
        said: dict[str, Any] = {"text": str(error), "kind": type(error).__name__}
        if isinstance(error, Infeasible):
            said["needed_bytes"] = error.needed_bytes
            said["reason"], said["change"] = error.reason, error.smallest_change
        group.store.set(f"{self.key}/{group.rank}", json.dumps(said))

    # --- plans ----------------------------------------------------------------------------------

    def meeting(self) -> Meeting | None:
        """Return the exchange about the next plan of the graph; None: this rank plans for itself.
        Call `keep` with it once the plan is made."""
        if self._group is None:
            self._group = self._opened()
        if not self._group:
            return None
        if not self._met:
            self._met = True
            return FirstMeeting(self._group, f"{self.key}/plan")
        known = self._known
        return None if known is None else LaterMeeting(self._group, f"{self.key}/plan", known)

    def ballot(self, calls: int) -> Ballot | None:
        """Return the exchange about another plan at this call of the graph; None if this rank
        plans for itself."""
        if not self._group or self._known is None:
            return None
        return Ballot(self._group, f"{self.key}/call {calls}", self._known)

    @property
    def planned_together(self) -> bool:
        """True if the ranks have planned the graph together."""
        return self._known is not None

    def keep(self, meeting: Meeting) -> None:
        """Note for later plans what the ranks had to make this one with."""
        self._known = meeting.known

    def _opened(self) -> RankGroup | Literal[False]:
        """Find the ranks that plan the graph with this one."""
        group = _group()
        if group is None:
            return False
        self._begin(group)
        store, rank, world = group

        def gone(ranks: Sequence[int]) -> str | None:
            return next(Ranks(store, rank, ranks).absent(), None)

        found = RankGroup(store, rank, world, LONGEST_S, partial(self._missing, group), gone)
        if _past().in_vain:
            FirstMeeting(found, f"{self.key}/plan").end()
            return False
        Ranks(store, rank, range(world)).arrive()
        return found

    # --- the store ------------------------------------------------------------------------------

    def _to_tell(self) -> Group | None:
        """The ranks to tell what became of the graph, once; None: no need."""
        if self.told:
            return None
        self.told = True
        return _group()

    def _begin(self, group: Group) -> None:
        """Show the others this graph, at the first question about it."""
        if not self._number:
            _past().ran += 1
            self._number = _past().ran
            keep(group.store, group.rank, self._number, self.text)

    def _missing(self, group: Group, ranks: Sequence[int]) -> None:
        """Warn of ranks that did not plan the graph, and wait for none from now on."""
        if not ranks or _past().in_vain:
            return
        _past().in_vain = True
        differs = first_difference(group.store, ranks[0], self._number, self.text)
        warn(
            f"rank {group.rank} has planned a graph that {_named(ranks)} did not plan in"
            f" {LONGEST_S:.0f} s, and goes on. From now on it does not wait to hear of"
            f" refusals on other ranks, and plans for itself. {differs} If the ranks compile"
            " different graphs on purpose, this is harmless"
        )


def _group() -> Group | None:
    """The ranks that would wait for this one in a collective; None: there are none."""
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if world == 1 or not torch.is_grad_enabled() or not _waits_for_others():
        return None
    store = default_store()
    return None if store is None else Group(store, rank, world)


def _waits_for_others() -> bool:
    """True if the graph is part of a model whose ranks meet in collectives."""
    if running_replica() is not None:
        return True
    states: Any = sys.modules.get("torch.distributed._composable_state")
    return bool(getattr(states, "_module_state_mapping", None))


def _named(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:4]))
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank {some}{more}" if len(ranks) == 1 else f"ranks {some}{more}"


def _raise(rank: int, said: dict[str, Any]) -> None:
    if not said:
        return
    if said["kind"] == Infeasible.__name__:
        reason = f"On rank {rank}: {said['reason']}"
        raise Infeasible(reason, said["needed_bytes"], said["change"])
    raise OffloadError(f"Rank {rank} has stopped with {said['kind']}: {said['text']}")
