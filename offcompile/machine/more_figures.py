"""Figures that planning can do without, kept beside those it needs: what the doctor measured.

A document keeps each step's figures. Steps that failed are not kept: they are tried again, and so
are those that were measured in a hurry, when there is time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from offcompile.ir import OffloadError

from .cost_cache import Identity, positive_number, read_document, write_document

#: what is measured → the call that does it
Steps = Mapping[str, Callable[[], Mapping[str, float]]]


@dataclass(frozen=True)
class More:
    figures: Mapping[str, float] = field(default_factory=dict)
    #: step → why it could not be measured
    failed: Mapping[str, str] = field(default_factory=dict)


def kept_more(kind: str, identity: Identity) -> Mapping[str, float]:
    """All figures that were kept for this identity; none may be."""
    return {
        name: number
        for figures in _steps(read_document(kind, identity)).values()
        for name, number in figures.items()
    }


def measure_more(
    kind: str,
    identity: Identity,
    steps: Steps,
    quick: bool = False,
    refresh: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> More:
    """Run the steps that are not kept (with `refresh`, all), and keep what they find.

    quick: the steps are short ones, and what short ones found before is good enough.
    """
    content = read_document(kind, identity)
    kept = _steps(content)
    hurried = bool(content and content.get("quick"))
    if refresh or (hurried and not quick):
        kept, hurried = {}, False
    failed: dict[str, str] = {}
    for step, measure in steps.items():
        if step in kept:
            continue
        tell(f"measuring {step}")
        try:
            kept[step] = dict(measure())
        except (OffloadError, RuntimeError, OSError, MemoryError, ValueError) as error:
            # one figure less: the others still tell, and the report says why
            failed[step] = str(error).strip().split("\n")[0] or type(error).__name__
        else:
            hurried = hurried or quick
            write_document(kind, identity, {"steps": kept, "quick": hurried})
    found = {n: v for step in steps for n, v in kept.get(step, {}).items()}
    return More(found, failed)


def _steps(content: Mapping[str, object] | None) -> dict[str, dict[str, float]]:
    """Those of which every figure makes sense."""
    told = (content or {}).get("steps")
    found: dict[str, dict[str, float]] = {}
    for step, figures in (told if isinstance(told, dict) else {}).items():
        if not isinstance(figures, dict):
            continue
        numbers = {name: positive_number(value) for name, value in figures.items()}
        sound = {name: number for name, number in numbers.items() if number is not None}
        if len(sound) == len(numbers):
            found[step] = sound
    return found
