"""A hardware profile as TOML: the text that `load_measured` reads back as the same profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from offcompile.ir import InvalidInput, Violation

from .hardware import HardwareProfile


def profile_to_toml(profile: HardwareProfile) -> str:
    """Every known figure; tables come last, as TOML requires."""
    lines, tables = [], []
    for field in fields(profile):
        value = getattr(profile, field.name)
        if isinstance(value, Mapping):
            if value:
                rows = [f"{key} = {_value(rate)}" for key, rate in value.items()]
                tables += ["", f"[{field.name}]", *rows]
        elif value is not None:
            lines.append(f"{field.name} = {_value(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Writes the profile; raises `InvalidInput` that names the file if that fails."""
    try:
        path.write_text(profile_to_toml(profile), "utf-8")
    except OSError as error:
        detail = f"the profile cannot be written: {error.strerror}"
        raise InvalidInput([Violation("bad-value", str(path), detail)]) from None


def _value(value: str | bool | int | float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    # a path may hold bytes that are not valid text
    plain = value.encode("utf-8", "backslashreplace").decode("utf-8")
    # TOML reads JSON's escapes alike; the only character that TOML forbids and JSON keeps is DEL
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")
