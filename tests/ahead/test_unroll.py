"""Steps of few layers, written by hand, are extrapolated to steps of many."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from offcompile.ahead.unroll import alike, unroll
from offcompile.ir import Op, Problem, Tensor

KINDS = {"w": "weight", "m": "input"}


class Step:
    """A step that is written op by op. Names of tensors begin with the letter of their kind."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def add(self, made: str, *reads: str, us: float = 1.0, phase: str = "forward") -> str:
        self.ops.append(Op(f"op {made}", phase, us, reads, (made,)))
        return made

    def back(self, made: str, *reads: str, us: float = 1.0) -> str:
        return self.add(made, *reads, us=us, phase="backward")

    @property
    def problem(self) -> Problem:
        names = dict.fromkeys(t for op in self.ops for t in op.operands)
        made = {t for op in self.ops for t in op.writes}
        tensors = (
            Tensor(name, 64, KINDS.get(name[0], "activation"), None if name in made else "device")
            for name in names
        )
        return Problem(tuple(tensors), tuple(self.ops))


def stack(layers: int, kept: Callable[[int], int] | None = None) -> Problem:
    """A first layer makes a bias that all others read, and all read a mask. Each layer adds to the
    gradient of the bias. `kept`: the layer that is read again at the end of forward."""
    step = Step()
    x, bias = step.add("x", "words", us=9.0), step.add("bias", "places", us=8.0)
    made = []
    for i in range(layers):
        scores = step.add(f"s{i}", x, f"w{i}", bias, "mask", us=2.0)
        x = step.add(f"x{i}", x, scores, us=3.0)
        made.append((scores, x))
    step.add("out", x, made[0][1] if kept is None else made[kept(layers)][1], us=4.0)
    gradient, total = step.back("g", "out", us=5.0), ""
    for i in reversed(range(layers)):
        scores, after = made[i]
        part = step.back(f"part{i}", gradient, scores, after, "mask", us=6.0)
        step.back(f"dw{i}", part, f"w{i}", us=2.0)
        total = step.back(f"total{i}", total, part, us=1.5) if total else part
        gradient = step.back(f"g{i}", gradient, part, us=2.5)
    step.back("dbias", total, "places", us=7.0)
    step.back("dx", gradient, "words", us=7.5)
    return step.problem


def stacks(layers: int) -> Problem:
    """Encoder and decoder. At the end of forward each layer of both makes a sign, in ops that all
    look alike; every layer of the decoder reads what the encoder makes."""
    step = Step()
    x, encoded = step.add("x", "words", us=9.0), []
    for i in range(layers):
        x = step.add(f"e{i}", x, f"wencoder{i}", us=2.0)
        encoded.append(x)
    given, y, decoded = x, step.add("y", "words", us=8.0), []
    for i in range(layers):
        crossed = step.add(f"c{i}", y, given, f"wcross{i}", us=3.0)
        y = step.add(f"d{i}", crossed, f"wdecoder{i}", us=4.0)
        decoded.append(y)
    signs = [step.add(f"sign {t}", t, us=0.5) for t in reversed([*encoded, *decoded])]
    gradient, total = step.back("g", y, us=5.0), ""
    for i, sign in enumerate(signs[:layers]):
        gradient = step.back(f"gd{i}", gradient, sign, us=6.0)
        part = step.back(f"part{i}", gradient, given, us=6.5)
        total = step.back(f"total{i}", total, part, us=1.5) if total else part
    gradient = total
    for i, sign in enumerate(signs[layers:]):
        gradient = step.back(f"ge{i}", gradient, sign, us=7.0)
    step.back("dx", gradient, "words", us=7.5)
    return step.problem


def last(layers: int) -> int:
    return layers - 1


def last_but_one(layers: int) -> int:
    return layers - 2


@pytest.mark.parametrize("kept", [None, last, last_but_one])
def test_a_stack_is_that_of_all_layers(kept: Callable[[int], int] | None) -> None:
    made = unroll(stack(5, kept), stack(4, kept), 7)
    assert made is not None and alike(made.problem, stack(12, kept))


def test_two_stacks_are_those_of_all_layers() -> None:
    made = unroll(stacks(5), stacks(4), 7)
    assert made is not None and alike(made.problem, stacks(12))


def test_what_the_traces_do_not_agree_on_is_refused() -> None:
    def first_or_last(layers: int) -> int:
        return 0 if layers == 5 else layers - 1

    assert unroll(stack(5, first_or_last), stack(4, first_or_last), 7) is None


def test_every_copy_has_its_own_origin() -> None:
    made = unroll(stack(5), stack(4), 7)
    assert made is not None
    copies = [copy for old, copy in made.origin.values() if old == "x1"]
    later = {made.origin[op.id][0] for op in made.problem.ops if made.origin[op.id][1] is not None}
    assert sorted(copies, key=str) in (sorted([*range(8)], key=str), [None])
    assert later and later <= made.later.keys()
    kept = {old for old, copy in made.origin.values() if copy is None}
    assert kept <= made.twin.keys()
