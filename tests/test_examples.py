"""The examples on real text: learning at character level, the training script, the shipped checkpoint."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radd_hf import RADDConfig, RADDForMaskedDiffusion, RADDTrainer, RADDTrainingArguments, estimate_likelihood
from radd_hf.data import BlockDataset

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "examples" / "checkpoints" / "radd-demo"


def load_example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gain_over_unigram(tmp_path: Path, seed: int, steps: int) -> tuple[float, float]:
    """Held-out unigram cross-entropy minus the bound, nats per character, and the bound's Monte Carlo error."""
    demo = load_example("demo_train")
    tokenizer, train, held_out = demo.character_blocks()
    held_out = held_out[torch.linspace(0, len(held_out) - 1, 100).long()]
    torch.manual_seed(seed)
    args = RADDTrainingArguments(
        str(tmp_path),
        loss_type="ao",
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        adam_beta2=0.98,
        per_device_train_batch_size=64,
        max_steps=steps,
        ema_decay=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=seed,
    )
    model = demo.build_model(len(tokenizer), tokenizer.mask_token_id)
    RADDTrainer(model, args, train_dataset=BlockDataset(train)).train()
    estimate = estimate_likelihood(model.eval(), held_out, num_samples=16, seed=0)
    unigram = demo.unigram_nll(train, held_out, len(tokenizer))
    return unigram - estimate.nll_per_token, estimate.nll_per_token_standard_error


def test_a_short_run_beats_the_unigram_model(tmp_path: Path):
    """Measured over seeds 0, 1, 2: gains of 0.058, 0.067 and 0.079 nats per character, errors of 0.008."""
    gain, error = gain_over_unigram(tmp_path, seed=0, steps=200)
    assert error < 0.01
    assert gain > 0.03


@pytest.mark.slow
def test_a_longer_run_gains_more(tmp_path: Path):
    """Measured over seeds 0, 1, 2: gains of 0.440, 0.220 and 0.208 nats per character."""
    gain, _ = gain_over_unigram(tmp_path, seed=0, steps=1000)
    assert gain > 0.15


def test_the_training_script_runs_resumes_and_saves(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log.\n" * 40, encoding="utf-8")
    arguments = f"--train_file {text} --validation_file {text} --tokenizer characters --block_size 16 --hidden_size 16"
    arguments += f" --num_hidden_layers 1 --num_attention_heads 2 --output_dir {tmp_path / 'run'} --max_steps 4"
    arguments += " --save_steps 2 --logging_steps 1 --report_to none --use_cpu --disable_tqdm true"
    train = load_example("train")
    train.main(arguments.split())
    train.main([*arguments.split(), "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2")])
    model = RADDForMaskedDiffusion.from_pretrained(tmp_path / "run")
    assert model.config.training_loss == "lambda_dce"
    assert (tmp_path / "run" / "tokenizer.json").is_file()
    assert (tmp_path / "run" / "checkpoint-4" / "ema.safetensors").is_file()


def test_the_curriculum_masks_a_growing_subset(tmp_path: Path):
    """At step n of N = 4 a share 0.15 + 0.85 n / 4 of 40 tokens may be masked, then all; evaluation masks any."""
    torch.manual_seed(0)
    train = load_example("train")
    model = RADDForMaskedDiffusion(
        RADDConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=40)
    )
    args = RADDTrainingArguments(str(tmp_path), loss_type="ao", use_cpu=True, report_to=[])
    trainer = train.CurriculumTrainer(model, args, curriculum_steps=4)
    batch = {"input_ids": torch.randint(7, (4096, 40))}
    for step, most in ((0, 6), (2, 23), (4, 40), (9, 40)):
        trainer.state.global_step = step
        _, terms = trainer.compute_loss(model.train(), batch, return_outputs=True)
        assert terms.length.unique().tolist() == [most]
        assert int(terms.num_masked.max()) == most and int(terms.num_masked.min()) == 1
    trainer.state.global_step = 0
    _, terms = trainer.compute_loss(model.eval(), batch, return_outputs=True)
    assert int(terms.num_masked.max()) == 40


def test_books_become_lines_and_a_held_out_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    prepare = load_example("prepare_text")
    paragraph = (
        "“Aye,” said he—and the boat turned about in the\nwind, while the long oars dipped and rose\nagain…\n\n"
    )
    (tmp_path / "a.txt").write_text("\ufeff" + paragraph * 200, encoding="utf-8")
    (tmp_path / "b.txt").write_text(
        "".join(f"{i} A verse{' of its own' * (i % 3 == 0)}.\r\n" for i in range(300)), encoding="utf-8"
    )
    prepare.main(["--source", str(tmp_path), "--output_dir", str(tmp_path / "out")])
    train, held_out = ((tmp_path / "out" / name).read_text("utf-8") for name in ("train.txt", "held_out.txt"))
    prose = '"Aye," said he--and the boat turned about in the wind, while the long oars dipped and rose again...\n'
    assert set(train.splitlines(keepends=True)) == {prose, "A verse of its own.\n", "A verse.\n"}
    assert (train + held_out).count(prose) == 200 and (train + held_out).count("A verse") == 300
    assert 0 < held_out.count(prose) <= 3 and 0 < held_out.count("A verse") <= 4
    assert "2 books" in capsys.readouterr().out
    (tmp_path / "c.txt").write_text("one line", encoding="utf-8")
    with pytest.raises(ValueError, match="more than one line"):
        prepare.main(["--source", str(tmp_path), "--output_dir", str(tmp_path / "out")])
    with pytest.raises(ValueError, match="`source` must be a folder with .txt files, got "):
        prepare.main(["--source", str(tmp_path / "none"), "--output_dir", str(tmp_path / "out")])


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its Python blocks as printed, with 2 training steps instead of 1,000."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block.replace("max_steps=1000", "max_steps=2"), "README.md", "exec"), {})
    assert (tmp_path / "runs" / "mine" / "final" / "tokenizer.json").is_file()


def test_the_figure_of_network_calls(tmp_path: Path):
    """Six means of 64 rows each: below 4 standard errors, and a picture is written."""
    pytest.importorskip("matplotlib")
    worst = load_example("plot_nfe").main(
        ["--output", str(tmp_path / "nfe.png"), "--steps", "8", "64", "--length", "32"]
    )
    assert 0 < worst < 4
    assert (tmp_path / "nfe.png").read_bytes().startswith(b"\x89PNG")


def test_the_precision_of_draws_is_measured(capsys: pytest.CaptureFixture[str]):
    """50 tokens and 4 steps: too little for single precision to matter, so all four rows are within 4 errors."""
    sizes = ["--vocab_size", "50", "--positions", "500", "--steps", "4"]
    deviations = load_example("measure_precision").main(sizes)
    assert len(deviations) == 4 and all(abs(value) < 4 for value in deviations.values())
    assert "rare share" in capsys.readouterr().out


def test_sampling_benchmark_counts_what_it_times(tmp_path: Path, capsys: pytest.CaptureFixture):
    """The whole of it on a small network: rows of the run, calls of the baselines, a JSON with its settings."""
    benchmark = load_example("benchmark_sampling")
    small = "--length 8 --num_layers 1 --hidden_size 64 --batch_sizes 2 --steps_over_length 1 4 --probes 2".split()
    results = benchmark.main([*small, "--output", str(tmp_path / "new" / "sampling.json")])
    assert [result["steps"] for result in results] == [8, 32]
    for result in results:
        assert result["passes"] <= 8 and result["passes"] < result["rows"] <= 16
        steps = result["steps"]
        assert result["dense_passes"] == pytest.approx(steps * (1 - (1 - 1 / steps) ** 16))
        assert result["no_cache/ours"] > 0 and result["dense/ours"] > 0 and result["peak_gib"] is None
    saved = json.loads((tmp_path / "new" / "sampling.json").read_text(encoding="utf-8"))
    assert saved["results"] == results and saved["settings"]["shape"] == "1 x 64, vocabulary 50258"
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_training_benchmark_compares_one_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The whole of it on a small network: one value of each loss in three forms, ratios, a JSON with its settings."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    benchmark = load_example("benchmark_training")
    small = "--num_layers 1 --hidden_size 64 --vocab_size 1001 --length 16 --batch_size 4 --repeats 1".split()
    results = benchmark.main([*small, "--peak_tflops", "1", "--output", str(tmp_path / "new" / "training.json")])
    assert [(r["loss_type"], r["form"]) for r in results] == [
        (loss_type, form)
        for loss_type in ("lambda_dce", "dse")
        for form in ("original", "cross_entropy", "ours", "trunk")
    ]
    for four in (results[:4], results[4:]):
        original, cross_entropy, ours, trunk = four
        assert ours["loss"] > 16 and ours["loss"] != trunk["loss"]
        for dense in (original, cross_entropy):
            assert dense["loss"] == pytest.approx(ours["loss"], rel=1e-4)
            assert dense["form/ours"] == pytest.approx(dense["seconds"] / ours["seconds"])
            assert dense["ours/form"] == pytest.approx(ours["peak_mib"] / dense["peak_mib"]) and dense["ours/form"] < 1
            # three tensors of logits; the output layer and its gradient, as large at 64 positions, are no part
            assert 2.5 < (dense["peak_mib"] - trunk["peak_mib"]) * 2**20 / (64 * 1001 * 4) < 3.5
        for result in four:
            assert result["tokens_per_second"] == pytest.approx(64 / result["seconds"])
        trunk_flops = 3 * 64 * (24 * 64**2 + 4 * 64 * 16)
        assert trunk["mfu"] == pytest.approx(trunk_flops / trunk["seconds"] / 1e12)
        scored = (ours["mfu"] * ours["seconds"] * 1e12 - trunk_flops) / (6 * 64 * 1001)
        assert scored == pytest.approx(round(scored)) and 0 < scored < 64
    saved = json.loads((tmp_path / "new" / "training.json").read_text(encoding="utf-8"))
    assert saved["results"] == results and saved["settings"]["batch_size"] == 4
    assert results[0]["shape"] == "1 x 64, vocabulary 1001"
    assert len(capsys.readouterr().out.splitlines()) == 10
    with pytest.raises(ValueError, match="The losses must agree to 0.0001, got "):
        benchmark.check_losses({"original": 1.0, "cross_entropy": 1.01, "ours": 1.0}, "float32")


def test_peak_memory_counts_what_is_made_once():
    """Bytes by hand: a view of what was there counts nothing, what goes is given back, gradients can be left out."""
    peak_memory = load_example("peak_memory")
    weight = torch.ones(1000, requires_grad=True)
    with peak_memory.PeakMemory() as tracker:
        view = weight.detach().view(10, 100)
        first = view * 2
        del first
        product = weight * 3
        product.sum().backward()
    assert tracker.peak_beyond((weight.grad,)) < tracker.peak
    assert 2 * 4000 <= tracker.peak <= 2 * 4000 + 16
    assert 4000 <= tracker.peak_beyond((weight.grad,)) <= 4000 + 16


def test_shipped_checkpoint_has_its_stated_likelihood():
    """The card's held-out figure within 4 of the two estimates' errors, on the same blocks with other draws."""
    from transformers import AutoTokenizer

    demo = load_example("demo")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = RADDForMaskedDiffusion.from_pretrained(CHECKPOINT)
    blocks = demo.held_out_blocks(tokenizer)
    estimate = estimate_likelihood(model, blocks, num_samples=4, seed=123)
    card = (CHECKPOINT / "README.md").read_text(encoding="utf-8")
    stated, error = map(float, re.search(r"held-out NLL: ([0-9.]+) \+- ([0-9.]+) nats per token", card).groups())
    spread = (estimate.nll_per_token_standard_error**2 + error**2) ** 0.5
    assert abs(estimate.nll_per_token - stated) < 4 * spread
    counts = json.loads(demo.UNIGRAM_COUNTS.read_text(encoding="utf-8"))
    assert stated < demo.unigram_nll(blocks, counts) - 0.5
    assert sum(f.stat().st_size for f in CHECKPOINT.iterdir()) < 15e6


@pytest.mark.slow
def test_the_demo_prints_every_part():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for part in ("single words masked", "both ends fixed", "a continuation", "from nothing", "NLL bound", "unigram"):
        assert part in done.stdout
    assert "[MASK]" not in done.stdout.split("from nothing")[1]
