"""One rank fails at a drawn moment: the others raise an error that names it, and nothing stays."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lengths
import pytest
import torch.distributed as dist
import warm
from rank_faults import LONGEST_S, Fault, drawn

pytestmark = pytest.mark.skipif(
    not dist.is_available() or sys.platform != "linux", reason="ranks, and what /proc shows of them"
)

DRAWS = 200
#: drawn faults that always run: ranks that end in several ways, and one that has no room
FEW = (0, 14, 30)
_SUPPORT = Path(__file__).resolve().parents[1] / "support"


@dataclass(frozen=True)
class Outcome:
    """Holds the lines of JSON that ranks said, and names all that they left behind."""

    said: list[list[dict[str, Any]]]
    errors: list[str]
    left: list[str]
    #: from the fault to the last error that another rank raised; None: no fault happened
    seconds: float | None


def outcome(fault: Fault) -> Outcome:
    child = [sys.executable, str(_SUPPORT / "rank_fault_child.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(_SUPPORT), os.environ.get("PYTHONPATH", "")])
    )
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as store, tempfile.TemporaryDirectory() as spill:
        told = [str(Path(store) / "store"), json.dumps([spill, asdict(fault)])]
        ranks = [
            warm.start([*child, str(rank), *told], env=environment) for rank in range(fault.world)
        ]
        try:
            stuck = fault.who if fault.kind == "stuck" else None
            others = [rank for number, rank in enumerate(ranks) if number != stuck]
            ended = [rank.communicate(timeout=4 * LONGEST_S) for rank in others]
        finally:
            for rank in ranks:
                rank.kill()
        if stuck is not None:
            ended.insert(stuck, ranks[stuck].communicate(timeout=LONGEST_S))
        left = [f"a spilled file: {name}" for name in os.listdir(spill)]
    new = set(os.listdir("/dev/shm")) - shared
    left += [f"shared memory: {name}" for name in new if not _is_mapped(f"/dev/shm/{name}")]
    left += [f"a process: {pid}" for rank in ranks for pid in _of_session(rank.pid)]
    said = [[json.loads(line) for line in out.splitlines()] for out, _ in ended]
    at = [line["at"] for lines in said for line in lines if "fault" in line]
    raised = [line["at"] for n, lines in enumerate(said) for line in lines if n != fault.who]
    seconds = round(max(raised) - at[0], 1) if at and raised else None
    return Outcome(said, [error for _, error in ended], left, seconds)


def _is_mapped(path: str) -> bool:
    """True if a living process has the file mapped, such as one of another test's."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if path in Path(f"/proc/{entry}/maps").read_text():
                return True
        except OSError:
            continue
    return False


def _of_session(session: int) -> list[str]:
    """The processes that a rank has started and left behind."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(entry)
    return found


def wrong(fault: Fault, found: Outcome) -> list[str]:
    """Say what is not as it should be."""
    said = list(found.left)
    for rank, lines in enumerate(found.said):
        ends = [line for line in lines if "raised" in line]
        if rank == fault.who and fault.kind in ("killed", "raises", "stuck"):
            continue
        if not ends:
            said.append(f"rank {rank} said nothing: {found.errors[rank][-1500:]}")
            continue
        (end,) = ends
        if not (_is_named(fault, rank, end) if fault.fails else end["raised"] == "nothing"):
            said.append(f"rank {rank} raised {end['raised']}: {end['said']}")
    return said


def _is_named(fault: Fault, rank: int, end: dict[str, Any]) -> bool:
    """True if a rank has raised an error of ours that names the one that has failed."""
    if fault.kind == "stuck" and fault.step == 0 and fault.moment in ("compile", "forward"):
        # DDP reduces by itself with a rank that has not come to its first graph: gloo's error
        return "Timed out" in end["said"] or end["raised"] == "OffloadError"
    names = re.search(rf"(?i)\brank (\d+, )*{fault.who}\b", end["said"]) or rank == fault.who
    return bool(names) and end["raised"] in ("OffloadError", "Infeasible")


@pytest.mark.parametrize("number", lengths.some(range(DRAWS), *FEW))
def test_a_drawn_fault_of_one_rank_is_named_on_the_others(number: int) -> None:
    fault = drawn(number)
    found = outcome(fault)
    assert not wrong(fault, found), fault.name
    if fault.kind in ("killed", "raises") and number not in FEW:  # which run on busy machines
        assert found.seconds is None or found.seconds <= LONGEST_S, fault.name
