"""The lm-evaluation-harness adapter with the real harness on local task files; skipped where lm-eval is absent."""

import json
from pathlib import Path

import pytest
import torch
from reference import conditional_of_network, order_nll

pytest.importorskip("lm_eval")

import lm_eval  # noqa: E402  after the skip
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from radd_hf import RADDForMaskedDiffusion  # noqa: E402
from radd_hf.data import bpe_tokenizer  # noqa: E402
from radd_hf.lm_eval import RADDEvalLM, rolling_windows, scoring_windows  # noqa: E402
from radd_hf.perplexity import dataset_perplexity  # noqa: E402

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "examples" / "checkpoints" / "radd-demo"
TEXT = "the cat sat on the mat and the dog sat on the log\n"


def instance(kind: str, *arguments) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("t", 0, 1))


@pytest.fixture(scope="module")
def demo() -> RADDEvalLM:
    return RADDEvalLM(str(CHECKPOINT), num_samples=8, batch_size=32)


@pytest.fixture(scope="module")
def small(make_model) -> RADDEvalLM:
    tokenizer = bpe_tokenizer([TEXT], vocab_size=300)
    model = make_model(vocab_size=len(tokenizer), mask_token_id=tokenizer.mask_token_id, max_position_embeddings=12)
    return RADDEvalLM(model, tokenizer, loss_type="forward", batch_size=5, max_gen_toks=4)


@pytest.mark.parametrize(("context", "continuation"), [(0, 3), (4, 3), (20, 3), (3, 10), (3, 11), (3, 37), (0, 0)])
def test_windows_score_each_token_once(context: int, continuation: int):
    given, scored = list(range(context)), list(range(context, context + continuation))
    windows = list(scoring_windows(given, scored, 10))
    assert [token for _, part in windows for token in part] == scored
    for before, part in windows:
        assert len(before) + len(part) <= 10
        assert before == list(range(part[0] - len(before), part[0]))
    if continuation and continuation <= 10:
        assert len(windows) == 1 and len(windows[0][0]) == min(context, 10 - continuation)
    assert [t for w in rolling_windows(scored, 10) for t in w] == scored


def test_loglikelihood_is_the_conditional(small):
    """In the forward order, against enumeration of its steps; the greedy flag against argmax."""
    model, tokenizer = small.model, small.tokenizer
    mask = model.config.mask_token_id
    conditional = conditional_of_network(lambda x: torch.log_softmax(model(x).logits, -1), mask, torch.float32)
    requests = [("the cat", " sat on"), ("", "the dog"), ("the cat sat on the mat", " and")]
    found = small.loglikelihood([instance("loglikelihood", *r) for r in requests], disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(requests, found, strict=True):
        given = tokenizer(context)["input_ids"] if context else []
        ids = tokenizer(context + continuation)["input_ids"]
        ids, positions = ids[-12:], range(len(given) - max(0, len(ids) - 12), min(len(ids), 12))
        assert score == pytest.approx(-order_nll(conditional, ids, list(positions), mask), rel=1e-4)
        assert greedy is False
    canvas = torch.tensor([[*tokenizer("the cat")["input_ids"], mask]])
    best = int(model(canvas).logits[0, -1].argmax())
    given = tokenizer("the cat")["input_ids"]
    assert small._loglikelihood_tokens([(("", ""), given, [best])], disable_tqdm=True)[0][1] is True
    assert small._loglikelihood_tokens([(("", ""), given, [])], disable_tqdm=True) == [(0, True)]


def test_rolling_is_windowed_and_equals_the_perplexity_tool(demo):
    """A text of more than 3,000 tokens, windows of 128: the sum that `dataset_perplexity` gives; never 0."""
    text = (ROOT / "examples" / "data" / "held_out.txt").read_text(encoding="utf-8")[:13_000]
    ids = demo.tok_encode(text)
    assert len(ids) > 3000
    (score,) = demo.loglikelihood_rolling([instance("loglikelihood_rolling", text)], disable_tqdm=True)
    windows = [torch.tensor(window) for window in rolling_windows(ids, demo.max_length)]
    report = dataset_perplexity(demo.model, windows, num_samples=8, batch_size=32, seed=0)
    assert -score == pytest.approx(report.nll, rel=1e-6)
    assert report.num_tokens == len(ids)
    long = instance("loglikelihood", "", text[:1500])
    assert demo.loglikelihood([long], disable_tqdm=True)[0][0] < -500


def test_generation_stops_where_it_is_told(demo):
    options = {"until": ["\n", " the"], "max_gen_toks": 12}
    requests = [instance("generate_until", c, options) for c in ("And he said unto", "I hope", "", "She was not")]
    requests.append(instance("generate_until", "It was", {"until": [], "max_gen_toks": 5, "temperature": 0.7}))
    texts = demo.generate_until(requests, disable_tqdm=True)
    assert len(texts) == 5 and all("\n" not in text and " the" not in text for text in texts[:4])
    assert any(texts)
    assert demo.generate_until(requests, disable_tqdm=True) == texts
    alone = demo.generate_until(requests[:1], disable_tqdm=True)
    assert alone[0] == texts[0]  # greedy: the batch changes nothing
    with pytest.raises(ValueError, match=r"`max_gen_toks` must be in \[1, max_length=128\), got 128"):
        demo.generate_until([instance("generate_until", "a", {"max_gen_toks": 128})], disable_tqdm=True)


def write_tasks(folder: Path) -> list[str]:
    """Three local tasks over one JSON file: a choice of two continuations, rolling perplexity, generation."""
    rows = [
        {"context": "And the LORD said unto", "good": " Moses", "bad": " zebra", "text": "And he said unto him, Go."},
        {"context": "The people of the United", "good": " States", "bad": " whales", "text": "The sea was calm."},
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    common = (
        "dataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {folder / 'rows.jsonl'}\ntest_split: test\nmetadata:\n  version: 1\n"
    )
    metric = "metric_list:\n  - metric: {0}\n    aggregation: {1}\n    higher_is_better: {2}\n"
    tasks = {
        "radd_choice": 'output_type: multiple_choice\ndoc_to_text: "{{context}}"\ndoc_to_target: 0\n'
        'doc_to_choice: "{{[good, bad]}}"\ntarget_delimiter: ""\n' + metric.format("acc", "mean", "true"),
        "radd_rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        + metric.format("word_perplexity", "weighted_perplexity", "false"),
        "radd_text": 'output_type: generate_until\ndoc_to_text: "{{context}}"\ndoc_to_target: "{{good}}"\n'
        'generation_kwargs:\n  until:\n    - "\\n"\n  max_gen_toks: 4\n'
        + metric.format("exact_match", "mean", "true"),
    }
    for name, body in tasks.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{common}{body}", encoding="utf-8")
    return list(tasks)


def test_the_harness_runs_all_three_kinds_of_request(tmp_path: Path):
    tasks = write_tasks(tmp_path)
    arguments = f"pretrained={CHECKPOINT},num_samples=33,seed=1,algorithm=confidence"
    results = lm_eval.simple_evaluate(
        model="radd",
        model_args=arguments,
        tasks=tasks,
        batch_size=16,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path)),
    )
    assert results["results"]["radd_choice"]["acc,none"] == 1.0  # a likely word beats an unlikely one
    assert 10 < results["results"]["radd_rolling"]["word_perplexity,none"] < 1e6
    assert 0 <= results["results"]["radd_text"]["exact_match,none"] <= 1
    assert {"num_samples": 33, "seed": 1, "loss_type": "ao"}.items() <= results["config"].items()
    assert results["config"]["generation_config"]["algorithm"] == "confidence"


def test_a_true_text_beats_a_shuffled_one(demo):
    text = "And the LORD said unto Moses, Go unto Pharaoh, and say unto him, Thus saith the LORD"
    words = text.split()
    shuffled = " ".join(words[i] for i in torch.randperm(len(words), generator=torch.Generator().manual_seed(0)))
    true, mixed = demo.loglikelihood_rolling(
        [instance("loglikelihood_rolling", t) for t in (text, shuffled)], disable_tqdm=True
    )
    assert true > mixed + 5


def test_bad_arguments_are_named(make_model):
    with pytest.raises(ValueError, match="`tokenizer` must be given with a model"):
        RADDEvalLM(make_model())
    with pytest.raises(ValueError, match="`seed` must be an integer, got 'x'"):
        RADDEvalLM(str(CHECKPOINT), seed="x")


def test_results_say_what_they_depend_on(demo):
    found = demo.get_model_info()
    assert {"versions", "revision", "seed", "num_samples", "generation_config"} <= found.keys()
    assert isinstance(demo.model, RADDForMaskedDiffusion) and json.dumps(found, default=str)
