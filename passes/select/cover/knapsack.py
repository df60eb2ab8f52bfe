"""Minimum knapsack: the cheapest items whose sizes together reach a need."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

TOLERANCE = 5e-4  # relative; states that cannot gain more than this are given up
MAX_STATES = 3000


def knapsack(sizes: Sequence[int], costs: Sequence[float], need: int) -> list[int]:
    """Returns indices whose sizes reach `need` at least cost, within `TOLERANCE`; all if none do.

    Keeps the states that no other beats in both size and cost, pruned by the fractional bound.
    """
    order = sorted(range(len(sizes)), key=lambda i: (costs[i] / sizes[i], i))
    size_sum = list(accumulate((sizes[i] for i in order), initial=0))
    cost_sum = list(accumulate((costs[i] for i in order), initial=0.0))
    if size_sum[-1] < need:
        return sorted(order)
    count = len(order)

    def completion(covered: int, at: int) -> int:
        return bisect_left(size_sum, need - covered + size_sum[at], at)

    # a state is (cost, covered, the items taken as a linked list)
    start = completion(0, 0)
    best_cost = cost_sum[start]
    best: tuple[object, int, int] = (None, 0, start)  # taken, then all of order[from:to]
    states: list[tuple[float, int, object]] = [(0.0, 0, None)]
    for at in range(count):
        i = order[at]
        added = [(c + costs[i], s + sizes[i], (at, t)) for c, s, t in states]
        kept: list[tuple[float, float, int, object]] = []
        most = -1
        for cost, covered, taken in heapq.merge(states, added, key=lambda x: (x[0], -x[1])):
            if covered <= most:
                continue
            most = covered
            if covered >= need:
                if cost < best_cost:
                    best_cost, best = cost, (taken, 0, 0)
                break  # costlier states need not be examined
            end = completion(covered, at + 1)
            if end > count:
                continue
            full = cost + cost_sum[end] - cost_sum[at + 1]
            if full < best_cost:
                best_cost, best = full, (taken, at + 1, end)
            step = size_sum[end] - size_sum[end - 1]
            over = size_sum[end] - size_sum[at + 1] - (need - covered)
            bound = full - (cost_sum[end] - cost_sum[end - 1]) * over / step
            if bound < best_cost * (1 - TOLERANCE):
                kept.append((bound, cost, covered, taken))
        if len(kept) > MAX_STATES:
            kept = heapq.nsmallest(MAX_STATES, kept, key=lambda x: (x[0], x[1]))
            kept.sort(key=lambda x: (x[1], -x[2]))
        states = [(cost, covered, taken) for _, cost, covered, taken in kept]
        if not states:
            break
    link, begin, end = best
    result = [order[at] for at in range(begin, end)]
    while isinstance(link, tuple):
        result.append(order[link[0]])
        link = link[1]
    return sorted(result)
