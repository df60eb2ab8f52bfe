"""Shared by all tests: hypothesis settings and the flag that rewrites golden files."""

from __future__ import annotations

import os

# several workers of pytest-xdist share the cores: one thread each, said before torch is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "offcompile",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# while working on a failure: shows it as found, at once
settings.register_profile(
    "quick", settings.get_profile("offcompile"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("OFFCOMPILE_HYPOTHESIS", "offcompile"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden from what the policies do now, then read the diff",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
