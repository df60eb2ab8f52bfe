"""The checks of captured steps, on the asynchronous device under delays."""

from __future__ import annotations

import functools
from collections.abc import Callable

import capture_checks
from async_device import Controls
from async_own_checks import DEVICE

SEEDS = {"captured-gpt": 1, "captured-encoder": 2, "accumulation": 3}


def seeded(check: Callable[[str], None], seed: int, controls: Controls) -> None:
    controls.seed(seed)
    try:
        check(DEVICE)
    finally:
        controls.seed(0)


CHECKS = {
    name: functools.partial(seeded, check, SEEDS.get(name, 0))
    for name, check in capture_checks.CHECKS.items()
}
PLANTED = {
    f"captures without {name}": functools.partial(
        seeded, functools.partial(capture_checks.planted, name), 1
    )
    for name in capture_checks.PLANTED
}
