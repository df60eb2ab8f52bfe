"""`offcompile doctor`: measures, keeps, writes, tells, refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_fakes import CPU, LIMITS, SPILL, TINY, FakeCalls, machine, of_gpu
from hypothesis import given
from hypothesis import strategies as st

import offcompile.cli.doctor.doctor as module
import offcompile.machine.this_machine as this_machine_module
from offcompile.cli import command as cli
from offcompile.cli.doctor.figures import Examination, Gpu
from offcompile.cli.doctor.tables import show_examination
from offcompile.ir import OffloadError
from offcompile.machine import tolls
from offcompile.machine.hardware import HardwareProfile, list_profiles, load_measured, load_profile
from offcompile.machine.hardware_toml import profile_to_toml
from offcompile.machine.options import Options
from offcompile.machine.this_machine import this_machine
from offcompile.runtime.base.limits import read_limits
from offcompile.runtime.disk.speed import DiskSpeed
from offcompile.runtime.measure.host import (
    AttentionShape,
    FileSpeed,
    adam_parameters_per_us,
    attention_flop_per_us,
    copy_bytes_per_us,
    measure_files,
    passes_page_cache,
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main(["doctor", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


class Instruments:
    """In place of the real ones; the figures go up with `factor`."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.factor = 1.0
        self.cards: list[FakeCalls] = []

    def note(self, name: str, *figures: float) -> Any:
        self.used.append(name)
        return tuple(self.factor * figure for figure in figures)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Instruments:
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    made = Instruments()
    base = this_machine_module
    monkeypatch.setattr(base, "memory_bytes_per_us", lambda: made.note("memory", 20e3)[0])
    monkeypatch.setattr(base, "matmul_flop_per_us", lambda dtype: made.note("matmul", 5e5)[0])
    monkeypatch.setattr(
        base, "measure_disk", lambda place, s: DiskSpeed(*made.note("disk", 2e3, 1e3, 80.0))
    )
    monkeypatch.setattr(tolls, "copy_toll_share", lambda: made.note("toll", 0.5)[0])
    monkeypatch.setattr(tolls, "disk_toll_share", lambda place: made.note("disk toll", 0.1)[0])
    monkeypatch.setattr(module, "attention_flop_per_us", lambda: made.note("attention", 4e5, 3e5))
    monkeypatch.setattr(module, "adam_parameters_per_us", lambda n: made.note("adam", 1e3)[0])
    monkeypatch.setattr(module, "copy_bytes_per_us", lambda: made.note("copy", 9e3)[0])
    monkeypatch.setattr(
        module,
        "measure_files",
        lambda *sizes: FileSpeed(*made.note("files", 1.9e3, 0.9e3, 1e3, 5e2)),
    )
    monkeypatch.setattr(module, "count_cards", lambda: len(made.cards))
    monkeypatch.setattr(module, "CudaCalls", lambda index: made.cards[index])
    monkeypatch.setattr(module, "WHOLE", TINY)
    monkeypatch.setattr(module, "QUICK", TINY)
    return made


def test_it_measures_and_tells_and_planning_uses_it(
    tools: Instruments, run: Run, tmp_path: Path
) -> None:
    code, out, err = run("--spill", tmp_path)
    assert (code, err) == (0, "")
    assert out.startswith("no CUDA")
    assert "the CPU target is measured" in out.splitlines()[0]
    for part in ("28 GB/s", "1 billion parameters a second", "what limits"):
        assert part in out
    profile = this_machine([tmp_path])
    assert profile.host_adam_gbps == pytest.approx(28.0)
    assert (profile.host_copy_gbps, profile.host_memory_gbps) == (9.0, 20.0)
    assert (profile.disk_read_both_gbps, profile.d2h_both_gbps) == (1.0, 0.5)
    assert (profile.disk_read_buffered_gbps, profile.disk_write_buffered_gbps) == (1.9, 0.9)
    assert profile.attention_tflops == pytest.approx({"forward": 0.4, "backward": 0.3})
    assert this_machine([tmp_path]) == profile


def test_what_is_known_is_measured_again_only_when_asked(
    tools: Instruments, run: Run, tmp_path: Path
) -> None:
    run("--spill", tmp_path, "--quick")
    everything = sorted(tools.used)
    run("--spill", tmp_path, "--quick")
    assert sorted(tools.used) == everything
    tools.used.clear()
    run("--spill", tmp_path)
    assert sorted(tools.used) == ["adam", "attention", "copy", "files"]
    tools.used.clear()
    tools.factor = 2.0
    ops = tmp_path / "cache" / "costs-0123.json"
    ops.write_text("{}")
    code, out, _ = run("--spill", tmp_path, "--refresh", "--json")
    assert sorted(tools.used) == everything and not ops.exists()
    assert json.loads(out)["cpu"]["h2d_gbps"] == 4.0
    assert code == 0


def test_json_has_everything(tools: Instruments, run: Run, tmp_path: Path) -> None:
    tools.cards = [FakeCalls(0), FakeCalls(1, pin_code=2)]
    code, out, err = run("--spill", tmp_path, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out, parse_constant=pytest.fail)
    assert found["no_gpu"] is None
    assert [gpu["profile"]["name"] for gpu in found["gpus"]] == ["cuda-0", "cuda-1"]
    assert found["gpus"][0]["link"] == {
        "generation": 4,
        "width": 16,
        "most_generation": 4,
        "most_width": 16,
    }
    assert "register host memory" in str(found["gpus"][1]["failed"])
    assert found["spills"][0]["directory"] == str(tmp_path)
    assert found["limits"]["cores"] >= 1
    assert found["findings"][0]["where"] == "cuda:1"
    effects = [finding["effect"] for finding in found["findings"]]
    assert effects == sorted(effects, reverse=True)


def test_profiles_are_written_for_every_device(
    tools: Instruments, run: Run, tmp_path: Path
) -> None:
    tools.cards = [FakeCalls(0), FakeCalls(1)]
    target = tmp_path / "here.toml"
    code, out, _ = run("--spill", tmp_path, "--output", target)
    assert code == 0
    assert f"written: {target}" in out
    written = {path.name: load_measured(path) for path in tmp_path.glob("*.toml")}
    assert {name: p.name for name, p in written.items()} == {
        "here.toml": "cuda-0",
        "here.cuda1.toml": "cuda-1",
        "here.cpu.toml": "this-machine",
    }
    assert written["here.cpu.toml"] == this_machine([tmp_path])
    assert written["here.toml"].disk_write_gbps == 1.0
    assert Options.read({"hardware": str(target)}, {}).hardware == str(target)


def test_a_card_that_fails_is_reported_and_the_rest_measured(
    tools: Instruments, run: Run, tmp_path: Path
) -> None:
    tools.cards = [FakeCalls(0, broken="h2d"), FakeCalls(1)]
    target = tmp_path / "here.toml"
    code, out, _ = run("--spill", tmp_path, "--output", target)
    assert code == 0
    assert "could not be measured: CUDA error: no h2d." in " ".join(out.split())
    assert load_measured(target).name == "cuda-1"


def test_a_figure_that_fails_is_listed(
    tools: Instruments, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*sizes: object) -> FileSpeed:
        raise OffloadError("the disk is full: free 3 GiB")

    monkeypatch.setattr(module, "measure_files", full)
    code, out, _ = run("--spill", tmp_path)
    assert code == 0
    assert "not measured" in out
    assert "the disk is full: free 3 GiB" in out
    assert this_machine([tmp_path]).disk_read_both_gbps is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--spill", "/no/such/place"), "/no/such/place does not exist"),
        (("--spill", "/proc/self/status"), "is not a directory"),
        (("--output", "profile.json"), "profile.json: a profile is a .toml file"),
        (("--output", "/no/such/x.toml"), "cannot be written there"),
        (("--output", "/proc/x.toml"), "cannot be written there: No such file"),
        (("--wrong",), "unrecognized arguments"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    tools: Instruments, run: Run, arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = run(*arguments, "--json")
    assert code == 2
    assert words in err
    assert "violations" in json.loads(out)["error"]
    assert not tools.used


def test_every_wrong_directory_is_named(tools: Instruments, run: Run) -> None:
    code, _, err = run("--spill", "/no/a", "--spill", "/no/b")
    assert code == 2
    assert "/no/a" in err and "/no/b" in err


def test_without_a_name_it_spills_where_training_does(
    tools: Instruments, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFCOMPILE_SPILL", str(tmp_path))
    _, out, _ = run("--json")
    assert [spill["directory"] for spill in json.loads(out)["spills"]] == [str(tmp_path)]


@pytest.mark.parametrize(
    "found",
    [
        machine(no_gpu="no CUDA: none"),
        machine(gpus=(of_gpu(launch_us=4.0, direct_gbps={"read": 3.0}, pin_us_per_gib=1e5),)),
        machine(gpus=(Gpu(0, "A [red]card", None, failed={"all": "lost\x1b[2J"}),)),
        machine(limits=replace(LIMITS, memlock_bytes=1, data_bytes=1, address_bytes=1)),
        machine(cpu=replace(CPU, matmul_tflops={}), spills=(replace(SPILL, filesystem=None),)),
    ],
)
def test_any_machine_can_be_shown(found: Examination, capsys: pytest.CaptureFixture[str]) -> None:
    show_examination(found, [Path("x.toml")])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "Planning uses these figures" in out
    assert json.dumps(module.to_json(found), allow_nan=False)


# --- the profile as a file -----------------------------------------------------------------

RATES = st.floats(1e-6, 1e6)
MAYBE = st.none() | RATES
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(name=TEXT, h2d=RATES, both=MAYBE, direct=MAYBE, host=st.none() | st.integers(1, 2**50))
def test_a_written_profile_reads_back(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    h2d: float,
    both: float | None,
    direct: float | None,
    host: int | None,
) -> None:
    profile = HardwareProfile(
        *(name, name, 2**40, h2d, h2d, 1.0, name),
        host_memory_bytes=host,
        measured=True,
        h2d_both_gbps=both,
        disk_read_gbps=both,
        launch_us=both,
        direct_gbps={} if direct is None else {"read": direct, "write_strided": 2.0},
        attention_tflops={"backward": h2d},
    )
    path = tmp_path_factory.mktemp("toml") / "p.toml"
    path.write_text(profile_to_toml(profile), "utf-8")
    assert load_measured(path) == profile


@pytest.mark.parametrize("name", list_profiles())
def test_a_shipped_profile_reads_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(profile_to_toml(load_profile(name)))
    assert load_measured(path) == load_profile(name)


def test_bytes_that_are_no_text_are_spelt_out() -> None:
    text = profile_to_toml(replace(CPU, source="/data/\udcff\x7f"))
    assert "\\\\udcff\\u007f" in text
    assert text.encode()


# --- the instruments -----------------------------------------------------------------------


def test_the_real_instruments_measure_something(tmp_path: Path) -> None:
    assert min(attention_flop_per_us(AttentionShape(1, 1, 32, 16))) > 0
    assert adam_parameters_per_us(1 << 12) > 0
    assert copy_bytes_per_us(1 << 16) > 0
    found = measure_files(tmp_path, 0.01, 1 << 20)
    assert min(found) > 0
    assert passes_page_cache(tmp_path) in (True, False)
    assert not list(tmp_path.iterdir())


def test_measuring_leaves_gradients_and_random_numbers_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(2)
    torch.manual_seed(5)
    with torch.no_grad():
        attention_flop_per_us(AttentionShape(1, 1, 8, 8))
        adam_parameters_per_us(64)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(2), wanted)


def test_a_disk_that_fails_beside_another_thread_ends_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offcompile.runtime.measure import host as measure_host

    def refuse(self: object, *arguments: object) -> None:
        raise OffloadError("the disk cannot be read")

    monkeypatch.setattr(measure_host.SpillStore, "read", refuse)
    with pytest.raises(OffloadError, match="cannot be read"):
        measure_files(tmp_path, 0.01, 1 << 16)


def test_limits_are_read(tmp_path: Path) -> None:
    limits = read_limits()
    assert limits.cores >= 1 and limits.threads >= 1
    assert 0 < limits.memory_bytes <= limits.physical_bytes
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   7 kB\n")
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text("always madvise [never]\n")
    made_up = read_limits(tmp_path)
    assert (made_up.available_bytes, made_up.huge_pages) == (7 * 1024, "never")
    empty = read_limits(tmp_path / "nowhere")
    assert (empty.available_bytes, empty.huge_pages) == (None, None)
