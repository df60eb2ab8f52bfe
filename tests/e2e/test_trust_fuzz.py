"""Hostile files, links, folders and names do no harm, and nothing of the model's data is told."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from trust import bombs, fuzz
from trust.hostile import NAMES

import offcompile
from offcompile.ir import OffloadError
from offcompile.machine import cost_cache
from offcompile.report.page import page
from offcompile.runtime.device.mapped import MappedFile
from offcompile.runtime.disk import spill_file

ROOT = Path(__file__).parents[2]
IDENTITY: cost_cache.Identity = {"machine": "m"}
ANOTHER_UID = 54_321


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it belong to another user, or us be another."""
    if os.geteuid() == 0:
        os.chown(path, ANOTHER_UID, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_UID)


# --- hostile files -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_hostile_files_are_refused_or_valid(folder: Path) -> None:
    row = fuzz.read_hostile(1_500, 0, folder)
    assert row.holds
    assert int(dict(row.figures)["refused"].replace(",", "")) > 1_000


def test_hostile_command_lines_are_answered(folder: Path) -> None:
    assert fuzz.call_hostile(100, 0, folder).holds


@pytest.mark.long
def test_files_made_to_exhaust_a_reader_are_refused_within_bounds(folder: Path) -> None:
    assert bombs.defuse(folder) == []


def test_no_name_steers_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem, plan = (
        Path(fuzz.TINY).with_name(n).read_text() for n in ("tiny.json", "tiny.plan.json")
    )
    names = [n for n in NAMES if n and n.isprintable() is False and n != "\ud800"]
    assert len(names) >= 7
    for name in names:
        for file, text in (("p.json", problem), ("plan.json", plan)):
            (tmp_path / file).write_text(text.replace('"w0"', json.dumps(name)))
        files = ["--problem", str(tmp_path / "p.json"), "--machine", fuzz.MACHINE]
        assert fuzz.called(["plan", *files, "--seconds", "0"]) == "valid"
        assert fuzz.called(["check", *files, "--plan", str(tmp_path / "plan.json")]) == "valid"


# --- spill files and checkpoints ---------------------------------------------------------------


def test_spill_files_have_no_name_and_are_ours_alone(tmp_path: Path) -> None:
    store = offcompile.runtime.disk.spill.SpillStore([tmp_path])
    mapped = MappedFile(tmp_path, 4096)
    for descriptor in (*store.descriptors, mapped._descriptor):
        told = os.fstat(descriptor)
        assert (told.st_nlink, stat.S_IMODE(told.st_mode)) == (0, 0o600)
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_a_planted_link_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".offcompile-planted").symlink_to(victim)
    names = iter(["planted", "free"])
    monkeypatch.setattr(tempfile, "_get_candidate_names", lambda: names)
    monkeypatch.setattr(spill_file, "_O_TMPFILE", 0)  # a file system without files without a name
    descriptor = spill_file.open_unlinked(tmp_path)
    os.write(descriptor, b"spilled")
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)
    assert victim.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".offcompile-planted", "victim"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes what belongs to different users")
def test_nothing_is_saved_through_the_link_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    victim.write_text("precious")
    link = shared / "model.pt"
    link.symlink_to(victim)
    offcompile.save({"a": 1}, link)  # our own
    assert torch.load(victim) == {"a": 1}
    give_away(link, monkeypatch)
    with pytest.raises(OffloadError, match=r"model\.pt is a link of another user \(uid 54321\)"):
        offcompile.save({"a": 2}, link)
    assert torch.load(victim) == {"a": 1}


def test_what_lies_where_parts_lie_holds_no_save_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.mkfifo(tmp_path / ".model.pt.00000000.part")
    (tmp_path / ".model.pt.00000001.part").symlink_to(victim)
    offcompile.save({"a": 1}, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt") == {"a": 1}
    assert victim.read_text() == "precious"


def test_a_checkpoint_goes_by_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        offcompile.save({"a": 1}, tmp_path / "model.pt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.pt").stat().st_mode) == 0o600


# --- measurements ------------------------------------------------------------------------------


def test_measurements_that_others_could_have_written_count_as_absent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> bool:
        return cost_cache.read_document("costs", IDENTITY) is not None

    path = cost_cache.document_path("costs", IDENTITY)
    assert cost_cache.write_document("costs", IDENTITY, {"ops": []})
    assert kept()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for mode in (0o620, 0o602):
        path.chmod(mode)
        assert not kept()
    path.chmod(0o644)
    assert kept()
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")
    assert not kept()
    assert cost_cache.write_document("costs", IDENTITY, {"ops": []})  # in the link's place
    assert kept()
    give_away(path, monkeypatch)
    assert not kept()


# --- code and data -----------------------------------------------------------------------------

#: reads only what a process that it has forked itself sends through an unnamed pipe
_FROM_OURSELVES = {"processes.py": ["pickle"]}
#: they run what they read
_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml"}


def dangers(tree: ast.AST) -> Iterator[str]:
    """Uses of what runs the data that it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            yield from (n for n in names if n.split(".")[0] in _MODULES)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            safe = any(
                k.arg == "weights_only" and getattr(k.value, "value", None) is True
                for k in node.keywords
            )
            if called in ("eval", "exec") or (called == "torch.load" and not safe):
                yield called


def test_nothing_that_is_read_is_run() -> None:
    files = [f for top in ("offcompile", "passes", "runtime") for f in (ROOT / top).rglob("*.py")]
    assert len(files) > 200
    found = {f.name: uses for f in files if (uses := [*dangers(ast.parse(f.read_text()))])}
    assert found == _FROM_OURSELVES
    spotted = "import pickle\nfrom yaml import load\neval(x)\ntorch.load(f)\n"
    assert len([*dangers(ast.parse(spotted))]) == 4


class Marked(nn.Module):
    """Weights of one value that nobody mistakes, in layers of hostile names."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("<script>alert(1)</script>", '"><img src=x>', "x]];evil"):
            layer = nn.Linear(64, 64)
            for parameter in layer.parameters():
                nn.init.constant_(parameter, 6.7812345e-17)
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = x + torch.relu(layer(x))
        return x.square().mean()


def test_no_value_of_the_model_is_told_and_no_name_is_taken_for_markup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    told = tmp_path / "told"
    options = {"memory": "minimum", "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}
    options |= {"spill": str(tmp_path), "dump": str(told)}
    with caplog.at_level(logging.DEBUG, "offcompile"):
        model = torch.compile(Marked(), backend="offcompile", options=options)
        x = torch.full((512, 64), 3.4598765e-13)
        for _ in range(2):
            model(x).backward()
    report = offcompile.reports()[-1]
    assert offcompile.counters()["bytes_out"] > 0
    report.save_trace(told / "trace.json")
    text = page([report])
    (told / "page.html").write_text(text)
    (told / "log").write_text(caplog.text + "".join(capfd.readouterr()))
    (told / "report.json").write_text(json.dumps(report.to_json()))
    files = [f for f in told.rglob("*") if f.is_file()]
    assert len(files) > 10
    assert "plan" in caplog.text
    for file in files:
        assert not re.search(r"6\.781|3\.4598|e-17|e-13", file.read_text()), file.name
        if file.suffix == ".svg":
            assert "script" not in {e.tag for e in ElementTree.parse(file).iter()}
        if file.suffix in (".svg", ".html"):
            assert "<script>alert" not in file.read_text()
            assert "<img" not in file.read_text()
    assert any("script" in file.read_text() for file in files if file.suffix == ".txt")
