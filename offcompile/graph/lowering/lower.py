"""From a captured graph to a callable, with our say between partitioning and compiling.

`lower` goes exactly the way of torch's own backends of the same names; `Hooks` see the graphs
after partitioning (for Inductor: after its joint passes) and may put others in their place. Where
they do not, what is compiled is node for node what the plain backend compiles.

Nothing is patched for longer than a compilation: Inductor's partitioner is set through its own
`custom_partitioner_fn` while `compile_fx` runs. AOTAutograd's cache is left out, since a hit would
pass by our hooks, and an entry would hold graphs that belong to one plan. Inductor's cache of
compiled graphs stays in use: its key is the graph that the hooks leave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from offcompile.graph.graphs import copied, name_saved_alike
from offcompile.graph.sizes import write_known_floats
from offcompile.graph.split import Splits
from offcompile.ir import InvalidInput, Violation
from offcompile.runtime.base.progress import Progress

from .order import MovementOps, pin_order

__all__ = ["Compiled", "Halves", "Hooks", "Lowering", "MovementOps", "Phase", "lower", "pin_order"]

Phase = Literal["forward", "backward", "inference"]
Lowering = Literal["inductor", "aot_eager"]
#: takes its arguments as a list, which it empties: each is freed after its last use
Compiled = Callable[[list[Any]], Any]
Halves = tuple[fx.GraphModule, fx.GraphModule]
Partition = Callable[..., Halves]
T = TypeVar("T")


class Hooks(Protocol):
    """What is asked on the way. None for an answer leaves the graphs as they are."""

    def training(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, inputs: Any
    ) -> Halves | None:
        """Both halves, just partitioned. Forward's first `num_outputs` outputs are the user's,
        the others are saved for backward; `inputs` are the joint graph's (primals, tangents)."""

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | None:
        """A graph without backward, just before it is compiled."""

    @property
    def lends(self) -> bool:
        """Whether the graphs put in place leave the memory of what they give to movement ops
        alone, and only read what they get from them: it may be somebody else's."""

    def ready(self, phase: Phase, compiled: Compiled) -> Compiled:
        """What to run in place of `compiled`, which may be itself. Backward comes late: with its
        first run, or with forward when sizes are dynamic."""


@runtime_checkable
class SplitHooks(Protocol):
    """Hooks that may put graphs in their places in which a loss is split."""

    def may_split(self, splits: Splits) -> None:
        """Called before `training`, about the same joint graph."""


def lower(
    graph: fx.GraphModule, inputs: Sequence[Any], lowering: Lowering, hooks: Hooks
) -> Callable[..., Any]:
    """Compile what Dynamo gave to a backend, and return what the backend is to return.

    When hooks replace a graph, its saved tensors are not donated to backward: a second backward
    (`retain_graph`) finds them as they were.
    """
    if lowering not in ("inductor", "aot_eager"):
        raise InvalidInput(
            [Violation("bad-value", "lowering", f"{lowering!r} is none of 'inductor', 'aot_eager'")]
        )
    job = _Job(hooks, lowering == "inductor")
    with functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        if lowering == "aot_eager":
            return _aot_eager(graph, inputs, job)
        return _inductor(graph, inputs, job)


@dataclass
class _Job:
    """One compilation: the hooks, and whether they replaced its graphs."""

    hooks: Hooks
    #: whether what is compiled runs in an order of its own
    reorders: bool = False
    changed: bool = False

    def partition(self, plain: Partition, joint: fx.GraphModule, inputs: Any, **how: Any) -> Halves:
        """`plain`'s halves or those of the hooks. The bodies of nested regions, which torch
        partitions with the same function before and without inputs, are none of ours."""
        if not inputs:
            return plain(joint, inputs, **how)

        def halves(graph: fx.GraphModule) -> Halves:
            made = plain(graph, inputs, **how)
            name_saved_alike(*made, how["num_fwd_outputs"])
            return made

        if isinstance(self.hooks, SplitHooks):
            self.hooks.may_split(Splits(copied(joint), halves, self.reorders))
        forward, backward = halves(joint)
        return self._replaced(
            self.hooks.training(forward, backward, how["num_fwd_outputs"], inputs),
            (forward, backward),
        )

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        return self._replaced(self.hooks.inference(graph, inputs), graph)

    def _replaced(self, new: T | None, old: T) -> T:
        if new is None:
            return old
        self.changed = True
        return new

    def before(self, phase: Phase) -> None:
        """Call this before a half is compiled."""
        if self.changed and phase == "forward":
            # What torch itself does when the first backward asks to keep its graph: the list must
            # be empty. (Without one, as config.donated_buffer=False leaves it, the check at run
            # time still refuses.)
            context = TracingContext.try_get()
            if context is not None and context.fw_metadata is not None:
                context.fw_metadata.bw_donated_idxs = []

    def after(self, phase: Phase, compiled: Any) -> Any:
        """`compiled` as it is to be run; the very object where hooks have nothing to add."""
        wanted = self.hooks.ready(phase, compiled)
        if wanted is compiled:
            return compiled

        def run(args: list[Any]) -> Any:
            return wanted(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _aot_eager(graph: fx.GraphModule, inputs: Sequence[Any], job: _Job) -> Callable[..., Any]:
    def compiler(phase: Phase) -> Callable[..., Any]:
        def compile_half(half: fx.GraphModule, half_inputs: Sequence[Any]) -> Any:
            if phase == "inference":
                half = job.inference(half, half_inputs)
            job.before(phase)
            return job.after(phase, boxed_nop(half, list(half_inputs)))

        return compile_half

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=functools.partial(job.partition, min_cut_rematerialization_partition),
        keep_inference_input_mutations=True,
    )
    return backend(graph, inputs)


class _Partitioner(CustomPartitionerFn):
    """Our partitioner as Inductor takes it."""

    def __init__(self, job: _Job, given: CustomPartitionerFn | None) -> None:
        self.job = job
        self.given = given

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **how: Any) -> Halves:
        plain = cast(Partition, self.given or min_cut_rematerialization_partition)
        return self.job.partition(plain, gm, joint_inputs, **how)

    def uuid(self) -> Any:
        """Sets replaced graphs apart in the cache: what is equal to a plain graph may still have
        been compiled with donated buffers."""
        return ("offcompile", 2, self.given.uuid() if self.given is not None else None)

    def __reduce__(self) -> Any:
        # The cache's key is made by pickling the whole configuration, and us with it.
        return tuple, (self.uuid(),)


def _saved_as_they_are(half: fx.GraphModule) -> None:
    """What forward gets and saves for backward stays the tensor it is.

    To Inductor a saved convolution weight may be better kept as a channels-last copy, which the
    plan knows nothing of, and which every reader of the weight then gets, a fetch from the host
    among them. What the user sees keeps its strides, and so do these.
    """
    output = half.graph.output_node()
    visible = set(output.meta.get("user_visible_output_idxs", ()))
    for index, value in enumerate(cast(Sequence[Any], output.args[0])):
        if isinstance(value, fx.Node) and value.op == "placeholder":
            visible.add(index)
    output.meta["user_visible_output_idxs"] = sorted(visible)


def _inductor(graph: fx.GraphModule, inputs: Sequence[Any], job: _Job) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    given = inductor_config.custom_partitioner_fn
    ours = _Partitioner(job, given)

    def compile_half(half: fx.GraphModule, half_inputs: Sequence[Any], **how: Any) -> Any:
        phase: Phase = "forward"
        if how.get("is_backward"):
            phase = "backward"
        elif how.get("is_inference"):
            phase = "inference"
            half = job.inference(half, half_inputs)
        job.before(phase)
        with ExitStack() as settings:
            # Backward may come long after `compile_fx` has returned, so each half says it anew.
            settings.enter_context(
                inductor_config.patch(custom_partitioner_fn=ours if job.changed else given)
            )
            if job.changed:
                # Both move nodes apart from their data edges: kernels to lessen a peak that
                # leaves our plan out, inference nodes towards their readers.
                settings.enter_context(
                    inductor_config.patch(reorder_for_peak_memory=False, reorder_for_locality=False)
                )
                # A buffer that a later one of its size takes over is held until then.
                settings.enter_context(inductor_config.patch(allow_buffer_reuse=False))
                _saved_as_they_are(half)
                write_known_floats(half.graph)
                if job.hooks.lends:
                    settings.enter_context(inductor_config.patch(inplace_buffers=False))
            with Progress("compiling") as say:
                say(f"{phase} by Inductor, {len(half.graph.nodes):,} nodes")
                compiled = compile_fx_inner(half, half_inputs, **how)
        return job.after(phase, compiled)

    with inductor_config.patch(custom_partitioner_fn=ours):
        compiled = compile_fx(graph, inputs, inner_compile=compile_half)
        return cast(Callable[..., Any], compiled)
