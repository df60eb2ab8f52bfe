"""Small pieces of C++, compiled at first use as Inductor compiles, and kept in its cache."""

from __future__ import annotations

import ctypes
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path


def library(source: str, *flags: str) -> ctypes.CDLL:
    """Raises whatever a compiler, a linker or a file system has to say."""
    # the cache keys by source and flags, and the flags say only "native": a folder that machines
    # with other processors share must not hand them this one's code
    source = f"// {_processor()}\n{source}"

    def load() -> ctypes.CDLL:
        # Inductor is a heavy import: whoever moves nothing does without
        from torch._inductor.codecache import CppCodeCache

        found: ctypes.CDLL = CppCodeCache.load(source, extra_flags=flags)
        return found

    # in a thread of its own, where no mode of the caller's reaches: fake tensors, other devices
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(load).result()


@cache
def _processor() -> str:
    """What this processor can do, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return told[0].replace("\\", "") if told else platform.machine()
