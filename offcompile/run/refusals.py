"""Tracks raised refusals, and releases the models that their tracebacks keep alive.

A notebook keeps the last error, and with it the frames that it passed through. One of them is the
call of the refused model, whose memory would then be missing for the next model.
"""

from __future__ import annotations

import copy
import traceback
import weakref

from offcompile.ir import OffloadError

# per process: a refusal outlives the graph that it was raised for
_raised: weakref.WeakSet[OffloadError] = weakref.WeakSet()


def raised(error: OffloadError) -> OffloadError:
    """Return a copy of the error to raise. Dynamo keeps the original as long as the model's code
    lives, so the original must not get a traceback."""
    one = copy.copy(error)
    _raised.add(one)
    return one


def let_go() -> None:
    """Cut the tracebacks of refusals that are still alive down to their first frame. Clearing the
    frames is not enough: a frame keeps its function, which may be bound to the model."""
    for error in tuple(_raised):
        where = error.__traceback__
        traceback.clear_frames(where)
        if where is not None:
            where.tb_next = None
