"""Plans that are wrong without running them, each refused by the right rule."""

from dataclasses import replace

import pytest

from offcompile.ir import (
    Codec,
    Direct,
    Drop,
    Lane,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    Recompute,
    Start,
    Tensor,
    Tier,
    Update,
)
from offcompile.ir.verify import check_structure, verify

PROBLEM = Problem(
    (
        Tensor("w", 8, "weight", "host", {"fp16": 0.5}),
        Tensor("a", 4, "activation", None, {"fp16": 0.5}),
        Tensor("g", 8, "gradient"),
    ),
    (
        Op("F", "forward", 2, ("w",), ("a",), direct={"w": 4}, recompute=True),
        Op("G", "forward", 1),
        Op("B", "backward", 3, ("w", "a"), ("g",), direct={"a": 5}),
        Op("U", "update", 1, ("w", "g"), ("w",), direct={"w": 2}, host_duration_us=6),
    ),
    steady=True,
)
MACHINE = Machine(
    (Tier("device", 40), Tier("host", 100), Tier("disk")),
    (
        Lane("h2d", "host", "device", 4),
        Lane("d2h", "device", "host", 4),
        Lane("write", "host", "disk", 1),
        Lane("read", "disk", "host", 1),
    ),
    (Codec("fp16", False, 100),),
)
IN = Move("in", "w", "host", "device", "h2d", None, "F")
OUT = Move("out", "w", "device", "host", "d2h", "U", None)
PLAN = Plan(
    (Start("w", "host"),), (IN, OUT), (Drop("w", "device", "out"), Drop("g", "device", "U"))
)


def rules(plan=PLAN, problem=PROBLEM, machine=MACHINE):
    return {v.rule for v in check_structure(problem, machine, plan)}


def with_moves(*moves):
    return replace(PLAN, moves=(*PLAN.moves, *moves))


def changed(**fields):
    """The plan with its first move changed."""
    return replace(PLAN, moves=(replace(IN, **fields), OUT))


def test_a_sound_plan_passes():
    assert check_structure(PROBLEM, MACHINE, PLAN) == ()
    assert verify(PROBLEM, MACHINE, PLAN) == ()


@pytest.mark.parametrize(
    "plan",
    [
        changed(id="out"),
        changed(id="G"),
        replace(changed(id="F@B"), recomputes=(Recompute("F", "B"),)),
        replace(PLAN, start=PLAN.start * 2),
        replace(PLAN, directs=(Direct("F", "w"),) * 2),
        replace(PLAN, recomputes=(Recompute("F", "B"),) * 2),
        replace(PLAN, updates=(Update("w", "device"),) * 2),
    ],
)
def test_duplicate_id(plan):
    assert rules(plan) == {"duplicate-id"}


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, start=(*PLAN.start, Start("nobody", "host"))),
        replace(PLAN, start=(*PLAN.start, Start("w", "moon"))),
        changed(tensor="nobody"),
        changed(source="moon"),
        changed(target="moon"),
        changed(lane="rope"),
        changed(start_after="nobody"),
        changed(ready_before="nobody"),
        changed(ready_before="out"),  # a move is no reader
        changed(start_after="F@B"),  # no such recomputation in the plan
        replace(PLAN, drops=(Drop("nobody", "host"),)),
        replace(PLAN, drops=(Drop("w", "moon"),)),
        replace(PLAN, drops=(Drop("w", "host", "nobody"),)),
        replace(PLAN, directs=(Direct("nobody", "w"),)),
        replace(PLAN, directs=(Direct("F", "nobody"),)),
        replace(PLAN, recomputes=(Recompute("nobody", "B"),)),
        replace(PLAN, recomputes=(Recompute("F", "nobody"),)),
        replace(PLAN, updates=(Update("nobody", "host"),)),
    ],
)
def test_unknown_id(plan):
    assert "unknown-id" in rules(plan)


def test_unknown_id_names_what_there_is():
    (found,) = check_structure(PROBLEM, MACHINE, replace(PLAN, updates=(Update("v", "device"),)))
    assert found.where == "update of v"
    assert "'v'" in found.detail and "a, g, w" in found.detail


def test_a_home_that_the_machine_lacks():
    problem = replace(PROBLEM, tensors=(*PROBLEM.tensors, Tensor("x", 1, "input", "moon")))
    assert rules(problem=problem) == {"unknown-id"}


def test_wrong_lane():
    assert rules(changed(lane="d2h")) == {"wrong-lane"}
    assert rules(changed(lane="read")) == {"wrong-lane"}


def test_bad_value():
    assert rules(replace(PLAN, updates=(Update("w", "moon"),))) == {"bad-value"}
    once = replace(PROBLEM, steady=False)
    assert rules(PLAN, once) == set()
    assert rules(changed(wraps=True), once) == {"bad-value"}
    assert rules(replace(PLAN, start=()), once) == {"bad-value"}
    assert rules(replace(PLAN, start=(Start("w", "disk"),)), once) == {"bad-value"}
    assert rules(replace(PLAN, start=(*PLAN.start, Start("g", "host"))), once) == {"bad-value"}


def test_codecs_that_do_not_exist_or_have_no_ratio():
    assert rules(changed(codec="zip")) == {"codec"}
    out_g = Move("out_g", "g", "device", "host", "d2h", "B", codec="fp16")
    assert rules(with_moves(out_g)) == {"codec"}


OUT_A = Move("out_a", "a", "device", "host", "d2h", "F", codec="fp16")
IN_A = Move("in_a", "a", "host", "device", "h2d", "G", "B", codec="fp16")
WRITE_A = Move("write_a", "a", "host", "disk", "write", "out_a", codec="fp16")


def test_a_compressed_copy_keeps_its_codec():
    assert rules(with_moves(OUT_A, IN_A)) == set()
    assert rules(with_moves(OUT_A, WRITE_A, IN_A)) == set()
    assert rules(with_moves(OUT_A, replace(IN_A, codec=None))) == {"codec"}
    assert rules(with_moves(OUT_A, replace(WRITE_A, codec=None), IN_A)) == {"codec"}
    assert rules(with_moves(replace(OUT_A, codec=None), IN_A)) == {"codec"}


def test_a_form_that_is_merely_possible_is_left_to_the_run():
    # F may write its activation on the host, plainly, besides the compressed copy
    op = replace(PROBLEM.ops[0], direct={"a": 1})
    problem = replace(PROBLEM, ops=(op, *PROBLEM.ops[1:]))
    plan = replace(with_moves(OUT_A, replace(IN_A, codec=None)), directs=(Direct("F", "a"),))
    assert rules(plan, problem) == set()
    # without any copy at the source the form is not the trouble
    assert rules(with_moves(IN_A)) == set()


def test_a_start_copy_is_what_the_last_move_leaves_there():
    packed = replace(PLAN, moves=(IN, replace(OUT, codec="fp16")))
    assert rules(packed) == {"codec"}  # comes in plainly although it waits compressed
    both = (replace(IN, codec="fp16"), replace(OUT, codec="fp16"))
    assert rules(replace(PLAN, moves=both)) == set()
    # a problem that is not steady begins plain: nothing has moved there before
    assert rules(packed, replace(PROBLEM, steady=False)) == set()


def test_direct():
    assert rules(replace(PLAN, directs=(Direct("F", "w"),))) == set()
    assert rules(replace(PLAN, directs=(Direct("F", "a"),))) == {"direct"}  # no figure
    assert rules(replace(PLAN, directs=(Direct("G", "w"),))) == {"direct"}  # no operand
    on_host = replace(PLAN, updates=(Update("w", "host"),))
    assert rules(on_host) == set()
    assert rules(replace(on_host, directs=(Direct("U", "w"),))) == {"direct"}


def test_recompute():
    assert rules(replace(PLAN, recomputes=(Recompute("F", "B"),))) == set()
    assert rules(replace(PLAN, recomputes=(Recompute("G", "B"),))) == {"recompute"}
    assert rules(replace(PLAN, recomputes=(Recompute("F", "F"),))) == {"recompute"}
    update = replace(PROBLEM.ops[3], recompute=True)
    problem = replace(PROBLEM, ops=(*PROBLEM.ops[:3], update, Op("Z", "update", 1)))
    again = replace(PLAN, recomputes=(Recompute("U", "Z"),))
    assert rules(again, problem) == set()
    assert rules(replace(again, updates=(Update("w", "host"),)), problem) == {"recompute"}


def test_update():
    assert rules(replace(PLAN, updates=(Update("a", "device"),))) == {"update"}
    nowhere = replace(PROBLEM, ops=PROBLEM.ops[:3])
    plan = replace(PLAN, moves=(IN,), drops=(), updates=(Update("w", "device"),))
    assert rules(plan, nowhere) == {"update"}
    slow = replace(PROBLEM.ops[3], host_duration_us=None)
    problem = replace(PROBLEM, ops=(*PROBLEM.ops[:3], slow))
    assert rules(replace(PLAN, updates=(Update("w", "host"),)), problem) == {"update"}


def test_late_move():
    late = {"late-move"}
    assert rules(changed(start_after="F")) == late
    assert rules(changed(start_after="B")) == late
    assert rules(changed(start_after="B", wraps=True)) == set()  # awaited in the next step
    assert rules(changed(start_after="B", ready_before=None)) == set()
    assert rules(changed(start_after="out")) == late  # and out starts after U
    again = replace(PLAN, recomputes=(Recompute("F", "B"),))
    in_b = Move("in_b", "w", "host", "device", "h2d", "F@B", "B")
    assert rules(replace(again, moves=(*PLAN.moves, in_b))) == set()
    in_again = replace(in_b, ready_before="F@B")
    assert rules(replace(again, moves=(*PLAN.moves, in_again))) == late


def test_late_move_through_the_host_lane():
    # the host update shares w with B, so it cannot end before B begins; with G it shares nothing
    plan = replace(PLAN, updates=(Update("w", "host"),), drops=())
    from_update = Move("x", "g", "host", "disk", "write", "U", "B")
    assert rules(replace(plan, moves=(from_update,))) == {"late-move"}
    before_g = replace(from_update, ready_before="G")
    ops = (*PROBLEM.ops[:1], *PROBLEM.ops[2:3], PROBLEM.ops[1], PROBLEM.ops[3])
    apart = replace(PROBLEM, ops=ops)  # F, B, G, U
    assert rules(replace(plan, moves=(before_g,)), apart) == set()
    assert rules(replace(PLAN, moves=(before_g,), drops=()), apart) == {"late-move"}


def test_moves_that_trigger_one_another():
    first, second = replace(IN, start_after="out"), replace(OUT, start_after="in")
    assert rules(replace(PLAN, moves=(first, second))) == {"deadlock"}
    assert rules(changed(start_after="in")) == {"deadlock"}


def test_start_over_the_capacity():
    tight = MACHINE.with_capacity("host", 7)
    (found,) = check_structure(PROBLEM, tight, PLAN)
    assert found.rule == "no-space"
    assert "8 bytes of 7 bytes" in found.detail
    both = (replace(IN, codec="fp16"), replace(OUT, codec="fp16"))
    packed = replace(PLAN, moves=both)  # 4 bytes wait on the host
    assert rules(packed, machine=MACHINE.with_capacity("host", 4)) == set()
    assert rules(packed, machine=MACHINE.with_capacity("host", 3)) == {"no-space"}
