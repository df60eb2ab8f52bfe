"""Shared by all tests: hypothesis settings, a place on a disk, and the flag for golden files."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# several workers of pytest-xdist share the cores: one thread each, said before torch is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# measured figures of this machine are kept for one run of the suite, not taken from the user's
# cache, which another day has filled, nor left there; workers and children inherit the place
if "PYTEST_XDIST_WORKER" not in os.environ:
    _measurements = tempfile.TemporaryDirectory(prefix="offcompile-tests-")
    os.environ["OFFCOMPILE_CACHE_DIR"] = _measurements.name

import pytest
from freeze_imports import do_not_time_guards
from hypothesis import HealthCheck, Phase, settings

from offcompile.runtime.disk.directories import in_memory

# where the temporary directory lies in RAM, tests of files use another that does not
ON_DISK = Path("/var/tmp")
if in_memory(Path(tempfile.gettempdir())) and ON_DISK.is_dir() and not in_memory(ON_DISK):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(ON_DISK))

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Importing all tests makes no garbage worth collecting, and collecting takes a third of it."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Freeze all imported objects: they stay to the end, so no collection need look through them.

    Each compilation collects several times; without this, that is half of the suite's time.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:  # what every worker comes to import anyhow
        importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module("offcompile.run.backend")
    do_not_time_guards()
    if "torch" in sys.modules:
        # pytest listens to each logger that does not propagate: each compilation would write its
        # graphs and plans down, as for TORCH_TRACE
        trace = logging.getLogger("torch.__trace")
        trace.handlers.clear()
        trace.propagate = True
    gc.enable()
    gc.collect()
    gc.freeze()


#: so many more frozen objects, and what tests have frozen is looked through at the end of a file
MANY_OBJECTS = 1_000_000
_full_collections = _frozen = 0


def _collect_and_freeze() -> None:
    global _full_collections
    gc.collect()
    gc.freeze()
    _full_collections = gc.get_stats()[-1]["collections"]


def pytest_runtest_logfinish() -> None:
    """Nor through what a test leaves: modules that it brought in, what torch and caches keep.

    Only after tests in which the collector went through everything; others have no use for it.
    """
    if gc.get_stats()[-1]["collections"] != _full_collections:
        _collect_and_freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A file of tests leaves nothing compiled; cycles that were frozen go now and then."""
    global _frozen
    if nextitem is not None and nextitem.path == item.path:
        return
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    if "offcompile.report.report" in sys.modules:
        sys.modules["offcompile.report.report"]._remembered.clear()
    if gc.get_freeze_count() > _frozen + MANY_OBJECTS:
        gc.unfreeze()
        _collect_and_freeze()
        _frozen = gc.get_freeze_count()


@pytest.fixture(autouse=True)
def books_of_its_own() -> Iterator[None]:
    """Clear the accounts after each test, so that its models do not count in another's budget."""
    yield
    accounts = sys.modules.get("offcompile.run.accounts.process")
    if accounts is not None:
        accounts.process.usages.clear()


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are not judged by how fast this machine happens to be; tests of that make times up."""
    if "torch" in sys.modules:
        trial = importlib.import_module("offcompile.run.trial")
        monkeypatch.setattr(trial, "STEPS_BEFORE", sys.maxsize)
        monkeypatch.setattr(trial.Trial, "awaited", lambda on_trial, report: False)


@pytest.fixture
def on_a_disk(tmp_path: Path) -> None:
    """For tests of files that pass the page cache by: a file system in RAM has none to pass."""
    if in_memory(tmp_path):
        pytest.skip("no temporary directory lies on a disk: name one with --basetemp")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled before the test, and no runtime is open after it."""
    import torch

    from offcompile.runtime.moves.registry import close_all

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    close_all()
