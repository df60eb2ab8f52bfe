"""Answers of `fit` that are computed in processes beside this one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import nn

from offcompile.ahead.fit import fit
from offcompile.ahead.others import processes
from offcompile.ahead.others.processes import Beside, may_start, only_here


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def elsewhere(there: Callable[[], object], here: object) -> Callable[[], object]:
    """Work that another process does differently from this one."""
    mine = os.getpid()
    return lambda: here if os.getpid() == mine else there()


def test_without_leave_all_is_computed_here_and_late() -> None:
    asked: list[int] = []
    answer = Beside(lambda: asked.append(os.getpid()) or len(asked), begins=False)
    assert asked == []
    assert answer.result() == answer.result() == 1
    assert asked == [os.getpid()]


def test_one_core_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not may_start()
    assert Beside(os.getpid, begins=True).result() == os.getpid()


@pytest.mark.usefixtures("two_cores")
def test_another_process_answers() -> None:
    answers = [Beside(os.getpid, True), Beside(os.getpid, True)]
    assert len({os.getpid(), *(answer.result() for answer in answers)}) == 3
    assert Beside(os.getpid, begins=False).result() == os.getpid()


@pytest.mark.usefixtures("two_cores")
def test_large_answers_arrive_whole() -> None:
    assert Beside(lambda: bytes(5 << 20), True).result() == bytes(5 << 20)


def _fails() -> object:
    raise RuntimeError("there")


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    "there", [_fails, lambda: os._exit(0), lambda: lambda: None], ids=["raises", "ends", "lambda"]
)
def test_without_an_answer_it_is_computed_here(there: Callable[[], object]) -> None:
    assert Beside(elsewhere(there, "here"), True).result() == "here"


@pytest.mark.usefixtures("two_cores")
def test_a_process_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STILL_SECONDS", 1)
    assert Beside(elsewhere(signal.pause, "here"), True).result() == "here"


@pytest.mark.usefixtures("two_cores")
def test_a_process_that_waits_for_one_that_works_does_not_stand_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = count()
    monkeypatch.setattr(processes, "STILL_SECONDS", 1)
    working = Beside(elsewhere(signal.pause, None), True)
    (works,) = working._pids

    def answers_late() -> int:
        time.sleep(2.5)
        return os.getpid()

    waiting = Beside(answers_late, True, after=working)
    monkeypatch.setattr(
        processes, "_processor_time", lambda pid: next(looks) if pid == works else 0
    )
    assert waiting.result() != os.getpid()


@pytest.mark.usefixtures("two_cores")
def test_errors_are_those_of_this_process() -> None:
    with pytest.raises(RuntimeError, match="there"):
        Beside(_fails, True).result()


@pytest.mark.usefixtures("two_cores")
def test_processes_end_with_their_answers() -> None:
    answer = Beside(elsewhere(signal.pause, None), True)
    assert answer._process is not None
    pid = answer._process[0]
    os.kill(pid, 0)  # it is there
    del answer
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("two_cores")
def test_only_this_process_tells() -> None:
    told: list[str] = []
    tell = only_here(told.append)

    def work() -> int:
        tell("there")
        return len(told)

    assert Beside(work, True).result() == 0
    tell("here")
    assert told == ["here"]


def test_fit_answers_alike_with_processes_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    plain = processes._started

    def counted(work: Callable[[], object]) -> tuple[int, int]:
        started.append(work)
        return plain(work)

    monkeypatch.setattr(processes, "_started", counted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with torch.device("meta"):
        model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.ReLU())))

    def answer(forks: bool) -> object:
        found = fit(
            model,
            lambda batch: torch.zeros(batch, 64, device="meta"),
            16384,
            memory="12MiB",
            hardware="rtx4090",
            loss=torch.sum,
            options={"lowering": "aot_eager", "seconds": 0.1, "reuse_plans": False},
            forks=forks,
        )
        return json.loads(json.dumps(found.to_json()))

    alone = answer(forks=False)
    assert not started
    assert answer(forks=True) == alone
    assert len(started) >= 2  # the other batch, and the largest
