# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Likelihood of given texts: the bound by Monte Carlo with its standard error, and exact order NLLs.

Shapes: B sequences, L maskable positions of a sequence, K draws.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from .checks_radd import check_token_ids, is_int, resolve_mask_token_id
from .generation_radd import evaluation_mode
from .losses import (
    LOSS_TYPES,
    Corruption,
    corrupt,
    maskable_positions,
    masked_token_nll,
    model_config,
    sum_over_masked,
    weigh,
)
from .noise_schedule_radd import NoiseSchedule, get_noise_schedule
from .token_draw_radd import row_generators

EXACT_ORDERS = ("forward", "backward", "random")
# Independent stratified groups from whose spread the standard error is taken.
_NUM_GROUPS = 16


@dataclass
class LikelihoodEstimate:
    """
    Attributes:
        nll (`torch.Tensor` of shape `(B,)`): Negative log-likelihood, or its bound, in nats per sequence, float64.
        standard_error (`torch.Tensor` of shape `(B,)`): Monte Carlo error of `nll`; 0 for an exact order, NaN from
            one draw. For "lambda_dce", "dse" and "t_dce" the variance is infinite in theory: the figure is indicative.
        num_tokens (`torch.LongTensor` of shape `(B,)`): Scored tokens.
        nfe (`int`): Rows run through the network, a sequence.
    """

    nll: torch.Tensor
    standard_error: torch.Tensor
    num_tokens: torch.LongTensor
    nfe: int

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
    noise_schedule: NoiseSchedule | str | None = None,
    mask_token_id: int | None = None,
    batch_size: int = 64,
    generator: torch.Generator | None = None,
    seed: int | list[int] | None = None,
) -> LikelihoodEstimate:
    """
    -log p of each sequence: an unbiased estimate of the bound, or the exact NLL of one order.

    Each sequence is run by itself, without padding, with its own random numbers, so neither the batch it comes in nor
    `batch_size` changes its value beyond rounding. Draws are stratified inside groups; the spread of the groups' means
    gives the standard error.

    Args:
        model (`nn.Module`): A masked language model; dropout is off during the call.
        input_ids (`torch.LongTensor` of shape `(B, L)`): Clean tokens.
        loss_type (`str`, *optional*, defaults to `"ao"`):
            "ao" (lowest variance), "lambda_dce", "dse" or "t_dce": the bound. The last two cover lambda in
            [lambda(0), lambda(1)] of the schedule only: for log-linear noise with eps they miss a share eps of the
            range. "forward", "backward", "random": the exact NLL of that order, at L network rows a sequence.
        num_samples (`int`, *optional*, defaults to 128): Draws K a sequence (network rows); unused for an order.
        attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding.
        loss_mask (`torch.Tensor` of shape `(B, L)`, *optional*): False at context that is given, not scored.
        noise_schedule (`NoiseSchedule` or `str`, *optional*): For "dse" and "t_dce"; defaults to the config's.
        mask_token_id (`int`, *optional*): Defaults to the model config's.
        batch_size (`int`, *optional*, defaults to 64): Rows in one network call.
        generator, seed (*optional*): As in `diffusion_generate`.

    Returns:
        [`LikelihoodEstimate`]

    Raises:
        ValueError: An unknown `loss_type`, a non-positive `num_samples` or `batch_size`, ids outside the vocabulary.
    """
    if loss_type not in (*LOSS_TYPES, *EXACT_ORDERS):
        raise ValueError(f"`loss_type` must be one of {[*LOSS_TYPES, *EXACT_ORDERS]}, got {loss_type!r}.")
    for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
        if not is_int(value) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
    config = model_config(model)
    mask_token_id = resolve_mask_token_id(mask_token_id, config)
    check_token_ids(input_ids, config.vocab_size)
    maskable = maskable_positions(input_ids, attention_mask, loss_mask)
    real = maskable_positions(input_ids, attention_mask, None)
    if bool((maskable & (input_ids == mask_token_id)).any()):
        raise ValueError(f"`input_ids` must be clean text where it is scored, got mask tokens (id {mask_token_id}).")
    schedule = get_noise_schedule(config if noise_schedule is None else noise_schedule)
    generators = row_generators(len(input_ids), seed, generator, torch.device("cpu"))
    nll, error = [], []
    with evaluation_mode(model):
        for row, source in enumerate(generators):
            ids, scored = input_ids[row, real[row]][None], maskable[row, real[row]][None]
            if not bool(scored.any()):
                value = (0.0, 0.0)
            elif loss_type in EXACT_ORDERS:
                value = (_order_nll(model, ids, scored, loss_type, mask_token_id, batch_size, source), 0.0)
            else:
                sizes = _group_sizes(num_samples)
                groups = [
                    corrupt(
                        ids.expand(size, -1),
                        loss_type,
                        mask_token_id,
                        scored.expand(size, -1),
                        noise_schedule=schedule,
                        time_eps=0.0,
                        generator=source,
                    )
                    for size in sizes
                ]
                value = _mean_and_error(_weighted_losses(model, ids, groups, loss_type, schedule, batch_size), sizes)
            nll.append(value[0])
            error.append(value[1])
    nfe = int(maskable.sum(-1).max()) if loss_type in EXACT_ORDERS and len(maskable) else num_samples
    return LikelihoodEstimate(
        nll=torch.tensor(nll, dtype=torch.float64),
        standard_error=torch.tensor(error, dtype=torch.float64),
        num_tokens=maskable.sum(-1).cpu(),
        nfe=nfe,
    )


def _group_sizes(num_samples: int) -> list[int]:
    groups = min(_NUM_GROUPS, num_samples)
    return [num_samples // groups + (i < num_samples % groups) for i in range(groups)]


def _mean_and_error(losses: torch.Tensor, sizes: list[int]) -> tuple[float, float]:
    """Mean of the group means of draws (K,), and its standard error; NaN from a single group."""
    means = torch.stack([part.mean() for part in losses.split(sizes)])
    error = float(means.std() / math.sqrt(len(means))) if len(means) > 1 else float("nan")
    return float(means.mean()), error


def _weighted_losses(
    model: nn.Module,
    ids: torch.LongTensor,
    groups: list[Corruption],
    loss_type: str,
    schedule: NoiseSchedule,
    batch_size: int,
) -> torch.Tensor:
    """The loss (K,), float64, of all draws of one sequence (1, L)."""
    noisy_ids, masked = torch.cat([g.noisy_ids for g in groups]), torch.cat([g.masked for g in groups])
    nll = [
        sum_over_masked(masked_token_nll(model, ids.expand(len(x), -1), x, m).double(), m)
        for x, m in zip(noisy_ids.split(batch_size), masked.split(batch_size), strict=True)
    ]
    level, length = torch.cat([g.level for g in groups]), torch.cat([g.length for g in groups])
    return weigh(torch.cat(nll), Corruption(noisy_ids, masked, level, length), loss_type, schedule).cpu()


def _order_nll(
    model: nn.Module,
    ids: torch.LongTensor,
    scored: torch.BoolTensor,
    order: str,
    mask_token_id: int,
    batch_size: int,
    generator: torch.Generator,
) -> float:
    """sum_l -log q(x^pi(l) | x^pi(<l)), nats: Eq. L_AO_def for one order pi; row l masks pi(l), pi(l + 1), ..."""
    positions = scored[0].nonzero()[:, 0]
    if order == "backward":
        positions = positions.flip(0)
    elif order == "random":
        shuffle = torch.randperm(len(positions), generator=generator, device=generator.device)
        positions = positions[shuffle.to(positions.device)]
    rank = torch.full((ids.shape[1],), -1, dtype=torch.long, device=ids.device)
    rank[positions] = torch.arange(len(positions), device=ids.device)
    total = 0.0
    for step in torch.arange(len(positions), device=ids.device).split(batch_size):
        noisy_ids = ids.masked_fill(rank >= step[:, None], mask_token_id)
        revealed = rank == step[:, None]
        total += float(masked_token_nll(model, ids.expand(len(step), -1), noisy_ids, revealed).double().sum())
    return total
