"""Tries a few recipes of recomputation as starts for the search, from coarse to fine.

A recipe prices kept tensors (see `rematerialization`) by where in forward they are produced.
Activations of early layers have all of forward to be evicted, so keeping them is cheap; those of
the last layers are needed again at once, and stay. In between, tensors that are cheap to compute
are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from offcompile.ir import Problem
from offcompile.passes.select.rematerialization import NS_PER_US, Rematerialization, Rerun

#: prices tried, most promising first: multiples of the price at which half of all saved bytes are
#: cheaper to recompute than to keep
SCALES = (1.0, 1 / 2, 64.0, 2.0, 1 / 4, 4.0)
#: numbers of parts that forward is cut into, at most one part per this many ops; 1: no cut
PARTS, OPS_A_PART = (24, 48, 12, 6, 1), 3
#: shifts of the end of the early layers and the start of the last ones, as fractions of forward
#: time: initial and smallest
FIRST_SHIFT, LEAST_SHIFT = 0.2, 0.02
BYTES_PER_KIB = 1024
#: the relative gain from which a recipe counts as better; if something else is the bottleneck, none
#: reaches it
WORTH_ANOTHER = 0.0005


@dataclass(frozen=True)
class Recipe:
    """Prices in ns per KiB for tensors made before `early` and before `late`; 0 afterwards."""

    parts: int
    price: float
    early_price: float = 0.0
    early: float = 0.0
    late: float = 1.0


def recipes_of(problem: Problem) -> Iterator[frozenset[Rerun]]:
    """Yields the reruns of each whole-forward recipe, each set once."""
    starts = RecomputeStarts(problem, lambda reruns: None, lambda: False)
    seen: set[frozenset[Rerun]] = set()
    for parts in starts.parts():
        for price in starts.prices():
            reruns = starts.reruns(Recipe(parts, price))
            if reruns and reruns not in seen:
                seen.add(reruns)
                yield reruns


@dataclass(eq=False)
class RecomputeStarts:
    """Tries recipes for one problem until `is_over`.

    `cost_of` returns the cost of a plan with these reruns; None if it finds no plan.
    """

    problem: Problem
    cost_of: Callable[[frozenset[Rerun]], float | None]
    is_over: Callable[[], bool]
    best: Recipe | None = None
    best_cost: float = float("inf")
    _tried: set[Recipe] = field(default_factory=set)
    _seen: set[frozenset[Rerun]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._choices = Rematerialization.of(self.problem)
        self._boundaries: dict[int, frozenset[str]] = {}

    def run(self) -> None:
        """Tries every price, then varies the best recipe one field at a time.

        It first cuts forward into about as many parts as models have blocks; the variations get
        smaller and smaller.
        """
        prices, parts = self.prices(), self.parts()
        for price in prices:
            if self.is_over():
                return
            self._try(Recipe(parts[0], price))
        shift = FIRST_SHIFT
        while self.best is not None and shift >= LEAST_SHIFT:
            before = self.best
            for step in self._steps(sorted(prices), parts, shift):
                # repeat a step that helped
                while not self.is_over() and self._try(step(self.best)):
                    pass
                if self.is_over():
                    return
            if self.best is before:
                shift /= 2

    def _steps(
        self, prices: list[float], parts: list[int], shift: float
    ) -> list[Callable[[Recipe], Recipe]]:
        """Returns ways to change a recipe by one field.

        The fields are the end of the early layers and the start of the late ones, the price in the
        middle and before, and the number of parts.
        """

        def early(by: float) -> Callable[[Recipe], Recipe]:
            def step(r: Recipe) -> Recipe:
                cheaper = r.early_price if r.early else neighbour(prices, r.price, -1)
                return replace(
                    r, early=round(min(0.9, max(0.0, r.early + by)), 3), early_price=cheaper
                )

            return step

        def late(by: float) -> Callable[[Recipe], Recipe]:
            return lambda r: replace(r, late=round(min(1.0, max(0.5, r.late + by)), 3))

        def cut(other: int) -> Callable[[Recipe], Recipe]:
            return lambda r: replace(r, parts=other)

        def price(by: int) -> Callable[[Recipe], Recipe]:
            return lambda r: replace(r, price=neighbour(prices, r.price, by))

        def early_price(by: int) -> Callable[[Recipe], Recipe]:
            return lambda r: replace(r, early_price=neighbour(prices, r.early_price, by))

        return [
            early(shift),
            early(-shift),
            late(-shift / 2),
            late(shift / 2),
            *(cut(n) for n in (parts if shift == FIRST_SHIFT else ())),
            early_price(1),
            early_price(-1),
            price(1),
            price(-1),
        ]

    def reruns(self, recipe: Recipe) -> frozenset[Rerun]:
        made, nbytes = self._choices.progress, self.problem.tensor

        def price_ns(t: str) -> float:
            at = made[t]
            price = recipe.early_price if at < recipe.early else recipe.price
            return 0.0 if at > recipe.late else price * nbytes[t].nbytes / BYTES_PER_KIB

        if recipe.parts not in self._boundaries:
            self._boundaries[recipe.parts] = self._choices.boundaries(recipe.parts)
        return self._choices.reruns(price_ns, self._boundaries[recipe.parts])

    def _try(self, recipe: Recipe) -> bool:
        """Evaluates a recipe. Returns True if it is the best so far."""
        if recipe in self._tried:
            return False
        self._tried.add(recipe)
        reruns = self.reruns(recipe)
        if not reruns or reruns in self._seen:
            return False
        self._seen.add(reruns)
        cost = self.cost_of(reruns)
        if cost is None or cost >= self.best_cost * (1 - WORTH_ANOTHER):
            return False
        self.best, self.best_cost = recipe, cost
        return True

    def parts(self) -> list[int]:
        most = max(1, len(self._choices.forward) // OPS_A_PART)
        return [n for n in PARTS if n <= most]

    def prices(self) -> list[float]:
        """Returns prices around the median over all saved bytes, up to more than any op costs."""
        kib: dict[str, float] = {}
        for t in self._choices.saved:
            op = self._choices.maker[t]
            if op.recompute:
                nbytes = self.problem.tensor[t].nbytes
                kib[op.id] = kib.get(op.id, 0.0) + nbytes / BYTES_PER_KIB
        ops = self.problem.op
        dear = sorted((NS_PER_US * ops[op].duration_us / n, n) for op, n in kib.items() if n > 0)
        half, middle = sum(n for _, n in dear) / 2, 0.0
        for density, n in dear:
            middle, half = density, half - n
            if half <= 0:
                break
        return [middle * scale for scale in SCALES] if middle > 0 else []


def neighbour(prices: list[float], price: float, by: int) -> float:
    """Returns the next higher or lower of sorted prices; below the lowest is 0."""
    scale = [0.0, *prices]
    return scale[min(len(scale) - 1, max(0, scale.index(price) + by))]
