"""`verify=True`: runs a plan's first step without the plan too, and compares all results.

The plain run executes the graphs as they were before any rewriting, op by op (`plain_run`), with
the same random numbers and on copies of the tensors that the graph updates in place. Its own saved
tensors go into its backward, so data corrupted by a move shows in the gradients. A forward whose
loss is dropped does not count: the next one is compared instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from offcompile.graph.graphs import (
    Graphs,
    argument_name,
    copied,
    mutated_inputs,
    outputs_of,
    storage_key,
)
from offcompile.graph.lowering.tangents import whole_tangent
from offcompile.ir import BACKWARD, FORWARD
from offcompile.report.comparing import compare
from offcompile.report.log import warn
from offcompile.report.verified import NAMED, Compared, Verified
from offcompile.runtime.moves.weights import claim

from .plain_run import PlainRun, own_random_numbers, random_state_kept

OWN_NUMBERS = (
    "not compared, because Inductor draws its random numbers in its own way; set"
    " torch._inductor.config.fallback_random = True to have it compared"
)
#: called with the outputs of the compiled run
Check = Callable[[Sequence[Any]], None]


def nothing_to_check(result: Sequence[Any]) -> None:
    """Do nothing: this run is not compared."""


@dataclass(eq=False)
class _Pending:
    """A forward that was compared and whose backward has not run."""

    #: values that the plain run saved, by node name
    saved: Mapping[str, Any]
    #: storages that the compiled run saved
    marks: Mapping[int, StorageWeakRef]

    @property
    def dropped(self) -> bool:
        """True if its backward can no longer be called."""
        return any(ref.expired() for ref in self.marks.values())  # type: ignore[no-untyped-call]

    def is_forward_of(self, arguments: Sequence[Any]) -> bool:
        here = {key for x in arguments if isinstance(x, torch.Tensor) and (key := storage_key(x))}
        return not self.dropped and self.marks.keys() <= here


@dataclass(eq=False)
class Verifying:
    """Verifies one plan. `given`: the graphs before rewriting; `labels`: labels of their nodes."""

    name: str
    given: Graphs
    device: torch.device
    verified: Verified
    labels: Callable[[str, fx.Node], str]
    _pending: _Pending | None = field(default=None, init=False)
    _done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # a compiler takes ownership of the graphs
        backward = None if self.given.backward is None else copied(self.given.backward)
        self._forward, self._backward = copied(self.given.forward), backward

    def begin(self, phase: str, arguments: Sequence[Any]) -> Check:
        """Run one half without the plan if it is to be compared. Call before the compiled run."""
        if self._done:
            return nothing_to_check
        if own_random_numbers(self._forward):
            self.verified.notes[FORWARD] = OWN_NUMBERS
            self._end()
            return nothing_to_check
        try:
            if phase == BACKWARD:
                return self._begin_backward(arguments)
            return self._begin_forward(arguments)
        except RuntimeError as error:
            half = BACKWARD if phase == BACKWARD else FORWARD
            self.verified.notes[half] = f"not compared: the plain run failed ({_first_line(error)})"
            warn(f"{self.name}: verify=True: {half} {self.verified.notes[half]}")
            self._end()
            return nothing_to_check

    def _begin_forward(self, arguments: Sequence[Any]) -> Check:
        if self._pending is not None and not self._pending.dropped:
            return nothing_to_check
        nodes = self._forward.graph.find_nodes(op="placeholder")
        updated = _updated(self._forward)
        mine = {n: x for n, x in zip(nodes, arguments, strict=True) if n in updated}
        copies = {n: x.detach().clone() for n, x in mine.items()}
        given = [copies.get(n, x) for n, x in zip(nodes, arguments, strict=True)]
        expected = self._run(self._forward, given)
        outputs = outputs_of(self._forward)
        count = self.given.num_outputs

        def check(result: Sequence[Any]) -> None:
            rows = [
                compare(self._output_name(i, outputs[i]), "output", result[i], expected[i])
                for i in range(count)
            ]
            rows += [
                compare(self._argument_name(n), "buffer", mine[n], copy)
                for n, copy in copies.items()
            ]
            self._found(FORWARD, rows)
            if self._backward is None:
                self._end()
                return
            saved = {n.name: v for n, v in _nodes(outputs, expected) if n is not None}
            marks = {}
            for x in result[count:]:
                if isinstance(x, torch.Tensor) and (key := storage_key(x)) is not None:
                    marks[key] = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
            self._pending = _Pending(saved, marks)

        return check

    def _begin_backward(self, arguments: Sequence[Any]) -> Check:
        pending, backward = self._pending, self._backward
        if pending is None or backward is None or not pending.is_forward_of(arguments):
            return nothing_to_check
        nodes = backward.graph.find_nodes(op="placeholder")
        tangents = [n for n in nodes if n.name not in pending.saved]
        given = dict(pending.saved)
        if tangents:  # they come last, whatever stands in for the saved tensors
            late = arguments[-len(tangents) :]
            pairs = zip(tangents, late, strict=True)
            given |= {n.name: whole_tangent(x, n.meta["val"]) for n, x in pairs}
        expected = self._run(backward, [given[n.name] for n in nodes])
        names = [self._argument_name(n) for n in self._forward.graph.find_nodes(op="placeholder")]

        def check(result: Sequence[Any]) -> None:
            rows, taken = [], 0
            for i, (mine, theirs) in enumerate(zip(result, expected, strict=True)):
                if mine is None and theirs is not None:
                    taken += 1
                    continue
                name = names[i] if i < len(names) else f"{i}"
                rows.append(compare(name, "gradient", mine, theirs))
            if taken:
                self.verified.notes[BACKWARD] = (
                    f"{taken} gradient{'' if taken == 1 else 's'} not compared, which an optimizer"
                    " used up while backward ran"
                )
            self._found(BACKWARD, rows)
            self._end()

        return check

    def _run(self, module: fx.GraphModule, arguments: Sequence[Any]) -> list[Any]:
        claim(x for x in arguments if isinstance(x, torch.Tensor))
        with random_state_kept(self.device), torch.no_grad():
            return PlainRun(module, self.device, rests=self.device.type != "cpu")(arguments)

    def _found(self, phase: str, rows: Sequence[Compared | None]) -> None:
        kept = tuple(row for row in rows if row is not None)
        self.verified.compared[phase] = kept
        differing = [row for row in self.verified.differing if row in kept]
        if differing and self.verified.exact:
            worst = "".join(f"\n  {row}" for row in differing[:NAMED])
            more = f"\n  … and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
            warn(
                f"{self.name}: {phase} does not give what the plain run gives:{worst}{more}\n"
                "Do not use the results of this step. If the disk may be at fault, set"
                " options={'verify_spill': True}. Ops that are not deterministic differ by"
                " themselves: see torch.use_deterministic_algorithms. Otherwise please report this."
            )

    def _end(self) -> None:
        self._done, self._pending, self._backward = True, None, None

    def _argument_name(self, node: fx.Node) -> str:
        return argument_name(node, self.given) or node.name

    def _output_name(self, index: int, node: object) -> str:
        label = self.labels(FORWARD, node) if isinstance(node, fx.Node) else ""
        return f"{index} ({label})" if label else f"{index}"


def _updated(module: fx.GraphModule) -> set[fx.Node]:
    """Arguments that the graph writes to."""
    written = (n for node in module.graph.nodes for n in mutated_inputs(node))
    return {n for n in written if n.op == "placeholder"}


def _nodes(outputs: Sequence[object], values: Sequence[Any]) -> list[tuple[fx.Node | None, Any]]:
    pairs = zip(outputs, values, strict=True)
    return [(node if isinstance(node, fx.Node) else None, value) for node, value in pairs]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
