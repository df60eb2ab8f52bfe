"""Static memory of captured steps: arguments by address or copy, results lent and given back."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from torch import nn

import offcompile
from offcompile.run.replay.places import Arguments, StaticPlace, lent
from offcompile.run.replay.results import OfArgument, Results
from offcompile.runtime.device.graphs import CannotCapture

CPU = torch.device("cpu")


class Owner:
    """Stands for a graph, whose memory lives as long as it does."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors


def test_what_is_lent_is_out_while_anybody_has_it() -> None:
    x = torch.arange(12.0).view(3, 4)
    first, second = lent([StaticPlace.of(x), StaticPlace.of(x.t()[1:3])], Owner(x))
    assert first.is_back and second.is_back
    given = first.give()
    assert torch.equal(given, x)
    assert given.data_ptr() == x.data_ptr()
    assert not first.is_back
    assert not second.is_back  # it lies in the same storage
    view = given[1:]
    del given
    assert not first.is_back
    assert first.is_in(view) and not first.is_in(torch.ones(3))
    del view
    assert first.is_back and second.is_back
    assert torch.equal(second.give(), x.t()[1:3])


def test_what_is_lent_keeps_its_owner() -> None:
    owner = Owner(torch.arange(4))
    gone = weakref.ref(owner)
    (one,) = lent([StaticPlace.of(owner.tensors[0])], owner)
    given = one.give()
    del owner, one
    gc.collect()
    assert gone() is not None
    assert given.tolist() == [0, 1, 2, 3]
    del given
    gc.collect()
    assert gone() is None


def test_results_are_given_as_the_half_made_them() -> None:
    weight, loss, saved = torch.ones(4, 2), torch.tensor(3.0), torch.arange(6.0)
    outputs = [loss, saved.view(2, 3), weight, weight.t(), None]
    where = Arguments([weight], CPU, frozenset()).where
    results = Results.of(outputs, CPU, where, users=1)
    assert isinstance(results.ways[2], OfArgument)
    assert results.copied_bytes == loss.element_size()
    assert results.storages == {saved.data_ptr()}
    results.lend(Owner(loss, saved))
    found = results.given([weight])
    assert [None if x is None else x.tolist() for x in found] == [
        None if x is None else x.tolist() for x in outputs
    ]
    loss.fill_(7.0)
    assert float(found[0]) == 3.0  # the user's own
    assert found[2] is weight
    assert found[3].data_ptr() == weight.data_ptr()
    assert len(results.out()) == 1
    del found
    assert not results.out()


def test_arguments_are_copied_in_or_known_by_address() -> None:
    weight, batch = torch.ones(3), torch.zeros(2, 2)
    places = Arguments([weight, batch], CPU, frozenset({1}))
    assert places.nbytes == 16
    inside = places.put_in([weight, batch])
    assert inside[0] is weight and inside[1] is not batch
    places.fill([weight, torch.full((2, 2), 5.0)])
    assert inside[1].tolist() == [[5.0, 5.0], [5.0, 5.0]]
    assert places.strays([weight, torch.ones(2, 2)]) == []
    assert places.strays([weight.clone(), batch]) == [0]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([3], r"argument 0 is a int and no tensor; compile with dynamic=False"),
        (
            [torch.ones(2, device="meta")],
            r"argument 0, of shape \(2,\), lies on meta; move it to cpu",
        ),
        ([torch.ones(1).expand(4)], r"argument 0, of shape \(4,\) and stride \(0,\), overlaps"),
    ],
)
def test_arguments_that_cannot_be_static_are_named(arguments: list[object], why: str) -> None:
    with pytest.raises(CannotCapture, match=why):
        Arguments(arguments, CPU, frozenset({0}))


def test_on_the_cpu_target_one_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    options = {"memory": "64MiB", "lowering": "aot_eager", "cudagraphs": True}
    step = torch.compile(model, backend="offcompile", options=options)
    with caplog.at_level(logging.WARNING, "offcompile"):
        for _ in range(2):
            step(torch.ones(2, 4)).sum().backward()
    told = [r.getMessage() for r in caplog.records if "no CUDA graph" in r.getMessage()]
    assert len(told) == 1
    assert "computes on the CPU, which has no graphs; leave cudagraphs out" in told[0]
    assert any("no CUDA graph" in line for line in offcompile.reports()[-1].profile.said)
