"""The rooms of the code, read from its imports: their order, their files, and figures of shape.

`make house` prints the figures; `python tests/support/house.py --draw FILE` draws the rooms as SVG.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STANDARD = frozenset(sys.stdlib_module_names)
MOST_FILES = 15
MOST_LINES = 400
MOST_ATTRIBUTES = 15


@dataclass(frozen=True)
class Room:
    """A package, the libraries that it may import, and for what it is there."""

    package: str
    libraries: tuple[str, ...]
    purpose: str
    #: rooms that it may import, where not all lower ones
    may: tuple[str, ...] | None = None
    #: why it has more than `MOST_FILES` files
    many: str = ""


NUMBERS = ("numpy", "highspy", "sympy")
TORCH = ("torch", "numpy", "sympy")
IR = "offcompile.ir"
PASSES, RUNTIME = "offcompile.passes", "offcompile.runtime"

#: lowest first: a room imports itself and rooms above it in this list, never one below
ROOMS = (
    Room(IR, (), "problems, machines, plans; the verifier"),
    Room(f"{PASSES}.build", (), "decisions into plans"),
    Room(f"{PASSES}.select", (), "choices among candidates"),
    Room(f"{PASSES}.search", (), "search over whole plans"),
    Room(f"{PASSES}.correlation", (), "the predictor of what runs next"),
    Room(f"{PASSES}.step", (), "one step of several graphs"),
    Room(PASSES, (), "the policies, one a file"),
    Room(f"{RUNTIME}.base", ("torch", "rich"), "threads, limits, counters, pages"),
    Room(f"{RUNTIME}.codecs", ("torch", "numpy"), "lossless and lossy packing"),
    Room(f"{RUNTIME}.kernels", ("torch", "triton"), "Triton kernels and their launchers"),
    Room(f"{RUNTIME}.disk", ("torch", "numpy"), "spill files with direct I/O"),
    Room(f"{RUNTIME}.memory", ("torch", "numpy"), "arenas, pinning, malloc"),
    Room(f"{RUNTIME}.device", ("torch", "numpy"), "lanes, streams, copies"),
    Room(f"{RUNTIME}.moves", ("torch",), "moves while graphs run"),
    Room(f"{RUNTIME}.states", ("torch", "numpy"), "gradients and optimizer states"),
    Room(f"{RUNTIME}.ranks", ("torch",), "gradients added up over ranks"),
    Room(f"{RUNTIME}.measure", ("torch", "numpy"), "rates of this machine"),
    Room("offcompile.machine", ("torch",), "the machine planned for; options"),
    Room("offcompile.simulate", NUMBERS, "the exact time and peak of a plan"),
    Room("offcompile.bounds", NUMBERS, "the least time that any plan takes"),
    Room("offcompile.outline", NUMBERS, "roughly how the fastest plan looks"),
    Room("offcompile.planning", TORCH, "one problem planned, fitted, ordered"),
    Room("offcompile.graph", TORCH, "torch's graphs, and plans written into them"),
    Room("offcompile.report", ("rich", "torch"), "reports, the page, drawings"),
    Room("offcompile.run", ("torch", "sympy"), "the backend at run time"),
    Room("offcompile.optim", ("torch",), "optimizers whose states lie elsewhere"),
    Room("offcompile.ahead", ("torch", "transformers"), "plans without the hardware"),
    Room("offcompile.cli", ("rich", "torch"), "the command line and the doctor"),
    Room(
        "offcompile.integrations",
        ("torch", "transformers", "lightning"),
        "callbacks for other people's trainers",
    ),
    Room("offcompile.testing", ("hypothesis",), "strategies for other people's tests", may=(IR,)),
)
#: the picture of this table in the documents
PICTURE = ROOT / "docs" / "rooms.svg"
#: the runtime carries plans out and makes none; it drives the predictor, and follows the step table
OF_RUNTIME = (IR, f"{PASSES}.correlation", f"{PASSES}.step", RUNTIME)


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the package, by its name."""
    found = {}
    for top in ("offcompile", "passes", "runtime"):
        for file in sorted((root / top).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            if top == "offcompile" and parts[1] in ("passes", "runtime"):
                continue  # the links
            if top != "offcompile":
                parts = ("offcompile", *parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@functools.cache
def imports(source: str, module: str, is_package: bool) -> tuple[tuple[int, str], ...]:
    """(line, module or name) of every import, wherever in the file it stands."""
    return tuple(_imports(source, module, is_package))


def _imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            for alias in node.names:
                yield node.lineno, ".".join(filter(None, (base, node.module, alias.name)))


def graph(files: dict[str, Path]) -> dict[str, set[str]]:
    """Module → modules of ours that it imports, late imports and those for types included."""
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        wanted = imports(file.read_text(), module, file.name == "__init__.py")
        found[module] = {m for _, name in wanted if (m := _known(name, files)) is not None}
        found[module].discard(module)
    return found


def _known(name: str, files: dict[str, Path]) -> str | None:
    """The module that an imported name is, or comes from."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name or None


def room_of(module: str) -> Room | None:
    """None: the face of the package, which leads into every room."""
    inside = [r for r in ROOMS if module == r.package or module.startswith(f"{r.package}.")]
    return max(inside, key=lambda room: len(room.package), default=None)


def trespasses(source: str, module: str, is_package: bool, files: dict[str, Path]) -> list[str]:
    """Imports of rooms above, or of libraries that the room has no use for."""
    room = room_of(module)
    if room is None:
        return []
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(source, module, is_package)
        if not _allowed(room, name, files)
    ]


def _allowed(room: Room, name: str, files: dict[str, Path]) -> bool:
    top = name.split(".")[0]
    if top != "offcompile":
        return top in STANDARD or top in room.libraries
    other = room_of(_known(name, files) or name)
    if other is None:
        return False  # faces are for people: inside, everyone names the room
    if room.package.startswith(RUNTIME) and not within(other.package, OF_RUNTIME):
        return False
    if room.may is not None:
        return other is room or other.package in room.may
    return ROOMS.index(other) <= ROOMS.index(room)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(f"{p}.") for p in packages)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other, in one or more steps (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(v: str) -> None:
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in sorted(edges[v]):
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            at = stack.index(v)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for v in edges:
        if v not in index:
            visit(v)
    return found


def files_by_folder(files: dict[str, Path]) -> Counter[str]:
    """Modules side by side in each folder, its face not counted."""
    return Counter(
        module.rpartition(".")[0] for module, file in files.items() if file.name != "__init__.py"
    )


#: module with more than `MOST_LINES` lines → why its parts belong in one file
LONG: dict[str, str] = {}


def long_files(files: dict[str, Path]) -> list[tuple[int, str]]:
    """Modules with more lines than one reads in one sitting, the longest first."""
    lengths = ((len(file.read_text().splitlines()), module) for module, file in files.items())
    return sorted((one for one in lengths if one[0] > MOST_LINES), reverse=True)


def class_names_twice(files: dict[str, Path]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for module, file in files.items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return {name: places for name, places in found.items() if len(places) > 1}


#: calls of users, who name the options: their keyword-only parameters count by themselves
PUBLIC = (
    "offcompile.ahead.batches.search:max_batch",
    "offcompile.ahead.fit:fit",
    "offcompile.ahead.plan:plan",
    "offcompile.optim.adam:__init__",
    "offcompile.optim.sgd:__init__",
    "offcompile.optim.muon:__init__",
)
#: kernels, and kernels of torch operators, whose parameters are the operator's schema
KERNELS = (f"{RUNTIME}.kernels", f"{RUNTIME}.moves.ops")


def widest(files: dict[str, Path]) -> list[tuple[int, str]]:
    """Functions with most parameters, kernels and options of public calls aside; the widest first.

    Raises ValueError if a public call is not where `PUBLIC` says.
    """
    found = [(one - options * (name in PUBLIC), name) for one, options, name in _signatures(files)]
    if missing := set(PUBLIC) - {name for _, name in found}:
        raise ValueError(f"no longer public calls: {missing}")
    return sorted(found, reverse=True)


def public_options(files: dict[str, Path]) -> list[tuple[int, str]]:
    """The number of keyword-only options of each public call, the largest first."""
    found = [(options, name) for _, options, name in _signatures(files) if name in PUBLIC]
    return sorted(found, reverse=True)


def _signatures(files: dict[str, Path]) -> Iterator[tuple[int, int, str]]:
    """(parameters, those that are keyword-only, name) of every function that is no kernel."""
    for module, file in files.items():
        if within(module, KERNELS):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                a = node.args
                names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
                count = len([n for n in names if n not in ("self", "cls")])
                yield count, len(a.kwonlyargs), f"{module}:{node.name}"


@dataclass(frozen=True)
class WideClass:
    """A class with more attributes than one can keep in mind."""

    name: str
    attributes: int
    #: True if a comment above it says why
    says_why: bool


def wide_classes(files: dict[str, Path]) -> list[WideClass]:
    """Classes whose own methods set, or whose bodies declare, over `MOST_ATTRIBUTES` attributes."""
    found = []
    for module, file in files.items():
        source = file.read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and len(_attributes(node)) > MOST_ATTRIBUTES:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                says_why = lines[first - 2].startswith("#")
                name = f"{module}.{node.name}"
                found.append(WideClass(name, len(_attributes(node)), says_why))
    return sorted(found, key=lambda wide: -wide.attributes)


def _attributes(node: ast.ClassDef) -> set[str]:
    names = {
        x.target.id
        for x in node.body
        if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
    }
    return names | {
        x.attr
        for x in ast.walk(node)
        if isinstance(x, ast.Attribute)
        and isinstance(x.ctx, ast.Store)
        and isinstance(x.value, ast.Name)
        and x.value.id == "self"
    }


@dataclass(frozen=True)
class ModuleState:
    """A name of a module whose value changes while the process runs."""

    name: str
    #: True if a comment above it says why it is the module's
    says_why: bool


#: classes of the standard library whose objects change; locks, which hold no facts, are not here
CHANGING = frozenset(
    {"dict", "list", "set", "deque", "count", "defaultdict", "Counter", "local", "ContextVar"}
    | {"WeakSet", "WeakKeyDictionary", "WeakValueDictionary"}
)


def mutable_state(files: dict[str, Path]) -> list[ModuleState]:
    """Names of modules that are containers, objects of a class of ours that is not frozen, or that
    functions rebind."""
    trees = {module: ast.parse(file.read_text()) for module, file in files.items()}
    changing = CHANGING | {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not _frozen(node)
    }
    found = []
    for module, tree in trees.items():
        rebound = {n for x in ast.walk(tree) if isinstance(x, ast.Global) for n in x.names}
        lines = files[module].read_text().splitlines()
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.value
            grows = isinstance(value, ast.Dict | ast.List | ast.Set)
            changes = isinstance(value, ast.Call) and _name(value.func) in changing
            says_why = lines[node.lineno - 2].startswith("#")
            for name in (t.id for t in targets if isinstance(t, ast.Name)):
                held = changes or (grows and not name.isupper())
                if name in rebound or (held and name != "__all__"):
                    found.append(ModuleState(f"{module}.{name}", says_why))
    return found


def _frozen(node: ast.ClassDef) -> bool:
    bases = {_name(base) for base in node.bases}
    return "frozen=True" in " ".join(map(ast.unparse, node.decorator_list)) or bool(
        bases & {"NamedTuple", "Enum", "Protocol"}
    )


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def count_lines(files: dict[str, Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files.values())


def draw() -> str:
    """The rooms, the lowest at the bottom, with a dot wherever one imports another, as SVG."""
    names = [room.package for room in ROOMS]
    edges = {name: set[str]() for name in names}
    for module, wanted in graph(modules()).items():
        room = room_of(module)
        for other in filter(None, map(room_of, wanted)):
            if room is not None and other is not room:
                edges[room.package].add(other.package)
    cell, left = 24, 545
    side = len(ROOMS) * cell
    parts = []
    for row, room in enumerate(reversed(ROOMS)):
        y = 8 + row * cell
        parts.append(
            f'<rect x="8" y="{y}" width="{left + side}" height="{cell}" class="row{row % 2}"/>'
            f'<text x="16" y="{y + 16}" class="name">{escape(room.package)}</text>'
            f'<text x="252" y="{y + 16}">{escape(room.purpose)}</text>'
        )
        own = len(ROOMS) - 1 - row
        parts.append(
            f'<rect x="{left + own * cell + 4}" y="{y + 4}" width="{cell - 8}" '
            f'height="{cell - 8}" rx="3" class="own"/>'
        )
        parts += [
            f'<circle cx="{left + at * cell + cell // 2}" cy="{y + cell // 2}" r="5">'
            f"<title>{escape(room.package)} imports {escape(name)}</title></circle>"
            for at, name in enumerate(names)
            if name in edges[room.package]
        ]
    style = (
        "text{font:13px sans-serif;fill:#222}.name{font-family:monospace;font-weight:bold}"
        ".row0{fill:#f4f6fa}.row1{fill:#fff}.own{fill:#7fa8d9}circle{fill:#335c92}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + side + 16} {side + 16}" '
        f'role="img" aria-label="Rooms: each imports only rooms drawn below it">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _show() -> None:
    files = modules()
    folders = files_by_folder(files)
    twice = class_names_twice(files)
    state = mutable_state(files)
    print(f"lines                      {count_lines(files):,}")
    print(f"files                      {len(files)}")
    over = {k: v for k, v in folders.items() if v > MOST_FILES}
    print(f"folders over {MOST_FILES} files      {over or 'none'}")
    print(f"files over {MOST_LINES} lines       {long_files(files) or 'none'}")
    print(f"circles                    {circles(graph(files)) or 'none'}")
    print(f"class names that stand twice   {len(twice)}: {', '.join(sorted(twice))}")
    unsaid = [found.name for found in state if not found.says_why]
    print(f"mutable state of modules   {len(state)}; without a reason: {unsaid or 'none'}")
    print(f"widest signatures          {', '.join(f'{n} {w}' for n, w in widest(files)[:5])}")
    print(f"options of public calls    {', '.join(f'{n} {w}' for n, w in public_options(files))}")
    wide = wide_classes(files)
    unsaid = [f"{found.attributes} {found.name}" for found in wide if not found.says_why]
    said = [f"{found.attributes} {found.name}" for found in wide if found.says_why]
    print(f"classes over {MOST_ATTRIBUTES} attributes {len(unsaid)}: {', '.join(unsaid) or 'none'}")
    print(f"  of those that say why    {len(said)}: {', '.join(said) or 'none'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", metavar="FILE", type=Path, help="draw the rooms as SVG")
    asked = parser.parse_args()
    if asked.draw:
        asked.draw.write_text(draw())
    else:
        _show()
