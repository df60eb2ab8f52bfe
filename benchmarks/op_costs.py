"""Times of ops in a step, beside those measured of the same ops alone.

    python -m benchmarks.op_costs [--quick]

Writes `benchmarks/results/op_costs.md`; `--quick` runs small models and prints only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from benchmarks.turns import machine
from offcompile.graph.costs.calls import call_of, is_view
from offcompile.graph.costs.op_costs import WORTH_MEASURING_US
from offcompile.runtime.measure.op import OpCall, Operands, measure_call
from offcompile.runtime.memory.malloc import tensor_memory
from offcompile.runtime.memory.malloc.heap import heap

RESULT = Path(__file__).parent / "results" / "op_costs.md"
CASES = ("mlp", "bert", "gpt", "resnet")
#: each round runs so many steps, then every op alone
ROUNDS, STEPS, WARM_STEPS = 5, 3, 5
#: addresses for all that a step holds, so that nothing is mapped anew within it
LAID_OUT_BYTES = 4 << 30


class WarmOperands(Operands):
    """Left in the caches by the run before."""

    def cool(self, made: object = None) -> None:
        pass


class Timed(fx.Interpreter):
    """A captured graph whose ops are timed one by one."""

    def __init__(self, module: fx.GraphModule, seen: Seen) -> None:
        super().__init__(module)
        self.seen = seen

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or is_view(n):
            return super().run_node(n)
        began = time.perf_counter()
        result = super().run_node(n)
        self.seen.note(n, (time.perf_counter() - began) * 1e6)
        return result


class Seen:
    """Times of each kind of call within steps."""

    def __init__(self) -> None:
        self.calls: dict[str, OpCall] = {}
        self.us: dict[str, list[float]] = defaultdict(list)
        self._keys: dict[int, str | None] = {}

    def note(self, node: fx.Node, us: float) -> None:
        if id(node) not in self._keys:
            call = call_of(node, int)
            self._keys[id(node)] = None if call is None else call.key
            if call is not None:
                self.calls[call.key] = call
        key = self._keys[id(node)]
        if key is not None:
            self.us[key].append(us)


def fastest_half(us: list[float]) -> float:
    """The mean of the faster half, as where ops are timed alone."""
    return statistics.fmean(sorted(us)[: (len(us) + 1) // 2])


def compiled_with(seen: Seen) -> Callable[..., Any]:
    from torch._functorch.aot_autograd import aot_module_simplified

    def timed(gm: fx.GraphModule, example_inputs: object) -> Callable[..., Any]:
        interpreter = Timed(gm, seen)

        def run(*given: Any) -> Any:
            with torch.no_grad():
                return interpreter.run(*given)

        return run

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(module, inputs, fw_compiler=timed, bw_compiler=timed)

    return backend


def found_of(name: str, quick: bool) -> dict[str, float]:
    from benchmarks.forecast_child import RATE, case_of

    tensor_memory.install()
    heap().prepare()
    case = case_of({"case": name, "quick": quick})
    torch.manual_seed(0)
    model, random = case.build(), torch.Generator().manual_seed(0)
    seen = Seen()
    run = torch.compile(model, backend=compiled_with(seen))

    def step() -> None:
        run(*case.batch(random)).backward()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.grad is not None:
                    weight.sub_(weight.grad, alpha=RATE)
                    weight.grad = None

    step()
    heap().begin(0, LAID_OUT_BYTES)
    heap().end()
    for _ in range(WARM_STEPS):
        step()
    rounds = []
    for _ in range(1 if quick else ROUNDS):
        seen.us.clear()
        for _ in range(STEPS):
            step()
        in_step = {key: fastest_half(us) * len(us) / STEPS for key, us in seen.us.items()}
        counts = {key: len(us) / STEPS for key, us in seen.us.items()}
        rounds.append(one_round(seen.calls, in_step, counts))
    return {what: statistics.median(r[what] for r in rounds) for what in rounds[0]}


def one_round(
    calls: Mapping[str, OpCall], in_step: Mapping[str, float], counts: Mapping[str, float]
) -> dict[str, float]:
    warm_operands, operands = WarmOperands(), Operands()
    total = warm = cold = 0.0
    off: list[tuple[float, float, float]] = []
    for key, us in in_step.items():
        if us / counts[key] < WORTH_MEASURING_US:
            continue
        alone = [measure_call(calls[key], o) for o in (warm_operands, operands)]
        if None in alone:
            continue
        took = [a.duration_us * counts[key] for a in alone if a is not None]
        total, warm, cold = total + us, warm + took[0], cold + took[1]
        off.append((us, abs(took[0] / us - 1), abs(took[1] / us - 1)))
    return {
        "in_step_us": total,
        "warm": warm / total,
        "cold": cold / total,
        "warm_off": sum(us * w for us, w, _ in off) / total,
        "cold_off": sum(us * c for us, _, c in off) / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, print only")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(found_of(asked.child, asked.quick)))
        return
    rows = []
    for threads in sorted({1, os.cpu_count() or 1}):
        for name in asked.case or CASES:
            command = [sys.executable, "-m", "benchmarks.op_costs", "--child", name]
            done = subprocess.run(
                [*command, *(["--quick"] if asked.quick else [])],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append(
                f"| {name}, {threads} | {found['in_step_us'] / 1e3:,.0f} | {found['warm']:.2f} "
                f"| {found['cold']:.2f} | {found['warm_off']:.0%} | {found['cold_off']:.0%} |"
            )
            print(rows[-1], file=sys.stderr, flush=True)
    text = TEXT.format(
        rounds=ROUNDS,
        steps=STEPS,
        least=round(WORTH_MEASURING_US),
        rows="\n".join(rows),
        machine=machine(),
    )
    if not asked.quick:
        RESULT.write_text(text)
    print(text)


TEXT = """\
# Op costs, alone and in a step

Models of [forecast](forecast.md). A step's ops are timed one by one where they run; then each kind
of call that takes {least} µs and more is run alone, with its operands and its result's place left
in the caches by the run before ("cached"), and as plans have it, with both in memory alone
("cold"). In both ways large results go to blocks that keep their pages, as the step's do.
{steps} steps and all ops alone, in turn, {rounds} rounds; medians. "cached", "cold": what the calls
take alone, over what the same calls take in a step, both added up. "off": how far each kind of call
is from that, weighted by what it takes in a step.

| model, threads | in a step, ms | cached | cold | off, cached | off, cold |
|---|---|---|---|---|---|
{rows}

Machine: {machine}.
"""

if __name__ == "__main__":
    main()
