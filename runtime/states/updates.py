"""Lets an optimizer take gradients inside a compiled backward and update the weights there.

A compiled graph returns all its gradients to autograd at once, when it ends. To let a weight be
updated while backward still computes, the graph offers each gradient as soon as it is computed. An
`Updater` that takes it consumes it at once, and autograd gets none for that weight.

Only the whole gradient may be taken, and autograd does not say in advance how many gradients a
weight gets in one backward pass. So a gradient is taken on two conditions: no other call that uses
the weight waits for its backward, and the graph has been seen to produce the whole gradient
(autograd delivered exactly the tensor that the graph had returned). A gradient that still comes
from elsewhere, such as a penalty added outside the graph, raises an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.weak import WeakTensor, tensor_keys

#: offers in vain after which a gradient had better not be offered; the first always is
MOST_REFUSED = 3


class Holder(Protocol):
    """A part of an optimizer that uses memory of its parameters' device."""

    def held_bytes(self) -> int:
        """Bytes that its states and buffers take there, or will take."""


class Updater(Holder, Protocol):
    """An optimizer that updates during backward, as a compiled graph sees it."""

    def uses_up(self) -> bool:
        """True if `take` needs no memory for the gradients that it is given, since it uses each of
        them up at once."""

    def takes(self, parameter: torch.Tensor) -> bool:
        """True if the gradient now being computed for the parameter may be given to `take`."""

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Consume the one gradient of the parameter in this backward pass.

        When it returns, the gradient's memory may be used again; the parameter may have changed.
        """

    def came(self, parameter: torch.Tensor) -> None:
        """Handle a final gradient in `parameter.grad`, which may be used up."""

    def reduced(self) -> None:
        """Handle the end of a backward pass in which ranks have reduced all gradients."""


class Reducer(Updater, Protocol):
    """What reduces gradients over ranks during backward, and passes them on to optimizers."""

    def wants_early(self, parameter: torch.Tensor) -> bool:
        """True if the gradient had better be offered while backward runs: others wait for it."""

    def defer(self, parameter: torch.Tensor) -> None:
        """Let the optimizer of the gradient that comes next wait until the graph is over, which may
        still read the weight."""


@runtime_checkable
class StatesOwner(Holder, Protocol):
    """An optimizer that may keep states on the device of its parameters, or beside it."""

    def free_states(self, parameters: Collection[int]) -> int:
        """Bytes of states that may live on either side. 0 if they exist already, the user has
        chosen a side, or not all of its parameters are among these (by their `id`)."""

    def keep(self, share: float) -> None:
        """Have the device keep this share of them, those of the first parameters."""

    def steps(self) -> int:
        """The number of steps that are over."""

    def beside_bytes(self, device: torch.device) -> int:
        """Bytes of states that this device could keep and does not, if neither the user nor a plan
        has chosen their place. Those of weights that live on the host are where they should be."""

    def fill(self, device: torch.device, room_bytes: int) -> int:
        """Move such states to the device, those of the first parameters first, as far as the room
        goes; the bytes that it took. 0 while a step is under way."""

    def give_way(self) -> int:
        """Move states that it chose to keep on the device to the host; the bytes that were freed.
        0 if there are none, or a step is under way."""


class UpdateCall:
    """One run of a compiled forward that may be followed by its backward."""

    __slots__ = ("__weakref__", "counted", "graph", "may_update", "parameters")

    def __init__(
        self,
        graph: str,
        parameters: Sequence[torch.Tensor],
        counted: bool = False,
        may_update: bool = True,
    ) -> None:
        """counted: the plan counts gradients after they were offered, too. may_update: backward no
        longer reads a weight when it offers its gradient."""
        self.graph, self.counted, self.may_update = graph, counted, may_update
        self.parameters = tuple(map(WeakTensor, parameters))
        for parameter in parameters:
            _known(parameter).calls.add(self)


@dataclass(eq=False)
class _Known:
    """The records of a parameter."""

    #: key of the runtime that moves tensors of the graph that it was last bound to
    runtime: str | None = None
    updater: weakref.ref[Updater] | None = None
    #: reduces its gradient over ranks before the updater gets it
    reducer: weakref.ref[Reducer] | None = None
    holders: weakref.WeakSet[Holder] = field(default_factory=weakref.WeakSet)
    #: calls whose backward may still run
    calls: weakref.WeakSet[UpdateCall] = field(default_factory=weakref.WeakSet)
    #: backward pass in which its gradient was last taken, and the state of `.grad` after that
    taken_in: int = -1
    left: tuple[int, int] | None = None
    #: graph, backward pass and memory of a gradient returned to autograd but not yet delivered; no
    #: memory if autograd adds it to a gradient of an earlier pass
    returned: tuple[str, int, torch.UntypedStorage | None] | None = None
    #: graphs that produce the whole gradient
    whole: set[str] = field(default_factory=set)
    #: offers since the last one that was taken
    refused: int = 0
    #: True if a plan has the device update it, False if the host; None if no plan says
    by_device: bool | None = None


class _Register:
    def __init__(self) -> None:
        self.parameters = tensor_keys()
        self.holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.registrations = 0


# per process: compiled graphs and optimizers know the parameters, but not each other
_register = _Register()


def _find(parameter: torch.Tensor) -> _Known | None:
    found: _Known | None = _register.parameters.get(parameter)
    return found


def _known(parameter: torch.Tensor) -> _Known:
    found = _find(parameter)
    if found is None:
        found = _register.parameters[parameter] = _Known()
    return found


def register(parameters: Iterable[torch.Tensor], updater: Updater) -> None:
    """Offer gradients of these parameters to `updater` from now on, as long as it lives."""
    for parameter in parameters:
        _known(parameter).updater = weakref.ref(updater)


def unregister(parameters: Iterable[torch.Tensor], updater: Updater) -> None:
    """Stop offering gradients of these parameters to `updater`."""
    for parameter in parameters:
        known = _known(parameter)
        if known.updater is not None and known.updater() is updater:
            known.updater = None


def bind(parameters: Iterable[torch.Tensor], runtime: str) -> None:
    """Note the key of the runtime of a graph that is called with these parameters."""
    for parameter in parameters:
        _known(parameter).runtime = runtime


def runtime_key_of(parameter: torch.Tensor) -> str | None:
    """The key of the runtime of the parameter's graph; None if no graph has been called with it."""
    known = _find(parameter)
    return None if known is None else known.runtime


def reduce_with(parameters: Iterable[torch.Tensor], reducer: Reducer) -> None:
    """Give gradients of these parameters to `reducer`, as long as it lives, which passes them on to
    their updaters."""
    for parameter in parameters:
        _known(parameter).reducer = weakref.ref(reducer)


def reducer_of(parameter: torch.Tensor) -> Reducer | None:
    """The reducer of the parameter's gradients over ranks during backward; None if there is
    none."""
    found = _find(parameter)
    return None if found is None or found.reducer is None else found.reducer()


def optimizer_of(parameter: torch.Tensor) -> Updater | None:
    """The optimizer that updates the parameter during backward; None if there is none."""
    found = _find(parameter)
    return None if found is None or found.updater is None else found.updater()


def updater_of(parameter: torch.Tensor) -> Updater | None:
    """The updater to which a compiled graph offers the parameter's gradient: what reduces it over
    ranks during backward, or else its optimizer during backward. None if there is neither."""
    return reducer_of(parameter) or optimizer_of(parameter)


def advise(parameters: Iterable[torch.Tensor], by_device: bool) -> None:
    """Say which side should update these parameters, whose states are on the host."""
    for parameter in parameters:
        _known(parameter).by_device = by_device


def advice_for(parameter: torch.Tensor) -> bool | None:
    """True: update on the device, with its states copied there; False: on the host; None: unset."""
    found = _find(parameter)
    return None if found is None else found.by_device


def count(parameters: Iterable[torch.Tensor], holder: Holder) -> None:
    """Count the memory of `holder` beside the graphs that use one of these, from now on."""
    _register.registrations += 1
    _register.holders.add(holder)
    for parameter in parameters:
        _known(parameter).holders.add(holder)


def registrations() -> int:
    """The number of `count` calls so far: results of `holders_of` are valid until it changes."""
    return _register.registrations


def holders_of(parameters: Iterable[torch.Tensor]) -> list[Holder]:
    """The holders of memory for any of these parameters."""
    known = (_find(p) for p in parameters)
    return list({id(h): h for k in known if k is not None for h in k.holders}.values())


def all_held_bytes() -> int:
    """The bytes of all holders in the process."""
    return sum(h.held_bytes() for h in tuple(_register.holders))


def offer(call: UpdateCall, position: int, gradient: torch.Tensor) -> bool:
    """Give a gradient to the updater of the call's parameter at `position`, if it may be taken.

    Returns False if the gradient must be returned to autograd (then call `returned`).
    """
    parameter = call.parameters[position]()
    if parameter is None:
        return False
    known, updater = _known(parameter), updater_of(parameter)
    known.refused += 1
    if updater is None or call.graph not in known.whole or not _is_only(known, call):
        return False
    if not _goes_to_grad(parameter) or not updater.takes(parameter):
        return False
    reducer = reducer_of(parameter)
    if not call.may_update:
        if reducer is None:
            return False
        reducer.defer(parameter)
    known.refused = 0
    known.taken_in = _backward_pass()
    updater.take(parameter, gradient)
    known.left = _standing(parameter)
    return True


def is_refused(parameter: torch.Tensor) -> bool:
    """True if its gradients are offered in vain, time and again."""
    found = _find(parameter)
    return found is not None and found.refused >= MOST_REFUSED


def _is_only(known: _Known, call: UpdateCall) -> bool:
    """True if no other call produces a gradient of the parameter in this backward pass."""
    under_way = known.returned is not None and known.returned[1] == _backward_pass()
    return not under_way and all(c is call for c in known.calls)


def _goes_to_grad(parameter: torch.Tensor) -> bool:
    """True if this backward pass fills the parameter's `.grad`; False inside `grad()`."""
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch raises this during `torch.autograd.grad`
        return False


def returned(call: UpdateCall, position: int, gradient: torch.Tensor) -> None:
    """Note that a graph is about to return this gradient to autograd."""
    parameter = call.parameters[position]()
    if parameter is not None and updater_of(parameter) is not None:
        # holding the memory keeps autograd from adding to it in place
        given = gradient.untyped_storage() if parameter.grad is None else None
        _known(parameter).returned = (call.graph, _backward_pass(), given)


def arrived(parameter: torch.Tensor) -> bool:
    """Call this first in a hook that runs after `.grad` was filled (`.grad` is final).

    Returns False if autograd delivered nothing because the gradient was taken; torch calls hooks
    even then. OffloadError if autograd delivered another gradient.
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
    if given is None:
        return True
    same = parameter.grad.untyped_storage().data_ptr() == given.data_ptr()
    if same and given_in == number:
        known.whole.add(graph)
    else:
        known.whole.discard(graph)
    return True


def was_taken(parameter: torch.Tensor) -> bool:
    """True if the parameter's gradient of this backward pass was taken."""
    return _known(parameter).taken_in == _backward_pass() != -1


def settled(parameter: torch.Tensor) -> None:
    """Note that a taken gradient has been used, or has been put into `.grad`."""
    if was_taken(parameter):
        _known(parameter).left = _standing(parameter)


def _standing(parameter: torch.Tensor) -> tuple[int, int] | None:
    """A value that identifies the content of `.grad`."""
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)


def _backward_pass() -> int:
    """The number of the backward pass that this thread runs in; −1 outside of any."""
    return torch._C._current_graph_task_id()
