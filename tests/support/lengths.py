"""Which of many alike cases every run of the tests has; `make soak` has the others too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], *always: Any) -> list[Any]:
    """All cases as parameters, those marked `soak` that are not named."""
    every = list(cases)
    unknown = [case for case in always if case not in every]
    assert always and not unknown, f"{unknown} are none of {every}"
    return [
        case if case in always else pytest.param(case, marks=pytest.mark.soak) for case in every
    ]
