"""The callback in Hugging Face's Trainer: the plain one's losses, and ordinary checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offcompile
from offcompile.ir import InvalidInput, OffloadError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from offcompile.integrations.transformers import OffcompileCallback

SMALL = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
STEPS, SAVED_AT = 4, 2


def trained(folder: Path, *callbacks: Any, resume: Path | None = None, **more: Any) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL))
    drawn = torch.Generator().manual_seed(1)
    texts = [torch.randint(64, (16,), generator=drawn) for _ in range(8)]
    usual = {"max_steps": STEPS, "save_steps": SAVED_AT, "logging_steps": 1, "seed": 1}
    usual |= {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            str(folder), per_device_train_batch_size=2, **(usual | more)
        ),
        train_dataset=[{"input_ids": t, "labels": t} for t in texts],
        callbacks=list(callbacks),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def callback(memory: str) -> OffcompileCallback:
    return OffcompileCallback(memory=memory, lowering="aot_eager")


@pytest.mark.long
def test_it_trains_saves_and_resumes_as_the_plain_trainer_does(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", save_strategy="no")
    before = len(offcompile.reports())
    trained(tmp_path / "ours", callback("minimum"))
    assert any(not report.fits for report in offcompile.reports()[before:])
    # the rest again, from the checkpoint and under another budget
    saved = tmp_path / "ours" / f"checkpoint-{SAVED_AT}"
    ours = trained(tmp_path / "ours", callback("64MiB"), resume=saved)
    assert losses(ours) == losses(plain)
    wanted = plain.model.state_dict()
    assert ours.model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(wanted[name], t) for name, t in ours.model.state_dict().items())
    last = tmp_path / "ours" / f"checkpoint-{STEPS}"
    loaded = transformers.GPT2LMHeadModel.from_pretrained(last).state_dict()
    assert all(torch.equal(wanted[name], t) for name, t in loaded.items())
    assert ours.model.config.use_cache == plain.model.config.use_cache

    (page,) = last.glob("*.html")
    assert "</html>" in page.read_text()
    row = next(r for r in reversed(ours.state.log_history) if "loss" in r)
    figures = {name.partition("/")[2] for name in row if name.startswith("offcompile/")}
    peak = "measured_peak_gib" if torch.cuda.is_available() else "process_peak_gib"
    assert figures == {"planned_step_ms", "measured_step_ms", "planned_peak_gib", peak}


def test_a_bad_option_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="memory"):
        trained(tmp_path, OffcompileCallback(memory="8 GiBs"))


def test_two_compilers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="leave out torch_compile"):
        trained(tmp_path, callback("64MiB"), torch_compile=True)
    model = torch.nn.Linear(2, 2)
    model.compile()
    from offcompile.integrations.training import compile_in_place

    with pytest.raises(OffloadError, match="Linear is compiled already"):
        compile_in_place([model], {"memory": "64MiB"})


def test_the_trainer_of_trl_is_the_same_trainer(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    import trl

    drawn = torch.Generator().manual_seed(1)
    rows = [{"input_ids": torch.randint(64, (16,), generator=drawn).tolist()} for _ in range(8)]

    def tuned(folder: Path, *callbacks: Any) -> Any:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL))
        vocabulary = {f"w{n}": n for n in range(64)}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=_words(vocabulary), pad_token="w0", eos_token="w1"
        )
        given = {"max_steps": 3, "logging_steps": 1, "report_to": [], "use_cpu": True, "seed": 1}
        given |= {"save_strategy": "no", "disable_tqdm": True, "bf16": False, "max_length": None}
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(str(folder), per_device_train_batch_size=2, **given),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )
        trainer.train()
        return trainer

    plain = tuned(tmp_path / "plain")
    before = len(offcompile.reports())
    ours = tuned(tmp_path / "ours", callback("minimum"))
    assert any(not report.fits for report in offcompile.reports()[before:])
    assert losses(ours) == losses(plain)
    theirs = plain.model.state_dict()
    assert all(torch.equal(theirs[name], t) for name, t in ours.model.state_dict().items())


def _words(vocabulary: dict[str, int]) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel(vocabulary, unk_token="w2"))
