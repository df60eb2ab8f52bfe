"""Signals that are put off: raised at a check, in a wait, or at the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from offcompile.runtime.base import interrupts, watchdog
from offcompile.runtime.base.interrupts import check, deferred, uninterrupted


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_is_raised_once_the_function_has_ended() -> None:
    done = []

    @uninterrupted
    def work() -> None:
        press()
        done.append(deferred())

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True] and not deferred()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        press()


def test_it_is_raised_at_a_check_of_the_innermost() -> None:
    done = []

    @uninterrupted
    def inner() -> None:
        press()
        done.append("before")
        check()
        done.append("after")

    @uninterrupted
    def outer() -> None:
        try:
            inner()
        finally:
            done.append("left")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["before", "left"]


def test_a_wait_ends_by_it_with_the_lock_held() -> None:
    lock = threading.Lock()
    changed = threading.Condition(lock)

    @uninterrupted
    def wait() -> None:
        press()
        with lock:
            watchdog.until(changed, lambda: False, lambda: "what never comes")

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert not lock.locked()
    main = threading.main_thread().ident
    assert main is not None
    later = threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), lock:  # one that is not put off elsewhere
        later.start()
        watchdog.until(changed, lambda: False, lambda: "what never comes")
    assert not lock.locked()
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: (press(), watchdog.until_set(threading.Event(), lambda: "")))()


def test_an_error_goes_before_it() -> None:
    @uninterrupted
    def fail() -> None:
        press()
        raise ValueError("planted")

    with pytest.raises(KeyboardInterrupt) as told:
        fail()
    assert isinstance(told.value.__context__, ValueError)


def test_a_handler_of_the_users_is_called_and_stays() -> None:
    called: list[int] = []

    def mine(number: int, frame: object) -> None:
        called.append(number)

    signal.signal(signal.SIGINT, mine)
    assert uninterrupted(lambda: (press(), list(called)))() == (None, [])
    assert called == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is mine
    # one that is set meanwhile is not taken away
    other = signal.default_int_handler
    uninterrupted(lambda: signal.signal(signal.SIGINT, other))()
    assert signal.getsignal(signal.SIGINT) is other


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=uninterrupted(lambda: found.append(deferred())))
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uninterrupted(lambda: (press(), found.append(deferred())))()
    assert found == [False, False] and not interrupts._deferral.active
