"""The parameters of an optimizer and their states."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.states.disk_states import DiskStates
from offcompile.runtime.states.gradient_transport import (
    MOST_LENT,
    GradientTransport,
    carrier_of,
)
from offcompile.runtime.states.states import MemoryStates, States

from .layout import shaped_like
from .ranks.sharding import Sharding, refuse_sharded
from .ranks.shards import local, sharded_like
from .rules import Rule
from .settings import Settings
from .state_placement import SMALL_BYTES, Places, device_in, is_kept_there, is_streamed

MASTER = "master"
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(eq=False)
class ParameterEntry:
    """One parameter. `names`: its states in the store's order; empty before its first update."""

    parameter: torch.Tensor
    group: dict[str, Any]
    key: int
    place: str | None = None
    store: States | None = None
    names: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    #: state names of its rule when `names` was set
    ruled: tuple[str, ...] | None = None
    #: number of steps made, if the rule counts them
    step: torch.Tensor | None = None
    #: cached value of `step`, and the version of `step` when it was read
    counted: tuple[int, int] | None = None
    #: True while the momentum is not initialised
    is_first: bool = True
    #: the version of the parameter that the master agrees with; None: no master value yet
    agreed: int | None = None

    def count(self) -> int:
        """The number of steps made, without a device sync each time."""
        assert self.step is not None
        known = self.counted
        if known is None or known[1] != self.step._version:
            known = self.counted = int(self.step.item()), self.step._version
        return known[0]

    def count_up(self) -> None:
        """Count one more step."""
        if self.step is not None:
            known = self.counted
            fresh = known is not None and known[1] == self.step._version
            self.step += 1
            self.counted = (known[0] + 1, self.step._version) if known and fresh else None

    @property
    def local(self) -> torch.Tensor:
        """The part of the parameter on this rank, which is what its updates change."""
        return local(self.parameter)

    @property
    def label(self) -> str:
        names = self.group.get("param_names")
        if names is not None:
            for name, parameter in zip(names, self.group["params"], strict=True):
                if parameter is self.parameter:
                    return str(name)
        return f"parameter {self.key} of shape {tuple(self.parameter.shape)}"


class Scratch(threading.local):
    """Memory in which one thread casts tiles; fresh memory would cost more than the update."""

    def __init__(self) -> None:
        self.rooms: dict[tuple[str, torch.dtype], torch.Tensor] = {}


@dataclass
class Core:
    """All parameters of one optimizer. `state` is the optimizer's own dictionary of that name."""

    rule: Rule
    settings: Settings
    places: Places
    state: defaultdict[torch.Tensor, Any]
    #: shares states out over ranks; None: this rank has all
    sharding: Sharding | None = None
    entries: dict[torch.Tensor, ParameterEntry] = field(default_factory=dict)
    scratch: Scratch = field(default_factory=Scratch)
    #: place → keys visited in this step, and keys that its store was told to expect
    _visited: dict[str, list[int]] = field(default_factory=dict)
    _expected: dict[str, list[int]] = field(default_factory=dict)
    _carriers: weakref.WeakSet[GradientTransport] = field(default_factory=weakref.WeakSet)
    #: updates that were begun, of one parameter or of several together
    begun: int = 0
    #: True if a step ended amid its updates
    is_torn: bool = False
    _next_key: int = 0
    #: cached result of `held_bytes`, until something changes
    _held_bytes: int | None = None

    def know(self, groups: Sequence[dict[str, Any]]) -> None:
        """Set the groups."""
        self._held_bytes = None
        new: list[ParameterEntry] = []
        for group in groups:
            refuse_flags(group)
            for parameter in group["params"]:
                if parameter.requires_grad and not parameter.is_floating_point():
                    raise OffloadError(
                        f"A parameter of {parameter.dtype} cannot be updated here: give it to"
                        " torch.optim (complex ones as torch.view_as_real)"
                    )
                entry = self.entries.get(parameter)
                if entry is None:
                    entry = ParameterEntry(parameter, group, self._next_key)
                    self.entries[parameter] = entry
                    self._next_key += 1
                    new.append(entry)
                else:
                    entry.group = group
        if self.sharding is not None and new:
            for entry in new:
                refuse_sharded(entry.parameter)
            self.sharding.add([(e.parameter, self.nbytes(e)) for e in new])

    def owns(self, entry: ParameterEntry) -> bool:
        """True if this rank keeps the states of the parameter, and so updates it."""
        return self.sharding is None or self.sharding.owns(entry.key)

    def begin(self, entries: Iterable[ParameterEntry]) -> None:
        """Note an update, of one parameter or of several together, before it is made."""
        self.begun += 1
        if self.sharding is not None:
            for entry in entries:
                self.sharding.touch(entry.key)

    def visiting(self, entry: ParameterEntry) -> None:
        """Note the use of a parameter's states, to predict the order of the next step."""
        if entry.place is not None and not isinstance(entry.store, MemoryStates):
            self._visited.setdefault(entry.place, []).append(entry.key)

    def refuse_torn(self) -> None:
        """Raise OffloadError if the last step ended amid its updates."""
        if self.is_torn:
            raise OffloadError(
                "The last step() ended amid its updates, by an error or Ctrl-C: some parameters"
                " were updated and others were not. Load the last checkpoint into the model and"
                " into this optimizer (load_state_dict), or call discard() to go on from the"
                " weights as they are"
            )

    def step_over(self) -> None:
        """Tell stores that prefetch which states the next step is likely to need."""
        for place, visited in self._visited.items():
            if visited and visited != self._expected.get(place):
                self._expected[place] = visited
                self.places.named(place).expect(visited)
        self._visited = {}
        disk = self.places.stores().get("disk")
        if isinstance(disk, DiskStates):
            disk.step_over()

    # -- states --------------------------------------------------------------------------------

    def has_master(self, entry: ParameterEntry) -> bool:
        return entry.parameter.dtype in _HALVES and self.settings.master is not False

    def carrier(self, entry: ParameterEntry) -> GradientTransport | None:
        """The carrier that brings gradients to the host, if the parameter is updated there."""
        found = carrier_of(entry.local) if self.is_beside(entry) else None
        if found is not None:
            self._carriers.add(found)
        return found

    def finish(self) -> None:
        """Make updated weights visible to compute that is queued from now on."""
        for carrier in tuple(self._carriers):
            carrier.finish()

    def compute_dtype(self, entry: ParameterEntry) -> torch.dtype:
        dtype = entry.parameter.dtype
        return torch.float32 if dtype in _HALVES and self.has_master(entry) else dtype

    def layout(self, entry: ParameterEntry) -> dict[str, torch.dtype]:
        """State name → dtype, for the states that it has or would get now."""
        compute = self.compute_dtype(entry)
        lossy = self.settings.state_dtype
        found = {MASTER: compute} if self.has_master(entry) else {}
        names = dict.fromkeys(n for n in entry.names if n != MASTER)
        names.update(dict.fromkeys(self.rule.names(entry.group)))
        return found | dict.fromkeys(names, lossy or compute)

    def place(self, needed: ParameterEntry | None = None) -> None:
        """Choose places for parameters without one, except frozen parameters."""
        new = [
            e
            for e in self.entries.values()
            if e.place is None and self.owns(e) and (e.parameter.requires_grad or e is needed)
        ]
        if not new:
            return
        self._held_bytes = None
        chosen = self.places.choose((e.parameter, self.nbytes(e)) for e in new)
        for position, entry in enumerate(new):
            entry.place = chosen[position]

    def nbytes(self, entry: ParameterEntry) -> int:
        """Bytes that the states of a parameter take, or will take."""
        return entry.local.numel() * sum(d.itemsize for d in self.layout(entry).values())

    def place_again(self, device_bytes: int) -> None:
        """Choose all places again; `device_bytes`: what the device may keep."""
        self.places.choose_again(device_bytes)
        for entry in self.entries.values():
            entry.place = None
        self.place()

    def move(self, entry: ParameterEntry, place: str) -> None:
        """Have the states of a parameter at this place, to which they move if there are any."""
        self._held_bytes = None
        entry.place = place
        if entry.store is None:
            return
        flats = dict(self.read(entry))
        entry.store.remove(entry.key)
        entry.store = self.places.named(place)
        entry.store.add(entry.key, entry.local.numel(), entry.dtypes)
        self.write(entry, flats)
        self.state.pop(entry.parameter, None)
        self.show(entry)
        if entry.step is not None:
            entry.step = entry.step.to(device_in(place) or "cpu")
            entry.counted = None
            self.state[entry.parameter]["step"] = entry.step

    def held_bytes(self) -> int:
        """Bytes that states take, or will take, on the device of the parameters."""
        self.place()
        if self._held_bytes is None:
            self._held_bytes = self.held_with({})
        return self._held_bytes

    def held_with(self, moved: Mapping[ParameterEntry, str]) -> int:
        """Like `held_bytes`, with the states of some parameters at other places."""
        placed = {e: moved.get(e, e.place or "") for e in self.entries.values()}
        nbytes = sum(self.nbytes(e) for e, place in placed.items() if is_kept_there(place))
        on_cpu = {e for e in placed if e.parameter.device.type == "cpu"}
        if any(placed[e] == "disk" for e in on_cpu):
            nbytes += getattr(self.places.named("disk").facts(), "limit_bytes", 0)
        crossing: dict[str, int] = {}
        for entry, place in placed.items():
            if is_streamed(place):
                crossing[place] = max(crossing.get(place, 0), self.nbytes(entry))
        nbytes += sum(self.places.buffer_bytes(p, largest) for p, largest in crossing.items())
        if self.settings.uses_up:  # duplicates of offered gradients, on their way to the host
            beside = (e for e, p in placed.items() if p and e not in on_cpu and not device_in(p))
            lent = sorted(e.local.numel() * e.local.element_size() for e in beside)
            nbytes += sum(lent[-MOST_LENT:])
        if self.sharding is not None:
            nbytes += self.sharding.held_bytes()
        return nbytes

    def start(self, entry: ParameterEntry) -> None:
        """Create its missing states, all zero."""
        ruled, has_state = self.rule.names(entry.group), entry.parameter in self.state
        if entry.ruled == ruled and (has_state or not entry.names):
            return
        # tensors made in inference mode could not be changed later
        with torch.inference_mode(False):
            self._start(entry, ruled)

    def _start(self, entry: ParameterEntry, ruled: tuple[str, ...]) -> None:
        if entry.names and entry.parameter not in self.state:
            self.forget(entry)  # the user has emptied the optimizer's state
        if entry.store is None and entry.step is None:
            self.place(entry)
            assert entry.place is not None
            entry.place = self.places.advised(entry.parameter, self.nbytes(entry), entry.place)
        if self.rule.counts and entry.step is None:
            entry.step = torch.zeros((), device=device_in(entry.place) or "cpu")
            self.state[entry.parameter]["step"] = entry.step
        self._held_bytes = None
        layout = self.layout(entry)
        if tuple(layout) == entry.names:
            entry.ruled = ruled
            return
        self.place(entry)
        kept = dict(self.read(entry)) if entry.names else {}
        if entry.store is not None:
            entry.store.remove(entry.key)
        assert entry.place is not None
        entry.store = self.places.named(entry.place)
        entry.store.add(entry.key, entry.local.numel(), tuple(layout.values()))
        entry.names, entry.dtypes, entry.ruled = tuple(layout), tuple(layout.values()), ruled
        if kept:
            self.write(entry, kept)
        self.show(entry)

    def show(self, entry: ParameterEntry) -> None:
        """Expose states that are in memory in the optimizer's `state`."""
        if not isinstance(entry.store, MemoryStates):
            self.state[entry.parameter]  # makes an entry, which marks it as having states
            return
        shown = self.state[entry.parameter]
        for name, part in zip(entry.names, entry.store.tensors(entry.key), strict=True):
            if name == "momentum_buffer" and entry.is_first:
                continue
            shown[name] = sharded_like(shaped_like(part, entry.local), entry.parameter)

    def forget(self, entry: ParameterEntry) -> None:
        """Reset to a parameter that was never updated."""
        if entry.store is not None:
            entry.store.remove(entry.key)
        entry.store, entry.names, entry.dtypes, entry.ruled, entry.step = None, (), (), None, None
        entry.is_first, entry.agreed = True, None
        self.state.pop(entry.parameter, None)

    def read(self, entry: ParameterEntry) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield flat copies of its states, to be used briefly."""
        if entry.store is not None:
            numel = entry.local.numel()
            copies = [torch.empty(numel, dtype=d) for d in entry.dtypes]
            for r in entry.store.visit(entry.key, write=False):
                for copy, part in zip(copies, r.parts, strict=True):
                    copy[r.start : r.stop].copy_(part)
            yield from zip(entry.names, copies, strict=True)

    def write(self, entry: ParameterEntry, flats: Mapping[str, torch.Tensor]) -> None:
        """Write the given flat states to the store."""
        assert entry.store is not None
        for r in entry.store.visit(entry.key):
            for name, part in zip(entry.names, r.parts, strict=True):
                if name in flats:
                    part.copy_(flats[name][r.start : r.stop])

    def check(self, entry: ParameterEntry, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            raise OffloadError(
                f"The gradient of {entry.label} is sparse, which these optimizers do not support:"
                " use torch.optim.SparseAdam for it, or sparse=False in its embedding"
            )

    def waits_for_step(self, entry: ParameterEntry) -> bool:
        """True if an asynchronous device keeps its states and they are small: many such updates
        are one call in `step()`, where each of them alone would take the host as long."""
        if entry.parameter.device.type == "cpu" or self.rule.whole or self.sharding is not None:
            return False
        if self.settings.tail:  # `step()` hands what is left to threads, one by one
            return False
        if entry.place is None:
            self.place(entry)
        return is_kept_there(entry.place) and self.nbytes(entry) <= SMALL_BYTES

    def is_beside(self, entry: ParameterEntry) -> bool:
        """True if its states, and so its update, are on the host and not on the device."""
        return device_in(entry.place) is None

    def updated(self, entry: ParameterEntry) -> None:
        """Note that the weight and its states were written."""
        # the kernels do not bump it; autograd must notice if it still needs the old weight
        torch.autograd.graph.increment_version(entry.parameter)
        if entry.is_first:
            entry.is_first = False
            if "momentum_buffer" in entry.names:
                self.show(entry)
        entry.agreed = entry.parameter._version


def refuse_flags(group: Mapping[str, Any]) -> None:
    """Raise OffloadError for flags of torch's classes that are not supported here."""
    for name in ("differentiable", "capturable"):
        if group.get(name):
            raise OffloadError(
                f"{name}=True is not possible with optimizer states beside the weights: leave it"
                " out, or use torch.optim"
            )
