"""Reads what `--lora` and `lora=` ask for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from offcompile.ir import InvalidInput, Violation

KEYS = ("r", "alpha", "targets")
ALL = "all-linear"


@dataclass(frozen=True)
class LoraRequest:
    """Low-rank adapters. `targets`: names of linear layers, or the ends of their paths; empty: all
    linear layers but the output head."""

    r: int
    alpha: float
    targets: tuple[str, ...] = ()

    @classmethod
    def read(cls, given: str | Mapping[str, Any]) -> LoraRequest:
        """Read `r=16,alpha=32,targets=q_proj,v_proj`, or a mapping with these keys."""
        values = _pairs(given) if isinstance(given, str) else dict(given)
        for key in values:
            if key not in KEYS:
                raise bad_lora(f"{key!r} is no key; there are {', '.join(KEYS)}")
        if "r" not in values:
            raise bad_lora("there is no rank; give one, as in r=16")
        r = _rank(values["r"])
        return cls(r, _alpha(values.get("alpha", 2 * r)), _targets(values.get("targets", ALL)))

    @property
    def scale(self) -> float:
        return self.alpha / self.r


def bad_lora(detail: str) -> InvalidInput:
    return InvalidInput([Violation("bad-value", "lora", detail)])


def _pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    key = ""
    for part in text.split(","):
        name, is_pair, value = (p.strip() for p in part.partition("="))
        if is_pair and name in found:
            raise bad_lora(f"{name!r} is given twice; give it once")
        if is_pair:
            key, found[name] = name, value
        elif key == "targets":  # a list of names
            found[key] += f",{name}"
        else:
            raise bad_lora(f"{part!r} is no key=value; write r=16,alpha=32,targets=q_proj,v_proj")
    return found


def _rank(value: Any) -> int:
    try:
        rank = int(value) if isinstance(value, str) else value
    except ValueError:
        rank = None
    if type(rank) is not int or rank < 1:
        raise bad_lora(f"r={value} is no rank; give a whole number of 1 or more")
    return rank


def _alpha(value: Any) -> float:
    try:
        alpha = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        alpha = math.nan
    if not 0 < alpha < math.inf:
        raise bad_lora(f"alpha={value} is no factor; give a number above 0")
    return alpha


def _targets(value: str | Iterable[str]) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else list(value)
    if names == [ALL]:
        return ()
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise bad_lora(f"targets={value!r} has an empty name; give names of layers, or {ALL}")
    if ALL in names:
        raise bad_lora(f"{ALL} already has every layer; leave out the other targets")
    return tuple(dict.fromkeys(name.strip() for name in names))
