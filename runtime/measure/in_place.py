"""Measures how much longer an op takes with one operand on the host, used in place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offcompile.runtime.memory.malloc import tensor_memory
from offcompile.runtime.memory.malloc.heap import heap

from .cold import cool
from .op import OpCall, Operands, TensorSpec, time_cold_us
from .op_cuda import cuda_time_us
from .timing import Stopwatch, undisturbed

log = logging.getLogger(__name__)

#: the two variants alternate, so that a machine that slows down slows both
ROUNDS = 3
#: from here on the first round is exact enough
CLEAR_SLOWDOWN = 4.0


@dataclass(frozen=True)
class InPlaceCall:
    """A call, and a variant of it with one operand on the host.

    The variant runs `target`, with the same arguments but argument `index` on the host. If `index`
    is None, it runs with the first `count` arguments and then `more`, and writes its output to the
    host.
    """

    call: OpCall
    target: Any
    index: int | None = None
    count: int = 0
    more: tuple[object, ...] = ()

    @property
    def key(self) -> str:
        what = "out" if self.index is None else self.index
        return f"in place {what} {self.target}: {self.call.key}"

    @property
    def operand(self) -> TensorSpec:
        spec = self.call.outputs[0] if self.index is None else self.call.args[self.index]
        assert isinstance(spec, TensorSpec)
        return spec


@dataclass(frozen=True)
class Slowdown:
    ratio: float
    disturbed: bool


def measure_in_place(
    what: InPlaceCall,
    operands: Operands,
    addressable: Callable[[int], torch.Tensor],
    seconds: float = 0.02,
) -> Slowdown | None:
    """The time in place over the time without, both uncached; None if the op fails by itself.

    `addressable` returns flat uint8 host memory that ops can use. `seconds`: see `time_us`.
    """
    call = what.call
    if operands.device.type == "cpu":
        tensor_memory.install()
    try:
        with undisturbed(operands.device):
            args, kwargs = operands.make(call)
            nbytes = what.operand.extent * what.operand.dtype.itemsize
            # an output's memory is cached between runs while twice as much is in use
            host = addressable(nbytes if what.index is not None else 2 * nbytes)
            changed = [*args[: what.count], *what.more]
            named: dict[str, object] = {}
            if what.index is not None:
                changed, named = list(args), kwargs
                changed[what.index] = _on_host(args[what.index], what.operand, host)
            heap().prepare()

            def cool_host() -> None:
                if host.device.type == "cpu":
                    cool(host.data_ptr(), host.nbytes)

            def time_of(target: Any, args: list[object], kwargs: dict[str, object]) -> float:
                def run() -> object:
                    return target(*args, **kwargs)

                if operands.device.type == "cuda":
                    return cuda_time_us(run, operands.device, seconds)
                return time_cold_us(run, operands, seconds, cool_host)

            plain, in_place = [], []
            with heap().laid_out(), Stopwatch() as watch:
                for _ in range(ROUNDS):
                    plain.append(time_of(call.target, args, kwargs))
                    in_place.append(time_of(what.target, changed, named))
                    if in_place[0] > CLEAR_SLOWDOWN * plain[0]:
                        break
        return Slowdown(min(in_place) / min(plain), watch.disturbed)
    except Exception as error:  # an op may raise anything on made-up data: a model estimates it
        log.debug("%s does not run by itself: %s", what.key, error)
        return None


def _on_host(here: object, spec: TensorSpec, host: torch.Tensor) -> torch.Tensor:
    assert isinstance(here, torch.Tensor)
    flat = host.view(spec.dtype)
    flat.copy_(here.as_strided((spec.extent,), (1,)))
    return flat.as_strided(spec.size, spec.stride)
