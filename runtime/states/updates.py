"""Where gradients made inside a compiled backward meet whoever updates the weights.

A compiled graph hands all its gradients to autograd at once, when it is over. So that a weight can
be updated while backward still computes, the graph offers each gradient as soon as it is made: an
`Updater` that takes it consumes it there and then, and autograd gets none for that weight.

Only the whole gradient may be taken, and autograd does not say beforehand how many a weight gets
in one backward pass. So: the weight is used by no other call that waits for its backward; the
graph has been seen to make the whole gradient (autograd brought just what it had returned); and
what comes from elsewhere all the same, such as a penalty added outside of the graph, is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.weak import WeakTensor, tensor_keys


class Holder(Protocol):
    """Something of an optimizer that takes memory of its parameters' device."""

    def held_bytes(self) -> int:
        """What states and buffers take there, or are going to take."""


class Updater(Holder, Protocol):
    """What an optimizer that updates during backward is to a compiled graph."""

    def takes(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient that is being made for it now may be given to `take`."""

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Consume the one gradient of the parameter in this backward pass.

        When it returns, the gradient's memory may be used again; the parameter may have changed.
        """


class Call:
    """One run of a compiled forward that may be followed by its backward."""

    __slots__ = ("__weakref__", "graph", "parameters")

    def __init__(self, graph: str, parameters: Sequence[torch.Tensor]) -> None:
        self.graph = graph
        self.parameters = tuple(map(WeakTensor, parameters))
        for parameter in parameters:
            _known(parameter).calls.add(self)


@dataclass(eq=False)
class _Known:
    """What is known of a parameter."""

    updater: weakref.ref[Updater] | None = None
    holders: weakref.WeakSet[Holder] = field(default_factory=weakref.WeakSet)
    #: calls that may still run their backward
    calls: weakref.WeakSet[Call] = field(default_factory=weakref.WeakSet)
    #: backward pass in which its gradient was taken last, and `.grad` as it was left then
    taken_in: int = -1
    left: tuple[int, int] | None = None
    #: graph, backward pass and memory of a gradient that autograd was given and has not brought
    returned: tuple[str, int, torch.UntypedStorage] | None = None
    #: graphs that make the whole gradient
    whole: set[str] = field(default_factory=set)
    #: whether a plan would have the device update it; None: no plan says
    by_device: bool | None = None


_parameters = tensor_keys()
_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_registrations = 0


def _find(parameter: torch.Tensor) -> _Known | None:
    found: _Known | None = _parameters.get(parameter)
    return found


def _known(parameter: torch.Tensor) -> _Known:
    found = _find(parameter)
    if found is None:
        found = _parameters[parameter] = _Known()
    return found


def register(parameters: Iterable[torch.Tensor], updater: Updater) -> None:
    """From now on gradients of these are offered to `updater`, as long as it lives."""
    for parameter in parameters:
        _known(parameter).updater = weakref.ref(updater)


def unregister(parameters: Iterable[torch.Tensor], updater: Updater) -> None:
    """Gradients of these are no longer offered to `updater`."""
    for parameter in parameters:
        known = _known(parameter)
        if known.updater is not None and known.updater() is updater:
            known.updater = None


def updater_of(parameter: torch.Tensor) -> Updater | None:
    """Who updates it during backward; None: nobody."""
    found = _find(parameter)
    return None if found is None or found.updater is None else found.updater()


def advise(parameters: Iterable[torch.Tensor], by_device: bool) -> None:
    """Say which side would best update these, whose states are on the host."""
    for parameter in parameters:
        _known(parameter).by_device = by_device


def advice_for(parameter: torch.Tensor) -> bool | None:
    """True: the device, their states crossing to it; False: the host; None: nobody said."""
    found = _find(parameter)
    return None if found is None else found.by_device


def count(parameters: Iterable[torch.Tensor], holder: Holder) -> None:
    """From now on what `holder` holds counts beside the graphs that use one of these."""
    global _registrations
    _registrations += 1
    _holders.add(holder)
    for parameter in parameters:
        _known(parameter).holders.add(holder)


def registrations() -> int:
    """How often `count` has been called: what `holders_of` gave holds until that changes."""
    return _registrations


def holders_of(parameters: Iterable[torch.Tensor]) -> list[Holder]:
    """Who holds something for any of these."""
    known = (_find(p) for p in parameters)
    return list({id(h): h for k in known if k is not None for h in k.holders}.values())


def all_held_bytes() -> int:
    """Of every holder in the process."""
    return sum(h.held_bytes() for h in tuple(_holders))


def offer(call: Call, position: int, gradient: torch.Tensor) -> bool:
    """Give a gradient to the updater of the call's parameter at `position`, if it may be taken.

    False: it is to be returned to autograd (`returned` says so then).
    """
    parameter = call.parameters[position]()
    if parameter is None:
        return False
    known, updater = _known(parameter), updater_of(parameter)
    if updater is None or call.graph not in known.whole or not _is_only(known, call):
        return False
    if not _goes_to_grad(parameter) or not updater.takes(parameter):
        return False
    known.taken_in = _backward_pass()
    updater.take(parameter, gradient)
    known.left = _standing(parameter)
    return True


def _is_only(known: _Known, call: Call) -> bool:
    """Whether no other call's gradient of the parameter belongs to this backward pass."""
    under_way = known.returned is not None and known.returned[1] == _backward_pass()
    return not under_way and all(c is call for c in known.calls)


def _goes_to_grad(parameter: torch.Tensor) -> bool:
    """Whether this backward pass is to fill `.grad`: not one for other tensors, or of `grad()`."""
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what torch says during `torch.autograd.grad`
        return False


def returned(call: Call, position: int, gradient: torch.Tensor) -> None:
    """A graph is about to give this gradient to autograd."""
    parameter = call.parameters[position]()
    if parameter is not None and updater_of(parameter) is not None:
        # holding the memory keeps autograd from adding to it in place
        given = gradient.untyped_storage()
        _known(parameter).returned = (call.graph, _backward_pass(), given)


def arrived(parameter: torch.Tensor) -> bool:
    """To be called first thing in a hook after `.grad` was filled (`.grad` is final).

    False: autograd brought nothing, since the gradient was taken; torch calls hooks all the same.
    OffloadError if it brought something more.
    """
    known = _known(parameter)
    mine, known.returned = known.returned, None
    number = _backward_pass()
    if known.taken_in == number != -1:
        if _standing(parameter) == known.left:
            return False
        raise OffloadError(
            f"A parameter of shape {tuple(parameter.shape)} was updated during this backward pass,"
            " and then got a second gradient in it, from outside of the compiled graph (a penalty"
            " on weights?). Its update rests on the first one alone: go back to the last"
            " checkpoint, and make the optimizer with overlap=False, or compute that part inside"
            " of the compiled function."
        )
    if mine is None or parameter.grad is None:
        return parameter.grad is not None
    graph, given_in, given = mine
    same = parameter.grad.untyped_storage().data_ptr() == given.data_ptr()
    if same and given_in == number:
        known.whole.add(graph)
    else:
        known.whole.discard(graph)
    return True


def _standing(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Tells one content of `.grad` from another."""
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)


def _backward_pass() -> int:
    """Number of the backward pass that this thread runs in; −1 outside of any."""
    return torch._C._current_graph_task_id()
