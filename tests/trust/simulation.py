"""Whole training steps under one seed: which program, which order, which faults.

`python -m trust simulation --seed N --scale 0` plays one seed again and prints what it did.
"""

from __future__ import annotations

import gc
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from simulated_streams import Faults

from offcompile.ir import OffloadError
from offcompile.runtime.base import watchdog
from offcompile.runtime.disk import spill_file
from offcompile.runtime.states import state_blocks

from .interleaving import Interleaving, Stuck
from .planted import PLANTS
from .rows import Row
from .simulated_disk import GROW_FAULTS, READ_FAULTS, WRITE_FAULTS, SimulatedDisk
from .training import Shape, Stopped, Training, shape_of

#: seeds of a run of full length, and how many are tried for each order taken away
SEEDS, PLANT_SEEDS = 4000, 12
KINDS = (
    "none",
    "copy is not queued",
    "copy fails",
    "device is full",
    "host is full",
    "activations' disk",
    "states' disk",
    "no frame",
    "no thread",
    "model raises",
)
#: names of which an error needs one: a tensor, a place, or the resource that ran out
_NAMED = re.compile(
    r"\b[agw]\d* |a weight of shape|spill file|the thread|out of memory|allocate|do not fit|model's"
)


@dataclass(frozen=True)
class Outcome:
    """One seed: what went wrong that should not have (`failures`), and what was tried."""

    seed: int
    shape: Shape
    kind: str
    #: faults that were really met, and errors that told of them
    hit: tuple[str, ...]
    told: tuple[str, ...]
    failures: tuple[str, ...]
    races: tuple[str, ...]
    log: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        return not self.failures and not self.races

    def complaints(self) -> list[str]:
        again = f"python -m trust simulation --seed {self.seed} --scale 0"
        return [f"seed {self.seed} ({again}): {what}" for what in (*self.failures, *self.races)]


def simulate(seed: int, kind: str | None = None) -> Outcome:
    """Play a seed: always the same. kind: of fault; None: drawn."""
    dice = random.Random(f"simulation {seed}")
    drawn = dice.choice(KINDS)
    return _Play(seed, dice, kind or drawn).outcome()


class _Play:
    def __init__(self, seed: int, dice: random.Random, kind: str) -> None:
        self.seed, self.dice, self.kind = seed, dice, kind
        self.shape = _suited(shape_of(dice), kind)
        self.run = Interleaving(seed)
        self.disks = (
            SimulatedDisk("activations' disk", self.run.point, _untold),
            SimulatedDisk("states' disk", self.run.point, self.run.touch),
        )
        self.hit: list[str] = []
        self.told: list[str] = []
        self.failures: list[str] = []
        self.races: list[str] = []
        self.most_frames: int | None = None

    def outcome(self) -> Outcome:
        with quiet(), tempfile.TemporaryDirectory() as place, self._frames():
            try:
                with self.run.running():
                    self._all_steps(Path(place))
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            # the one thing that is another each time
            self.told = [told.replace(place, "/spill") for told in self.told]
        self.failures += [f"a thread died: {crash}" for crash in self.run.crashed]
        self.races += self.run.races
        return Outcome(
            self.seed,
            self.shape,
            self.kind,
            tuple(self.hit),
            tuple(self.told),
            tuple(self.failures),
            tuple(self.races),
            tuple(self.run.log),
        )

    def _all_steps(self, place: Path) -> None:
        training = Training(self.seed, self.shape, self.run, self.disks, place)
        faulty = self.dice.randrange(self.shape.steps)
        for number in range(self.shape.steps):
            if number == faulty and self.kind != "none":
                with self._faults(training):
                    error = self._tried(training, number)
                self.hit += [hit for disk in self.disks for hit in disk.hit]
                late = training.told_late()
                self.told += [*([error] if error else []), *late]
                if not error and not late:
                    if training.wrong:
                        self.failures.append(f"step {number}, nothing told: {training.wrong}")
                    continue
                self._check_told()
                training.wrong.clear()
                training.restore()
            error = self._tried(training, number)
            if error:
                late = training.told_late()
                self.failures.append(f"step {number} without faults: {error}, {late}")
                break
        training.check()
        self.failures += training.wrong
        self.races += map(str, training.bench.streams.races)
        left = training.left()
        if left:
            self.failures.append(f"left: {', '.join(left)}")

    def _tried(self, training: Training, number: int) -> str:
        """The text of the step's error, if any; the error itself would keep tensors."""
        try:
            training.step(number)
        except (OffloadError, torch.OutOfMemoryError, Stopped) as error:
            return f"{type(error).__name__}: {error}"
        except Stuck:
            raise
        except Exception as error:
            self.failures.append(f"step {number} raises {error!r}")
            return f"{type(error).__name__}: {error}"
        return ""

    def _check_told(self) -> None:
        """Errors name what failed: a tensor, a place, or what could not be had."""
        for told in self.told:
            if not _NAMED.search(told):
                self.failures.append(f"an error that names nothing: {told}")
        if not self.hit:
            self.failures.append(f"errors without a fault: {self.told}")

    # -- faults ----------------------------------------------------------------------------------

    @contextmanager
    def _faults(self, training: Training) -> Iterator[None]:
        kind, streams, dice = self.kind, training.bench.streams, self.dice
        at = dice.randrange(dice.choice((3, 8, 20)))
        if kind == "copy is not queued":
            streams.faults = Faults(at_issue=frozenset([streams._copies + at]))
        elif kind == "copy fails":
            streams.faults = Faults(running=frozenset([streams._copies + at]))
        elif kind == "device is full":
            streams.faults = Faults(allocating=frozenset([streams._allocations + at]))
        elif kind == "host is full":
            arena = training.bench.device.arena
            before, arena.limit_bytes = arena.limit_bytes, arena.used_bytes + 100 * at
        elif kind in ("activations' disk", "states' disk"):
            self._disk_fault(kind, at // 4)
        elif kind == "no frame":
            self.most_frames = at // 4
        elif kind == "no thread":
            self.run.before_start = _Nth(at // 3, self._no_thread)
        elif kind == "model raises":
            training.at_op = _Nth(at // 3, self._model_raises)
        copies, allocations = streams._copies, streams._allocations
        yield
        if kind in ("copy is not queued", "copy fails") and streams._copies > copies + at:
            self.hit.append(kind)
        if kind == "device is full" and streams._allocations > allocations + at:
            self.hit.append(kind)
        if kind == "host is full":
            self.hit.append(kind)
            arena.limit_bytes = before
        streams.faults = Faults()
        for disk in self.disks:
            disk.faults.clear()
        self.most_frames = None
        self.run.before_start = training.at_op = _nothing

    def _disk_fault(self, kind: str, at: int) -> None:
        # files of states grow before there is a step
        states = kind == "states' disk"
        disk = self.disks[states]
        what = self.dice.choice(("read", "write", "write", "write" if states else "grow"))
        kinds = {"read": READ_FAULTS, "write": WRITE_FAULTS, "grow": GROW_FAULTS}[what]
        number = disk.counts[what] + (0 if what == "grow" else at)
        disk.faults = {(what, number): self.dice.choice(kinds)}

    def _no_thread(self) -> None:
        self.hit.append("no thread")
        raise RuntimeError("can't start new thread")

    def _model_raises(self) -> None:
        self.hit.append("model raises")
        raise Stopped("the model's own error")

    @contextmanager
    def _frames(self) -> Iterator[None]:
        """Frames are refused once there are as many more as `most_frames`."""
        real = state_blocks.Frame

        def frame(nbytes: int) -> state_blocks.Frame:
            if self.most_frames is not None:
                if not self.most_frames:
                    self.hit.append("no frame")
                    raise OffloadError("no memory for a frame of the spill file (planted)")
                self.most_frames -= 1
            return real(nbytes)

        with mock.patch.object(state_blocks, "Frame", frame):
            yield


class _Nth:
    """Calls `then` the n-th time that it is called itself."""

    def __init__(self, number: int, then: Callable[[], None]) -> None:
        self._left, self._then = number, then

    def __call__(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._then()


def _untold(start: int, nbytes: int, writes: bool, what: str) -> None:
    """The streams' own detector looks at this memory."""


def _nothing() -> None:
    """Nothing goes wrong any more."""


def _suited(shape: Shape, kind: str) -> Shape:
    """With something for the fault to strike."""
    if kind == "activations' disk" and "disk" not in shape.tiers:
        return replace(shape, tiers=("disk", *shape.tiers[1:]))
    if kind in ("states' disk", "no frame"):
        return replace(shape, state_blocks=(2, *shape.state_blocks[1:]), states_kept=0)
    return shape


@contextmanager
def quiet() -> Iterator[None]:
    """Files without real disks, no garbage collection wherever it likes, no clock for waits."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        direct = mock.patch.object(spill_file, "_make_direct", lambda descriptor: True)
        # who waits for ever is seen by the others being stuck
        with direct, watchdog.patience(0):
            yield
    finally:
        if was_on:
            gc.enable()


# -- what is counted ---------------------------------------------------------------------------


def rows(scale: float, seed: int) -> list[Row]:
    """Seeds from `seed` on; with scale 0 just that one, whose order is printed."""
    if scale == 0:
        _replay(seed)
    seeds = range(seed, seed + max(1, round(SEEDS * scale)))
    clean = turns = met = survived = 0
    hits: Counter[str] = Counter()
    told: Counter[str] = Counter()
    wrong: list[str] = []
    for number in seeds:
        outcome = simulate(number)
        turns += len(outcome.log)
        wrong += outcome.complaints()
        clean += outcome.is_clean
        for hit in set(outcome.hit):
            hits[hit] += 1
            told[hit] += bool(outcome.told)
        if outcome.hit:
            met += 1
            survived += outcome.is_clean
    found = [name for name in PLANTS if is_found(name, seed)]
    wrong += [f"{name}: nothing is found" for name in PLANTS if name not in found]
    if wrong:
        raise AssertionError("\n".join(wrong))
    by_kind = tuple(
        (kind, f"{count} ({told[kind]} told, the others made good)")
        for kind, count in sorted(hits.items())
    )
    return [
        Row(
            "simulated schedules of training steps: no race, right numbers, nothing left",
            clean,
            len(seeds),
            figures=(("turns drawn", f"{turns:,}"), ("races found", "0")),
        ),
        Row("faults met in them and survived", survived, met, figures=by_kind),
        Row("orders taken away that are found", len(found), len(PLANTS)),
    ]


def is_found(plant: str, seed: int = 0, count: int = PLANT_SEEDS) -> bool:
    """True if the detectors see in one of so many programs that an order was taken away."""
    with PLANTS[plant]():
        return any(not simulate(seed + n, "none").is_clean for n in range(count))


def _replay(seed: int) -> None:
    outcome = simulate(seed)
    print("\n".join(outcome.log))
    print(outcome.shape, f"fault: {outcome.kind}", *outcome.hit, *outcome.told, sep="\n")
