"""What threads leave behind that could not be started, or that ended by themselves."""

from __future__ import annotations

from offcompile.ir import OffloadError


def no_thread(name: str, error: BaseException) -> OffloadError:
    return OffloadError(
        f"the thread {name} cannot be started ({error}): raise what bounds this process "
        "(ulimit -u, ulimit -d, ulimit -s)"
    )


def died(name: str, error: BaseException) -> OffloadError:
    """What a thread that ended by itself leaves to who waits for its work."""
    # not as its cause: those who tell of failures tell of the cause alone
    return OffloadError(
        f"the thread {name} died of {type(error).__name__} ({error}); another takes its place for "
        "what comes. Unless the process was out of memory this is a defect: please report it"
    )


def bare(error: BaseException) -> BaseException:
    """The error without its frames: they would keep tensors alive."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error
