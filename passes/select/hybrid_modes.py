"""Chooses which layers are loaded and which run in place: MemFerry's modes on plain figures.

The model of MemFerry §IV-B, in whole nanoseconds. Layers are computed in order. A layer is either
loaded first (in the forward pass: GFGB) or computed directly on the host copy (DHA). Loads use a
single link, in layer order, back to back. A suffix of a schedule depends on only two numbers of its
prefix, the times at which the link and compute are free, so a Pareto front of those two is enough
to be exact. The backward pass poses the same problem for the layers that ran directly: some can be
loaded for their backward op (DFGB) while the link would be idle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Modes = tuple[bool, ...]  # per layer: True if it is loaded


@dataclass(frozen=True)
class LayerTimes:
    """One layer's figures. `direct_ns` None: the layer cannot run in place."""

    load_ns: int
    compute_ns: int
    direct_ns: int | None
    between_ns: int = 0  # computation after the layer that touches no layer's weights


@dataclass(frozen=True)
class Schedule:
    """The outcome of modes: when compute ends and when the link has loaded its last layer."""

    loaded: Modes
    end_ns: int
    link_ns: int


def evaluate(
    layers: Sequence[LayerTimes], loaded: Sequence[bool], link_ns: int = 0, start_ns: int = 0
) -> Schedule:
    """Runs the model: the link is free from `link_ns`, compute from `start_ns`."""
    end = start_ns
    for layer, load in zip(layers, loaded, strict=True):
        if load:
            link_ns += layer.load_ns
            end = max(end, link_ns) + layer.compute_ns
        elif layer.direct_ns is None:
            raise ValueError("a layer without a direct time must be loaded")
        else:
            end += layer.direct_ns
        end += layer.between_ns
    return Schedule(tuple(loaded), end, link_ns)


def zero_offload(layers: Sequence[LayerTimes]) -> Schedule:
    """ZeRO-Offload's forward pass (§II-B): loads everything, then computes."""
    link = sum(x.load_ns for x in layers)
    return Schedule(
        (True,) * len(layers), link + sum(x.compute_ns + x.between_ns for x in layers), link
    )


def as_printed(layers: Sequence[LayerTimes]) -> Schedule:
    """Algorithm 1 to the letter, with its undefined parts settled as noted below."""
    loaded = [False] * len(layers)
    all_ns, reserved_ns, tag = 0, 0, -1
    for n, layer in enumerate(layers):
        load, compute, direct = layer.load_ns, layer.compute_ns, layer.direct_ns
        # line 3: max(T_trans, 0) is just T_trans; it ignores the overlap already reserved
        if direct is not None and direct <= compute + max(load, 0):
            all_ns, reserved_ns = all_ns + direct, reserved_ns + direct
        else:
            if load < reserved_ns:
                if tag == -1:
                    tag = n
                all_ns, reserved_ns = all_ns + compute, reserved_ns + compute - load
            else:
                base = all_ns + load + compute - reserved_ns
                reserved = reserved_ns
                # `tag` may still be −1, which is no layer: the search then begins at the first
                for i in range(max(tag, 0), n + 1):
                    other = layers[i]
                    if other.direct_ns is None:
                        continue
                    slower = other.direct_ns - other.compute_ns
                    gain = other.load_ns + slower
                    # T_all^b is never refreshed after a flip, and layers that are direct already
                    # are not skipped
                    flipped = max(load - reserved - gain, 0) + all_ns + slower + compute
                    if flipped < base:  # `baseline` is defined nowhere: `base` is meant
                        loaded[i], tag = False, i + 1
                        base, reserved = flipped, reserved + gain
                        if reserved >= load:
                            break
                # line 29 adds totals to T_all and T_res, not increments
                all_ns += base
                reserved_ns += max(reserved - load, 0) + compute
            loaded[n] = True  # line 14: whatever the search said of the layer itself
        all_ns, reserved_ns = all_ns + layer.between_ns, reserved_ns + layer.between_ns
    return evaluate(layers, loaded)


def repaired(layers: Sequence[LayerTimes]) -> Schedule:
    """Algorithm 1 with its backtracking repaired.

    The reserved overlap is true to its name (compute end minus link time), and the criterion uses
    it. A loaded layer, the newest included, is flipped to direct access only if the recomputed
    schedule so far ends earlier (or as early, with the link free earlier).
    """
    loaded: list[bool] = []
    end = link = 0
    for n, layer in enumerate(layers):
        reserved = end - link
        load = layer.direct_ns is None or layer.direct_ns > layer.compute_ns + max(
            layer.load_ns - reserved, 0
        )
        loaded.append(load)
        prefix = layers[: n + 1]
        best = evaluate(prefix, loaded)
        if load and layer.load_ns > reserved:
            for i in range(n + 1):
                if not loaded[i] or layers[i].direct_ns is None:
                    continue
                if best.link_ns < best.end_ns - layer.compute_ns - layer.between_ns:
                    break  # nothing waits for the newest load any more
                loaded[i] = False
                tried = evaluate(prefix, loaded)
                if (tried.end_ns, tried.link_ns) < (best.end_ns, best.link_ns):
                    best = tried
                else:
                    loaded[i] = True
        end, link = best.end_ns, best.link_ns
    return evaluate(layers, loaded)


_Front = list[tuple[int, int, int]]  # sorted: first figure up, second down; then 2·parent + loaded


def _prune(candidates: _Front, quantum_ns: int, most: int | None) -> _Front:
    """Returns the points that no other beats on both figures, one per quantum.

    If there are more than `most`, it returns that many, evenly spread and including both ends.
    """
    candidates.sort()
    front: _Front = []
    lowest: int | None = None
    for point in candidates:
        if lowest is None or point[1] < lowest - quantum_ns:
            front.append(point)
            lowest = point[1]
    if most is not None and len(front) > most:
        front = [front[i * (len(front) - 1) // (most - 1)] for i in range(most)]
    return front


def _trace(fronts: list[_Front], at: int) -> list[bool]:
    """Returns which steps were loads, from the newest to the oldest, ending at point `at`."""
    loads = []
    for front in reversed(fronts):
        code = front[at][2]
        loads.append(bool(code & 1))
        at = code >> 1
    return loads


def exact(
    layers: Sequence[LayerTimes],
    link_ns: int = 0,
    start_ns: int = 0,
    link_limit_ns: int | None = None,
    quantum_ns: int = 0,
    most: int | None = None,
) -> Schedule | None:
    """Returns the modes that end first, by Pareto programming.

    No load may end after `link_limit_ns`; None if the layers that must be loaded cannot meet that.
    A positive `quantum_ns` thins the fronts: the end is then late by at most one quantum per layer.
    `most` bounds their length, for nets so deep that exactness would take too long (no guarantee
    then). Two fronts, of prefixes from the left and of suffixes from the right, meet in the middle:
    a suffix takes (link, end) to max(end + work, link + path), so the pair (work, path) describes
    it completely, and two short fronts are much cheaper than one long one.
    """
    middle = len(layers) // 2 if link_limit_ns is None else len(layers)
    prefixes: list[_Front] = []
    front: _Front = [(link_ns, start_ns, 0)]
    for layer in layers[:middle]:
        following: _Front = []
        compute = layer.compute_ns + layer.between_ns
        for n, (link, end, _) in enumerate(front):
            arrival = link + layer.load_ns
            if link_limit_ns is None or arrival <= link_limit_ns:
                following.append((arrival, max(end, arrival) + compute, 2 * n + 1))
        if layer.direct_ns is not None:
            direct = layer.direct_ns + layer.between_ns
            following += [(link, end + direct, 2 * n) for n, (link, end, _) in enumerate(front)]
        front = _prune(following, quantum_ns, most)
        if not front:
            return None
        prefixes.append(front)

    suffixes: list[_Front] = []
    back: _Front = [(0, _NEVER, 0)]  # (work, path): no load yet, so no path from the link
    for layer in reversed(layers[middle:]):
        compute = layer.compute_ns + layer.between_ns
        load = layer.load_ns
        following = [
            (work + compute, load + max(compute + work, path), 2 * n + 1)
            for n, (work, path, _) in enumerate(back)
        ]
        if layer.direct_ns is not None:
            direct = layer.direct_ns + layer.between_ns
            following += [(work + direct, path, 2 * n) for n, (work, path, _) in enumerate(back)]
        back = _prune(following, quantum_ns, most)
        suffixes.append(back)

    chosen = min(
        (max(front[i][1] + back[j][0], front[i][0] + back[j][1]), front[i][0], i, j)
        for i in range(len(front))
        for j in _crossing(back, front[i])
    )
    loads = _trace(prefixes, chosen[2])[::-1] + _trace(suffixes, chosen[3])
    return evaluate(layers, loads, link_ns, start_ns)


_NEVER = -(1 << 200)


def _crossing(back: _Front, point: tuple[int, int, int]) -> tuple[int, ...]:
    """Returns indices where end + work (rising along `back`) overtakes link + path: the optimum."""
    lead = point[0] - point[1]
    at = bisect_left(back, True, key=lambda p: p[0] >= lead + p[1])
    return tuple(j for j in (at - 1, at) if 0 <= j < len(back))


def choose_dfgb(
    layers: Sequence[LayerTimes],
    link_ns: int = 0,
    start_ns: int = 0,
    link_limit_ns: int | None = None,
) -> Schedule:
    """Chooses greedily which direct layers to load for their backward op (§IV-B, DFGB).

    `layers` are in backward order, with backward figures; the link has loaded the forward layers at
    `link_ns`, backward begins at `start_ns`, and the first gradient needs the link at
    `link_limit_ns`. The paper mentions a greedy choice but does not give it: here the layer is
    added whose load shortens the pass most per nanosecond of link, as long as one does. Layers
    already on the device are given with `direct_ns` = `compute_ns`.
    """
    loaded = [layer.direct_ns is None for layer in layers]
    best = evaluate(layers, loaded, link_ns, start_ns)
    open_layers = [n for n, load in enumerate(loaded) if not load]
    while open_layers:
        step: tuple[float, int, Schedule] | None = None
        for n in open_layers:
            load = layers[n].load_ns
            if link_limit_ns is not None and best.link_ns + load > link_limit_ns:
                continue
            loaded[n] = True
            tried = evaluate(layers, loaded, link_ns, start_ns)
            loaded[n] = False
            gain = best.end_ns - tried.end_ns
            if gain > 0 and (step is None or gain / max(load, 1) > step[0]):
                step = (gain / max(load, 1), n, tried)
        if step is None:
            break
        best = step[2]
        loaded[step[1]] = True
        open_layers.remove(step[1])
    return best


def choose_dfgb_exact(
    layers: Sequence[LayerTimes],
    link_ns: int = 0,
    start_ns: int = 0,
    link_limit_ns: int | None = None,
) -> Schedule:
    """Exact `choose_dfgb`: the backward pass is the forward problem with a window."""
    best = exact(layers, link_ns, start_ns, link_limit_ns)
    return best or choose_dfgb(layers, link_ns, start_ns, link_limit_ns)


def _exact_forward(layers: Sequence[LayerTimes]) -> Schedule:
    best = exact(layers)
    if best is None:
        raise AssertionError("without a limit on the link every layer can be loaded")
    return best


VARIANTS: dict[str, Callable[[Sequence[LayerTimes]], Schedule]] = {
    "exact": _exact_forward,
    "repaired": repaired,
    "printed": as_printed,
    "zero_offload": zero_offload,
    "load_all": zero_offload,
}
