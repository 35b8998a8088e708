"""Metrics of generated text against counts by hand and a token-by-token judge; the script as a whole."""

import builtins
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from radd_hf.data import bpe_tokenizer
from radd_hf.metrics import (
    distinct_n,
    generation_report,
    generative_perplexity,
    load_metric,
    mauve_score,
    repetition_rate,
    unigram_entropy,
)

ROOT = Path(__file__).parents[1]
TEXTS = ["the cat sat on the mat", "the dog", "a", "", "on the mat the cat sat and sat"]


@pytest.fixture(scope="module")
def tokenizer():
    return bpe_tokenizer(TEXTS, vocab_size=300)


@pytest.fixture(scope="module")
def judge(tokenizer) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=24, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5
    )
    return GPT2LMHeadModel(config).eval()


def test_counts_by_hand():
    samples = ["abab", "abcd"]
    assert unigram_entropy(samples) == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert distinct_n(samples, 1) == 4 / 8 and distinct_n(samples, 2) == pytest.approx(4 / 6)
    assert repetition_rate(["ababab", "abcdef"], 2) == pytest.approx((3 / 5 + 0) / 2)
    assert repetition_rate(["aaaaaaaa", "ab"], 4) == pytest.approx(4 / 5)  # too short for an n-gram: not counted
    assert math.isnan(distinct_n(["a"], 2)) and math.isnan(repetition_rate(["a"], 2))
    assert unigram_entropy(["", "aa"]) == 0
    with pytest.raises(ValueError, match="`samples` must hold a sample with a token, got 1 samples without"):
        unigram_entropy([""])
    with pytest.raises(ValueError, match="`n` must be a positive integer, got 0"):
        distinct_n(["ab"], 0)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_both_averages_of_a_judge(judge, tokenizer, batch_size: int):
    """Against one network call a token, with no padding."""
    means, total, count = [], 0.0, 0
    for text in TEXTS:
        ids = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.long)
        costs = []
        for i in range(1, len(ids)):
            with torch.no_grad():
                logits = judge(input_ids=ids[None, :i]).logits[0, -1].double()
            costs.append(float(logits.logsumexp(-1) - logits[ids[i]]))
        if costs:
            means.append(math.exp(sum(costs) / len(costs)))
            total, count = total + sum(costs), count + len(costs)
    found = generative_perplexity(TEXTS, judge, tokenizer, batch_size=batch_size)
    assert found.mean_of_samples == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert found.token_level == pytest.approx(math.exp(total / count), rel=1e-5)
    assert (found.num_samples, found.num_tokens) == (len(means), count)
    assert found.standard_error == pytest.approx(float(torch.tensor(means).std()) / math.sqrt(len(means)), rel=1e-4)
    assert found.judge == "GPT2LMHeadModel"


def test_long_samples_are_judged_as_far_as_the_judge_reads(judge, tokenizer):
    long = " ".join(TEXTS * 5)
    assert generative_perplexity([long], judge, tokenizer).num_tokens == 23
    assert generative_perplexity([long], judge, tokenizer, max_length=9).num_tokens == 8
    with pytest.raises(ValueError, match="`texts` must hold a text of two tokens or more, got 1 without"):
        generative_perplexity([""], judge, tokenizer)


def test_a_report_has_what_makes_perplexity_mean_something(judge, tokenizer):
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    with pytest.raises(TypeError, match="sampling_dtype"):
        generation_report(ids, TEXTS, judge, tokenizer, nfe=3.0, seconds=1.0)
    report = generation_report(ids, TEXTS, judge, tokenizer, nfe=3, sampling_dtype="float64", seconds=1)
    saved = json.loads(json.dumps(report.to_dict()))
    assert saved["perplexity"]["judge"] and saved["nfe"] == 3 and saved["sampling_dtype"] == "float64"
    assert saved["entropy"] == pytest.approx(unigram_entropy(ids)) and saved["mauve"] is None


def test_metrics_are_those_of_evaluate(judge, tokenizer, tmp_path: Path):
    pytest.importorskip("evaluate")
    judge.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = load_metric("generative_perplexity").compute(predictions=TEXTS, judge=str(tmp_path), batch_size=2)
    assert found["token_level"] == pytest.approx(generative_perplexity(TEXTS, judge, tokenizer).token_level, rel=1e-5)
    entropy = load_metric("unigram_entropy").compute(predictions=["a b a b", "a b c d"])
    assert entropy["unigram_entropy"] == pytest.approx(1.5 * math.log(2))
    assert load_metric("distinct_n").compute(predictions=["a b a b"], n=1) == {"distinct_1": 0.5}
    ids = tokenizer(TEXTS[:2])["input_ids"]
    repeated = load_metric("repetition_rate").compute(predictions=TEXTS[:2], n=1, tokenizer=tokenizer)
    assert repeated["repetition_1"] == pytest.approx(repetition_rate(ids, 1))
    with pytest.raises(ValueError, match="`name` must be one of .* got 'bleu'"):
        load_metric("bleu")


def test_optional_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name in ("mauve", "evaluate"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match="MAUVE needs `pip install mauve-text`"):
        mauve_score(["a"], ["b"])
    with pytest.raises(ImportError, match="needs `pip install evaluate`"):
        load_metric("distinct_n")


def test_mauve_compares_samples_with_references(monkeypatch: pytest.MonkeyPatch):
    """What the package is asked, by a stand-in: it needs a large feature model."""
    asked = {}

    def compute_mauve(**options):
        asked.update(options)
        return SimpleNamespace(mauve=0.5)

    monkeypatch.setitem(sys.modules, "mauve", SimpleNamespace(compute_mauve=compute_mauve))
    assert mauve_score(["sample"], ["human"], max_text_length=9) == 0.5
    assert (asked["p_text"], asked["q_text"], asked["max_text_length"]) == (["human"], ["sample"], 9)


def test_from_a_checkpoint_to_a_table_and_a_figure(judge, tokenizer, tmp_path: Path, capsys):
    """Two step counts of the shipped checkpoint, a small random judge; the JSON runs again to the same figures."""
    pytest.importorskip("matplotlib")
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    spec = importlib.util.spec_from_file_location("evaluate_generation", ROOT / "examples" / "evaluate_generation.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    arguments = f"--judge {tmp_path / 'judge'} --steps 2 6 --num_samples 5 --batch_size 3 --max_length 16 --device cpu"
    reports = script.main([*arguments.split(), "--output", str(tmp_path / "a")])
    assert [r.nfe <= n for r, n in zip(reports, (2, 6), strict=True)] == [True, True]
    assert "entropy" in capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    row = saved["results"][1]
    assert row["steps"] == row["generation_config"]["num_steps"] == 6 and row["sampling_dtype"] == "float64"
    assert {"torch", "radd_hf"} <= saved["settings"]["versions"].keys() and "revision" in saved["settings"]
    again = script.main(["--repeat", str(tmp_path / "a.json"), "--output", str(tmp_path / "b")])
    for one, other in zip(reports, again, strict=True):
        assert one.perplexity == other.perplexity and (one.entropy, one.nfe) == (other.entropy, other.nfe)
