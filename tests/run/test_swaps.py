"""Torch swaps what parameters are while they are known here: they go on with what they became."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from weights_runs import LAYERS, batch, clean_slate, loss_of, on_host, ours, seeded
from weights_runs import pair as build

from offcompile.optim import AdamW
from offcompile.run.accounts.process import process
from offcompile.runtime.base.weak import WeakTensor, tensor_keys


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield from clean_slate()


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def converting(forward: Any, model: nn.Module) -> list[Tensor]:
    """Trains, becomes twice as precise between two steps, its gradients too, and trains on."""
    seen = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        for seed in range(2):
            loss = loss_of(forward(batch(seed).to(dtype)))
            loss.backward()
            seen.append(loss.detach())
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.05)
    return [*seen, *(p.detach() for p in model.parameters())]


def test_a_compiled_model_may_be_converted_by_swapping(swapping: None) -> None:
    plain, model = seeded(build), seeded(build)
    expected = converting(torch.compile(plain, backend="aot_eager"), plain)
    torch._dynamo.reset()
    identities = list(map(id, model.parameters()))
    found = converting(ours(model), model)
    assert all(map(torch.equal, found, expected))
    assert on_host(model) == LAYERS and identities == list(map(id, model.parameters()))
    seen = process.usage_of(torch.device("cpu")).holdings
    assert len(seen.living()) == len(identities)
    del model, found
    torch._dynamo.reset()
    gc.collect()
    assert not seen.living()


def test_a_model_of_subclasses_may_be_converted() -> None:
    """Torch swaps these whatever is set; Dynamo cannot trace them again then, and eager can."""
    model = seeded(build)
    data = model.up.weight.data
    model.up.weight = nn.Parameter(TwoTensor(data, data.clone()))
    loss_of(ours(model)(batch(0))).backward()
    assert on_host(model) == {"down.weight"}
    model.to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model.up.weight.a.dtype == torch.float64
    loss_of(model(batch(1).double())).backward()


def test_an_optimizer_beside_backward_goes_on_with_swapped_parameters(swapping: None) -> None:
    """It is registered for the parameters themselves, which stay."""
    model = seeded(build)
    forward, optimizer = ours(model), AdamW(model.parameters(), lr=1e-2, overlap=True)
    for seed in range(3):
        loss_of(forward(batch(seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
    from offcompile.runtime.states.updates import updater_of

    before = [updater_of(p) for p in model.parameters()]
    model.double()
    assert all(before) and [updater_of(p) for p in model.parameters()] == before


def test_a_reference_stands_again_after_a_swap() -> None:
    died: list[str] = []
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))
    told, quiet = WeakTensor(one, lambda: died.append("one")), WeakTensor(one)
    names = tensor_keys()
    names[one] = "one"
    torch.utils.swap_tensors(one, other)
    assert told() is quiet() is one and one.shape == (3,) and names[one] == "one"
    del other
    assert not died and len(names) == 1
    del one
    assert died == ["one"] and told() is None and not len(names)


def test_a_swap_that_torch_refuses_leaves_references_as_they_were() -> None:
    one, other = torch.ones(2), torch.zeros(3)
    mine, theirs = WeakTensor(one), weakref.ref(one)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(one, other)
    assert mine() is theirs() is one and one.shape == (2,)
