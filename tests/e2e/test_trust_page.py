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
    assert "| a | 2 | 3 |" in text and "- third: refused" in text
    assert "| b **broken** | 1 | 2 |" in text
