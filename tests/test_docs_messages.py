"""Every message in docs/troubleshooting.md is what the code says: each heading has a producer."""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import offcompile
from offcompile import cost_cache, hardware, optim
from offcompile.ir import Infeasible, InvalidInput, OffloadError, Plan
from offcompile.options import Options

DOCUMENT = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
HEADINGS = re.findall(r"^### `(.+)`$", DOCUMENT.read_text(), re.M)
Producer = Callable[[Path, pytest.MonkeyPatch], str]
PRODUCERS: dict[str, Producer] = {}


def says(heading: str) -> Callable[[Producer], Producer]:
    def register(produce: Producer) -> Producer:
        assert heading not in PRODUCERS
        PRODUCERS[heading] = produce
        return produce

    return register


def told(call: Callable[[], Any], kind: type[Exception] = OffloadError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def warned(call: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(one.message) for one in found)


def test_each_heading_has_a_producer_and_each_producer_a_heading() -> None:
    assert len(HEADINGS) == len(set(HEADINGS)) > 40
    assert set(HEADINGS) == set(PRODUCERS)


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_message_is_what_is_said(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = PRODUCERS[heading](tmp_path, monkeypatch).replace("`memory`", "memory")
    pattern = ".+?".join(map(re.escape, heading.split("…")))
    assert re.search(pattern, said, re.S), said


# --- the budget -------------------------------------------------------------------------------


@says("The budget of … is below the floor of …: at … the device must hold …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    asked = {"memory": "10KiB", "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.1}
    step = torch.compile(nn.Linear(64, 64), backend="offcompile", options=asked)
    try:
        return told(lambda: step(torch.ones(64, 64)), Infeasible)
    finally:
        torch._dynamo.reset()


@says("is not enough for …, which needs …; the floor is …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_decide import FAST, MIB, chain, machine

    from offcompile.decide import decide

    given: Any = (chain(), machine(FAST), 12 * MIB, lambda _: 0, "weight_rotation", 1.0)
    return told(lambda: decide(*given), Infeasible)


@says("other graphs of this model hold …, which is the whole budget")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.planning import Planning

    survey = SimpleNamespace(
        options=Options.read({"memory": "1MiB"}), target=SimpleNamespace(device_bytes=1 << 30)
    )
    others: Any = SimpleNamespace(name="graph 1", survey=survey, held_bytes=2 << 20)
    return told(lambda: Planning.budget(others), Infeasible)


@says("asked of a device that has …; ask for that much or less")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: Options.read({"memory": "8GiB"}).memory_bytes(4 << 30), InvalidInput)


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.square().mean()


def largest(model: nn.Module) -> None:
    offcompile.max_batch(
        model,
        lambda batch: torch.empty(batch, 64, requires_grad=True),
        64,
        policy=None,
        hardware="cpu",
        options={"lowering": "aot_eager"},
    )


@says("a batch of … holds … at once and has …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: largest(Square()), Infeasible)


@says("The model could not be traced as one graph…: …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: largest(Broken()))


# --- options ----------------------------------------------------------------------------------


def refused(**given: object) -> str:
    return told(lambda: Options.read(given), InvalidInput)


@says("there is no option …; did you mean …?")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(memmory="8GiB")


@says("no such variable; did you mean …?")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: Options.read({}, {"OFFCOMPILE_MEMMORY": "8GiB"}), InvalidInput)


@says("is not a size; allowed: …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(memory=[8])


@says("is no fraction of the device; a fraction is more than 0 and at most 1")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(memory=8.0)


@says("mode=… is not for this backend; leave it out")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.backend import _compile

    nothing: Any = None
    return told(lambda: _compile(nothing, [], None, "max-autotune"), InvalidInput)


@says("plans by the policy of that name, not by …; leave out one of the two")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(gradient_reserve=0.4, policy="recompute")


@says("unknown policy …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return refused(policy="jiont")


@says("no profile is named …; the nearest is …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: hardware.load_profile("rtx4080"), InvalidInput)


@says("is no torch.nn.Module; give the module that would be compiled")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.ahead.plan import plan

    not_one: Any = len
    return told(lambda: plan(not_one, torch.ones(2)), InvalidInput)


@says("'OFFCOMPILE' is not a valid DynamoBackend")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from accelerate.utils import TorchDynamoPlugin

    return told(lambda: TorchDynamoPlugin(backend="offcompile"), ValueError)


# --- devices ----------------------------------------------------------------------------------


@says("This graph computes on …; offcompile moves tensors of the CPU and of CUDA devices so far")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.target import target_for

    return told(lambda: target_for(Options.read({}), torch.device("mps")))


@says("computes on … and has … on …; tensors can only move from one device of a graph")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_cuda_target import captured

    from offcompile.pipeline import _check_one_device

    return told(lambda: _check_one_device("graph 0", captured(), torch.device("cuda:1")))


@says("is asked for, and this process sees no CUDA device")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.cuda_facts import cuda_index

    patch.setattr(torch.cuda, "is_available", lambda: False)
    return told(lambda: cuda_index(torch.device("cuda")))


@says("There is no cuda:…: this process sees … CUDA devices")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.cuda_facts import cuda_index

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    return told(lambda: cuda_index(torch.device("cuda:3")))


@says("Host memory cannot be pinned: CUDA refused to register … bytes")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime import pinning

    patch.setattr(pinning, "_warned", {})
    return warned(lambda: pinning.warn_pageable(1 << 30, 2))


@says("weights can leave the CPU and CUDA devices so far")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    def build() -> None:
        with offcompile.host_init("mps"):
            nn.Linear(2, 2)

    return told(build)


# --- directories and disks --------------------------------------------------------------------


def checked(directory: Path) -> str:
    from offcompile.runtime.directories import check_directory

    return told(lambda: check_directory(directory))


@says("the spill directory … does not exist: create it, or …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return checked(place / "missing")


@says("the spill directory … is not a directory")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    (place / "file").write_text("")
    return checked(place / "file")


@says("is on …, which keeps files in RAM, so that moving tensors there frees nothing")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime import directories

    patch.setattr(directories, "filesystem_type", lambda path: "tmpfs")
    return checked(place)


@says("belongs to another user (uid …) and anyone may write to it")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime import directories

    place.chmod(0o777)
    patch.setattr(directories, "filesystem_type", lambda path: "ext4")
    patch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    return checked(place)


@says("is not writable (…): make it so, or …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime import directories

    def refuse(dir: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    patch.setattr(directories, "filesystem_type", lambda path: "ext4")
    patch.setattr(directories.tempfile, "TemporaryFile", refuse)
    return checked(place)


@says("no spill file can be made in …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.spill_file import open_unlinked

    return told(lambda: open_unlinked(place / "missing"))


@says("… bytes at … of the spill file in … failed (…): …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_checksums import PAGE, block
    from test_spill_faults import Disk, refusing

    from offcompile.runtime.spill import SpillStore

    store = SpillStore([place])
    extent = store.allocate(PAGE)
    disk = Disk([store], pwritev=refusing(errno.ENOSPC))
    try:
        return told(lambda: store.write(extent, 0, block(1).view))
    finally:
        disk.mend()
        store.release(extent)
        store.close()


@says("could not be copied out to …: …. The parameters were not touched by this copy")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.failures import failure

    slot: Any = SimpleNamespace(nbytes=4096, where=f"the disk tier at {place}")
    return str(failure(OSError(errno.EIO, "Input/output error"), "out", "layer 3", slot))


@says("pages read are not what was written there (their checksums differ)")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_checksums import PAGE, block, swap

    from offcompile.runtime.checksums import VerifiedStore

    store = VerifiedStore([place])
    extent = store.allocate(PAGE)
    store.write(extent, 0, block(1).view)
    swap(store, *store.ranges(extent, 0, PAGE))
    try:
        return told(lambda: store.read(extent, 0, block(1).view))
    finally:
        store.release(extent)
        store.close()


@says("a drive rated for … written lasts … at this rate, without a pause")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.drive_life import DriveWatch

    watch = DriveWatch(10**12)
    return warned(lambda: [watch.step_over(i * 10**10, i * 60.0) for i in range(3)])


@says("measurements cannot be kept in …: they are repeated in every process")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    (place / "file").write_text("")
    patch.setenv("OFFCOMPILE_CACHE_DIR", str(place / "file" / "below"))
    return warned(lambda: cost_cache.write_document("machine", {"cpu": "some"}, {"memory": 1.0}))


@says("The dump of … cannot be written to …: …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.dump import dump

    (place / "file").write_text("")
    nothing: Any = None
    return told(lambda: dump(place / "file", "graph 0", nothing))


@says("the operating system refused … bytes of …: lower memory")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.arena import Arena

    return told(lambda: Arena(0).block(1 << 60))


# --- while training ---------------------------------------------------------------------------


@says("takes … a step, … × the planned …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_trial import reported, step_of

    from offcompile import log, trial

    ms = 1_000_000
    said: list[str] = []
    patch.setattr(log, "_said", set())
    patch.setattr(trial, "warn", said.append)
    report = reported(step := step_of(30 * ms, 30 * ms))
    trial._warn_if_far(report, step, report.planned_us, "planned")
    return "\n".join(said)


@says("codecs run in NumPy, some twenty times slower than compiled code")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.codecs import engines

    def missing() -> None:
        raise RuntimeError("no C++ compiler")

    patch.setattr(engines, "Native", missing)
    engines._chosen.cache_clear()
    try:
        return warned(engines.engine)
    finally:
        engines._chosen.cache_clear()


@says("Tensors move unpacked, which takes longer: …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.cuda_packing import Packers

    streams = SimpleNamespace(why_not_pack=lambda in_place: "Triton is not installed")
    packing: Any = SimpleNamespace(streams=streams)
    return warned(lambda: Packers.codec(packing, "bitmask"))


@says("This tensor was moved by the parent process before fork()")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.mover import Mover

    parents: Any = SimpleNamespace(_pid=os.getpid() + 1)
    return told(lambda: Mover._enter(parents))


@says("Ticket … stands for …, not for a …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime import tickets
    from offcompile.runtime.mover import Saved

    return told(lambda: tickets.find(torch.tensor([1 << 60]), Saved))


@says("cannot be fetched: its … bytes do not lie on the host tier")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_runtime_weights import SIZE, fetch

    from offcompile.runtime.registry import RuntimeSettings

    key = RuntimeSettings(directories=(str(place),)).key
    return told(lambda: fetch(torch.ones(SIZE), key))


@says("and then got a second gradient in it, from outside of the compiled graph")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime import updates

    weight = nn.Parameter(torch.ones(2, 2))
    patch.setattr(updates, "_backward_pass", lambda: 7)
    updates._known(weight).taken_in = 7  # its gradient was taken, and `.grad` was None then
    weight.grad = torch.ones(2, 2)
    return told(lambda: updates.arrived(weight))


@says("made an unlawful plan: …. Please report this problem")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_decide import FAST, MIB, chain, machine

    from offcompile.ir import Drop
    from offcompile.planner import certify

    plan = Plan(drops=(Drop("no such tensor", "device", "no such op"),))
    return told(lambda: certify(chain(), machine(FAST)(12 * MIB), plan, "ours"))


# --- optimizers -------------------------------------------------------------------------------


def trained(**settings: Any) -> tuple[nn.Linear, optim.AdamW]:
    model = nn.Linear(4, 4)
    return model, optim.AdamW(model.parameters(), lr=1e-3, **settings)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


@says("got another gradient after it had been updated in this step")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    model, _ = trained(overlap=True)
    backward(model)
    return told(lambda: backward(model))


@says("step() was called without a gradient since the last one")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    model, optimizer = trained(overlap=True)
    backward(model)
    optimizer.step()
    return told(optimizer.step)


@says("zero_grad() was called between backward and step()")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    model, optimizer = trained(overlap=True)
    backward(model)
    return told(optimizer.zero_grad)


@says("A GradScaler cannot unscale gradients that were applied during backward")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    model, optimizer = trained(overlap=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    return told(lambda: scaler.step(optimizer))


@says("is sparse, which these optimizers do not support")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    table = nn.Embedding(4, 4, sparse=True)
    optimizer = optim.AdamW(table.parameters(), lr=1e-3)
    table(torch.tensor([1])).sum().backward()
    return told(optimizer.step)


@says("An optimizer with states on disk cannot be copied or pickled")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    import pickle

    model, optimizer = trained(states="disk", directory=place)
    backward(model)
    optimizer.step()
    return told(lambda: pickle.dumps(optimizer))


# --- saving and loading -----------------------------------------------------------------------


@says("offcompile.save needs a path, not …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    import io

    opened: Any = io.BytesIO()
    return told(lambda: offcompile.save({}, opened))


@says("saving … failed after … bytes (…): …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: offcompile.save({}, place / "missing" / "file.pt"))


@says("nothing was loaded from …:")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    torch.save({"weight": torch.ones(3, 3)}, place / "w.pt")
    return told(lambda: offcompile.load_weights(nn.Linear(4, 4), place / "w.pt"))


@says("has no weights: no .safetensors, .bin, .pt or .pth file")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: offcompile.load_weights(nn.Linear(4, 4), place))


@says("is not a state_dict: …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    torch.save({"model": {"weight": torch.ones(3, 3)}}, place / "w.pt")
    return told(lambda: offcompile.load_weights(nn.Linear(4, 4), place / "w.pt"))
