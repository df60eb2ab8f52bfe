"""Traces to judge prefetching by: small models' steps, block by block.

A layer has a weight, two optimizer moments and a saved activation; every layer runs the same
graphs, bound to its own blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from offcompile.ir import DEVICE, HOST, Lane, Machine, Tier
from offcompile.ir.trace import Block, Run, Trace

MIB = 1 << 20


@dataclass
class Blocks:
    """Blocks as they come up, each with its size."""

    nbytes: dict[str, int] = field(default_factory=dict)

    def __call__(self, name: str, nbytes: int) -> str:
        self.nbytes.setdefault(name, nbytes)
        return name

    def trace(self, runs: Iterable[Run]) -> Trace:
        listed = tuple(runs)
        return Trace(tuple(Block(n, size) for n, size in self.nbytes.items()), listed)


@dataclass(frozen=True)
class Model:
    """One model's graphs; `name` tells its weights from another's."""

    name: str = "m"
    layers: int = 12
    weight: int = 8 * MIB
    activation: int = 6 * MIB
    duration_us: float = 3000.0

    def forward(self, blocks: Blocks, shape: str = "", scale: float = 1.0) -> Iterator[Run]:
        for i in range(self.layers):
            saved = self._saved(blocks, i, shape, scale)
            before = [self._saved(blocks, i - 1, shape, scale)] if i else []
            yield self._run("forward", i, shape, scale, [self._weight(blocks, i), *before], [saved])

    def backward(self, blocks: Blocks, shape: str = "", scale: float = 1.0) -> Iterator[Run]:
        for i in reversed(range(self.layers)):
            saved = self._saved(blocks, i, shape, scale)
            reads = [self._weight(blocks, i), saved]
            gradient = blocks(f"{self.name}.g{i}", self.weight)
            yield self._run("backward", i, shape, 2 * scale, reads, [gradient], [saved])

    def update(self, blocks: Blocks) -> Iterator[Run]:
        for i in range(self.layers):
            moments = [blocks(f"{self.name}.{m}{i}", self.weight) for m in ("m", "v")]
            own = [self._weight(blocks, i), *moments]
            gradient = blocks(f"{self.name}.g{i}", self.weight)
            yield self._run("update", i, "", 1.5, [gradient, *own], own, [gradient])

    def evaluate(self, blocks: Blocks) -> Iterator[Run]:
        for i in range(self.layers):
            before = [blocks(f"{self.name}.x{i}", self.activation)] if i else []
            after = blocks(f"{self.name}.x{i + 1}", self.activation)
            yield self._run(
                "evaluate", i, "", 1.0, [self._weight(blocks, i), *before], [after], before
            )

    def train(self, blocks: Blocks, shape: str = "", scale: float = 1.0) -> Iterator[Run]:
        yield from self.forward(blocks, shape, scale)
        yield from self.backward(blocks, shape, scale)
        yield from self.update(blocks)

    def _weight(self, blocks: Blocks, i: int) -> str:
        return blocks(f"{self.name}.w{i}", self.weight)

    def _saved(self, blocks: Blocks, i: int, shape: str, scale: float) -> str:
        return blocks(f"{self.name}.a{i}{shape}", int(self.activation * scale))

    def _run(
        self,
        graph: str,
        layer: int,
        shape: str,
        scale: float,
        reads: list[str],
        writes: list[str],
        dead: Iterable[str] = (),
    ) -> Run:
        return Run(
            f"{graph}{shape}",
            self.duration_us * scale,
            f"{self.name}.L{layer}",
            tuple(reads),
            tuple(writes),
            tuple(dead),
        )


def repeat(steps: int = 120, model: Model | None = None) -> Trace:
    """The same training step, again and again."""
    model, blocks = model or Model(), Blocks()
    return blocks.trace([run for _ in range(steps) for run in model.train(blocks)])


def evaluate_every_4(steps: int = 120, model: Model | None = None) -> Trace:
    """Training, with an evaluation pass after every fourth step."""
    model, blocks = model or Model(), Blocks()
    runs: list[Run] = []
    for step in range(steps):
        runs += model.train(blocks)
        if step % 4 == 3:
            runs += model.evaluate(blocks)
    return blocks.trace(runs)


def alternating(steps: int = 120) -> Trace:
    """Two models take turns, as a generator and a discriminator do."""
    blocks, pair = Blocks(), (Model("one", layers=7), Model("two", layers=5, weight=10 * MIB))
    return blocks.trace([run for step in range(steps) for run in pair[step % 2].train(blocks)])


def variable_lengths(steps: int = 120, seed: int = 0) -> Trace:
    """Training with sequences of four lengths in random order: each length has its own graphs."""
    rng, model, blocks = random.Random(seed), Model(), Blocks()
    runs: list[Run] = []
    for _ in range(steps):
        length = rng.choice((1, 2, 3, 4))
        runs += model.train(blocks, f"@{128 * length}", 0.4 * length)
    return blocks.trace(runs)


def random_embedding(steps: int = 120, seed: int = 0, pages: int = 96, touched: int = 12) -> Trace:
    """An embedding whose pages are chosen by data, most of them rarely, before a few layers."""
    rng, model, blocks = random.Random(seed), Model(layers=6), Blocks()
    weights = [1 / (1 + i) for i in range(pages)]
    runs: list[Run] = []
    for _ in range(steps):
        wanted = list(dict.fromkeys(rng.choices(range(pages), weights, k=touched)))
        used = tuple(blocks(f"e{i}", 4 * MIB) for i in wanted)
        pooled = blocks("pooled", MIB)
        runs.append(Run("embed", 2000.0, None, used, (pooled,)))
        runs += model.train(blocks)
        runs.append(Run("scatter", 2000.0, None, (*used, pooled), used, (pooled,)))
    return blocks.trace(runs)


def adversarial(steps: int = 2000, seed: int = 0, executions: int = 24) -> Trace:
    """Executions in random order, each touching blocks drawn anew: there is nothing to learn."""
    rng, blocks = random.Random(seed), Blocks()
    runs = []
    for _ in range(steps):
        chosen = rng.sample(range(96), 3)
        reads = tuple(blocks(f"b{i}", 4 * MIB) for i in chosen)
        graph, writes = f"graph{rng.randrange(executions)}", reads[:1] if rng.random() < 0.5 else ()
        runs.append(Run(graph, rng.uniform(500, 3000), None, reads, writes))
    return blocks.trace(runs)


def deceiving(steps: int = 2000, seed: int = 0) -> Trace:
    """Fixed blocks for each execution, and executions in random order: half of it can be learnt."""
    rng, blocks = random.Random(seed), Blocks()
    sets = [rng.sample(range(96), 4) for _ in range(24)]
    runs = []
    for _ in range(steps):
        which = rng.randrange(24)
        reads = tuple(blocks(f"b{i}", 4 * MIB) for i in sets[which])
        runs.append(Run(f"graph{which}", rng.uniform(500, 3000), None, reads))
    return blocks.trace(runs)


TRACES: Mapping[str, Callable[..., Trace]] = {
    "repeat": repeat,
    "evaluate every 4": evaluate_every_4,
    "two alternating": alternating,
    "variable lengths": variable_lengths,
    "random embedding": random_embedding,
    "adversarial": adversarial,
    "deceiving": deceiving,
}


def half(trace: Trace, bytes_per_us: float = 25000.0, share: float = 0.5) -> Machine:
    """A device with a share of what the trace has alive at once, and a link (25 GB/s)."""
    capacity = max(int(trace.peak_bytes * share), trace.largest_run_bytes)
    return Machine(
        (Tier(DEVICE, capacity), Tier(HOST)),
        (
            Lane("h2d", HOST, DEVICE, bytes_per_us, 10.0),
            Lane("d2h", DEVICE, HOST, bytes_per_us, 10.0),
        ),
    )
