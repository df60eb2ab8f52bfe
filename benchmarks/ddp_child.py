"""One rank of a variant of `benchmarks.ddp`: warms up, then runs a step when asked for one."""

# no `from __future__ import annotations`: torch looks at the annotations of `hook`

import gc
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket as Bucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import offcompile
from benchmarks.activations_child import Case, gpt
from benchmarks.ddp import LINK_GBPS
from offcompile.run.ranks import neighbourhood
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.device.vector_math import settle_vector_math
from offcompile.runtime.memory.malloc.heap import heap

#: steps of each kind before measuring: plans settle after those that are measured
WARM = 10
RATE = 1e-3


class Link:
    """A link between the two ranks, over which all-reduces go one after another while it is slow.

    An all-reduce of two ranks sends all bytes once in each direction.
    """

    def __init__(self) -> None:
        self.slow = False
        self._free_at = 0.0
        self._all_reduce = dist.all_reduce
        self._under_way: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._ends, daemon=True).start()

    def all_reduce(self, tensor: torch.Tensor, *given: Any, **how: Any) -> Any:
        work = self._all_reduce(tensor, *given, **how)
        return work if work is None or not self.slow else Arriving(work, self._arrives_at(tensor))

    def hook(self, state: object, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """For DDP, which reduces buckets from C++."""
        flat = bucket.buffer()
        flat.mul_(1.0 / dist.get_world_size())
        work: Any = self._all_reduce(flat, async_op=True)
        arrives_at = self._arrives_at(flat) if self.slow else 0.0
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def end() -> None:
            Arriving(work, arrives_at).wait()
            future.set_result(flat)

        self._under_way.put(end)
        return future

    def _arrives_at(self, tensor: torch.Tensor) -> float:
        self._free_at = max(self._free_at, time.perf_counter()) + tensor.nbytes / LINK_GBPS / 1e9
        return self._free_at

    def _ends(self) -> None:
        while True:
            self._under_way.get()()


class Arriving:
    """A collective that is over no sooner than the link would have it."""

    def __init__(self, work: Any, arrives_at: float) -> None:
        self._work, self._arrives_at = work, arrives_at

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._arrives_at and bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._arrives_at - time.perf_counter()))


class Rank:
    def __init__(self, case: Case, task: dict[str, Any]) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.case, self.task = case, task
        self.model = case.build()
        self.model.again = task["kind"] == "checkpoint"
        self.link = Link()
        compiled: dict[str, Any] = {"backend": "aot_eager"}
        if task["kind"] == "ours":
            options = {"memory": task["memory"], "lowering": "aot_eager", "spill": task["spill"]}
            compiled = {"backend": "offcompile", "options": options}
        self.forward = DistributedDataParallel(torch.compile(self.model, **compiled))
        weights = self.model.parameters()
        if "how" in task:
            how = {"states": "host", "directory": task["folder"]} | task["how"]
            self.optimizer: Any = offcompile.optim.AdamW(weights, RATE, **how)
        else:
            self.optimizer = torch.optim.AdamW(weights, RATE, fused=True)
        self.random = torch.Generator().manual_seed(dist.get_rank())

    def over_link(self) -> None:
        """Let its collectives go over the link, as those of ranks on two machines."""
        neighbourhood.machine = lambda: f"machine of rank {dist.get_rank()}"  # type: ignore[attr-defined]
        distributed: Any = dist
        distributed.all_reduce = self.link.all_reduce
        if self.task["kind"] == "plain":
            self.forward.register_comm_hook(None, self.link.hook)

    def step(self, slow: bool = False) -> dict[str, float]:
        inputs = self.case.batch(self.random)
        dist.barrier()
        self.link.slow = slow
        began = time.perf_counter()
        loss = self.forward(*inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - began
        self.link.slow = False
        return {"seconds": seconds, "loss": float(loss.detach())}


def serve(task: dict[str, Any]) -> None:
    settle_vector_math()  # or one run in ten differs, plain or not
    heap().prepare()  # freed memory is kept for reuse, for the peers as for ours
    # brings in the compiler and the runtime, whose own memory is not the model's
    small = Rank(gpt(16, 1, 1, 16, 0.0), task | {"memory": "minimum"})
    small.step()
    del small
    gc.collect()
    before = sum(memory.resident())

    rows, length = task["batch"]
    rank = Rank(gpt(task["width"], task["layers"], rows, length, 0.0), task)
    if task["link"]:
        rank.over_link()
    for _ in range(WARM):
        rank.step()
    gc.collect()
    memory.reset_peak()
    moved = offcompile.counters()["bytes_out"]
    steps = 0
    rank.step()

    def facts() -> dict[str, Any]:
        return {
            "title": rank.case.title,
            "peak_bytes": memory.peak_bytes() - before,
            "weight_bytes": sum(p.nbytes for p in rank.model.parameters()),
            "bytes_out": (offcompile.counters()["bytes_out"] - moved) // (steps + 1),
        }

    for line in sys.stdin:
        asked = line.strip()
        if asked in ("step", "slow"):
            steps += 1
            answer: dict[str, Any] = rank.step(asked == "slow")
        else:
            answer = facts()
        print(json.dumps(answer), flush=True)


def main() -> None:
    task, rank = json.loads(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    distributed: Any = dist
    store = distributed.FileStore(f"{task['folder']}/store", task["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task["world"])
    serve(task)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
