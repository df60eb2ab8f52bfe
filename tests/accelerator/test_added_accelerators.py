"""Adding an accelerator: what it must bring, and what is refused without it."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch
from host_fakes import FakeRegistrar

from offcompile.ir import OffloadError
from offcompile.machine.options import Options
from offcompile.machine.target import target_for
from offcompile.runtime.memory import accelerators as added
from offcompile.runtime.memory.accelerators import NEEDED, Accelerator, add_accelerator
from offcompile.runtime.moves.registry import RuntimeSettings

# a device type that torch knows everywhere, without devices of it here
KIND = "xpu"


def module_of(names: tuple[str, ...]) -> types.SimpleNamespace:
    found = types.SimpleNamespace(**dict.fromkeys(names, lambda *_: None))
    found.is_available, found.device_count, found.current_device = bool, int, int
    return found


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    table: dict[str, Accelerator] = {}
    monkeypatch.setattr(added, "_added", lambda: table)
    yield


@pytest.mark.parametrize("kind", ["cpu", "cuda", "meta"])
def test_devices_of_our_own_are_not_added(kind: str, forgotten: None) -> None:
    with pytest.raises(OffloadError, match=f"{kind} devices need not be added"):
        add_accelerator(Accelerator(kind, FakeRegistrar))


def test_a_module_without_all_functions_is_refused(
    forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = module_of(tuple(n for n in NEEDED if n not in ("Event", "memory_stats")))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: few)
    with pytest.raises(OffloadError, match=r"torch\.xpu lacks Event, memory_stats: give"):
        add_accelerator(Accelerator(KIND, FakeRegistrar))
    assert added.accelerators() == ()


def test_a_device_type_that_torch_does_not_know_is_refused(forgotten: None) -> None:
    with pytest.raises(OffloadError, match="torch has no module for nowhere devices"):
        add_accelerator(Accelerator("nowhere", FakeRegistrar))


def test_it_becomes_a_target(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(KIND, 0)
    with pytest.raises(OffloadError, match="or add the accelerator"):
        target_for(Options.read({}), device)
    with pytest.raises(OffloadError, match="There is no runtime for the target 'xpu:0'"):
        RuntimeSettings(target="xpu:0")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module_of(NEEDED))
    add_accelerator(Accelerator(KIND, FakeRegistrar))
    assert RuntimeSettings(target="xpu:0").target == "xpu:0"
    with pytest.raises(OffloadError, match="The rates of xpu:0 cannot be measured: name a"):
        target_for(Options.read({}), device)
    with pytest.raises(OffloadError, match="There is no xpu:0: this process sees 0 devices"):
        target_for(Options.read({"hardware": "cpu"}), device)
