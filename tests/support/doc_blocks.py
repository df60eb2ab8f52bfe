"""Blocks of code and links in the documents, as they stand there."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: blocks of other packages' code, for cards or packages that are not here: shown, not run
FOREIGN = "py"
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`[^`\n]+`")
_COMMENT = re.compile(r"\s+#.*")


@dataclass(frozen=True)
class Block:
    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(path: Path) -> Iterator[Block]:
    whole = path.read_text()
    for found in _BLOCK.finditer(whole):
        line = whole.count("\n", 0, found.start()) + 1
        text = textwrap.dedent(found[3])
        yield Block(str(path.relative_to(ROOT)), line, found[2], text)


def all_blocks(language: str) -> list[Block]:
    return [b for path in DOCUMENTS for b in blocks(path) if b.language == language]


def commands(block: Block) -> Iterator[list[str]]:
    """Words of each command; a backslash carries a line on."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if words := shlex.split(_COMMENT.sub("", line)):
            yield words


def links(path: Path) -> Iterator[str]:
    text = _SPAN.sub("", _BLOCK.sub("", path.read_text()))
    yield from (found[1] for found in _LINK.finditer(text))


def anchors(path: Path) -> set[str]:
    """The anchors of all headings, as GitHub makes them."""
    text = _BLOCK.sub("", path.read_text())
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
