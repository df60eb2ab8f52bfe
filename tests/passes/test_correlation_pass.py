"""`correlation_prefetch` on recorded traces; recording them, and their two forms."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_correlation_traces import any_traces

from benchmarks import traces
from offcompile.ir import InvalidInput, OffloadError, Plan
from offcompile.ir.trace import Block, Run, Trace
from offcompile.ir.traceio import loads_trace, parse_trace, print_trace, trace_to_json
from offcompile.passes.correlation.predictor import Predictor
from offcompile.passes.correlation.problem import problem_of
from offcompile.passes.correlation.recorder import Listener, Recorder
from offcompile.passes.registry import make
from offcompile.planning.planner import certify, judge_for


def makespan_us(variant: str, trace: Trace) -> float:
    problem, machine = problem_of(trace), traces.half(trace)
    policy = make(f"correlation_prefetch:variant={variant}", judge_for(problem, machine))
    plan = policy.apply(problem, machine, Plan())
    return certify(problem, machine, plan, variant).makespan_us


@pytest.mark.parametrize("make_trace", [traces.repeat, traces.random_embedding])
def test_what_has_been_learnt_comes_between_the_oracle_and_the_least_recently_used(
    make_trace: object,
) -> None:
    trace = make_trace(8)  # type: ignore[operator]
    oracle, ours, lru = (makespan_us(v, trace) for v in ("oracle", "correlation", "lru"))
    assert oracle <= ours < lru


def test_nothing_moves_twice_where_everything_fits() -> None:
    trace = traces.repeat(3)
    machine = traces.half(trace, share=1.0)
    problem = problem_of(trace)
    plan = make("correlation_prefetch").apply(problem, machine, Plan())
    assert {m.tensor for m in plan.moves} == set(trace.given)
    assert len(plan.moves) == len(trace.given)


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(InvalidInput, match="variant 'x' is not one of correlation, oracle"):
        make("correlation_prefetch:variant=x")


def test_a_trace_as_a_problem() -> None:
    trace = Trace(
        (Block("w", 10), Block("a", 5), Block("unused", 1)),
        (Run("f", 2.0, "L0", ("w",), ("a",)), Run("b", 3.0, None, ("w", "a"), ("w",), ("a",))),
    )
    problem = problem_of(trace)
    assert [(t.id, t.kind, t.home) for t in problem.tensors] == [
        ("w", "weight", "host"),
        ("a", "activation", None),
    ]
    assert [o.id for o in problem.ops] == ["0:f@L0", "1:b"]


# --- recording -----------------------------------------------------------------------------------


def test_a_recording_has_what_ran() -> None:
    clock = iter(range(0, 1000, 10))
    recorder = Recorder(clock_us=lambda: float(next(clock)))
    listeners: list[Listener] = [recorder, Predictor()]
    for listener in listeners:
        listener.enter(("layer", 0))
        listener.touch("w", 100)
        listener.touch(7, 50, reads=False)
        if listener is recorder:
            listener.wrote("w")
        listener.leave()
        listener.enter("other")
        listener.touch(7, 50)
        listener.leave()
        listener.dead(7)
    assert recorder.trace() == Trace(
        (Block("w", 100), Block("block1", 50)),
        (
            Run("layer", 10.0, "0", ("w",), ("block1", "w")),
            Run("other", 10.0, None, ("block1",), (), ("block1",)),
        ),
    )


def test_a_recording_is_bounded_and_a_read_of_the_dead_is_refused() -> None:
    recorder = Recorder(clock_us=lambda: 0.0, most_runs=2)
    for graph in ("a", "b", "c"):
        recorder.enter(graph)
        recorder.touch(graph, 1)
        recorder.leave()
    assert recorder.full
    assert [r.graph for r in recorder.trace().runs] == ["a", "b"]
    other = Recorder(clock_us=lambda: 0.0)
    other.enter("a")
    other.touch("x", 1)
    other.dead("x")
    with pytest.raises(OffloadError, match="block x, which was reported dead"):
        other.touch("x", 1)


# --- the two forms ----------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(any_traces(), st.sampled_from(["w0", 'a "b"', "reads", "é"]))
def test_both_forms_read_back_what_was_written(case: tuple, name: str) -> None:  # type: ignore[type-arg]
    trace = Trace((*case[0].blocks, Block(name, 3)), (Run(name, 1.5, name, (name,)), *case[0].runs))
    assert parse_trace(print_trace(trace)) == trace
    assert loads_trace(json.dumps(trace_to_json(trace))) == trace


def test_a_trace_reads_as_lines() -> None:
    text = (
        "block w0 10\nblock a 5\n"
        "run layer 1.5 on L0 reads w0 writes a\nrun loss 2.0 reads a dead a\n"
    )
    assert print_trace(parse_trace(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run g 1 reads w", 'no block is named "w"'),
        ("block w 1\nrun g 1 dead w\nrun g 1 reads w", r'"w" is read, but runs\[0\] says'),
        ("block w 1\nblock w 2", "already stands"),
        ("block w -1", "whole number of bytes"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        parse_trace(text)
