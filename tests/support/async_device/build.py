"""Builds the device with g++, once for each version of its sources and of torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
HEADERS = ("graphs.h", "hooks.h", "memory.h", "queues.h")
SOURCES = ("graphs.cpp", "hooks.cpp", "memory.cpp", "ops.cpp", "queues.cpp")
OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-w")


class NoCompiler(Exception):
    """The device cannot be built here; says why."""


def why_not() -> str | None:
    """The reason that the device cannot be built here; None if it can."""
    if sys.platform != "linux":
        return f"the asynchronous device maps memory as Linux does, and this is {sys.platform}"
    if shutil.which(_compiler()) is None:
        return f"there is no C++ compiler ({_compiler()}) to build the asynchronous device"
    if not (_torch() / "include" / "torch" / "library.h").exists():
        return "torch came without its C++ headers"
    return None


def library() -> Path:
    """The built library; builds it now if no run has done so before."""
    if (reason := why_not()) is not None:
        raise NoCompiler(reason)
    built = _folder() / f"queued-{_key()}.so"
    if built.exists():
        return built
    # several workers may come at once: one builds, the others wait
    with open(built.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(built)
    return built


def _build(target: Path) -> None:
    include, libraries = _torch() / "include", _torch() / "lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [_compiler(), *OPTIONS, abi, f"-I{include}"]
        command += [f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
        command += [*(str(HERE / name) for name in SOURCES), "-o", str(made)]
        command += [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{found.stderr[-4000:]}")
        os.replace(made, target)


def _folder() -> Path:
    """`build` of the checkout, or a folder of the user's where that cannot be written."""
    folder = ROOT / "build" / "async_device"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"offcompile-async-device-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _key() -> str:
    found = hashlib.sha256(f"{torch.__version__} {torch.__file__} {OPTIONS}".encode())
    for name in (*HEADERS, *SOURCES):
        found.update((HERE / name).read_bytes())
    return found.hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _torch() -> Path:
    return Path(torch.__file__).parent
