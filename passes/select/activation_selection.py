"""Chooses the activations to evict, from figures per tensor alone.

`printed` follows the two phases of FlashNeuron §3.3. `by_benefit` covers the excess over the budget
at every position of the step at least cost: a greedy choice by bytes freed per nanosecond of
transfer comes first, then a knapsack at the worst position. Redundant items are then removed, and
others swapped for cheaper ones. Positions are op indices; times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .cover.intervals import Choice, Cover, CoverItem, CoverWay
from .cover.search import QUICK, ROUNDS, cover, great_ones, improve

#: tensors examined in the neighbourhood search for makespan
SEARCH_WORK = 400_000
#: a step within this factor of compute alone hides every transfer
HIDDEN = 1.000002


@dataclass(frozen=True)
class Option:
    """One way for a tensor to be off the device at the positions `first` to `last`, inclusive.

    `out_ns` and `back_ns` are the times on `lane`'s way out and back; `added_ns` is added compute
    time (recomputation).
    """

    name: str
    tier: str
    lane: str
    moved_bytes: int
    out_ns: int
    back_ns: int
    first: int
    last: int
    added_ns: int = 0
    compressed: bool = False

    @property
    def cost_ns(self) -> int:
        return self.out_ns + self.back_ns + self.added_ns


@dataclass(frozen=True)
class Candidate:
    """One gap of one tensor. Times count compute alone, from the start of the step."""

    id: str
    nbytes: int
    release_ns: int
    needed_ns: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class LaneTimes:
    """The result of `lane_times`; `late_out` and `late_back`: where the last busy spell began."""

    makespan_ns: int
    late_out: tuple[str, int] | None
    late_back: tuple[str, int] | None


def transfer_ns(candidates: Sequence[Candidate], choice: Sequence[int | None]) -> int:
    """Returns the total time that the choice adds: transfers both ways and recomputation."""
    taken = zip(candidates, choice, strict=True)
    return sum(c.options[o].cost_ns for c, o in taken if o is not None)


def missing_bytes(
    candidates: Sequence[Candidate], choice: Sequence[int | None], excess: Sequence[int]
) -> int:
    """Returns the bytes still over the budget at the worst position."""
    left = list(excess)
    for candidate, taken in zip(candidates, choice, strict=True):
        if taken is not None:
            option = candidate.options[taken]
            for at in range(option.first, option.last + 1):
                left[at] -= candidate.nbytes
    return max(0, max(left, default=0))


def lane_times(
    candidates: Sequence[Candidate], choice: Sequence[int | None], forward_ns: int, backward_ns: int
) -> LaneTimes:
    """Simulates one step with a simple model: evictions precede backward, then loads follow.

    Transfers leave in order of release, one at a time per lane; backward waits for them all; they
    return in order of need, and compute waits for each. The way back is the way out mirrored in
    time. An overrun of either lengthens the step.
    """
    total = forward_ns + backward_ns
    out: dict[str, list[tuple[int, int]]] = {}
    back: dict[str, list[tuple[int, int]]] = {}
    added = 0
    for candidate, taken in zip(candidates, choice, strict=True):
        if taken is not None:
            option = candidate.options[taken]
            added += option.added_ns
            out.setdefault(option.lane, []).append((candidate.release_ns, option.out_ns))
            mirrored = total - candidate.needed_ns
            back.setdefault(option.lane, []).append((mirrored, option.back_ns))
    out_end, out_at = _last_end(out, forward_ns)
    back_end, back_at = _last_end(back, backward_ns)
    late_back = None if back_at is None else (back_at[0], total - back_at[1])
    return LaneTimes(out_end + back_end + added, out_at, late_back)


def _last_end(
    lanes: Mapping[str, list[tuple[int, int]]], limit_ns: int
) -> tuple[int, tuple[str, int] | None]:
    worst, critical = limit_ns, None
    for lane, jobs in sorted(lanes.items()):
        end, spell = 0, 0
        for released, duration in sorted(jobs):
            if duration and released > end:
                end = spell = released
            end += duration
        if end > worst:
            worst, critical = end, (lane, spell)
    return worst, critical


def printed(
    candidates: Sequence[Candidate],
    excess_bytes: int,
    forward_ns: int,
    phase1_time: str = "raw",
    fp16_counts: bool = False,
) -> Choice:
    """Runs the two phases of FlashNeuron §3.3, by total bytes and total time.

    The paper does not say if phase 1 counts raw or compressed transfer times (`phase1_time`), nor
    if the half-precision stash makes every tensor compressible (`fp16_counts`; otherwise only
    codecs other than fp16 and bf16 do). Replacements stop once their raw size reaches that of the
    tensor they replace; compressible tensors move compressed.
    """
    order = sorted(range(len(candidates)), key=lambda i: (candidates[i].release_ns, i))
    plain = [_cheapest(c, compressed=False) for c in candidates]
    best = [_cheapest(c) for c in candidates]

    def friendly(i: int) -> bool:
        option = candidates[i].options[best[i]]
        half = option.name.endswith(("fp16", "bf16"))
        return option.compressed and (fp16_counts or not half)

    chosen: list[int] = []
    covered = 0
    for i in order:
        if covered >= excess_bytes:
            break
        chosen.append(i)
        covered += candidates[i].nbytes
    phase1 = plain if phase1_time == "raw" else best
    if sum(candidates[i].options[phase1[i]].out_ns for i in chosen) <= forward_ns:
        return _as_choice(len(candidates), chosen, phase1)
    pool = sorted(
        (i for i in order if friendly(i) and i not in set(chosen)),
        key=lambda i: candidates[i].options[best[i]].moved_bytes / candidates[i].nbytes,
    )
    while sum(candidates[i].options[best[i]].out_ns for i in chosen) > forward_ns:
        last = next((i for i in reversed(chosen) if not friendly(i)), None)
        if last is None:
            break
        incoming: list[int] = []
        gained = 0
        for i in pool:
            if gained >= candidates[last].nbytes:
                break
            incoming.append(i)
            gained += candidates[i].nbytes
        if gained < candidates[last].nbytes:
            break
        pool = pool[len(incoming) :]
        chosen = [i for i in chosen if i != last] + incoming
    return _as_choice(len(candidates), chosen, best)


def _cheapest(candidate: Candidate, compressed: bool = True) -> int:
    """Returns the option with the least transfer; without `compressed`, a plain one if any."""
    indices = range(len(candidate.options))
    usable = [o for o in indices if compressed or not candidate.options[o].compressed]
    return min(usable or indices, key=lambda o: (candidate.options[o].cost_ns, o))


def _as_choice(count: int, chosen: Sequence[int], options: Sequence[int]) -> Choice:
    taken = set(chosen)
    return tuple(options[i] if i in taken else None for i in range(count))


def by_benefit(
    candidates: Sequence[Candidate],
    excess: Sequence[int],
    limits: Mapping[str, int] | None = None,
    quick: bool = False,
) -> Choice | None:
    """Covers `excess` at every position for the least transfer; None if no choice covers it.

    `limits`: bytes that each tier can take. `quick`: skips the neighbourhood search.
    """
    costs = [[float(o.cost_ns) for o in c.options] for c in candidates]
    return cover(_items(candidates, costs), excess, limits, QUICK if quick else ROUNDS)


def by_makespan(
    candidates: Sequence[Candidate],
    excess: Sequence[int],
    forward_ns: int,
    backward_ns: int,
    limits: Mapping[str, int] | None = None,
    rounds: int = 24,
) -> Choice | None:
    """Covers `excess` so as to minimize `lane_times`, then the transfer.

    Only transfers in the last busy spell of a lane delay the step. Each round charges for the
    spells under the choices so far (an averaged best response, which tends to the optimum of the
    relaxed problem) and covers the excess again. Then it searches the neighbourhood of the best
    choice.
    """
    ideal = forward_ns + backward_ns

    def worth(choice: Sequence[int | None]) -> float:
        times = lane_times(candidates, choice, forward_ns, backward_ns)
        return times.makespan_ns + 1e-6 * transfer_ns(candidates, choice)

    def priced(without: int | None) -> tuple[Choice | None, list[CoverItem]]:
        best: Choice | None = None
        items: list[CoverItem] = []
        late_out: list[tuple[str, int, int]] = []
        late_back: list[tuple[str, int, int]] = []
        for at in range(1, rounds + 1):
            items = _items(candidates, _prices(candidates, late_out, late_back, at))
            if without is not None:
                items[without] = CoverItem(items[without].nbytes, ())
            choice = cover(items, excess, limits, rounds=2)
            if choice is None:
                break
            if best is None or worth(choice) < worth(best):
                best = choice
            times = lane_times(candidates, choice, forward_ns, backward_ns)
            if times.late_out is None and times.late_back is None:
                break
            late_out += [(*times.late_out, at)] if times.late_out else []
            late_back += [(*times.late_back, at)] if times.late_back else []
        return best, items

    best, items = priced(None)
    if best is None or worth(best) <= HIDDEN * ideal:
        return best
    for great in great_ones(items, best, excess):
        other, _ = priced(great)
        if other is not None and worth(other) < worth(best):
            best = other
    state = Cover(items, excess, limits or {})
    for i, way in enumerate(best):
        state.put(i, way)
    nodes = SEARCH_WORK * rounds // (24 * max(1, len(candidates)))
    improve(state, worth, HIDDEN * ideal, nodes)
    return tuple(state.choice)


def _prices(
    candidates: Sequence[Candidate],
    late_out: Sequence[tuple[str, int, int]],
    late_back: Sequence[tuple[str, int, int]],
    at: int,
) -> list[list[float]]:
    """Prices each option by its cost in the late spells so far: (lane, since or until, weight).

    Round k has weight k, since later rounds know better. A hundredth of all transfer time is always
    charged, so that tensors that need not leave stay.
    """
    weight = at * (at + 1) // 2
    rows: list[list[float]] = []
    for c in candidates:
        row: list[float] = []
        for o in c.options:
            out = sum(x for lane, t, x in late_out if lane == o.lane and c.release_ns >= t)
            back = sum(x for lane, t, x in late_back if lane == o.lane and c.needed_ns <= t)
            spent = out * o.out_ns + back * o.back_ns + weight * o.added_ns
            row.append(spent + 0.01 * weight * o.cost_ns)
        rows.append(row)
    return rows


def _items(candidates: Sequence[Candidate], costs: Sequence[Sequence[float]]) -> list[CoverItem]:
    return [
        CoverItem(
            c.nbytes,
            tuple(
                CoverWay(o.first, o.last, cost, o.tier, o.moved_bytes)
                for o, cost in zip(c.options, row, strict=True)
            ),
        )
        for c, row in zip(candidates, costs, strict=True)
    ]
