"""Which updates the host makes and which the device, where states may travel.

The host is slow and needs no link for states; the device is quick and fetches them and sends them
back. The first gradients of backward have the longest time left, so the host takes those. One
number says where the device takes over, and the search finds it by trying plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offcompile.ir import HOST, Machine, Problem

from .frame import held_on_host, hostable

#: shares of all host time, tried in this order, before the neighbours of the best one
COARSE_SHARES = (0.5, 0.75, 0.25, 1.0, 0.0)
#: distance of those neighbours, halved with each round
FIRST_STEP, ROUNDS = 0.12, 2

Cost = Callable[[frozenset[str]], float | None]


@dataclass(frozen=True)
class UpdateSplit:
    """Weights that either side can update, in the order in which their gradients come.

    host_us: what the host would take for each. held: those that only the host can update.
    """

    weights: tuple[str, ...]
    host_us: tuple[float, ...]
    held: frozenset[str]

    @classmethod
    def of(cls, problem: Problem, machine: Machine) -> UpdateSplit:
        if HOST not in machine.tier:
            return cls((), (), frozenset())
        held = held_on_host(problem)
        made_at = {t: i for i, op in enumerate(problem.ops) for t in op.writes}
        came: dict[str, int] = {}
        took: dict[str, float] = {}
        for weight, updates in hostable(problem).items():
            ops = [problem.op[u] for u in updates]
            gradients = [t for op in ops for t in op.reads if problem.tensor[t].kind == "gradient"]
            if weight not in held and gradients:
                came[weight] = max(made_at.get(t, 0) for t in gradients)
                took[weight] = sum(op.host_duration_us or 0.0 for op in ops)
        order = sorted(came, key=lambda w: (came[w], w))
        return cls(tuple(order), tuple(took[w] for w in order), held)

    def hosted(self, share: float) -> frozenset[str]:
        """The first gradients' weights, up to this share of the host's time, with those held."""
        if share <= 0.0:
            return self.held
        limit, sum_us, found = share * sum(self.host_us), 0.0, set(self.held)
        for weight, host_us in zip(self.weights, self.host_us, strict=True):
            if sum_us + host_us / 2 > limit:
                break
            sum_us += host_us
            found.add(weight)
        return frozenset(found)

    def share(self, hosted: frozenset[str]) -> float:
        """How much of the host's time these weights are."""
        all_us = sum(self.host_us)
        mine_us = sum(us for w, us in zip(self.weights, self.host_us, strict=True) if w in hosted)
        return mine_us / all_us if all_us else 0.0

    def search(
        self, cost_of: Cost, is_over: Callable[[], bool], around: float | None = None
    ) -> float | None:
        """Call `cost_of` with splits, best guess first; return the cheapest one's share.

        around: a share that is known to serve; only its neighbours are tried.
        """
        if not self.weights:
            return None
        costs: dict[frozenset[str], float] = {}
        best: tuple[float, float] | None = None

        def attempt(share: float) -> None:
            nonlocal best
            hosted = self.hosted(share)
            if hosted in costs or is_over():
                return
            cost = cost_of(hosted)
            costs[hosted] = float("inf") if cost is None else cost
            if cost is not None and (best is None or cost < best[0]):
                best = cost, share

        for share in COARSE_SHARES if around is None else (around,):
            attempt(share)
        step = FIRST_STEP
        for _ in range(ROUNDS):
            centre = best[1] if best is not None else around
            if centre is None:
                break
            attempt(min(1.0, centre + step))
            attempt(max(0.0, centre - step))
            step /= 2
        return None if best is None else best[1]
