"""Interrupts the code of offcompile at a drawn point, as Ctrl-C does, without a signal.

Python calls the handlers of signals after calls, at jumps back, and where a function begins, but
nowhere else: not between taking a lock and the block that gives it back. The points are those.
"""

from __future__ import annotations

import dis
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

from house import ROOT

ROOMS = tuple(f"{ROOT / room}/" for room in ("offcompile", "passes", "runtime"))
#: instructions after which Python looks for signals
LOOKS = frozenset(
    dis.opmap[name]
    for name in ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "RESUME", "CALL_KW")
    if name in dis.opmap
)


class Interrupted:
    """Counts the points that this thread passes in our code, and calls the handler of SIGINT at
    number `at` (None: at none). `where`: the place at which that was."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0
        self.where: str | None = None
        self._ours: dict[str, bool] = {}

    def __enter__(self) -> Interrupted:
        sys.settrace(self._called)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, told: object) -> Any:
        name = frame.f_code.co_filename
        ours = self._ours.get(name)
        if ours is None:
            ours = self._ours[name] = name.startswith(ROOMS)
        if not ours:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        code, before = frame.f_code.co_code, [0]

        def trace(frame: FrameType, event: str, told: object) -> Any:
            if event == "opcode":
                is_point, before[0] = before[0] in LOOKS, code[frame.f_lasti]
                if is_point:
                    self._pass(frame)
            return trace

        return trace

    def _pass(self, frame: FrameType) -> None:
        self.count += 1
        if self.at is not None and self.count >= self.at and self.where is None:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            handler: Any = signal.getsignal(signal.SIGINT)
            handler(signal.SIGINT, frame)
