"""The documents hold: code and commands run, links lead somewhere, examples run."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import warm
from doc_blocks import DOCUMENTS, FOREIGN, ROOT, Block, all_blocks, anchors, commands, links
from torch import nn

import offcompile
from offcompile.cli.command import main
from offcompile.machine.options import OTHER_VARIABLES, Options, _variable
from offcompile.report import report as reporting
from offcompile.report.report import PlanReport

EXAMPLES = ROOT / "examples"
#: sizes and places in the documents that are too large, or not there, in a test
SMALLER = {
    '"8GiB"': '"1MiB"',
    '"20GiB"': '"2MiB"',
    '"2GiB"': '"1MiB"',
    '"600MiB"': '"1MiB"',
    "seconds=5": "seconds=0.2",
}
#: and in the notebook: half of its layers, and half of the budget in which activations leave
FEWER = {"256, 4, 512": "256, 2, 512", '"28MiB"': '"14MiB"'}
PLACES = ("/data/tmp", "/var/tmp")


# --- Python -----------------------------------------------------------------------------------


class Model(nn.Module):
    """Takes anything with numbers in it; its blocks may be compiled by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(x.shape[0], -1)[:, :8]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def train(steps: int) -> None:
    model = Model()
    for _ in range(steps):
        model(torch.ones(4, 8)).backward()


def for_correlation(names: dict[str, Any]) -> None:
    """The block lists calls and is no sequence of them: names and arguments are held."""
    from offcompile.passes.correlation.predictor import Predictor

    predictor = create_autospec(Predictor, instance=True, counters={}, table_bytes=0)
    names |= {"Predictor": lambda: predictor}
    names |= {"block": "w0", "nbytes": 4096, "free_bytes": 1, "missing": 1, "wanted": 1}


def for_codecs(names: dict[str, Any]) -> None:
    x = torch.relu(torch.randn(4096))
    names |= {"x": x, "out": torch.empty_like(x)}


def for_host_init(names: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained("weights")
    names |= {"AutoModelForCausalLM": AutoModelForCausalLM, "folder": "weights"}


def for_trainer(names: dict[str, Any]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    small = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    asked = {"max_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    text = torch.arange(8)
    names |= {"model": GPT2LMHeadModel(small), "args": TrainingArguments("trained", **asked)}
    names |= {"data": [{"input_ids": text, "labels": text}] * 8, "Trainer": Trainer}
    names |= {"callbacks": []}


def for_lightning(names: dict[str, Any]) -> None:
    pytest.importorskip("lightning")


def for_accelerate(names: dict[str, Any]) -> None:
    from accelerate import Accelerator

    model = Model()
    names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    names |= {"accelerator": Accelerator(cpu=True)}
    names |= {"loader": torch.utils.data.DataLoader([torch.ones(8)] * 4, batch_size=2)}


class Own(nn.Linear):
    """A module of the reader's: under FSDP2 Dynamo compiles none of torch's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def for_fsdp2(names: dict[str, Any]) -> None:
    """One rank; the block's test takes the group away."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    model = Model()
    model.blocks = nn.ModuleList(Own(8, 8) for _ in range(2))
    names |= {"model": model}


def for_ddp(names: dict[str, Any]) -> None:
    """One rank; the block's test takes the group away."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )


#: a part of the block → what else it needs
NEEDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "predictor = Predictor()": for_correlation,
    "how.pack(x, room)": for_codecs,
    "from_pretrained(folder)": for_host_init,
    "import OffcompileCallback": for_trainer,
    "optimizer_cls_and_kwargs": for_trainer,
    "import LightningOffcompileCallback": for_lightning,
    "accelerator.prepare": for_accelerate,
    "fully_shard(model)": for_fsdp2,
    "sharded=True": for_ddp,
}


@pytest.fixture(scope="module")
def one_report() -> Iterator[PlanReport]:
    """The report of a step in which something moves."""
    options = {"memory": "minimum", "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.1}
    step = torch.compile(Model(), backend="offcompile", options=options)
    known = len(offcompile.reports())
    for _ in range(2):
        step(torch.ones(4, 8)).backward()
    (report,) = offcompile.reports()[known:]
    yield report
    torch._dynamo.reset()


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that has the examples and the weights of a `Model`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "weights").mkdir()


@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_python_runs(
    block: Block, one_report: PlanReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = block.text
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    for place in PLACES:
        text = text.replace(place, str(tmp_path))
    # options that the code does not give: quick to compile and to plan, and nothing is measured
    monkeypatch.setenv("OFFCOMPILE_LOWERING", "aot_eager")
    monkeypatch.setenv("OFFCOMPILE_HARDWARE", "cpu")
    monkeypatch.setenv("OFFCOMPILE_SECONDS", "0.1")
    monkeypatch.setattr(reporting, "_remembered", [one_report])
    # a module of its own, in the room whose neighbours it may import
    name = "offcompile.passes.documented"
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    model = Model()
    torch.save(model.state_dict(), tmp_path / "weights" / "weights.pt")
    names = module.__dict__
    names |= {"torch": torch, "offcompile": offcompile, "model": model, "step": model}
    names |= {"batch": torch.ones(4, 8), "x": torch.ones(4, 8), "data": [torch.ones(4, 8)] * 2}
    names |= {
        "build_model": Model,
        "make_inputs": lambda n: torch.empty(n, 3, 64, 64),
        "train": train,
    }
    for part, prepare in NEEDS.items():
        if part in text:
            (tmp_path / "weights" / "weights.pt").unlink()
            prepare(names)
    try:
        exec(compile(text, str(block), "exec"), names)
    finally:
        torch._dynamo.reset()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("block", all_blocks(FOREIGN), ids=str)
def test_code_that_is_not_run_is_none_of_ours(block: Block) -> None:
    assert ast.parse(block.text).body
    assert "offcompile" not in block.text, "write ```python, so that it runs"


# --- commands ---------------------------------------------------------------------------------

#: how a command that is not run here begins → why
NOT_RUN = {
    "make": "installs, or runs all tests; `make demo` is examples/train_gpt.py, which runs below",
    "python train.py": "stands for a script of the reader's",
    "python examples/": "run below with --quick",
    "torchrun": "runs examples/train_ranks.py, which runs below",
    "python -m benchmarks.gpu": "needs minutes; tests/gpu/test_benchmark_gpu.py runs it small",
    "offcompile fit hf:llama": "takes a minute; docs/fit.md has a small one, which runs",
    "offcompile fit hf:gpt2-xl": "takes a minute; tests/ahead/test_fit_ranks.py has small ones",
    "offcompile record": "runs a script of the reader's; tests/run/test_record.py runs it",
    "offcompile plan --trace": "plans what that has recorded; tests/run/test_record.py runs it",
}
#: options that keep a command short here
SHORTER = {"plan": ["--seconds", "0.2"]}


def test_every_command_is_run_or_has_a_reason() -> None:
    said = [" ".join(words) for block in all_blocks("sh") for words in commands(block)]
    assert len(said) > 10
    for beginning in NOT_RUN:
        assert any(without_variables(one).startswith(beginning) for one in said), beginning


def without_variables(command: str) -> str:
    """`A=1 B=2 python x.py` without what is set."""
    return re.sub(r"^(?:[A-Z_]+=\S*\s+)+", "", command)


@pytest.mark.usefixtures("in_a_folder")
@pytest.mark.parametrize("block", all_blocks("sh"), ids=str)
def test_commands_run(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFCOMPILE_SECONDS", "0.1")
    for words in commands(block):
        command = without_variables(" ".join(words))
        if any(command.startswith(beginning) for beginning in NOT_RUN):
            for script in (w for w in words if w.startswith("examples/")):
                assert Path(script).name in {e.name for e in EXAMPLES.glob("*.py")}
            continue
        assert words[0] == "offcompile", f"{block}: run {command!r}, or say in NOT_RUN why not"
        assert main([*words[1:], *SHORTER.get(words[1], [])]) == 0, command
        assert capsys.readouterr().out


# --- links and tables -------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path):
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("folder", [ROOT / "docs", ROOT / "docs" / "coming_from"], ids=str)
def test_the_index_names_every_document(folder: Path) -> None:
    named = set(links(folder / "README.md"))
    inner = {f"{path.parent.name}/README.md" for path in folder.glob("*/README.md")}
    pages = {path.name for path in folder.glob("*.md")} - {"README.md"}
    assert pages | inner <= named, (pages | inner) - named


def rows(document: str) -> list[list[str]]:
    """Cells of the lines whose first cell is one name in code."""
    text = (ROOT / "docs" / document).read_text()
    lines = re.findall(r"^\| (`\w+` \|.+) \|$", text, re.M)
    return [re.split(r" \| ", line) for line in lines]


def test_options_are_those_that_there_are() -> None:
    table = {cells[0].strip("`"): cells[1:] for cells in rows("options.md")}
    assert list(table) == [field.name for field in fields(Options)]
    for field in fields(Options):
        variable, default, _ = table[field.name]
        assert variable == f"`{_variable(field.name)}`"
        if field.name != "spill":  # the system's temporary directory
            shown = f'`"{field.default}"`' if isinstance(field.default, str) else field.default
            assert default.partition(":")[0] == str(shown)
    text = (ROOT / "docs" / "options.md").read_text()
    assert OTHER_VARIABLES[0] in text
    for field in fields(Options):
        assert f"- **`{field.name}`**" in text  # when to use it


# --- examples ---------------------------------------------------------------------------------


#: examples that take some ten seconds
LONG = ("finetune_hf.py", "gpt2_xl_small_memory.py")
EACH_ONCE = [
    pytest.param([path.name], id=path.name, marks=pytest.mark.long if path.name in LONG else ())
    for path in sorted(EXAMPLES.glob("*.py"))
]
IN_ANOTHER_WAY = ["finetune_hf.py", "--lora", "--loop"]
ON_RANKS = ["train_gpt.py", "--ranks", "2"]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    "words",
    [
        *EACH_ONCE,
        pytest.param(IN_ANOTHER_WAY, id="a loop with LoRA", marks=pytest.mark.soak),
        pytest.param(ON_RANKS, id="two ranks", marks=pytest.mark.soak),
    ],
)
def test_examples_run(words: list[str], tmp_path: Path) -> None:
    script = EXAMPLES / words[0]
    assert f"examples/{words[0]}" in script.read_text(), "says how it is run"
    assert run_example([str(script), *words[1:]], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("way", [[], ["--fsdp"]], ids=["DDP", "FSDP2"])
def test_ranks_that_torchrun_starts_go_on_from_a_checkpoint_of_one(
    way: list[str], tmp_path: Path
) -> None:
    words = [str(EXAMPLES / "train_ranks.py"), "--save", "checkpoint", *way]
    said = [run_example([*start, *words], tmp_path) for start in ((), TORCHRUN)]
    first, second = ([float(x) for x in re.findall(r"loss (\d+\.\d+)", one)] for one in said)
    assert len(first) == len(second) == 2 and second[0] < first[0]


def run_example(words: list[str], folder: Path) -> str:
    """Runs it small. Returns what it says."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "OFFCOMPILE_SECONDS": "0.1"}
    settings["OFFCOMPILE_LOWERING"] = "aot_eager"  # most ask for it themselves
    done = warm.run(
        [sys.executable, *words, "--quick"],
        timeout=600,
        cwd=folder,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return str(done.stdout + done.stderr)


@pytest.mark.long
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFCOMPILE_LOWERING", "aot_eager")
    monkeypatch.setenv("OFFCOMPILE_HARDWARE", "cpu")
    monkeypatch.setenv("OFFCOMPILE_SECONDS", "0.1")
    monkeypatch.setattr(reporting, "_remembered", [])
    cells = json.loads((EXAMPLES / "budgets.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    whole = "".join(line for cell in code for line in cell["source"])
    assert all(large in whole for large in FEWER)
    assert not any(cell["outputs"] for cell in code), "outputs are not kept"
    names: dict[str, Any] = {}
    shown = []
    for cell in code:
        text = "".join(cell["source"])
        for large, small in FEWER.items():
            text = text.replace(large, small)
        body = ast.parse(text).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), cell["id"], "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), cell["id"], "eval"), names))
    assert "1MiB: Set memory to" in capsys.readouterr().out
    tables = [value._repr_html_() for value in shown if isinstance(value, PlanReport)]
    assert len(tables) == 2
    assert all("planned peak" in table for table in tables)
