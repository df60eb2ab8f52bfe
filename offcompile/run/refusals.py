"""Refusals that were raised, and letting go of the models that their tracebacks hold.

A notebook keeps the last error, and with it the frames that it passed through. Among them is the
call of the model that was refused, which would take its room from the next one that is tried.
"""

from __future__ import annotations

import copy
import traceback
import weakref

from offcompile.ir import OffloadError

_raised: weakref.WeakSet[OffloadError] = weakref.WeakSet()


def raised(error: OffloadError) -> OffloadError:
    """A copy of the error to raise. Dynamo keeps the original for as long as the model's code
    lives, so no traceback may come to hang on it."""
    one = copy.copy(error)
    _raised.add(one)
    return one


def let_go() -> None:
    """Shorten the tracebacks of refusals that somebody still holds to where they begin. Clearing
    the frames below would not do: a frame keeps its function, which may be bound to the model."""
    for error in tuple(_raised):
        where = error.__traceback__
        traceback.clear_frames(where)
        if where is not None:
            where.tb_next = None
