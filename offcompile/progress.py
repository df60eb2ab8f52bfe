"""One line on the terminal for work that takes long; silent where nobody looks."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.status import Status

#: work shorter than this is not spoken of
SILENT_SECONDS = 1.0


class Progress:
    """`with Progress(name) as say: say("measuring 3 of 20")` shows a spinner after a while."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began = time.monotonic()
        self.shown = sys.stderr.isatty()
        self.status: Status | None = None

    def __enter__(self) -> Progress:
        return self

    def __call__(self, text: str) -> None:
        if not self.shown or time.monotonic() - self.began < SILENT_SECONDS:
            return
        said = f"offcompile {self.name}: {text}"
        if self.status is None:
            self.status = Console(stderr=True).status(said)
            self.status.start()
        self.status.update(said)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.status is not None:
            self.status.stop()
            self.status = None
