"""Files that somebody spoilt on purpose: good ones with bytes, values, keys and names changed."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offcompile.ir.jsonio import loads_plan, loads_problem, machine_from_toml, machine_to_json
from offcompile.ir.textio import print_machine, print_plan, print_problem
from offcompile.ir.trace import Block, Run, Trace
from offcompile.ir.traceio import print_trace, trace_to_json
from offcompile.machine.hardware import load_profile
from offcompile.machine.hardware_toml import profile_to_toml

#: the machine of the document of measurements
CACHE_IDENTITY: dict[str, str | int | bool] = {"machine": "fuzzed"}
EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"

#: names that a terminal, a page or a path must not take at their word
NAMES = (
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b31m",
    "a\rb",
    "tab\tline\nend",
    "\u202eesrever",
    "\x00",
    "../../../../etc/passwd",
    "/etc/passwd",
    "<script>alert(1)</script>",
    "</title><svg onload=alert(1)>",
    "[bold]rich[/bold]",
    "[link=file:///etc/passwd]x[/link]",
    "{0.__class__}",
    "%s%n",
    "__proto__",
    "\ud800",
    "x" * 5000,
    "",
    "unlimited",
    '"',
)
VALUES: tuple[Any, ...] = (
    *NAMES,
    None,
    True,
    -1,
    0,
    1,
    10**9,
    2**63,
    2**64,
    10**30,
    10**31,
    10**400,
    1e308,
    5e-324,
    -0.0,
    0.5,
    float("nan"),
    float("inf"),
    [],
    {},
    [[[[[]]]]],
    {"a": {"b": {"c": 1}}},
    ["x"] * 50,
)
#: pieces of text that mean something to one reader or another
SPLICES = (
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"1e999",
    b"NaN",
    b"-Infinity",
    b"9" * 5000,
    b"0x" + b"f" * 6000,
    b"[" * 3000,
    b'{"a":' * 3000,
    b'"""',
    b"\n[a]\n",
    b"a.a.a.a.a.a = 1\n",
    b",",
    b"}",
    b'"',
    b"\\u0000",
    b"\\ud800",
    b"\x1b[31m",
    b"1979-05-27T07:32:00Z",
)


@dataclass(frozen=True)
class File:
    """One kind of input as good as it can be; `suffix` names its form."""

    kind: str
    suffix: str
    content: bytes


def good_files() -> tuple[File, ...]:
    """One of each kind and form that is read."""
    problem = loads_problem((EXAMPLES / "tiny.json").read_text())
    toml = (EXAMPLES / "tiny.machine.toml").read_text()
    machine = machine_from_toml(toml)
    plan = loads_plan((EXAMPLES / "tiny.plan.json").read_text())
    trace = Trace(
        (Block("w0", 4096), Block("a0", 1024)),
        (
            Run("layer", 12.5, "0", ("w0",), ("a0",)),
            Run("loss", 3.0, None, ("a0",), (), ("a0",)),
        ),
    )
    texts = {
        ("problem", ".json"): (EXAMPLES / "tiny.json").read_text(),
        ("problem", ".txt"): print_problem(problem),
        ("machine", ".toml"): toml,
        ("machine", ".json"): json.dumps(machine_to_json(machine)),
        ("machine", ".txt"): print_machine(machine),
        ("plan", ".json"): (EXAMPLES / "tiny.plan.json").read_text(),
        ("plan", ".txt"): print_plan(plan),
        ("trace", ".json"): json.dumps(trace_to_json(trace)),
        ("trace", ".txt"): print_trace(trace),
        ("profile", ".toml"): profile_to_toml(load_profile("rtx4090")),
        ("cache", ".json"): json.dumps(
            {
                "format": 1,
                "identity": CACHE_IDENTITY,
                "content": {"ops": [["a", 1.5, 10, 0], ["b", 2.5, 0, 1]]},
            }
        ),
        ("index", ".json"): json.dumps({"metadata": {}, "weight_map": {"w": "a.safetensors"}}),
    }
    files = [File(kind, suffix, text.encode()) for (kind, suffix), text in texts.items()]
    return (*files, File("weights", ".safetensors", safetensors(8)))


def safetensors(nbytes: int, **told: object) -> bytes:
    """A file of one float32 tensor `w`, of which `told` says something else."""
    entry = {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes], **told}
    header = json.dumps({"w": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(nbytes)


def spoil(file: File, rng: random.Random) -> bytes:
    """The file with one to three things wrong; by luck it may still be good."""
    content = file.content
    for _ in range(rng.choice((1, 1, 2, 3))):
        by_value = file.suffix in (".json", ".safetensors") and rng.random() < 0.6
        content = (_change_json if by_value else _change_bytes)(file.suffix, content, rng)
    return content


def _change_bytes(suffix: str, content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    way = rng.randrange(7)
    if way == 0:
        return content[:at]
    if way == 1:
        return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    if way == 2:
        return content[:at] + rng.choice(SPLICES) + content[at:]
    if way == 3:
        end = rng.randrange(at, len(content) + 1)
        return content[:at] + content[end:]
    if way == 4:
        end = min(len(content), at + rng.randrange(200))
        return content[:end] + content[at:end] * rng.choice((1, 2, 50)) + content[end:]
    lines = content.split(b"\n")
    if way == 5:
        words = lines[rng.randrange(len(lines))].split(b" ")
        words[rng.randrange(len(words))] = _word(rng)
        return content + b"\n" + b" ".join(words) + b"\n"
    at = rng.randrange(len(lines))
    words = lines[at].split(b" ")
    words[rng.randrange(len(words))] = _word(rng)
    lines[at] = b" ".join(words)
    return b"\n".join(lines)


def _word(rng: random.Random) -> bytes:
    return json.dumps(rng.choice(VALUES), ensure_ascii=rng.random() < 0.5).encode(
        "utf-8", "surrogatepass"
    )


def _change_json(suffix: str, content: bytes, rng: random.Random) -> bytes:
    head = 8 + int.from_bytes(content[:8], "little") if suffix == ".safetensors" else len(content)
    text = content[8:head] if suffix == ".safetensors" else content
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict | list):
        return _change_bytes(suffix, content, rng)
    places: list[Callable[[Any], Any]] = []
    _walk(value, places)
    if places:
        rng.choice(places)(rng)
    # a key twice: JSON text can have it, a dict cannot
    written = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:
        written = written.replace("{", '{"id": 1, "id": 2, ', 1)
    made = written.encode("utf-8", "surrogatepass")
    if suffix != ".safetensors":
        return made
    return struct.pack("<Q", len(made)) + made + content[head:]


def _walk(value: Any, places: list[Callable[[Any], Any]]) -> None:
    """Every place of a value where something can be put in, out, or in another's stead."""
    keys: Any = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:

        def put(rng: random.Random, key: Any = key) -> None:
            value[key] = rng.choice(VALUES)

        places.append(put)
        if isinstance(value, dict):

            def rename(rng: random.Random, key: Any = key) -> None:
                value[rng.choice(NAMES)] = value.pop(key)

            places.append(rename)
        if isinstance(value[key], dict | list):
            _walk(value[key], places)
