"""The optimizer's updates as ops of a step: each as soon as its gradient is there.

As `offcompile.optim` runs them with `overlap=True`: weights that live on the host are updated
there, beside their states; of weights on the device the states are on the device too. Where states
may stream, a plan may also have the device make some of the host's updates: their states cross to
it and back, as `offcompile.optim` does it unless `stream=False`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from offcompile.ir import DEVICE, HOST, InvalidInput, Op, Tensor, Violation
from offcompile.machine.hardware import BYTES_PER_US_PER_GBPS, HardwareProfile

from .annotate import Annotated

#: what an update on the host reads and writes a second where nobody measured it: two channels of
#: DDR5, of which a fused AdamW reaches most
USUAL_HOST_GBPS = 50.0
FP32_BYTES = 4
#: float32 values that each element has beside weight and gradient
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


#: what only the host can update, so that it is there that the next step finds its weights
HOME = Tensor("home", 1, "weight", HOST, pinned=True)


@dataclass(frozen=True)
class Updates:
    """Of every weight that has a gradient."""

    #: key of `STATES`
    optimizer: str
    profile: HardwareProfile
    #: whether the host updates by itself, beside the device; else the device does it in place
    apart: bool
    #: whether states on the host may cross to the device for an update
    streams: bool = False

    @classmethod
    def read(
        cls, optimizer: str, profile: HardwareProfile, apart: bool, streams: bool = False
    ) -> Updates:
        name = optimizer.lower()
        if name not in STATES:
            known = ", ".join(map(repr, STATES))
            detail = f"{optimizer!r} is not known; there are {known}, or None for no updates"
            raise InvalidInput([Violation("bad-value", "optimizer", detail)])
        return cls(name, profile, apart, streams)

    @property
    def host_factor(self) -> float | None:
        """How many times longer an update takes on the host; None: the host does none by itself."""
        rate = self.profile.host_adam_gbps or USUAL_HOST_GBPS
        return self.profile.memory_gbps / rate if self.apart else None

    def added(self, annotated: Annotated) -> Annotated:
        problem, names = annotated.problem, annotated.names
        weight_of = {
            names[t.id]: t for t in problem.tensors if t.kind == "weight" and t.id in names
        }
        last: dict[str, int] = {}
        for i, op in enumerate(problem.ops):
            last.update(dict.fromkeys(op.operands, i))
        after: dict[int, list[Op]] = {}
        tensors = {t.id: t for t in problem.tensors}
        labels, named = dict(annotated.labels), dict(names)
        for gradient in problem.tensors:
            weight = weight_of.get(names.get(gradient.id, ""))
            if gradient.kind != "gradient" or weight is None:
                continue
            states = self._states(weight, gradient, annotated.dtypes.get(weight.id))
            op = self._update(weight, gradient, states)
            tensors[gradient.id] = replace(gradient, pinned=False)
            tensors.update({t.id: t for t in states})
            labels[op.id] = f"update of {names[weight.id]}"
            labels.update({t.id: f"{self.optimizer} states of {names[weight.id]}" for t in states})
            named.update({t.id: names[weight.id] for t in states})
            after.setdefault(max(last[gradient.id], last.get(weight.id, 0)), []).append(op)
        ops = [o for i, op in enumerate(problem.ops) for o in (op, *after.get(i, ()))]
        if back := self._back_home(ops, tensors):
            ops.append(back)
            tensors[HOME.id] = HOME
            labels[back.id] = labels[HOME.id] = "weights and states back on the host"
        found = replace(problem, tensors=tuple(tensors.values()), ops=tuple(ops))
        return replace(annotated, problem=found, labels=labels, names=named)

    def _back_home(self, ops: list[Op], tensors: Mapping[str, Tensor]) -> Op | None:
        """The end of a step, which finds on the host what the next one begins with there."""
        written = dict.fromkeys(t for op in ops if op.phase == "update" for t in op.writes)
        at_home = [t for t in written if tensors[t].home == HOST and not tensors[t].pinned]
        if not self.streams or not at_home:
            return None
        reads, writes = (*at_home, HOME.id), (HOME.id,)
        return Op("back home", "update", 0.0, reads, writes, host_duration_us=0.0)

    def _states(
        self, weight: Tensor, gradient: Tensor, dtype: torch.dtype | None
    ) -> tuple[Tensor, ...]:
        size = FP32_BYTES if dtype is None else dtype.itemsize
        # a weight of fewer bits has a float32 one beside it that the update works on
        values = STATES[self.optimizer] + (size < FP32_BYTES)
        nbytes = gradient.nbytes // size * FP32_BYTES * values
        if nbytes == 0:
            return ()
        home = HOST if weight.home == HOST else DEVICE
        # where nothing streams, the runtime updates beside the states: these never move
        pinned = home == DEVICE or (self.apart and not self.streams)
        return (Tensor(f"{weight.id}.states", nbytes, "state", home, pinned=pinned),)

    def _update(self, weight: Tensor, gradient: Tensor, states: tuple[Tensor, ...]) -> Op:
        kept = sum(t.nbytes for t in states)
        nbytes = 2 * (kept + weight.nbytes) + gradient.nbytes
        device_us = nbytes / (self.profile.memory_gbps * BYTES_PER_US_PER_GBPS)
        host_us = nbytes / (
            (self.profile.host_adam_gbps or USUAL_HOST_GBPS) * BYTES_PER_US_PER_GBPS
        )
        hosted = weight.home == HOST
        written = (weight.id, *(t.id for t in states))
        return Op(
            id=f"{weight.id}.update",
            phase="update",
            duration_us=round(device_us, 3),
            reads=(gradient.id, *written),
            writes=written,
            direct=dict.fromkeys((gradient.id, *written), round(device_us, 3))
            if hosted and not self.apart
            else {},
            host_duration_us=round(host_us, 3) if hosted and self.apart else None,
        )
