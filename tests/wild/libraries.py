"""Programs around the trainers, adapters and models of other packages."""

from __future__ import annotations

import copy
import logging
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .parts import LENGTH, WORDS, labels, mlp, points, words
from .program import Run, family, trained

transformers_program = family("transformers", ("transformers",))
trainer_program = family("trainer", ("transformers", "accelerate"))
peft_program = family("peft", ("transformers", "peft"))
lightning_program = family("lightning", ("lightning",))
diffusers_program = family("diffusers", ("diffusers",))
trl_program = family("trl", ("trl", "datasets"))
torchao_program = family("torchao", ("torchao",))
accelerate_program = family("accelerate", ("accelerate",))

SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def _causal(kind: str = "llama", **more: Any) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **more})
    return transformers.AutoModelForCausalLM.from_config(config)


def _gpt2(**more: Any) -> Any:
    return _causal("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64, **more)


# --- transformers -------------------------------------------------------------------------------


@transformers_program()
def generates_with_a_cache_between_steps(run: Run) -> None:
    model = _causal()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        loss: Tensor = forward(input_ids=words(n), labels=words(n), use_cache=False).loss
        return loss

    run.train(model, step, keep=False)
    model.eval()
    said = model.generate(words(0, 1, 3), max_new_tokens=4, do_sample=False, pad_token_id=1)
    run.keep("said", said)
    with torch.no_grad():
        cached = forward(input_ids=words(1), use_cache=True)
        more = forward(input_ids=words(2, length=1), past_key_values=cached.past_key_values)
    run.keep("scores with a cache", more.logits)
    model.train()
    run.train(model, step)


@transformers_program()
def checkpoints_gradients(run: Run) -> None:
    model = _gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    forward = run.compile(model.train())
    run.train(model, lambda n: forward(input_ids=words(n), labels=words(n), use_cache=False).loss)


@transformers_program()
def pads_batches(run: Run) -> None:
    model = _causal("mistral", sliding_window=4)
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        present = torch.ones(3, LENGTH, dtype=torch.long)
        present[0, : 1 + n] = 0
        given = words(n).masked_fill(present == 0, 1)
        aim = given.masked_fill(present == 0, -100)
        loss: Tensor = forward(
            input_ids=given, attention_mask=present, labels=aim, use_cache=False
        ).loss
        return loss

    run.train(model, step)


@transformers_program()
def classifies_sequences(run: Run) -> None:
    import transformers

    config = transformers.AutoConfig.for_model("bert", **SMALL, num_labels=3)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    forward = run.compile(model)
    run.train(model, lambda n: forward(input_ids=words(n), labels=labels(n, 3, 3)).loss)


@transformers_program()
def grows_its_vocabulary(run: Run) -> None:
    model = _gpt2()
    forward = run.compile(model)

    def step(n: int) -> Tensor:
        loss: Tensor = forward(input_ids=words(n), labels=words(n), use_cache=False).loss
        return loss

    run.train(model, step, keep=False)
    model.resize_token_embeddings(WORDS + 8)
    run.train(model, step)


# --- the Trainer --------------------------------------------------------------------------------


def _data() -> list[dict[str, Tensor]]:
    return [{"input_ids": words(n, 1)[0], "labels": words(n, 1)[0]} for n in range(8)]


def _trained_by_trainer(run: Run, model: nn.Module, **more: Any) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    run.compile_in_place(model)
    with tempfile.TemporaryDirectory() as folder:
        given = {"per_device_train_batch_size": 2, "max_steps": 3, "report_to": [], "use_cpu": True}
        given |= {"save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "seed": 1}
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(folder, **(given | more)),
            train_dataset=_data(),
            eval_dataset=_data()[:2],
            callbacks=[],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        found = trainer.evaluate()
    run.keep("loss of evaluation", torch.tensor(found["eval_loss"]))
    run.keep_state(model)


@trainer_program()
def trains_a_language_model(run: Run) -> None:
    _trained_by_trainer(run, _gpt2())


@trainer_program()
def clips_and_accumulates(run: Run) -> None:
    _trained_by_trainer(run, _causal(), gradient_accumulation_steps=2, max_grad_norm=0.1)


@trainer_program()
def trains_in_bfloat16(run: Run) -> None:
    _trained_by_trainer(run, _gpt2(), bf16=True)


@trainer_program()
def trains_with_gradient_checkpointing(run: Run) -> None:
    _trained_by_trainer(
        run,
        _causal(use_cache=False),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )


@trainer_program()
def smooths_labels_and_uses_adafactor(run: Run) -> None:
    _trained_by_trainer(run, _gpt2(), label_smoothing_factor=0.1, optim="adafactor")


# --- accelerate, lightning ----------------------------------------------------------------------


@accelerate_program()
def prepares_and_accumulates(run: Run) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(points(0, 24), labels(0, 24))
    prepared, optimizer, loader = accelerator.prepare(
        run.compile(model), optimizer, torch.utils.data.DataLoader(data, batch_size=6)
    )
    for x, y in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(F.cross_entropy(prepared(x), y))
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    run.keep_state(model)


def _lightning(run: Run, **more: Any) -> None:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Learner(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.forward_of_net = run.compile(self.net)

        def training_step(self, batch: list[Tensor], at: int) -> Tensor:
            return F.cross_entropy(self.forward_of_net(batch[0]), batch[1])

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    data = torch.utils.data.TensorDataset(points(0, 24), labels(0, 24))
    loader = torch.utils.data.DataLoader(data, batch_size=6)
    learner = Learner()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, enable_model_summary=False, **quiet, **more
    )
    trainer.fit(learner, loader, loader)
    run.keep_state(learner.net)


@lightning_program()
def fits_a_module(run: Run) -> None:
    _lightning(run)


@lightning_program()
def fits_in_mixed_precision_with_clipping(run: Run) -> None:
    _lightning(run, precision="bf16-mixed", gradient_clip_val=0.5, accumulate_grad_batches=2)


# --- diffusers ----------------------------------------------------------------------------------


def _denoised(run: Run, model: nn.Module, channels: int, side: int, **more: Any) -> None:
    forward = run.compile(model.train())

    def step(n: int) -> Tensor:
        drawn = torch.Generator().manual_seed(n)
        x = torch.randn(2, channels, side, side, generator=drawn)
        t = torch.randint(1000, (2,), generator=drawn)
        found = forward(x, t, **more, return_dict=False)[0]
        return F.mse_loss(found[:, :channels], x.roll(1, 0))

    run.train(model, step, optimizer=torch.optim.AdamW(trained(model), lr=1e-3), steps=2)


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    model: nn.Module = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        norm_num_groups=4,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    return model


@diffusers_program()
def denoises_with_a_unet(run: Run) -> None:
    _denoised(run, _unet(), 3, 16)


@diffusers_program()
def denoises_with_a_checkpointed_unet(run: Run) -> None:
    model = _unet()
    model.enable_gradient_checkpointing()
    _denoised(run, model, 3, 16)


def _conditioned() -> nn.Module:
    from diffusers import UNet2DConditionModel

    model: nn.Module = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
    )
    return model


@diffusers_program()
def denoises_by_text(run: Run) -> None:
    _denoised(run, _conditioned(), 4, 16, encoder_hidden_states=torch.ones(2, 5, 16))


@diffusers_program()
def denoises_with_a_transformer(run: Run) -> None:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_num_groups=4,
    )
    forward = run.compile(model.train())

    def step(n: int) -> Tensor:
        drawn = torch.Generator().manual_seed(n)
        x = torch.randn(2, 4, 8, 8, generator=drawn)
        t = torch.randint(1000, (2,), generator=drawn)
        found = forward(x, timestep=t, class_labels=torch.tensor([1, 2]), return_dict=False)[0]
        return F.mse_loss(found, x.roll(1, 0))

    run.train(model, step, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), steps=2)


@diffusers_program()
def encodes_images(run: Run) -> None:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=2,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    forward = run.compile(model.train())

    def step(n: int) -> Tensor:
        x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(n))
        return F.mse_loss(forward(x, sample_posterior=False, return_dict=False)[0], x)

    run.train(model, step, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), steps=2)


# --- peft, trl, torchao -------------------------------------------------------------------------


def _adapted(run: Run, config: Any, model: Any = None) -> None:
    import peft

    model = peft.get_peft_model(_causal() if model is None else model, config)
    forward = run.compile(model)
    run.train(
        model,
        lambda n: forward(input_ids=words(n), labels=words(n), use_cache=False).loss,
        optimizer=torch.optim.AdamW(trained(model), lr=1e-2),
    )


@peft_program()
def adapts_low_ranks(run: Run) -> None:
    import peft

    _adapted(run, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


@peft_program()
def adapts_every_layer_by_dora(run: Run) -> None:
    import peft

    _adapted(run, peft.LoraConfig(r=2, use_dora=True, target_modules="all-linear"))


@peft_program()
def scales_activations_by_ia3(run: Run) -> None:
    import peft

    _adapted(
        run,
        peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
    )


@peft_program()
def adapts_a_checkpointed_base(run: Run) -> None:
    import peft

    base = _causal()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    base.train()
    _adapted(run, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), base)


@peft_program()
def switches_adapters(run: Run) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(_causal(), config)
    model.add_adapter("other", copy.deepcopy(config))
    forward = run.compile(model)
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        run.train(
            model,
            lambda n: forward(input_ids=words(n), labels=words(n), use_cache=False).loss,
            steps=1,
            keep=False,
        )
    run.keep_state(model)


@trl_program()
def tunes_by_instruction(run: Run) -> None:
    import datasets
    import transformers
    import trl

    transformers.logging.set_verbosity_error()
    model = _gpt2()
    rows = [words(n, 1)[0].tolist() for n in range(8)]
    data = datasets.IterableDataset.from_generator(
        lambda: ({"input_ids": row, "labels": row, "attention_mask": [1] * LENGTH} for row in rows)
    )
    run.compile_in_place(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(
            folder,
            per_device_train_batch_size=2,
            max_steps=3,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            max_length=LENGTH,
            bf16=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            gradient_checkpointing=False,
        )
        tokens = _tokenizer()
        trainer = trl.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            processing_class=tokens,
            data_collator=lambda rows: {k: torch.tensor([r[k] for r in rows]) for k in rows[0]},
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    run.keep_state(model)


def _tokenizer() -> Any:
    import tokenizers
    import transformers

    held = {f"w{n}": n for n in range(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(held, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w1", bos_token="w2", eos_token="w3"
    )


@torchao_program(moves=False)
def trains_beside_int8_weights(run: Run) -> None:
    """Quantized weights are subclasses: they stay; the rest of the step is planned around them."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    base = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24)).requires_grad_(False)
    quantize_(base, Int8WeightOnlyConfig())
    head = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 5))
    model = nn.Sequential(base, head)
    forward = run.compile(model)
    run.train(head, lambda n: F.cross_entropy(forward(points(n)), labels(n)))
