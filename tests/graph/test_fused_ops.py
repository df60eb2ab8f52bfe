"""Ops that Inductor fuses become one op, with what it computes there and never writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from offcompile.graph.annotate import Annotated
from offcompile.graph.kernels import merge_kernels
from offcompile.ir import BACKWARD, DEVICE, FORWARD, Op, Problem, Tensor

#: bytes of each tensor that is written to memory
NBYTES = 100


def merged(*ops: Op, unwritten: tuple[str, ...] = ()) -> Annotated:
    """The ops merged, where the names of library calls begin with "mm"."""
    made = {t for op in ops for t in op.writes}
    names = dict.fromkeys(t for op in ops for t in op.operands)
    tensors = [
        Tensor(t, 0 if t in unwritten else NBYTES, "activation", None if t in made else DEVICE)
        for t in names
    ]
    node_of = {op.id: ((op.phase, op.id),) for op in ops}
    annotated = Annotated(Problem(tuple(tensors), ops, False), {}, {}, node_of, {}, {}, {})
    graphs: Any = [
        (
            phase,
            SimpleNamespace(
                graph=SimpleNamespace(
                    nodes=[SimpleNamespace(name=op.id) for op in ops if op.phase == phase]
                )
            ),
        )
        for phase in (FORWARD, BACKWARD)
    ]
    return merge_kernels(annotated, graphs, lambda node: not node.name.startswith("mm"))


def op(name: str, reads: str, writes: str, phase: str = FORWARD) -> Op:
    reads_, writes_ = tuple(reads.split()), tuple(writes.split())
    return Op(name, phase, 1.0, reads_, writes_, recompute=phase == FORWARD)


def gated(*more: Op) -> Annotated:
    """silu(x @ a) * (x @ b), whose sigmoid is computed behind the second product."""
    return merged(
        op("mm_a", "x", "a"),
        op("exp", "a", "e"),
        op("sigmoid", "e a", "s"),
        *more,
        op("mm_b", "x", "b"),
        op("mul", "s e a b", "m"),
        op("mm_c", "m", "c"),
        op("mm_c_back", "m c", "", BACKWARD),
        unwritten=("e", "s"),
    )


def test_a_value_that_is_never_written_is_computed_where_it_is_read() -> None:
    found = gated()
    assert [o.id for o in found.problem.ops] == ["mm_a", "mm_b", "exp", "mm_c", "mm_c_back"]
    kernel = found.problem.op["exp"]
    assert (set(kernel.reads), kernel.writes) == ({"a", "b"}, ("m",))
    assert kernel.recompute
    assert [name for _, name in found.node_of["exp"]] == ["exp", "sigmoid", "mul"]
    assert {"e", "s"}.isdisjoint(t.id for t in found.problem.tensors)


def test_no_part_of_a_kernel_runs_again_without_the_other() -> None:
    found = gated(op("cos", "s", "k"))  # reads the sigmoid, too, before the second product
    reader = next(o for o in found.problem.ops if "m" in o.writes)
    assert "s" in reader.reads
    assert not reader.recompute


def test_a_value_of_several_readers_is_there_for_the_first() -> None:
    found = merged(
        op("mm_a", "x", "a"),
        op("exp", "a", "e"),
        op("sigmoid", "e a", "s"),  # late, and so no reader that counts
        op("mm_b", "x", "b"),
        op("log", "e b", "l"),
        op("mm_c", "l", "c"),
        op("mul", "s c", "m"),
        unwritten=("e", "s"),
    )
    assert [o.id for o in found.problem.ops] == ["mm_a", "mm_b", "exp", "mm_c", "sigmoid"]
    assert [n for _, n in found.node_of["exp"]] == ["exp", "log"]
    assert [n for _, n in found.node_of["sigmoid"]] == ["sigmoid", "mul"]


def test_a_value_stays_in_its_place_if_what_it_is_made_of_changes_before_it_is_read() -> None:
    found = gated(op("mm_into", "x", "a"))
    assert [o.id for o in found.problem.ops][:3] == ["mm_a", "exp", "mm_into"]
