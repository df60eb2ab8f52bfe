"""MKL's first calls, made from one thread: no process gets other results in its first step."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from offcompile.runtime.base.once import afresh
from offcompile.runtime.device import vector_math
from offcompile.runtime.device.vector_math import FUNCTIONS, settle_vector_math

mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")

# Without the call, some children in a hundred have another first result (on two cores). They are
# forked before any function was called, so that each makes the first calls of a process.
FIRST_CALLS = textwrap.dedent(
    """
    import os
    import torch
    from offcompile.runtime.device.vector_math import settle_vector_math

    def differs():
        torch.set_num_threads(2)
        settle_vector_math()
        values = torch.linspace(-3, 3, 1 << 21)
        values.view(1024, 2048) @ values.view(2048, 1024)  # starts torch's threads
        return any(not torch.equal(f(values), f(values)) for f in (torch.erf, torch.cos))

    for _ in range(40):
        child = os.fork()
        if child == 0:
            os._exit(1 if differs() else 0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit("two calls gave two results")
    """
)


class _Calls(TorchDispatchMode):
    """Counts what reaches torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@mkl
def test_the_first_call_gives_what_all_others_give() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@mkl
def test_modes_that_are_on_see_nothing_of_it_and_do_not_stop_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(vector_math, "FUNCTIONS", (*FUNCTIONS, given.append))
    with afresh("vector math"), FakeTensorMode(), _Calls() as calls:
        settle_vector_math()
    assert calls.names == []
    assert [type(x) for x in given] == [torch.Tensor, torch.Tensor]
    assert [x.dtype for x in given] == [torch.float32, torch.float64]


@mkl
def test_compiling_settles_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Tensor] = []
    monkeypatch.setattr(vector_math, "FUNCTIONS", (calls.append,))
    options = {"memory": "1GiB", "lowering": "aot_eager"}
    with afresh("vector math"):
        for _ in range(2):
            torch._dynamo.reset()
            model = torch.compile(torch.nn.Linear(4, 4), backend="offcompile", options=options)
            model(torch.ones(2, 4)).sum().backward()
    assert len(calls) == 2  # of each precision
