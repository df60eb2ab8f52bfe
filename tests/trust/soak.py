"""Thousands of steps of several models in one process: nothing grows, and losses stay the twin's.

Three models take turns: activations that go to files (some of them packed), weights on the host
with updates beside backward, and states on disk under dynamic shapes. Each has a twin that moves
nothing. Steps are of changing shapes; some are evaluations, dropped losses, failures, or go
backward twice. One model in turn is deleted and made anew, and torch forgets what it compiled.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offcompile
from offcompile.report import report
from offcompile.run.accounts.process import process
from offcompile.runtime.base.process_memory import resident
from offcompile.runtime.device import tickets
from offcompile.runtime.moves.registry import close_all, runtimes

from .rows import Row

STEPS, LIFE = 2_000, 200
WIDTH, ROWS = 64, (64, 160)
#: steps between two looks at the books
LOOK = 20
#: resident memory may grow by so much in 1,000 steps, once all models have been made anew, more
#: than where torch compiles the same models again and again without offcompile
MOST_SLOPE_BYTES = 4 << 20
#: and by so much where nothing is compiled any more
MOST_QUIET_BYTES = 1 << 20


@dataclass
class Soak:
    """The record of a run."""

    ways: Counter[str] = field(default_factory=Counter)
    #: step → books, resident bytes, and our living objects
    looks: dict[int, dict[str, int]] = field(default_factory=dict)
    anon_bytes: dict[int, int] = field(default_factory=dict)
    objects: dict[int, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Boom(Exception):
    """An error that the user's code raises on purpose."""


class Model(nn.Module):
    """Two blocks with the user's own code between them, where it can fail in both directions."""

    def __init__(self) -> None:
        super().__init__()
        # not compiled: what it makes wants a gradient, so that both blocks are one graph
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.enter(x))
        if self.fails == "forward":
            raise Boom
        if self.fails == "backward" and x.requires_grad:
            x.register_hook(_fail)
        return self.blocks[1](x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return x


def _fail(_: Tensor) -> None:
    raise Boom


@dataclass(frozen=True)
class Kind:
    """How a model is compiled and updated; `beside`: updates run while backward does."""

    name: str
    options: dict[str, Any]
    dynamic: bool = False
    micro: int = 1
    ours: dict[str, Any] | None = None

    @property
    def beside(self) -> bool:
        return self.ours is not None


HOSTED = {"policy": "gradient_reserve"}
#: a search so short that activations move, and are packed, where a longer one makes them again
SPILLED = {"policy": "joint:evaluations=4"}
KINDS = (
    Kind("activations", SPILLED, micro=2),
    Kind("weights", HOSTED, dynamic=True, ours={"states": "host", "overlap": True}),
    Kind("states", {}, dynamic=True, ours={"states": "disk", "overlap": True}),
)


class Life:
    """One model and its twin, from when they are made until they are deleted."""

    def __init__(self, kind: Kind, folder: Path, seed: int, plain: bool = False) -> None:
        self.kind = replace(kind, ours=None) if plain else kind
        torch.manual_seed(seed)
        self.model = Model()
        self.twin = Model()
        self.twin.load_state_dict(self.model.state_dict())
        options = {"memory": "minimum", "lowering": "aot_eager", "hardware": "cpu"}
        options |= {"seconds": 0.05, "spill": str(folder), **kind.options}
        how: dict[str, Any] = {"backend": "offcompile", "options": options}
        for block in self.model.blocks:
            block.compile(dynamic=kind.dynamic, **({"backend": "aot_eager"} if plain else how))
        self.plain = torch.optim.AdamW(self.twin.parameters(), lr=1e-3, fused=True)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        if self.kind.ours is not None:
            arguments = {**self.kind.ours, "directory": str(folder), "accumulate": kind.micro}
            self.optimizer = offcompile.optim.AdamW(
                self.model.parameters(), lr=1e-3, channels=True, **arguments
            )

    def step(self, rng: random.Random) -> tuple[str, bool]:
        """Make a step; return its kind, and True if both models found the same."""
        way = rng.choices(WAYS, SHARES)[0]
        rows, seed = rng.choice(ROWS), rng.getrandbits(32)
        found = [
            _step(model, optimizer, way, rows, seed, self.kind)
            for model, optimizer in ((self.model, self.optimizer), (self.twin, self.plain))
        ]
        if way in FAILS and self.kind.beside:
            # updates made before it failed remain: the twin begins again from there
            self.twin.load_state_dict(self.model.state_dict())
            # torch takes the tensors of a state_dict as they are, and these are to be its own
            self.plain.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return way, all(map(torch.equal, *found))


FAILS = ("forward", "backward", "hook")
WAYS = ("train", "eval", "dropped", "twice", *FAILS)
SHARES = (10, 2, 2, 2, 1, 1, 1)


def _step(model: Model, optimizer: Any, way: str, rows: int, seed: int, kind: Kind) -> list[Tensor]:
    """One step of a way: the losses that it gives."""
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(rows, WIDTH, generator=generator) for _ in range(kind.micro)]
    if way == "eval":
        with torch.no_grad():
            return [model(batches[0]).square().mean()]
    if way == "dropped":
        return [model(batches[0]).square().mean().detach()]
    hook = None
    if way == "hook":
        hook = model.blocks[0].layers[1].weight.register_hook(_fail)
    model.fails = way if way in FAILS else ""
    losses = []
    try:
        for x in batches:
            loss = model(x).square().mean()
            losses.append(loss.detach())
            if way == "twice" and not kind.beside:
                loss.backward(retain_graph=True)
            loss.backward()
        optimizer.step()
    except Boom:
        losses.append(torch.zeros(()))
        if isinstance(optimizer, offcompile.optim.AdamW):
            optimizer.discard()
    finally:
        model.fails = ""
        if hook is not None:
            hook.remove()
    optimizer.zero_grad()
    return losses


# --- the books -------------------------------------------------------------------------------


def books(folder: Path) -> dict[str, int]:
    """All that must be the same whenever the same models live and nothing runs."""
    gc.collect()
    offcompile.counters()  # what has died is given back: a copy that did not begin never will
    opened = runtimes()
    for runtime in opened:
        # a tensor may die while it is written, and its extent lives until that has ended
        runtime.device.drain()
    found = offcompile.counters()
    stores = [store for runtime in opened for store in runtime.stores.values()]
    mapped = [runtime.device.mapped for runtime in opened]
    return {
        "live tickets": found["live_tickets"],
        "entries of tickets": len(tickets._issued.entries),
        "bytes in flight": found["in_flight_bytes"],
        "bytes in spill files": found["spill_bytes"],
        "extents": sum(len(store._extents.live) for store in stores),
        "runtimes": len(opened),
        "bytes mapped": sum(store.used_bytes for store in mapped),
        "graphs in the books": len(process.usage_of(torch.device("cpu")).entries()),
        "passes that wait": sum(
            len(entry.waiting()) for entry in process.usage_of(torch.device("cpu")).entries()
        ),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "threads of the process": len(os.listdir("/proc/self/task")),
        "files left": sum(1 for _ in folder.rglob("*")),
    }


def objects() -> Counter[str]:
    """Living objects of our types."""
    return Counter(
        f"{type(o).__module__}.{type(o).__qualname__}"
        for o in gc.get_objects()
        if str(type(o).__module__).startswith("offcompile")
    )


# --- the run ---------------------------------------------------------------------------------


@contextmanager
def _alone() -> Iterator[Path]:
    """Nothing of others in the books, one thread of torch, and a folder to spill to."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    close_all()
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as name,
        # all models share the code of their blocks: shapes and modes of each count together
        torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096),
        # without offcompile, graphs refuse to be run backward twice unless told so
        torch._functorch.config.patch(donated_buffer=False),
    ):
        try:
            yield Path(name)
        finally:
            torch._dynamo.reset()
            close_all()
            torch.set_num_threads(threads)


def soak(steps: int, life: int, look: int, seed: int, plain: bool = False) -> Soak:
    """`steps` steps; a model is made anew every `life`, and books are read every `look`.

    plain: torch compiles the models, without offcompile.
    """
    rng, seen = random.Random(seed), Soak()
    with _alone() as folder:
        lives = [Life(kind, folder, seed, plain) for kind in KINDS]
        for step in range(steps):
            if step and step % life == 0:
                at = step // life % len(lives)
                lives[at : at + 1] = []
                gc.collect()
                torch._dynamo.reset()
                # kept for whoever asks, and no leak: a thousand at most
                report._remembered.clear()
                lives.insert(at, Life(KINDS[at], folder, seed + step, plain))
            one = rng.choice(lives)
            way, same = one.step(rng)
            seen.ways[way] += 1
            if not same:
                seen.wrong.append(
                    f"step {step}, {one.kind.name}, {way}: another loss than the twin's"
                )
            if step % look == look - 1:
                seen.looks[step] = books(folder)
                seen.anon_bytes[step] = resident().anon_bytes
                seen.objects[step] = objects()
    return seen


# --- the table -------------------------------------------------------------------------------

ZERO = (
    "live tickets",
    "entries of tickets",
    "bytes in spill files",
    "extents",
    "passes that wait",
    "files left",
)
STEADY = ("bytes in flight", "runtimes")
#: figures that depend on the graphs compiled since the last model was made → how far they may vary
BOUNDED = {
    "graphs in the books": 0,
    "bytes mapped": 0,
    "descriptors": 0,
    "threads": 0,
    "threads of the process": 2,
}


def unsteady(seen: Soak, life: int) -> list[str]:
    """Every book that is not as it should be, by the step at which it was read."""
    wrong = [
        f"step {step}: {name} is {found[name]}, not 0"
        for step, found in seen.looks.items()
        for name in ZERO
        if found[name]
    ]
    after = {step: found for step, found in seen.looks.items() if step >= life}
    first = next(iter(after.values()))
    wrong += [
        f"step {step}: {name} is {found[name]}, and was {first[name]}"
        for step, found in after.items()
        for name in STEADY
        if found[name] != first[name]
    ]
    looks = list(seen.looks.values())
    early, late = looks[: len(looks) * 2 // 3], looks[len(looks) * 2 // 3 :]
    for name, slack in BOUNDED.items():
        most, now = max(one[name] for one in early), max(one[name] for one in late)
        if now > most + slack:
            wrong.append(f"{name} reached {now} late, {most} early")
    return wrong


def slope_bytes(values: dict[int, int], life: int) -> float:
    """Growth in 1,000 steps between the medians of two windows, once each model was made anew.

    The windows are as long as it takes to make each model anew, so they see the same.
    """
    window = len(KINDS) * life
    last = max(values)
    early = {s: v for s, v in values.items() if window <= s < 2 * window}
    late = {s: v for s, v in values.items() if s > last - window}
    apart = statistics.mean(late) - statistics.mean(early)
    return (statistics.median(late.values()) - statistics.median(early.values())) / apart * 1000


def quiet_growth_bytes(steps: int, look: int, seed: int) -> float:
    """In 1,000 steps of models that stay, from when all of their steps have been compiled."""
    seen = soak(steps, steps + 1, look, seed).anon_bytes
    early = [v for s, v in seen.items() if steps // 3 <= s < steps * 2 // 3]
    late = [v for s, v in seen.items() if s >= steps * 2 // 3]
    return (statistics.median(late) - statistics.median(early)) / (steps / 3) * 1000


def plain_growth_bytes(steps: int, life: int, look: int, seed: int) -> float:
    """In 1,000 steps, what a process grows by in which torch alone compiles the same models."""
    code = (
        f"from trust import soak; seen = soak.soak({steps}, {life}, {look}, {seed}, plain=True);"
        f" print(soak.slope_bytes(seen.anon_bytes, {life}))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(ran.stdout.split()[-1])


def rows(scale: float, seed: int) -> list[Row]:
    steps = max(60, int(STEPS * scale))
    life = steps // 10 if scale >= 0.5 else steps // 3
    seen = soak(steps, life, min(LOOK, life // 3), seed)
    wrong = [*seen.wrong, *unsteady(seen, life)]
    figures = [("losses unlike the twin's", str(len(seen.wrong)))]
    figures += [(way, f"{seen.ways[way]:,}") for way in WAYS]
    if scale >= 0.5:
        growth = slope_bytes(seen.anon_bytes, life)
        ours = slope_bytes({s: sum(c.values()) for s, c in seen.objects.items()}, life)
        alone = plain_growth_bytes(steps, life, min(LOOK, life // 3), seed)
        quiet = quiet_growth_bytes(steps // 2, LOOK, seed)
        figures.append(("resident memory in 1,000 steps", f"{quiet / 2**20:+.2f} MiB"))
        figures.append(("with 5 recompilations of all", f"{growth / 2**20:+.1f} MiB"))
        figures.append(("where torch alone compiles them", f"{alone / 2**20:+.1f} MiB"))
        if quiet > MOST_QUIET_BYTES:
            wrong.append(f"resident memory grows by {quiet:.0f} bytes in 1,000 quiet steps")
        figures.append(("objects of ours in 1,000 steps", f"{ours:+.0f}"))
        if growth - alone > MOST_SLOPE_BYTES:
            wrong.append(
                f"resident memory grows by {growth:.0f} bytes in 1,000 steps; where torch alone"
                f" compiles the models, by {alone:.0f}"
            )
    if wrong:
        raise AssertionError(f"seed {seed}, scale {scale}:\n" + "\n".join(wrong[:20]))
    return [Row("steps soaked, with the books flat", steps, steps, figures=tuple(figures))]
