"""Forecasts for several ranks: what each holds, what it sends, and what of that hides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ahead import LENGTH, Language
from torch import nn

from offcompile.ahead.answers.fit_report import FitReport
from offcompile.ahead.fit import fit
from offcompile.ahead.fitting import tier_bytes
from offcompile.ahead.plan import Ahead, ForecastRequest
from offcompile.ahead.ranks.collectives import Collectives, ring_of
from offcompile.ahead.ranks.forecast import forecast
from offcompile.ahead.ranks.request import SHARDS, RankRequest
from offcompile.ahead.ranks.sharding import groups_of, largest_share
from offcompile.ahead.ranks.surveyed import AheadOnRank
from offcompile.cli import command as cli
from offcompile.ir import (
    DEVICE,
    HOST,
    UPDATE,
    InvalidInput,
    Lane,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    Start,
    Tensor,
    Tier,
)
from offcompile.machine.hardware import load_profile
from offcompile.machine.options import Options
from offcompile.machine.rank_links import LINKS, rank_link
from offcompile.planning.planner import check_plan
from offcompile.planning.ranks.beside import (
    GATHER,
    REDUCE,
    RING,
    Collective,
    Ring,
    beside,
    with_collectives,
)
from offcompile.report.report import PlanReport
from offcompile.simulate import Simulator

CARD, LAYERS, BATCH = "rtx4090", 3, 4
OPTIONS = {"lowering": "aot_eager", "seconds": 0.1}
MIB = 1 << 20


def square(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


def quiet(text: str) -> None:
    assert text


# --- what is asked ------------------------------------------------------------------------------


def test_links_have_names_and_rates() -> None:
    assert {"nvlink", "pcie", "100gb", "400gb"} <= set(LINKS)
    for name, link in LINKS.items():
        assert rank_link(name.upper()) is link and link.name == name
        assert link.gbps is None or 1 < link.gbps < 1000
    own = rank_link("12.5 GB/s")
    assert (own.gbps, own.takes_host_link, own.one_node) == (12.5, True, False)
    profile = load_profile(CARD)
    asked = RankRequest.read(2, link="pcie")
    card_gbps = min(profile.h2d_gbps, profile.d2h_gbps)
    assert ring_of(asked, profile).gbps == card_gbps
    # a network card is reached over the same link
    for name, gbps in (("400gb", card_gbps), ("100gb", 11.0), ("nvlink", 360.0)):
        assert ring_of(RankRequest.read(2, link=name), profile).gbps == gbps


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks": 1}, "ranks: 1 ranks do not share a model; give 2 to 16,384"),
        ({"ranks": 20_000}, "20000 ranks do not share a model; give 2 to 16,384"),
        ({"ranks": 8, "shard": "zero3"}, "'zero3' is not known; there are ddp, fsdp, zero1"),
        ({"ranks": 8, "shard": "zero1"}, "there is none; give optimizer='adamw'"),
        (
            {"ranks": 8, "link": "nvlnk"},
            "'nvlnk' is no link between ranks; the nearest is 'nvlink'",
        ),
        ({"ranks": 8, "link": "0GB/s"}, "'0GB/s' is no rate of a link; write 0.001 to 100000 GB/s"),
        (
            {"ranks": 8, "link": "100gb", "node_ranks": 3},
            "cannot be 3 on each node; give a divisor",
        ),
        (
            {"ranks": 8, "link": "100gb", "node_ranks": 0},
            "cannot be 0 on each node; give a divisor",
        ),
        ({"ranks": 8, "link": "pcie", "node_ranks": 4}, "pcie connects the ranks of one node"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        RankRequest.read(**given)
    assert said in str(caught.value)


def test_ranks_on_a_node_follow_from_the_link() -> None:
    assert RankRequest.read(8, link="nvlink").node_ranks == 8
    assert RankRequest.read(8, link="100gb").node_ranks == 1
    assert RankRequest.read(8, link="100gb", node_ranks=4).node_ranks == 4


# --- what a rank holds --------------------------------------------------------------------------


@cache
def traced(memory: str = "1GiB") -> Ahead:
    with torch.device("meta"):
        model, words = Language(LAYERS), torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    options = Options.read({"memory": memory, "hardware": CARD, **OPTIONS})
    return Ahead.of(ForecastRequest(model, (words,), {}, options, square, "adamw"), quiet)


@cache
def on_rank(shard: str, ranks: int = 4, link: str = "pcie", memory: str = "1GiB") -> AheadOnRank:
    asked = RankRequest.read(ranks, shard, link, None, "adamw")
    return AheadOnRank.sharing(traced(memory), asked, quiet)


def held(problem: Problem, kind: str) -> int:
    return sum(t.nbytes for t in problem.tensors if t.kind == kind)


def test_ddp_keeps_everything_and_updates_last() -> None:
    ahead = on_rank("ddp")
    plain, found = (a.survey.problem(a.graphs).problem for a in (traced(), ahead))
    assert found.tensors == plain.tensors
    assert sorted(map(str, found.ops)) == sorted(map(str, plain.ops))
    phases = [op.phase for op in found.ops]
    assert phases.index(UPDATE) == len(phases) - phases.count(UPDATE)
    assert ahead.beside_bytes == held(plain, "gradient")  # a bucket for each


@pytest.mark.parametrize("ranks", [2, 7])
def test_fsdp_shares_out_everything(ranks: int) -> None:
    ahead = on_rank("fsdp", ranks)
    plain, found = (a.survey.problem(a.graphs).problem for a in (traced(), ahead))
    for kind in ("weight", "gradient", "state"):
        shares = {t.id: t for t in found.tensors if t.kind == kind}
        whole = {t.id: t for t in plain.tensors if t.kind == kind}
        assert shares.keys() == whole.keys()
        for name, tensor in shares.items():
            assert whole[name].nbytes <= ranks * tensor.nbytes < whole[name].nbytes + 32 * ranks
            assert tensor.pinned
    for op in found.ops:
        if op.phase == UPDATE:
            assert op.duration_us == pytest.approx(plain.op[op.id].duration_us / ranks, abs=0.01)
    weights = {t.id: t.nbytes for t in plain.tensors if t.kind == "weight"}
    groups = groups_of(ahead.whole.names, weights)
    assert set(groups) == {"", *(f"blocks.{i}" for i in range(LAYERS))}
    block, root = (sum(weights[w] for w in groups[name]) for name in ("blocks.0", ""))
    assert ahead.beside_bytes == 2 * root + 4 * block


def test_zero1_keeps_the_states_of_some_weights() -> None:
    ahead = on_rank("zero1")
    plain, found = (a.survey.problem(a.graphs).problem for a in (traced(), ahead))
    assert held(found, "weight") == held(plain, "weight")
    assert held(found, "gradient") == held(plain, "gradient")
    share = held(found, "state") / held(plain, "state")
    assert 1 / 4 <= share < 0.3  # weights are not cut
    updates = {op.id.removesuffix(".update") for op in found.ops if op.phase == UPDATE}
    assert updates == largest_share(traced().survey.problem(traced().graphs), 4)


@pytest.fixture
def fake_world() -> Iterator[int]:
    """A group of four ranks of which the others do not exist."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=4)
    yield 4
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_zero1_shares_out_as_torch_does(fake_world: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Language(LAYERS)
    theirs = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    shares = [
        sum(p.numel() for group in part for p in group["params"])
        for part in theirs._partition_parameters()
    ]
    ahead = traced().survey.problem(traced().graphs)
    mine = largest_share(ahead, fake_world)
    nbytes = sum(t.nbytes for t in ahead.problem.tensors if t.id in mine)
    assert nbytes == 4 * max(shares)


# --- what a rank sends --------------------------------------------------------------------------


@cache
def reported(shard: str, link: str = "pcie", memory: str = "1GiB", ranks: int = 4) -> PlanReport:
    ahead = on_rank(shard, ranks, link, memory)
    choice = ahead.choose(ahead.asked.options.memory, quiet, 0.2, explains=False)
    return ahead.report(quiet, choice)


def collectives(shard: str, ranks: int = 4) -> list[Collective]:
    ahead, report = on_rank(shard, ranks), reported(shard, ranks=ranks)
    nbytes = {t.id: t.nbytes for t in ahead.whole.problem.tensors}
    return Collectives(report.problem, report.plan, report.names, nbytes, ahead.ranks).all()


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_ring_sends_what_it_has_to(ranks: int) -> None:
    whole = on_rank("ddp").whole.problem
    gradients, weights = held(whole, "gradient"), held(whole, "weight")
    once = (ranks - 1) / ranks
    sent = {s: sum(c.sent_bytes for c in collectives(s, ranks)) for s in SHARDS}
    assert sent["ddp"] == pytest.approx(2 * once * gradients, rel=1e-3)
    assert sent["zero1"] == pytest.approx(2 * once * gradients + once * weights, rel=1e-3)
    names, ids = on_rank("ddp").whole.names, [t.id for t in whole.tensors if t.kind == "weight"]
    root = sum(whole.tensor[w].nbytes for w in groups_of(names, ids)[""])
    # the root's weights are gathered once
    assert sent["fsdp"] == pytest.approx(once * (2 * weights - root + gradients), rel=1e-3)


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_buckets_are_torchs() -> None:
    """Weights of 3 MB each in 20 layers: the first bucket has one, the others as many as 25 MiB."""
    problem = Problem(
        tuple(
            t
            for i in range(20)
            for t in (
                Tensor(f"w{i}", 3 * MIB, "weight", DEVICE),
                Tensor(f"g{i}", 3 * MIB, "gradient"),
            )
        ),
        tuple(Op(f"b{i}", "backward", 1.0, (f"w{i}",), (f"g{i}",)) for i in reversed(range(20))),
    )
    names = {f"{kind}{i}": f"layers.{i}" for i in range(20) for kind in "wg"}
    asked = RankRequest.read(2)
    found = Collectives(problem, Plan(), names, {}, asked).all()
    made = [f"g{i}" for i in reversed(range(20))]
    tensors = [torch.empty(3 * MIB // 4) for _ in made]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])
    assert [list(one.gradients) for one in found] == [[made[i] for i in some] for some in theirs]
    assert [one.after for one in found] == [f"b{one.gradients[-1][1:]}" for one in found]


def test_fsdp_gathers_one_group_ahead() -> None:
    report = reported("fsdp")
    at = {op.id: i for i, op in enumerate(report.problem.ops)}
    gathers = [c for c in collectives("fsdp") if c.queue == GATHER]
    forward = [c for c in gathers if c.id.endswith("forward")]
    assert [c.id.split(" ")[2] for c in forward] == ["the", *(f"blocks.{i}" for i in range(LAYERS))]
    backward = [c for c in gathers if c.id.endswith("backward")]
    assert [c.id.split(" ")[2] for c in backward] == [
        f"blocks.{i}" for i in reversed(range(LAYERS))
    ]
    for some in (forward[1:], backward):
        for earlier, later in pairwise(some):
            # a gather begins when the group before it begins
            assert at.get(later.after or "", -1) == at[earlier.before or ""] - 1
    scatters = [c for c in collectives("fsdp") if c.queue == REDUCE]
    assert len(scatters) == LAYERS + 1
    ends = [at[c.after or ""] for c in scatters]
    assert ends == sorted(ends)


# --- what hides ---------------------------------------------------------------------------------


class Hand:
    """Two ops of backward that make a gradient each, and an update that reads both."""

    machine = Machine(
        (Tier(DEVICE), Tier(HOST)),
        (Lane("h2d", HOST, DEVICE, 10.0), Lane("d2h", DEVICE, HOST, 10.0)),
    )
    collectives = tuple(
        Collective(f"bucket {i}", REDUCE, 500, 2, f"b{i}", "update" if i else None, (f"g{i}",))
        for i in range(2)
    )

    @cached_property
    def problem(self) -> Problem:
        tensors = [Tensor(f"g{i}", 500, "gradient") for i in range(2)]
        return Problem(
            (*tensors, Tensor("x", 1000, "input", DEVICE)),
            (
                Op("b0", "backward", 100.0, (), ("g0",)),
                Op("b1", "backward", 100.0, (), ("g1",)),
                Op("update", "update", 10.0, ("g0", "g1")),
            ),
        )

    def plan(self, *moves: Move) -> Plan:
        return Plan((Start("x", DEVICE),), moves)

    def step_us(self, ring: Ring, plan: Plan) -> float:
        found = with_collectives(self.problem, self.machine, plan, ring, self.collectives)
        assert found.violations == ()
        return found.makespan_us


def test_collectives_hide_behind_ops_and_updates_wait_for_them() -> None:
    hand = Hand()
    plan = hand.plan()
    assert Simulator(hand.problem, hand.machine).run(plan).makespan_us == 210
    # 50 µs each: the first behind b1, the second after it
    assert hand.step_us(Ring(10.0, 0.0, False), plan) == 260
    # 5 µs for each of two hops
    assert hand.step_us(Ring(10.0, 5.0, False), plan) == 270
    # slower than backward: one after the other
    assert hand.step_us(Ring(2.5, 0.0, False), plan) == 100 + 2 * 200 + 10


def test_only_links_of_the_card_are_shared_with_copies() -> None:
    hand = Hand()
    # a copy of 1,000 bytes takes 100 µs, beside the first collective
    plan = hand.plan(Move("m", "x", DEVICE, HOST, "d2h", start_after="b0", ready_before="b1"))
    assert hand.step_us(Ring(10.0, 0.0, False), plan) == 100 + 100 + 100 + 50 + 10
    # at half speed until the collective's 500 bytes are through, after 100 µs
    assert hand.step_us(Ring(10.0, 0.0, True), plan) == 100 + 150 + 100 + 50 + 10


def test_gradients_leave_when_they_are_reduced() -> None:
    hand = Hand()
    leaves = Move("m", "g1", DEVICE, HOST, "d2h", start_after="b1")
    found = with_collectives(
        hand.problem, hand.machine, hand.plan(leaves), Ring(10.0, 0.0, False), hand.collectives
    )
    assert found.violations == ()
    assert found.makespan_us == 200 + 50 + 50  # b0 and b1, the second bucket, the copy


@pytest.mark.parametrize("shard", SHARDS)
def test_the_step_with_collectives_is_a_valid_plan(shard: str) -> None:
    """The verifier, which shares no code with the simulator, agrees."""
    for memory in ("1GiB", "3MiB") if shard == "ddp" else ("1GiB",):
        report = reported(shard, memory=memory)
        assert report.plan.moves_nothing == (memory == "1GiB")
        ahead = on_rank(shard, memory=memory)
        nbytes = {t.id: t.nbytes for t in ahead.whole.problem.tensors}
        some = Collectives(report.problem, report.plan, report.names, nbytes, ahead.ranks).all()
        ring = ring_of(ahead.ranks, ahead.target.profile)
        step, machine, plan = beside(report.problem, report.machine, report.plan, ring, some)
        found = check_plan(step, machine, plan)
        assert found.valid, found.violations
        assert found.timeline is not None
        told = forecast(ahead, report, tier_bytes(report))
        assert told.step_us == found.timeline.makespan_us
        assert sum(m.id.startswith(RING) for m in plan.moves) == len(some)


def test_plans_that_know_of_collectives_are_not_slower_with_them() -> None:
    ahead = on_rank("ddp", memory="5MiB")
    ignoring = Ahead.candidate(ahead, ahead.asked.options.memory, quiet, 0.2, explains=False)
    report = reported("ddp", memory="5MiB")

    def step_us(plan: Plan, problem: Problem, machine: Machine) -> float:
        beside = ahead.collectives(report.names)
        some = beside.collectives(problem, plan)
        return with_collectives(problem, machine, plan, beside.ring, some).makespan_us

    mine = step_us(report.plan, report.problem, report.machine)
    choice = ignoring.choice
    made = choice.decided
    assert mine <= step_us(made.result.plan, choice.annotated.problem, made.machine)
    assert mine == report.result.beside_us or report.plan == made.result.plan
    assert forecast(ahead, report, tier_bytes(report)).step_us == mine


@settings(max_examples=20)
@given(st.sampled_from(("ddp", "zero1")), st.floats(0.01, 12.5), st.booleans())
def test_a_faster_link_is_never_slower(shard: str, gbps: float, shared: bool) -> None:
    report, some = reported(shard), collectives(shard)
    plan = report.problem, report.machine, report.plan
    alone = Simulator(*plan[:2]).run(plan[2], record=False).makespan_us
    slow, fast = (
        with_collectives(*plan, Ring(1000 * rate, 3.0, shared), some).makespan_us
        for rate in (gbps, 2 * gbps)
    )
    assert alone <= fast <= slow
    ring = Ring(1000 * gbps, 3.0, shared)
    # nothing moves beside it, so no collective waits for anything but ops and collectives
    assert slow <= alone + sum(map(ring.time_us, some)) + 1e-3 * len(some)


# --- the whole answer ---------------------------------------------------------------------------


def answered(shard: str, link: str, memory: str = "1GiB", table: bool = True) -> FitReport:
    with torch.device("meta"):
        model: nn.Module = Language(LAYERS)
    return fit(
        model,
        lambda n: torch.zeros(n, LENGTH, dtype=torch.int64, device="meta"),
        BATCH,
        memory=memory,
        hardware=CARD,
        loss=square,
        optimizer="adamw",
        table=table,
        largest=False,
        options=OPTIONS,
        ranks=4,
        shard=shard,
        link=link,
    )


def test_the_answer_names_each_way() -> None:
    found = answered("fsdp", "pcie")
    assert found.fits and found.ranks is not None
    ways = {way.shard: way for way in found.ranks.ways}
    assert list(ways) == ["fsdp", "ddp", "zero1"]
    for way in ways.values():
        assert way.step_us is not None and way.step_us >= way.alone_us > 0
        assert way.hidden_us + way.waited_us == pytest.approx(way.communication_us, rel=0.01)
        assert 0 < way.beside_bytes < way.device_bytes
    assert ways["fsdp"].device_bytes < ways["zero1"].device_bytes < ways["ddp"].device_bytes
    assert found.tier_bytes[DEVICE] == found.ranks.chosen.device_bytes
    text = found.to_text()
    assert "before communication" in text
    assert "4 ranks on 1 node, fsdp, over PCIe of the card, 25 GB/s" in text
    assert all(f"\n{shard:6}  " in text for shard in SHARDS)
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))["ranks"]
    assert (told["link"], told["shares_host_link"], told["node_ranks"]) == ("pcie", True, 4)
    assert [way["shard"] for way in told["ways"]] == list(ways)


@pytest.mark.long
def test_a_rank_that_does_not_fit_says_what_would_help() -> None:
    found = answered("ddp", "100gb", "2MiB", table=False)
    assert not found.fits and found.ranks is not None
    (way,) = found.ranks.ways
    assert not way.fits and way.reason == found.reason and "Set memory to" in way.smallest_change
    assert "no plan" in found.to_text()
    # the change that is named is enough, buckets included
    memory = way.smallest_change.split("'")[1]
    assert answered("ddp", "100gb", memory, table=False).fits


@pytest.mark.long
def test_host_memory_counts_for_all_ranks_of_a_node() -> None:
    found = answered("ddp", "nvlink", "3MiB", table=False)
    assert found.ranks is not None and found.tier_bytes[HOST] > 0
    assert found.ranks.chosen.node_host_bytes == 4 * found.tier_bytes[HOST]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def make(batch):\n"
        "    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))\n"
        "    return net, torch.zeros(batch, 64), torch.sum\n"
    )
    asked = ["fit", f"{file}:make", "--hardware", CARD, "--quick", "--json"]
    assert cli.main([*asked, "--ranks", "2", "--shard", "ddp", "--link", "100gb"]) == 0
    told = json.loads(capsys.readouterr().out)["ranks"]
    assert (told["ranks"], told["link_gbps"], len(told["ways"])) == (2, 11.0, 1)
    assert cli.main([*asked, "--link", "100gb"]) == 2
    assert "give --ranks too" in capsys.readouterr().err
    assert cli.main([*asked, "--ranks", "2", "--shard", "all"]) == 2
    assert "there are ddp, fsdp, zero1" in capsys.readouterr().err
