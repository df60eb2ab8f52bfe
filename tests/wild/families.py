"""All families of programs. Importing one adds its programs to the list."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from .program import PROGRAMS, Program

FAMILIES = (
    "loops",
    "generative",
    "representations",
    "sequences",
    "parameters",
    "compiling",
    "decisions",
    "libraries",
    "timm_models",
)


def load(families: tuple[str, ...] = FAMILIES) -> Mapping[str, Program]:
    for name in families:
        importlib.import_module(f".{name}", __package__)
    return PROGRAMS
