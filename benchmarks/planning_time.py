"""How long planning makes people wait: seconds before the first step ends, beside a plain compile.

    python -m benchmarks.planning_time [--only NAME] [--lowering aot_eager|inductor]

Models have all their layers and are narrow, since planning depends on how many ops there are and
not on how large they are. Each is compiled plainly and then by us, at half of the memory between
the floor and what the step takes alone, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from offcompile.report.report import PlanReport

from .turns import LOWERINGS, machine

RESULTS = Path(__file__).parent / "results" / "planning_time.md"
WORDS, LENGTH, ROWS, WIDTH = 512, 64, 4, 128
#: the most that planning may take: so many seconds, or this share of the plain compile
MOST_SECONDS, MOST_SHARE = 20.0, 0.5
COLUMNS = (
    "model",
    "ops",
    "plain first step",
    "ours",
    "of which planning",
    "plain × ours",
    "within",
)
_TEXT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 4,
    "max_position_embeddings": 2 * LENGTH,
}
_VISION = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}


@dataclass(frozen=True)
class Case:
    """A model of Hugging Face with these settings; `inputs` are its keywords."""

    name: str
    kind: str
    maker: str
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]

    def build(self) -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(self.kind, **self.settings)
        model: nn.Module = getattr(transformers, self.maker).from_config(config)
        return WithLoss(model).train()


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


def _causal() -> dict[str, Any]:
    words = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return {"input_ids": words, "labels": words, "use_cache": False}


def _masked() -> dict[str, Any]:
    words = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return {"input_ids": words, "labels": words}


def _seen() -> dict[str, Any]:
    labels = torch.zeros(ROWS, dtype=torch.long)
    return {"pixel_values": torch.ones(ROWS, 3, LENGTH, LENGTH), "labels": labels}


CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
IMAGES = "AutoModelForImageClassification"
CASES = (
    Case("gpt2", "gpt2", CAUSAL, {"vocab_size": WORDS, "n_embd": WIDTH, "n_head": 4}, _causal),
    Case("llama of 32", "llama", CAUSAL, _TEXT | {"num_hidden_layers": 32}, _causal),
    Case("bert-large", "bert", MASKED, _TEXT | {"num_hidden_layers": 24}, _masked),
    Case(
        "t5 of 12 and 12",
        "t5",
        "AutoModelForSeq2SeqLM",
        {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 32, "d_ff": 256, "num_layers": 12}
        | {"num_heads": 4, "decoder_start_token_id": 0},
        _masked,
    ),
    Case(
        "vit-large",
        "vit",
        IMAGES,
        _VISION | {"num_hidden_layers": 24, "image_size": LENGTH, "patch_size": 8},
        _seen,
    ),
    Case(
        "resnet-50",
        "resnet",
        IMAGES,
        {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256]},
        _seen,
    ),
)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", default="", help="rows whose name holds this")
    parser.add_argument("--lowering", choices=LOWERINGS, default=LOWERINGS[0])
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        print(json.dumps(measured(asked.child, asked.lowering)))
        return
    lines = _head(asked.lowering)
    print("\n".join(lines), flush=True)
    for case in CASES:
        if asked.only in case.name:
            lines.append(_line(case.name, _child(case.name, asked.lowering)))
            print(lines[-1], flush=True)
    if not asked.only:
        RESULTS.write_text("\n".join([*lines, ""]), "utf-8")


def _child(name: str, lowering: str) -> Row:
    command = [sys.executable, "-m", __spec__.name, "--child", name, "--lowering", lowering]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Row = json.loads(ran.stdout.splitlines()[-1])
    return found


def measured(name: str, lowering: str) -> Row:
    """Seconds of first steps, and of planning within ours."""
    import offcompile
    from offcompile.run.plan import pieces, plan_graph

    case = next(c for c in CASES if c.name == name)
    inputs = case.inputs()

    def first_step(**compiler: Any) -> float:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.compile(case.build(), **compiler)
        began = time.perf_counter()
        model(inputs).backward()
        return time.perf_counter() - began

    first_step(backend="eager")  # imports, and what torch makes ready once
    plain_s = first_step(backend=lowering)
    options: dict[str, Any] = {"lowering": lowering, "hardware": "cpu"}
    first_step(backend="offcompile", options=options | {"memory": "minimum"})
    least = _of_each_graph(offcompile.reports())
    middle = _middling(least)
    planned_s = 0.0
    plan = pieces.best_candidate

    def timed(*given: Any, **named: Any) -> Any:
        nonlocal planned_s
        began = time.perf_counter()
        try:
            return plan(*given, **named)
        finally:
            planned_s += time.perf_counter() - began

    with mock.patch.object(plan_graph, "best_candidate", timed):
        ours_s = first_step(backend="offcompile", options=options | {"memory": middle})
    return {
        "ops": sum(len(r.problem.ops) for r in least),
        "plain_s": plain_s,
        "ours_s": ours_s,
        "planned_s": planned_s,
    }


def _of_each_graph(reports: Iterable[PlanReport]) -> list[PlanReport]:
    """The last plan of each: Dynamo may make several graphs of a model."""
    return list({r.name.partition(",")[0]: r for r in reports}.values())


def _middling(least: Iterable[PlanReport]) -> int:
    """Half of the way from the floor to what the step takes when nothing moves."""
    return sum((r.floor_bytes + _alone(r)) // 2 for r in least)


def _alone(report: PlanReport) -> int:
    from offcompile.ir import DEVICE
    from offcompile.planning.floors import peak_alone

    tensors = tuple(replace(t, home=t.home and DEVICE) for t in report.problem.tensors)
    machine = report.machine
    return peak_alone(
        replace(report.problem, tensors=tensors), lambda n: machine.with_capacity(DEVICE, n)
    )


def _head(lowering: str) -> list[str]:
    return [
        "# How long planning takes",
        "",
        f"`python -m benchmarks.planning_time --lowering {lowering}`: first steps of models",
        "with all their layers, in seconds, compiled plainly and by us under a middling budget.",
        f"Planning is to take at most {MOST_SECONDS:.0f} s, or {MOST_SHARE:.0%} of the plain",
        "compile if that is longer.",
        "",
        f"{machine()}; load average {os.getloadavg()[1]:.1f} at the start",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]


def _line(name: str, row: Row) -> str:
    most_s = max(MOST_SECONDS, MOST_SHARE * row["plain_s"])
    cells = (
        name,
        f"{row['ops']:,}",
        f"{row['plain_s']:.1f} s",
        f"{row['ours_s']:.1f} s",
        f"{row['planned_s']:.1f} s",
        f"{row['ours_s'] / row['plain_s']:.1f} ×",
        "yes" if row["planned_s"] <= most_s else "**no**",
    )
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
