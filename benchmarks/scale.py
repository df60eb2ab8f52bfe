"""How large problems may be: simulation, deep nets, and 20,000 ops of repeated layers.

Run `python -m benchmarks.scale` (`--quick`: a tenth of the sizes) for the table in `results/`.
Seconds are of this run on the machine named; compare them with each other, not across machines.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from benchmarks.families import deep_chain, duplex
from offcompile.ir import Machine, Op, Plan, Problem, Tensor
from offcompile.ir.verify import check_timeline
from offcompile.passes.build.decisions import Decisions
from offcompile.passes.build.schedule import Builder
from offcompile.passes.registry import make
from offcompile.passes.search.program_variant import Choices, ProgramVariant
from offcompile.planning.coarsen import coarsen
from offcompile.planning.planner import judge_for, plan_problem
from offcompile.simulate import Simulator

RESULT = Path(__file__).parent / "results" / "scale.md"
OPS_PER_PASS = 20
P = ParamSpec("P")
T = TypeVar("T")


def repeated_layers(layers: int) -> tuple[Problem, Machine]:
    """Layers of 20 forward and 20 backward ops, four weights and five saved activations each.

    The device holds half of what all of it takes; a move of a weight takes 14 µs, an op about 25.
    """
    tensors = [Tensor("x", 1000, "input", "device")]
    ops: list[Op] = []
    previous, saved = "x", []
    for layer in range(layers):
        tensors += [Tensor(f"w{layer}.{k}", 4000, "weight", "host") for k in range(4)]
        kept = [previous]
        for k in range(OPS_PER_PASS):
            out = f"t{layer}.{k}"
            keep = k % 4 == 3
            tensors.append(Tensor(out, 1000, "activation" if keep else "temporary"))
            weight = [f"w{layer}.{k // 4}"] if k % 4 == 1 and k // 4 < 4 else []
            ops.append(Op(f"F{layer}.{k}", "forward", 10.0 + k, (previous, *weight), (out,)))
            kept += [out] if keep else []
            previous = out
        saved.append(kept)
    for layer in reversed(range(layers)):
        for k in range(OPS_PER_PASS):
            out = f"g{layer}.{k}"
            tensors.append(Tensor(out, 1000, "temporary"))
            weight = [f"w{layer}.{3 - k // 4}"] if k % 4 == 1 and k // 4 < 4 else []
            needs = [saved[layer][-1 - k // 4]] if k % 4 == 0 and k // 4 < len(saved[layer]) else []
            reads = tuple(dict.fromkeys((previous, *weight, *needs)))
            space = 4000 if weight else 0
            ops.append(
                Op(
                    f"B{layer}.{k}",
                    "backward",
                    20.0 + k,
                    reads,
                    (out, *weight),
                    workspace_bytes=space,
                )
            )
            previous = out
    problem = Problem(tuple(tensors), tuple(ops), True)
    machine = duplex(None, 1000.0, 10.0)
    builder = Builder(problem, machine, Decisions())
    low = max(ProgramVariant(problem, machine, Choices()).floor)
    return problem, machine.with_capacity("device", (low + max(builder.kept_bytes)) // 2)


def seconds_of(work: Callable[P, T], *args: P.args, **more: P.kwargs) -> tuple[float, T]:
    began = time.perf_counter()
    result = work(*args, **more)
    return time.perf_counter() - began, result


def rows(scale: float) -> list[str]:
    found = []
    problem, machine = deep_chain(int(1000 * scale), 0.5, 0.8)
    plan = make("weight_rotation", judge_for(problem, machine)).apply(problem, machine, Plan())
    simulator = Simulator(problem, machine)
    spent, timeline = seconds_of(simulator.run, plan)
    size = f"{len(problem.ops):,} ops, {len(plan.moves):,} moves, {len(timeline.steps)} steps"
    found.append(f"| simulate | {size} | {spent:.2f} | |")
    spent, wrong = seconds_of(check_timeline, problem, machine, plan, timeline)
    assert not wrong
    found.append(f"| audit of the timeline | {size} | {spent:.2f} | |")
    spent, result = seconds_of(plan_problem, problem, machine, "joint", 10.0)
    idle = result.makespan_us / sum(op.duration_us for op in problem.ops) - 1
    found.append(
        f"| plan (joint, bound, audit) | {len(problem.ops):,} ops | {spent:.1f} | {idle:.2%} |"
    )
    problem, machine = repeated_layers(int(500 * scale))
    spent, coarse = seconds_of(coarsen, problem)
    size = f"{len(problem.ops):,} ops to {len(coarse.problem.ops):,}"
    found.append(f"| coarsen | {size} | {spent:.2f} | |")
    spent, result = seconds_of(plan_problem, problem, machine, "joint", 15.0)
    idle = result.makespan_us / sum(op.duration_us for op in problem.ops) - 1
    found.append(
        f"| plan (joint, bound, audit) | {len(problem.ops):,} ops | {spent:.1f} | {idle:.2%} |"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes, print only")
    quick = parser.parse_args().quick
    table = rows(0.1 if quick else 1.0)
    text = "\n".join(
        [
            "# Scale",
            "",
            "Steady problems, half of what they take on the device, the link no limit; idle is the",
            "step over its compute, less one. `benchmarks/scale.py` makes them.",
            "",
            "| what | size | seconds | idle |",
            "|---|---|---|---|",
            *table,
            "",
            f"Machine: {platform.machine()}, CPython {platform.python_version()}, one thread.",
            "",
        ]
    )
    print(text)
    if not quick:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
