"""One model of others at a size at which its budget counts, in a process that the kernel measures.

`python -m trust.peaks_child NAME`, run in tests/, prints one JSON object: what the plain run took,
the budget, what steps under it took, and whether losses are the same. The first call is counted
apart: it measures ops and plans, which takes memory of its own.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from wild.parts import Gpt, conv_net, mlp, next_word_loss
from wild.timm_models import MODELS, Model, import_timm

import offcompile
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.memory.malloc.glibc import return_freed_memory
from offcompile.runtime.memory.malloc.heap import heap

STEPS = 3
#: bytes that autograd keeps of one forward
KEPT_BYTES = 128 << 20
#: rows by which that is estimated
PROBED = 4
#: budgets tried, each half as much again, where less is refused
TRIES = 3
_TIMM = (
    "test_vit",
    "test_vit3",
    "test_byobnet",
    "test_convnext",
    "test_convnext3",
    "test_efficientnet",
    "test_efficientnet_gn",
    "test_mambaout",
    "test_nfnet",
    "test_resnet",
    "beit_base_patch16_224",
    "convnext_atto",
    "densenet121",
    "deit3_small_patch16_224",
    "darknet17",
)


class WithLoss(nn.Module):
    """Compute a loss inside the model: no plan knows of tensors that autograd keeps outside."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.model(x), x)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor]
    inputs: Callable[[int], Tensor]

    def made(self) -> nn.Module:
        torch.manual_seed(0)
        return WithLoss(self.build(), self.loss).train()


def classified(found: Any, x: Tensor) -> Tensor:
    scores = found if isinstance(found, Tensor) else sum(found)
    return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


def squared(found: Tensor, x: Tensor) -> Tensor:
    return found.square().mean()


def of_logits(found: Any, x: Tensor) -> Tensor:
    return found.logits.square().mean()


def _drawn(*size: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *size)


def _words(length: int, most: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randint(most, (rows, length))


def _of_timm(model: Model) -> Case:
    build = partial(_timm_model, model)
    return Case(build, classified, _drawn(3, model.side, model.side))


def _timm_model(model: Model) -> nn.Module:
    made: nn.Module = import_timm().create_model(model.name, num_classes=5, **model.settings)
    return made


def _of_transformers(kind: str, maker: str, **settings: Any) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **settings)
    made: nn.Module = getattr(transformers, maker).from_config(config)
    return made


_BERT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}
_BERT |= {"intermediate_size": 256, "max_position_embeddings": 64}
CASES: dict[str, Case] = {
    "mlp of many layers": Case(
        lambda: nn.Sequential(*(mlp(64, 64) for _ in range(6))), squared, _drawn(64)
    ),
    "convolutions": Case(conv_net, classified, _drawn(3, 48, 48)),
    "gpt of 2": Case(partial(Gpt, 2), next_word_loss, _words(8, 40)),
    "gpt of 6": Case(partial(Gpt, 6), next_word_loss, _words(8, 40)),
    "gpt that drops": Case(partial(Gpt, 3, 0.1), next_word_loss, _words(8, 40)),
    "bert": Case(
        partial(_of_transformers, "bert", "AutoModelForMaskedLM", **_BERT),
        of_logits,
        _words(64, 64),
    ),
    "llama": Case(
        partial(_of_transformers, "llama", "AutoModelForCausalLM", **_BERT),
        of_logits,
        _words(64, 64),
    ),
    **{model.name: _of_timm(model) for model in MODELS if model.name in _TIMM},
}


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps of an eager forward beside parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(x)
    found = sum(seen.values())
    del loss
    return found


def train(
    case: Case,
    rows: int,
    compiler: Callable[[nn.Module], Any],
    first: Callable[[], None] = lambda: None,
) -> list[str]:
    """Losses as exact text; plain SGD, so that a step holds weights and gradients only. `first` is
    called after the first step."""
    torch._dynamo.reset()
    model = case.made()
    forward, losses = compiler(model), []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = forward(case.inputs(rows))
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.05)
                    p.grad = None
        losses.append(float(loss.detach()).hex())
        if step == 0:
            del loss
            first()
    return losses


def measured(
    case: Case, rows: int, compiler: Callable[[nn.Module], Any]
) -> tuple[list[str], int, int]:
    """Losses, and the most that steps took beyond what the process had: the first, and others.

    Pages of files count apart: they are the host tier's weights, mapped, and the system may have
    them back at any time.
    """
    torch._dynamo.reset()
    gc.collect()
    heap().trim()
    own, files = memory.resident()
    peaks: list[int] = []

    def count() -> None:
        mapped = max(0, memory.resident()[1] - files)
        peaks.append(memory.peak_bytes() - own - files - mapped)
        memory.reset_peak()

    memory.reset_peak()
    losses = train(case, rows, compiler, first=count)
    count()
    return losses, peaks[0], peaks[1]


def plain(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def ours(budget: int | str) -> Callable[[nn.Module], Any]:
    options = {"memory": budget, "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.1}
    return lambda module: torch.compile(module, backend="offcompile", options=options)


def budgets(plain_bytes: int) -> Iterable[int]:
    return (plain_bytes // 2 * 3**n // 2**n for n in range(TRIES))


def main() -> None:
    case = CASES[sys.argv[1]]
    torch.set_num_threads(1)
    return_freed_memory()  # for both: what is measured is what is held
    rows = PROBED * KEPT_BYTES // kept_bytes(case.made(), case.inputs(PROBED))
    for compiler in (plain, ours("minimum")):  # brings in code, threads and caches beforehand
        train(case, PROBED, compiler)
    expected, _, plain_bytes = measured(case, rows, plain)
    for budget in budgets(plain_bytes):
        sent = offcompile.counters()["bytes_out"]
        try:
            losses, first_bytes, peak_bytes = measured(case, rows, ours(budget))
        except offcompile.Infeasible:
            continue
        found = {
            "rows": rows,
            "plain_bytes": plain_bytes,
            "budget_bytes": budget,
            "peak_bytes": peak_bytes,
            "first_bytes": first_bytes,
            "equal": losses == expected,
            "bytes_out": offcompile.counters()["bytes_out"] - sent,
        }
        print(json.dumps(found))
        return
    raise SystemExit("no budget was enough")


if __name__ == "__main__":
    main()
