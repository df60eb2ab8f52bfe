"""One of several ranks whose gradients are reduced inside backward, in place of DDP.

`python rank_reduction_child.py RANK STORE ASKED` prints a line of JSON per case; ASKED is
JSON, too: the number of ranks, and names of cases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_cases import run_cases
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from weights_runs import seeded

import offcompile
from offcompile.ir import OffloadError
from offcompile.optim import AdamW
from offcompile.report.page.data import report_data
from offcompile.run.ranks import neighbourhood
from offcompile.run.running_step import RunningHalf
from offcompile.run.step_recorder import StepRecorder
from offcompile.runtime.base.counters import counters
from offcompile.runtime.moves.registry import runtimes
from offcompile.runtime.ranks.buckets import Bucket
from offcompile.runtime.ranks.gradient_reducer import GradientReducer
from offcompile.runtime.ranks.neighbours import Neighbours

WIDTH, DEPTH, STEPS = 192, 2, 3
AMPLE, MIDDLING, MINIMUM = "1GiB", "9MiB", "minimum"
OPTIONS = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        # without a bias, the gradient of the weight is made before that of the input
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """The head comes first: its gradient is made first, and its bucket is sent last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor, uses_head: bool = True) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone() if uses_head else x.clone()


class Watched:
    """Counts what reducers do until it is closed."""

    def __init__(self) -> None:
        self.most_bytes = self.sent_inside = self.sent = 0
        self._inside = False
        self._kept = GradientReducer._give_memory, GradientReducer._send, RunningHalf.__call__
        give, send, run = self._kept

        def give_memory(reducer: GradientReducer, bucket: Bucket) -> None:
            give(reducer, bucket)
            held = sum(b.nbytes for b in reducer.buckets if b.memory is not None)
            self.most_bytes = max(self.most_bytes, held)

        def sends(reducer: GradientReducer, bucket: Bucket) -> None:
            send(reducer, bucket)
            self.sent += 1
            self.sent_inside += self._inside

        def runs(half: RunningHalf, arguments: list[Any]) -> Any:
            self._inside = half.phase == "backward"
            try:
                return run(half, arguments)
            finally:
                self._inside = False

        self._set(give_memory, sends, runs)

    def _set(self, give: Any, send: Any, run: Any) -> None:
        GradientReducer._give_memory, GradientReducer._send = give, send
        RunningHalf.__call__ = run

    def close(self) -> dict[str, int]:
        self._set(*self._kept)
        return {k: v for k, v in vars(self).items() if not k.startswith("_")}


def compiled(model: nn.Module, memory: str | None) -> Any:
    if memory is None:
        return torch.compile(model, backend="aot_eager")
    return torch.compile(model, backend="offcompile", options={"memory": memory, **OPTIONS})


def batch(step: int) -> Tensor:
    mine = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(64, WIDTH, generator=mine)


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of all losses, and of the weights at the end."""
    seen = []
    for step in range(STEPS):
        loss = ddp(batch(step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    values = [*seen, *(p.detach() for p in ddp.parameters())]
    bits = b"".join(v.contiguous().numpy().tobytes() for v in values)
    return hashlib.sha256(bits).hexdigest()


def run(memory: str | None, ours: bool = False, hook: bool = False, **settings: Any) -> Any:
    torch._dynamo.reset()
    model = seeded(Stack)
    ddp = DistributedDataParallel(compiled(model, memory), **settings)
    if hook:
        ddp.register_comm_hook(None, allreduce_hook)
    make = torch.optim.AdamW if not ours else AdamW
    how = {"overlap": True} if ours else {"fused": True}
    optimizer = make(model.parameters(), 1e-2, **how)
    return train(ddp, optimizer), ddp, optimizer


@cache
def plain_digest() -> str:
    return str(run(None)[0])


def overlap() -> dict[str, Any]:
    """Updates during backward, at each budget."""
    found: dict[str, Any] = {}
    plain = plain_digest()
    for memory in (AMPLE, MIDDLING, MINIMUM):
        watched, sent_bytes = Watched(), counters()["bytes_out"]
        digest, ddp, optimizer = run(memory, ours=True, bucket_cap_mb=1)
        found[memory] = watched.close() | {
            "equal": digest == plain,
            "moved_bytes": counters()["bytes_out"] - sent_bytes,
            "limit_bytes": ddp.reducer.held_bytes(),
            "exchange": exchange(ddp),
            "in_backward": optimizer.facts().updated_in_backward,
            "from_graphs": optimizer.facts().taken_from_graphs,
        }
    return found


def graphs() -> int:
    """How many graphs were compiled so far: names of later plans begin with their graph's."""
    return len({report.name.partition(",")[0] for report in offcompile.reports()})


def any_optimizer() -> dict[str, Any]:
    """Updates of torch's optimizer, after backward, at each budget."""
    found: dict[str, Any] = {}
    for memory in (AMPLE, MIDDLING, MINIMUM):
        watched, known = Watched(), graphs()
        digest, ddp, _ = run(memory, bucket_cap_mb=1)
        result = {"limit_bytes": ddp.reducer.held_bytes(), "graphs": graphs() - known}
        found[memory] = watched.close() | result | {"equal": digest == plain_digest()}
    return found


def _accumulated(memory: str | None, hooked: bool, sets_to_none: bool) -> tuple[list[float], str]:
    """Train on three batches a step, of which the last alone is reduced. `hooked`: a hook looks at
    the gradient of a large weight. Returns what it has seen, and a digest of the weights."""
    torch._dynamo.reset()
    model = seeded(Stack)
    ddp = DistributedDataParallel(compiled(model, memory), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    seen: list[float] = []

    def look(weight: Tensor) -> None:
        assert weight.grad is not None
        seen.append(float(weight.grad.double().sum()))

    if hooked:
        model.blocks[0].up.weight.register_post_accumulate_grad_hook(look)
    for step in range(STEPS):
        for part in range(3):
            with ddp.no_sync() if part < 2 else nullcontext():
                ddp(batch(3 * step + part)).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=sets_to_none)
    bits = b"".join(p.detach().contiguous().numpy().tobytes() for p in model.parameters())
    return seen, hashlib.sha256(bits).hexdigest()


def accumulates() -> dict[str, Any]:
    """Gradients of several batches, whose sum is reduced while the last of them is computed."""
    found: dict[str, Any] = {}
    for hooked, sets_to_none in ((False, True), (False, False), (True, True)):
        plain = _accumulated(None, hooked, sets_to_none)
        for memory in (AMPLE, MIDDLING):
            watched = Watched()
            equal = _accumulated(memory, hooked, sets_to_none) == plain
            name = f"{memory}, {hooked}, {sets_to_none}"
            found[name] = watched.close() | {"equal": equal, "hooked": hooked}
    return found


def plans_differ() -> dict[str, Any]:
    """Each rank has a budget, and so a plan, of its own."""
    plain = plain_digest()
    mine = [MINIMUM, AMPLE, MIDDLING, MINIMUM][dist.get_rank()]
    return {"equal": [run(mine, ours=ours)[0] == plain for ours in (False, True)]}


def budgets() -> dict[str, Any]:
    """The bits of every budget; where there are more than two ranks, DDP's may be others."""
    digests = {run(memory, ours=ours)[0] for memory in (AMPLE, MINIMUM) for ours in (False, True)}
    return {"different": len(digests)}


def falls_back() -> dict[str, Any]:
    """One rank has a communication hook: all leave the gradients to DDP."""
    plain, known = plain_digest(), graphs()
    digest, ddp, _ = run(MIDDLING, hook=dist.get_rank() == 1)
    done = type(ddp.reducer).__name__, graphs() - known
    return {"equal": digest == plain, "reducer": done[0], "graphs": done[1]}


def refuses() -> dict[str, Any]:
    """A head without gradient, and a hook that comes too late."""
    _, ddp, _ = run(AMPLE)
    said = []
    try:
        ddp(batch(0), uses_head=False).sum().backward()
        ddp(batch(1))
    except OffloadError as error:
        said.append(str(error))
    try:
        ddp.register_comm_hook(None, allreduce_hook)
    except OffloadError as error:
        said.append(str(error))
    return {"said": said}


def apart() -> dict[str, Any]:
    """Ranks of two machines, which cannot read each other's memory."""
    with patch.object(neighbourhood, "machine", lambda: f"machine {dist.get_rank()}"):
        found = [run(MIDDLING, ours=ours) for ours in (False, True)]
    return {
        "equal": [digest == plain_digest() for digest, _, _ in found],
        "exchange": [exchange(ddp) for _, ddp, _ in found],
    }


def exchange(ddp: Any) -> str:
    return type(ddp.reducer.gradients.exchange).__name__


def in_flight() -> dict[str, Any]:
    """List the copies to the host and the buckets of the last step, in the order in which they
    began and ended, and the trace's row of buckets."""
    wait = Neighbours.wait

    def after_copies(exchange: Neighbours, bucket: Bucket) -> None:
        for runtime in runtimes():
            runtime.device.drain()
        wait(exchange, bucket)

    with (
        patch.object(Neighbours, "is_back", lambda *_: False),
        patch.object(Neighbours, "wait", after_copies),
    ):
        run(MINIMUM, ours=True, bucket_cap_mb=1)
    report = offcompile.reports()[-1]
    steps = report.running.steps
    assert isinstance(steps, StepRecorder)
    step = steps._measured(steps._kept[-1])
    assert step is not None
    steps.median = lambda: step  # type: ignore[method-assign]
    spans = [span for span in step.spans if span.lane in ("d2h", "reduction")]
    instants = [(s.start_ns, f"{s.id} begins") for s in spans]
    instants += [(s.end_ns, f"{s.id} ends") for s in spans]
    events = report.to_trace()["traceEvents"]
    rows = {e["tid"] for e in events if e["args"].get("name") == "reduction"}
    seen = [e for e in events if e["ph"] == "X" and e["pid"] == 2 and e["tid"] in rows]
    return {
        "order": [name for _, name in sorted(instants)],
        "copies": [span.id for span in spans if span.lane == "d2h"],
        "buckets": {event["name"]: event["args"]["nbytes"] for event in seen},
        "page": [lane["lane"] for lane in report_data(report)["lanes"]],
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        overlap,
        any_optimizer,
        accumulates,
        plans_differ,
        budgets,
        apart,
        falls_back,
        refuses,
        in_flight,
    )
}


if __name__ == "__main__":
    run_cases(CASES)
