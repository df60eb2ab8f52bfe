"""torch's caching allocator is told to grow its segments, unless the user has configured it."""

from __future__ import annotations

import pytest
import torch

from offcompile.runtime.base.once import afresh
from offcompile.runtime.device.cuda.growing import SETTING, grow_segments

TOPIC = "the allocator's segments"


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")


def told(environment: dict[str, str], times: int = 1) -> list[str]:
    said: list[str] = []
    with afresh(TOPIC):
        for _ in range(times):
            grow_segments(environment, said.append)
    return said


def test_it_is_told_once() -> None:
    assert told({}, times=3) == [SETTING]


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
        {"OFFCOMPILE_ALLOCATOR": "torch"},
    ],
)
def test_a_user_s_own_settings_stay(environment: dict[str, str]) -> None:
    assert told(environment) == []


def test_an_allocator_other_than_torch_s_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert told({}) == []


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
def test_this_torch_knows_the_setting() -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    with pytest.raises(ValueError, match="nonsense"):
        torch._C._accelerator_setAllocatorSettings("nonsense:True")
