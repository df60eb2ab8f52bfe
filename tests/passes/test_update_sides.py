"""Which side makes each update of a step that is planned: list scheduling, and what a plan says."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offcompile.ahead.plan import Ahead, ForecastRequest
from offcompile.graph.update_advice import advice
from offcompile.machine.options import Options
from offcompile.passes.select.update_sides import Idle, Ready, updated_on_device
from offcompile.run.accounts.apply_placement import WeightPlaces
from offcompile.runtime.states.updates import advice_for

BUSY = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda t: (t[0], sum(t))))


@given(BUSY, st.integers(0, 80), st.integers(0, 40))
def test_idle_time_is_what_nothing_else_takes(
    busy: list[tuple[int, int]], start: int, takes: int
) -> None:
    taken = {t for begin, end in busy for t in range(begin, end)}
    at, left = start, takes
    while left:
        left -= at not in taken
        at += 1
    found = Idle(busy).end_of(start, takes)
    # a lane that is busy just then changes nothing for work that is over
    assert found == at or (takes == 0 and found >= at)


def ends(gradients: list[Ready], device: frozenset[str]) -> int:
    host = into = made = back = 0
    for g in gradients:
        if g.weight in device:
            into += g.in_ns
            made = max(into, g.ready_ns, made) + g.device_ns
            back = max(back, made) + g.out_ns
        else:
            host = max(host, g.ready_ns) + g.host_ns
    return max(host, made, back)


TIMES = st.integers(1, 30)


@given(st.lists(st.tuples(TIMES, TIMES, TIMES, TIMES), min_size=1, max_size=6))
def test_no_later_than_either_side_alone_and_near_the_best(
    rows: list[tuple[int, int, int, int]],
) -> None:
    gradients = [
        Ready(f"w{i}", 10 * i, host, device, into, out)
        for i, (host, device, into, out) in enumerate(rows)
    ]
    names = [g.weight for g in gradients]
    found = ends(gradients, updated_on_device(gradients, [], []))
    every = [
        ends(gradients, frozenset(n for n, on in zip(names, chosen, strict=True) if on))
        for chosen in product((False, True), repeat=len(names))
    ]
    assert min(every) <= found <= 2 * min(every)


def test_a_busy_link_sends_updates_to_the_host() -> None:
    gradients = [Ready(f"w{i}", 0, 10, 1, 5, 5) for i in range(4)]
    assert updated_on_device(gradients, [], [])
    assert not updated_on_device(gradients, [(0, 1000)], [])
    assert not updated_on_device(gradients, [], [(0, 1000)])


def test_a_plan_advises_on_every_weight_that_it_has_on_the_host() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(2048, 2048) for _ in range(8)]
        model, x = nn.Sequential(*layers), torch.empty(512, 2048)
    options = Options.read({"memory": "80MiB", "hardware": "rtx4090"})
    ahead = Ahead.of(ForecastRequest(model, (x,), {}, options), lambda text: None)
    choice = ahead.choose("80MiB", lambda text: None)
    profile = ahead.target.profile  # type: ignore[attr-defined]
    found = advice(choice.annotated, choice.decided.result.timeline, profile)
    problem = choice.annotated.problem
    hosted = {t.id for t in problem.tensors if t.kind == "weight" and t.home == "host"}
    assert found.keys() == hosted
    assert set(found.values()) == {True, False}


def test_the_first_call_hands_advice_to_the_optimizer() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    places = WeightPlaces(frozenset(range(3)), "", True, by_device={0: True, 2: False})
    assert places.place(weights)
    assert [advice_for(w) for w in weights] == [True, None, False]
