"""Reports as a notebook shows them: a table without scripts, in the notebook's own colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from offcompile.ir.units import size

_CELL = "text-align:left;vertical-align:top;padding:1px 12px 1px 0;border:none"
# Jupyter shows <pre> in the font of the text, which has no columns
_COLUMNS = "overflow-x:auto;font-family:var(--jp-code-font-family,monospace)"
_BAR = (
    "display:inline-block;width:240px;height:8px;border:1px solid currentColor;border-radius:4px;"
    "overflow:hidden;vertical-align:middle"
)


def as_html(
    title: str,
    facts: Iterable[tuple[str, str]],
    more: Sequence[str] = (),
    used: tuple[int, int] | None = None,
) -> str:
    """A title, named facts, and lines of text in columns. used: bytes, and bytes of the budget."""
    found = [f"<div><b>{escape(title)}</b>"]
    if used is not None and used[1] > 0:
        part = min(100.0, 100.0 * used[0] / used[1])
        filled = f"display:block;height:100%;width:{part:.1f}%;background:currentColor"
        said = f"{escape(size(used[0]))} of {escape(size(used[1]))}"
        found.append(
            f'<div><span style="{_BAR}"><span style="{filled}"></span></span> {said}</div>'
        )
    rows = (
        f'<tr style="background:none"><td style="{_CELL}">{escape(name)}</td>'
        f'<td style="{_CELL}">{escape(value)}</td></tr>'
        for name, value in facts
    )
    found.append(f"<table>{''.join(rows)}</table>")
    if more:
        found.append(f'<pre style="{_COLUMNS}">{escape(chr(10).join(more))}</pre>')
    return "".join(found) + "</div>"
