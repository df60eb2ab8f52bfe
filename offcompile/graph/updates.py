"""Adds the optimizer's updates to a step as ops, each as soon as its gradient is available.

This models `offcompile.optim` with `overlap=True`: the host updates the weights that live there,
with their states beside them; weights on the device have their states on the device too. If states
may stream, a plan may also run some of the host's updates on the device: their states are loaded
and sent back, as `offcompile.optim` does unless `stream=False`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from offcompile.ir import DEVICE, HOST, InvalidInput, Op, Tensor, Violation
from offcompile.machine.hardware import BYTES_PER_US_PER_GBPS, HardwareProfile

from .annotate import Annotated

#: GB/s that an update on the host reads and writes, if not measured: two channels of DDR5, of
#: which a fused AdamW reaches most
USUAL_HOST_GBPS = 50.0
FP32_BYTES = 4
#: float32 values per element besides weight and gradient
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


#: states that may stream are updated in blocks of at most this size, so that one block's transfer
#: runs beside another's update. The runtime's blocks are smaller; fewer are quicker to plan
BLOCK_BYTES = 128 << 20

#: dummy tensor that only the host can update; it forces weights back to the host for the next step
HOME = Tensor("home", 1, "weight", HOST, pinned=True)


@dataclass(frozen=True)
class Updates:
    """The updates of all weights that have a gradient."""

    #: key of `STATES`
    optimizer: str
    profile: HardwareProfile
    #: True if the host runs updates itself, in parallel; else the device runs them in place
    apart: bool
    #: True if states on the host may be loaded to the device for an update
    streams: bool = False
    #: the largest block of states that streams; None: a weight's states stream as a whole
    block_bytes: int | None = BLOCK_BYTES

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
        """The slowdown of an update on the host; None if the host runs none itself."""
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
            made = tuple(self._updates(weight, gradient, states))
            tensors[gradient.id] = replace(gradient, pinned=False)
            tensors.update({t.id: t for t in states})
            labels.update({op.id: f"update of {names[weight.id]}" for op in made})
            labels.update({t.id: f"{self.optimizer} states of {names[weight.id]}" for t in states})
            named.update({t.id: names[weight.id] for t in states})
            after.setdefault(max(last[gradient.id], last.get(weight.id, 0)), []).extend(made)
        ops = [o for i, op in enumerate(problem.ops) for o in (op, *after.get(i, ()))]
        if back := self._back_home(ops, tensors):
            ops.append(back)
            tensors[HOME.id] = HOME
            labels[back.id] = labels[HOME.id] = "weights and states back on the host"
        found = replace(problem, tensors=tuple(tensors.values()), ops=tuple(ops))
        return replace(annotated, problem=found, labels=labels, names=named)

    def _back_home(self, ops: list[Op], tensors: Mapping[str, Tensor]) -> Op | None:
        """The op that ends a step and requires the host's weights and states to be back there for
        the next one; None if none can be elsewhere."""
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
        # a lower-precision weight has a float32 copy that the update works on
        values = STATES[self.optimizer] + (size < FP32_BYTES)
        nbytes = gradient.nbytes // size * FP32_BYTES * values
        if nbytes == 0:
            return ()
        home = HOST if weight.home == HOST else DEVICE
        # without streaming, the runtime updates where the states are, so they never move
        pinned = home == DEVICE or (self.apart and not self.streams)
        blocks = 1
        if not pinned and self.block_bytes is not None:
            blocks = -(-nbytes // self.block_bytes)
        return tuple(
            Tensor(_numbered(f"{weight.id}.states", i), part, "state", home, pinned=pinned)
            for i, part in enumerate(_parts(nbytes, blocks))
        )

    def _updates(
        self, weight: Tensor, gradient: Tensor, states: tuple[Tensor, ...]
    ) -> Iterator[Op]:
        """One op for each block of states, or one for all if there are none."""
        written = sum(t.nbytes for t in states)
        for i in range(max(1, len(states))):
            block = states[i : i + 1]
            share = block[0].nbytes / written if block else 1.0
            yield self._update(weight, gradient, block, share, i)

    def _update(
        self,
        weight: Tensor,
        gradient: Tensor,
        states: tuple[Tensor, ...],
        share: float,
        number: int,
    ) -> Op:
        """The update of this share of the weight, with the states of that share."""
        kept = sum(t.nbytes for t in states)
        nbytes = 2 * kept + share * (2 * weight.nbytes + gradient.nbytes)
        device_us = nbytes / (self.profile.memory_gbps * BYTES_PER_US_PER_GBPS)
        host_us = nbytes / (
            (self.profile.host_adam_gbps or USUAL_HOST_GBPS) * BYTES_PER_US_PER_GBPS
        )
        hosted = weight.home == HOST
        written = (weight.id, *(t.id for t in states))
        return Op(
            id=_numbered(f"{weight.id}.update", number),
            phase="update",
            duration_us=round(device_us, 3),
            reads=(gradient.id, *written),
            writes=written,
            direct=dict.fromkeys((gradient.id, *written), round(device_us, 3))
            if hosted and not self.apart
            else {},
            host_duration_us=round(host_us, 3) if hosted and self.apart else None,
        )


def _numbered(name: str, number: int) -> str:
    return f"{name}/{number + 1}" if number else name


def _parts(nbytes: int, blocks: int) -> list[int]:
    """About equal parts, each of whole values."""
    ends = [i * (nbytes // FP32_BYTES) // blocks * FP32_BYTES for i in range(blocks)] + [nbytes]
    return [end - start for start, end in pairwise(ends)]
