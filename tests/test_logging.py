"""What a user sees of a training run: the bar, the scalars, samples, the curve and the model card."""

import io
import math
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import TrainerCallback

from radd_hf import RADDConfig, RADDForMaskedDiffusion, RADDTrainer, RADDTrainingArguments
from radd_hf.data import BlockDataset, character_tokenizer, pack_blocks
from radd_hf.logging_callbacks import DiffusionProgressCallback, SampleCallback, TokenRate, plot_training_curve
from radd_hf.model_card import MARKER, training_card

TEXT = "the cat sat on the mat and the dog sat on the log. "


def build_trainer(folder: Path, callbacks=None, **changes) -> RADDTrainer:
    tokenizer = character_tokenizer(TEXT)
    blocks = pack_blocks([tokenizer(TEXT * 20)["input_ids"]], 16)
    torch.manual_seed(0)
    config = RADDConfig(
        vocab_size=len(tokenizer),
        mask_token_id=tokenizer.mask_token_id,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout=0.1,
    )
    options = {
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "per_device_train_batch_size": 8,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **changes,
    }
    return RADDTrainer(
        RADDForMaskedDiffusion(config),
        RADDTrainingArguments(str(folder), **options),
        train_dataset=BlockDataset(blocks[:-8]),
        eval_dataset=BlockDataset(blocks[-8:]),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def test_the_bar_shows_nll_and_tokens_a_second(tmp_path: Path):
    out = io.StringIO()
    trainer = build_trainer(tmp_path / "run", disable_tqdm=False)
    trainer.add_callback(SampleCallback(trainer, 2, max_length=8))
    with redirect_stdout(out), redirect_stderr(out):
        trainer.train()
    assert re.search(r"NLL \d\.\d{3} nats/token, [\d,]+ tokens/s", out.getvalue())
    assert "sample_0 at step 2: " in out.getvalue()
    bars = [c for c in trainer.callback_handler.callbacks if isinstance(c, DiffusionProgressCallback)]
    assert len(bars) == 1
    assert sum("Progress" in type(c).__name__ for c in trainer.callback_handler.callbacks) == 1


def test_scalars_land_in_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = build_trainer(tmp_path / "run", report_to=["tensorboard"])
    trainer.add_callback(SampleCallback(trainer, 4, max_length=8))
    trainer.train()
    trainer.evaluate()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    tags = events.Tags()
    for tag in ("train/nll_per_token", "train/tokens_per_second", "train/loss", "eval/nll_per_token"):
        assert tag in tags["scalars"], tags
    logged = [e["nll_per_token"] for e in trainer.state.log_history if "nll_per_token" in e]
    assert [s.value for s in events.Scalars("train/nll_per_token")] == pytest.approx(logged)
    assert len(logged) == 2 and events.Scalars("train/tokens_per_second")[0].value > 0
    assert any(tag.startswith("train/sample_0") for tag in tags["tensors"])


def test_tokens_are_counted_once_and_over_the_time_between(monkeypatch: pytest.MonkeyPatch):
    class Two:
        """Two processes that count the same."""

        device = torch.device("cpu")

        def gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.repeat(2)

    now = 100.0
    monkeypatch.setattr("radd_hf.logging_callbacks.time.perf_counter", lambda: now)
    rate = TokenRate()
    rate.count(torch.zeros(4, 8))
    rate.count(torch.zeros(4, 8))
    now = 102.0
    assert rate.take(Two()) == pytest.approx(2 * 64 / 2)
    now = 103.0
    assert rate.take(Two()) == 0
    rate.count(torch.zeros(1, 5))
    rate.on_train_begin(None, None, None)
    now = 104.0
    assert rate.take(Two()) == 0


class TestSamples:
    def test_every_n_steps_from_the_average_and_nothing_else_changes(self, tmp_path: Path):
        """A run with samples has the weights and the log of the run without, and both start from the same seed."""
        options = {"ema_decay": 0.9, "learning_rate": 0.3}  # so large that the average lags behind
        plain = build_trainer(tmp_path / "a", **options)
        plain.train()
        sampled = build_trainer(tmp_path / "b", **options)
        sampled.add_callback(SampleCallback(sampled, 2, num_samples=8, seed=7, max_length=16))
        sampled.train()
        for one, other in zip(plain.model.parameters(), sampled.model.parameters(), strict=True):
            assert torch.equal(one, other)
        key = "nll_per_token"
        curves = [[e[key] for e in t.state.log_history if key in e] for t in (plain, sampled)]
        assert len(curves[0]) == 2 and curves[0] == curves[1]
        samples = [e for e in sampled.state.log_history if "sample_0" in e]
        assert [e["step"] for e in samples] == [2, 4] and all("sample_1" in e for e in samples)
        averaged, raw = (
            sampled.processing_class.batch_decode(model.eval().diffusion_generate(batch_size=8, max_length=16, seed=7))
            for model in (sampled.ema_model(), sampled.model)
        )
        assert [samples[-1][f"sample_{i}"] for i in range(8)] == averaged != raw

    def test_torch_s_generator_and_the_mode_stay(self, tmp_path: Path):
        trainer = build_trainer(tmp_path)
        trainer.model.train()
        state = torch.get_rng_state()
        texts = SampleCallback(trainer, 1, prompt="the ", max_length=12, num_steps=4).draw()
        assert torch.equal(state, torch.get_rng_state()) and trainer.model.training
        assert len(texts) == 1 and texts[0].startswith("the ") and len(texts[0]) > 4

    def test_wrong_arguments_are_named(self, tmp_path: Path):
        trainer = build_trainer(tmp_path)
        with pytest.raises(ValueError, match="`every` must be a positive integer, got 0"):
            SampleCallback(trainer, 0)
        with pytest.raises(ValueError, match="`num_samples` must be a positive integer, got -1"):
            SampleCallback(trainer, 1, num_samples=-1)
        trainer.processing_class = None
        with pytest.raises(ValueError, match="`trainer` must have a tokenizer"):
            SampleCallback(trainer, 1)


class TestCurve:
    def test_a_picture_is_written(self, tmp_path: Path):
        pytest.importorskip("matplotlib")
        history = [{"step": i, "nll_per_token": 3 - i / 10} for i in range(5)] + [{"step": 4, "eval_nll_per_token": 3}]
        plot_training_curve(history, tmp_path / "curve.png")
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
        assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
        with pytest.raises(ValueError, match="`log_history` must have entries with `nll_per_token`"):
            plot_training_curve([{"step": 1, "loss": 2.0}], tmp_path / "none.png")

    def test_a_missing_library_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match="pip install matplotlib"):
            plot_training_curve([], tmp_path / "curve.png")


class TestCard:
    def test_is_written_on_save_with_valid_metadata(self, tmp_path: Path):
        trainer = build_trainer(tmp_path / "radd-cats", loss_type="ao", weight_decay=0.03, warmup_steps=3)
        trainer.train()
        figures = trainer.evaluate()
        trainer.save_model(str(tmp_path / "final"))
        card = ModelCard.load(tmp_path / "final" / "README.md")
        metadata = card.data.to_dict()
        assert metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "fill-mask"
        assert "masked-diffusion" in metadata["tags"]
        (result,) = card.data.eval_results
        assert result.metric_type == "perplexity"
        assert result.metric_value == pytest.approx(figures["eval_perplexity"], rel=1e-4)
        assert card.data.model_name == "radd-cats" and "trained from scratch" in card.text
        assert MARKER in card.text
        for row in ("`ao`, reduced by `token_mean`", "weight decay | 0.03", "linear after 3 steps", "steps | 4"):
            assert row in card.text
        assert f"{figures['eval_nll_per_token']:.4f} nats" in card.text
        assert f"{trainer.model.num_parameters():,} parameters" in card.text

    def test_a_card_without_evaluation_says_so(self, tmp_path: Path):
        card = training_card(build_trainer(tmp_path), data="Two sentences.", command="python train.py", language="en")
        assert "No evaluation was logged." in card.text and "Two sentences." in card.text
        assert "python train.py" in card.text and card.data.language == "en"
        assert card.data.eval_results is None

    def test_a_card_that_a_person_took_over_stays(self, tmp_path: Path):
        trainer = build_trainer(tmp_path)
        for text, changes in (("mine\n", False), (f"{MARKER}\nolder\n", True)):
            (tmp_path / "README.md").write_text(text, encoding="utf-8")
            trainer.save_model()
            assert ((tmp_path / "README.md").read_text(encoding="utf-8") != text) is changes

    def test_the_hub_gets_it(self, tmp_path: Path):
        """`push_to_hub` calls `create_model_card` with these arguments of transformers'."""
        trainer = build_trainer(tmp_path)
        trainer.create_model_card(
            model_name="cats",
            tags="tiny",
            finetuned_from="someone/radd",
            dataset_tags="someone/cats",
            dataset="Cats",
            license="apache-2.0",
        )
        card = ModelCard.load(tmp_path / "README.md")
        assert card.data.datasets == ["someone/cats"] and card.data.base_model == "someone/radd"
        assert "tiny" in card.data.tags and card.data.license == "apache-2.0"
        assert "# cats" in card.text and "Cats" in card.text and "fine-tuned from `someone/radd`" in card.text

    def test_checkpoints_have_none(self, tmp_path: Path):
        trainer = build_trainer(tmp_path, save_strategy="steps", save_steps=4)
        trainer.train()
        assert (tmp_path / "checkpoint-4" / "model.safetensors").is_file()
        assert not (tmp_path / "checkpoint-4" / "README.md").exists()


def test_nll_starts_at_ln_v_and_has_its_own_name(tmp_path: Path):
    """Under the weighted loss, which is another number and is logged as `loss`."""
    trainer = build_trainer(tmp_path, loss_type="lambda_dce", logging_steps=1, loss_reduction="sequence_sum")
    trainer.train()
    first = next(e for e in trainer.state.log_history if "loss" in e)
    assert first["nll_per_token"] == pytest.approx(math.log(len(trainer.processing_class) - 1), rel=1e-3)
    assert first["loss"] > 5 * first["nll_per_token"]


class Spy(TrainerCallback):
    """Logs that arrive at a callback of the user's."""

    def __init__(self):
        self.logs: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_callbacks_see_both_figures(tmp_path: Path):
    spy = Spy()
    build_trainer(tmp_path, callbacks=[spy]).train()
    training = [entry for entry in spy.logs if "loss" in entry]
    assert len(training) == 2
    assert all({"nll_per_token", "tokens_per_second"} <= set(entry) for entry in training)
