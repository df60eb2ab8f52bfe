"""Splits the updates between host and device, if states may move.

The host is slow but needs no link for states; the device is fast but has to fetch them and send
them back. The first gradients of backward have the most time left, so the host takes those. A
single number says where the device takes over, and the search finds it by trying plans. Where the
step waits for the links, this split leaves the link out of the device nearly idle until the device
takes over. Then both sides take turns from the first gradient on (`alternating`), so that states
leave during all of backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offcompile.ir import DEVICE, HOST, Machine, Problem

from .program_variant import held_on_host, hostable

#: shifts of the host's share, initial and smallest; initial around a known share
FIRST_SHIFT, LEAST_SHIFT, NEAR_SHIFT = 0.2, 0.025, 0.1

Cost = Callable[[frozenset[str]], float | None]


@dataclass(frozen=True)
class UpdateSplit:
    """Weights that either side can update, in the order of their gradients.

    host_us: the host's time for each. held: weights that only the host can update.
    balance: the share of the host's total time at which it finishes together with the link that
    brings the states of the others.
    """

    weights: tuple[str, ...]
    host_us: tuple[float, ...]
    held: frozenset[str]
    balance: float = 0.5

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
        host_us = tuple(took[w] for w in order)
        link_us = _link_us(problem, machine, order)
        balance = link_us / (link_us + sum(host_us)) if order and link_us else 0.5
        return cls(tuple(order), host_us, held, balance)

    def hosted(self, share: float) -> frozenset[str]:
        """Returns the first gradients' weights up to this share of host time, plus those held."""
        if share <= 0.0:
            return self.held
        limit, sum_us, found = share * sum(self.host_us), 0.0, set(self.held)
        for weight, host_us in zip(self.weights, self.host_us, strict=True):
            if sum_us + host_us / 2 > limit:
                break
            sum_us += host_us
            found.add(weight)
        return frozenset(found)

    def alternating(self, share: float) -> frozenset[str]:
        """Returns weights with about this share of host time, spread evenly over the gradients,
        plus those held."""
        owed_us, found = 0.0, set(self.held)
        for weight, host_us in zip(self.weights, self.host_us, strict=True):
            owed_us += min(1.0, share) * host_us
            if share > 0.0 and 2 * owed_us >= host_us:
                owed_us -= host_us
                found.add(weight)
        return frozenset(found)

    def share(self, hosted: frozenset[str]) -> float:
        """Returns the share of the host's total time that these weights take."""
        all_us = sum(self.host_us)
        mine_us = sum(us for w, us in zip(self.weights, self.host_us, strict=True) if w in hosted)
        return mine_us / all_us if all_us else 0.0

    def search(
        self, cost_of: Cost, is_over: Callable[[], bool], around: float | None = None
    ) -> float | None:
        """Calls `cost_of` with splits, best guess first, and returns the share of the cheapest one.

        around: a share known to work, used in place of `balance`.
        """
        if not self.weights:
            return None
        if around is None:
            return climb(self.hosted, cost_of, is_over, self.balance, FIRST_SHIFT)
        return climb(self.hosted, cost_of, is_over, around, NEAR_SHIFT)


def climb(
    sides: Callable[[float], frozenset[str]],
    cost_of: Cost,
    is_over: Callable[[], bool],
    share: float,
    shift: float,
) -> float | None:
    """Searches for the share at which the weights of `sides` cost least, in ever smaller shifts
    from `share`, and returns it."""
    costs: dict[frozenset[str], float] = {}
    best_share, best = share, float("inf")

    def attempt(share: float) -> bool:
        """Tries a share. Returns True if it is the best so far."""
        nonlocal best_share, best
        share = min(1.0, max(0.0, share))
        hosted = sides(share)
        if hosted in costs or is_over():
            return False
        cost = cost_of(hosted)
        costs[hosted] = float("inf") if cost is None else cost
        if costs[hosted] >= best:
            return False
        best_share, best = share, costs[hosted]
        return True

    attempt(best_share)
    while shift >= LEAST_SHIFT and not is_over():
        before = best_share
        for by in (shift, -shift):
            while attempt(best_share + by):
                pass
            if best_share != before:
                break
        if best_share == before:
            shift /= 2
    return None if best == float("inf") else best_share


def _link_us(problem: Problem, machine: Machine, weights: list[str]) -> float:
    """Returns the link time to load all operands of these updates that live on the host."""
    rates = [lane.bytes_per_us for lane in machine.lanes_between(HOST, DEVICE)]
    updates = hostable(problem)
    operands = {t for w in weights for u in updates[w] for t in problem.op[u].operands}
    nbytes = sum(t.nbytes for t in problem.tensors if t.id in operands and t.home == HOST)
    return nbytes / sum(rates) if rates else 0.0
