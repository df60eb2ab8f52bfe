"""Recording what compiled graphs run, whatever moves, to a file that can be read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import warm
from torch import Tensor, nn

import offcompile
from offcompile.ir import InvalidInput
from offcompile.ir.trace import Run, Trace
from offcompile.ir.traceio import loads_trace, parse_trace

WIDTH, BATCH = 16, 32
#: bytes of one linear layer
WEIGHTS, ACTIVATION = (WIDTH * WIDTH * 4, WIDTH * 4), BATCH * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def blocks(count: int) -> nn.Sequential:
    model = nn.Sequential(*(Block() for _ in range(count)))
    for block in model:
        block.compile(backend="offcompile", options={"lowering": "aot_eager"})
    return model


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(BATCH, WIDTH)).sum().backward()


def graphs(trace: Trace) -> list[str]:
    """Which half of a graph each run was, and with which binding."""
    return [f"{run.graph.rsplit('.', 1)[1]} {run.binding}" for run in trace.runs]


def sizes(trace: Trace, names: tuple[str, ...]) -> list[int]:
    return sorted(trace.nbytes[name] for name in names)


def test_a_step_of_blocks_is_recorded_as_it_ran(tmp_path: Path) -> None:
    model, path = blocks(2), tmp_path / "trace.json"
    train(model, 1)  # what compiling makes of the first is not of interest
    with offcompile.record(path):
        train(model, 2)
    trace = loads_trace(path.read_text())
    assert len(trace.runs) == 8 and all(run.duration_us > 0 for run in trace.runs)
    forward, other, last, first = trace.runs[:4]
    assert [forward.binding, other.binding] == [first.binding, last.binding]
    assert forward.binding != other.binding
    assert sizes(trace, forward.reads) == sorted(WEIGHTS)
    assert ACTIVATION in sizes(trace, forward.writes)
    # backward reads the tensors that forward saves, and nobody after it does
    assert set(forward.writes) <= set(first.reads) and set(first.dead) == set(forward.writes)
    assert sizes(trace, first.writes) == sorted(WEIGHTS)
    assert not set(forward.reads) & set(other.reads)
    assert [r.execution for r in trace.runs[:4]] == [r.execution for r in trace.runs[4:]]


def written(run: Run) -> set[str]:
    return set(run.writes)


def test_forwards_that_wait_together_do_not_share_blocks_and_dropped_ones_die(
    tmp_path: Path,
) -> None:
    model, path = blocks(1), tmp_path / "trace.txt"
    train(model, 1)
    x = torch.ones(BATCH, WIDTH)
    with offcompile.record(path):
        first, second = model(x), model(x)
        second.sum().backward()
        first.sum().backward()
        dropped = model(x)
        del dropped
        with torch.no_grad():
            model(x)
    trace = parse_trace(path.read_text())
    one, two, back_two, back_one, gone, alone = trace.runs
    assert not written(one) & written(two)
    assert set(back_two.dead) == written(two) and set(back_one.dead) == written(one)
    assert set(gone.dead) == written(gone)
    assert alone.graph.endswith("inference") and not alone.writes
    assert set(alone.reads) == set(one.reads)  # the same weights in another graph


def test_the_file_is_written_after_an_exception_and_is_cut_off(tmp_path: Path) -> None:
    model, path = blocks(1), tmp_path / "trace.json"
    train(model, 1)
    with pytest.raises(ZeroDivisionError), offcompile.record(path, most_runs=3):
        train(model, 4)
        1 / 0  # noqa: B018
    assert len(loads_trace(path.read_text()).runs) == 3


def test_what_cannot_be_recorded_is_refused_at_once(tmp_path: Path) -> None:
    for path in (tmp_path / "trace.csv", tmp_path / "missing" / "trace.json"):
        with pytest.raises(InvalidInput, match="trace"), offcompile.record(path):
            raise AssertionError("it began")
    with (
        offcompile.record(tmp_path / "a.json"),
        pytest.raises(InvalidInput, match="already"),
        offcompile.record(tmp_path / "b.json"),
    ):
        raise AssertionError("it began")
    assert (tmp_path / "a.json").exists() and not (tmp_path / "b.json").exists()


SCRIPT = f"""
import sys, torch
import beside
model = torch.compile(
    torch.nn.Linear({WIDTH}, {WIDTH}), backend="offcompile", options={{"lowering": "aot_eager"}}
)
for _ in range(beside.STEPS):
    model(torch.ones({BATCH}, {WIDTH})).sum().backward()
sys.exit(int(sys.argv[1]))
"""


def test_the_command_runs_a_script_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("STEPS = 2")
    output = tmp_path / "trace.txt"
    command = ["-m", "offcompile", "record", "--output", str(output), str(tmp_path / "train.py")]
    done = warm.run([sys.executable, *command, "7"])
    assert done.returncode == 7, done.stderr
    assert len(parse_trace(output.read_text()).runs) == 4


def test_the_command_names_a_script_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from offcompile.cli.command import main

    assert main(["record", "--output", str(tmp_path / "t.json"), "nothing.py"]) == 2
    assert "nothing.py" in capsys.readouterr().err


def test_a_trace_can_be_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from offcompile.cli.command import main

    runs = [f"run block 100.0 on {i} reads w{i}" for i in (0, 1, 2, 0, 1, 2)]
    lines = [*(f"block w{i} 1000000" for i in range(3)), *runs]
    path = tmp_path / "trace.txt"
    path.write_text("\n".join(lines) + "\n")
    asked = ["--trace", str(path), "--hardware", "h100-sxm", "--memory", "2MB"]
    policy = ["--policy", "correlation_prefetch"]
    assert main(["plan", *asked, *policy]) == 0
    assert "correlation_prefetch" in capsys.readouterr().out
    assert main(["plan", "--trace", str(path), "--problem", str(path), *asked[2:]]) == 2
