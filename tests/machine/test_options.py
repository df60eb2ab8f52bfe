"""Options: every form is read, every fault is refused by name, and code wins over variables."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest

from offcompile.ir import InvalidInput, OffloadError
from offcompile.machine.options import Options
from offcompile.passes.registry import make

GIB = 1 << 30


def refusal(given: object = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(InvalidInput) as caught:
        Options.read(given, environ or {})  # type: ignore[arg-type]
    return str(caught.value)


def test_defaults_are_those_of_the_contract() -> None:
    assert Options.read(None, {}) == Options.read({}, {}) == Options()
    assert Options() == Options(
        memory=None,
        host_memory=None,
        spill=(Path(tempfile.gettempdir()),),
        lossy=None,
        lowering="inductor",
        policy="joint",
        hardware=None,
        dump=None,
        seconds=None,
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, None),
        (GIB, GIB),
        (np.int64(GIB), GIB),
        ("8GiB", 8 * GIB),
        ("1.5 GB", 1_500_000_000),
        ("1048576", 1 << 20),
        (0.5, 0.5),
        (np.float32(0.25), 0.25),
        (1.0, 1.0),
        ("0.5", 0.5),
        (" .5 ", 0.5),
        ("50%", 0.5),
        (" 62.5 % ", 0.625),
        ("100%", 1.0),
        ("minimum", "minimum"),
        ("Minimum", "minimum"),
    ],
)
def test_memory_in_every_form(given: object, meant: object) -> None:
    options = Options.read({"memory": given}, {})
    assert options.memory == meant
    assert type(options.memory) is type(meant)
    assert options.minimum == (meant == "minimum")


NO_NUMBERS = (True, False, 0, -1, 0.0, -0.5, 1.5, math.nan, math.inf, b"8GiB", [GIB])
NO_TEXTS = (
    "",
    "0",
    "-5",
    "-0.5",
    "0.0",
    "1.5",
    "8 GiBs",
    "nan",
    "half",
    "0.5B",
    "0%",
    "150%",
    "-5%",
    "%",
)


@pytest.mark.parametrize("given", [*NO_NUMBERS, *NO_TEXTS])
def test_memory_refused(given: object) -> None:
    said = refusal({"memory": given})
    assert "option memory" in said
    assert "'8GiB'" in said  # what would be allowed


@pytest.mark.parametrize("given", [True, 0, -1, 0.5, 1.0, math.nan, "much", "minimum", "", []])
def test_host_memory_refused(given: object) -> None:
    assert "option host_memory" in refusal({"host_memory": given})


def test_host_memory_and_seconds_read() -> None:
    options = Options.read({"host_memory": "64GiB", "seconds": 3}, {})
    assert (options.host_memory, options.seconds) == (64 * GIB, 3.0)
    assert Options.read({"host_memory": None, "seconds": None}, {}) == Options()


def test_memory_bytes_on_a_device() -> None:
    def budget(memory: object) -> int | None:
        return Options.read({"memory": memory}, {}).memory_bytes(8 * GIB)

    assert budget(None) == budget(1.0) == budget("8GiB") == 8 * GIB
    assert budget(0.25) == 2 * GIB
    assert budget(1e-12) == 1
    assert budget("minimum") is None
    with pytest.raises(InvalidInput, match=r"9\.00 GiB.* has .*8\.00 GiB.*or less"):
        budget("9GiB")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("/a", ["/a"]),
        (Path("/a"), ["/a"]),
        (["/a", Path("/b")], ["/a", "/b"]),
        (("/a",), ["/a"]),
        ("here", [os.path.join(os.getcwd(), "here")]),
        ("~/x", [os.path.expanduser("~/x")]),
        (None, [tempfile.gettempdir()]),
    ],
)
def test_spill_in_every_form(given: object, meant: list[str]) -> None:
    assert Options.read({"spill": given}, {}).spill == tuple(Path(p) for p in meant)


@pytest.mark.parametrize("given", [[], (), "", [""], 3, True, {"/a"}, [None], ["/a", 3], "a\0b"])
def test_spill_refused(given: object) -> None:
    assert "option spill" in refusal({"spill": given})


def test_a_directory_named_twice_is_refused() -> None:
    assert "'/a' is named twice" in refusal({"spill": ["/a", "/b", "/a"]})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lossy": "fp8"}, "'fp16' or 'bf16' or None"),
        ({"lossy": "FP16"}, "did you mean 'fp16'"),
        ({"lossy": True}, "True is not allowed"),
        ({"lowering": "eager"}, "did you mean 'aot_eager'"),
        ({"lowering": None}, "'inductor' or 'aot_eager'"),
        ({"policy": "jiont"}, "did you mean 'joint'"),
        ({"policy": "joint:secnds=3"}, "did you mean 'seconds'"),
        ({"policy": "joint:seconds=soon"}, "'soon'"),
        ({"policy": 3}, "'NAME:key=value,…'"),
        ({"hardware": "rtx490"}, "nearest is 'rtx4090'"),
        ({"hardware": "/nowhere/card.toml"}, "cannot be read"),
        ({"hardware": 5}, "name of a profile"),
        ({"seconds": 0}, "seconds above 0"),
        ({"seconds": -1}, "seconds above 0"),
        ({"seconds": True}, "seconds above 0"),
        ({"seconds": math.inf}, "seconds above 0"),
        ({"seconds": "3"}, "seconds above 0"),
        ({"dump": ""}, "a directory or None"),
        ({"dump": 3}, "a directory or None"),
        ({"memroy": 1}, "did you mean 'memory'"),
        ({"max_autotune": True}, "no option 'max_autotune' (there are memory,"),
        ({3: 1}, "no option 3"),
        (["memory"], "no mapping"),
    ],
)
def test_refusals_name_the_value_and_what_is_allowed(given: object, says: str) -> None:
    assert says in refusal(given)


def test_other_options_read(tmp_path: Path) -> None:
    options = Options.read(
        {
            "lossy": "bf16",
            "lowering": "aot_eager",
            "policy": "joint:seconds=3",
            "hardware": "rtx4090",
            "dump": tmp_path,
        },
        {},
    )
    assert options.lossy == "bf16"
    assert options.lowering == "aot_eager"
    assert options.policy == "joint:seconds=3"
    assert options.hardware == "rtx4090"
    assert options.dump == tmp_path


def test_a_profile_file_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text('base = "rtx4090"\nname = "mine"\n')
    monkeypatch.chdir(tmp_path)
    assert Options.read({"hardware": "mine.toml"}, {}).hardware == str(tmp_path / "mine.toml")
    assert Options.read({"hardware": Path("mine.toml")}, {}).hardware == str(tmp_path / "mine.toml")


# --- the environment -----------------------------------------------------------------------


def test_every_option_has_its_variable() -> None:
    environ = {
        "OFFCOMPILE_MEMORY": "0.5",
        "OFFCOMPILE_HOST_MEMORY": "64GiB",
        "OFFCOMPILE_SPILL": os.pathsep.join(("/a", "/b")),
        "OFFCOMPILE_LOSSY": "fp16",
        "OFFCOMPILE_LOWERING": "aot_eager",
        "OFFCOMPILE_POLICY": "recompute",
        "OFFCOMPILE_HARDWARE": "h200",
        "OFFCOMPILE_DUMP": "/dumps",
        "OFFCOMPILE_SECONDS": "2.5",
        "OFFCOMPILE_GRADIENT_RESERVE": "none",
        "OFFCOMPILE_VERIFY_SPILL": "1",
        "OFFCOMPILE_VERIFY": "true",
        "OFFCOMPILE_SPLIT": "8",
        "OFFCOMPILE_REUSE_PLANS": "0",
        "OFFCOMPILE_CUDAGRAPHS": "1",
    }
    assert set(environ) == {f"OFFCOMPILE_{f.name.upper()}" for f in fields(Options)}
    assert Options.read(None, environ) == Options(
        0.5,
        64 * GIB,
        (Path("/a"), Path("/b")),
        "fp16",
        "aot_eager",
        "recompute",
        "h200",
        Path("/dumps"),
        2.5,
        None,
        True,
        True,
        8,
        False,
        True,
    )


@pytest.mark.parametrize("given", [0, 0.4, 1])
def test_a_reserve_for_gradients_is_a_policy(given: float) -> None:
    read = Options.read({"gradient_reserve": given, "policy": "joint"}, {})
    assert read.whole_policy == f"gradient_reserve:reserve={float(given)}"
    assert make(read.whole_policy).reserve == given
    assert Options.read({}, {}).whole_policy == "joint"


@pytest.mark.parametrize("given", [-0.1, 1.5, "much", math.nan, True])
def test_a_reserve_is_a_share(given: object) -> None:
    with pytest.raises(InvalidInput, match=r"gradient_reserve: .* from 0 to 1"):
        Options.read({"gradient_reserve": given}, {})


def test_a_reserve_and_another_policy_contradict_each_other() -> None:
    with pytest.raises(InvalidInput, match=r"gradient_reserve=0.4 .*'recompute'; leave out"):
        Options.read({"policy": "recompute"}, {"OFFCOMPILE_GRADIENT_RESERVE": "0.4"})


@pytest.mark.parametrize(("text", "meant"), [("1", True), ("True", True), ("0", False)])
def test_a_switch_from_the_shell(text: str, meant: bool) -> None:
    assert Options.read({}, {"OFFCOMPILE_VERIFY_SPILL": text}).verify_spill is meant
    assert Options.read({}, {"OFFCOMPILE_CUDAGRAPHS": text}).cudagraphs is meant


@pytest.mark.parametrize("given", [1, "yes", None, "1"])
def test_a_switch_is_true_or_false(given: object) -> None:
    with pytest.raises(InvalidInput, match=r"verify_spill: .* neither True nor False"):
        Options.read({"verify_spill": given}, {})
    with pytest.raises(InvalidInput, match=r"cudagraphs: .* neither True nor False"):
        Options.read({"cudagraphs": given}, {})


@pytest.mark.parametrize(
    ("text", "meant"), [("1", True), ("false", False), ("none", None), ("2", 2), ("12", 12)]
)
def test_splitting_from_the_shell(text: str, meant: object) -> None:
    assert Options.read({}, {"OFFCOMPILE_SPLIT": text}).split is meant or meant in (2, 12)
    assert Options.read({}, {"OFFCOMPILE_SPLIT": text}).split == meant


@pytest.mark.parametrize("given", [1, 0, -4, 2.5, "8", "loss"])
def test_splitting_is_a_switch_or_a_number_of_pieces(given: object) -> None:
    with pytest.raises(InvalidInput, match=r"split: .* a number of pieces from 2 on"):
        Options.read({"split": given}, {})


@pytest.mark.parametrize(
    ("given", "may", "pieces"),
    [
        ({}, True, None),
        ({"memory": "minimum"}, False, None),
        ({"memory": "minimum", "split": True}, True, None),
        ({"lowering": "aot_eager"}, False, None),
        ({"lowering": "aot_eager", "split": True}, True, None),
        ({"lowering": "aot_eager", "split": 6}, True, 6),
        ({"split": False}, False, None),
    ],
)
def test_when_a_loss_may_be_split(given: dict[str, object], may: bool, pieces: object) -> None:
    read = Options.read(given, {})
    assert (read.may_split, read.pieces) == (may, pieces)


def test_code_wins_over_variables_also_where_it_says_none() -> None:
    environ = {"OFFCOMPILE_MEMORY": "8GiB", "OFFCOMPILE_SECONDS": "2", "OFFCOMPILE_LOSSY": "fp16"}
    options = Options.read({"memory": None, "seconds": 5}, environ)
    assert (options.memory, options.seconds, options.lossy) == (None, 5.0, "fp16")


def test_code_wins_over_a_variable_that_is_wrong() -> None:
    assert Options.read({"memory": "1GiB"}, {"OFFCOMPILE_MEMORY": "lots"}).memory == GIB


def test_empty_and_none_variables_and_those_of_others() -> None:
    environ = {
        "OFFCOMPILE_MEMORY": "",
        "OFFCOMPILE_LOSSY": "none",
        "OFFCOMPILE_CACHE_DIR": "/cache",
        "TORCH_LOGS": "+offcompile",
    }
    assert Options.read(None, environ) == Options()


def test_all_faults_are_said_at_once_and_where_they_stand() -> None:
    said = refusal(
        {"memroy": 1, "lowering": "fast"},
        {
            "OFFCOMPILE_MEMROY": "1GiB",
            "OFFCOMPILE_SECONDS": "soon",
            "OFFCOMPILE_SPILL": os.pathsep.join(("/a", "")),
        },
    ).splitlines()
    assert len(said) == 5
    assert any("OFFCOMPILE_MEMROY" in x and "did you mean 'OFFCOMPILE_MEMORY'" in x for x in said)
    assert any("OFFCOMPILE_SECONDS" in x and "'soon'" in x for x in said)
    assert any("OFFCOMPILE_SPILL" in x for x in said)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFCOMPILE_MEMORY", "3GiB")
    assert Options.read().memory == 3 * GIB


def test_options_are_values() -> None:
    options = Options.read({"memory": "1GiB", "spill": ["/a", "/b"]}, {})
    assert hash(options) == hash(Options.read({"memory": GIB, "spill": ("/a", "/b")}, {}))
    with pytest.raises(FrozenInstanceError):
        options.memory = 1  # type: ignore[misc]
    assert issubclass(InvalidInput, OffloadError)


def test_importing_options_and_reports_imports_no_torch() -> None:
    script = (
        "import sys, offcompile.machine.options, offcompile.report.report\n"
        "import offcompile.report.dump, offcompile.report.log\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
