"""Compiles a captured graph to a callable, with hooks between partitioning and compiling.

`lower` follows exactly the path of torch's own backends of the same names; `Hooks` see the graphs
after partitioning (for Inductor: after its joint passes) and may replace them. If they do not, the
compiled graphs are node for node those of the plain backend.

Patches last only for one compilation: Inductor's partitioner is set through its own
`custom_partitioner_fn` while `compile_fx` runs. AOTAutograd's cache is disabled, since a hit would
bypass our hooks, and an entry would hold graphs that belong to one plan. Inductor's cache of
compiled graphs stays in use: its key is the graph that the hooks return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from offcompile.graph.graphs import codeless, copied, name_saved_alike
from offcompile.graph.sizes import write_known_floats
from offcompile.graph.split import Splits
from offcompile.ir import InvalidInput, Violation
from offcompile.runtime.base.progress import Progress

from .operands_in_words import short_operands
from .order import MovementOps, pin_order
from .rows import teach_inductor
from .tangents import Tangents, with_missing_tangents

__all__ = ["Compiled", "Halves", "Hooks", "Lowering", "MovementOps", "Phase", "lower", "pin_order"]

Phase = Literal["forward", "backward", "inference"]
Lowering = Literal["inductor", "aot_eager"]
#: takes its arguments as a list and empties it, so that each is freed after its last use
Compiled = Callable[[list[Any]], Any]
Halves = tuple[fx.GraphModule, fx.GraphModule]
Partition = Callable[..., Halves]
T = TypeVar("T")


class Hooks(Protocol):
    """Callbacks during compilation. Returning None leaves the graphs unchanged."""

    def training(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, inputs: Any
    ) -> Halves | None:
        """Called with both halves after partitioning. Forward's first `num_outputs` outputs are
        the user's; the others are saved for backward. `inputs` are the joint graph's (primals,
        tangents)."""

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule | None:
        """Called with a graph without backward, just before it is compiled."""

    @property
    def no_buffer_reuse(self) -> bool:
        """True if the new graphs never overwrite tensors that they pass to, or get from, movement
        ops: that memory may belong to others."""

    def ready(self, phase: Phase, compiled: Compiled) -> Compiled:
        """Return the callable to run instead of `compiled`, possibly `compiled` itself. Backward
        comes late: at its first run, or along with forward if sizes are dynamic."""


@runtime_checkable
class CompilingHooks(Protocol):
    """Hooks that are told of each compilation."""

    def compiles(self, phase: Phase) -> None:
        """Called before a half is compiled; for backward, that may be in the midst of a step."""


@runtime_checkable
class SplitHooks(Protocol):
    """Hooks that may replace the graphs by ones with a split loss."""

    def may_split(self, splits: Splits) -> None:
        """Called before `training`, for the same joint graph."""


def lower(
    graph: fx.GraphModule, inputs: Sequence[Any], lowering: Lowering, hooks: Hooks
) -> Callable[..., Any]:
    """Compile the graph that Dynamo gave to a backend, and return the backend's callable.

    If hooks replace a graph, its saved tensors are not donated to backward, so a second backward
    (`retain_graph`) finds them unchanged.
    """
    if lowering not in ("inductor", "aot_eager"):
        raise InvalidInput(
            [Violation("bad-value", "lowering", f"{lowering!r} is none of 'inductor', 'aot_eager'")]
        )
    job = _Job(hooks, lowering == "inductor")
    with functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        lowered = _aot_eager if lowering == "aot_eager" else _inductor
        return with_missing_tangents(lowered(graph, inputs, job), job.tangents)


@dataclass
class _Job:
    """One compilation: the hooks, and a flag set once they replaced its graphs."""

    hooks: Hooks
    #: True if the compiler chooses its own order (Inductor)
    reorders: bool = False
    changed: bool = False
    #: those of its backward that may be missing
    tangents: Tangents = field(default_factory=Tangents)

    def partition(self, plain: Partition, joint: fx.GraphModule, inputs: Any, **how: Any) -> Halves:
        """Return the halves from `plain`, or their replacements from the hooks. Torch partitions
        the bodies of nested regions with the same function, earlier and without inputs; those are
        left to `plain`."""
        if not inputs:
            return plain(joint, inputs, **how)

        def halves(graph: fx.GraphModule) -> Halves:
            with codeless():
                made = plain(graph, inputs, **how)
            name_saved_alike(*made, how["num_fwd_outputs"])
            return made

        if isinstance(self.hooks, SplitHooks):
            self.hooks.may_split(Splits(copied(joint), halves, self.reorders))
        forward, backward = halves(joint)
        made = self._replaced(
            self.hooks.training(forward, backward, how["num_fwd_outputs"], inputs),
            (forward, backward),
        )
        self.tangents.read(made[1], joint)
        return made

    def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        return self._replaced(self.hooks.inference(graph, inputs), graph)

    def _replaced(self, new: T | None, old: T) -> T:
        if new is None:
            return old
        self.changed = True
        return new

    def before(self, phase: Phase) -> None:
        """Call this before a half is compiled."""
        if isinstance(self.hooks, CompilingHooks):
            self.hooks.compiles(phase)
        if self.changed and phase == "forward":
            # Torch does the same when the first backward asks to keep its graph. The list must be
            # empty: with None, as config.donated_buffer=False leaves it, the runtime check still
            # refuses.
            context = TracingContext.try_get()
            if context is not None and context.fw_metadata is not None:
                context.fw_metadata.bw_donated_idxs = []

    def after(self, phase: Phase, compiled: Any) -> Any:
        """The callable to run: `compiled` itself if the hooks return it unchanged."""
        wanted = self.hooks.ready(phase, compiled)
        fills = phase == "backward" and self.tangents.may_be_missing
        if wanted is compiled and not fills:
            return compiled

        def run(args: list[Any]) -> Any:
            if fills:
                self.tangents.fill(args)
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
    """Our partitioner, in the form that Inductor expects."""

    def __init__(self, job: _Job, given: CustomPartitionerFn | None) -> None:
        self.job = job
        self.given = given

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **how: Any) -> Halves:
        plain = cast(Partition, self.given or min_cut_rematerialization_partition)
        return self.job.partition(plain, gm, joint_inputs, **how)

    def uuid(self) -> Any:
        """Separates our graphs in the cache: an identical graph may have been compiled with
        donated buffers by the plain backend."""
        return ("offcompile", 2, self.given.uuid() if self.given is not None else None)

    def __reduce__(self) -> Any:
        # The cache key pickles the whole configuration, including this object.
        return tuple, (self.uuid(),)


def _saved_as_they_are(half: fx.GraphModule) -> None:
    """Keep the layout of forward's inputs that are saved for backward.

    Inductor may prefer to save a convolution weight as a channels-last copy. The plan does not
    know of it, and every reader of the weight would get it, including a fetch from the host.
    Inductor preserves the strides of outputs marked visible to the user, so these are marked too.
    """
    output = half.graph.output_node()
    visible = set(output.meta.get("user_visible_output_idxs", ()))
    for index, value in enumerate(cast(Sequence[Any], output.args[0])):
        if isinstance(value, fx.Node) and value.op == "placeholder":
            visible.add(index)
    output.meta["user_visible_output_idxs"] = sorted(visible)


def _inductor(graph: fx.GraphModule, inputs: Sequence[Any], job: _Job) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    teach_inductor()
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
            # Backward may come long after `compile_fx` has returned, so each half sets this again.
            settings.enter_context(
                inductor_config.patch(custom_partitioner_fn=ours if job.changed else given)
            )
            if job.changed:
                # Both move nodes within the limits of data edges: the first moves kernels to
                # lower a peak that ignores our plan, the second inference nodes to their readers.
                settings.enter_context(
                    inductor_config.patch(reorder_for_peak_memory=False, reorder_for_locality=False)
                )
                # A buffer that a later one of its size reuses would be held until then.
                settings.enter_context(inductor_config.patch(allow_buffer_reuse=False))
                _saved_as_they_are(half)
                write_known_floats(half.graph)
                if job.hooks.no_buffer_reuse:
                    settings.enter_context(inductor_config.patch(inplace_buffers=False))
                settings.enter_context(short_operands())
            with Progress("compiling") as say:
                say(f"{phase} by Inductor, {len(half.graph.nodes):,} nodes")
                compiled = compile_fx_inner(half, half_inputs, **how)
        return job.after(phase, compiled)

    with inductor_config.patch(custom_partitioner_fn=ours):
        compiled = compile_fx(graph, inputs, inner_compile=compile_half)
        return cast(Callable[..., Any], compiled)
