"""A pytest plugin that prints a failure when it happens: a run that is ended early has told it."""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)
