"""Runs a graph op by op, keeping only the operands of the current op on the device.

So it runs even if the graph as a whole would not fit. Results of an op go to the host, and are
brought back only for the ops that read them. So are arguments that lie on the host although the
graph has them on the device. All other arguments stay where they are. On the CPU, results stay
where they are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from offcompile.graph.graphs import aliased_input, is_getitem, mutated_inputs

_HOST = torch.device("cpu")


class PlainRun(fx.Interpreter):
    """Interprets a graph. `rests`: True if results go to the host between ops."""

    def __init__(self, module: fx.GraphModule, device: torch.device, rests: bool) -> None:
        super().__init__(module)
        self.device, self.rests = device, rests
        #: nodes whose values are on the host instead of the device
        self._resting: set[fx.Node] = set()

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the graph's outputs. Outputs that are arguments are the same objects."""
        results = self.run(*arguments, enable_io_processing=False)
        return list(results)

    def run_node(self, n: fx.Node) -> Any:
        if not self.rests or n.op != "call_function":
            value = super().run_node(n)
            if self.rests and n.op == "placeholder" and self._rested(n, value):
                self._resting.add(n)
            return value
        written = mutated_inputs(n)
        if is_getitem(n) or (aliased_input(n) is not None and not written):
            if not self._resting.isdisjoint(n.all_input_nodes):
                self._resting.add(n)
            return super().run_node(n)
        brought: dict[fx.Node, Any] = {}

        def bring(node: fx.Node) -> Any:
            if node not in brought:
                value = self.env[node]
                here = isinstance(value, torch.Tensor) and node in self._resting
                brought[node] = moved(value, self.device) if here and _was_on(node, self) else value
            return brought[node]

        args, kwargs = fx.map_arg(n.args, bring), fx.map_arg(n.kwargs, bring)
        with self._set_current_node(n):
            result = self.call_function(n.target, args, kwargs)
        for node in written:
            if brought[node] is not self.env[node]:
                self.env[node].copy_(brought[node])
        if written and aliased_input(n) is not None:
            return self.env[written[0]]
        self._resting.add(n)
        return tree_map_only(torch.Tensor, self._at_rest, result)

    def _rested(self, n: fx.Node, value: Any) -> bool:
        """True for an argument that another plain run left on the host."""
        if not isinstance(value, torch.Tensor) or not isinstance(n.meta.get("val"), torch.Tensor):
            return False
        return _was_on(n, self) and value.device.type != self.device.type

    def _at_rest(self, value: torch.Tensor) -> torch.Tensor:
        return moved(value, _HOST) if value.device.type == self.device.type else value


def _was_on(node: fx.Node, run: PlainRun) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.device.type == run.device.type


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy with the same strides, even if elements overlap or leave gaps."""
    if x.layout is not torch.strided:
        return x.to(device, copy=True)
    if x.numel() == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    flat = x.as_strided((extent,), (1,)).to(device, copy=True)
    return flat.as_strided(x.shape, x.stride(), 0)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random state on exit, so that the same numbers are drawn again."""
    restore: list[Callable[[], None]] = []
    host = torch.get_rng_state()
    restore.append(lambda: torch.set_rng_state(host))
    if device.type != "cpu":
        module = torch.get_device_module(device)
        state = module.get_rng_state(device)
        restore.append(lambda: module.set_rng_state(state, device))
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def own_random_numbers(module: fx.GraphModule) -> bool:
    """True if the graph draws random numbers by Inductor's own prims, which only it implements."""
    targets = (n.target for n in module.graph.nodes if n.op == "call_function")
    prims = [str(t) for t in targets if getattr(t, "namespace", "") == "prims"]
    return any(f"inductor_{what}" in name for name in prims for what in ("seed", "rand"))
