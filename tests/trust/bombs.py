"""Files made to take all memory, or all time: each is refused within bounds, in its own process."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import warm

from .hostile import CACHE_IDENTITY, EXAMPLES, safetensors

#: for all bombs, one after the other; torch itself takes a third of a GiB
MOST_MEMORY_BYTES, MOST_CPU_S = 4 << 30, 180

#: characters of an error
MOST_SAID = 1 << 16
_HUGE = 10**18


def _claim() -> bytes:
    """Eight bytes that announce an exabyte of header."""
    return _HUGE.to_bytes(8, "little") + b"{}"


def _many_direct(count: int) -> str:
    names = [f"t{i}" for i in range(count)]
    tensors = [{"id": n, "nbytes": 1, "kind": "weight"} for n in names]
    op = {"id": "o", "phase": "forward", "duration_us": 1, "reads": names, "writes": []}
    return json.dumps({"tensors": tensors, "ops": [{**op, "direct": dict.fromkeys(names, 1)}]})


#: name → suffix, and what makes the content
BOMBS: dict[str, tuple[str, Callable[[], str | bytes]]] = {
    "depth": (".json", lambda: "[" * 2_000_000),
    "depth of objects": (".json", lambda: '{"a":' * 1_000_000),
    "values": (".json", lambda: '{"tensors":[' + "0," * 11_000_000 + "0]}"),
    "faults": (".json", lambda: '{"tensors":[' + "{}," * 300_000 + "{}]}"),
    "keys": (".json", lambda: "{" + ",".join(f'"k{i}":0' for i in range(200_000)) + "}"),
    "digits": (".json", lambda: '{"tensors":[' + "9" * 3_000_000 + "]}"),
    "accesses in place": (".json", lambda: _many_direct(20_000)),
    "words of a line": (".txt", lambda: "op a forward 1 reads " + "x " * 300_000),
    "lines": (".txt", lambda: "\n" * 11_000_000),
    "faulty lines": (".txt", lambda: "zz\n" * 200_000),
    "a quote that never ends": (".txt", lambda: 'tensor "' + "\\x" * 1_000_000),
    "parts of a key": (".toml", lambda: "a." * 60_000 + "a = 1"),
    "parts of a header": (".toml", lambda: "[" + "a." * 60_000 + "a]"),
    "nested tables": (".toml", lambda: "a = " + "{a=" * 60_000),
    "nested arrays": (".toml", lambda: "name = " + "[" * 60_000),
    "digits in hexadecimal": (".toml", lambda: "h2d_gbps = 0x" + "f" * 200_000),
    "a long profile": (".toml", lambda: "# \n" * 2_000_000),
    "a header as long as it says": (".safetensors", _claim),
    "elements that are not there": (".safetensors", lambda: safetensors(8, shape=[10**9])),
    "a shape of many sizes": (".safetensors", lambda: safetensors(8, shape=[10**17] * 100_000)),
    "a size of many digits": (".safetensors", lambda: safetensors(8, shape=[10**4000])),
    "offsets beyond the file": (".safetensors", lambda: safetensors(8, data_offsets=[0, _HUGE])),
    "depth of a header": (".safetensors", lambda: _deep_header()),
    "a device without an end": ("/dev/zero", lambda: b""),
    "a document of measurements without an end": ("cache", lambda: b"[" * (80 << 20)),
    "a pipe in place of a document": ("pipe", lambda: b""),
}


#: lawful, if large: it has only to be read in time
VALID = {"accesses in place": "valid"}


def _deep_header() -> bytes:
    text = b'{"w":' * 500_000
    return len(text).to_bytes(8, "little") + text


def defuse(folder: Path) -> list[str]:
    """Each through its reader, in one process that is bounded; what went wrong."""
    script = "import sys; from trust.bombs import _all; _all(sys.argv[1])"
    done = warm.run(
        [sys.executable, "-c", script, str(folder)],
        timeout=20 * MOST_CPU_S,
        cwd=Path(__file__).parents[1],
    )
    said = dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)
    silent = f"no answer (exit code {done.returncode}): {done.stderr[-300:]}"
    return [
        f"{name}: {outcome}"
        for name in BOMBS
        if (outcome := said.get(name, silent)) != VALID.get(name, "refused")
    ]


def _all(folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    for name in BOMBS:
        print(name, _outcome(name, Path(folder)).replace("\n", " "), sep="\t", flush=True)


def _outcome(name: str, folder: Path) -> str:
    from offcompile.cli.files import read_inputs
    from offcompile.ir import OffloadError
    from offcompile.machine.cost_cache import document_path, read_document
    from offcompile.machine.hardware import load_profile
    from offcompile.runtime.disk import checkpoint_files

    suffix, make = BOMBS[name]
    if suffix in ("cache", "pipe"):
        document = document_path("costs", CACHE_IDENTITY)
        document.unlink(missing_ok=True)
        if suffix == "pipe":
            os.mkfifo(document)
        else:
            document.write_bytes(bytes(make()))
        found = read_document("costs", CACHE_IDENTITY)
        document.unlink()
        return "refused" if found is None else "taken for measured"
    path = Path(suffix) if suffix.startswith("/") else folder / f"bomb{suffix}"
    if path.parent == folder:
        content = make()
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        if suffix == ".safetensors":
            checkpoint_files.entries(path)
        elif suffix == ".toml":
            load_profile(path)
        else:
            options = {"problem": str(path), "machine": str(EXAMPLES / "tiny.machine.toml")}
            rest = dict.fromkeys(("trace", "hardware", "memory", "host_memory", "disk"))
            read_inputs(argparse.Namespace(**options, **rest))
    except OffloadError as error:
        return "refused" if len(str(error)) < MOST_SAID else "refused at too great length"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "valid"
