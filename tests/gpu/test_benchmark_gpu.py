"""The benchmark for GPUs, as far as it runs without one."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from gpu_checks import on
from torch import fx
from zoo import BY_NAME

from benchmarks import bare, gpu, gpu_cases, gpu_child, gpu_run
from benchmarks.gpu_table import text_of

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def asked(**settings: Any) -> argparse.Namespace:
    given = {"variant": None, "rounds": 2, "spill": None, "host_gib": 64.0, "quick": False}
    given["hardware"] = None
    return argparse.Namespace(**given | {"cpu_check": True} | settings)


def measurement(**settings: Any) -> gpu.Measurement:
    return gpu.Measurement("resnet", asked(**settings), dict(os.environ), time.monotonic() + 600)


# --- the whole of it, on the CPU ----------------------------------------------------------------


@pytest.mark.long
def test_the_whole_script_runs_on_the_cpu_target_and_writes_its_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--cpu-check", "--no-search"]
    command += ["--case", "gpt-124m", "--variant", "ours, 50%", "--rounds", "2"]
    command += ["--hardware", "rtx4090"]  # whose figures need no measuring
    command += ["--seconds", "1200"]  # so long only guards against what hangs
    done = warm.run([*command, "--output", str(tmp_path)], timeout=1_500, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    written = json.loads((tmp_path / "gpu.json").read_text())
    plain, ours = written["cases"]["gpt-124m"]
    assert not plain["note"] and not ours["note"]
    assert len(plain["rounds"]) == len(ours["rounds"]) == len(ours["beside_plain"]) == 2
    # aot_eager: the same step, whatever moves
    assert ours["losses"] == plain["losses"][: len(ours["losses"])]
    assert ours["facts"]["counters"]["bytes_out"] > 0
    assert ours["facts"]["planned_peak_bytes"] <= ours["facts"]["budget_bytes"]
    assert written["machine"]["torch"] == torch.__version__
    table = (tmp_path / "gpu.md").read_text()
    assert "| ours, 50% |" in table and "figures mean nothing" in table


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("module", ["benchmarks.gpu", "benchmarks.gpu_run"])
def test_without_a_gpu_it_says_what_it_would_run_and_succeeds(module: str) -> None:
    done = warm.run([sys.executable, "-m", module], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "would" in done.stdout and "No " in done.stdout.splitlines()[0]


# --- parts --------------------------------------------------------------------------------------


def test_a_variant_that_fails_is_a_row_that_says_why() -> None:
    run = measurement()
    task = {"kind": "plain", "device": "cpu"}  # which is not all that there must be
    child = gpu.Child(gpu.Variant("broken", "plain"), task, run.env)
    run.ready([child])
    assert "KeyError" in child.note and child.process.returncode is not None


def test_a_variant_that_does_not_answer_in_time_is_ended() -> None:
    run = measurement()
    run.deadline = time.monotonic()
    child = run.start(gpu.PLAIN, None)
    run.ready([child])
    assert child.note == "not reached in the time given"
    assert child.process.returncode is not None


def test_blocks_hold_what_fits_the_card_and_the_host_together() -> None:
    run = measurement()
    facts = {"peak_bytes": 20 * GIB, "free_bytes": 70 * GIB}
    blocks = list(run.blocks(gpu.VARIANTS, facts))
    assert sorted(v.name for block in blocks for v in block) == sorted(v.name for v in gpu.VARIANTS)
    for block in blocks:
        device = sum(v.device_share * 20 * GIB + gpu.CONTEXT_BYTES for v in block)
        host = sum(v.host_share * 20 * GIB for v in block)
        assert len(block) == 1 or (
            device <= gpu.DEVICE_SHARE * 70 * GIB and host <= gpu.HOST_SHARE * 64 * GIB
        )
    assert len(blocks) < len(gpu.VARIANTS)


def test_only_the_variants_that_were_asked_for_are_run() -> None:
    assert [v.name for v in measurement(variant=["ours, 50%"]).chosen()] == ["ours, 50%"]


@pytest.mark.parametrize("case", gpu.CASES)
def test_each_case_has_models_and_variants(case: str) -> None:
    run = gpu.Measurement(case, asked(), dict(os.environ), 0.0)
    assert {case} <= set(gpu_cases.CASES) & set(gpu_cases.TINY_CASES)
    assert run.chosen() == list(gpu.OF_CASE.get(case, gpu.VARIANTS))


class Counted:
    """Fits up to a batch."""

    def __init__(self, most: int) -> None:
        self.most, self.tried = most, list[int]()

    def fits(self, batch: int) -> bool:
        self.tried.append(batch)
        return batch <= self.most


@pytest.mark.parametrize("most", [0, 1, 7, 8, 57, 64, 900])
def test_the_search_comes_within_a_sixteenth_from_below(most: int) -> None:
    told: list[dict[str, Any]] = []
    found = gpu_child.largest(Counted(most), 8, 1 << 14, 60, told.append)  # type: ignore[arg-type]
    assert found["ended"]
    assert found["largest"] <= most <= found["largest"] + max(1, found["largest"] // 16)
    assert not told or told[-1]["so_far"] == found["largest"]


def test_a_search_that_is_cut_off_says_so() -> None:
    known = Counted(1 << 20)
    found = gpu_child.largest(known, 8, 32, 60, lambda line: None)  # type: ignore[arg-type]
    assert (found["largest"], found["ended"], known.tried) == (32, False, [8, 16, 32])
    found = gpu_child.largest(known, 8, 32, 0, lambda line: None)  # type: ignore[arg-type]
    assert (found["largest"], found["ended"]) == (0, False)


def test_torchs_own_offload_is_asked_for_large_intermediates_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    large = graph.call_function(torch.relu, (x,))
    small = graph.call_function(torch.sum, (large,))
    graph.output(small)
    x.meta["val"] = large.meta["val"] = torch.empty(1 << 20, device="meta")
    small.meta["val"] = torch.empty((), device="meta")
    gpu_child.mark_for_offload(graph)
    assert [n.name for n in graph.nodes if n.meta.get("should_offload")] == ["relu"]


def test_the_table_shows_what_was_measured_and_what_was_not() -> None:
    facts = {"peak_bytes": 200 << 20, "at_floor": False, "reserved_bytes": 260 << 20}
    plain = {
        "name": "plain",
        "kind": "plain",
        "note": "",
        "rounds": [100.0, 104.0, 102.0],
        "beside_plain": [],
        "losses": [2.0, 1.0, 1.0, 1.0],
        "facts": facts,
        "compile_seconds": 12.0,
    }
    counters = {"bytes_out": 96 << 20, "wait_us": 3000.0}
    more = {
        "peak_bytes": 90 << 20,
        "at_floor": True,
        "budget_bytes": 100 << 20,
        "planned_peak_bytes": 95 << 20,
        "planned_us": 102e3,
        "ops_again": 4,
        "counters": counters,
        "counted_steps": 2,
    }
    ours = {
        "name": "ours, 50%",
        "kind": "ours",
        "facts": facts | more,
        "losses": [2.0, 1.1, 1.0, 1.0],
        "rounds": [204.0],
        "beside_plain": [2.0],
        "note": "",
        "compile_seconds": 30.0,
    }
    late = {"name": "save_on_cpu, pinned", "kind": "x", "note": "not reached in the time given"}
    machine = {"gpu": "G", "driver": "1", "cuda": "13", "cores": 4, "torch": "t", "triton": "r"}
    found = {
        "cases": {"resnet": [plain, ours, late]},
        "largest": [
            {"kind": "plain", "largest": 50, "ended": True, "cap_bytes": 4 * GIB},
            {"kind": "ours", "largest": 600, "cap_bytes": 4 * GIB, "note": "not reached"},
        ],
        "machine": machine | {"python": "3"},
        "seconds": 1.0,
        "cpu_check": False,
        "quick": False,
    }
    text = text_of(found)
    assert "| plain | 102.0 | 1.000 | 200 | 100% | 260 |" in text
    assert (
        "| ours, 50% | 204.0 | 2.000 | 90 | 45% | 260 | 100 (floor) | 95 | 48; 4 | 1.5 "
        "| 102.0 (0.50 ×) | 30 |" in text
    )
    assert "| save_on_cpu, pinned | not reached in the time given |" in text
    assert "ours, 50% 1.0e-01" in text
    assert "600, 12.0 × plain at least; the search was ended by its limits (not reached)" in text
    assert "figures mean nothing" not in text


def test_what_is_not_installed_is_said_with_what_it_is_needed_for() -> None:
    (said,) = bare.missing({"torch": "anything", "no_such_package": "planning"})
    assert said == "no_such_package is not installed; needed for planning"


def test_a_bare_checkout_offers_the_entry_point_to_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bare, "entry_points", lambda group: [])
    code = (
        "from importlib.metadata import entry_points, version as v;"
        "print([e.value for e in entry_points(group='torch_dynamo_backends')], v('offcompile'))"
    )
    with bare.environment() as env:
        # -S: no site-packages, so that only the folder that was written can tell
        done = subprocess.run(
            [sys.executable, "-S", "-c", code], env=env, cwd="/", capture_output=True, text=True
        )
    assert "offcompile.backend:compile_graph" in done.stdout, done.stderr


def test_a_part_whose_time_is_up_is_ended() -> None:
    sleeps, fails = "import time; time.sleep(600)", "raise SystemExit(3)"
    assert gpu_run.call([sys.executable, "-c", sleeps], dict(os.environ), 0.3) is None
    assert gpu_run.call([sys.executable, "-c", fails], dict(os.environ), 60) == 3


def test_models_that_are_placed_on_a_device_are_the_zoos() -> None:
    for name in ("gpt", "tied", "conv"):
        mine, theirs = on(BY_NAME[name], "cpu"), BY_NAME[name]
        expected = theirs.loss(theirs.fresh()(*theirs.inputs(0)))
        assert torch.equal(mine.loss(mine.fresh()(*mine.inputs(0))), expected)
