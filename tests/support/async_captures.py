"""The checks of captured steps, on the asynchronous device under delays."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import ExitStack

import capture_checks
from async_device import Controls
from async_own_checks import DELAYS_US, DEVICE
from async_planted import stream_of

SEEDS = {"gpt": 1, "encoder": 2, "accumulation": 3}
#: the device replays what a lane was given on a stream of this number beyond the lane's own
BRANCHES = 64


def seeded(check: Callable[[str], None], seed: int, controls: Controls) -> None:
    controls.seed(seed)
    try:
        check(DEVICE)
    finally:
        controls.seed(0)


def planted(name: str, controls: Controls) -> None:
    """It shows where lanes are slow enough, on a machine that may itself be slow."""
    lanes = [BRANCHES + stream_of(lane).stream_id for lane in ("d2h", "h2d")]
    for delay_us in DELAYS_US:
        with ExitStack() as stack:
            for number in lanes:
                branch = types.SimpleNamespace(stream_id=number)
                stack.enter_context(controls.slow(branch, delay_us))  # type: ignore[arg-type]
            if capture_checks.shows(name, DEVICE):
                return
    raise AssertionError(f"nothing shows that {name} are missing")


CHECKS = {
    f"captured {name}": functools.partial(seeded, check, SEEDS.get(name, 0))
    for name, check in capture_checks.CHECKS.items()
}
PLANTED = {
    f"captures without {name}": functools.partial(planted, name) for name in capture_checks.PLANTED
}
