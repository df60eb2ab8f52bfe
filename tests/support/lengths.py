"""Which of many alike cases every run of the tests has; `make soak` has the others too."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

_NONE = SimpleNamespace(params={})


def asked_of(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Values of a parameter in the tests of a module that run, for a fixture of the module."""
    return [
        item.callspec.params[parameter]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and parameter in getattr(item, "callspec", _NONE).params
    ]


def some(cases: Iterable[Any], *always: Any) -> list[Any]:
    """All cases as parameters, those marked `soak` that are not named."""
    every = list(cases)
    unknown = [case for case in always if case not in every]
    assert always and not unknown, f"{unknown} are none of {every}"
    return [
        case if case in always else pytest.param(case, marks=pytest.mark.soak) for case in every
    ]
