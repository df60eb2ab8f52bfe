"""How peaks are judged; `make soak` measures them (tests/trust/peaks.py)."""

from __future__ import annotations

from typing import Any

import pytest
from trust import peaks
from trust.peaks_child import CASES, Case, kept_bytes

MIB = 1 << 20


def found(**other: Any) -> dict[str, Any]:
    of = {"plain_bytes": 160 * MIB, "budget_bytes": 80 * MIB, "peak_bytes": 90 * MIB}
    return of | {"first_bytes": 120 * MIB, "equal": True, "bytes_out": 7} | other


def test_a_step_within_the_budget_and_the_overhead_counts() -> None:
    row = peaks.row_of({"one": found(), "other": found(peak_bytes=79 * MIB)})
    assert (row.done, row.of, row.exceptions) == (2, 2, ())
    assert ("beyond the budget in a step", "-1.0 MiB to +10.0 MiB") in row.figures


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"peak_bytes": 105 * MIB}, "25.0 MiB beyond"),
        ({"equal": False}, "losses"),
        ({"plain_bytes": 100 * MIB}, "the plain run keeps within"),
    ],
)
def test_what_does_not_count_is_told(other: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        peaks.row_of({"one": found(**other)})


def test_there_are_enough_models_and_rows_are_chosen_by_what_they_keep() -> None:
    assert len(CASES) >= 20
    case: Case = CASES["mlp of many layers"]
    few, many = (kept_bytes(case.made(), case.inputs(rows)) for rows in (4, 8))
    assert 0 < few < many <= 2 * few
