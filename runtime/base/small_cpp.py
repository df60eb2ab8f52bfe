"""Compiles small pieces of C++ at first use with Inductor's compiler, and caches them with it.

Inductor takes more than a second to find a library that it has compiled already: it first starts a
process to try which vector instructions it can use. So a note in its cache folder says where each
library is, and later processes load that without asking.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from offcompile.ir.reading import read_bounded

from .posix import replace_text
from .threads import apart

#: the folder for notes, in Inductor's cache folder
NOTES = "offcompile"
_MOST_NOTE_BYTES = 1 << 16


def library(source: str, *flags: str) -> ctypes.CDLL:
    """Compile and load the source; raises any error of the compiler, linker or file system."""
    # the cache keys by source and flags, and the flags say only "native": a cache folder shared
    # with machines of other processors must not hand them this one's code
    source = f"// {_processor()}\n{source}"
    note = _Note(source, flags)
    if (known := note.library()) is not None:
        return known

    def load() -> ctypes.CDLL:
        # Inductor is a heavy import: skip it if nothing is offloaded
        from torch._inductor.codecache import CppCodeCache

        found: ctypes.CDLL = CppCodeCache.load(source, extra_flags=flags)
        return found

    made = apart(load)
    note.write(Path(made._name))
    return made


class _Note:
    """Where Inductor keeps the compiled library of a source."""

    def __init__(self, source: str, flags: tuple[str, ...]) -> None:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        decides = [torch.__version__, os.environ.get("CXX"), flags, source]
        name = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]
        self._inductor = Path(cache_dir())
        self._path = self._inductor / NOTES / f"{name}.json"

    def library(self) -> ctypes.CDLL | None:
        """The library; None if it is not known, or is no longer what was compiled."""
        with suppress(OSError, ValueError, LookupError, TypeError):  # absent or damaged
            said = json.loads(read_bounded(self._path, _MOST_NOTE_BYTES, ours=True))
            found = self._inductor / said["path"]
            if _digest(found) == said["digest"]:
                return ctypes.CDLL(str(found))
        return None

    def write(self, made: Path) -> None:
        """Note the library that was made."""
        with suppress(OSError, ValueError):  # without a note, the next process asks Inductor
            said = {"path": str(made.relative_to(self._inductor)), "digest": _digest(made)}
            replace_text(self._path, json.dumps(said))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def _processor() -> str:
    """Returns this processor's feature flags as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return told[0].replace("\\", "") if told else platform.machine()
