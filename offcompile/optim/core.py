"""Updates of parameters beside their states, range by range."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.states import MemoryStates, States

from .layout import flat, flat_like, is_dense, on_host, shaped_like
from .places import Places
from .rules import Hyper, Rule
from .settings import Settings

#: elements that are worked on at once where that takes more than one pass: they stay in the cache
TILE_ELEMENTS = 1 << 18
MASTER = "master"
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Entry:
    """One parameter. `names` are its states in the store's order, none before its first update."""

    parameter: torch.Tensor
    group: dict[str, Any]
    key: int
    place: str | None = None
    store: States | None = None
    names: tuple[str, ...] = ()
    #: steps made, where the rule counts them
    step: torch.Tensor | None = None
    #: momentum means nothing yet
    is_first: bool = True
    #: the version of the parameter that the master agrees with; None: the master means nothing yet
    agreed: int | None = None

    @property
    def label(self) -> str:
        names = self.group.get("param_names")
        if names is not None:
            for name, parameter in zip(names, self.group["params"], strict=True):
                if parameter is self.parameter:
                    return str(name)
        return f"parameter {self.key} of shape {tuple(self.parameter.shape)}"


@dataclass
class Core:
    """All parameters of one optimizer. `state` is the optimizer's own dictionary of that name."""

    rule: Rule
    settings: Settings
    places: Places
    state: defaultdict[torch.Tensor, Any]
    entries: dict[torch.Tensor, Entry] = field(default_factory=dict)
    _next_key: int = 0

    def know(self, groups: Sequence[dict[str, Any]]) -> None:
        """From now on these are the groups."""
        for group in groups:
            for refused in ("differentiable", "capturable"):
                if group.get(refused):
                    raise OffloadError(
                        f"{refused}=True is not possible with optimizer states beside the weights:"
                        f" leave it out, or use torch.optim"
                    )
            for parameter in group["params"]:
                if parameter.requires_grad and not parameter.is_floating_point():
                    raise OffloadError(
                        f"A parameter of {parameter.dtype} cannot be updated here: give it to"
                        " torch.optim (complex ones as torch.view_as_real)"
                    )
                entry = self.entries.get(parameter)
                if entry is None:
                    self.entries[parameter] = Entry(parameter, group, self._next_key)
                    self._next_key += 1
                else:
                    entry.group = group

    # -- states --------------------------------------------------------------------------------

    def has_master(self, entry: Entry) -> bool:
        half = entry.parameter.dtype in _HALVES and self.settings.master is not False
        return half or self.is_far(entry)

    def is_far(self, entry: Entry) -> bool:
        """Whether the weight's memory is out of reach for who updates it."""
        if (entry.place or "").startswith("device"):
            return False
        return on_host(entry.parameter) is None

    def compute_dtype(self, entry: Entry) -> torch.dtype:
        dtype = entry.parameter.dtype
        return torch.float32 if dtype in _HALVES and self.has_master(entry) else dtype

    def layout(self, entry: Entry) -> dict[str, torch.dtype]:
        """The states that it has, or would have now, by name."""
        compute = self.compute_dtype(entry)
        lossy = self.settings.state_dtype
        found = {MASTER: compute} if self.has_master(entry) else {}
        names = dict.fromkeys(n for n in entry.names if n != MASTER)
        names.update(dict.fromkeys(self.rule.names(entry.group)))
        return found | dict.fromkeys(names, lossy or compute)

    def place(self) -> None:
        """Settle where the states of those go that have no place yet."""
        new = [e for e in self.entries.values() if e.place is None]
        if not new:
            return
        chosen = self.places.choose((e.parameter, self._nbytes(e)) for e in new)
        for position, entry in enumerate(new):
            entry.place = chosen[position]

    def _nbytes(self, entry: Entry) -> int:
        return entry.parameter.numel() * sum(d.itemsize for d in self.layout(entry).values())

    def start(self, entry: Entry) -> None:
        """Give it the states that it lacks, all zero."""
        layout = self.layout(entry)
        if entry.names and not self.state.get(entry.parameter):
            self.forget(entry)  # somebody has emptied the optimizer's state
        if self.rule.counts and entry.step is None:
            self.place()
            device = (entry.place or "").removeprefix("device ")
            far = device == entry.place
            entry.step = torch.zeros((), device="cpu" if far else device)
            self.state[entry.parameter]["step"] = entry.step
        if tuple(layout) == entry.names:
            return
        self.place()
        kept = dict(self.read(entry)) if entry.names else {}
        if entry.store is not None:
            entry.store.remove(entry.key)
        assert entry.place is not None
        entry.store = self.places.named(entry.place)
        entry.store.add(entry.key, entry.parameter.numel(), tuple(layout.values()))
        entry.names = tuple(layout)
        if kept:
            self.write(entry, kept)
        self._show(entry)

    def _show(self, entry: Entry) -> None:
        """Put states that lie in memory into the optimizer's state."""
        if not isinstance(entry.store, MemoryStates):
            self.state[entry.parameter]  # so that it counts as one that has states
            return
        shown = self.state[entry.parameter]
        for name, part in zip(entry.names, entry.store.tensors(entry.key), strict=True):
            if name == MASTER and entry.parameter.dtype not in _HALVES:
                continue
            if name == "momentum_buffer" and entry.is_first:
                continue
            shown[name] = shaped_like(part, entry.parameter)

    def forget(self, entry: Entry) -> None:
        """Back to a parameter that was never updated."""
        if entry.store is not None:
            entry.store.remove(entry.key)
        entry.store, entry.names, entry.step = None, (), None
        entry.is_first, entry.agreed = True, None
        self.state.pop(entry.parameter, None)

    def read(self, entry: Entry) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of its states, flat, for a short while."""
        if entry.store is not None:
            numel = entry.parameter.numel()
            copies = [torch.empty(numel, dtype=d) for d in self._dtypes(entry)]
            for r in entry.store.visit(entry.key, write=False):
                for copy, part in zip(copies, r.parts, strict=True):
                    copy[r.start : r.stop].copy_(part)
            yield from zip(entry.names, copies, strict=True)

    def _dtypes(self, entry: Entry) -> list[torch.dtype]:
        layout = self.layout(entry)
        return [layout[name] for name in entry.names]

    def write(self, entry: Entry, flats: Mapping[str, torch.Tensor]) -> None:
        """Put flat states into the store, those that are given."""
        assert entry.store is not None
        for r in entry.store.visit(entry.key):
            for name, part in zip(entry.names, r.parts, strict=True):
                if name in flats:
                    part.copy_(flats[name][r.start : r.stop])

    # -- updates -------------------------------------------------------------------------------

    def check(self, entry: Entry, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            raise OffloadError(
                f"The gradient of {entry.label} is sparse, which these optimizers do not support:"
                " use torch.optim.SparseAdam for it, or sparse=False in its embedding"
            )

    @torch.no_grad()
    def update(
        self,
        entry: Entry,
        gradient: torch.Tensor,
        hyper: Hyper,
        coefficient: torch.Tensor | None = None,
        grad_scale: torch.Tensor | None = None,
    ) -> None:
        """One step of one parameter. The gradient is multiplied by `coefficient` in place first.

        If that fails half way, parts of the parameter are those of the new step.
        """
        self.check(entry, gradient)
        self.start(entry)
        parameter = entry.parameter.detach()
        near = on_host(parameter) if self._on_cpu(entry) else parameter
        if self._on_cpu(entry):
            near_gradient = on_host(gradient)
            gradient = gradient.detach().cpu() if near_gradient is None else near_gradient
        weight = parameter if near is None else near
        dense = is_dense(weight)
        weights = flat(weight) if dense else weight.contiguous().view(-1)
        gradients = flat_like(gradient.detach(), weight)
        if coefficient is not None:
            coefficient = coefficient.to(gradients.device)
        grad_scale = _sent(grad_scale, gradients.device)
        if entry.step is not None:
            entry.step += 1
        for start, stop, parts in self._ranges(entry, coefficient is not None):
            work = gradients[start:stop]
            if coefficient is not None:
                work.mul_(coefficient)
            self._update_tile(entry, weights[start:stop], work, parts, hyper, grad_scale)
        if not dense:
            weight.copy_(weights.view(weight.shape))
        if weight.data_ptr() == parameter.data_ptr() and weight is not parameter:
            torch.autograd.graph.increment_version(entry.parameter)
        self.updated(entry)

    def updated(self, entry: Entry) -> None:
        if entry.is_first:
            entry.is_first = False
            if "momentum_buffer" in entry.names:
                self._show(entry)
        entry.agreed = entry.parameter._version

    def _on_cpu(self, entry: Entry) -> bool:
        return not (entry.place or "").startswith("device")

    def _ranges(
        self, entry: Entry, scaled: bool
    ) -> Iterator[tuple[int, int, dict[str, torch.Tensor]]]:
        if entry.store is None:
            visits: Iterator[tuple[int, int, tuple[torch.Tensor, ...]]] = iter(
                [(0, entry.parameter.numel(), ())]
            )
        else:
            visits = ((r.start, r.stop, r.parts) for r in entry.store.visit(entry.key))
        compute = self.compute_dtype(entry)
        casts = MASTER in entry.names or any(d != compute for d in self._dtypes(entry))
        for start, stop, parts in visits:
            tile = TILE_ELEMENTS if (scaled or casts) else max(stop - start, 1)
            for begin in range(start, stop, tile):
                end = min(begin + tile, stop)
                here = slice(begin - start, end - start)
                yield begin, end, dict(zip(entry.names, (p[here] for p in parts), strict=True))

    def _update_tile(
        self,
        entry: Entry,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        parts: dict[str, torch.Tensor],
        hyper: Hyper,
        grad_scale: torch.Tensor | None,
    ) -> None:
        master = parts.pop(MASTER, None)
        work = weight if master is None else master
        if master is not None and entry.agreed != entry.parameter._version:
            _agree(master, weight, entry.agreed is None)
        wide = {name: part.to(work.dtype) for name, part in parts.items()}
        self.rule.update(
            [work],
            [gradient.to(work.dtype)],
            {name: [part] for name, part in wide.items()},
            [] if entry.step is None else [entry.step],
            hyper,
            entry.is_first,
            grad_scale,
        )
        for name, part in parts.items():
            if wide[name] is not part:
                part.copy_(wide[name])
        if master is not None:
            weight.copy_(master)

    @torch.no_grad()
    def update_together(
        self,
        pairs: Sequence[tuple[Entry, torch.Tensor]],
        hypers: Mapping[int, Hyper],
        grad_scale: torch.Tensor | None,
    ) -> None:
        """One step of many: in few calls of the kernel where they are small and plain.

        hypers: by the identity of the group.
        """
        calls: dict[Any, list[tuple[Entry, torch.Tensor]]] = {}
        for entry, gradient in pairs:
            self.check(entry, gradient)
            self.start(entry)
            if self._is_plain(entry, gradient):
                p = entry.parameter
                like = (id(entry.group), p.device, p.dtype, entry.is_first)
                calls.setdefault(like, []).append((entry, gradient))
            else:
                hyper = hypers[id(entry.group)]
                self.update(entry, gradient, hyper, grad_scale=grad_scale)
        for (group, device, _, is_first), call in calls.items():
            self._update_call(call, hypers[group], is_first, _sent(grad_scale, device))

    def _is_plain(self, entry: Entry, gradient: torch.Tensor) -> bool:
        parameter = entry.parameter
        if entry.store is not None and not isinstance(entry.store, MemoryStates):
            return False
        if parameter.device.type != "cpu" and self._on_cpu(entry):
            return False
        same = MASTER not in entry.names and all(
            d == parameter.dtype for d in (*self._dtypes(entry), gradient.dtype)
        )
        return same and is_dense(parameter) and parameter.stride() == gradient.stride()

    def _update_call(
        self,
        call: Sequence[tuple[Entry, torch.Tensor]],
        hyper: Hyper,
        is_first: bool,
        grad_scale: torch.Tensor | None,
    ) -> None:
        steps = [entry.step for entry, _ in call if entry.step is not None]
        parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        for entry, _ in call:
            if isinstance(entry.store, MemoryStates):
                for name, part in zip(entry.names, entry.store.tensors(entry.key), strict=True):
                    parts[name].append(part)
        if steps:
            torch._foreach_add_(steps, 1)
        weights = [flat(entry.parameter.detach()) for entry, _ in call]
        gradients = [flat(gradient.detach()) for _, gradient in call]
        self.rule.update(weights, gradients, parts, steps, hyper, is_first, grad_scale)
        for entry, _ in call:
            self.updated(entry)


def _agree(master: torch.Tensor, weight: torch.Tensor, from_nothing: bool) -> None:
    """Let the master follow what somebody else wrote to the weight, and nothing else."""
    here = weight.to(master.device)
    if from_nothing:
        master.copy_(here)
    else:
        kept = master.to(weight.dtype) == here
        master.copy_(torch.where(kept, master, here.to(master.dtype)))


def _sent(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)
