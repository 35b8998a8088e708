# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Likelihood of given texts: the bound by Monte Carlo with its standard error, and exact order NLLs.

Shapes: B sequences, L positions of the batch, K network rows of a sequence.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.utils import logging

from .checks_radd import check_token_ids, is_int, is_number, resolve_mask_token_id
from .generation_radd import evaluation_mode
from .likelihood import SequenceBound, order_request, run_rows
from .losses import LOSS_TYPES, maskable_positions, model_config
from .noise_schedule_radd import NoiseSchedule, get_noise_schedule
from .token_draw_radd import row_generators

EXACT_ORDERS = ("forward", "backward", "random")
# Sequences are run together until their masks hold this many positions (8 bytes each, a few times over).
_MAX_POSITIONS = 2**22
# A standard error that decides when to stop must come from this many rows at least (15 groups).
_MIN_ROWS_FOR_TARGET = 32


@dataclass
class LikelihoodEstimate:
    """
    Attributes:
        nll (`torch.Tensor` of shape `(B,)`): Negative log-likelihood, or its bound, in nats per sequence, float64.
        standard_error (`torch.Tensor` of shape `(B,)`): Monte Carlo error of `nll`; 0 for an exact order, NaN from
            one draw. For "lambda_dce", "dse" and "t_dce" the variance is infinite in theory: the figure is indicative.
        num_tokens (`torch.LongTensor` of shape `(B,)`): Scored tokens.
        num_rows (`torch.LongTensor` of shape `(B,)`): Rows run through the network for each sequence.
        token_nll (`torch.Tensor` of shape `(B, L)`, *optional*): Each token's share of `nll`, nats, float64; 0 at
            context and padding. For an order, its exact conditional NLL; for the bound, an unbiased estimate of its
            mean cost over all orders.
    """

    nll: torch.Tensor
    standard_error: torch.Tensor
    num_tokens: torch.LongTensor
    num_rows: torch.LongTensor
    token_nll: torch.Tensor | None = None

    @property
    def nfe(self) -> int:
        """Rows run through the network, a sequence; the most where sequences differ."""
        return int(self.num_rows.max()) if len(self.num_rows) else 0

    @property
    def nll_per_token(self) -> float:
        """Nats per token over the whole call."""
        return float(self.nll.sum() / self.num_tokens.sum())

    @property
    def nll_per_token_standard_error(self) -> float:
        """Monte Carlo error of `nll_per_token` for these sequences (not the spread between sequences)."""
        return float(self.standard_error.square().sum().sqrt() / self.num_tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp of the nats per token."""
        return perplexity(self.nll_per_token)

    @property
    def bits_per_token(self) -> float:
        """The nats per token in bits."""
        return self.nll_per_token / math.log(2)

    def bits_per(self, count: int) -> float:
        """Bits of the whole call over `count` of something else, such as bytes or words of the text; NaN over none."""
        return float(self.nll.sum()) / math.log(2) / count if count else math.nan

    def perplexity_per(self, count: int) -> float:
        """Perplexity over `count` of something else, such as words: 2 to the power of `bits_per(count)`."""
        return perplexity(self.bits_per(count) * math.log(2))


def perplexity(nll_per_token: float) -> float:
    """exp of nats per token; infinity where that is more than a float holds."""
    return float(torch.tensor(nll_per_token, dtype=torch.float64).exp())


@torch.no_grad()
def estimate_likelihood(
    model: nn.Module,
    input_ids: torch.LongTensor,
    *,
    loss_type: str = "ao",
    num_samples: int = 128,
    attention_mask: torch.Tensor | None = None,
    loss_mask: torch.Tensor | None = None,
    order: torch.LongTensor | Sequence[int] | None = None,
    target_standard_error: float | None = None,
    max_num_samples: int = 65536,
    return_token_nll: bool = False,
    noise_schedule: NoiseSchedule | str | None = None,
    mask_token_id: int | None = None,
    batch_size: int = 64,
    generator: torch.Generator | None = None,
    seed: int | list[int] | None = None,
) -> LikelihoodEstimate:
    """
    -log p of each sequence: an unbiased estimate of the bound, or the exact NLL of one order.

    The default "ao" has stratified importance draws of k, masks that share out the tokens and a control variate (see
    `radd_hf.likelihood`); the other losses are stratified. The spread of independent groups of draws gives the
    standard error, itself uncertain by about 1 / sqrt(2 G) from G groups (G = 31 for the default). Each sequence
    has its own random numbers, and padding is cut off before they are used, so neither the batch it comes in nor
    `batch_size` nor padding changes its value beyond rounding.

    Scoring any subset given any other: `loss_mask` False at given tokens; at positions that are to be absent (a
    marginal) put the mask token and `loss_mask` False.

    Args:
        model (`nn.Module`): A masked language model; dropout is off during the call.
        input_ids (`torch.LongTensor` of shape `(B, L)`): Clean tokens.
        loss_type (`str`, *optional*, defaults to `"ao"`):
            "ao" (lowest variance), "lambda_dce", "dse" or "t_dce": the bound. The last two cover lambda in
            [lambda(0), lambda(1)] of the schedule only and leave out the share lambda(0) + 1 - lambda(1) of its range
            (log-linear noise: eps). "forward", "backward", "random": the exact NLL of that order, at one network row a
            scored token.
        num_samples (`int`, *optional*, defaults to 128): Network rows K a sequence; unused for an order.
        attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding.
        loss_mask (`torch.Tensor` of shape `(B, L)`, *optional*): False at context that is given, not scored.
        order (`torch.LongTensor` of shape `(L,)` or `(B, L)`, or `list[int]`, *optional*): Positions, first
            revealed first: the exact NLL of this order. Each scored position once; others are skipped.
        target_standard_error (`float`, *optional*): Nats per sequence. After the first `num_samples` rows, 32 at
            least, each sequence gets more until its standard error is at most this, with a progress bar. The time to
            stop depends on the draws, which for a skewed spread biases the estimate by a small part of the target.
        max_num_samples (`int`, *optional*, defaults to 65,536): Rows a sequence at which to give up, with a warning.
        return_token_nll (`bool`, *optional*, defaults to `False`): Also `token_nll`, whose rows sum to `nll`.
        noise_schedule (`NoiseSchedule` or `str`, *optional*): For "dse" and "t_dce"; defaults to the config's.
        mask_token_id (`int`, *optional*): Defaults to the model config's.
        batch_size (`int`, *optional*, defaults to 64): Rows in one network call, of any sequences.
        generator, seed (*optional*): As in `diffusion_generate`.

    Returns:
        [`LikelihoodEstimate`]

    Raises:
        ValueError: An unknown `loss_type`, a non-positive number, ids outside the vocabulary, a mask token where a
            token is to be scored, an `order` that is not one of the scored positions.
    """
    _check_arguments(loss_type, target_standard_error, num_samples, batch_size, max_num_samples)
    config = model_config(model)
    mask_token_id = resolve_mask_token_id(mask_token_id, config)
    check_token_ids(input_ids, config.vocab_size)
    scored = maskable_positions(input_ids, attention_mask, loss_mask).cpu()
    real = maskable_positions(input_ids, attention_mask, None).cpu()
    input_ids = input_ids.cpu()
    if bool((scored & (input_ids == mask_token_id)).any()):
        raise ValueError(f"`input_ids` must be clean text where it is scored, got mask tokens (id {mask_token_id}).")
    orders = None if order is None else _given_orders(order, scored, real, loss_type)
    schedule = None  # a masked language model of another kind has none, and "ao" and "lambda_dce" need none
    if loss_type in ("dse", "t_dce") or noise_schedule is not None:
        schedule = get_noise_schedule(config if noise_schedule is None else noise_schedule)
    generators = row_generators(len(input_ids), seed, generator, torch.device("cpu"))
    sequences = [(ids[keep], some[keep]) for ids, some, keep in zip(input_ids, scored, real, strict=True)]
    options = {"mask_token_id": mask_token_id, "batch_size": batch_size}
    with evaluation_mode(model):
        if orders is not None or loss_type in EXACT_ORDERS:
            if orders is None:
                draws = zip(sequences, generators, strict=True)
                orders = [_named_order(some, loss_type, source) for (_, some), source in draws]
            results = list(_score_orders(model, sequences, orders, **options))
        else:
            draws = zip(sequences, generators, strict=True)
            bounds = [SequenceBound(ids, some, loss_type, schedule, source) for (ids, some), source in draws]
            results = list(
                _score_bounds(model, bounds, num_samples, target_standard_error, max_num_samples, **options)
            )
    token_nll = torch.zeros(input_ids.shape, dtype=torch.float64)
    for row, keep, (values, _, _) in zip(token_nll, real, results, strict=True):
        row[keep] = values
    return LikelihoodEstimate(
        nll=token_nll.sum(-1),
        standard_error=torch.tensor([error for _, error, _ in results], dtype=torch.float64),
        num_tokens=scored.sum(-1),
        num_rows=torch.tensor([rows for _, _, rows in results], dtype=torch.long),
        token_nll=token_nll if return_token_nll else None,
    )


def _check_arguments(loss_type: str, target_standard_error: float | None, *numbers: int):
    if loss_type not in (*LOSS_TYPES, *EXACT_ORDERS):
        raise ValueError(f"`loss_type` must be one of {[*LOSS_TYPES, *EXACT_ORDERS]}, got {loss_type!r}.")
    for name, value in zip(("num_samples", "batch_size", "max_num_samples"), numbers, strict=True):
        if not is_int(value) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
    if target_standard_error is not None and not (is_number(target_standard_error) and target_standard_error > 0):
        raise ValueError(f"`target_standard_error` must be a positive number, got {target_standard_error!r}.")


def _given_orders(
    order: torch.LongTensor | Sequence[int], scored: torch.BoolTensor, real: torch.BoolTensor, loss_type: str
) -> list[torch.LongTensor]:
    """The scored positions of each row in the order given, counted among the row's real tokens."""
    if loss_type != "ao":
        raise ValueError(f"`order` asks for the NLL of one order: leave `loss_type` at 'ao', got {loss_type!r}.")
    order = torch.as_tensor(order).cpu()
    if order.dtype not in (torch.int64, torch.int32) or order.dim() not in (1, 2) or len(order) == 0:
        raise ValueError(f"`order` must list positions, (L,) or (B, L), got {tuple(order.shape)} of {order.dtype}.")
    if order.dim() == 2 and len(order) != len(scored):
        raise ValueError(f"`order` must have one row a sequence, {len(scored)}, got {len(order)}.")
    if int(order.min()) < 0 or int(order.max()) >= scored.shape[1]:
        raise ValueError(f"`order` must hold positions in [0, {scored.shape[1]}), got {order.flatten()[:8].tolist()}.")
    orders = []
    for row, some, keep in zip(order.expand(len(scored), -1), scored, real, strict=True):
        row = row[some[row]]
        if not torch.equal(row.sort().values, some.nonzero()[:, 0]):
            raise ValueError(f"`order` must hold each scored position once, got {row[:8].tolist()} of those.")
        orders.append((keep.cumsum(-1) - 1)[row])
    return orders


def _named_order(scored: torch.BoolTensor, name: str, generator: torch.Generator) -> torch.LongTensor:
    """The scored positions "forward", "backward" or in "random" order."""
    positions = scored.nonzero()[:, 0]
    if name == "random":
        return positions[torch.randperm(len(positions), generator=generator, device=generator.device).cpu()]
    return positions if name == "forward" else positions.flip(0)


def _chunks(items: list, shapes: list[tuple[int, int]]) -> Iterator[list]:
    """Runs of `items`, whose masks have `shapes` (rows, length), of at most `_MAX_POSITIONS` padded; one at least."""
    chunk, rows, longest = [], 0, 0
    for item, (more, length) in zip(items, shapes, strict=True):
        if chunk and (rows + more) * max(longest, length) > _MAX_POSITIONS:
            yield chunk
            chunk, rows, longest = [], 0, 0
        chunk.append(item)
        rows, longest = rows + more, max(longest, length)
    if chunk:
        yield chunk


def _score_orders(
    model: nn.Module, sequences: list[tuple], orders: list[torch.LongTensor], **options: int
) -> Iterator[tuple[torch.Tensor, float, int]]:
    """Token scores (L,), no error, and the number of rows, a sequence."""
    pairs = [(ids, order) for (ids, _), order in zip(sequences, orders, strict=True)]
    for chunk in _chunks(pairs, [(len(order), len(ids)) for ids, order in pairs]):
        requests = [order_request(ids, order) for ids, order in chunk]
        for nll in run_rows(model, requests, **options):
            yield nll.sum(0), 0.0, len(nll)


def _score_bounds(
    model: nn.Module,
    bounds: list[SequenceBound],
    num_samples: int,
    target: float | None,
    max_num_samples: int,
    **options: int,
) -> Iterator[tuple[torch.Tensor, float, int]]:
    """Token scores (L,), the standard error, and the number of rows, a sequence."""
    if target is not None:
        num_samples = min(max(num_samples, _MIN_ROWS_FOR_TARGET), max_num_samples)
    bar = logging.tqdm(
        total=len(bounds), desc="sequences at the target error", disable=True if target is None else None
    )
    for chunk in _chunks(bounds, [(num_samples, len(bound.ids)) for bound in bounds]):
        waiting = [(bound, num_samples) for bound in chunk]
        while waiting:
            requests = [bound.request(num_rows) for bound, num_rows in waiting]
            for (bound, _), nll in zip(waiting, run_rows(model, requests, **options), strict=True):
                bound.add(nll)
            if target is None:
                break
            more = [(bound, _rows_to_go(bound, target, max_num_samples)) for bound, _ in waiting]
            waiting = [(bound, num_rows) for bound, num_rows in more if num_rows]
            bar.update(len(more) - len(waiting))
        for bound in chunk:
            yield *bound.estimate(), bound.num_rows
    bar.close()


def _rows_to_go(bound: SequenceBound, target: float, max_num_samples: int) -> int:
    """Further rows that should bring the standard error to `target`, with 5 % to spare; at most thrice the present."""
    error = bound.estimate()[1]
    if error <= target:
        return 0
    if bound.num_rows >= max_num_samples:
        warnings.warn(
            f"After `max_num_samples`={max_num_samples} rows the standard error of a sequence is {error:.3g} nats, "
            f"above `target_standard_error`={target}.",
            stacklevel=4,
        )
        return 0
    growth = min(1.05 * (error / target) ** 2 - 1, 3.0)
    return min(max(math.ceil(growth * bound.num_rows), _MIN_ROWS_FOR_TARGET), max_num_samples - bound.num_rows)
