"""Lowering: plain graphs where hooks are silent, scoped settings, and caches."""

from __future__ import annotations

import functools
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import warm
from lengths import some
from lower_moves import OPS
from lowered import LOWERINGS, NETS, Hooks, backend, fresh, same, step
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import config as inductor_config

from offcompile.graph.lowering.lower import lower
from offcompile.ir import InvalidInput

# --- the graphs are those of the plain backends ------------------------------------------------


class Seen:
    """Stands where graphs are compiled: notes each, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self.donated: list[Any] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        self.graphs.append(graph.print_readable(print_output=False, include_stride=True))
        context = TracingContext.try_get()
        self.donated.append(context.fw_metadata.bw_donated_idxs if context else None)

        def run(args: list[Any]) -> Any:
            held = list(args)
            args.clear()
            return graph(*held)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def plain_backend(lowering: str, seen: Seen) -> Callable[..., Any]:
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor.compile_fx import compile_fx

    if lowering == "aot_eager":
        return functools.partial(aot_eager, fw_compiler=seen, bw_compiler=seen)
    return functools.partial(compile_fx, inner_compile=seen)


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("net", False),
        ("net", True),
        *(
            pytest.param(name, dynamic, marks=pytest.mark.soak)
            for name in NETS
            for dynamic in (False, True)
            if name != "net"
        ),
    ],
)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_silent_hooks_leave_the_plain_graphs(lowering: str, name: str, dynamic: bool) -> None:
    plain, ours, hooks = Seen(), Seen(), Hooks()
    where = {
        "aot_eager": "offcompile.graph.lowering.lower.boxed_nop",
        "inductor": "torch._inductor.compile_fx.compile_fx_inner",
    }
    with functorch_config.patch(enable_autograd_cache=False):
        model, x = fresh(name)
        expected = step(model, x, plain_backend(lowering, plain), dynamic=dynamic)
        with torch.no_grad():
            model(x), torch.compile(model, backend=plain_backend(lowering, plain))(x)
    model, x = fresh(name)
    with mock.patch(where[lowering], ours):
        found = step(model, x, backend(lowering, hooks), dynamic=dynamic)
        with torch.no_grad():
            model(x), torch.compile(model, backend=backend(lowering, hooks))(x)
    assert ours.graphs == plain.graphs
    assert ours.donated == plain.donated
    assert len(ours.graphs) == 3
    assert same(expected, found)
    assert sorted(set(hooks.asked)) == ["backward", "forward", "inference", "training"]


def test_nested_regions_are_not_offered() -> None:
    @torch.compiler.nested_compile_region
    def region(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(x @ w)

    torch._dynamo.reset()
    hooks = Hooks()
    w = torch.randn(4, 4, requires_grad=True)
    f = torch.compile(
        lambda x: region(region(x, w), w).sum(), backend=backend("aot_eager", hooks), fullgraph=True
    )
    x = torch.randn(4, 4)
    f(x).backward()
    found = w.grad
    w.grad = None
    torch.sin(torch.sin(x @ w) @ w).sum().backward()
    assert found is not None and w.grad is not None
    torch.testing.assert_close(found, w.grad)
    assert hooks.asked == ["training", "forward", "backward"]


def test_lowering_is_named() -> None:
    with pytest.raises(InvalidInput, match="'eager' is none of 'inductor', 'aot_eager'"):
        lower(fx.symbolic_trace(nn.Identity()), [], "eager", Hooks())  # type: ignore[arg-type]


# --- what people do with compiled functions ----------------------------------------------------


def _func_grad(x: Tensor, w: Tensor) -> Tensor:
    inner = torch.func.grad(lambda v: (v * w).sin().sum())
    return torch.func.vmap(inner)(x).sum()


def _graph_break(x: Tensor, w: Tensor) -> Tensor:
    y = (x * w).relu()
    torch._dynamo.graph_break()
    return (y @ y.t()).sum()


def _mutates_input(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(2)
    return (x * w).sum()


def _aliases_input(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([x.view(-1)[0], (x.t() * w.t()).sum()]).sum()


def _no_grad_part(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x * w).amax()
    return (x * w / scale).sum()


FUNCTIONS = (_func_grad, _graph_break, _mutates_input, _aliases_input, _no_grad_part)
WITH_INDUCTOR = (_mutates_input,)


@pytest.mark.parametrize(
    ("function", "lowering"),
    [
        *((function, "aot_eager") for function in FUNCTIONS),
        *(
            pytest.param(
                function, "inductor", marks=() if function in WITH_INDUCTOR else pytest.mark.soak
            )
            for function in FUNCTIONS
        ),
    ],
)
def test_functions_as_in_eager(function: Callable[..., Tensor], lowering: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend(lowering, Hooks()), dynamic=True)
    for size in (4, 6):
        torch.manual_seed(size)
        values = torch.randn(size, size)
        results = []
        for f in (function, compiled):
            x, w = values.clone(), (values + 1).requires_grad_()
            out = f(x, w)
            out.backward()
            results.append((out.detach(), x, w.grad))
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_views_of_inputs_and_several_outputs(lowering: str) -> None:
    torch._dynamo.reset()

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.t(), x + 1

    x = torch.randn(3, 4)
    view, other = torch.compile(f, backend=backend(lowering, Hooks()))(x)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(other, x + 1)


# tests/graph/test_rewrite.py has buffers under Inductor
@pytest.mark.parametrize(
    "lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)]
)
def test_buffers_updated_in_place(lowering: str) -> None:
    results = []
    for compiler in (backend(lowering, Hooks()), "eager"):
        model, x = fresh("conv")
        found = step(model, x, compiler)
        results.append([*found, *model.buffers()])
        model.eval()
        with torch.no_grad():
            results[-1].append(torch.compile(model, backend=compiler)(x))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lowering", some(LOWERINGS, "aot_eager"))
def test_second_backward_after_a_change(lowering: str) -> None:
    model, x = fresh("net")
    torch._dynamo.reset()
    hooks = Hooks(change=lambda *_: None)
    compiled = torch.compile(model, backend=backend(lowering, hooks))
    compiled(x).backward()  # torch decides on donated buffers with the first
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss = compiled(x)
    loss.backward(retain_graph=True)
    loss.backward()
    assert same([2 * g for g in once], [p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("lowering", some(LOWERINGS, "aot_eager"))
def test_arguments_are_consumed(lowering: str) -> None:
    class Watch(Hooks):
        def ready(self, phase: str, compiled: Any) -> Any:
            def run(args: list[Any]) -> Any:
                result = compiled(args)
                self.asked.append(f"{phase} left {len(args)}")
                return result

            return run

    hooks = Watch()
    step(*fresh("net"), backend(lowering, hooks))
    assert hooks.asked == ["training", "forward left 0", "backward left 0"]


# --- settings and caches -----------------------------------------------------------------------


def test_saved_weights_stay_what_they_are() -> None:
    """Not the channels-last copies that Inductor would rather keep of convolution weights."""
    model, x = fresh("conv")
    given: list[int] = []

    class Looking(Hooks):
        def ready(self, phase: str, compiled: Any) -> Any:
            def look(arguments: list[Any]) -> Any:
                outputs = compiled(arguments)
                given.extend(o.data_ptr() for o in outputs if isinstance(o, Tensor))
                return outputs

            return look if phase == "forward" else compiled

    hooks = Looking(change=lambda *_: None)
    step(model, x, backend("inductor", hooks))
    weights = [p for p in model.parameters() if p.dim() == 4]
    assert [w.data_ptr() in given for w in weights] == [True, True]


def _code_of_a_chain(compiler: Any) -> str:
    """Inductor's code for products, each of which needs only the one before."""
    from torch._inductor.utils import run_and_get_code

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x @ x
        return x

    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), torch.no_grad():
        _, codes = run_and_get_code(torch.compile(chain, backend=compiler), torch.eye(64))
    return "".join(codes)


def test_memory_that_is_free_is_not_held_for_what_comes_later() -> None:
    """A plan counts on it from the op after the last that needs it."""
    assert "# reuse" in _code_of_a_chain("inductor")

    class Changed(Hooks):
        def inference(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            return graph

    ours = _code_of_a_chain(backend("inductor", Changed()))
    assert "extern_kernels.mm" in ours and "# reuse" not in ours


def _watched() -> tuple[Any, ...]:
    return (
        inductor_config.custom_partitioner_fn,
        inductor_config.reorder_for_peak_memory,
        inductor_config.reorder_for_locality,
        inductor_config.allow_buffer_reuse,
        inductor_config.inplace_buffers,
        functorch_config.enable_autograd_cache,
        functorch_config.enable_remote_autograd_cache,
        functorch_config.donated_buffer,
    )


def test_settings_are_as_before_and_after() -> None:
    before = _watched()
    torch._dynamo.reset()
    model, x = fresh("net")
    loss = torch.compile(model, backend=backend("inductor", Hooks(change=lambda *_: None)))(x)
    assert _watched() == before
    loss.backward()
    assert _watched() == before


def _mark(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """A change that shows in what is saved: one output passes through a barrier."""
    (out,) = forward.graph.find_nodes(op="output")
    outputs = list(out.args[0])
    last = next(o for o in reversed(outputs) if isinstance(o.meta.get("val"), Tensor))
    with forward.graph.inserting_before(out):
        held = forward.graph.call_function(OPS.barrier, (last, []))
    held.meta["val"] = last.meta["val"]
    outputs[outputs.index(last)] = held
    out.args = (tuple(outputs),)
    forward.recompile()


@pytest.mark.long
def test_caches_in_one_process_and_two(tmp_path: Any) -> None:
    """Plain, ours, plain, ours, and again in another process with the same cache directory."""
    script = textwrap.dedent(
        """
        import sys
        import torch._inductor.config as inductor
        from torch._dynamo.utils import counters
        # headers are not compiled beforehand, and nothing is tried with the compiler
        inductor.cpp_cache_precompile_headers = inductor.cpp.vec_isa_ok = False
        from lowered import Hooks, backend, fresh, step
        from test_lower import _mark
        results = []
        for kind in sys.argv[1:]:
            counters.clear()
            hooks = Hooks(_mark)
            compiler = "inductor" if kind == "plain" else backend("inductor", hooks)
            results.append(step(*fresh("tiny"), compiler))
            partitioned = hooks.asked.count("training")
            print(kind, "misses", counters["inductor"]["fxgraph_cache_miss"], "hits",
                  counters["inductor"]["fxgraph_cache_hit"], "asked", partitioned)
        print("equal", all((a == b).all() for r in results[1:] for a, b in zip(results[0], r)))
        """
    )
    said = []
    for kinds in (("plain", "ours", "plain", "ours"), ("ours", "plain")):
        done = warm.run(
            [sys.executable, "-c", script, *kinds],
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
                "PYTHONPATH": os.pathsep.join(
                    ["tests/support", "tests/graph", ".", os.environ.get("PYTHONPATH", "")]
                ),
            },
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stdout.splitlines())
    first, second = said
    assert first[1] == "ours misses 2 hits 0 asked 1"
    assert first[3] == "ours misses 0 hits 2 asked 1"
    assert second[0] == "ours misses 0 hits 2 asked 1"
    assert first[-1] == second[-1] == "equal True"
