# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Quality of generated text: perplexity under a causal judge, unigram entropy, distinct n-grams, repetition, MAUVE."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from .checks_radd import is_int
from .evaluation import perplexity
from .perplexity import causal_token_nll

DEFAULT_JUDGE = "gpt2-large"  # the paper's
MAX_JUDGED_TOKENS = 1024  # its context


def unigram_entropy(samples: Sequence[Sequence[Hashable]]) -> float:
    """Mean over samples of the entropy of a sample's token frequencies, in nats (the paper's choice of logarithm)."""
    return _mean([_entropy(sample) for sample in _not_empty(samples)])


def _entropy(sample: Sequence[Hashable]) -> float:
    shares = [count / len(sample) for count in Counter(sample).values()]
    return -sum(share * math.log(share) for share in shares)


def distinct_n(samples: Sequence[Sequence[Hashable]], n: int) -> float:
    """Different n-grams of all samples over their number: 1 where none comes twice; NaN without an n-gram."""
    grams = [gram for sample in _not_empty(samples) for gram in _ngrams(sample, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def repetition_rate(samples: Sequence[Sequence[Hashable]], n: int = 4) -> float:
    """Mean over samples of the share of a sample's n-grams it had before: 0 where none comes twice; NaN without."""
    rates = []
    for sample in _not_empty(samples):
        grams = _ngrams(sample, n)
        if grams:
            rates.append(1 - len(set(grams)) / len(grams))
    return _mean(rates)


def _ngrams(sample: Sequence[Hashable], n: int) -> list[tuple]:
    if not is_int(n) or n < 1:
        raise ValueError(f"`n` must be a positive integer, got {n!r}.")
    return [tuple(sample[i : i + n]) for i in range(len(sample) - n + 1)]


def _not_empty(samples: Sequence[Sequence[Hashable]]) -> list[Sequence[Hashable]]:
    found = [sample for sample in samples if len(sample)]
    if not found:
        raise ValueError(f"`samples` must hold a sample with a token, got {len(samples)} samples without.")
    return found


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


@dataclass
class GenerativePerplexity:
    """
    Attributes:
        mean_of_samples (`float`): exp of each sample's mean NLL, then the mean: the paper's code.
        token_level (`float`): exp of the mean NLL of all judged tokens.
        standard_error (`float`): Of `mean_of_samples`, from the spread between samples; NaN from one.
        num_samples, num_tokens (`int`): What was judged: a sample's first token, which has no context, is not, nor is
            a sample of fewer than 2 tokens.
        judge (`str`): Name of the judge.
    """

    mean_of_samples: float
    token_level: float
    standard_error: float
    num_samples: int
    num_tokens: int
    judge: str


def generative_perplexity(
    texts: Sequence[str],
    judge: nn.Module,
    judge_tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
) -> GenerativePerplexity:
    """
    Perplexity of decoded `texts` under a causal language model, which reads them with its own tokenizer.

    Figures of different judges cannot be compared; the paper's are GPT-2 large's.

    Args:
        texts (`Sequence[str]`): Decoded samples.
        judge (`nn.Module`): Any `AutoModelForCausalLM`.
        judge_tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        batch_size (`int`, *optional*, defaults to 8): Samples in one network call, of like length.
        max_length (`int`, *optional*): Tokens judged of a sample, the first ones; defaults to 1024 or the judge's
            context, if that is shorter.

    Raises:
        ValueError: No text of two tokens.
    """
    if max_length is None:
        max_length = min(MAX_JUDGED_TOKENS, getattr(judge.config, "max_position_embeddings", MAX_JUDGED_TOKENS))
    encoded = judge_tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    rows = sorted((torch.tensor(ids[:max_length]) for ids in encoded if len(ids) > 1), key=len)
    if not rows:
        raise ValueError(f"`texts` must hold a text of two tokens or more, got {len(texts)} without.")
    means, total, count = [], 0.0, 0
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        nll = causal_token_nll(judge, nn.utils.rnn.pad_sequence(batch, batch_first=True))
        for row, ids in zip(nll, batch, strict=True):
            cost = float(row[: len(ids) - 1].sum())
            means.append(perplexity(cost / (len(ids) - 1)))
            total, count = total + cost, count + len(ids) - 1
    spread = torch.tensor(means, dtype=torch.float64)
    return GenerativePerplexity(
        mean_of_samples=_mean(means),
        token_level=perplexity(total / count),
        standard_error=float(spread.std()) / math.sqrt(len(means)) if len(means) > 1 else math.nan,
        num_samples=len(means),
        num_tokens=count,
        judge=getattr(judge.config, "_name_or_path", "") or type(judge).__name__,
    )


@dataclass
class GenerationReport:
    """
    What a set of samples is worth and what it cost: no perplexity without entropy, NFE, precision and judge.

    Attributes:
        perplexity ([`GenerativePerplexity`]): Under the judge.
        entropy (`float`): Unigram entropy, nats, of the model's own tokens.
        distinct_1, distinct_2, repetition_4 (`float`): `distinct_n` for n = 1, 2 and `repetition_rate` for n = 4.
        nfe (`float`): Network calls a sample, on average.
        sampling_dtype (`str`): Precision of the categorical draws; low precision lowers entropy and perplexity.
        seconds (`float`): Wall time a sample.
        mauve (`float`, *optional*): Against reference texts.
    """

    perplexity: GenerativePerplexity
    entropy: float
    distinct_1: float
    distinct_2: float
    repetition_4: float
    nfe: float
    sampling_dtype: str
    seconds: float
    mauve: float | None = None

    def to_dict(self) -> dict:
        """A dict that `json.dumps` takes."""
        return asdict(self)


def generation_report(
    sequences: Sequence[Sequence[int]],
    texts: Sequence[str],
    judge: nn.Module,
    judge_tokenizer: PreTrainedTokenizerBase,
    *,
    nfe: float,
    sampling_dtype: str,
    seconds: float,
    references: Sequence[str] | None = None,
    batch_size: int = 8,
) -> GenerationReport:
    """
    All figures of a set of samples.

    Args:
        sequences (`Sequence[Sequence[int]]`): Token ids of each sample.
        texts (`Sequence[str]`): The same samples, decoded.
        judge, judge_tokenizer, batch_size: As in `generative_perplexity`.
        nfe (`float`), sampling_dtype (`str`), seconds (`float`): As in [`GenerationReport`].
        references (`Sequence[str]`, *optional*): Human texts, for MAUVE.
    """
    return GenerationReport(
        perplexity=generative_perplexity(texts, judge, judge_tokenizer, batch_size=batch_size),
        entropy=unigram_entropy(sequences),
        distinct_1=distinct_n(sequences, 1),
        distinct_2=distinct_n(sequences, 2),
        repetition_4=repetition_rate(sequences, 4),
        nfe=float(nfe),
        sampling_dtype=sampling_dtype,
        seconds=float(seconds),
        mauve=None if references is None else mauve_score(texts, references),
    )


def mauve_score(texts: Sequence[str], references: Sequence[str], **options) -> float:
    """MAUVE of `texts` against `references`, in [0, 1], by the package mauve-text; `options` are its own."""
    try:
        import mauve
    except ImportError as error:
        raise ImportError("MAUVE needs `pip install mauve-text`.") from error
    return float(mauve.compute_mauve(p_text=list(references), q_text=list(texts), verbose=False, **options).mauve)


def load_metric(name: str):
    """
    One of the figures as an `evaluate.Metric`: `load_metric("generative_perplexity").compute(predictions=texts)`.

    "generative_perplexity" takes texts (and `judge`, a model name, `batch_size`); "unigram_entropy", "distinct_n"
    (`n`) and "repetition_rate" (`n`) take texts, split at white space or, with `tokenizer`, into its tokens.

    Raises:
        ValueError: An unknown `name`. ImportError: Without the package evaluate.
    """
    if name not in _METRICS:
        raise ValueError(f"`name` must be one of {list(_METRICS)}, got {name!r}.")
    try:
        import datasets
        import evaluate
    except ImportError as error:
        raise ImportError("`load_metric` needs `pip install evaluate`.") from error

    class Metric(evaluate.Metric):
        def _info(self):
            return evaluate.MetricInfo(
                description=_METRICS[name].__doc__,
                citation="",
                inputs_description="`predictions`: a list of texts.",
                features=datasets.Features({"predictions": datasets.Value("string")}),
            )

        def _compute(self, predictions, **options):
            return _METRICS[name](predictions, **options)

    return Metric(experiment_id=name)


def _judged(texts: list[str], judge: str = DEFAULT_JUDGE, **options) -> dict:
    """`generative_perplexity`, the judge by its name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    return asdict(generative_perplexity(texts, model.eval(), tokenizer, **options))


def _tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase | None) -> list[list]:
    if tokenizer is None:
        return [text.split() for text in texts]
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _entropy_metric(texts: list[str], tokenizer: PreTrainedTokenizerBase | None = None) -> dict:
    """`unigram_entropy`, nats."""
    return {"unigram_entropy": unigram_entropy(_tokens(texts, tokenizer))}


def _distinct_metric(texts: list[str], n: int = 2, tokenizer: PreTrainedTokenizerBase | None = None) -> dict:
    """`distinct_n`."""
    return {f"distinct_{n}": distinct_n(_tokens(texts, tokenizer), n)}


def _repetition_metric(texts: list[str], n: int = 4, tokenizer: PreTrainedTokenizerBase | None = None) -> dict:
    """`repetition_rate`."""
    return {f"repetition_{n}": repetition_rate(_tokens(texts, tokenizer), n)}


_METRICS = {
    "generative_perplexity": _judged,
    "unigram_entropy": _entropy_metric,
    "distinct_n": _distinct_metric,
    "repetition_rate": _repetition_metric,
}
