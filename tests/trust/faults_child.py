"""Cells of the fault matrix that end a process, or copy it: each in a fork of this one.

Usage: faults_child.py FOLDER '["kill −9 in update", …]'. Prints one JSON object: cell → what was
wrong with it. The model is compiled once, here; each fork makes its own runtime and files.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.moves.registry import close_all
from trust.fault_acts import at_disk
from trust.fault_rig import Rig, same
from trust.faults import MATRIX, Cell

_SIGNALS = {"SIGTERM": signal.SIGTERM, "kill −9": signal.SIGKILL}


def forked(work: Callable[[], None]) -> int:
    """Its exit code, negative if a signal ended it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(rig: Rig, cell: Cell | None, log: Path) -> None:
    """Two steps with a checkpoint after each; the fault of `cell` is in the second."""
    rig.resume(fresh=True)
    while rig.at < 3:
        hit = cell is not None and rig.at == 2
        for phase in ("init" if hit and cell.phase == "init" else "forward", "backward", "update"):
            _phase(rig, phase, cell if hit and cell.phase == phase else None, log)
        _phase(rig, "checkpoint", cell if hit and cell.phase == "checkpoint" else None, log)
    weights = torch.cat([p.detach().view(-1) for p in rig.model.parameters()])
    with log.open("a") as lines:
        lines.write(f"end {weights.double().sum().item().hex()}\n")


def _phase(rig: Rig, phase: str, cell: Cell | None, log: Path) -> None:
    if cell is None:
        getattr(rig, phase)()
    else:
        rig.drain()
        with at_disk(rig, phase, _fatal(_SIGNALS[cell.fault])):
            getattr(rig, phase)()
            rig.drain()
        raise AssertionError(f"{cell.name}: nobody was killed")
    if phase == "forward" and rig.loss is not None:
        with log.open("a") as lines:
            lines.write(f"{rig.at} {rig.loss.item().hex()}\n")


def _fatal(number: int) -> Callable[..., Any]:
    def call(real: Callable[..., Any], *given: Any) -> Any:
        os.kill(os.getpid(), number)
        signal.pause()  # a signal may take a moment to come

    return call


def killed(rig: Rig, cell: Cell, folder: Path, wanted: list[str]) -> str:
    log = folder / "log"
    log.unlink(missing_ok=True)
    start = rig.saved.read_bytes()
    code = forked(lambda: train(rig, cell, log))
    if code != -_SIGNALS[cell.fault]:
        return f"it ended with {code}"
    left = [n for place in (rig.spill, rig.states) for n in os.listdir(place)]
    left += [name for name in os.listdir(rig.saved.parent) if name != rig.saved.name]
    if left:
        return f"files are left: {left}"
    if forked(lambda: train(rig, None, log)):
        return "it did not resume"
    rig.saved.write_bytes(start)
    lines = log.read_text().splitlines()
    if lines[-1] != wanted[-1] or not set(lines) <= set(wanted):
        return f"losses {lines}; undisturbed {wanted}"
    return ""


def copied(rig: Rig, cell: Cell) -> str:
    """A fork in the middle of the phase; the child uses what it has, the parent goes on."""
    rig.resume(fresh=True)
    wanted = rig.step()
    rig.resume(fresh=True)
    codes: list[int] = []
    said = ""
    if cell.phase == "checkpoint":

        def fork_first(real: Callable[..., Any], *given: Any) -> Any:
            if not codes:
                codes.append(forked(lambda: None))
            return real(*given)

        with at_disk(rig, "checkpoint", fork_first):
            rig.checkpoint()
        rig.resume()
        found = rig.step()
    else:
        use = {
            "init": lambda: _trains(rig),
            "forward": lambda: _trains(rig),
            "backward": lambda: _refused(rig.backward, cell),
            "update": lambda: _refused(rig.optimizer.step, cell),
        }[cell.phase]
        if cell.phase == "init":
            close_all()
        if cell.phase in ("init", "forward"):
            codes.append(forked(use))
        rig.forward()
        assert rig.loss is not None
        loss = rig.loss.item()
        if cell.phase == "backward":
            codes.append(forked(use))
        rig.backward()
        if cell.phase == "update":
            codes.append(forked(use))
        rig.update()
        found = loss, tuple(p.detach().clone() for p in rig.model.parameters())
    if codes != [0]:
        said = f"the child ended with {codes}"
    elif not same(found, wanted):
        said = "the parent's numbers are wrong"
    rig.holds_nothing()
    return said


def _trains(rig: Rig) -> None:
    """Forward and backward, with a runtime of the child's own."""
    rig.forward()
    rig.backward()
    gradients = [p.grad for p in rig.model.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)


def _refused(use: Callable[[], object], cell: Cell) -> None:
    try:
        use()
    except OffloadError as error:
        assert re.search(cell.says, str(error)), error
    else:
        raise AssertionError("the child was let")


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    rig = Rig(folder / "rig")
    rig.step()
    rig.checkpoint()
    rig.step()
    close_all()
    cells = {cell.name: cell for cell in MATRIX}
    wrong: dict[str, str] = {}
    plain = folder / "plain"
    start = rig.saved.read_bytes()
    if forked(lambda: train(rig, None, plain)):
        raise SystemExit("the undisturbed run failed")
    rig.saved.write_bytes(start)
    for name in names:
        cell = cells[name]
        if cell.fault in _SIGNALS:
            said = killed(rig, cell, folder, plain.read_text().splitlines())
        else:
            said = copied(rig, cell)
            rig.saved.write_bytes(start)
            close_all()
        if said:
            wrong[name] = said
    print(json.dumps(wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
