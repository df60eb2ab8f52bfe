"""Runs checks on the asynchronous device: `python async_child.py NAME…`.

One line of JSON for each, [name, null or what went wrong, seconds], in the order asked for.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings

import async_checks
import async_own_checks
import async_planted
import async_seeds
import async_states
import budget_child
import capture_checks
import capture_weights
import gpu_checks
from async_device.as_card import other_torch
from gpu_checks import Skipped


def main() -> None:
    warnings.simplefilter("error", RuntimeWarning)
    other = other_torch()
    for module in (
        *(async_checks, async_own_checks, async_planted, async_seeds, async_states),
        *(budget_child, capture_checks, capture_weights, gpu_checks),
    ):
        module.torch = other  # type: ignore[attr-defined]
    gpu_checks.SEARCH_SECONDS = 0.3
    for name in sys.argv[1:]:
        began, said = time.perf_counter(), None
        try:
            async_checks.CHECKS[name](other.cuda.controls)
        except Skipped as reason:
            said = f"skipped: {reason}"
        except Exception:
            said = traceback.format_exc()
        print(json.dumps([name, said, round(time.perf_counter() - began, 1)]), flush=True)


if __name__ == "__main__":
    main()
