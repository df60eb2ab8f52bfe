"""Checks the value of each option, from code or from a variable, and puts refusals in words."""

from __future__ import annotations

import math
import numbers
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from offcompile.ir import InvalidInput, Violation
from offcompile.passes.registry import make

from .hardware import load_profile, parse_bytes

LOSSY = ("fp16", "bf16")
LOWERINGS = ("inductor", "aot_eager")
MINIMUM: Literal["minimum"] = "minimum"

_MEMORY_FORMS = (
    "bytes, text as in '8GiB', a share of the device as in 0.5 or '50%', 'minimum' or None"
)
_HOST_FORMS = "bytes, text as in '64GiB', or None"
_SPILL_FORMS = "a directory or a list of directories"


def default_spill() -> tuple[Path, ...]:
    """The system's temporary directory."""
    try:
        return (Path(tempfile.gettempdir()).absolute(),)
    except OSError as error:
        detail = f"there is no temporary directory to spill to ({error}); name one"
        raise refusal("spill", detail) from error


def _memory(value: object, where: str) -> int | float | str | None:
    if isinstance(value, str):
        text = value.strip()
        if text.lower() == MINIMUM:
            return MINIMUM
        fraction = _fraction(text)
        return _size(value, where, _MEMORY_FORMS) if fraction is None else _share(fraction, value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return _share(float(value), value)
    return None if value is None else _size(value, where, _MEMORY_FORMS)


def _fraction(text: str) -> float | None:
    """`0.5` and `50%` as a number; None for text with another unit or without a point, which is a
    size."""
    number = text.removesuffix("%").rstrip()
    if not number.removeprefix("-").replace(".", "", 1).isdecimal():
        return None
    if text.endswith("%"):
        return float(number) / 100
    return float(number) if "." in text else None


def _share(fraction: float, shown: object) -> float:
    if not 0 < fraction <= 1:
        raise refusal(
            "memory",
            f"{quoted(shown)} is no share of the device; a share is more than 0 and "
            f"at most 1, and a size is whole bytes or has a unit ({_MEMORY_FORMS})",
        )
    return fraction


def _host_memory(value: object, where: str) -> int | None:
    return None if value is None else _size(value, where, _HOST_FORMS)


def _size(value: object, where: str, forms: str) -> int:
    if isinstance(value, str):
        try:
            nbytes = parse_bytes(value)
        except InvalidInput as error:
            detail = f"{error.violations[0].detail} (allowed: {forms})"
            raise refusal(where, detail) from None
    elif isinstance(value, numbers.Integral) and not isinstance(value, bool):
        nbytes = int(value)
    else:
        raise refusal(where, f"{quoted(value)} is not a size; allowed: {forms}")
    if nbytes <= 0:
        raise refusal(where, f"{quoted(value)} is not more than 0; allowed: {forms}")
    return nbytes


def _spill(value: object, where: str) -> tuple[Path, ...]:
    if value is None:
        return default_spill()
    single = isinstance(value, str | os.PathLike)
    if not single and not isinstance(value, Sequence):
        raise refusal(where, f"{quoted(value)} is not {_SPILL_FORMS}")
    listed: list[object] = [value] if single else list(value)  # type: ignore[call-overload]
    if not listed:
        raise refusal(where, f"the list is empty; name {_SPILL_FORMS}, or leave it out")
    paths = tuple(_path(v, where, _SPILL_FORMS) for v in listed)
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise refusal(where, f"{str(path)!r} is named twice; name it once")
    return paths


def _path(value: object, where: str, forms: str) -> Path:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise refusal(where, f"{quoted(value)} is not {forms}")
    try:
        # absolute: the process may be elsewhere when the backward is compiled
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise refusal(where, f"{text!r}: {error}") from None


def _dump(value: object, where: str) -> Path | None:
    return None if value is None else _path(value, where, "a directory or None")


def _one_of(allowed: tuple[str, ...], none: bool) -> Callable[[object, str], str | None]:
    def read(value: object, where: str) -> str | None:
        if (none and value is None) or (isinstance(value, str) and value in allowed):
            return value
        names = " or ".join([*(repr(name) for name in allowed), *(["None"] if none else [])])
        hint = nearest_to(value.lower(), allowed) if isinstance(value, str) else ""
        raise refusal(where, f"{quoted(value)} is not allowed{hint} (it is {names})")

    return read


def _policy(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise refusal(where, f"{quoted(value)} is not a policy; write 'NAME' or 'NAME:key=value,…'")
    make(value.strip())
    return value.strip()


def _hardware(value: object, where: str) -> str | None:
    if value is None:
        return None
    path = _path(value, where, "the name of a profile, a profile file or None")
    is_file = not isinstance(value, str) or "/" in value or value.endswith(".toml")
    named = str(path) if is_file else str(value).strip()
    load_profile(named)
    return named


def _seconds(value: object, where: str) -> float | None:
    if value is None:
        return None
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    seconds = float(value) if number else math.nan  # type: ignore[arg-type]
    if not math.isfinite(seconds) or seconds <= 0:
        raise refusal(where, f"{quoted(value)} is no planning time; write seconds above 0, or None")
    return seconds


def _gradient_reserve(value: object, where: str) -> float | None:
    if value is None:
        return None
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    share = float(value) if number else math.nan  # type: ignore[arg-type]
    if not 0 <= share <= 1:
        raise refusal(
            where,
            f"{quoted(value)} is no share of the gradients; write a number from 0 to 1, or None",
        )
    return share


def _switch(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        detail = f"{quoted(value)} is neither True nor False; write one of them"
        raise refusal(where, f"{detail} (as a variable: 1 or 0)")
    return value


def _split(value: object, where: str) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral) and int(value) > 1:
        return int(value)
    detail = "write True, False, None, or a number of pieces from 2 on"
    raise refusal(where, f"{quoted(value)} does not say how to split; {detail}")


#: option → its check; takes a value and where it was given, raises `InvalidInput`
READERS: Mapping[str, Callable[[object, str], object]] = {
    "memory": _memory,
    "host_memory": _host_memory,
    "spill": _spill,
    "lossy": _one_of(LOSSY, none=True),
    "lowering": _one_of(LOWERINGS, none=False),
    "policy": _policy,
    "hardware": _hardware,
    "dump": _dump,
    "seconds": _seconds,
    "gradient_reserve": _gradient_reserve,
    "verify_spill": _switch,
    "verify": _switch,
    "split": _split,
    "reuse_plans": _switch,
    "cudagraphs": _switch,
}


# --- messages ------------------------------------------------------------------------------


def bad_value(where: str, detail: str) -> Violation:
    return Violation("bad-value", where, detail)


def refusal(where: str, detail: str) -> InvalidInput:
    return InvalidInput([bad_value(where, detail)])


def quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def nearest_to(word: str, known: Mapping[str, object] | Sequence[str]) -> str:
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
