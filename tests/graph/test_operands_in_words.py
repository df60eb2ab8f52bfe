"""Inductor's messages name operands without writing out all that they are made of."""

from __future__ import annotations

import torch
from torch._inductor import ir
from torch._inductor.exc import LoweringException, OperatorIssue

from offcompile.graph.lowering.operands_in_words import short_operands


def operand() -> ir.TensorBox:
    layout = ir.FixedLayout(torch.device("cpu"), torch.float32, [2, 3])
    return ir.TensorBox.create(ir.InputBuffer(name="arg0_1", layout=layout))


def test_operands_are_named_by_type_buffer_dtype_and_sizes() -> None:
    with short_operands():
        said = str(LoweringException(ValueError("no"), "aten.cat", [[operand()], 1], {"dim": 0}))
    assert said.splitlines() == [
        "ValueError: no",
        "  target: aten.cat",
        "  args[0]: [TensorBox arg0_1 torch.float32 [2, 3]]",
        "  args[1]: 1",
        "  dim: 0",
    ]


def test_a_chain_is_named_without_what_it_is_made_of() -> None:
    class Telling(ir.InputBuffer):
        def __str__(self) -> str:
            raise AssertionError("an operand was written out")

    layout = ir.FixedLayout(torch.device("cpu"), torch.float32, [2, 3])
    with short_operands():
        assert "buf7" in OperatorIssue.operator_str("op", [Telling(name="buf7", layout=layout)], {})


def test_outside_of_the_block_messages_are_torch_s() -> None:
    before = OperatorIssue.operator_str
    with short_operands():
        assert OperatorIssue.operator_str is not before
    assert OperatorIssue.operator_str is before
