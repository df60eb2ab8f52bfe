"""Compiles small pieces of C++ at first use with Inductor's compiler, and caches them with it."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

from .threads import apart


def library(source: str, *flags: str) -> ctypes.CDLL:
    """Compile and load the source; raises any error of the compiler, linker or file system."""
    # the cache keys by source and flags, and the flags say only "native": a cache folder shared
    # with machines of other processors must not hand them this one's code
    source = f"// {_processor()}\n{source}"

    def load() -> ctypes.CDLL:
        # Inductor is a heavy import: skip it if nothing is offloaded
        from torch._inductor.codecache import CppCodeCache

        found: ctypes.CDLL = CppCodeCache.load(source, extra_flags=flags)
        return found

    return apart(load)


@cache
def _processor() -> str:
    """Returns this processor's feature flags as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return told[0].replace("\\", "") if told else platform.machine()
