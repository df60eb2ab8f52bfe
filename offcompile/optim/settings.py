"""The optimizer arguments beyond torch's own, checked once."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from offcompile.ir import InvalidInput, Violation
from offcompile.machine.hardware import parse_bytes

StatesAt = Literal["auto", "device", "host", "disk"]
Directory = str | PathLike[str] | Sequence[str | PathLike[str]]

Channels = bool | Literal["measure"] | None
Overlap = bool | Literal["forward"]


class Asked(TypedDict, total=False):
    """The arguments that torch's optimizers do not have; docs/optim.md explains them."""

    states: StatesAt
    overlap: Overlap
    accumulate: int
    max_norm: float | None
    scaler: Any
    host_memory: int | str | None
    device_memory: int | str
    directory: Directory | None
    state_dtype: Literal["bf16"] | None
    master: bool | None
    channels: Channels
    stream: bool | float | None
    verify_spill: bool
    sharded: bool
    process_group: Any


PLACES = ("auto", "device", "host", "disk")
USUAL: Asked = {
    "states": "auto",
    "overlap": False,
    "accumulate": 1,
    "max_norm": None,
    "scaler": None,
    "host_memory": None,
    "device_memory": 0,
    "directory": None,
    "state_dtype": None,
    "master": None,
    "channels": None,
    "stream": None,
    "verify_spill": False,
    "sharded": False,
    "process_group": None,
}


@dataclass(frozen=True)
class Settings:
    """Checked settings. Made by `Settings.read`, which reports all errors at once."""

    states: StatesAt = "auto"
    overlap: bool = False
    #: True if updates may run into the next forward pass
    tail: bool = False
    accumulate: int = 1
    max_norm: float | None = None
    #: True if a GradScaler was given
    scaled: bool = False
    #: host memory for states; None: half of the memory that is free at first use
    host_bytes: int | None = None
    #: device memory for states, given to the parameters whose gradients come last
    device_bytes: int = 0
    directories: tuple[Path, ...] = ()
    state_dtype: torch.dtype | None = None
    master: bool | None = None
    #: None: channels for parameters of an asynchronous device only
    channels: Channels = None
    #: share of the states on the host that streams to the device for updates there; None: as the
    #: plan advises
    stream: float | None = None
    #: True if data read from disk is checked against checksums
    verify_spill: bool = False
    #: process group over which states are shared out; None: each rank has all
    group: Any = None

    @property
    def deferred(self) -> bool:
        """True if updates wait for all gradients of the step."""
        return self.max_norm is not None or self.scaled

    @property
    def uses_up(self) -> bool:
        """True if a gradient is used up by its update as soon as it is there."""
        return self.overlap and not self.deferred and self.accumulate == 1

    @property
    def is_open(self) -> bool:
        """True if the user leaves it open where states are."""
        named = self.device_bytes or self.host_bytes is not None or self.stream is not None
        return self.states == "auto" and not named

    @classmethod
    def read(cls, asked: Asked) -> Settings:
        for name in asked:
            if name not in USUAL:
                raise TypeError(f"Settings.read() got an unexpected keyword argument '{name}'")
        given: Asked = {**USUAL, **asked}
        wrong = [
            Violation("bad-value", name, f"{name}={given[name]!r} is not possible: {says}")  # type: ignore[literal-required]
            for name, says in _refused(given)
        ]
        host_bytes = _size("host_memory", given["host_memory"], wrong)
        device_bytes = _size("device_memory", given["device_memory"], wrong) or 0
        if wrong:
            raise InvalidInput(sorted(wrong, key=lambda found: list(USUAL).index(found.where)))
        max_norm, stream, scaler = given["max_norm"], given["stream"], given["scaler"]
        return cls(
            states=given["states"],
            overlap=bool(given["overlap"]),
            tail=given["overlap"] == "forward",
            accumulate=given["accumulate"],
            max_norm=None if max_norm is None else float(max_norm),
            scaled=scaler is not None and scaler is not False,
            host_bytes=host_bytes,
            device_bytes=sys.maxsize if given["states"] == "device" else device_bytes,
            directories=_paths(given["directory"]),
            state_dtype=torch.bfloat16 if given["state_dtype"] == "bf16" else None,
            master=given["master"],
            channels=given["channels"],
            stream=None if stream is None else float(stream),
            verify_spill=given["verify_spill"],
            group=_group(given) if given["sharded"] else None,
        )


def _refused(given: Asked) -> Iterator[tuple[str, str]]:
    """The arguments with impossible values, and what to give instead."""
    if given["states"] not in PLACES:
        yield "states", f"give one of {', '.join(map(repr, PLACES))}"
    if given["overlap"] not in (True, False, "forward"):
        yield "overlap", "give True, False or 'forward'"
    passes: object = given["accumulate"]
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        yield "accumulate", "give the number of backward passes per step, 1 or more"
    elif passes > 1 and not given["overlap"]:
        yield "accumulate", "it counts for overlap=True only; leave it out"
    if given["max_norm"] is not None and not _is_norm(given["max_norm"]):
        yield "max_norm", "give a positive number, or None"
    if given["state_dtype"] not in (None, "bf16"):
        yield "state_dtype", "give 'bf16' (lossy), or None for exact states"
    if given["channels"] not in (None, True, False, "measure"):
        yield "channels", "give True, False, 'measure' or None"
    if given["stream"] is not None and not _is_share(given["stream"]):
        yield "stream", "give True, False, a share between 0 and 1, or None"
    if not isinstance(given["verify_spill"], bool):
        yield "verify_spill", "give True or False"
    yield from _refused_sharding(given)


def _refused_sharding(given: Asked) -> Iterator[tuple[str, str]]:
    sharded, group = given["sharded"], given["process_group"]
    distributed: Any = torch.distributed
    if not isinstance(sharded, bool):
        yield "sharded", "give True or False, and the group as process_group"
    elif not sharded:
        if group is not None:
            yield "process_group", "states are shared out over it with sharded=True only"
    elif not distributed.is_available() or not distributed.is_initialized():
        yield "sharded", "there are no ranks yet; call torch.distributed.init_process_group() first"
    elif group is not None and distributed.get_rank(group) < 0:
        yield "process_group", "this rank is no member of it"
    elif given["overlap"] == "forward":
        yield "overlap", "ranks exchange weights when step() ends; give True with sharded=True"


def _size(name: str, value: int | str | None, wrong: list[Violation]) -> int | None:
    """The value in bytes; appends to `wrong` what is the matter with it."""
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except InvalidInput as error:
            wrong.extend(Violation(v.rule, name, v.detail) for v in error.violations)
    elif value is not None and (isinstance(value, bool) or value < 0):
        says = f"{name}={value!r} is not possible: give bytes, or text as in '8GiB'"
        wrong.append(Violation("bad-value", name, says))
    return value if isinstance(value, int) else None


def _group(given: Asked) -> Any:
    """The process group to share states out over; None if it has one rank."""
    distributed: Any = torch.distributed
    group = given["process_group"] or distributed.group.WORLD
    return group if distributed.get_world_size(group) > 1 else None


def _is_norm(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value > 0 and not math.isnan(value)  # type: ignore[operator,arg-type]


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and 0.0 <= value <= 1.0


def _paths(directory: Directory | None) -> tuple[Path, ...]:
    if directory is None:
        return ()
    if isinstance(directory, str | PathLike):
        return (Path(directory),)
    return tuple(map(Path, directory))
