"""Optimizers whose states are on disk: torch's numbers, also after a kill, in little memory."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import warm

import offcompile
from offcompile.ir import OffloadError
from offcompile.optim import SGD, Adam, AdamW
from offcompile.optim import state_placement as places
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.states.disk_states import DiskFacts, DiskStates

pytestmark = pytest.mark.usefixtures("on_a_disk")

BLOCK = 32768
HERE = Path(__file__).parents[1] / "support"

Kinds = tuple[type[torch.optim.Optimizer], Callable[..., torch.optim.Optimizer], dict[str, Any]]
KINDS: dict[str, Kinds] = {
    "AdamW": (torch.optim.AdamW, AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW amsgrad": (torch.optim.AdamW, AdamW, {"lr": 0.01, "amsgrad": True}),
    "Adam": (torch.optim.Adam, Adam, {"lr": 0.01, "betas": (0.8, 0.9)}),
    "SGD": (torch.optim.SGD, SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(DiskStates, block_bytes=2 * BLOCK, buffers=3, small_bytes=100)
    monkeypatch.setattr(places, "DiskStates", small)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 192), torch.nn.GELU(), torch.nn.Linear(192, 96, bias=False)]
    return torch.nn.Sequential(*layers)


def groups(net: torch.nn.Module) -> list[dict[str, Any]]:
    first, *others = net.parameters()
    return [{"params": [first]}, {"params": others, "lr": 0.005, "weight_decay": 0.0}]


def steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list:
    losses = []
    for step in range(first, last):
        data = torch.randn(8, 96, generator=torch.Generator().manual_seed(step))
        loss = (net(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kept", [0, 3 * BLOCK])
def test_ten_steps_equal_torch(kind: str, overlap: bool, kept: int, tmp_path: Path) -> None:
    torchs, ours, given = KINDS[kind]
    a, b = model(), model()
    plain = torchs(groups(a), fused=True, **given)
    disk = ours(
        groups(b), states="disk", directory=tmp_path, host_memory=kept, overlap=overlap, **given
    )
    assert steps(a, plain, 0, 10) == steps(b, disk, 0, 10)
    assert same(a, b)
    disk.settle()  # type: ignore[attr-defined]
    facts = disk.facts().stores["disk"]  # type: ignore[attr-defined]
    assert isinstance(facts, DiskFacts)
    assert facts.bytes_read > 0 and facts.bytes_written > 0
    assert facts.peak_frame_bytes <= 6 * BLOCK + kept
    if kept:  # which step a write belongs to depends on the lanes; how many there are does not
        assert facts.bytes_written < 10 * facts.disk_bytes


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("kind", KINDS)
def test_torch_and_disk_take_over_from_each_other(kind: str, tmp_path: Path) -> None:
    torchs, ours, given = KINDS[kind]
    a, b = model(), model()
    plain = torchs(groups(a), fused=True, **given)
    wanted = steps(a, plain, 0, 9)
    first = torchs(groups(b), fused=True, **given)
    found = steps(b, first, 0, 3)
    second = ours(groups(b), states="disk", directory=tmp_path, **given)
    second.load_state_dict(first.state_dict())
    found += steps(b, second, 3, 6)
    third = torchs(groups(b), fused=True, **given)
    third.load_state_dict(second.state_dict())
    found += steps(b, third, 6, 9)
    assert found == wanted and same(a, b)


@pytest.mark.usefixtures("tiny_blocks")
def test_a_state_dict_is_of_its_moment(tmp_path: Path) -> None:
    net = model()
    optimizer = AdamW(net.parameters(), lr=0.01, states="disk", directory=tmp_path)
    steps(net, optimizer, 0, 2)
    taken = optimizer.state_dict()["state"]
    copied = {k: {n: t.clone() for n, t in s.items()} for k, s in taken.items()}
    offcompile.save(taken, tmp_path / "states.pt")
    steps(net, optimizer, 2, 4)
    for key, states in copied.items():
        assert all(torch.equal(taken[key][name], t) for name, t in states.items() if name != "step")
    loaded = torch.load(tmp_path / "states.pt")
    assert torch.equal(loaded[0]["exp_avg"], copied[0]["exp_avg"])


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_disk_that_fails_is_an_error_and_the_checkpoint_goes_on(
    overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = False

    def read(descriptor: int, views: Sequence[memoryview], at: int) -> int:
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, views, at)

    broken = partial(places.DiskStates, files=Files(preadv=read))
    a, b = model(), model()
    wanted = steps(a, torch.optim.AdamW(a.parameters(), fused=True), 0, 6)
    with monkeypatch.context() as patch:
        patch.setattr(places, "DiskStates", broken)
        first = AdamW(b.parameters(), states="disk", directory=tmp_path, overlap=overlap)
        # the store is made at the first step
        found = steps(b, first, 0, 3)
    saved = {"model": b.state_dict(), "optimizer": first.state_dict()}
    offcompile.save(saved, tmp_path / "checkpoint.pt")
    fails = True
    with pytest.raises(OffloadError, match=r"reading .*EIO.*check that disk"):
        for _ in range(2):
            steps(b, first, 3, 4)
    loaded = torch.load(tmp_path / "checkpoint.pt")
    c = model()
    second = AdamW(c.parameters(), states="disk", directory=tmp_path, overlap=overlap)
    c.load_state_dict(loaded["model"])
    second.load_state_dict(loaded["optimizer"])
    assert found + steps(c, second, 3, 6) == wanted
    assert same(a, c)


def child(name: str, folder: Path, *words: str) -> str:
    done = warm.run(
        [sys.executable, str(HERE / name), str(folder), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("which", "kills"), [("few", 5), pytest.param("all", 22, marks=pytest.mark.soak)]
)
def test_after_a_kill_at_any_moment_the_last_checkpoint_resumes_to_the_same_losses(
    which: str, kills: int, tmp_path: Path
) -> None:
    found = json.loads(child("optim_disk_child.py", tmp_path, which))
    # killed with the file beside, whole: the next save of that name clears it away
    assert all(name.startswith(".save-name") for name in found["left"])
    for overlap in (False, True):
        wanted = found["runs"][f"-0-{overlap}"]
        assert wanted["codes"] == [0]
        assert len(wanted["log"]) == 9 and wanted["log"][-1].startswith("end ")
        assert wanted["log"] == found["runs"]["-0-False"]["log"]
    resumed = 0
    for name, run in found["runs"].items():
        if not name.startswith("-"):
            assert run["codes"] == [-signal.SIGKILL, 0], name
            # the steps before and after the kill are part of one and the same run
            assert set(run["log"]) == set(wanted["log"]), name
            # some steps were made twice
            assert len(run["log"]) > len(wanted["log"]) or name.startswith("save"), name
            resumed += run["had_checkpoint"]
    assert len(found["runs"]) == 2 + kills
    assert kills // 3 < resumed < kills


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_checkpoints_take_no_memory_of_the_size_of_the_states(tmp_path: Path) -> None:
    told = child("optim_disk_bounded_child.py", tmp_path).split()
    assert told[0] == "limited"
    # 0.5 averaged over three steps
    assert float(told[1]) == pytest.approx(0.5 * (1 - 0.9**3))
