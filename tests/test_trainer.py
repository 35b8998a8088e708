"""RADDTrainer, its arguments, the moving average and the collator, on a tiny model."""

import math
import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

from radd_hf import RADDConfig, RADDForMaskedDiffusion, RADDTrainer, RADDTrainingArguments
from radd_hf.data import BlockDataset, MaskedDiffusionCollator, character_tokenizer, pack_blocks
from radd_hf.losses import LOSS_TYPES, diffusion_loss_terms, masked_token_nll, sum_over_masked

VOCAB, LENGTH = 12, 8


def tiny_model() -> RADDForMaskedDiffusion:
    torch.manual_seed(0)
    config = RADDConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        hidden_dropout=0.1,
        initializer_range=0.1,
    )
    return RADDForMaskedDiffusion(config)


def blocks(count: int = 64) -> BlockDataset:
    """Rows that count upwards modulo V: each token tells the others."""
    start = torch.arange(count)[:, None]
    return BlockDataset((start + torch.arange(LENGTH)) % (VOCAB - 1))


def arguments(folder: Path, **changes) -> RADDTrainingArguments:
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **changes,
    }
    return RADDTrainingArguments(**options)


def logged(trainer: RADDTrainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_trains_and_logs_nll_per_token_from_ln_v(tmp_path: Path, loss_type: str):
    args = arguments(tmp_path, loss_type=loss_type, max_steps=60, ema_decay=0.5)
    trainer = RADDTrainer(tiny_model(), args, train_dataset=blocks(), eval_dataset=blocks(16))
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    nll = logged(trainer, "nll_per_token")
    assert nll[0] == pytest.approx(math.log(VOCAB - 1), rel=1e-3)
    assert len(logged(trainer, "loss")) == 60
    assert before["eval_perplexity"] == pytest.approx(VOCAB - 1, rel=1e-4)
    assert after["eval_nll_per_token"] < before["eval_nll_per_token"] - 0.2
    assert after["eval_perplexity"] == pytest.approx(math.exp(after["eval_nll_per_token"]))
    assert after["eval_num_tokens"] == 16 * LENGTH
    assert trainer.model.config.training_loss == loss_type


def test_every_parameter_moves(tmp_path: Path):
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    RADDTrainer(model, arguments(tmp_path), train_dataset=blocks()).train()
    for name, parameter in model.named_parameters():
        assert not torch.equal(before[name], parameter.cpu()), name


def test_reduction_is_per_token_or_per_sequence(tmp_path: Path):
    batch = {"input_ids": blocks(8).blocks}
    losses = {}
    for reduction in ("token_mean", "sequence_sum"):
        trainer = RADDTrainer(
            tiny_model(), arguments(tmp_path, loss_reduction=reduction, loss_type="ao"), train_dataset=blocks()
        )
        losses[reduction], terms = trainer.compute_loss(trainer.model, batch, return_outputs=True)
        assert terms.loss.shape == (8,)
    assert losses["sequence_sum"].item() == pytest.approx(LENGTH * losses["token_mean"].item(), rel=1e-5)


def ragged(count: int = 64) -> list[dict]:
    """Rows of 2 to 8 tokens, some with a context that is not scored."""
    rows = [{"input_ids": [(i + j) % (VOCAB - 1) for j in range(2 + i * 5 % 7)]} for i in range(count)]
    for row in rows[::3]:
        row["loss_mask"] = [False, *[True] * (len(row["input_ids"]) - 1)]
    return rows


def gradient_of_first_step(folder: Path, dataset, **changes) -> tuple[float, float, torch.Tensor]:
    """Logged loss, logged NLL a token and gradient of the first step: no dropout, a head that is not zero."""
    model = tiny_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.nn.init.normal_(model.lm_head.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    options = {"max_steps": 1, "max_grad_norm": 0.0, "ema_decay": 0.0, "optim": "sgd", "lr_scheduler_type": "constant"}
    trainer = RADDTrainer(model, arguments(folder, **{**options, **changes}), train_dataset=dataset)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    trainer.train()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return (
        logged(trainer, "loss")[0],
        logged(trainer, "nll_per_token")[0],
        (before - after) / trainer.args.learning_rate,
    )


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_sum"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_accumulation_4_x_8_is_batch_32(tmp_path: Path, loss_type: str, reduction: str):
    """Loss and gradient to 1e-5, with rows of different lengths: noise, strata and divisor are of the global batch."""
    results = [
        gradient_of_first_step(
            tmp_path,
            ragged(),
            loss_type=loss_type,
            loss_reduction=reduction,
            gradient_accumulation_steps=steps,
            per_device_train_batch_size=32 // steps,
            learning_rate=1.0,
        )
        for steps in (1, 4)
    ]
    (loss, nll, gradient), (loss_4, nll_4, gradient_4) = results
    assert loss_4 == pytest.approx(loss, rel=1e-5) and nll_4 == pytest.approx(nll, abs=1.1e-4)  # logged to four digits
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(gradient_4, gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_resume_is_bit_exact(tmp_path: Path, ema_decay: float):
    def run(folder: Path, resume: str | None = None) -> RADDTrainer:
        saving = {"save_strategy": "steps", "save_steps": 3}
        args = arguments(folder, max_steps=6, ema_decay=ema_decay, gradient_accumulation_steps=2, **saving)
        trainer = RADDTrainer(tiny_model(), args, train_dataset=blocks())
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = run(tmp_path / "a")
    resumed = run(tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-3"))
    for (name, one), other in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    if ema_decay:
        for name, average in straight.ema.average.items():
            assert torch.equal(average, resumed.ema.average[name]), name
        assert resumed.ema.num_updates == 6
    tail = logged(straight, "nll_per_token")[3:]
    assert tail == logged(resumed, "nll_per_token")[-3:]


def test_average_follows_its_formula_and_is_what_is_saved(tmp_path: Path):
    args = arguments(tmp_path, max_steps=3, save_strategy="steps", save_steps=3, ema_decay=0.9)
    trainer = RADDTrainer(tiny_model(), args, train_dataset=blocks())
    history = [trainer.model.lm_head.weight.detach().clone()]
    step = trainer.ema.on_optimizer_step

    def spy(*a, model=None, **k):
        history.append(model.lm_head.weight.detach().clone())
        return step(*a, model=model, **k)

    trainer.ema.on_optimizer_step = spy
    trainer.train()
    average = history[0]
    for n, weight in enumerate(history[1:], start=1):
        decay = min(0.9, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * weight
    raw = trainer.model.lm_head.weight
    assert torch.equal(raw, history[-1])
    assert torch.allclose(trainer.ema_model().lm_head.weight, average, atol=1e-6)
    assert not torch.allclose(raw, average, atol=1e-4)
    checkpoint = tmp_path / "checkpoint-3"
    assert torch.equal(load_file(checkpoint / "model.safetensors")["lm_head.weight"], raw)
    assert torch.allclose(load_file(checkpoint / "ema.safetensors")["lm_head.weight"], average, atol=1e-6)
    trainer.save_model(str(tmp_path / "final"))
    saved = RADDForMaskedDiffusion.from_pretrained(tmp_path / "final")
    assert torch.allclose(saved.lm_head.weight, average, atol=1e-6)
    assert torch.equal(trainer.model.lm_head.weight, raw)


def test_evaluation_repeats_and_leaves_training_alone(tmp_path: Path):
    trainer = RADDTrainer(tiny_model(), arguments(tmp_path), train_dataset=blocks(), eval_dataset=blocks(16))
    trainer.train()
    state = torch.get_rng_state()
    one, two = trainer.evaluate(), trainer.evaluate()
    assert one["eval_nll_per_token"] == two["eval_nll_per_token"]
    assert torch.equal(state, torch.get_rng_state())


def test_no_average_without_decay(tmp_path: Path):
    trainer = RADDTrainer(tiny_model(), arguments(tmp_path, ema_decay=0.0), train_dataset=blocks())
    with pytest.raises(ValueError, match="`ema_decay` must be greater than 0"):
        trainer.ema_model()


def test_resuming_with_an_average_needs_its_file(tmp_path: Path):
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, ema_decay=0.0)
    RADDTrainer(tiny_model(), args, train_dataset=blocks()).train()
    trainer = RADDTrainer(tiny_model(), arguments(tmp_path, max_steps=4, ema_decay=0.9), train_dataset=blocks())
    with pytest.raises(ValueError, match="has no ema.safetensors"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_context_and_padding_are_never_scored():
    collate = MaskedDiffusionCollator(pad_token_id=0)
    batch = collate(
        [
            {"input_ids": [1, 2, 3, 4], "loss_mask": [False, True, True, True]},
            {"input_ids": [5, 6], "loss_mask": [True, True]},
        ]
    )
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, True, True], [True, True, False, False]]
    terms = diffusion_loss_terms(tiny_model().eval(), **batch, loss_type="ao", generator=torch.Generator())
    assert terms.length.tolist() == [3, 2]
    assert "attention_mask" not in collate([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}])


def test_pack_blocks_joins_with_eos_and_drops_the_rest():
    assert pack_blocks([[1, 2], [3], [4, 5, 6]], 4, eos_token_id=9).tolist() == [[1, 2, 9, 3], [9, 4, 5, 6]]
    assert pack_blocks([[1, 2], [3, 4, 5]], 2).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match="at least one block of 10 tokens, got fewer"):
        pack_blocks([[1, 2]], 10, eos_token_id=9)
    with pytest.raises(ValueError, match="`block_size` must be positive"):
        pack_blocks([[1]], 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "dce"}, r"`loss_type` must be one of \['dse', 't_dce', 'lambda_dce', 'ao'\], got 'dce'"),
        ({"time_sampling": "x"}, "`time_sampling` must be one of .*'antithetic'.*got 'x'"),
        ({"loss_reduction": "mean"}, "`loss_reduction` must be one of .*got 'mean'"),
        ({"ema_decay": 1.0}, r"`ema_decay` must be in \[0, 1\), got 1.0"),
        ({"time_eps": -0.1}, r"`time_eps` must be in \[0, 1\), got -0.1"),
        ({"eval_num_samples": 0}, "`eval_num_samples` must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **changes)


def test_empty_data_set_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="`train_dataset` must have at least one example"):
        RADDTrainer(tiny_model(), arguments(tmp_path), train_dataset=[])
    with pytest.raises(ValueError, match="`blocks` must have shape"):
        BlockDataset(torch.zeros(0, 4, dtype=torch.long))


def test_arguments_survive_json(tmp_path: Path):
    args = arguments(tmp_path, loss_type="t_dce", ema_decay=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert '"loss_type": "t_dce"' in args.to_json_string()
    assert args.remove_unused_columns is False


def test_a_mask_in_any_example_counts():
    collate = MaskedDiffusionCollator()
    batch = collate([{"input_ids": [1, 2]}, {"input_ids": [3, 4], "loss_mask": [0, 1], "attention_mask": [0, 1]}])
    assert batch["loss_mask"].tolist() == [[True, True], [False, True]]
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
    with pytest.raises(ValueError, match="`loss_mask` must have the length of `input_ids`, 3, got"):
        collate([{"input_ids": [1, 2, 3], "loss_mask": [1, 1]}])


def test_best_model_brings_its_own_average(tmp_path: Path):
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "learning_rate": 0.5, "max_steps": 8, "ema_decay": 0.5}
    args = arguments(tmp_path, **saving, **best)
    trainer = RADDTrainer(tiny_model(), args, train_dataset=blocks(), eval_dataset=blocks(16))
    trainer.train()
    losses = logged(trainer, "eval_loss")
    assert min(losses) < losses[-1], "the last checkpoint is the best: this run shows nothing"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)
    saved = load_file(Path(trainer.state.best_model_checkpoint) / "ema.safetensors")
    assert torch.equal(trainer.ema.average["lm_head.weight"], saved["lm_head.weight"])


def test_the_average_is_on_disk_before_the_checkpoint_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, ema_decay=0.5)
    trainer = RADDTrainer(tiny_model(), args, train_dataset=blocks())

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.ema, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not (tmp_path / "checkpoint-2" / "trainer_state.json").exists()


def test_training_again_starts_the_average_again(tmp_path: Path):
    args = arguments(tmp_path, max_steps=3, ema_decay=0.5)
    trainer = RADDTrainer(model_init=tiny_model, args=args, train_dataset=blocks(), eval_dataset=blocks(8))
    figures = []
    for _ in range(2):
        trainer.train()
        assert trainer.ema.num_updates == 3 and trainer.model.config.training_loss == args.loss_type
        figures.append(trainer.evaluate()["eval_nll_per_token"])
    assert figures[0] == figures[1]


def test_predictions_are_those_of_the_average(tmp_path: Path):
    args = arguments(tmp_path, max_steps=6, ema_decay=0.9, learning_rate=0.1)
    trainer = RADDTrainer(tiny_model(), args, train_dataset=blocks(), eval_dataset=blocks(8))
    trainer.train()
    expected = trainer.evaluate()["eval_nll_per_token"]
    for _ in range(2):
        out = trainer.predict(blocks(8))
        assert out.metrics["test_nll_per_token"] == expected
        assert out.predictions.sum() / out.label_ids.sum() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="`test_dataset` must have at least one example"):
        trainer.predict([])


def test_the_loss_of_an_evaluation_weighs_tokens(tmp_path: Path):
    rows = [{"input_ids": [1, 2]}] * 3 + [{"input_ids": [1] * 16}] * 2
    trainer = RADDTrainer(tiny_model(), arguments(tmp_path, per_device_eval_batch_size=1), eval_dataset=rows)
    torch.nn.init.normal_(trainer.model.lm_head.weight)
    figures = trainer.evaluate()
    assert figures["eval_loss"] == figures["eval_nll_per_token"] and figures["eval_num_tokens"] == 38


def test_resuming_passes_over_a_torn_checkpoint(tmp_path: Path):
    saving = {"save_strategy": "steps", "save_steps": 2, "ema_decay": 0.5}
    whole = RADDTrainer(tiny_model(), arguments(tmp_path, max_steps=6, **saving), train_dataset=blocks())
    whole.train()
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text('{"global_step": ')
    (tmp_path / "checkpoint-8").mkdir()
    again = RADDTrainer(tiny_model(), arguments(tmp_path, max_steps=6, **saving), train_dataset=blocks())
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6 and again.ema.num_updates == 6
    assert torch.equal(again.model.lm_head.weight, whole.model.lm_head.weight)
    with pytest.raises(ValueError, match="`resume_from_checkpoint` is True but '.*none' holds no complete checkpoint"):
        RADDTrainer(tiny_model(), arguments(tmp_path / "none"), train_dataset=blocks()).train(True)


def test_average_on_the_cpu_is_the_same(tmp_path: Path):
    averages = []
    for ema_on_cpu in (False, True):
        args = arguments(tmp_path, ema_decay=0.9, ema_on_cpu=ema_on_cpu)
        trainer = RADDTrainer(tiny_model(), args, train_dataset=blocks())
        assert trainer.ema.device == ("cpu" if ema_on_cpu else None)
        trainer.train()
        averages.append(trainer.ema.average)
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])


def test_a_skipped_update_is_not_averaged(tmp_path: Path):
    """In float16 a step whose gradients overflow changes nothing: neither the average nor its warm-up."""
    trainer = RADDTrainer(tiny_model(), arguments(tmp_path, ema_decay=0.9), train_dataset=blocks())
    optimizer = type("Optimizer", (), {"step_was_skipped": True})()
    trainer.ema.on_optimizer_step(trainer.args, trainer.state, trainer.control, trainer.model, optimizer)
    assert trainer.ema.num_updates == 0
    optimizer.step_was_skipped = False
    trainer.ema.on_optimizer_step(trainer.args, trainer.state, trainer.control, trainer.model, optimizer)
    assert trainer.ema.num_updates == 1


def test_flattened_parameters_are_refused(tmp_path: Path):
    trainer = RADDTrainer(tiny_model(), arguments(tmp_path), train_dataset=blocks())
    wrapped = torch.nn.ModuleDict({"_fsdp_wrapped_module": tiny_model()})
    with pytest.raises(ValueError, match="`ema_decay` must be 0 under FSDP version 1 and DeepSpeed ZeRO stage 3"):
        trainer.ema.start(wrapped)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("flags", [{"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_flags_train(tmp_path: Path, flags: dict):
    trainer = RADDTrainer(tiny_model(), arguments(tmp_path, max_steps=30, **flags), train_dataset=blocks())
    trainer.train()
    nll = logged(trainer, "nll_per_token")
    assert sum(nll[-5:]) / 5 < nll[0] - 0.05


@pytest.mark.slow
def test_a_compiled_model_trains(tmp_path: Path):
    """As the model does without: the same losses at dropout 0."""
    runs = []
    for flags in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        model = tiny_model()
        for layer in model.model.layers:
            layer.dropout.p = 0.0
        trainer = RADDTrainer(model, arguments(tmp_path, max_steps=8, **flags), train_dataset=blocks())
        trainer.train()
        assert trainer.ema.num_updates == 8
        runs.append(logged(trainer, "nll_per_token"))
    assert runs[1] == pytest.approx(runs[0], abs=2e-4)


def test_extreme_masks_are_finite_in_float16(tmp_path: Path):
    """Rows without any mask and rows of masks alone, under a large weight: loss and gradients in float16 autocast."""
    model = tiny_model()
    torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(1))
    ids = blocks(4).blocks
    masked = torch.tensor([[False] * LENGTH, [True] * LENGTH, [True] + [False] * (LENGTH - 1), [True] * LENGTH])
    noisy, weight = ids.masked_fill(masked, VOCAB - 1), torch.tensor([1.0, 1.0, 100.0, 1.0])
    with torch.autocast("cpu", torch.float16):
        token_nll = masked_token_nll(model, ids, noisy, masked, row_weight=weight)
    loss = (weight * sum_over_masked(token_nll, masked)).sum() / 4
    loss.backward()
    assert loss.isfinite() and sum_over_masked(token_nll, masked)[0] == 0
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_plain_trainer_trains_through_labels(tmp_path: Path):
    """transformers' own Trainer with its masked-LM collator: the ordinary masked-LM loss."""
    tokenizer = character_tokenizer("abcdefghi")  # 9 characters, <unk>, end, mask: V = 12
    model = tiny_model()
    model.config.mask_token_id = tokenizer.mask_token_id
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    options = {"output_dir": str(tmp_path), "per_device_train_batch_size": 16, "max_steps": 30, "learning_rate": 1e-2}
    options |= {"logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    text = BlockDataset((torch.arange(64)[:, None] + torch.arange(LENGTH)) % 3)
    trainer = Trainer(model, TrainingArguments(**options), collator, train_dataset=text)
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[0] == pytest.approx(math.log(VOCAB - 1), rel=1e-3) and losses[-1] < 1.5


# A bad end


def test_a_loss_that_is_not_finite_names_step_and_batch(tmp_path: Path):
    model = tiny_model()

    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                model.lm_head.bias.data[3] = float("nan")

    args = arguments(tmp_path, max_steps=4, gradient_accumulation_steps=2)
    trainer = RADDTrainer(model, args, train_dataset=blocks(), callbacks=[Break()])
    with pytest.raises(ValueError, match=r"The loss must be finite, got nan at step 3, batch 1 of 2 on process 0, in"):
        trainer.train()


@pytest.mark.parametrize("workers", [0, 1])
def test_sigterm_saves_and_exits_and_the_run_goes_on_from_there(tmp_path: Path, workers: int):
    class Terminate(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 100, "ema_decay": 0.5}
    options["dataloader_num_workers"] = workers
    straight = RADDTrainer(tiny_model(), arguments(tmp_path / "a", **options), train_dataset=blocks())
    straight.train()
    before = signal.getsignal(signal.SIGTERM)
    args = arguments(tmp_path / "b", **options)
    with pytest.raises(SystemExit) as exit_of:
        RADDTrainer(tiny_model(), args, train_dataset=blocks(), callbacks=[Terminate()]).train()
    assert exit_of.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert [path.name for path in (tmp_path / "b").glob("checkpoint-*")] == ["checkpoint-3"]
    again = RADDTrainer(tiny_model(), args, train_dataset=blocks())
    again.train(resume_from_checkpoint=True)
    for one, other in zip(again.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("writer", ["torch.save", "safetensors"])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str):
    args = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, save_total_limit=1, ema_decay=0.5)
    trainer = RADDTrainer(tiny_model(), args, train_dataset=blocks())

    class Full(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3 and writer == "torch.save":
                monkeypatch.setattr(torch, "save", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left")))
            elif state.global_step == 3:

                def save(*args, **kwargs):
                    raise SafetensorError("Error while serializing: I/O error: No space left on device")

                monkeypatch.setattr(trainer.model, "save_pretrained", save)

    trainer.add_callback(Full())
    with pytest.raises(OSError, match="checkpoint of step 4 could not be written to .*No space left"):
        trainer.train()
    monkeypatch.undo()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    again = RADDTrainer(tiny_model(), args, train_dataset=blocks())
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
