"""Interrupts the code of offcompile at a drawn point, as Ctrl-C does, without a signal.

Python calls the handlers of signals after calls, at jumps back, and where a function begins, but
nowhere else: not between taking a lock and the block that gives it back. The points are those.

An interrupt of Python's belongs to the call itself, one of ours to the instruction behind it. Where
the two have different handlers, as at the end of `with lock: return f()`, there is no point: the
lock would stay taken, which Python's interrupt cannot do.
"""

from __future__ import annotations

import dis
import signal
import sys
from types import CodeType, FrameType, TracebackType
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
        self._handled: dict[CodeType, dict[int, int]] = {}

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
        code, before, handlers = frame.f_code.co_code, [0], self._handlers(frame.f_code)

        def trace(frame: FrameType, event: str, told: object) -> Any:
            if event == "opcode":
                last, before[0] = before[0], frame.f_lasti
                alike = handlers.get(last) == handlers.get(frame.f_lasti)
                if code[last] in LOOKS and alike:
                    self._pass(frame)
            return trace

        return trace

    def _handlers(self, code: CodeType) -> dict[int, int]:
        """The handler of exceptions at each instruction that has one."""
        if code not in self._handled:
            table = getattr(dis, "_parse_exception_table", lambda code: ())(code)
            self._handled[code] = {
                at: entry.target for entry in table for at in range(entry.start, entry.end, 2)
            }
        return self._handled[code]

    def _pass(self, frame: FrameType) -> None:
        self.count += 1
        if self.at is not None and self.count >= self.at and self.where is None:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            handler: Any = signal.getsignal(signal.SIGINT)
            handler(signal.SIGINT, frame)
