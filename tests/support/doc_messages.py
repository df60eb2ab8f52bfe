"""Producers of the messages in docs/troubleshooting.md: heading → what makes the code say it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offcompile.ir import OffloadError

Producer = Callable[[Path, pytest.MonkeyPatch], str]
PRODUCERS: dict[str, Producer] = {}


def says(heading: str) -> Callable[[Producer], Producer]:
    def register(produce: Producer) -> Producer:
        assert heading not in PRODUCERS
        PRODUCERS[heading] = produce
        return produce

    return register


def told(call: Callable[[], Any], kind: type[Exception] = OffloadError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def warned(call: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(one.message) for one in found)
