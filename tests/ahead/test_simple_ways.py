"""The simple ways to fit a step: what they take, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offcompile.ahead.simple_reruns import (
    Reruns,
    block_named,
    blocks_of,
    crossing,
    kernels_parted,
    path_of,
)
from offcompile.ahead.simple_ways import (
    BOTH,
    BUDGETED,
    CHECKPOINTED,
    OFFLOADED,
    SimpleWay,
    SimpleWays,
    leaving_gradients,
    policy_ways,
)
from offcompile.ir import DEVICE, HOST, Infeasible, Lane, Machine, Op, Problem, Tensor, Tier
from offcompile.passes.build.schedule import build
from offcompile.passes.registry import POLICIES
from offcompile.planning.planner import certify


def link(capacity: int, bytes_per_us: float = 10.0) -> Machine:
    lanes = Lane("h2d", HOST, DEVICE, bytes_per_us), Lane("d2h", DEVICE, HOST, bytes_per_us)
    return Machine((Tier(DEVICE, capacity), Tier(HOST)), lanes)


# --- blocks by hand -----------------------------------------------------------------------------

BLOCKS, NARROW, WIDE = 4, 100, 1000


def blocks() -> tuple[Problem, dict[str, str]]:
    """Each block widens its input, bends it, and narrows it; backward needs all but the last."""
    tensors = [Tensor("x", NARROW, "input", DEVICE, pinned=True)]
    ops = []
    for i in range(BLOCKS):
        into = f"r{i - 1}" if i else "x"
        tensors += [Tensor(f"{t}{i}", WIDE, "activation") for t in ("wide", "bent")]
        tensors.append(Tensor(f"r{i}", NARROW, "activation"))
        ops += [
            Op(f"widen{i}", "forward", 10, (into,), (f"wide{i}",), recompute=True),
            Op(f"bend{i}", "forward", 2, (f"wide{i}",), (f"bent{i}",), recompute=True),
            Op(f"narrow{i}", "forward", 10, (f"bent{i}", into), (f"r{i}",), recompute=True),
        ]
    labels = {op.id: f"h.{op.id[-1]}.mlp {WIDE} bfloat16" for op in ops}
    for i in reversed(range(BLOCKS)):
        into = f"r{i - 1}" if i else "x"
        reads = (f"bent{i}", f"wide{i}", into, *((f"g{i + 1}",) if i < BLOCKS - 1 else ()))
        tensors.append(Tensor(f"g{i}", NARROW, "temporary"))
        ops.append(Op(f"back{i}", "backward", 40, reads, (f"g{i}",)))
    return Problem(tuple(tensors), tuple(ops)), labels


FORWARD_US, BACKWARD_US = 22 * BLOCKS, 40 * BLOCKS


def ways_of(problem: Problem, capacity: int, labels: dict[str, str]) -> dict[str, SimpleWay]:
    found = SimpleWays(problem, link(capacity), capacity, labels).all()
    return {way.name: way for way in found}


def test_checkpointing_keeps_what_enters_a_block_and_runs_its_inside_again() -> None:
    problem, labels = blocks()
    _, chosen = Reruns(problem).blocks_again(labels, 0)
    again = {(f"{op}{i}", f"back{i}") for i in range(BLOCKS) for op in ("widen", "bend")}
    assert chosen.reruns == again
    # at the last block's backward: the inputs of all blocks, one inside, and a gradient
    assert chosen.peak_bytes == BLOCKS * NARROW + 2 * WIDE + NARROW
    way = ways_of(problem, 10 * WIDE, labels)[CHECKPOINTED]
    assert way.fits and way.peak_bytes == chosen.peak_bytes
    assert way.step_us == FORWARD_US + BACKWARD_US + 12 * BLOCKS


def test_a_way_that_does_not_fit_says_by_how_much_and_what_it_would_take() -> None:
    problem, labels = blocks()
    peak = ways_of(problem, 10 * WIDE, labels)[CHECKPOINTED].peak_bytes
    assert peak is not None
    tight = ways_of(problem, peak - 7, labels)[CHECKPOINTED]
    assert not tight.fits and tight.missing_bytes == 7
    assert tight.step_us == FORWARD_US + BACKWARD_US + 12 * BLOCKS
    assert "does not fit: 7 B missing" in tight.to_line()
    assert ways_of(problem, peak, labels)[CHECKPOINTED].fits


def test_simple_ways_are_lawful_plans_at_their_peaks() -> None:
    problem, labels = blocks()
    reruns = Reruns(problem)
    offloading = Reruns(trained(), leaving_gradients(trained()))
    for choices, chosen in (
        reruns.blocks_again(labels, 0),
        (reruns, reruns.budgeted(3000)),
        (offloading, offloading.of(frozenset())),
    ):
        made, machine = choices.problem, link(chosen.peak_bytes)
        plan = build(made, machine, choices.decisions(chosen.reruns))
        timeline = certify(made, machine, plan, "a simple way")
        assert timeline.peak_bytes[DEVICE] <= chosen.peak_bytes
        with pytest.raises(Infeasible):
            build(made, link(chosen.peak_bytes - 1), choices.decisions(chosen.reruns))


def test_without_names_forward_is_cut_into_equal_parts() -> None:
    problem, _ = blocks()
    _, chosen = Reruns(problem).blocks_again({}, 0)
    alone = Reruns(problem).of(frozenset()).peak_bytes
    assert chosen.reruns and chosen.peak_bytes < alone


def test_torchs_budget_pays_for_no_more_than_fits() -> None:
    problem, labels = blocks()
    reruns = Reruns(problem)
    alone = reruns.of(frozenset()).peak_bytes
    assert reruns.budgeted(alone).reruns == frozenset()
    # a byte less: what is cheapest to make again, in one layer rather than in all
    little = reruns.budgeted(alone - 1)
    assert {op.rstrip("0123456789") for op, _ in little.reruns} == {"bend"}
    assert 0 < len(little.reruns) < BLOCKS and little.peak_bytes < alone
    assert reruns.budgeted(1).peak_bytes > 1
    found = ways_of(problem, alone - 1, labels)[BUDGETED]
    assert found.fits and found.step_us == FORWARD_US + BACKWARD_US + 2 * len(little.reruns)


def test_blocks_are_told_by_the_numbers_in_modules_paths() -> None:
    assert block_named("model.h.3.mlp.act", 1) == "model.h.3"
    assert block_named("stages.0.layers.2.conv", 2) == "stages.0.layers.2"
    assert block_named("lm_head", 1) is None
    assert [path_of(x) for x in ("h.0 5×5 int64", "0  int64", "h.0", "5 int64", "")] == [
        "h.0",
        "0",
        "h.0",
        "",
        "",
    ]
    problem, labels = blocks()
    labels |= {"bend1": f"{WIDE} bfloat16", "widen0": "wte 5×5 int64"}
    found = blocks_of(problem, labels, 1)
    assert found[0] is None and found[1:3] == ["h.0", "h.0"]
    assert found[3:6] == ["h.1"] * 3  # no path of its own: as the op before it


def test_a_kernel_that_ends_one_block_and_begins_the_next_is_taken_apart() -> None:
    tensors = (
        Tensor("x", NARROW, "input", DEVICE),
        *(Tensor(t, NARROW, "activation") for t in ("inner", "sum", "norm", "out")),
        *(Tensor(t, 1, "activation") for t in ("mean",)),
        Tensor("mask", NARROW // 2, "activation"),
    )
    ops = (
        Op("inside", "forward", 10, ("x",), ("inner",), recompute=True),
        Op("add", "forward", 4, ("inner", "x"), ("sum", "norm", "mean", "mask"), recompute=True),
        Op("use", "forward", 10, ("norm",), ("out",), recompute=True),
        Op("end", "forward", 1, ("out", "sum"), (), recompute=True),
        Op("back", "backward", 5, ("norm", "mean", "mask", "sum"), ()),
    )
    problem = Problem(tensors, ops)
    assert crossing(problem, [2]) == {"sum", "norm"}
    parted, enters = kernels_parted(problem, [2])
    assert enters == {"sum"}
    first, then = parted.op["add"], parted.op["add.then"]
    assert first.writes == ("sum", "mask") and then.writes == ("norm", "mean")
    assert then.reads == ("sum",) and first.duration_us + then.duration_us == 4
    assert parted.op_index["add.then"] == parted.op_index["add"] + 1


# --- ZeRO-Offload by hand -----------------------------------------------------------------------


def trained() -> Problem:
    """Two weights of 100 bytes: their gradients come 20 µs apart; an update takes 5 µs here."""
    tensors = [Tensor("x", 10, "input", DEVICE, pinned=True)]
    for i in range(2):
        tensors += [
            Tensor(f"w{i}", 100, "weight", DEVICE, pinned=True),
            Tensor(f"s{i}", 200, "state", DEVICE, pinned=True),
            Tensor(f"g{i}", 100, "gradient"),
            Tensor(f"a{i}", 50, "activation"),
        ]
    ops = [
        Op("f0", "forward", 10, ("x", "w0"), ("a0",)),
        Op("f1", "forward", 10, ("a0", "w1"), ("a1",)),
    ]
    for i in (1, 0):
        ops.append(Op(f"b{i}", "backward", 20, (f"a{i}", f"w{i}"), (f"g{i}",)))
        moved = (f"w{i}", f"s{i}")
        reads = (f"g{i}", *moved)
        ops.append(Op(f"u{i}", "update", 5, reads, moved))
    return Problem(tuple(tensors), tuple(ops))


def test_zero_offload_updates_after_backward_and_sends_weights_back_meanwhile() -> None:
    problem = trained()
    ways = SimpleWays(problem, link(1000), 1000, {}, 10.0).all()
    found = {way.name: way for way in ways}
    assert set(found) == {CHECKPOINTED, BUDGETED, OFFLOADED, BOTH}
    # 60 µs of forward and backward; the last gradient (10 µs on the link) is there at 70; updates
    # end at 120 and 170, the last weight is back 10 µs later
    assert found[OFFLOADED].step_us == 180
    # both weights, the input, both activations and a gradient; no states
    assert found[OFFLOADED].peak_bytes == 200 + 10 + 100 + 100
    # on the device instead: states too, and each gradient only until its update
    assert found[CHECKPOINTED].peak_bytes == 600 + 10 + 100 + 100
    assert found[CHECKPOINTED].step_us == 70


def test_over_a_slow_link_weights_wait_for_each_other_on_their_way_back() -> None:
    problem = trained()
    ways = SimpleWays(problem, link(1000, bytes_per_us=1.0), 1000, {}, 1.0).all()
    found = {way.name: way for way in ways}
    # the first gradient leaves at 40, arrives at 140, the second at 240; updates end at 245 and
    # 250, weights are back at 345 and 445
    assert found[OFFLOADED].step_us == 445


def test_gradients_wait_on_the_device_no_longer_than_to_the_last_op_that_touches_them() -> None:
    away = leaving_gradients(trained())
    assert {(a.tensor, a.after) for a in away} == {("g0", "u0"), ("g1", "u1")}


def test_zero_offload_asks_for_updates_on_the_host_and_for_a_link() -> None:
    names = [w.name for w in SimpleWays(trained(), link(1000), 1000, {}, None).all()]
    assert names == [CHECKPOINTED, BUDGETED]
    alone = Machine((Tier(DEVICE, 1000),))
    names = [w.name for w in SimpleWays(trained(), alone, 1000, {}, 10.0).all()]
    assert names == [CHECKPOINTED, BUDGETED]


def test_each_published_policy_is_tried_and_says_why_not() -> None:
    problem, _ = blocks()
    found = {way.name: way for way in policy_ways([problem], link(2500), seconds=0.5)}
    assert found.keys() == POLICIES.keys() - {"joint"}
    assert found["recompute"].fits
    refused = found["weight_rotation"]  # there are no weights to move
    assert not refused.fits and refused.reason and refused.step_us is None


def test_states_that_fit_nowhere_are_no_plan() -> None:
    problem = trained()
    machine = replace(link(1000), tiers=(Tier(DEVICE, 1000), Tier(HOST, 300)))
    found = {w.name: w for w in SimpleWays(problem, machine, 1000, {}, 10.0).all()}
    assert found[OFFLOADED].step_us is None and "400 bytes" in found[OFFLOADED].reason
    assert not found[OFFLOADED].fits and "no plan" in found[OFFLOADED].to_line()
