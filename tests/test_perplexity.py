"""Perplexity of data sets: diffusion and causal, against independent computations; process and batch invariance."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_examples import load_example
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from radd_hf import RADDForMaskedDiffusion, estimate_likelihood
from radd_hf.perplexity import causal_perplexity, causal_token_nll, dataset_perplexity

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "examples" / "checkpoints" / "radd-demo"


@pytest.fixture(scope="module")
def causal() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def text() -> torch.LongTensor:
    return torch.randint(0, 11, (40,), generator=torch.Generator().manual_seed(0))


def token_by_token(model, context: torch.LongTensor, token: int) -> float:
    """-log p(token | context), one call a token."""
    with torch.no_grad():
        logits = model(input_ids=context[None]).logits[0, -1].double()
    return float(logits.logsumexp(-1) - logits[token])


# The control row


def test_fixed_blocks_of_a_causal_model(causal, text):
    blocks = text.view(5, 8)
    expected = sum(token_by_token(causal, row[:i], int(row[i])) for row in blocks for i in range(1, 8))
    for batch_size in (1, 3, 8):
        report = causal_perplexity(causal, blocks, batch_size=batch_size)
        assert report.nll == pytest.approx(expected, rel=1e-5) and report.num_tokens == 35
    with_bos = causal_perplexity(causal, blocks[:, :7], bos_token_id=10)
    bos = torch.tensor([10])
    expected = sum(
        token_by_token(causal, torch.cat([bos, row[:i]]), int(row[i])) for row in blocks[:, :7] for i in range(7)
    )
    assert with_bos.nll == pytest.approx(expected, rel=1e-5) and with_bos.num_tokens == 35


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_the_sliding_window_of_a_causal_model(causal, text, stride: int):
    """Each token in the first window that reaches it, counted by hand."""
    expected, reached = 0.0, 1
    for start in range(0, len(text), stride):
        end = min(start + 8, len(text))
        for i in range(reached, end):
            if i > start:
                expected += token_by_token(causal, text[start:i], int(text[i]))
        reached = max(reached, end)
        if end == len(text):
            break
    report = causal_perplexity(causal, text.view(5, 8), stride=stride, window=8, batch_size=3)
    skipped = 0 if stride < 8 else 4  # windows that only touch leave their first tokens without context
    assert report.num_tokens == 39 - skipped
    assert report.nll == pytest.approx(expected, rel=1e-5)


def test_padding_and_context_of_a_causal_model(causal, text):
    """Left and right padding are cut off, loss_mask False is context."""
    ids = torch.cat([torch.zeros(2, dtype=torch.long), text[:4], torch.zeros(1, dtype=torch.long)])
    real = torch.tensor([0, 0, 1, 1, 1, 1, 0])
    scored = torch.tensor([False, False, True, False, True, True, True])
    report = causal_perplexity(causal, [{"input_ids": ids, "attention_mask": real, "loss_mask": scored}])
    expected = sum(token_by_token(causal, text[:i], int(text[i])) for i in (2, 3))
    assert report.nll == pytest.approx(expected, rel=1e-5) and report.num_tokens == 2


def test_causal_token_nll_is_the_models_loss(causal, text):
    ids = text[:8][None]
    loss = causal(input_ids=ids, labels=ids).loss.item()
    assert causal_token_nll(causal, ids).mean().item() == pytest.approx(loss, rel=1e-5)


# Diffusion


def test_a_streamed_data_set_is_the_sum_of_its_sequences(make_model):
    """A generator of rows of several lengths, against one call a sequence; the figures follow from the sum."""
    model = make_model()
    rows = [torch.randint(2, 4, (n,), generator=torch.Generator().manual_seed(n)) for n in (3, 9, 5, 5, 12, 2, 7)]
    reports = [
        dataset_perplexity(
            model, iter(rows), num_samples=12, seed=4, sequences_at_once=n, batch_size=b, num_bytes=100, num_words=10
        )
        for n, b in ((1, 64), (3, 5), (64, 64))
    ]
    report = reports[0]
    assert all(other.nll == pytest.approx(report.nll, rel=1e-6) for other in reports)
    assert (report.num_sequences, report.num_tokens, report.nfe) == (7, 43, 12)
    assert report.nll_per_token * 43 == pytest.approx(report.nll, rel=1e-9)
    assert report.perplexity == pytest.approx(math.exp(report.nll_per_token), rel=1e-9)
    assert report.bits_per_token * math.log(2) == pytest.approx(report.nll_per_token, rel=1e-9)
    assert report.bits_per_byte * 100 * math.log(2) == pytest.approx(report.nll, rel=1e-9)
    assert 10 * math.log(report.word_perplexity) == pytest.approx(report.nll, rel=1e-9)
    orders = [estimate_likelihood(model, row[None], loss_type="forward").nll.item() for row in rows]
    assert dataset_perplexity(model, rows, loss_type="forward").nll == pytest.approx(sum(orders), rel=1e-6)


def test_intervals_cover_what_they_claim():
    """Sequences whose cost is known: the ratio estimator's interval, by hand."""
    from radd_hf.perplexity import _Score, summarize

    scores = [_Score(10.0, 0.04, 5, 1), _Score(30.0, 0.05, 10, 1), _Score(14.0, 0.0, 5, 1)]
    report = summarize(scores, None, None, 1.0, {})
    mean = 54 / 20
    spread = sum((one.nll - mean * one.num_tokens) ** 2 for one in scores)
    half = 1.959964 * math.sqrt(spread * 3 / 2) / 20
    assert report.confidence_interval == pytest.approx((mean - half, mean + half))
    assert report.monte_carlo_error == pytest.approx(0.3 / 20)
    assert report.bits_per_byte is None and report.word_perplexity is None


def test_precision_changes_little():
    """The shipped checkpoint in float32 and bfloat16, 6 blocks of its held-out text, the same draws: within 0.5 %."""
    from radd_hf.zero_shot import build_blocks

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    held_out = build_blocks("text", tokenizer, path=ROOT / "examples" / "data" / "held_out.txt", block_size=128)
    some = held_out.first(6, tokenizer)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model = RADDForMaskedDiffusion.from_pretrained(CHECKPOINT, dtype=dtype)
        report = dataset_perplexity(model, some.sequences(), num_samples=4, num_bytes=some.num_bytes)
        assert report.settings["dtype"] == str(dtype).removeprefix("torch.")
        results.append(report.perplexity)
    assert results[1] == pytest.approx(results[0], rel=0.005)


def test_reports_are_complete(make_model):
    """JSON with model, seed, draws, dtype and versions."""
    report = dataset_perplexity(make_model(), torch.tensor([[2, 3, 0]]), num_samples=8, seed=9, settings={"data": "x"})
    saved = json.loads(json.dumps(report.to_dict()))
    expected = {"loss_type": "ao", "num_samples": 8, "seed": 9, "dtype": "float32", "device": "cpu", "data": "x"}
    assert expected.items() <= saved["settings"].items()
    assert {"radd_hf", "torch", "transformers", "python"} <= saved["settings"]["versions"].keys()
    assert {"revision", "code_commit", "model", "processes"} <= saved["settings"].keys()


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "`sequences` must hold a token to score, got 0 sequences"),
        ([torch.tensor([2, 3])], {"seed": 0.5}, "`seed` must be an integer, got 0.5"),
        ([torch.tensor([[2, 3]])], {}, r"`attention_mask` must have the shape \(L,\)"),
        ([torch.tensor([2, 3])], {"sequences_at_once": 0}, "Sequences at once must be a positive integer, got 0"),
    ],
)
def test_bad_arguments_are_named(make_model, rows: list, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dataset_perplexity(make_model(), rows, **options)
    if not options:
        with pytest.raises(ValueError, match=message.replace("token to score", "token to score")):
            causal_perplexity(GPT2LMHeadModel(GPT2Config(vocab_size=4, n_embd=8, n_layer=1, n_head=1)), rows)


def test_bad_strides_are_named(causal, text):
    with pytest.raises(ValueError, match=r"`stride` must be an integer in \[1, window=8\], got 9"):
        causal_perplexity(causal, [text], stride=9)


# The script


def test_two_processes_equal_one_and_a_run_repeats_itself(tmp_path: Path):
    """torchrun with 2 gloo processes against this process, and against the arguments read back from its JSON."""
    spec = importlib.util.spec_from_file_location("evaluate_example", ROOT / "examples" / "evaluate.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    held_out, output = str(ROOT / "examples" / "data" / "held_out.txt"), tmp_path / "two.json"
    arguments = f"--data text --path {held_out} --block_size 32 --max_blocks 80 --num_samples 2 --seed 3 --device cpu"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, str(ROOT / "examples" / "evaluate.py"), *arguments.split(), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert output.is_file(), done.stderr  # gloo may abort at exit, after the work is done
    two = json.loads(output.read_text(encoding="utf-8"))["results"]["text"]
    for part in ("nats per token", "2,560 tokens", "per word", "per byte", "split", "detokenized", "last block: drop"):
        assert part in done.stdout
    assert two["settings"]["processes"] == 2
    model = RADDForMaskedDiffusion.from_pretrained(CHECKPOINT)
    for given in (arguments.split(), ["--repeat", str(output)]):
        args = script.parse(given)
        one = script.score(args, model, AutoTokenizer.from_pretrained(args.model), "text", args.path[0]).to_dict()
        for name in ("nll", "num_sequences", "num_tokens", "num_bytes", "monte_carlo_error", "nfe"):
            assert two[name] == pytest.approx(one[name], rel=1e-6), name
    assert two["num_sequences"] == 80 and two["num_tokens"] == 80 * 32


def test_blocks_beyond_the_context_are_refused():
    held_out = ROOT / "examples" / "data" / "held_out.txt"
    arguments = f"--data text --path {held_out} --max_blocks 1 --num_samples 2 --device cpu"
    with pytest.raises(ValueError, match="`block_size` must fit the model's max_position_embeddings=128, got 1024"):
        load_example("evaluate").main([*arguments.split(), "--block_size", "1024"])
    (report,) = load_example("evaluate").main(arguments.split()).values()
    assert report.num_tokens == 128
