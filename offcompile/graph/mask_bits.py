"""Saves tensors as bits where backward reads one bit per element, and drops those read for shape.

    forward    x = relu(a)                       x = relu(a); bits = pack_bits(x)
               y, keep = native_dropout(x)       y, keep = …; kept = pack_bits(keep)
               return y, x, keep                 return y, bits, kept
    backward   g = native_dropout_backward(t,    keep = unpack_bits(kept)
                   keep)                         g = native_dropout_backward(t, keep)
               d = threshold_backward(g, x, 0)   d = masked_grad(g, bits)

Results are the same to the last bit: a ReLU's gradient only tests if its output is <= 0, and
pooling uses only the shape of its input. A tensor that is also saved for another reason is left
unchanged, since bits would come on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from offcompile.ir import Problem
from offcompile.runtime.kernels import why_not
from offcompile.runtime.kernels.bitmask import SIGNED
from offcompile.runtime.kernels.bits import mask_bytes

from .graphs import (
    Graphs,
    Hint,
    aliased_input,
    closed,
    copied,
    covers_its_storage,
    outputs_of,
    root_of,
    storage_bytes,
)
from .lowering.resave import new_placeholder
from .mask_nodes import (
    SHAPE_ONLY,
    MaskCandidate,
    MaskSizes,
    forget,
    laid_alike,
    make_bits,
    read_bits,
    save,
)

aten = torch.ops.aten

#: smaller tensors do not justify two more ops
LEAST_BYTES = 16 << 10
#: share of all saved bytes that bits must gain before another plan is searched for
LEAST_SHARE = 1 / 64


@dataclass(frozen=True)
class Compacted:
    """The graphs with bits in place of tensors, and the change in size of each saved storage."""

    graphs: Graphs
    #: node of forward that made the storage → bytes saved before and after
    saved_bytes: Mapping[str, tuple[int, int]]
    #: bytes of all tensors that forward made and saved before
    all_bytes: int

    @property
    def matters(self) -> bool:
        """True if the gain justifies a search for another plan."""
        gained = sum(before - after for before, after in self.saved_bytes.values())
        return gained >= self.all_bytes * LEAST_SHARE


def has_bits(problem: Problem) -> bool:
    """True if the problem's graphs have been compacted."""
    return any(op.id.startswith("pack_bits") for op in problem.ops)


def compact(
    graphs: Graphs, hint: Hint, least_bytes: int = LEAST_BYTES, fuses: bool = False
) -> Compacted | None:
    """Build new graphs; None if nothing can be saved as bits. The given ones are not changed.

    `fuses`: comparisons fuse at no cost with the op that makes the tensor, as under Inductor.
    """
    if graphs.backward is None:
        return None
    made = replace(graphs, forward=copied(graphs.forward), backward=copied(graphs.backward))
    assert made.backward is not None
    found = list(_candidates(made, hint, least_bytes))
    sizes = MaskSizes(made.backward.graph, {n.name for c in found for n in c.saved})
    found = [c for c in found if sizes.has(c.value)]
    if not found:
        return None
    after: dict[str, tuple[int, int]] = {}
    for candidate in found:
        mask, now = None, 0
        if candidate.needs_bits:
            bits = make_bits(candidate, fuses)
            save(made, bits)
            mask = new_placeholder(made.backward.graph, bits.name, bits.meta["val"])
            now = hint(mask_bytes(candidate.value.numel()))
        read_bits(candidate, mask, sizes)
        after[candidate.root.name] = (storage_bytes(candidate.value, hint), now)
    forget(made, {n.name for c in found for n in c.saved})
    whole = replace(made, forward=closed(made.forward), backward=closed(made.backward))
    return Compacted(whole, after, _saved_bytes(graphs, hint))


def _saved_bytes(graphs: Graphs, hint: Hint) -> int:
    saved = outputs_of(graphs.forward)[graphs.num_outputs :]
    roots = {root_of(o): o.meta.get("val") for o in saved if isinstance(o, fx.Node)}
    made = (v for n, v in roots.items() if n.op == "call_function" and isinstance(v, torch.Tensor))
    return sum(storage_bytes(v, hint) for v in made)


# --- candidates -----------------------------------------------------------------------------------


def _candidates(graphs: Graphs, hint: Hint, least_bytes: int) -> Iterator[MaskCandidate]:
    assert graphs.backward is not None
    outputs = outputs_of(graphs.forward)
    seen = {root_of(o) for o in outputs[: graphs.num_outputs] if isinstance(o, fx.Node)}
    given = {n.name: n for n in graphs.backward.graph.find_nodes(op="placeholder")}
    groups: dict[fx.Node, list[fx.Node]] = {}
    for out in dict.fromkeys(outputs[graphs.num_outputs :]):
        if isinstance(out, fx.Node):
            groups.setdefault(root_of(out), []).append(out)
    for root, saved in groups.items():
        value = saved[0].meta.get("val")
        if root.op != "call_function" or root in seen or not isinstance(value, torch.Tensor):
            continue
        if not _packable(value, graphs, hint, least_bytes):
            continue
        if not all(laid_alike(n.meta.get("val"), value) and n.name in given for n in saved):
            continue
        found = MaskCandidate(root, saved, value)
        readers = [_readers(given[n.name], value) for n in saved]
        if all(r is not None for r in readers):
            found.readers = [pair for r in readers if r is not None for pair in r]
            if found.readers:
                yield found


def _packable(value: torch.Tensor, graphs: Graphs, hint: Hint, least_bytes: int) -> bool:
    if value.dtype != torch.bool and value.dtype not in SIGNED:
        return False
    if value.device.type != graphs.device or not _runs_on(value):
        return False
    return storage_bytes(value, hint) >= least_bytes and covers_its_storage(value, hint)


def _runs_on(value: torch.Tensor) -> bool:
    """True if the device has the kernels; a GPU that is absent at planning is assumed to."""
    if value.device.type != "cuda" or not torch.cuda.is_available():
        return value.device.type in ("cpu", "cuda")
    return why_not(value.device, value.dtype) is None


def _readers(node: fx.Node, value: torch.Tensor) -> list[tuple[fx.Node, fx.Node]] | None:
    """The readers of a saved tensor in backward, through aliases; None if one needs its values."""
    if value.dtype == torch.bool:
        users = list(node.users)
        return None if any(u.op == "output" for u in users) else [(u, node) for u in users]
    found: list[tuple[fx.Node, fx.Node]] = []
    for user in node.users:
        if user.op == "call_function" and aliased_input(user) is node:
            if not laid_alike(user.meta.get("val"), value):
                return None
            beyond = _readers(user, value)
            if beyond is None:
                return None
            found += beyond
        elif _asks_a_bit(user, node) or _asks_the_shape(user, node):
            found.append((user, node))
        else:
            return None
    return found


def _asks_a_bit(user: fx.Node, node: fx.Node) -> bool:
    if user.target is aten.le.Scalar:
        return bool(user.args[0] is node and user.args[1] == 0)
    if user.target is not aten.threshold_backward.default or user.args[0] is node:
        return False
    alike = laid_alike(user.meta.get("val"), node.meta["val"])
    return bool(alike and user.args[1] is node and user.args[2] == 0)


def _asks_the_shape(user: fx.Node, node: fx.Node) -> bool:
    return (
        user.target in SHAPE_ONLY
        and user.args[1] is node
        and node not in (user.args[0], *user.args[2:])
    )
