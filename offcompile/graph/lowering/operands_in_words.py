"""Keeps Inductor's texts about operators short.

An op without a lowering of its own gets a fallback, and torch 2.11 and 2.12 write all its operands
out for the log, whether anybody reads that log or not; every version does so for a lowering that
fails. An operand's text contains that of its own operands, and so on: it doubles with each op of
ours on the way, since such an op takes a tensor twice, once as a ticket. Forty of them would take
longer to write than the universe has lasted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def short_operands() -> Iterator[None]:
    """Name operands in Inductor's messages by type, buffer, dtype and sizes, within the block."""
    from torch._inductor.exc import OperatorIssue

    before = OperatorIssue.__dict__["operator_str"]
    OperatorIssue.operator_str = staticmethod(_in_words)  # type: ignore[method-assign]
    try:
        yield
    finally:
        OperatorIssue.operator_str = before  # type: ignore[method-assign]


def _in_words(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    lines = [f"target: {target}", *(f"args[{i}]: {_told(arg)}" for i, arg in enumerate(args))]
    lines += [f"{name}: {_told(value)}" for name, value in kwargs.items()]
    return "\n".join(f"  {line}" for line in lines)


def _told(value: Any) -> str:
    from torch._inductor.ir import IRNode

    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_told, value))}]"
    if not isinstance(value, IRNode):
        return str(value)
    parts = [type(value).__name__]
    for name in ("maybe_get_name", "maybe_get_dtype", "maybe_get_size"):
        found = getattr(value, name)()
        if found is not None:
            parts.append(str(found))
    return " ".join(parts)
