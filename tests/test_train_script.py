"""examples/train.py: its recipe, its data, fine-tuning, and a stored loss."""

import json
import math
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from test_examples import ROOT, load_example

from radd_hf import RADDForMaskedDiffusion

TEXT = "the cat sat on the mat and the dog sat on the log.\n"
NETWORK = "--hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2 --block_size 16 --tokenizer characters"
RUN = "--max_steps 2 --logging_steps 1 --save_strategy no --report_to none --use_cpu --disable_tqdm true"
SMALL = (
    "--hidden_size 64 --num_hidden_layers 2 --num_attention_heads 4 --block_size 32 --tokenizer characters "
    "--initializer_range 0.1 --loss_type ao --time_sampling stratified --learning_rate 1e-2 --adam_beta2 0.98 "
    "--warmup_steps 10 --validation_blocks 200 --seed 0"
)


@pytest.fixture(scope="module")
def train():
    return load_example("train")


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT * 40, encoding="utf-8")
    return str(tmp_path / "text.txt")


class TestRecipe:
    def parse(self, train, folder: Path, *words: str):
        return train.parse(["--train_file", "x.txt", "--output_dir", str(folder), "--use_cpu", *words])

    def test_the_paper_is_one_flag_away(self, train, tmp_path: Path):
        script, args = self.parse(train, tmp_path, "--recipe", "paper")
        assert (args.learning_rate, args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (3e-4, 0.9, 0.999, 1e-8)
        assert (args.lr_scheduler_type, args.warmup_steps, args.max_grad_norm) == ("constant_with_warmup", 2500, 1.0)
        assert (args.weight_decay, args.ema_decay, script.hidden_dropout) == (0.03, 0.9999, 0.02)
        assert (args.loss_type, args.loss_reduction, script.block_size) == ("lambda_dce", "sequence_sum", 1024)
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 512
        assert (script.hidden_size, script.num_hidden_layers, script.num_attention_heads) == (768, 12, 12)
        assert script.decay_all_parameters

    def test_flags_win_over_the_recipe(self, train, tmp_path: Path):
        words = "--recipe paper --size medium --num_hidden_layers 2 --learning_rate 1 --decay_all_parameters false"
        script, args = self.parse(train, tmp_path, *words.split())
        assert (script.hidden_size, script.num_hidden_layers, script.num_attention_heads) == (1024, 2, 16)
        assert args.learning_rate == 1 and args.weight_decay == 0.03 and not script.decay_all_parameters

    def test_wrong_choices_are_named(self, train, tmp_path: Path):
        for words, message in (
            ("--recipe none", r"`recipe` must be one of \['paper'\], got 'none'"),
            ("--size large", r"`size` must be one of \['small', 'medium'\], got 'large'"),
            ("--global_batch_size 12", "`global_batch_size` must be a multiple of 8, .* got 12"),
            ("--dataset_name x", "Exactly one of `train_file` and `dataset_name` must be given"),
            ("--validation_split x", "`validation_split` belongs to a `dataset_name`"),
        ):
            with pytest.raises(ValueError, match=message):
                self.parse(train, tmp_path, *words.split())

    @pytest.mark.parametrize("everything", [False, True])
    def test_a_flag_chooses_what_decays(self, train, make_model, tmp_path: Path, everything: bool):
        model = make_model()
        args = self.parse(train, tmp_path, "--weight_decay", "0.03", "--report_to", "none")[1]
        trainer = train.RecipeTrainer(model, args, decay_all_parameters=everything)
        decayed = {
            id(p)
            for group in trainer.create_optimizer().param_groups
            if group["weight_decay"]
            for p in group["params"]
        }
        names = {name for name, p in model.named_parameters() if id(p) in decayed}
        spared = {name for name, _ in model.named_parameters()} - names
        assert spared == (
            set() if everything else {n for n, _ in model.named_parameters() if "norm" in n or "bias" in n}
        )
        assert "lm_head.weight" in names


class TestRuns:
    def test_a_stream_of_documents_kept_apart(self, train, text: str, tmp_path: Path):
        run = tmp_path / "run"
        words = f"--train_file {text} --validation_file {text} --validation_blocks 8 --document line {NETWORK} {RUN} "
        words += "--streaming --pack_as_original --document_boundaries --never_mask_tokens . --sample_steps 2 "
        words += f"--output_dir {run}"
        train.main(words.split())
        assert RADDForMaskedDiffusion.from_pretrained(run).config.training_loss == "lambda_dce"
        card = ModelCard.load(run / "README.md")
        assert "`text.txt`" in card.text and "--document_boundaries" in card.text and card.data.eval_results
        pytest.importorskip("matplotlib")
        assert (run / "training_curve.png").read_bytes().startswith(b"\x89PNG")

    def test_what_the_collator_makes_of_the_flags(self, train, text: str, tmp_path: Path):
        words = f"--train_file {text} --document line {NETWORK} {RUN} --output_dir {tmp_path / 'run'} "
        script, _ = train.parse([*words.split(), "--document_boundaries", "--never_mask_tokens", ".", "t"])
        source = train.open_source(script, script.train_file, "train", 0)
        tokenizer = train.load_tokenizer(script, None, source)
        data = train.training_data(script, source, tokenizer)
        batch = train.build_collator(script, tokenizer)([data[3], data[4]])
        ids = batch["input_ids"]
        kept = (ids == tokenizer.convert_tokens_to_ids(".")) | (ids == tokenizer.convert_tokens_to_ids("t"))
        assert torch.equal(~batch["loss_mask"], kept) and bool(kept.any())
        assert batch["document_ids"].max() == 2
        script.never_mask_tokens = ["the"]
        with pytest.raises(ValueError, match=r"`never_mask_tokens` must be tokens of the vocabulary, got \['the'\]"):
            train.build_collator(script, tokenizer)

    def test_a_data_set_by_name(self, train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / "set").mkdir()
        for split in ("train", "test"):
            rows = (json.dumps({"body": TEXT}) + "\n") * 20
            (tmp_path / "set" / f"{split}.jsonl").write_text(rows, encoding="utf-8")
        words = f"--dataset_name {tmp_path / 'set'} --text_column body --validation_split test {NETWORK} {RUN}"
        train.main([*words.split(), "--output_dir", str(tmp_path / "run")])
        words += f" --streaming --shuffle_buffer 8 --output_dir {tmp_path / 'streamed'}"
        train.main(words.split())
        assert (tmp_path / "run" / "model.safetensors").is_file()
        assert (tmp_path / "streamed" / "model.safetensors").is_file()

    def test_pairs_fine_tune_a_checkpoint_with_its_loss(self, train, text: str, tmp_path: Path):
        """The checkpoint's own loss goes on, and the card names the checkpoint."""
        first, second = tmp_path / "first", tmp_path / "second"
        train.main(f"--train_file {text} {NETWORK} {RUN} --loss_type dse --output_dir {first}".split())
        pairs = tmp_path / "pairs.jsonl"
        rows = [{"prompt": "the cat ", "completion": "sat."}, {"prompt": "the dog ", "completion": "sat on the mat."}]
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows * 8), encoding="utf-8")
        words = (
            f"--model_name_or_path {first} --train_file {pairs} --validation_file {pairs} {RUN} --output_dir {second}"
        )
        train.main(words.split())
        tuned = RADDForMaskedDiffusion.from_pretrained(second)
        assert tuned.config.training_loss == "dse"
        assert "fine-tuned from `first`" in ModelCard.load(second / "README.md").text

    def test_another_tokenizer_is_refused(self, train, text: str, tmp_path: Path):
        first = tmp_path / "first"
        train.main(f"--train_file {text} {NETWORK} {RUN} --output_dir {first}".split())
        path = first / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "mask_token_id": 0}), encoding="utf-8")
        with pytest.raises(ValueError, match="mask token must be the model's, id 0, got"):
            train.main(f"--model_name_or_path {first} --train_file {text} {RUN} --output_dir {tmp_path / 'x'}".split())


def evaluation_after(train, folder: Path, flags: str) -> float:
    """The bound on the held-out text, nats per character, after training on the bundled novel (1.2 MB)."""
    data = ROOT / "examples" / "data"
    words = f"--train_file {data / 'moby_dick.txt'} --validation_file {data / 'held_out.txt'} {SMALL} {RUN} {flags}"
    train.main([*words.split(), "--logging_steps", "50", "--output_dir", str(folder)])
    return ModelCard.load(folder / "README.md").data.eval_results[0].metric_value


def test_the_stored_loss_is_reached(train, tmp_path: Path):
    """100 steps: seeds 0, 1, 2 gave 3.087, 3.073, 3.072 (measured before); within 2 % of their mean."""
    flags = "--max_steps 100 --lr_scheduler_type constant_with_warmup --per_device_train_batch_size 32 --ema_decay 0.9"
    assert math.log(evaluation_after(train, tmp_path, flags)) == pytest.approx(3.077, rel=0.02)


@pytest.mark.slow
def test_a_curriculum_leaves_the_unigram_plateau(train, tmp_path: Path):
    """1,000 steps: seeds 0 and 1 gave 2.812 and 2.616; a run that stays on the plateau ends at 3.09."""
    flags = "--max_steps 1000 --lr_scheduler_type cosine --per_device_train_batch_size 64 --ema_decay 0"
    assert math.log(evaluation_after(train, tmp_path, f"{flags} --curriculum_steps 600")) < 2.95


def test_help_is_printed(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as done:
        load_example("train").main(["--help"])
    assert done.value.code == 0 and "--curriculum_steps" in capsys.readouterr().out
