"""Optional figures, measured by the doctor and cached beside those that planning needs.

A document stores the figures of each step. Steps that failed are not stored and are tried again;
steps measured by a quick run are measured again by a full one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from offcompile.ir import OffloadError

from .cost_cache import Identity, positive_number, read_document, write_document

#: name of a step → the call that measures it
Steps = Mapping[str, Callable[[], Mapping[str, float]]]


@dataclass(frozen=True)
class More:
    figures: Mapping[str, float] = field(default_factory=dict)
    #: step → the reason why it could not be measured
    failed: Mapping[str, str] = field(default_factory=dict)


def kept_more(kind: str, identity: Identity) -> Mapping[str, float]:
    """All figures stored for this identity; there may be none."""
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
    """Runs the steps that are not stored (with `refresh`, all), and stores their results.

    quick: the steps are short ones, and stored results of short steps are good enough.
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
            # continue with the other figures; the report says why this one is missing
            failed[step] = str(error).strip().split("\n")[0] or type(error).__name__
        else:
            hurried = hurried or quick
            write_document(kind, identity, {"steps": kept, "quick": hurried})
    found = {n: v for step in steps for n, v in kept.get(step, {}).items()}
    return More(found, failed)


def _steps(content: Mapping[str, object] | None) -> dict[str, dict[str, float]]:
    """The steps whose figures are all valid."""
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
