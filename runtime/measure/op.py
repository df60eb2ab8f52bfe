"""Measures one op by itself, on made-up data of the right shape: its time and its memory.

It never touches the user's tensors. Operands share one buffer that is reused for every op, so that
the timing covers the op and its outputs, not the first touch of its inputs. Operands are read from
memory, not from caches, and results go to uncached blocks that were touched before: as in a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.memory.malloc import tensor_memory
from offcompile.runtime.memory.malloc.glibc import return_freed_memory
from offcompile.runtime.memory.malloc.heap import heap

from .cold import cool
from .op_cuda import cuda_time_us, cuda_workspace_bytes
from .timing import Stopwatch, time_us, undisturbed

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
TILE = 1 << 16
SLOW_SECONDS = 0.3
#: smaller results are within the error of the system's counters of resident pages; not a usual
#: tensor size, which would be counted in one run and not in the next
LEAST_WORKSPACE_BYTES = 700 << 10


@dataclass(frozen=True)
class TensorSpec:
    """A strided tensor without its data."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    device: str = "cpu"

    @property
    def numel(self) -> int:
        count = 1
        for size in self.size:
            count *= size
        return count

    @property
    def extent(self) -> int:
        """Elements of storage from the first to the last one used."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of memory behind it: an expanded dimension takes none, gaps count."""
        return min(self.extent, self.numel) * self.dtype.itemsize

    def __str__(self) -> str:
        dims = ",".join(map(str, self.size))
        strides = ",".join(map(str, self.stride))
        return f"{str(self.dtype).removeprefix('torch.')}[{dims}]({strides})"


@dataclass(frozen=True)
class OpCall:
    """One call of an op: `args` and `kwargs` hold a `TensorSpec` for every tensor."""

    target: torch._ops.OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    outputs: tuple[TensorSpec, ...]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(_specs([*self.args, *self.kwargs.values()]))

    @property
    def key(self) -> str:
        """A string that is equal for calls of equal cost."""
        named = [f"{k}={_show(v)}" for k, v in sorted(self.kwargs.items())]
        return f"{self.target}({', '.join([*map(_show, self.args), *named])})"


@dataclass(frozen=True)
class Measured:
    duration_us: float
    workspace_bytes: int
    #: True if other work held the processor meanwhile: the op may be faster than this
    disturbed: bool = False


def _specs(value: object) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _specs(element)


def _show(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_show, value))}]"
    return str(value)


# --- operands ------------------------------------------------------------------------------

Bounds = dict[tuple[int, ...], int]


def _dim(call: OpCall, place: int) -> Bounds:
    table, dim = call.args[0], call.args[1]
    assert isinstance(table, TensorSpec) and isinstance(dim, int)
    return {(place,): table.size[dim] if table.size else 1}


def _classes(source: int, target: int) -> Callable[[OpCall], Bounds]:
    def bounds(call: OpCall) -> Bounds:
        scores = call.args[source]
        assert isinstance(scores, TensorSpec)
        return {(target,): scores.size[1 if len(scores.size) > 1 else 0]}

    return bounds


def _rows(call: OpCall) -> Bounds:
    table = call.args[0]
    assert isinstance(table, TensorSpec)
    return {(1,): table.size[0]}


def _num_weights(call: OpCall) -> Bounds:
    assert isinstance(call.args[2], int)
    return {(1,): call.args[2]}


def _each_dim(call: OpCall) -> Bounds:
    table = call.args[0]
    assert isinstance(table, TensorSpec)
    return {(1, k): size for k, size in enumerate(table.size)}


def _plane(call: OpCall) -> Bounds:
    pooled_from = call.args[1]
    assert isinstance(pooled_from, TensorSpec)
    return {(7,): pooled_from.size[-1] * pooled_from.size[-2]}


_BOUNDS: Mapping[str, Callable[[OpCall], Bounds]] = {
    "embedding": _rows,
    "embedding_dense_backward": _num_weights,
    "nll_loss_forward": _classes(0, 1),
    "nll_loss_backward": _classes(1, 2),
    "nll_loss2d_forward": _classes(0, 1),
    "nll_loss2d_backward": _classes(1, 2),
    "max_pool2d_with_indices_backward": _plane,
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "_unsafe_index_put"), _each_dim),
    **dict.fromkeys(
        ("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add"),
        lambda call: _dim(call, 2),
    ),
}


class Operands:
    """Made-up inputs, all in one buffer; each call invalidates those of the last one."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._pool = torch.empty(0, dtype=torch.uint8, device="cpu")  # touches no device yet
        self._used = 0

    @property
    def storage(self) -> torch.UntypedStorage:
        return self._pool.untyped_storage()

    def cool(self, made: object = None) -> None:
        """Flush the last call's operands, and the tensors in `made`, from the caches."""
        if self.device.type != "cpu":
            return
        for storage in _made(made, self):
            cool(storage.data_ptr(), storage.nbytes())
        if self._used:
            cool(self._pool.data_ptr(), self._used)

    def give_back(self, but_bytes: int) -> None:
        """Release the buffer if it is larger than that; the next call allocates one as needed."""
        if self._pool.numel() > but_bytes:
            self._pool = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._used = 0

    def make(self, call: OpCall) -> tuple[list[object], dict[str, object]]:
        """Arguments to call the op with. Raises torch's own errors when memory is short."""
        needed = PAGE_BYTES + sum(_room(spec) for spec in call.inputs)  # plus room to align
        if needed > self._pool.numel():
            self._pool = torch.empty(0, dtype=torch.uint8, device=self.device)  # free the old one
            self._pool = torch.empty(needed, dtype=torch.uint8, device=self.device)
        self._used = -self._pool.data_ptr() % PAGE_BYTES
        generator = torch.Generator(device="cpu").manual_seed(0)
        name = call.target._schema.name.removeprefix("aten::").removesuffix("_")
        bounds = _BOUNDS[name](call) if name in _BOUNDS else {}

        def tensor(spec: TensorSpec, place: tuple[int, ...]) -> torch.Tensor:
            return self._tensor(spec, bounds.get(place), generator)

        args = [_with_tensors(value, (i,), tensor) for i, value in enumerate(call.args)]
        if name == "_grouped_mm":
            _share_out(*args[:3])
        return args, {k: _with_tensors(v, (), tensor) for k, v in call.kwargs.items()}

    def _tensor(
        self, spec: TensorSpec, bound: int | None, generator: torch.Generator
    ) -> torch.Tensor:
        begin, nbytes = self._used, spec.extent * spec.dtype.itemsize
        self._used += _room(spec)
        flat = self._pool[begin : begin + nbytes].view(spec.dtype)
        _fill(flat, bound, generator)
        return flat.as_strided(spec.size, spec.stride)


def _share_out(a: object, b: object, ends: object) -> None:
    """Give each group of a grouped product as many of the tokens: without any it takes no time."""
    if (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and isinstance(ends, torch.Tensor)
    ):
        tokens, groups = a.shape[1 if b.dim() == 2 else 0], len(ends)
        ends.copy_(torch.tensor([tokens * n // groups for n in range(1, groups + 1)]))


def _with_tensors(
    value: object,
    place: tuple[int, ...],
    tensor: Callable[[TensorSpec, tuple[int, ...]], torch.Tensor],
) -> object:
    # not nested in `make`: a recursive closure would keep the buffer until garbage collection
    if isinstance(value, TensorSpec):
        return tensor(value, place)
    if isinstance(value, list | tuple):
        return [_with_tensors(v, (*place, i), tensor) for i, v in enumerate(value)]
    return value


def _room(spec: TensorSpec) -> int:
    return -(-spec.extent * spec.dtype.itemsize // PAGE_BYTES) * PAGE_BYTES


def _fill(flat: torch.Tensor, bound: int | None, generator: torch.Generator) -> None:
    """Fill with fractions in (0, 1), valid for logarithms and roots; indices stay in bound."""
    dtype = flat.dtype
    if dtype.is_floating_point or dtype.is_complex:
        tile = torch.empty(TILE, device="cpu").uniform_(0.01, 1.0, generator=generator)
    elif dtype == torch.bool:
        tile = torch.randint(0, 2, (TILE,), generator=generator, device="cpu")
    elif bound is not None and bound > 1:
        tile = torch.randint(0, bound, (TILE,), generator=generator, device="cpu")
    else:
        flat.zero_()  # valid as an index or as a count
        return
    tile = tile.to(dtype)
    tile = tile.to(flat.device)
    whole = flat.numel() // TILE * TILE
    flat[:whole].view(-1, TILE).copy_(tile)
    flat[whole:].copy_(tile[: flat.numel() - whole])


# --- running -------------------------------------------------------------------------------


def measure_call(call: OpCall, operands: Operands, seconds: float = 0.03) -> Measured | None:
    """Measure the time of the op, including its outputs' allocation, and its workspace.

    None if the op does not run by itself. `seconds`: see `measure.time_us`.
    """
    if operands.device.type == "cuda":
        return _measure_on_cuda(call, operands, seconds)
    tensor_memory.install()
    try:
        with undisturbed():
            args, kwargs = operands.make(call)

            def run() -> object:
                return call.target(*args, **kwargs)

            with memory.small_pages():
                workspace_bytes = _workspace_bytes(run, operands)
            heap().prepare()  # as in a step that runs under a plan
            with heap().laid_out(), Stopwatch() as watch:
                duration_us = time_cold_us(run, operands, seconds)
        return Measured(duration_us, workspace_bytes, watch.disturbed)
    except Exception as error:  # an op may raise anything on made-up data: it is then estimated
        log.debug("%s does not run by itself: %s", call.key, error)
        return None


def _measure_on_cuda(call: OpCall, operands: Operands, seconds: float) -> Measured | None:
    try:
        with undisturbed(operands.device), torch.cuda.device(operands.device):
            args, kwargs = operands.make(call)

            def run() -> object:
                return call.target(*args, **kwargs)

            workspace_bytes = cuda_workspace_bytes(
                run, operands.device, lambda made: _made_bytes(made, operands)
            )
            return Measured(cuda_time_us(run, operands.device, seconds), workspace_bytes)
    except Exception as error:  # as above; its CUDA allocations died with its frames
        log.debug("%s does not run by itself: %s", call.key, error)
        return None


def time_cold_us(
    run: Callable[[], object],
    operands: Operands,
    seconds: float,
    more: Callable[[], object] = lambda: None,
) -> float:
    """Time of an op as in a step: neither its inputs nor its output memory is cached.

    Alone in a loop, it would find both in the caches. `more` cools other memory that it uses.
    """
    made: list[object] = []

    def before() -> None:
        # the next result reuses the memory of the last one, which can only be cooled while it is
        # alive
        operands.cool(made)
        made.clear()
        more()

    return time_us(lambda: made.append(run()), seconds, before=before)


def _workspace_bytes(run: Callable[[], object], operands: Operands) -> int:
    """Resident memory that a warm run takes beyond its inputs and outputs.

    The lesser of two runs (one, if they are slow), since other threads may allocate meanwhile; 0 if
    the system does not report it.
    """
    begun = time.perf_counter()
    made_bytes = _made_bytes(run(), operands)
    runs = 1 if time.perf_counter() - begun > SLOW_SECONDS else 2
    beyond = []
    for _ in range(runs):
        # the op could use free heap memory, which would hide its workspace
        return_freed_memory()
        if not memory.reset_peak():
            return 0
        before = sum(memory.resident())
        run()
        beyond.append(memory.peak_bytes() - before - made_bytes)
    least = min(beyond)
    return 0 if least < LEAST_WORKSPACE_BYTES else -(-least // PAGE_BYTES) * PAGE_BYTES


def _made(result: object, operands: Operands) -> Iterator[torch.UntypedStorage]:
    """The storages that an op returned, without the operands' buffer (results in place)."""
    made = {s._cdata: s for s in (t.untyped_storage() for t in _tensors(result))}
    made.pop(operands.storage._cdata, None)
    return iter(made.values())


def _made_bytes(result: object, operands: Operands) -> int:
    return sum(storage.nbytes() for storage in _made(result, operands))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _tensors(element)
