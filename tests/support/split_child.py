"""One step over 32,768 words and 1,024 tokens in a process whose memory is limited.

`python split_child.py '{"backend": …, "options": {…}, "limit": …, "file": …}'` prints one JSON
object, and writes loss and gradients to the file. `limit` allows that many bytes of private memory
beyond what the process has before the model is built; null: no limit.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

import torch
from freeze_imports import freeze_imports
from torch import nn
from torch.nn import functional as F

import offcompile
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.memory.malloc.glibc import return_freed_memory
from offcompile.runtime.memory.malloc.heap import heap

WORDS, TOKENS, WIDTH = 32_768, 1024, 48


class Model(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, words, bias=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.words(tokens)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return h

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.hidden(tokens)).float()
        labels = F.pad(tokens, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        return F.cross_entropy(logits.view(labels.numel(), -1), labels)


def tokens(words: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, words, (2, count // 2), generator=generator)


def step(model: Model, run: Any, given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss and gradients of a second step, by when everything is compiled."""
    for _ in range(2):
        model.zero_grad()
        loss = run(given)
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    freeze_imports()
    return_freed_memory()

    def compiled(model: Model) -> Any:
        more = {"options": task["options"]} if task["options"] else {}
        return torch.compile(model, backend=task["backend"], **more)

    small = Model(512)
    step(small, compiled(small), tokens(512, 64))  # brings in code, threads and caches
    torch._dynamo.reset()
    if task["limit"] is not None:
        heap().trim()
        allowed = memory.data_bytes() + task["limit"]
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    found: dict[str, Any] = {"error": None, "split": ""}
    try:
        model = Model(WORDS)
        torch.save(step(model, compiled(model), tokens(WORDS, TOKENS)), task["file"])
        if task["backend"] == "offcompile":
            found["split"] = offcompile.reports()[-1].split
    except (RuntimeError, MemoryError) as error:
        found["error"] = f"{type(error).__name__}: {error}"[:2000]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
