"""Updates parameters where their states are, range by range."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offcompile.runtime.states.gradient_transport import Brought
from offcompile.runtime.states.states import MemoryStates

from .core import MASTER, Core, ParameterEntry, Scratch
from .layout import flat, flat_like, is_dense, shaped_like
from .ranks.shards import local_like
from .rules import Hyper, OnePass

#: elements per tile if an update takes more than one pass over them; a tile stays in the cache
TILE_ELEMENTS = 1 << 18
#: gradients in flight to the host while another is applied
AHEAD = 2


@torch.no_grad()
def update(
    core: Core,
    entry: ParameterEntry,
    gradient: torch.Tensor,
    hyper: Hyper,
    coefficient: torch.Tensor | None = None,
    grad_scale: torch.Tensor | None = None,
    brought: Brought | None = None,
) -> None:
    """Make one step of one parameter. First multiplies the gradient by `coefficient` in place.
    brought: the gradient, if it is already in flight from a device to the host.

    If it fails half way, parts of the parameter are already updated.
    """
    core.check(entry, gradient)
    core.start(entry)
    gradient = local_like(gradient, entry.parameter)
    carrier, beside = core.carrier(entry), brought is not None
    if carrier is not None:
        # `brought` owns its memory
        brought = brought or carrier.bring(entry.local, gradient, entry.label)
        brought.arrive()
        gradient = brought.gradient
    weight = _weight(core, entry, beside) if carrier is None else carrier.place(entry.local)
    gradients = flat_like(gradient.detach(), weight)
    if coefficient is not None:
        coefficient = coefficient.to(gradients.device)
    grad_scale = _sent(grad_scale, gradients.device)
    core.begin([entry])
    entry.count_up()
    core.visiting(entry)
    dense = is_dense(weight)
    weights = flat(weight) if dense else weight.contiguous().view(-1)
    # each written range increments the version
    disagrees = MASTER in entry.names and entry.agreed != entry.parameter._version
    for start, stop, parts in _pieces(core, entry, coefficient is not None):
        work = gradients[start:stop]
        if coefficient is not None:
            work.mul_(coefficient)
        if disagrees:
            _agree(parts[MASTER], weights[start:stop], entry.agreed is None)
        shape = weight if core.rule.whole else None
        _update_tile(core, entry, weights[start:stop], work, parts, hyper, grad_scale, shape)
    if not dense:
        weight.copy_(weights.view(weight.shape))
    if carrier is not None:
        carrier.updated(entry.local, entry.label)
    core.updated(entry)


def _weight(core: Core, entry: ParameterEntry, beside: bool = False) -> torch.Tensor:
    """Return the memory that an update changes: the parameter, or what all ranks of the machine see
    of it. beside: a thread makes the update, which others do not wait for."""
    common = None
    if core.sharding is not None and not beside:
        common = core.sharding.memory(entry.key)
    return entry.local.detach() if common is None else common


def _pieces(
    core: Core, entry: ParameterEntry, scaled: bool
) -> Iterator[tuple[int, int, dict[str, torch.Tensor]]]:
    """The ranges to update one by one, with their states; the whole parameter if its rule asks."""
    if not core.rule.whole:
        yield from _ranges(core, entry, scaled)
        return
    with _whole_states(core, entry) as parts:
        yield 0, entry.local.numel(), parts


@contextmanager
def _whole_states(core: Core, entry: ParameterEntry) -> Iterator[dict[str, torch.Tensor]]:
    """The parameter's states whole, flat; what is written to them is kept.

    States that come in ranges are put together in memory first: one parameter's at a time.
    """
    store, numel = entry.store, entry.local.numel()
    assert store is not None
    copies: tuple[torch.Tensor, ...] = ()
    for r in store.visit(entry.key, write=False):
        if r.stop - r.start == numel:
            break
        copies = copies or tuple(p.new_empty(numel) for p in r.parts)
        for copy, part in zip(copies, r.parts, strict=True):
            copy[r.start : r.stop].copy_(part)
    if copies:
        yield dict(zip(entry.names, copies, strict=True))
    for r in store.visit(entry.key):
        if not copies:  # it is the only range
            yield dict(zip(entry.names, r.parts, strict=True))
        for part, copy in zip(r.parts, copies, strict=bool(copies)):
            part.copy_(copy[r.start : r.stop])


def _ranges(
    core: Core, entry: ParameterEntry, scaled: bool
) -> Iterator[tuple[int, int, dict[str, torch.Tensor]]]:
    if entry.store is None:
        visits: Iterator[tuple[int, int, tuple[torch.Tensor, ...]]] = iter(
            [(0, entry.local.numel(), ())]
        )
    else:
        visits = ((r.start, r.stop, r.parts) for r in entry.store.visit(entry.key))
    compute = core.compute_dtype(entry)
    casts = MASTER in entry.names or any(d != compute for d in entry.dtypes)
    casts = casts and one_pass(core, entry) is None
    for start, stop, parts in visits:
        tile = TILE_ELEMENTS if (scaled or casts) else max(stop - start, 1)
        for begin in range(start, stop, tile):
            end = min(begin + tile, stop)
            here = slice(begin - start, end - start)
            yield begin, end, dict(zip(entry.names, (p[here] for p in parts), strict=True))


def _update_tile(
    core: Core,
    entry: ParameterEntry,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    parts: dict[str, torch.Tensor],
    hyper: Hyper,
    grad_scale: torch.Tensor | None,
    like: torch.Tensor | None,
) -> None:
    """Update flat tensors; like: give them to the rule in the shape of this tensor."""

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if like is None else shaped_like(tensor, like)

    master = parts.pop(MASTER, None)
    at_once = one_pass(core, entry)
    if at_once is not None:
        at_once(weight, master, gradient, parts, entry.count(), hyper, grad_scale)
        return
    work = weight if master is None else master
    wide = {name: _cast(core.scratch, part, work.dtype, name) for name, part in parts.items()}
    core.rule.update(
        [shaped(work)],
        [shaped(_cast(core.scratch, gradient, work.dtype, "gradient"))],
        {name: [shaped(part)] for name, part in wide.items()},
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


def one_pass(core: Core, entry: ParameterEntry) -> OnePass | None:
    """Return a one-pass update for mixed dtypes, on devices with kernels of ours; else None."""
    dtype = entry.parameter.dtype
    mixed = MASTER in entry.names or any(d != dtype for d in entry.dtypes)
    if not mixed or not by_kernel(entry.parameter) or core.is_beside(entry):
        return None
    return core.rule.one_pass(entry.group)


def by_kernel(parameter: torch.Tensor) -> bool:
    """True if kernels of ours run on the device of the parameter."""
    return parameter.device.type == "cuda"


@torch.no_grad()
def update_together(
    core: Core,
    pairs: Sequence[tuple[ParameterEntry, torch.Tensor]],
    hypers: Mapping[int, Hyper],
    coefficient: torch.Tensor | None,
    grad_scale: torch.Tensor | None,
) -> None:
    """Make one step of many parameters; batches small and plain ones into few kernel calls.

    hypers: by `id` of the group.
    """
    calls: dict[Any, list[tuple[ParameterEntry, torch.Tensor]]] = {}
    far: list[tuple[ParameterEntry, torch.Tensor]] = []
    for entry, gradient in pairs:
        core.check(entry, gradient)
        core.start(entry)
        gradient = local_like(gradient, entry.parameter)
        tiled = coefficient is not None and gradient.numel() > TILE_ELEMENTS
        if not tiled and _is_plain(core, entry, gradient):
            p = entry.parameter
            like = (id(entry.group), p.device, p.dtype, entry.is_first, MASTER in entry.names)
            calls.setdefault(like, []).append((entry, gradient))
        elif core.carrier(entry) is not None:
            far.append((entry, gradient))
        else:
            hyper = hypers[id(entry.group)]
            update(core, entry, gradient, hyper, coefficient, grad_scale)
    for entry, gradient, brought in _brought(core, far):
        hyper = hypers[id(entry.group)]
        update(core, entry, gradient, hyper, coefficient, grad_scale, brought)
    for (group, device, _, is_first, _), call in calls.items():
        if coefficient is not None:
            torch._foreach_mul_([gradient for _, gradient in call], coefficient.to(device))
        _update_call(core, call, hypers[group], is_first, _sent(grad_scale, device))


def _brought(
    core: Core, far: Sequence[tuple[ParameterEntry, torch.Tensor]]
) -> Iterator[tuple[ParameterEntry, torch.Tensor, Brought]]:
    """Bring gradients to the host; the next ones are in flight while one is applied."""
    under_way: deque[tuple[ParameterEntry, torch.Tensor, Brought]] = deque()
    for entry, gradient in far:
        carrier = core.carrier(entry)
        assert carrier is not None
        under_way.append((entry, gradient, carrier.bring(entry.local, gradient, entry.label)))
        if len(under_way) > AHEAD:
            yield under_way.popleft()
    yield from under_way


def _is_plain(core: Core, entry: ParameterEntry, gradient: torch.Tensor) -> bool:
    parameter = entry.local
    if core.rule.whole:
        return False
    if entry.store is not None and not isinstance(entry.store, MemoryStates):
        return False
    if core.carrier(entry) is not None:
        return False
    dtype = parameter.dtype
    if MASTER in entry.names:
        small = parameter.device.type != "cpu" and parameter.numel() <= TILE_ELEMENTS
        agrees = entry.agreed == entry.parameter._version
        if not (small and agrees) or any(d != core.compute_dtype(entry) for d in entry.dtypes):
            return False
    elif gradient.dtype != dtype or any(d != dtype for d in entry.dtypes):
        return False
    return parameter.stride() == gradient.stride() and is_dense(parameter)


def _update_call(
    core: Core,
    call: Sequence[tuple[ParameterEntry, torch.Tensor]],
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
    core.begin(entry for entry, _ in call)
    if steps:
        torch._foreach_add_(steps, 1)
    weights = [flat(_weight(core, entry)) for entry, _ in call]
    gradients = [flat(gradient.detach()) for _, gradient in call]
    masters = parts.pop(MASTER, None)
    if masters is not None:
        gradients = [g.to(m.dtype) for g, m in zip(gradients, masters, strict=True)]
    core.rule.update(masters or weights, gradients, parts, steps, hyper, is_first, grad_scale)
    if masters is not None:
        torch._foreach_copy_(weights, masters)
    for entry, _ in call:
        core.updated(entry)


def _agree(master: torch.Tensor, weight: torch.Tensor, from_nothing: bool) -> None:
    """Copy to the master only the elements of the weight that somebody else has written."""
    here = weight.to(master.device)
    if from_nothing:
        master.copy_(here)
    else:
        kept = master.to(weight.dtype) == here
        master.copy_(torch.where(kept, master, here.to(master.dtype)))


def _cast(scratch: Scratch, tile: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast the tile to `dtype` if needed; valid until this thread's next cast of that name."""
    if tile.dtype == dtype:
        return tile
    if tile.device.type != "cpu" or tile.numel() > TILE_ELEMENTS:
        return tile.to(dtype)
    room = scratch.rooms.get((name, dtype))
    if room is None:
        room = scratch.rooms[name, dtype] = torch.empty(TILE_ELEMENTS, dtype=dtype)
    return room[: tile.numel()].copy_(tile)


def _sent(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)
