# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Perplexity of a data set, by a masked diffusion model or (the control row) by a causal language model.

Shapes: B sequences, L positions, V vocabulary.
"""

import itertools
import math
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn
from transformers.utils import logging

from .checks_radd import is_int
from .evaluation import estimate_likelihood, perplexity
from .generation_radd import evaluation_mode
from .losses import model_config
from .token_draw_radd import mix_seed

NORMAL_95 = 1.959964  # two-sided 95 % point of the normal distribution
_PACKAGES = ("radd_hf", "torch", "transformers", "accelerate", "tokenizers", "datasets", "numpy")


@dataclass
class PerplexityReport:
    """
    What a data set costs, and everything needed to run it again.

    Attributes:
        nll (`float`): Nats of all scored tokens together: the bound, an exact order NLL, or a causal model's NLL.
        num_sequences, num_tokens (`int`): What was scored.
        num_bytes, num_words (`int`, *optional*): Of the scored text, UTF-8 and split at white space.
        nll_per_token, perplexity, bits_per_token (`float`): nll over `num_tokens`, its exp, and in bits.
        bits_per_byte, word_perplexity (`float`, *optional*): The same nats over `num_bytes` and over `num_words`.
        monte_carlo_error (`float`): Standard error of `nll_per_token` from the draws, for these very sequences.
        confidence_interval (`tuple[float, float]`): 95 % for `nll_per_token` of the text these sequences are a sample
            of: from the spread between sequences, draws included. NaN from one sequence.
        nfe (`float`): Network rows a sequence, on average.
        seconds (`float`): Wall time of the scoring.
        settings (`dict`): Arguments, model, versions and device.
    """

    nll: float
    num_sequences: int
    num_tokens: int
    nll_per_token: float
    monte_carlo_error: float
    confidence_interval: tuple[float, float]
    perplexity: float
    bits_per_token: float
    num_bytes: int | None
    num_words: int | None
    bits_per_byte: float | None
    word_perplexity: float | None
    nfe: float
    seconds: float
    settings: dict

    def to_dict(self) -> dict:
        """A dict that `json.dumps` takes."""
        return asdict(self)


@dataclass
class _Score:
    """Nats of a sequence, its error squared, scored tokens, network rows."""

    nll: float
    variance: float
    num_tokens: int
    num_rows: int


def dataset_perplexity(
    model: nn.Module,
    sequences: Iterable[torch.Tensor | Mapping[str, torch.Tensor]],
    *,
    loss_type: str = "ao",
    num_samples: int = 128,
    batch_size: int = 64,
    seed: int = 0,
    num_bytes: int | None = None,
    num_words: int | None = None,
    sequences_at_once: int = 64,
    mask_token_id: int | None = None,
    settings: Mapping | None = None,
) -> PerplexityReport:
    """
    NLL of a data set under a masked diffusion model, streamed, batched and shared by the processes of a group.

    Where `torch.distributed` runs (accelerate and torchrun start it), the processes take turns at runs of
    `sequences_at_once` sequences (give each process all of them); sequence i draws from (`seed`, i) whichever process
    scores it, so the report does not depend on their number.

    Args:
        model (`nn.Module`): A masked language model, on the device it is to run on.
        sequences (iterable): Token ids (L,) each, or dicts of `input_ids` and optionally `attention_mask` and
            `loss_mask`, all (L,). Read once; lengths may differ.
        loss_type, num_samples, batch_size, mask_token_id: As in `estimate_likelihood`.
        seed (`int`, *optional*, defaults to 0): Of all draws.
        num_bytes, num_words (`int`, *optional*): Of the scored text, for the figures per byte and per word.
        sequences_at_once (`int`, *optional*, defaults to 64): Sequences whose draws are batched together.
        settings (`Mapping`, *optional*): Added to the report's `settings`.

    Returns:
        [`PerplexityReport`], the same in every process.

    Raises:
        ValueError: No sequence, no scored token, a `seed` that is not an integer.
    """
    if not is_int(seed):
        raise ValueError(f"`seed` must be an integer, got {seed!r}.")
    options = {"loss_type": loss_type, "num_samples": num_samples, "batch_size": batch_size}

    def score(rows: list[dict[str, torch.Tensor]], first: int) -> list[_Score]:
        batch = {name: nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]}
        seeds = [mix_seed(seed, first + i) for i in range(len(rows))]
        found = estimate_likelihood(model, **batch, **options, seed=seeds, mask_token_id=mask_token_id)
        error = found.standard_error.square()
        columns = (found.nll, error, found.num_tokens, found.num_rows)
        return [_Score(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    described = {**options, "seed": seed, "sequences_at_once": sequences_at_once, **run_settings(model)}
    return _report(
        (_with_masks(row) for row in sequences), score, sequences_at_once, num_bytes, num_words, described, settings
    )


def causal_perplexity(
    model: nn.Module,
    sequences: Iterable[torch.Tensor | Mapping[str, torch.Tensor]],
    *,
    stride: int | None = None,
    window: int | None = None,
    bos_token_id: int | None = None,
    batch_size: int = 8,
    num_bytes: int | None = None,
    num_words: int | None = None,
    settings: Mapping | None = None,
) -> PerplexityReport:
    """
    The control row: the same sequences under a causal language model, so that errors of the data show by themselves.

    Args:
        model (`nn.Module`): Any `AutoModelForCausalLM`.
        sequences (iterable): As in `dataset_perplexity`.
        stride (`int`, *optional*):
            None: fixed blocks; a token sees what comes before it in its own sequence. A number: all sequences are one
            text, read in windows of `window` tokens that move on by `stride`; a token is scored in the first window
            that reaches it, so it sees at least `window` - `stride` tokens before it.
        window (`int`, *optional*): Of the sliding window; defaults to the config's `max_position_embeddings`.
        bos_token_id (`int`, *optional*): Put before each block (or before the text), so that its first token is scored
            too; without it the first token costs nothing and is not counted.
        batch_size (`int`, *optional*, defaults to 8): Blocks or windows in one network call.
        num_bytes, num_words, settings: As in `dataset_perplexity`.

    Returns:
        [`PerplexityReport`]; its "sequences" are blocks or windows.

    Raises:
        ValueError: No scored token, or a `stride` outside [1, `window`].
    """
    config = model_config(model)
    rows: Iterable[dict[str, torch.Tensor]] = (_with_masks(row) for row in sequences)
    if stride is not None:
        window = window or config.max_position_embeddings
        if not is_int(stride) or not 1 <= stride <= window:
            raise ValueError(f"`stride` must be an integer in [1, window={window}], got {stride!r}.")
        text = torch.cat([row["input_ids"][row["attention_mask"].bool()] for row in rows])
        rows = _windows(text if bos_token_id is None else _prepend(text, bos_token_id), window, stride)
    elif bos_token_id is not None:
        rows = (
            {
                "input_ids": _prepend(row["input_ids"], bos_token_id),
                "attention_mask": _prepend(row["attention_mask"], 1),
                "loss_mask": _prepend(row["loss_mask"], 0),
            }
            for row in rows
        )

    def score(batch: list[dict[str, torch.Tensor]], first: int) -> list[_Score]:
        # padding on the right: what comes later is invisible to a causal model
        kept = [row["attention_mask"].bool() for row in batch]
        ids = nn.utils.rnn.pad_sequence(
            [row["input_ids"][keep] for row, keep in zip(batch, kept, strict=True)], batch_first=True
        )
        scored = nn.utils.rnn.pad_sequence(
            [row["loss_mask"][keep].bool() for row, keep in zip(batch, kept, strict=True)], batch_first=True
        )
        nll = causal_token_nll(model, ids) * scored[:, 1:]
        return [
            _Score(float(cost), 0.0, int(count), 1)
            for cost, count in zip(nll.sum(-1), scored[:, 1:].sum(-1), strict=True)
        ]

    described = {"stride": stride, "window": window if stride else None, "bos_token_id": bos_token_id}
    described |= {"batch_size": batch_size, "loss_type": "causal", **run_settings(model)}
    return _report(rows, score, batch_size, num_bytes, num_words, described, settings)


@torch.no_grad()
def causal_token_nll(model: nn.Module, input_ids: torch.LongTensor) -> torch.Tensor:
    """-log p(x^i | x^<i) of a causal model for i >= 1, (B, L - 1), nats, float64 on the CPU."""
    device = next(model.parameters()).device
    with evaluation_mode(model):
        logits = model(input_ids=input_ids.to(device)).logits[:, :-1].float()
    nll = nn.functional.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:].to(device), reduction="none")
    return nll.double().cpu()


def _prepend(row: torch.Tensor, value: int) -> torch.Tensor:
    return torch.cat([row.new_tensor([value]), row])


def _windows(text: torch.LongTensor, window: int, stride: int) -> Iterator[dict[str, torch.Tensor]]:
    """Windows of `text` (T,) that move on by `stride`; `loss_mask` is True where no window before reached."""
    reached = 1  # the first token has nothing before it
    for start in range(0, max(len(text), 1), stride):
        end = min(start + window, len(text))
        ids = text[start:end]
        yield {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "loss_mask": torch.arange(start, end) >= reached,
        }
        reached = end
        if end == len(text):
            break


def _with_masks(row: torch.Tensor | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask` and `loss_mask` of one sequence, each (L,)."""
    row = row if isinstance(row, Mapping) else {"input_ids": row}
    ids = torch.as_tensor(row["input_ids"]).long()
    masks = {name: torch.as_tensor(row.get(name, torch.ones_like(ids))) for name in ("attention_mask", "loss_mask")}
    for name, mask in masks.items():
        if ids.dim() != 1 or mask.shape != ids.shape:
            raise ValueError(f"`{name}` must have the shape (L,) of `input_ids`, got {mask.shape} and {ids.shape}.")
    return {"input_ids": ids, "attention_mask": masks["attention_mask"], "loss_mask": masks["loss_mask"].bool()}


def _report(
    rows: Iterable[dict[str, torch.Tensor]],
    score,
    at_once: int,
    num_bytes: int | None,
    num_words: int | None,
    described: dict,
    settings: Mapping | None,
) -> PerplexityReport:
    """Score runs of `at_once` rows in turn with the other processes, gather, and sum in the order of the rows."""
    if not is_int(at_once) or at_once < 1:
        raise ValueError(f"Sequences at once must be a positive integer, got {at_once!r}.")
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if group else (0, 1)
    start, own = time.perf_counter(), {}
    rows = iter(rows)
    with logging.tqdm(desc="sequences", disable=None if rank == 0 else True) as bar:
        for turn in itertools.count():
            chunk = list(itertools.islice(rows, at_once))
            if not chunk:
                break
            if turn % world == rank:
                own[turn] = score(chunk, turn * at_once)
            bar.update(len(chunk))
    parts = [own]
    if group:
        parts = [None] * world
        torch.distributed.all_gather_object(parts, own)
    merged = {turn: scores for part in parts for turn, scores in part.items()}
    scores = [one for turn in sorted(merged) for one in merged[turn]]
    seconds = time.perf_counter() - start
    return summarize(scores, num_bytes, num_words, seconds, {**described, "processes": world, **(settings or {})})


def summarize(
    scores: list[_Score], num_bytes: int | None, num_words: int | None, seconds: float, settings: dict
) -> PerplexityReport:
    """The figures of `PerplexityReport` from the scores of its sequences."""
    num_tokens = sum(one.num_tokens for one in scores)
    if not num_tokens:
        raise ValueError(f"`sequences` must hold a token to score, got {len(scores)} sequences without one.")
    nll = math.fsum(one.nll for one in scores)
    mean = nll / num_tokens
    # ratio estimator of nats over tokens; sequences are the independent units
    spread = math.fsum((one.nll - mean * one.num_tokens) ** 2 for one in scores)
    count = len(scores)
    error = math.sqrt(spread * count / (count - 1)) / num_tokens if count > 1 else math.nan
    return PerplexityReport(
        nll=nll,
        num_sequences=count,
        num_tokens=num_tokens,
        nll_per_token=mean,
        monte_carlo_error=math.sqrt(math.fsum(one.variance for one in scores)) / num_tokens,
        confidence_interval=(mean - NORMAL_95 * error, mean + NORMAL_95 * error),
        perplexity=perplexity(mean),
        bits_per_token=mean / math.log(2),
        num_bytes=num_bytes,
        num_words=num_words,
        bits_per_byte=nll / math.log(2) / num_bytes if num_bytes else None,
        word_perplexity=perplexity(nll / num_words) if num_words else None,
        nfe=sum(one.num_rows for one in scores) / count,
        seconds=seconds,
        settings=settings,
    )


def run_settings(model: nn.Module) -> dict:
    """The model (name, revision, dtype, device, parameters) and the versions that a run depends on."""
    config = model_config(model)
    parameter = next(model.parameters(), None)
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "model": getattr(config, "_name_or_path", None) or type(model).__name__,
        "revision": getattr(config, "_commit_hash", None),
        "dtype": None if parameter is None else str(parameter.dtype).removeprefix("torch."),
        "device": None if parameter is None else str(parameter.device),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "versions": versions,
        "code_commit": _code_commit(),
    }


def _code_commit() -> str | None:
    """The git commit of this code, "-dirty" where files differ from it; None outside a checkout of radd_hf."""
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return None
    command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
