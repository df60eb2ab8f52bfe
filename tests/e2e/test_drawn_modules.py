"""Modules drawn at random train to the plain run's bits; the generator reaches all it names."""

from __future__ import annotations

import pytest
from trust import drawn_modules
from trust.drawn_modules import KINDS, Op, Program


@pytest.mark.soak  # `test_conform_modules` has torch's own modules at the minimum
def test_drawn_modules_are_the_plain_run_at_the_minimum() -> None:
    chosen = drawn_modules.drawn(4, seed=1)
    least, middle, refused = drawn_modules.sweep(chosen, seed=1)
    assert not least.failures + middle.failures
    assert least.of + len(refused) == 4
    assert least.changed and least.moves


def test_every_ingredient_is_drawn() -> None:
    programs = drawn_modules.drawn(120, seed=0)
    kinds = {op.kind for p in programs for _, op in drawn_modules.walk(p.ops)}
    assert kinds == set(KINDS)
    assert {p.optimizer for p in programs} == {"sgd", "adamw"}
    assert {p.dtype for p in programs} == {"float32", "bfloat16"}
    assert {p.input_needs_gradient for p in programs} == {False, True}
    assert {p.outputs for p in programs} == {1, 2, 3}
    bodies = [inner for p in programs for _, op in drawn_modules.walk(p.ops) for inner in op.body]
    assert any(inner.body for inner in bodies), "no checkpoint lies in another one"


def test_a_program_is_made_again_from_its_repr() -> None:
    for program in drawn_modules.drawn(20, seed=2):
        assert eval(repr(program), {"Program": Program, "Op": Op}) == program


def test_a_failing_program_shrinks_to_the_op_that_fails() -> None:
    body = (Op("relu"), Op("dropout"), Op("linear"))
    program = Program((Op("add"), Op("checkpoint", body=body), Op("cat")), "adamw", "bfloat16")

    def fails(program: Program) -> bool:
        return any(op.kind == "dropout" for _, op in drawn_modules.walk(program.ops))

    assert drawn_modules.shrunk(program, fails) == Program((Op("dropout"),))
