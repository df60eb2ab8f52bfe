"""The registry of policies. To add one, add a file to `passes/` and a line to `POLICIES`."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from offcompile.ir import InvalidInput, Violation

from .build.contract import Judge, Pass

#: policy name → `module:class`, imported on first use
POLICIES: Mapping[str, str] = types.MappingProxyType(
    {
        "joint": "joint:Joint",
        "weight_rotation": "weight_rotation:WeightRotation",
        "near_memory_update": "near_memory_update:NearMemoryUpdate",
        "hybrid_access": "hybrid_access:HybridAccess",
        "gradient_reserve": "gradient_reserve:GradientReserve",
        "activation_spill": "activation_spill:ActivationSpill",
        "recompute": "recompute:Recomputation",
        "turnover": "turnover:Turnover",
        "correlation_prefetch": "correlation_prefetch:CorrelationPrefetch",
    }
)

#: fields of policies that only callers set
HIDDEN = frozenset(
    {"judge", "progress", "hints", "floor_us", "kept_floor_us", "known_choices", "outlines"}
    | {"trial", "tried_us"}
)


def _bad(where: str, detail: str) -> InvalidInput:
    return InvalidInput([Violation("bad-value", where, detail)])


def _nearest(word: str, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else "."


def policy_class(name: str) -> type[Any]:
    place = POLICIES.get(name)
    if place is None:
        known = ", ".join(POLICIES)
        raise _bad("policy", f"unknown policy {name!r}{_nearest(name, POLICIES)} Known: {known}.")
    module, _, cls = place.partition(":")
    found: type[Any] = getattr(import_module(f".{module}", __package__), cls)
    return found


def options(cls: type[Any]) -> dict[str, Any]:
    """Returns the options that a user may set: name → type."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name not in HIDDEN}


def make(spec: str, judge: Judge | None = None, **given: Any) -> Pass:
    """Builds the pass that `NAME` or `NAME:key=value,…` names, with the judge if it takes one.

    `given` holds the caller's settings. Each applies if the pass has a field of that name and the
    spec does not set it.
    """
    name, _, rest = spec.partition(":")
    cls = policy_class(name)
    known = options(cls)
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, text = part.partition("=")
        if key not in known:
            has = f"It has: {', '.join(known)}." if known else "It has none."
            raise _bad("policy", f"{name} has no option {key!r}{_nearest(key, known)} {has}")
        if not equals:
            raise _bad("policy", f"option {key!r} of {name} needs a value: {key}=…")
        values[key] = _read(name, key, text, known[key])
    fields = {f.name for f in dataclasses.fields(cls)}
    for key, value in given.items():
        if key in fields:
            values.setdefault(key, value)
    if "judge" in fields:
        values["judge"] = judge
    try:
        made: Pass = cls(**values)
    except ValueError as error:
        raise _bad("policy", f"{name}: {error}") from error
    return made


def _read(policy: str, key: str, text: str, kind: Any) -> Any:
    choices = typing.get_args(kind) or (kind,)
    if type(None) in choices and text.lower() in ("none", "null"):
        return None
    lowered = text.lower()
    for choice in choices:
        if choice is bool and lowered in ("true", "false", "yes", "no", "1", "0"):
            return lowered in ("true", "yes", "1")
        if choice is str:
            return text
        if choice in (int, float):
            try:
                return choice(text)
            except ValueError:
                continue
    names = " or ".join(getattr(c, "__name__", str(c)) for c in choices)
    raise _bad("policy", f"option {key} of {policy} is {text!r}; it must be {names}")
