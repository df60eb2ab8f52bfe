"""Messages on what happens: training, optimizers, files of weights, `verify`."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doc_messages import says, told, warned
from torch import nn

import offcompile
from offcompile import optim
from offcompile.ir import InvalidInput, Plan

# --- while training ------------------------------------------------------------------------------


@says("takes … a step, … × the …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_trial import reported, step_of

    from offcompile.run import trial
    from offcompile.runtime.base import once

    ms = 1_000_000
    said: list[str] = []
    patch.setattr(once, "_done", {})
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
    from offcompile.runtime.device.cuda.packing import Packers

    streams = SimpleNamespace(why_not_pack=lambda in_place: "Triton is not installed")
    packing: Any = SimpleNamespace(streams=streams)
    return warned(lambda: Packers.codec(packing, "bitmask"))


@says("a step took … more than the budget, for libraries' workspaces or for values that …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.run.variants import judging

    said: list[str] = []
    patch.setattr(judging, "warn", said.append)
    runs = SimpleNamespace(name="graph 0", budget_bytes=1 << 30, over_bytes=3 << 20)
    plans: Any = SimpleNamespace(
        facts=SimpleNamespace(runs=runs, profile=None),
        agreement=SimpleNamespace(planned_together=True),
        lacking_bytes=0,
    )
    unused: Any = None
    judging._within_budget(plans, unused, unused)
    assert "(3.00 MiB) more" in said[0] and "(1021.00 MiB)" in said[0]
    return said[0]


@says("between forward and backward the program itself held …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.planning.footprint import Footprint
    from offcompile.run.plan.contract import USUAL
    from offcompile.run.variants import judging

    said: list[str] = []
    patch.setattr(judging, "warn", said.append)
    entry = SimpleNamespace(in_turn=False)
    plans: Any = SimpleNamespace(
        facts=SimpleNamespace(
            runs=SimpleNamespace(name="graph 0", budget_bytes=64 << 20, entry=entry), profile=None
        ),
        agreement=SimpleNamespace(planned_together=True),
        outside_bytes=0,
        in_vain=set(),
        held=lambda call: 0,
    )
    needs = Footprint(standing_bytes=8 << 20, peak_bytes=60 << 20, kept_bytes=40 << 20)
    variant: Any = SimpleNamespace(kind=USUAL, needs_at=lambda sizes: needs)
    peaks = SimpleNamespace(most_bytes=lambda place: 24 << 20, times=lambda place: 4)
    call: Any = SimpleNamespace(sizes=(), parameters=SimpleNamespace(gap_peaks=peaks))
    assert judging._with_room_outside(plans, variant, call) is variant
    assert judging._with_room_outside(plans, variant, call) is variant
    (told_once,) = said
    assert "held 25,165,824 bytes (24.00 MiB)" in told_once and "(72.00 MiB)" in told_once
    return told_once


@says("This tensor was moved by the parent process before fork()")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.moves.mover import Mover

    parents: Any = SimpleNamespace(_pid=os.getpid() + 1)
    return told(lambda: Mover._enter(parents))


@says("Ticket … stands for …, not for a …")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.device import tickets
    from offcompile.runtime.moves.saved import Saved

    return told(lambda: tickets.find(torch.tensor([1 << 60]), Saved))


@says("cannot be fetched: its … bytes do not lie on the host tier")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_runtime_weights import SIZE, fetch

    from offcompile.runtime.moves.registry import RuntimeSettings

    key = RuntimeSettings(directories=(str(place),)).key
    return told(lambda: fetch(torch.ones(SIZE), key))


@says("and then got a second gradient in it, from outside of the compiled graph")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.runtime.states import updates

    weight = nn.Parameter(torch.ones(2, 2))
    patch.setattr(updates, "_backward_pass", lambda: 7)
    updates._known(weight).taken_in = 7  # its gradient was taken, and `.grad` was None then
    weight.grad = torch.ones(2, 2)
    return told(lambda: updates.arrived(weight))


@says("made an unlawful plan: …. Please report this problem")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from test_decide import FAST, MIB, chain, machine

    from offcompile.ir import Drop
    from offcompile.planning.planner import certify

    plan = Plan(drops=(Drop("no such tensor", "device", "no such op"),))
    return told(lambda: certify(chain(), machine(FAST)(12 * MIB), plan, "ours"))


# --- optimizers ----------------------------------------------------------------------------------


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


@says("The last step() ended amid its updates")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    model, optimizer = trained(states="device")
    backward(model)

    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    patch.setattr(torch.autograd.graph, "increment_version", interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    return told(optimizer.step)


@says("is sparse, which these optimizers do not support")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    table = nn.Embedding(4, 4, sparse=True)
    optimizer = optim.AdamW(table.parameters(), lr=1e-3)
    table(torch.tensor([1])).sum().backward()
    return told(optimizer.step)


@says("there are no ranks yet")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    return told(lambda: trained(sharded=True), InvalidInput)


@says("An optimizer with states on disk cannot be copied or pickled")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    import pickle

    model, optimizer = trained(states="disk", directory=place)
    backward(model)
    optimizer.step()
    return told(lambda: pickle.dumps(optimizer))


# --- saving and loading --------------------------------------------------------------------------


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


# --- weights that others hold --------------------------------------------------------------------


@says("weights that stay on the device: … (its memory is also that of …)")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.run.accounts import fixed_weights

    said: list[str] = []
    patch.setattr(fixed_weights, "warn", said.append)
    weight = nn.Parameter(torch.ones(4))
    view = weight.detach()
    found = fixed_weights.FixedWeights("graph 0", {0: "up.weight"})
    found.look([weight], [0])
    found.tell()
    assert view.sum() == 4
    return said[0]


@says("A size of this graph, …, rests on …, which none of its arguments tells")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from offcompile.graph.sizes import SizeMaker

    env = ShapeEnv()
    size = env.create_unbacked_symint()
    return told(lambda: SizeMaker(torch.fx.Graph()).node(size + 1))


# --- verify=True ---------------------------------------------------------------------------------


@says("does not give what the plain run gives:")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from captured import capture

    from offcompile.report.verified import Verified
    from offcompile.run import verifying

    said: list[str] = []
    patch.setattr(verifying, "warn", said.append)
    (graphs,) = capture(lambda x: x * 2, torch.ones(3))
    cpu = torch.device("cpu")
    one = verifying.Verifying("graph 0", graphs, cpu, Verified(exact=True), lambda *_: "")
    one.begin("inference", [torch.ones(3)])([torch.ones(3)])
    return said[0]


@says("torch.compile with aot_autograd does not currently support double backward")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    x = torch.ones(2, 4, requires_grad=True)
    options = {"lowering": "aot_eager", "hardware": "cpu"}
    torch._dynamo.reset()
    model = torch.compile(nn.Linear(4, 4), backend="offcompile", options=options)
    loss = model(x).square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return told(lambda: slope.sum().backward(), RuntimeError)


@says("steps of … have changed other weights and not these, … it writes elsewhere")
def _(place: Path, patch: pytest.MonkeyPatch) -> str:
    from offcompile.run.accounts import wall

    class Elsewhere(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            gradient, hosted.grad = hosted.grad, None
            super().step()
            hosted.grad = gradient

    hosted, other = (nn.Parameter(torch.ones(8)) for _ in range(2))
    optimizer = Elsewhere([hosted, other], 0.1)
    found: list[str] = []
    watch = wall.Watch({0: "fc.weight"}, found.append)
    for _step in range(wall.STRIKES + 1):
        watch.look([hosted, other], [0, 1], [0])
        (hosted.sum() + other.sum()).backward()
        optimizer.step()
    wall.hooks.watches.discard(watch)
    wall.hooks.take_away()
    return "\n".join(found)
