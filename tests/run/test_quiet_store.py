"""Ranks wait for each other's keys without a word."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from offcompile.run.ranks.torch_state import QuietStore

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def test_a_wait_in_vain_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    store = QuietStore(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    with pytest.raises(RuntimeError, match="there, not there did not come"):
        store.wait(["there", "not there"], timedelta(milliseconds=30))
    assert capfd.readouterr() == ("", "")


def test_a_wait_ends_when_all_keys_are_there() -> None:
    store = QuietStore(dist.HashStore())
    store.set("one", "1")
    other = threading.Timer(0.02, store.set, ["another", "2"])
    other.start()
    store.wait(["one", "another"], timedelta(seconds=60))
    assert store.get("another") == b"2"
    other.join()
