"""The outcome of each fault in each phase of a step: the matrix, its page, and its tests.

`MATRIX` says what a user meets; docs/faults.md is printed from it (`python -m trust.faults` in
tests/ writes it). `played` makes the fault happen and holds the cell to its word.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import warm

from .fault_rig import PHASES, Rig, descriptors, threads
from .rows import Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
CHILD = Path(__file__).with_name("faults_child.py")
#: these end or copy a process, so that they need one of their own
IN_CHILDREN = ("SIGTERM", "kill −9", "fork in the middle")

#: outcome → what it means; the tests hold each cell to it
OUTCOMES = {
    "goes on": "no error; the numbers are those of an undisturbed run, bit for bit",
    "told": "waits as long as the disk takes, and a warning names the call; the numbers are right",
    "error, repeat": "an error names the cause; weights and states are as they were, and the same "
    "step can be made again, with the right numbers, once the fault is gone",
    "error, resume": "an error names the cause; some weights may be updated and others not, so go "
    "back to the last checkpoint: it resumes to the same losses",
    "ends, resume": "the process ends; no file stays but the last checkpoint, which resumes to the "
    "same losses",
    "refused": "the child gets an error at its first use; the parent goes on with the right "
    "numbers",
    "not noticed": "the numbers may be wrong",
    "cannot be": "there is nothing for the fault to hit",
}


@dataclass(frozen=True)
class Cell:
    """`says`: what the error or the warning contains (a regular expression). `why`: for people."""

    fault: str
    phase: str
    outcome: str
    says: str = ""
    why: str = ""

    @property
    def name(self) -> str:
        return f"{self.fault} in {self.phase}"

    @property
    def played(self) -> bool:
        """True if the fault can be tried in this phase."""
        return self.outcome not in ("cannot be", "not noticed")


def _row(fault: str, *cells: tuple[str, ...]) -> list[Cell]:
    return [Cell(fault, phase, *cell) for phase, cell in zip(PHASES, cells, strict=True)]


_GO, _TOLD = ("goes on",), "told"
_REPEAT, _RESUME, _ENDS, _NONE = "error, repeat", "error, resume", "ends, resume", "cannot be"
_DIED = "the thread offcompile-.* died of"
_READS = (_NONE, "", "backward only reads")
#: told at the end of its copy or, at the latest, at its load
_OUT = "(copied out to|it had not been written there)"
_OURS = "KeyboardInterrupt"

#: in the order of `PHASES`
MATRIX: tuple[Cell, ...] = tuple(
    cell
    for row in (
        _row(
            "ENOSPC",
            (_REPEAT, f"{_OUT}.*No space left"),
            _READS,
            (_RESUME, "No space left.*free space there"),
            (_REPEAT, "saving .* failed .*No space left", "the old checkpoint stays"),
            (_REPEAT, "no room for .* bytes"),
        ),
        _row(
            "EIO",
            (_REPEAT, f"{_OUT}.*Input/output error"),
            (_REPEAT, "loaded from .*Input/output error"),
            (_RESUME, "Input/output error.*check that disk"),
            (_REPEAT, "saving .* failed .*Input/output error", "the old checkpoint stays"),
            (_REPEAT, "growing .*Input/output error"),
        ),
        _row(
            "short transfer",
            _GO,
            _GO,
            _GO,
            _GO,
            (_NONE, "", "files grow by a call that gives all or nothing"),
        ),
        _row("slow disk (100×)", _GO, _GO, _GO, _GO, _GO),
        _row(
            "hung disk",
            (_REPEAT, "(copy out|load) of .*waited for in vain.*writing .* bytes of the file in"),
            (_REPEAT, "load of .*waited for in vain.*reading .* bytes of the file in"),
            (_RESUME, "optimizer states.*waited for in vain.*ing .* bytes of the file in"),
            (_TOLD, "One call takes longer than usual: saving", "only the disk can end the call"),
            (_TOLD, "One call takes longer than usual: growing", "only the disk can end the call"),
        ),
        _row(
            "vanished directory",
            ("goes on", "", "open files stay"),
            ("goes on", "", "open files stay"),
            ("goes on", "", "open files stay"),
            (_REPEAT, "saving .* failed .*create the directory first"),
            (_REPEAT, "does not exist: create it"),
        ),
        _row(
            "corrupt block",
            (_NONE, "", "what is written is read in backward"),
            (_REPEAT, "are not what was written there", "with `verify_spill`; else not noticed"),
            (_RESUME, "are not what was written there", "with `verify_spill`; else not noticed"),
            ("not noticed", "", "`torch.load` looks at no checksums of tensors"),
            (_NONE, "", "nothing is read"),
        ),
        _row(
            "allocation failure",
            (_REPEAT, f"{_OUT}.*refused"),
            (_REPEAT, "out of memory.*could not come back"),
            (_RESUME, "refused"),
            ("goes on", "", "it makes do with the memory that it has"),
            (_REPEAT, "refused"),
        ),
        _row(
            "thread death",
            (_REPEAT, _DIED),
            (_REPEAT, _DIED),
            (_RESUME, _DIED),
            (_REPEAT, _DIED, "states are read for it"),
            (_REPEAT, "cannot be started .*ulimit", "the thread cannot be started"),
        ),
        _row("SIGINT", *[(_REPEAT, _OURS)] * 2, (_RESUME, _OURS), *[(_REPEAT, _OURS)] * 2),
        _row("SIGTERM", *[(_ENDS,)] * 5),
        _row("kill −9", *[(_ENDS,)] * 5),
        _row(
            "fork in the middle",
            ("goes on", "", "the child makes a runtime of its own"),
            ("refused", "moved by the parent process before fork"),
            ("refused", "forked from it: make the optimizer in the process that trains"),
            ("goes on", "", "the child leaves the parent's file alone"),
            ("goes on", "", "the child makes a runtime of its own"),
        ),
    )
    for cell in row
)


# -- the page -------------------------------------------------------------------------------------


def table(cells: Sequence[Cell] = MATRIX) -> str:
    """The matrix as Markdown."""
    rows = [f"| | {' | '.join(PHASES)} |", "|---" * (len(PHASES) + 1) + "|"]
    for fault in dict.fromkeys(cell.fault for cell in cells):
        told = [f"{c.outcome}{f' ({c.why})' if c.why else ''}" for c in cells if c.fault == fault]
        rows.append(f"| **{fault}** | {' | '.join(told)} |")
    words = [f"- **{outcome}**: {meaning}." for outcome, meaning in OUTCOMES.items()]
    return "\n".join([*rows, "", *words])


_BEGIN, _END = "<!-- the matrix -->", "<!-- /the matrix -->"


def written_into(page: str) -> str:
    """The page with the matrix as it is now."""
    before, rest = page.split(_BEGIN)
    return f"{before}{_BEGIN}\n\n{table()}\n\n{_END}{rest.split(_END)[1]}"


# -- playing it -----------------------------------------------------------------------------------


def spread(count: int, seed: int, cells: Iterable[Cell] = MATRIX) -> list[Cell]:
    """So many cells, of every fault as far as it goes, drawn by the seed."""
    left = [cell for cell in cells if cell.played]
    random.Random(seed).shuffle(left)
    chosen: list[Cell] = []
    while left and len(chosen) < count:
        for fault in dict.fromkeys(cell.fault for cell in left):
            one = next(cell for cell in left if cell.fault == fault)
            left.remove(one)
            chosen.append(one)
    order = {cell: at for at, cell in enumerate(MATRIX)}
    return sorted(chosen[:count], key=order.__getitem__)


def played(cells: Sequence[Cell]) -> dict[str, str]:
    """Cell → what was not as the matrix says, of those that failed."""
    wrong: dict[str, str] = {}
    here = [cell for cell in cells if cell.fault not in IN_CHILDREN]
    with tempfile.TemporaryDirectory(dir=_on_a_disk()) as folder:
        if here:
            wrong |= played_here(here, Path(folder) / "here")
        if beside := [cell.name for cell in cells if cell.fault in IN_CHILDREN]:
            wrong |= in_children(beside, Path(folder) / "children")
    return wrong


def played_here(cells: Sequence[Cell], folder: Path) -> dict[str, str]:
    from .fault_acts import Player  # it patches what the page does not need

    before = set(threads())
    player = Player(Rig(folder))
    wrong = {cell.name: said for cell in cells if (said := player.play(cell))}
    player.rig.close()
    del player
    for thread in set(threads()) - before:  # closed: they are on their way out
        thread.join(10)
    left = [*(set(threads()) - before), *descriptors(folder)]
    if left:
        wrong["after all of them"] = f"left: {left}"
    return wrong


def in_children(names: Sequence[str], folder: Path) -> dict[str, str]:
    folder.mkdir()
    done = warm.run(
        [sys.executable, str(CHILD), str(folder), json.dumps(list(names))],
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        return {"the child": f"exit code {done.returncode}: {done.stderr[-2000:]}"}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _on_a_disk() -> str | None:
    return "/var/tmp" if os.path.isdir("/var/tmp") else None


def rows(scale: float, seed: int) -> list[Row]:
    """At scale 1 the whole matrix, else a spread of it, of 25 cells at least."""
    whole = [cell for cell in MATRIX if cell.played]
    cells = spread(max(25, round(scale * len(whole))), seed)
    wrong = played(cells)
    for name, said in wrong.items():
        print(f"{name} (--seed {seed}): {said}")
    phases = ", ".join(f"{sum(c.phase == p for c in cells)} in {p}" for p in PHASES)
    done = len(cells) - len(wrong)
    return [
        Row(
            "faults injected, with the outcome as stated",
            done,
            len(cells),
            (),
            (("of these", phases),),
        )
    ]


if __name__ == "__main__":
    PAGE.write_text(written_into(PAGE.read_text()))
    assert re.search(r"\| \*\*EIO\*\*", PAGE.read_text())
