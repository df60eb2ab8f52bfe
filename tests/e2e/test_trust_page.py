"""docs/trust.md says what the last long runs counted, and nothing else."""

from __future__ import annotations

from trust import rows
from trust.__main__ import PARTS


def test_the_page_is_made_from_what_is_kept() -> None:
    kept = rows.kept()
    assert set(kept) <= set(PARTS)
    assert rows.page_with(kept) == rows.PAGE.read_text()


def test_every_case_held_or_is_named() -> None:
    assert [row.what for part in rows.kept().values() for row in part if not row.holds] == []


def test_what_broke_is_marked_and_what_may_is_named() -> None:
    text = rows.table([rows.Row("a", 2, 3, ("third: refused",)), rows.Row("b", 1, 2)])
    assert "| a | 2 | 3 |" in text and "- refused: third" in text
    assert "| b **broken** | 1 | 2 |" in text


def test_cases_and_rows_with_one_reason_share_a_line() -> None:
    cases = ("x: fails alike (in 1)", "y: fails alike (in 2)")
    text = rows.table([rows.Row("a", 0, 2, cases), rows.Row("b", 3, 5, cases)])
    assert text.endswith("Not counted as held, a; b:\n\n- fails alike: x, y")
