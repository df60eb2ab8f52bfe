"""Every message in docs/troubleshooting.md is what the code says: each heading has a producer."""

from __future__ import annotations

import re
from pathlib import Path

import doc_messages_asked  # noqa: F401
import doc_messages_disks  # noqa: F401
import doc_messages_run  # noqa: F401
import pytest
from doc_messages import PRODUCERS

DOCUMENT = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
HEADINGS = re.findall(r"^### `(.+)`$", DOCUMENT.read_text(), re.M)


def test_each_heading_has_a_producer_and_each_producer_a_heading() -> None:
    assert len(HEADINGS) == len(set(HEADINGS)) > 40
    assert set(HEADINGS) == set(PRODUCERS)


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_message_is_what_is_said(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = PRODUCERS[heading](tmp_path, monkeypatch).replace("`memory`", "memory")
    pattern = ".+?".join(map(re.escape, heading.split("…")))
    assert re.search(pattern, said, re.S), said
