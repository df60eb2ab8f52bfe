"""Every semantic, with activations and with weights that do not fit, at two budgets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import test_semantics
import torch
from semantics_runs import CASES
from semantics_table import SEMANTICS

from .rows import Row


def rows(scale: float, seed: int) -> list[Row]:
    """Below full scale, two of the four cases. Nothing here is drawn: `seed` changes nothing."""
    cases = CASES if scale >= 1 else CASES[::3]
    held, failed, of = 0, [], 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, test, more in _tests():
        for case in cases:
            of += 1
            try:
                test(case, **more)
                held += 1
            except Exception as error:
                failed.append(f"{name}[{case}, {more}]: {str(error)[:300]}")
            torch._dynamo.reset()
    torch.set_num_threads(threads)
    if failed:
        print("\n".join(failed))
    figures = (
        ("semantics", str(len(SEMANTICS))),
        ("cases of each", str(len(cases))),
    )
    return [Row("semantics, bit for bit the plain run", held, of, figures=figures)]


def _tests() -> Iterator[tuple[str, Any, dict[str, object]]]:
    """Those of `test_semantics`, once for each of their own parameters."""
    for tests in SEMANTICS.values():
        for name in (t.partition(".")[2] for t in tests if t.startswith("test_semantics.")):
            test = getattr(test_semantics, name)
            own = [m.args for m in test.pytestmark if m.args[0] != "case"]
            keys = [key for key, _ in own]
            for values in itertools.product(*(values for _, values in own)):
                yield name, test, dict(zip(keys, values, strict=True))
