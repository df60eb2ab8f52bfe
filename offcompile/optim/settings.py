"""The optimizer arguments beyond torch's own, checked once."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
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


PLACES = ("auto", "device", "host", "disk")


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

    @property
    def deferred(self) -> bool:
        """True if updates wait for all gradients of the step."""
        return self.max_norm is not None or self.scaled

    @classmethod
    def read(
        cls,
        states: object = "auto",
        overlap: object = False,
        accumulate: object = 1,
        max_norm: object = None,
        scaler: Any = None,
        host_memory: int | str | None = None,
        device_memory: int | str = 0,
        directory: Directory | None = None,
        state_dtype: object = None,
        master: bool | None = None,
        channels: object = None,
        stream: object = None,
        verify_spill: object = False,
    ) -> Settings:
        wrong: list[Violation] = []

        def refuse(name: str, value: object, says: str) -> None:
            wrong.append(Violation("bad-value", name, f"{name}={value!r} is not possible: {says}"))

        if states not in PLACES:
            refuse("states", states, f"give one of {', '.join(map(repr, PLACES))}")
        if overlap not in (True, False, "forward"):
            refuse("overlap", overlap, "give True, False or 'forward'")
        if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
            refuse(
                "accumulate", accumulate, "give the number of backward passes per step, 1 or more"
            )
        elif accumulate > 1 and not overlap:
            refuse("accumulate", accumulate, "it counts for overlap=True only; leave it out")
        if max_norm is not None and not _is_norm(max_norm):
            refuse("max_norm", max_norm, "give a positive number, or None")

        def size(name: str, value: int | str | None) -> int | None:
            if isinstance(value, str):
                try:
                    return parse_bytes(value)
                except InvalidInput as error:
                    wrong.extend(Violation(v.rule, name, v.detail) for v in error.violations)
            elif value is not None and (isinstance(value, bool) or value < 0):
                refuse(name, value, "give bytes, or text as in '8GiB'")
            return value if isinstance(value, int) else None

        host_bytes = size("host_memory", host_memory)
        device_bytes = size("device_memory", device_memory) or 0
        if state_dtype not in (None, "bf16"):
            refuse("state_dtype", state_dtype, "give 'bf16' (lossy), or None for exact states")
        if channels not in (None, True, False, "measure"):
            refuse("channels", channels, "give True, False, 'measure' or None")
        if stream is not None and not _is_share(stream):
            refuse("stream", stream, "give True, False, a share between 0 and 1, or None")
        if not isinstance(verify_spill, bool):
            refuse("verify_spill", verify_spill, "give True or False")
        if wrong:
            raise InvalidInput(wrong)
        return cls(
            states=states,  # type: ignore[arg-type]  # checked above, as those below
            overlap=bool(overlap),
            tail=overlap == "forward",
            accumulate=accumulate,  # type: ignore[arg-type]
            max_norm=None if max_norm is None else float(max_norm),  # type: ignore[arg-type]
            scaled=scaler is not None and scaler is not False,
            host_bytes=host_bytes,
            device_bytes=sys.maxsize if states == "device" else device_bytes,
            directories=_paths(directory),
            state_dtype=torch.bfloat16 if state_dtype == "bf16" else None,
            master=master,
            channels=channels,  # type: ignore[arg-type]
            stream=None if stream is None else float(stream),  # type: ignore[arg-type]
            verify_spill=bool(verify_spill),
        )


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
