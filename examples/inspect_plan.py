"""Everything there is to see of one compiled step: as text, as a page, as a trace, as files.

    python examples/inspect_plan.py --output inspected

Open `inspected/report.html` in a browser and `inspected/trace.json` in ui.perfetto.dev. The graphs
before and after, the problem, the machine and the plan lie in `inspected/dump`; the example reads
the last three back and has them judged, as `offcompile check` does.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from demo.gpt import GPT, batches

import offcompile
from offcompile.ir.jsonio import loads_machine, loads_plan, loads_problem
from offcompile.planning.planner import check_plan


def judge(folder: Path) -> None:
    """Is the plan in a dump lawful, and how long does its step take?"""
    problem = loads_problem((folder / "problem.json").read_text())
    machine = loads_machine((folder / "machine.json").read_text())
    plan = loads_plan((folder / "plan.json").read_text())
    checked = check_plan(problem, machine, plan)
    assert not checked.violations and checked.timeline is not None, checked.violations
    print(f"checked: lawful, {checked.timeline.makespan_us / 1000:.1f} ms a step")

    # a plan that forgets one of the copies that a step begins with is not lawful
    broken = check_plan(problem, machine, replace(plan, start=plan.start[1:]))
    print(f"without its first copy: {broken.violations[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="inspected")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    asked = parser.parse_args()
    output = Path(asked.output)
    output.mkdir(parents=True, exist_ok=True)
    layers, width, length = (1, 32, 64) if asked.quick else (4, 256, 256)

    torch.manual_seed(0)
    model = GPT(layers, width, length)
    options = {
        "memory": "minimum",
        "lowering": "aot_eager",
        "dump": output / "dump",
        "hardware": "cpu" if asked.quick else None,
    }
    step = torch.compile(model, backend="offcompile", options=options)
    data = batches(4, length, "cpu")
    for _ in range(3):
        step(next(data)).backward()

    (report,) = offcompile.reports()
    print(report.to_text(), "\n")
    print("what each module and the dearest tensors do:")
    print(report.explain(limit=5), "\n")
    print("where the time goes:")
    print(report.stalls(limit=5), "\n")
    report.save_html(output / "report.html")
    report.save_trace(output / "trace.json")
    (folder,) = sorted((output / "dump").iterdir())[-1:]
    print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    judge(folder)


if __name__ == "__main__":
    main()
