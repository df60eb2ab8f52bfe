"""Measure how a loss in pieces changes a step: the least memory it takes, and its time.

    python -m benchmarks.split [--quick]

Each row is planned by datasheets, and nothing runs: the model is traced once, and its loss is put
in 4, 8, 16 and 32 pieces.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offcompile.ahead.fitting import variants
from offcompile.ahead.huggingface import SIZES, build
from offcompile.ahead.plan import Ahead, ForecastRequest
from offcompile.ahead.simple_reruns import Reruns
from offcompile.graph.split.decision import LADDER
from offcompile.machine.options import Options
from offcompile.planning.floors import floor_of, peak_alone, with_reserve

from .turns import machine

RESULTS = Path(__file__).parent / "results" / "split.md"
GIB = 1 << 30
HEAD = """# A loss in pieces

`python -m benchmarks.split`: the least memory that a step takes when whatever can leave has left
(its floor), whole and with its loss in pieces, by the datasheet of an H100. Models are bf16, under
Inductor, without an optimizer. The time is that of all ops with nothing moved: in pieces there are
products of fewer tokens, more launches, and sums in float32. The pieces are the fewest whose floor
is within 2% of the lowest.
"""
COLUMNS = (
    "model",
    "batch × length",
    "words",
    "floor",
    "in pieces",
    "times lower",
    "pieces",
    "time of the ops",
    "in pieces",
    "",
)
LONGEST = """
## The longest sequence

One sequence on one card: the longest multiple of 4,096 tokens, up to 131,072, that the card holds.
*plain*: by the peak if nothing moves; *checkpointed*: by the peak if every block runs again in
backward; *ours*: by the floor, with weights on the host where that helps and all away that can
leave.

| model | card | plain | checkpointed | ours, whole | ours, in pieces |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    length: int
    #: instead of the model's own
    words: int | None = None
    #: True if the user gets the logits too, as in a Trainer
    returned: bool = False

    @property
    def name(self) -> str:
        if self.returned:
            return f"{self.model}, logits returned"
        return self.model if self.words is None else f"{self.model}, with 256k words"


CASES = (
    Case("llama-3.2-1b", 8, 2048),
    Case("llama-3.1-8b", 1, 8192),
    Case("gpt2-medium", 16, 1024),
    Case("llama-3.2-1b", 4, 2048, 256_000),
    Case("llama-3.2-1b", 8, 2048, returned=True),
    Case("gpt2-medium", 16, 1024, returned=True),
    Case("phi-3-mini", 2, 8192),
    Case("mixtral-8x7b", 2, 8192),
    Case("qwen3-30b-a3b", 2, 8192),
)
QUICK = (Case("gpt2", 2, 256),)
CARDS = (("llama-3.2-1b", "rtx4090"),)
STEP_TOKENS, MOST_TOKENS = 4096, 131_072


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small model, no file")
    parser.add_argument("--longest", action="store_true", help="only the longest sequence, no file")
    asked = parser.parse_args()
    if asked.longest:
        for model, card in CARDS:
            print(_longest(model, card))
        return
    quick = asked.quick
    lines = [HEAD, machine(), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += [_row(case) for case in (QUICK if quick else CASES)]
    if not quick:
        lines.append(LONGEST.rstrip("\n"))
        lines += [_longest(model, card) for model, card in CARDS]
    text = "\n".join([*lines, ""])
    print(text)
    if not quick:
        RESULTS.write_text(text, "utf-8")


def traced(case: Case, hardware: str) -> Ahead:
    if case.words is not None:
        kind, values = SIZES[case.model]
        name = f"{case.model} of {case.words}"
        SIZES[name] = kind, {**values, "vocab_size": case.words}  # type: ignore[index]
        model, inputs, loss = build(name, case.length, "bfloat16")
    else:
        model, inputs, loss = build(case.model, case.length, "bfloat16")
    if case.returned:
        loss = _loss_and_logits
    options = Options.read({"hardware": hardware, "reuse_plans": False}, {})
    return Ahead.of(ForecastRequest(model, (), inputs(case.batch), options, loss), _quiet)


def _loss_and_logits(output: Any) -> Any:
    return output.loss, output.logits


def _quiet(text: str) -> None:
    pass


@dataclass(frozen=True)
class Figures:
    pieces: int
    floor_bytes: int
    step_us: float

    @classmethod
    def of(cls, ahead: Ahead, pieces: int) -> Figures:
        problems = variants(ahead)
        floor = min(floor_of(p, ahead.survey.machine) for p in problems)
        return cls(pieces, floor, sum(op.duration_us for op in problems[0].ops))


def _row(case: Case) -> str:
    ahead = traced(case, "h100")
    whole = Figures.of(ahead, 1)
    ladder = [n for n in LADDER if n <= ahead.most_pieces]
    found = [Figures.of(ahead.in_pieces(n, _quiet), n) for n in ladder]
    lowest = min(f.floor_bytes for f in found)
    split = next(f for f in found if f.floor_bytes <= 1.02 * lowest)
    words = ahead.words_split
    cells = (
        case.name,
        f"{case.batch} × {case.length:,}",
        f"{words:,}",
        f"{whole.floor_bytes / GIB:.2f} GiB",
        f"{split.floor_bytes / GIB:.2f} GiB",
        f"{whole.floor_bytes / split.floor_bytes:.1f} ×",
        str(split.pieces),
        f"{whole.step_us / 1e3:.1f} ms",
        f"{split.step_us / 1e3:.1f} ms",
        f"{split.step_us / whole.step_us - 1:+.1%}",
    )
    return "| " + " | ".join(cells) + " |"


def _longest(model: str, card: str) -> str:
    found = []
    for needed_bytes in WAYS:
        low, high = 0, MOST_TOKENS // STEP_TOKENS + 1
        while high - low > 1:
            middle = (low + high) // 2
            ahead = _of_length(model, card, middle * STEP_TOKENS)
            if needed_bytes(ahead) <= ahead.target.device_bytes:
                low = middle
            else:
                high = middle
        found.append(low * STEP_TOKENS)
    cells = (model, card, *(f"{n:,} tokens" if n else "none" for n in found))
    return "| " + " | ".join(cells) + " |"


@functools.cache
def _of_length(model: str, card: str, length: int) -> Ahead:
    return traced(Case(model, 1, length), card)


def _plain_bytes(ahead: Ahead) -> int:
    return peak_alone(variants(ahead)[0], ahead.survey.machine)


def _checkpointed_bytes(ahead: Ahead) -> int:
    at_home = ahead.survey.problem(ahead.graphs)
    chosen = Reruns(at_home.problem).blocks_again(at_home.labels, ahead.target.device_bytes)[1]
    return chosen.peak_bytes


def _whole_bytes(ahead: Ahead) -> int:
    return with_reserve(Figures.of(ahead, 1).floor_bytes, ahead.target.reserve_bytes)


def _in_pieces_bytes(ahead: Ahead) -> int:
    return _whole_bytes(ahead.in_pieces(LADDER[-1], _quiet))


WAYS = (_plain_bytes, _checkpointed_bytes, _whole_bytes, _in_pieces_bytes)


if __name__ == "__main__":
    main()
