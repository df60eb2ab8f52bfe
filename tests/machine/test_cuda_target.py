"""Planning for a CUDA card where there is none: fake tensors, and the card's figures made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from offcompile.graph.annotate import annotate
from offcompile.graph.costs.op_costs import CostModel, OpCost, costs_of_graph
from offcompile.graph.graphs import Graphs
from offcompile.graph.lowering.rewrite import rewrite
from offcompile.ir import DEVICE, FORWARD, HOST, InvalidInput, OffloadError
from offcompile.machine import target as targets
from offcompile.machine.hardware import load_profile
from offcompile.machine.options import Options
from offcompile.machine.target import CudaTarget, target_for
from offcompile.machine.this_gpu import to_cuda_machine
from offcompile.planning.fit_budget import PlanSearch, fit_budget
from offcompile.run.plan.carry_out import _check_one_device
from offcompile.runtime.base import clock
from offcompile.runtime.base.clock import StreamClock, WallClock, clock_for
from offcompile.runtime.device.cuda import facts as cuda_facts
from offcompile.runtime.moves import ops
from offcompile.runtime.moves.registry import RuntimeSettings

MIB = 1 << 20
SIDE = 512
CARD = load_profile("rtx4090")


def hourglass(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor]:
    """Every value of the way in is wanted again, in reverse, on the way out."""
    inside = []
    for _ in range(6):
        x = torch.relu(x @ weight)
        inside.append(x)
    for y in reversed(inside):
        x = torch.relu(x @ weight) * y
    return (x * scale.to(x.device),)


def captured(device: str = "cuda:0") -> Graphs:
    with FakeTensorMode():
        x, weight = (torch.empty(SIDE, SIDE, device=device) for _ in range(2))
        scale = torch.empty(1)
        module = make_fx(hourglass)(x, weight, scale)
    return Graphs(module, None, 1, device=torch.device(device).type)


def hint(size: int | torch.SymInt) -> int:
    return int(size)


def card(directories: tuple[Path, ...] = (), library_bytes: int = 0) -> CudaTarget:
    return CudaTarget(CARD, directories, 24 << 30, 64 << 30, 0, library_bytes)


# --- what is planned for ------------------------------------------------------------------------


def test_only_what_lies_on_the_card_counts() -> None:
    graphs = captured()
    problem = annotate(graphs, {}, hint).problem
    assert sum(t.nbytes for t in problem.tensors if t.home == DEVICE) == 2 * SIDE * SIDE * 4
    assert problem.tensor["scale_1"].nbytes == 0 and problem.tensor["scale_1"].pinned
    assert all(t.nbytes in (0, 4, SIDE * SIDE * 4) for t in problem.tensors)


def test_a_plan_for_the_card_loads_to_the_card() -> None:
    graphs = captured()
    costs = {(FORWARD, n.name): OpCost(1000.0) for n in graphs.forward.graph.nodes}
    annotated = annotate(graphs, costs, hint)
    target = card()
    search = PlanSearch(target.machine, target.reserve_bytes, "joint", 1.0)
    found = fit_budget(annotated.problem, search, 7 * MIB)
    assert not found.fits and found.result.plan.moves
    assert {m.lane for m in found.result.plan.moves} == {"h2d", "d2h"}
    made = rewrite(graphs, annotated, found.result.plan, found.order, target.runtime.key)
    loads = [n for n in made.graphs.forward.graph.nodes if n.target is ops.start_load]
    assert loads
    for node in loads:
        buffer, ticket = node.meta["val"]
        assert node.args[7] == "cuda:0"
        assert buffer.device == torch.device("cuda:0") and ticket.device.type == "cpu"
    assert RuntimeSettings.from_key(target.runtime.key).target == "cuda:0"


def test_nothing_is_packed_where_steps_are_to_be_captured() -> None:
    assert card().machine(MIB).codecs
    assert not replace(card(), packs=False).machine(MIB).codecs


def test_costs_on_a_card_come_from_its_profile() -> None:
    graphs = captured()
    model = CostModel(CARD, False, "aot_eager", device=torch.device("cuda:0"))
    costs = costs_of_graph(graphs.forward.graph, model, hint)
    flop = 2 * SIDE**3
    least_us = flop / (CARD.matmul_tflops["fp32"] * 1e6)
    assert least_us < costs["mm"].duration_us < 3 * least_us + 10


def test_a_graph_on_two_cards_is_refused() -> None:
    _check_one_device("graph 0", captured(), torch.device("cuda:0"))
    with pytest.raises(OffloadError, match="computes on cuda:1 and has x_1 on cuda:0"):
        _check_one_device("graph 0", captured(), torch.device("cuda:1"))


# --- targets ------------------------------------------------------------------------------------


def test_the_disk_is_a_tier_for_who_asks_for_it(tmp_path: Path) -> None:
    assert set(card().machine(MIB).tier) == {"device", "host"}
    machine = card((tmp_path,)).machine(MIB)
    assert set(machine.tier) == {"device", "host", "disk"}
    assert machine.tier["device"].capacity_bytes == MIB
    assert machine.tier["host"].capacity_bytes == 64 << 30
    way = machine.lane["disk_to_device"]
    assert (way.source, way.target) == ("disk", "device")
    assert way.bytes_per_us == pytest.approx((CARD.disk_read_gbps or 0) * 1000)


def test_a_lane_through_a_slow_link_is_as_slow_as_the_link() -> None:
    slow = replace(CARD, d2h_gbps=1.0, disk_write_gbps=5.0)
    lane = to_cuda_machine(slow, None, disk=True).lane["device_to_disk"]
    assert lane.bytes_per_us == 1000.0


def test_the_libraries_share_is_off_the_budget() -> None:
    assert card(library_bytes=32 * MIB).reserve_bytes(640 * MIB) == 42 * MIB
    assert card().reserve_bytes(8 * MIB) == MIB
    assert card().holes_bytes(8 << 30) == 0
    assert card().holes_bytes(24 << 30) == (24 << 30) // 32


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "cuda_index", lambda device: device.index or 0)
    monkeypatch.setattr(targets, "usable_bytes", lambda index: 20 << 30)
    monkeypatch.setattr(targets, "library_bytes", lambda index: 8 * MIB)
    monkeypatch.setattr(targets, "cuda_facts", lambda index: SimpleNamespace(total_bytes=24 << 30))
    monkeypatch.setattr(targets, "reaches_host", lambda index: True)


@pytest.mark.usefixtures("one_card")
def test_options_decide_on_tiers(tmp_path: Path) -> None:
    device = torch.device("cuda:1")
    plain = target_for(Options.read({"hardware": "rtx4090"}), device)
    assert isinstance(plain, CudaTarget)
    assert (plain.device, plain.directories, plain.device_bytes) == (device, (), 20 << 30)
    asked = {"hardware": "rtx4090", "spill": str(tmp_path), "host_memory": "3GiB"}
    with_disk = target_for(Options.read(asked), device)
    assert with_disk.directories == (tmp_path,) and with_disk.host_bytes == 3 << 30
    assert with_disk.runtime.directories == (str(tmp_path),)


@pytest.mark.usefixtures("one_card")
def test_a_budget_of_the_whole_card_is_cut_to_what_is_free() -> None:
    def budget(memory: str) -> int | None:
        asked = Options.read({"hardware": "rtx4090", "memory": memory})
        return target_for(asked, torch.device("cuda:0")).budget_bytes(asked)

    assert budget("19GiB") == 19 << 30
    assert budget("24GiB") == 20 << 30
    with pytest.raises(InvalidInput, match=r"25,769,803,777 bytes .* that has 21,474,836,480"):
        budget(f"{(24 << 30) + 1}")


def test_a_card_that_is_not_there_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_facts.torch.cuda, "is_available", lambda: False)
    with pytest.raises(OffloadError, match="this process sees no CUDA device"):
        target_for(Options.read({}), torch.device("cuda:0"))
    monkeypatch.setattr(cuda_facts.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_facts.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(OffloadError, match="There is no cuda:3: this process sees 1 CUDA"):
        target_for(Options.read({}), torch.device("cuda:3"))


def test_other_accelerators_are_refused_by_name() -> None:
    with pytest.raises(OffloadError, match="computes on mps"):
        target_for(Options.read({}), torch.device("mps"))


# --- time ---------------------------------------------------------------------------------------


class FakeEvent:
    """An event whose time is the count of those before it; it has ended when told so."""

    made: list[FakeEvent]
    ended: bool

    def __init__(self) -> None:
        self.at = len(self.made)
        self.made.append(self)

    def record(self, stream: object) -> None:
        assert stream == "the current stream"

    def query(self) -> bool:
        return self.ended

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(other.at - self.at)


def test_a_stream_s_time_is_told_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.made, FakeEvent.ended = [], False
    monkeypatch.setattr(clock.torch.cuda, "current_stream", lambda device: "the current stream")
    timer = StreamClock(torch.device("cuda:0"), FakeEvent)
    told: list[float] = []
    first = timer.start()
    second = timer.start()
    timer.stop(second, told.append)
    timer.stop(first, told.append)
    assert told == []
    FakeEvent.ended = True
    timer.settle()
    assert told == [1000.0, 3000.0]
    timer.settle()
    assert len(told) == 2


@pytest.mark.parametrize(
    ("device", "kind"), [("cpu", WallClock), ("cuda:0", StreamClock)], ids=["cpu", "cuda"]
)
def test_each_device_has_its_clock(device: str, kind: type) -> None:
    assert isinstance(clock_for(torch.device(device)), kind)


def test_the_wall_clock_tells_at_once() -> None:
    told: list[float] = []
    timer: Any = WallClock()
    tell: Callable[[float], None] = told.append
    timer.stop(timer.start(), tell)
    assert len(told) == 1 and told[0] >= 0


# --- weights on the host --------------------------------------------------------------------------


def test_direct_access_is_as_fast_as_it_was_measured() -> None:
    in_place = card().in_place(MIB)
    assert in_place is not None
    link = min(CARD.h2d_gbps, CARD.d2h_gbps) * 1000
    assert in_place.us(5.0, MIB) == pytest.approx(5.0 + 2 * MIB / link)
    measured = replace(CARD, direct_gbps={"read": 20.0, "write": 16.0, "read_strided": 1.0})
    known = replace(card(), profile=measured).in_place(MIB)
    assert known is not None
    assert known.us(5.0, 20_000) == known.us(5.0, 16_000, writes=True) == pytest.approx(6.0)


def test_a_card_that_does_not_reach_the_host_has_no_weights_there() -> None:
    assert replace(card(), reaches_host=False).in_place(MIB) is None
    if not torch.cuda.is_available():
        assert not cuda_facts.reaches_host(0)


def test_a_plan_for_the_card_has_its_weight_on_the_host() -> None:
    """The weight alone is more than the budget leaves: it is fetched, or used where it lies."""
    graphs = replace(captured(), parameters=frozenset([1]))
    for node in graphs.forward.graph.find_nodes(op="placeholder"):
        node.meta["desc"] = PlainAOTInput(["x_1", "weight_1", "scale_1"].index(node.name))
    costs = {(FORWARD, n.name): OpCost(1000.0) for n in graphs.forward.graph.nodes}
    target = card()
    annotated = annotate(graphs, costs, hint, in_place=target.in_place(2 * MIB))
    assert annotated.problem.tensor["weight_1"].home == HOST
    search = PlanSearch(target.machine, target.reserve_bytes, "joint", 1.0)
    found = fit_budget(annotated.problem, search, 6 * MIB, may_fit=False)
    made = rewrite(graphs, annotated, found.result.plan, found.order, target.runtime.key)
    plan = found.result.plan
    fetched = [n for n in made.graphs.forward.graph.nodes if n.target is ops.start_fetch]
    assert plan.directs or fetched
    for node in fetched:
        assert node.args[-1] == "cuda:0" and node.args[-2] == target.runtime.key
        assert node.meta["val"][0].device == torch.device("cuda:0")


def test_the_host_s_bound_holds_for_weights_too() -> None:
    bounded = replace(card(), host_bytes=MIB // 2)
    assert bounded.machine(8 * MIB).tier["host"].capacity_bytes == MIB // 2
