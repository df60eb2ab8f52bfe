"""Policies × traces: what is missed, what is fetched in vain, and what it costs.

Run `python -m benchmarks.correlation` (`--quick`: short traces, no file) for the table in
`results/`; the traces are those of `benchmarks/traces.py`.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.traces import TRACES, Blocks, half, repeat
from offcompile.ir.trace import Run, Trace
from offcompile.passes.correlation.learned import Learned, LearnedLimits
from offcompile.passes.correlation.predictor import Predictor
from offcompile.passes.correlation.tables import Shape
from offcompile.simulate.trace_policies import TRACE_POLICIES
from offcompile.simulate.trace_run import TraceResult, run_trace

RESULT = Path(__file__).parent / "results" / "correlation.md"
LINKS = (25_000.0, 8_000.0)
SHARES = (0.3, 0.5, 0.75)
MIB = 1 << 20


def row(trace: Trace, result: TraceResult) -> str:
    compute_us = sum(run.duration_us for run in trace.runs)
    counters = result.counters
    late = counters.late / counters.touches
    cells = (
        f"{100 * result.miss_rate:.2f}%",
        f"{100 * late:.2f}%",
        f"{counters.wasted_bytes / MIB:,.0f}",
        f"{result.bytes_in / MIB:,.0f}",
        f"{result.bytes_out / MIB:,.0f}",
        f"{100 * result.stall_us / compute_us:.2f}%",
        f"{result.makespan_us / compute_us:.3f}",
    )
    return " | ".join(cells)


def table(traces: Mapping[str, Trace], link: float) -> Iterator[str]:
    for name, trace in traces.items():
        machine = half(trace, link)
        for policy in TRACE_POLICIES:
            yield f"| {name} | {policy.name} | {row(trace, policy.run(trace, machine))} |"


def shares(traces: Mapping[str, Trace]) -> Iterator[str]:
    """Miss rate and time of LRU and ours, at other capacities."""
    known = {p.name: p for p in TRACE_POLICIES}
    for name, trace in traces.items():
        compute_us = sum(run.duration_us for run in trace.runs)
        cells = []
        for share in SHARES:
            for policy in ("lru", "correlation"):
                got = known[policy].run(trace, half(trace, share=share))
                cells.append(f"{100 * got.miss_rate:.2f}%, {got.makespan_us / compute_us:.3f}")
        yield f"| {name} | {' | '.join(cells)} |"


def geometry() -> Iterator[str]:
    """Rows of misses by the size of the block tables."""
    trace = wide()
    machine = half(trace)
    for rows in (16, 64, 128, 512, 2048):
        for ways in (1, 2, 4):
            limits = LearnedLimits(blocks=Shape(rows, ways, 4))
            got = run_trace(trace, machine, Predictor(Learned(limits)))
            yield f"| {rows} | {ways} | {100 * got.miss_rate:.2f}% | {got.table_bytes >> 10} |"


def wide(steps: int = 60) -> Trace:
    """Executions that touch a hundred blocks each, as whole graphs do."""
    blocks = Blocks()
    runs = []
    for _ in range(steps):
        for graph in range(8):
            reads = tuple(blocks(f"p{graph}.{i}", MIB) for i in range(100))
            runs.append(Run(f"graph{graph}", 12_000.0, None, reads))
    return blocks.trace(runs)


def microseconds_per_touch(trace: Trace) -> float:
    """The predictor's own time for each touch in this interpreter, without any simulation."""
    touches = sum(len(run.touched) for run in trace.runs)
    best = float("inf")
    for _ in range(3):
        predictor = Predictor()
        began = time.perf_counter()
        for run in trace.runs:
            predictor.enter(run.execution)
            for block in run.touched:
                predictor.touch(block, trace.nbytes[block])
            predictor.leave()
            predictor.predictions(1 << 40, limit=4)
        best = min(best, time.perf_counter() - began)
    return 1e6 * best / touches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short traces; no file")
    quick = parser.parse_args().quick
    traces = {name: make(12) if quick else make() for name, make in TRACES.items()}
    parts = [HEADER]
    for link in LINKS[: 1 if quick else None]:
        parts += [f"\n## Half the memory, {link / 1000:.0f} GB/s each way\n", COLUMNS]
        parts += table(traces, link)
    if not quick:
        parts += [OTHER, *shares(traces), GEOMETRY, *geometry()]
    each = microseconds_per_touch(repeat(20))
    parts += [f"\nThe predictor itself takes {each:.0f} µs a touch ({platform.machine()}, CPython"]
    parts[-1] += f" {platform.python_version()}); every other figure is simulated and exact.\n"
    text = "\n".join(parts)
    if not quick:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(text)
    print(text)


HEADER = """\
# Prefetching across executions: policies × traces

Traces of 120 steps (`benchmarks/traces.py`), cold starts included. The device has a share of what
is alive at once at most; one lane each way; times are over the time of the computations alone. A
miss is a block that is neither there nor on its way when it is needed; a late one is on its way.
`lru` and `belady` bring a block when it is missed; `oracle` knows the trace. `printed` looks 32
executions ahead as the paper does, without a bound by bytes, and takes the block least recently
moved; `printed_shared_ids` also gives one id to a graph, whatever it is bound to. `adversarial` and
`deceiving` are ours: executions in random order, with random blocks or with fixed ones."""

COLUMNS = """\
| trace | policy | missed | late | wasted, MiB | in, MiB | out, MiB | stalled | time |
|---|---|---|---|---|---|---|---|---|"""

OTHER = """
## Other capacities: misses, and time, at 25 GB/s

| trace | 30%: LRU | ours | 50%: LRU | ours | 75%: LRU | ours |
|---|---|---|---|---|---|---|"""

GEOMETRY = """
## The block tables' shape: eight graphs of a hundred blocks each, at half the memory

| rows | ways | missed | tables, KiB |
|---|---|---|---|"""

if __name__ == "__main__":
    main()
