"""One of two ranks whose measured steps are made up, so that rank 0 finds another plan for all.

`python rank_ballot_child.py RANK STORE CASES` prints a line of JSON per case: how the model is
wrapped, what each rank sees (`ops` that are four times as fast as their costs, `lanes` that are
four times as slow as they were measured, or nothing), and the budget of each rank. Rank 1 computes
and copies at half the speed of rank 0.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from weights_runs import seeded

import offcompile
from offcompile.graph.costs import op_costs
from offcompile.ir import BACKWARD, COMPUTE, FORWARD
from offcompile.ir.jsonio import plan_to_json
from offcompile.machine import target
from offcompile.machine.hardware import HardwareProfile
from offcompile.planning.feedback import profiling
from offcompile.planning.feedback.measured import MeasuredSpan, MeasuredStep
from offcompile.report.report import PlanReport
from offcompile.run import trial
from offcompile.run.plan import together
from offcompile.run.step_recorder import StepRecorder
from offcompile.run.variants import judging
from offcompile.runtime.device.lane_rates import Moved

WORLD, STEPS, TIMES = 2, 10, 4
WIDTH, ROWS = 64, 2048
COMPUTES, COPIES = (0.02, 0.01), (0.5, 0.25)
OPTIONS = {
    "lowering": "aot_eager",
    "policy": "joint:evaluations=1,seconds=20",
    "seconds": 0.1,
}


def made_up(rank: int) -> HardwareProfile:
    """A machine whose ops are not measured, so that no plan depends on the one that runs this."""
    gbps, figures = COPIES[rank], {"fp32": COMPUTES[rank]}
    return HardwareProfile(
        "cpu", "cpu", None, 10.0, gbps, gbps, "made up", figures, latency_us=100.0
    )


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def trained(wrap: str, memory: str | None, rank: int) -> tuple[list[Tensor], list[int]]:
    """Losses, and weights at the end; the number of plans after each step."""
    torch._dynamo.reset()
    how: dict[str, Any] = {"backend": "aot_eager"}
    if memory is not None:
        how = {"backend": "offcompile", "options": {"memory": memory, **OPTIONS}}
    model: Any = seeded(Layers)
    if wrap == "ddp":
        forward: Any = DistributedDataParallel(torch.compile(model, **how))
    else:
        forward = fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        forward.compile(**how)
    optimizer, seen = torch.optim.AdamW(model.parameters(), 1e-2, fused=True), []
    known, planned = len(offcompile.reports()), []
    for step in range(STEPS):
        mine = torch.Generator().manual_seed(100 * step + rank)
        loss = forward(torch.randn(ROWS, WIDTH, generator=mine))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
        planned.append(len(offcompile.reports()) - known)
    whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())
    return [*seen, *(p.detach().clone() for p in whole)], planned


class Seen:
    """Shows a rank made-up times of its ops and lanes."""

    def __init__(self, what: str | None, rank: int) -> None:
        self.what, self.rank, self.looks = what, rank, 0

    def median(self, recorder: StepRecorder) -> MeasuredStep:
        # plans are made for rank 1
        (report,) = [r for r in offcompile.reports() if r.running.steps is recorder]
        own, first = COMPUTES[self.rank] / COMPUTES[1], ", plan " not in report.name
        return step_of(report, own * (TIMES if self.what == "ops" and first else 1))

    def lanes_moved(self, key: str) -> dict[str, Moved]:
        self.looks += 1
        bytes_per_us = 1000 * COPIES[self.rank] / (TIMES if self.what == "lanes" else 1)
        busy_us = (self.looks << 30) / bytes_per_us + 64 * self.looks * 100.0
        moved = Moved(64 * self.looks, self.looks << 30, round(1000 * busy_us))
        return {"h2d": moved, "d2h": moved}


def step_of(report: PlanReport, faster: float) -> MeasuredStep:
    """A step whose ops are so many times as fast as planned."""
    us = {FORWARD: 0.0, BACKWARD: 0.0}
    for op in report.problem.ops:
        us[op.phase] += op.duration_us
    us[BACKWARD] += sum(report.problem.op[r.op].duration_us for r in report.plan.recomputes)
    turn = round(1000 * us[FORWARD] / faster)
    end = turn + round(1000 * us[BACKWARD] / faster)
    spans = (
        MeasuredSpan(FORWARD, COMPUTE, 0, turn),
        MeasuredSpan(BACKWARD, COMPUTE, turn, end),
    )
    return MeasuredStep(spans, (), end)


def found(wrap: str, saw: list[str | None], memories: list[str], rank: int) -> dict[str, Any]:
    expected, _ = trained(wrap, None, rank)
    known, seen, said = len(offcompile.reports()), Seen(saw[rank], rank), []
    with ExitStack() as stack:
        for where, name, value in (
            (target, "_measured", lambda directories, progress: made_up(rank)),
            (op_costs, "WORTH_MEASURING_US", float("inf")),
            (trial, "LEAST_STEP_NS", 0),
            (trial, "STEPS_BEFORE", 3),
            (profiling, "WATCH_EVERY", 2),
            (StepRecorder, "median", lambda recorder: seen.median(recorder)),
            (judging, "lanes_moved", seen.lanes_moved),
            (together, "warn", said.append),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        searching = mock.Mock(side_effect=together.best_candidate)
        stack.enter_context(mock.patch.object(together, "best_candidate", searching))
        values, planned = trained(wrap, memories[rank], rank)
    reports = offcompile.reports()[known:]
    return {
        "equal": len(values) == len(expected) and all(map(torch.equal, values, expected)),
        "planned": planned,
        "plans": [plan_to_json(r.plan) for r in reports],
        "durations": [[op.duration_us for op in r.problem.ops] for r in reports],
        "rates": [[lane.bytes_per_us for lane in r.machine.lanes] for r in reports],
        "searched": searching.call_count,
        "profile": reports[-1].profile.said if reports else None,
        "said": said,
    }


def main() -> None:
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], WORLD)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for wrap, saw, memories in json.loads(sys.argv[3]):
        print(json.dumps(found(wrap, saw, memories, rank)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
