"""Tracks weights of one graph that must stay on the device because others share their memory.

Planning must know them before it decides (`Graphs.fixed`). If one is found later, when a weight is
about to leave, the graph is planned again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offcompile.ir import Infeasible
from offcompile.report.log import log_decision, warn
from offcompile.runtime.device.owners import SHARED, name_holders, why_it_stays
from offcompile.runtime.moves.weights import is_on_host

#: weights named in a message
NAMED = 3
#: the module of FSDP2's parameters, and why these stay
OF_FSDP2, GATHERED = "torch.distributed.fsdp.", "FSDP2 gathers it there"


@dataclass(eq=False)
class FixedWeights:
    """Arguments that are such weights, and why. `names`: readable names of arguments."""

    graph: str
    names: Mapping[int, str]
    why: dict[int, str] = field(default_factory=dict)
    #: id of the parameter that each was noted for
    _whose: dict[int, int] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)

    @property
    def indices(self) -> frozenset[int]:
        return frozenset(self.why)

    def look(self, arguments: Sequence[torch.Tensor], among: Iterable[int]) -> None:
        """Note the weights in `among` that must not leave, and forget those of the same call that
        now may: a view saved for a backward pass is gone after it."""
        shared = []
        for i in among:
            parameter = arguments[i]
            if (i in self.why and self._whose[i] != id(parameter)) or is_on_host(parameter):
                continue
            reason = why_it_stays(parameter)
            if reason is None:
                self.why.pop(i, None)
            elif i not in self.why:
                self.why[i], self._whose[i] = reason, id(parameter)
                if reason == SHARED:
                    shared.append(i)
        if not shared:
            return
        for i, holder in zip(shared, name_holders([arguments[i] for i in shared]), strict=True):
            of_fsdp = OF_FSDP2 in holder
            self.why[i] = GATHERED if of_fsdp else f"its memory is also that of {holder}"

    def words(self) -> str:
        """Say which weights stay and why; "" if there are none."""
        if not self.why:
            return ""
        groups: dict[str, list[str]] = {}
        for i, reason in sorted(self.why.items()):
            groups.setdefault(reason, []).append(self.names.get(i, f"argument {i}"))
        said = []
        for reason, names in list(groups.items())[:NAMED]:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            said.append(f"{', '.join(names[:NAMED])}{more} ({reason})")
        rest = f"; {len(groups) - NAMED} more kinds of them" if len(groups) > NAMED else ""
        return "; ".join(said) + rest

    def tell(self) -> None:
        """Warn once about fixed weights, which a plan might have moved otherwise."""
        new = self.why.keys() - self._told
        if new:
            self._told |= new
            text = f"weights that stay on the device: {self.words()}."
            if any("also that of" in self.why[i] for i in new):
                warn(
                    f"{self.graph}: {text} On the host they would share it no more. If the"
                    " reference is yours, drop it before the first compiled call, so that they can"
                    " leave."
                )
            else:
                log_decision(self.graph, text)

    def explained(self, error: Infeasible) -> Infeasible:
        """Add the weights that could not leave to a refusal."""
        if not self.why:
            return error
        reason = f"{error.reason} Weights that had to stay on the device: {self.words()}."
        return Infeasible(reason, error.needed_bytes, error.smallest_change)
