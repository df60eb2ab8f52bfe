"""One variant of training one of the models of `gpu_cases`, as `benchmarks.gpu` measures it.

A process of its own for each variant. It answers lines: `warm`, `steps N` and `facts`, each with
one line of JSON; `{"failed": …}` says what went wrong and ends it. On a machine without a GPU the
same code trains on the CPU target (`device` in the task).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from benchmarks.gpu_cases import CASES, TINY_CASES, Case
from benchmarks.gpu_peers import ADAMW_RATE, PEERS, Peer, peer

#: below this a saved tensor is not worth torch's own offload
LEAST_OFFLOAD_BYTES = 1 << 20
#: steps between those that compile and those that are timed
SETTLING_STEPS = 6
#: more steps until a plan has settled, is captured, and replayed
CAPTURING_STEPS = 10
OUT_OF_MEMORY = ("out of memory", "alloc_failed")
Tell = Callable[[dict[str, Any]], None]


def mark_for_offload(graph: fx.Graph) -> None:
    """Ask torch's activation offload for every large intermediate; it takes those that are saved.

    torch offloads what carries this mark, and leaves the marking to its user.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor):
            nbytes = value.numel() * value.element_size()
            if not isinstance(nbytes, int) or nbytes >= LEAST_OFFLOAD_BYTES:
                node.meta["should_offload"] = True


class Variant:
    """One way of training one model, on one device."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task, self.kind = task, str(task["kind"])
        self.device = torch.device(task["device"])
        self.on_gpu = self.device.type == "cuda"
        self.case = (TINY_CASES if task["tiny"] else CASES)[task["case"]]
        self.at_floor, self.counted = False, 0
        self.peer: Peer | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.set_up()

    def set_up(self) -> None:
        import torch._functorch.config as functorch
        import torch._inductor.config as inductor

        if self.kind == "torch budget":
            functorch.activation_memory_budget = self.task["share"]
        if self.kind.startswith("torch offload"):
            functorch.enable_activation_offloading = True
            inductor.joint_custom_post_pass = mark_for_offload
            if self.kind == "torch offload, streams":
                functorch.activation_offload_separate_stream = True
                functorch.activation_offload_sink_wait = True
                functorch.activation_reload_prefetch = True

    # --- a step ---------------------------------------------------------------------------------

    def start(self, case: Case, batch: int, memory: int | str | None) -> None:
        """A fresh model, from the same seeds whatever the variant."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        with self.device:
            self.model = case.build()
        if self.on_gpu:
            self.model = self.model.to(torch.bfloat16)
        self.model = self.model.to(self.device)
        self.model.again = self.kind == "checkpoint"
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        random = torch.Generator().manual_seed(0)
        inputs, targets = case.draw(batch, random)
        if inputs.is_floating_point() and self.on_gpu:
            inputs = inputs.to(torch.bfloat16)
        # one batch again and again: fetching others is not what is compared
        self.inputs = inputs.to(self.device), targets.to(self.device)
        self.peer = peer(self.kind, self.model) if self.kind in PEERS else None
        # before anything is compiled: graphs offer gradients to whom they find
        self.optimizer = self.adamw() if self.task["case"] == "optimizer" else None
        self.forward = self.peer.forward if self.peer is not None else self.compiled(memory)

    def adamw(self) -> torch.optim.Optimizer | None:
        """torch's on the device, or ours; None: the peer has its own."""
        if self.kind == "plain":
            return torch.optim.AdamW(self.weights, ADAMW_RATE, fused=True)
        if self.peer is not None:
            return None
        from offcompile import optim

        # without masters it computes what torch's does
        masters = self.task.get("masters", False)
        states = self.task.get("states", "auto")
        rate = ADAMW_RATE
        return optim.AdamW(self.weights, rate, states=states, overlap=True, master=masters)

    def compiled(self, memory: int | str | None) -> Callable[..., Tensor]:
        lowering = self.task["lowering"]
        if self.kind != "ours":
            return torch.compile(self.model, backend=lowering, dynamic=False)
        options: dict[str, Any] = {"memory": memory, "lowering": lowering}
        for name in ("host_memory", "spill", "hardware", "policy"):
            if self.task.get(name) is not None:
                options[name] = self.task[name]
        if self.task.get("cudagraphs"):
            options["cudagraphs"] = True
        if self.task["tiny"]:
            options["seconds"] = 0.1  # its figures mean nothing
        return torch.compile(self.model, backend="offcompile", options=options, dynamic=False)

    def step(self) -> Tensor:
        with self.around():
            loss = self.forward(*self.inputs)
        if self.peer is not None:
            self.peer.learn(loss)
            return loss.detach()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()
        with torch.no_grad():
            learnt = [(w, w.grad) for w in self.weights if w.grad is not None]
            torch._foreach_add_([w for w, _ in learnt], [g for _, g in learnt], alpha=-0.01)
            for weight in self.weights:
                weight.grad = None
        return loss.detach()

    def around(self) -> AbstractContextManager[Any]:
        if self.kind == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu(pin_memory=self.on_gpu)
        return nullcontext()

    # --- what the parent asks ---------------------------------------------------------------------

    def warm(self) -> dict[str, Any]:
        """Compile and run twice, within the budget or, where no plan can do with it, the floor."""
        from offcompile import Infeasible
        from offcompile.runtime.base import counters

        # a budget on a GPU covers what libraries hold; on the CPU the process's own is not ours
        self.before_bytes = 0 if self.on_gpu else self.bytes_without_model()
        began = time.perf_counter()
        try:
            self.start(self.case, self.case.batch, self.task["memory"])
            losses = [float(self.step()), float(self.step())]
        except Infeasible as error:
            print(f"  {error}", file=sys.stderr, flush=True)
            self.at_floor = True
            self.clear()
            self.start(self.case, self.case.batch, "minimum")
            losses = [float(self.step()), float(self.step())]
        seconds = time.perf_counter() - began
        # ours may plan again once it has measured a few
        settling = SETTLING_STEPS + (CAPTURING_STEPS if self.task.get("cudagraphs") else 0)
        losses += [float(self.step()) for _ in range(0 if self.task["tiny"] else settling)]
        gc.collect()
        self.reset_peak()
        counters.reset_counters()
        self.counted = 0
        return {"seconds": seconds, "losses": losses}

    def bytes_without_model(self) -> int:
        """Bytes of the compiler, the runtime, and the libraries with their workspaces."""
        small = TINY_CASES[self.task["case"]]
        self.start(small, small.batch, "minimum")
        for _ in range(2):
            self.step()
        self.clear()
        return self.held_bytes()

    def steps(self, count: int) -> dict[str, Any]:
        """So many steps on end, as training runs them; the mean of one."""
        self.counted += count
        if self.on_gpu:
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            losses = [self.step() for _ in range(count)]
            end.record()
            end.synchronize()
            milliseconds = begin.elapsed_time(end) / count
        else:
            began = time.perf_counter()
            losses = [self.step() for _ in range(count)]
            milliseconds = (time.perf_counter() - began) * 1e3 / count
        return {"ms": milliseconds, "losses": [float(loss) for loss in losses]}

    def facts(self) -> dict[str, Any]:
        import offcompile

        found: dict[str, Any] = {
            "peak_bytes": self.peak_bytes() - self.before_bytes + self.pool_bytes(),
            "at_floor": self.at_floor,
            "weight_bytes": sum(w.untyped_storage().nbytes() for w in self.weights),
        }
        if self.on_gpu:
            found["reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            found |= {"free_bytes": free, "total_bytes": total}
        if self.kind == "ours":
            report = offcompile.reports()[-1]
            counters = offcompile.counters()
            found |= {
                "budget_bytes": report.budget_bytes,
                "planned_us": report.planned_us,
                "planned_peak_bytes": report.planned_peak_bytes,
                "gap": report.gap,
                "planning_seconds": report.result.seconds,
                "ops_again": len(report.plan.recomputes),
                "counters": counters,
                "counted_steps": self.counted,
            }
        return found

    # --- memory -----------------------------------------------------------------------------------

    def clear(self) -> None:
        self.peer = self.optimizer = None
        self.model = self.forward = self.weights = self.inputs = None  # type: ignore[assignment]
        torch._dynamo.reset()
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def held_bytes(self) -> int:
        from offcompile.runtime.base import process_memory as memory

        return sum(memory.resident())

    def peak_bytes(self) -> int:
        if self.on_gpu:
            return torch.cuda.max_memory_allocated(self.device)
        from offcompile.runtime.base import process_memory as memory

        return memory.peak_bytes()

    def pool_bytes(self) -> int:
        """Bytes that captured graphs keep, which their allocator counts as free."""
        if not self.task.get("cudagraphs"):
            return 0
        from offcompile.run.accounts.process import process

        return sum(pool.pool_bytes for usage in process.usages.values() for pool in usage.pools)

    def reset_peak(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        from offcompile.runtime.base import process_memory as memory

        memory.reset_peak()

    def fits(self, batch: int) -> bool:
        """True if two steps of this batch run under the cap that the task names."""
        from offcompile import Infeasible
        from offcompile.ir import OffloadError

        print(f"    batch {batch}", file=sys.stderr, flush=True)
        try:
            self.start(self.case, batch, self.task["memory"])
            for _ in range(2):
                float(self.step())
        except (torch.OutOfMemoryError, MemoryError, Infeasible):
            return False
        except (OffloadError, RuntimeError) as error:
            # the slow tiers are full, or a library or the compiler says it in its own words
            said = str(error).lower()
            if not isinstance(error, OffloadError) and not any(w in said for w in OUT_OF_MEMORY):
                raise
            print(f"    {said[:300]}", file=sys.stderr, flush=True)
            return False
        finally:
            self.clear()
        return True


def largest(variant: Variant, start: int, most: int, seconds: float, tell: Tell) -> dict[str, Any]:
    """Double, then bisect to within a sixteenth; stops when the time is up and says so.

    Tells each batch that ran, since the process may be ended before it is through.
    """
    began = time.perf_counter()

    def time_is_up() -> bool:
        return time.perf_counter() - began > seconds

    good, bad = 0, None
    batch = start
    while bad is None and batch <= most and not time_is_up():
        if variant.fits(batch):
            good, batch = batch, 2 * batch
            tell({"so_far": good})
        else:
            bad = batch
    while bad is not None and bad - good > max(1, good // 16) and not time_is_up():
        middle = (good + bad) // 2
        if variant.fits(middle):
            good = middle
            tell({"so_far": good})
        else:
            bad = middle
    ended = bad is not None and bad - good <= max(1, good // 16)
    return {"largest": good, "ended": ended, "seconds": time.perf_counter() - began}


def machine() -> dict[str, Any]:
    """The versions and the hardware behind the table."""
    import platform

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "gpu": None,
    }
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["total_bytes"] = torch.cuda.get_device_properties(0).total_memory
        found["cuda"] = torch.version.cuda
    return found


def serve(task: dict[str, Any]) -> None:
    """Answer each line from the parent with one line of JSON; what fails is said, then it ends."""
    # libraries print to standard output now and then, which would garble the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    try:
        if task["kind"] == "machine":
            answer(machine())
            return
        if task.get("cap_bytes"):
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, task["cap_bytes"] / total))
        variant = Variant(task)
        for line in sys.stdin:
            what, *numbers = line.split()
            if what == "warm":
                answer(variant.warm())
            elif what == "steps":
                answer(variant.steps(int(numbers[0])))
            elif what == "largest":
                start, most, seconds = (int(n) for n in numbers)
                answer(largest(variant, start, most, seconds, answer))
            else:
                answer(variant.facts())
    except Exception as error:
        first = str(error).strip().splitlines()
        answer({"failed": f"{type(error).__name__}: {first[0] if first else ''}"[:300]})
        raise
