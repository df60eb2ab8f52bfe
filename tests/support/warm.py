"""Runs scripts in processes of their own that have PyTorch imported from their start.

Importing takes five seconds, more than most scripts. One server imports once and forks a process
per script. A fork inherits what the server has imported and allocated: a script that reads an
environment variable as it imports, or malloc's tunables, takes `subprocess` instead. One that looks
at malloc's heap, or that says how Triton reads kernels, names `LITTLE`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from freeze_imports import do_not_time_guards

Modules = tuple[str, ...]
#: modules that any compilation comes to import
IMPORTED: Modules = (
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "offcompile.run.backend",
)
#: neither a compiler nor Triton
LITTLE: Modules = ("torch", "offcompile.runtime.kernels", "offcompile.runtime.memory.malloc.heap")
#: bytes that a request takes at most; its length goes before it
_LENGTH_BYTES = 8


class Process:
    """A forked process, with as much of `subprocess.Popen` as tests use."""

    def __init__(
        self,
        args: Sequence[str],
        cwd: str | Path | None = None,
        env: Mapping[str, str] = os.environ,
        imported: Modules = IMPORTED,
    ) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        asked = json.dumps([self.args, os.fspath(cwd or Path.cwd()), dict(env)]).encode()
        ends = [os.pipe() for _ in range(3)]  # its output, its errors, how it ended
        self._out, self._err, self._status = (os.fdopen(read, "rb") for read, _ in ends)
        with _lock:
            server = _server(imported)
            socket.send_fds(
                server, [len(asked).to_bytes(_LENGTH_BYTES, "big")], [write for _, write in ends]
            )
            server.sendall(asked)
        for _, write in ends:
            os.close(write)
        self.pid = int(self._status.readline())

    def readline(self) -> str:
        """The next line that it prints; waits for it."""
        return self._out.readline().decode()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait until it ends; return what it printed. Raises `subprocess.TimeoutExpired`."""
        said: dict[str, str] = {}
        pipes = {"out": self._out, "err": self._err}

        def read(name: str) -> None:
            said[name] = pipes[name].read().decode()

        readers = [threading.Thread(target=read, args=(name,), daemon=True) for name in pipes]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.returncode = int(self._status.readline())
        for pipe in (*pipes.values(), self._status):
            pipe.close()
        return said["out"], said["err"]

    def kill(self) -> None:
        """End it, if it still runs."""
        if self.returncode is None:
            try:
                os.kill(self.pid, 9)
            except ProcessLookupError:
                return


def run(
    args: Sequence[str],
    timeout: float = 300,
    cwd: str | Path | None = None,
    env: Mapping[str, str] = os.environ,
    check: bool = False,
    imported: Modules = IMPORTED,
) -> subprocess.CompletedProcess[str]:
    """Run `[sys.executable, …]` to its end; the rest is a script, `-c` code or `-m` module, and
    its arguments."""
    process = start(args, cwd, env, imported)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode is not None
    found = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        found.check_returncode()
    return found


def start(
    args: Sequence[str],
    cwd: str | Path | None = None,
    env: Mapping[str, str] = os.environ,
    imported: Modules = IMPORTED,
) -> Any:
    """Like `run`, but return the process while it runs."""
    if sys.platform != "linux":
        pipe = subprocess.PIPE
        return _Cold(args, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)
    return Process(args, cwd, env, imported)


class _Cold(subprocess.Popen[str]):
    """A process that imports for itself, where none are forked."""

    def readline(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline()


_lock = threading.Lock()


@functools.cache
def _server(imported: Modules) -> socket.socket:
    mine, other = socket.socketpair()
    with other:
        server = subprocess.Popen(
            [sys.executable, __file__, str(other.fileno()), *imported],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    atexit.register(_end, mine, server)
    return mine


def _end(mine: socket.socket, server: subprocess.Popen[bytes]) -> None:
    mine.close()
    server.wait()


# --- the server -----------------------------------------------------------------------------


def _serve(asks: socket.socket) -> list[str] | None:
    """Fork a process for each request. Returns None once nobody asks any more, and in the forked
    process what it is to run."""
    while True:
        head, fds, _, _ = socket.recv_fds(asks, _LENGTH_BYTES, 3)
        while _reap():
            pass
        if not head:
            return None
        left, parts = int.from_bytes(head, "big"), list[bytes]()
        while left:
            parts.append(asks.recv(left))
            left -= len(parts[-1])
        args, cwd, env = json.loads(b"".join(parts))
        # one between them waits for it: the server is free for the next request
        if os.fork() == 0:
            asks.close()
            found = os.fork()
            if found == 0:
                _become(fds, cwd, env)
                return args
            _wait_for(found, fds)
        for fd in fds:
            os.close(fd)


def _reap() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _wait_for(pid: int, fds: list[int]) -> None:
    out, err, status = fds
    os.close(out)
    os.close(err)
    os.write(status, f"{pid}\n".encode())
    _, how = os.waitpid(pid, 0)
    os.write(status, f"{os.waitstatus_to_exitcode(how)}\n".encode())
    os._exit(0)


def _become(fds: list[int], cwd: str, env: Mapping[str, str]) -> None:
    out, err, status = fds
    os.close(status)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)


def _run(args: list[str]) -> None:
    """Run what the interpreter would with these arguments, in the place of `__main__`."""
    first, *rest = args[1:]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    known = [path for path in sys.path[1:] if path not in paths]
    if first == "-c":
        code, *rest = rest
        sys.argv, sys.path[:] = ["-c", *rest], ["", *paths, *known]
        main = sys.modules["__main__"].__dict__
        for name in [name for name in main if not name.startswith("__")]:
            del main[name]
        exec(compile(code, "<string>", "exec"), main)
    elif first == "-m":
        module, *rest = rest
        sys.argv, sys.path[:] = [module, *rest], [os.getcwd(), *paths, *known]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:] = [first, *rest], [str(Path(first).parent), *paths, *known]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    do_not_time_guards()
    gc.collect()
    gc.freeze()
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        _run(asked)
