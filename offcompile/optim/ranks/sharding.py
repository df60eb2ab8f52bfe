"""Shares out the states of an optimizer over the ranks of a process group, as ZeRO-1 does.

Each parameter has one owner, which alone keeps its states and updates it. When a step is over, the
owners send the weights that they have updated, unless all ranks see them (`common_weights`). Before
that, ranks tell each other which weights those are, and if a rank has failed: so the others raise
an error instead of waiting for it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from offcompile.ir import OffloadError
from offcompile.optim.layout import flat, is_dense
from offcompile.report.log import tell_once
from offcompile.run.ranks.absence import Ranks
from offcompile.run.ranks.torch_state import default_store
from offcompile.runtime.base.once import made_once
from offcompile.runtime.moves.weights import is_on_host
from offcompile.runtime.states import updates

from .common_weights import CommonWeights, Whereabouts
from .partition import partition
from .roll_call import RollCall
from .shards import is_sharded
from .wire import OwnedTensor, Wire

#: shares that are larger than the mean by this factor are worth a line in the log
UNEVEN = 1.2
_OK, _TOUCHED = 0, 1
#: how a line begins by which a rank says that it has failed
_FAILED = "failed: "

Prepared = TypeVar("Prepared")


class Sharding:
    """The owners of one optimizer's parameters, which it knows by their keys: 0, 1, 2, …"""

    def __init__(self, group: Any) -> None:
        self.wire = Wire(group)
        store = default_store()
        if store is None:
            raise OffloadError(
                "sharded=True is not possible: this version of torch has no store by which ranks"
                " could compare their parameters"
            )
        here = torch.distributed.get_rank()
        self._ranks = Ranks(store, here, self.wire.members)
        self._ranks.arrive()
        self._roll_call = RollCall(self._ranks, _key(self.wire.members))
        self._parameters: list[torch.Tensor] = []
        self._common = CommonWeights(self.wire, self._parameters)
        #: True while all ranks are in step() or discard()
        self._together = False
        self._owners: list[int] = []
        #: bytes of states that each rank has: of trained parameters, and of frozen ones
        self._shares = {True: [0] * self.wire.world, False: [0] * self.wire.world}
        #: parameters that this rank has begun to update, and that the others do not have yet
        self._touched: set[int] = set()
        #: number of exchanges so far, the same on all ranks
        self._exchanges = 0
        #: True while weights may differ between ranks
        self.differs = False

    # -- owners ----------------------------------------------------------------------------------

    def add(self, new: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Deal out parameters, each with the bytes of its states."""
        first = len(self._parameters)
        self._parameters += [parameter for parameter, _ in new]
        self._owners += [0] * len(new)
        for trained, shares in self._shares.items():
            here = [i for i, (p, _) in enumerate(new) if p.requires_grad is trained]
            owners = partition([new[i][1] for i in here], shares)
            for i, owner in zip(here, owners, strict=True):
                self._owners[first + i] = owner
                shares[owner] += new[i][1]
        largest, mean = max(self._shares[True]), sum(self._shares[True]) / self.wire.world
        if largest > UNEVEN * mean:
            tell_once(
                "states are shared out by whole parameters: the largest share of a rank is"
                f" {largest / 2**20:.0f} MiB, and the mean {mean / 2**20:.0f} MiB"
            )

    def owns(self, key: int) -> bool:
        """True if this rank keeps the states of the parameter."""
        return self._owners[key] == self.wire.rank

    def owner(self, key: int) -> int:
        """The rank, within the group, that keeps the states of the parameter."""
        return self._owners[key]

    def agree(self, kind: str, labels: Sequence[str]) -> None:
        """Compare the optimizer and its parameters over ranks; OffloadError names the first that
        differs."""
        lines = [kind]
        for i, (label, parameter) in enumerate(zip(labels, self._parameters, strict=True)):
            shape = f"of shape {tuple(parameter.shape)}"
            name = label if label.endswith(shape) else f"parameter {i} {shape}, {label}"
            trained = "trained" if parameter.requires_grad else "frozen"
            lines.append(
                f"{name}, strides {parameter.stride()}, {parameter.dtype} on"
                f" {parameter.device.type}, {trained}"
            )
        self._roll_call.meet("An optimizer with sharded=True", lines, _different)

    def touch(self, key: int) -> None:
        """Note that this rank begins to update a parameter of its own."""
        self._touched.add(key)

    def reset(self) -> None:
        """Forget what was updated: weights and states have been loaded anew."""
        self._touched.clear()
        self.differs = False

    def memory(self, key: int) -> torch.Tensor | None:
        """Return the memory in which this rank, the owner, updates a weight for all ranks; None: in
        its own. In backward, all ranks must have reduced its gradient there."""
        parameter = self._parameters[key]
        if not self._together and updates.reducer_of(parameter) is None:
            return None
        return self._common.memory(key)

    def updated_elsewhere(self, key: int) -> None:
        """Note that the owner of a weight has its gradient, and updates it now or in step()."""
        if self._common.is_there(key):
            # autograd must notice if this rank still needs the old weight
            torch.autograd.graph.increment_version(self._parameters[key])

    def held_bytes(self) -> int:
        """Bytes of buffers, at most."""
        return min(self.wire.buffer_bytes(), sum(p.nbytes for p in self._parameters))

    # -- collectives -----------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have all ranks in this block at the same time, if weights are updated in memory that all
        of them see: a collective."""
        self.wait_for_owners()
        self._together = True
        try:
            yield
        finally:
            self._together = False

    def wait_for_owners(self) -> None:
        """Wait until all ranks are here, if weights are updated in memory that all of them see."""
        if self._common.is_used:
            with self._explained():
                self.wire.meet()

    def meet(self, place: str, prepare: Callable[[], Prepared]) -> Prepared:
        """Call `prepare` and wait until all ranks have done so, before a collective. If it fails on
        one, all raise; so they do if a rank does not come, or calls something else."""
        try:
            found = prepare()
        except Exception as error:
            with suppress(RuntimeError, OffloadError):  # all raise, each for its own reason
                said = f"{_FAILED}{type(error).__name__}: {error}".replace("\n", " ")
                self._roll_call.meet(place, [said], _elsewhere)
            raise
        self._roll_call.meet(place, [place], _elsewhere)
        return found

    def tell(self, error: BaseException) -> None:
        """Let the ranks that call `exchange` know that this one could not finish its step."""
        with suppress(RuntimeError, OffloadError):  # an error is under way already
            self._changed(f"{type(error).__name__}: {error}"[:2000])

    def exchange(self) -> list[torch.Tensor]:
        """Send updated weights to all ranks, and return them: a collective, within `together`.
        OffloadError if a rank has failed."""
        self._common.publish([key for key in self._touched if self.owns(key)])
        changed, quiet, failed = self._changed()
        if failed:
            rank = self.wire.members[failed[0]]
            said = self._ranks.store.get(self._failure(rank)).decode()
            raise OffloadError(f"Rank {rank} has failed in step(), and sent no weights: {said}")
        with self._explained():
            owned = {key for key in (*changed, *quiet) if self.owns(key)}
            sent = self._common.share(changed, quiet, owned)
        self._send(sent)
        for key in changed:
            if not self.owns(key):
                # this does not count as a change, and copies of the old weight must not be used
                torch.autograd.graph.increment_version(self._parameters[key])
        self._touched.clear()
        self.differs = False
        return [self._parameters[key] for key in changed]

    def _send(self, keys: Sequence[int]) -> None:
        """Overwrite weights with those of their owners."""
        of = {key: self._parameters[key] for key in keys}
        copies = {key: p.detach().contiguous() for key, p in of.items() if not is_dense(p)}
        with self._explained():
            self.wire.spread([self._item(key, copies.get(key)) for key in keys])
        for key, copy in copies.items():
            if not self.owns(key):
                of[key].detach().copy_(copy)

    def spread(self, items: Sequence[OwnedTensor]) -> None:
        """Overwrite each tensor with that of its owner: a collective."""
        with self._explained():
            self.wire.spread(items)

    def gathered(self, mine: Any) -> list[Any]:
        """Return the object of each rank: a collective."""
        with self._explained():
            return self.wire.gathered(mine)

    def _changed(self, failure: str = "") -> tuple[dict[int, Whereabouts], list[int], list[int]]:
        """Return the parameters that any rank has updated, each with the place from which it goes
        to all, others that all ranks have on the host, and the ranks that have failed, within the
        group. failure: why this rank has."""
        self.differs = True
        self._exchanges += 1
        if failure:
            self._ranks.store.set(self._failure(self._ranks.rank), failure)
        count = len(self._parameters)
        told = [_TOUCHED if key in self._touched else _OK for key in range(count)]
        told += [int(self._common.place(key)) for key in range(count)]
        told += [int(bool(failure) and r == self.wire.rank) for r in range(self.wire.world)]
        with self._explained():
            known = self.wire.largest(told)
        changed = {key: Whereabouts(known[count + key]) for key in range(count) if known[key]}
        self.differs = bool(changed)
        quiet = [
            key
            for key in range(count)
            if key not in changed and known[count + key] == Whereabouts.APART
        ]
        return changed, quiet, [rank for rank in range(self.wire.world) if known[2 * count + rank]]

    def _failure(self, rank: int) -> str:
        """Where a rank writes why it has failed: a new place each time, as others may read late."""
        return f"{self._roll_call.key}/failed/{self._exchanges}/{rank}"

    def _item(self, key: int, copy: torch.Tensor | None) -> OwnedTensor:
        parameter = self._parameters[key].detach()
        device = parameter.device.type
        return OwnedTensor(
            self._owners[key],
            flat(parameter) if copy is None else copy.view(-1),
            self.wire.device_for(device),
            in_place=device == "cpu" or not is_on_host(self._parameters[key]),
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._ranks.failed(error, "Updated weights cannot be exchanged") from error


def refuse_sharded(parameter: torch.Tensor) -> None:
    """Raise OffloadError for a parameter of which each rank holds a part anyway."""
    if is_sharded(parameter):
        raise OffloadError(
            f"A parameter of shape {tuple(parameter.shape)} is a DTensor, of which each rank keeps"
            " the states of its own part anyway (FSDP2, tensor parallelism): leave out sharded=True"
        )


def _key(members: Sequence[int]) -> str:
    """A name in the store for the next sharded optimizer of these ranks, the same on each."""
    digest = hashlib.sha256(str(list(members)).encode()).hexdigest()[:16]
    counts: Counter[str] = made_once("sharded optimizers by their ranks", None, Counter)
    counts[digest] += 1
    return f"offcompile/optim/{digest}/{counts[digest]}"


def _different(rank: int, mine: str, other: int, theirs: str) -> str:
    return (
        f"Ranks {rank} and {other} cannot share the states of an optimizer, because their"
        f" parameters differ: the first that does is [{mine}] on rank {rank} and [{theirs}] on rank"
        f" {other}. Give the optimizer the same parameters in the same order on each rank, and the"
        " same arguments"
    )


def _elsewhere(rank: int, mine: str, other: int, theirs: str) -> str:
    for of, line in ((rank, mine), (other, theirs)):
        if line.startswith(_FAILED):
            return f"Rank {of} could not take part: {line.removeprefix(_FAILED)}"
    return (
        f"Rank {rank} has called {mine} while rank {other} has called {theirs}: with sharded=True,"
        " call both on every rank, in the same order"
    )
