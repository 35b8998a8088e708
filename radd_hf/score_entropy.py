# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The score-entropy loss of SEDD, for a score that is not normalised (Lou et al. 2024; paper, Eq. score_entropy).

For a normalised network it is `losses.dse_loss`, draw by draw. All in nats per sequence.

Shapes: B batch, L length, V vocabulary, N masked positions of the batch.
"""

import torch
from torch import nn

from .checks_radd import check_token_ids, resolve_mask_token_id
from .losses import DEFAULT_TIME_EPS, check_clean, corrupt, maskable_positions, model_config, sum_over_masked
from .noise_schedule_radd import NoiseSchedule, get_noise_schedule


def score_entropy(
    log_score: torch.Tensor, target: torch.LongTensor, ratio: torch.Tensor, mask_token_id: int
) -> torch.Tensor:
    """
    sum_j s_j - r log s_{x_0} + K(r) over the clean tokens j, with r = s(t) the true ratio and K(r) = r log r - r.

    Args:
        log_score (`torch.Tensor` of shape `(N, V)`): log s_theta at masked positions.
        target (`torch.LongTensor` of shape `(N,)`): Clean tokens x_0.
        ratio (`torch.Tensor` of shape `(N,)`): r = 1 / expm1(sigma_bar(t)).
        mask_token_id (`int`): Column of the mask, which is no clean token.

    Returns:
        `torch.Tensor` of shape `(N,)`, nats; never negative, and 0 where s_{x_0} = r and every other s_j = 0.
    """
    clean = torch.ones(log_score.shape[-1], dtype=torch.bool, device=log_score.device)
    clean[mask_token_id] = False
    positive = log_score[:, clean].exp().sum(-1)
    negative = ratio * log_score.gather(-1, target[:, None])[:, 0]
    return positive - negative + torch.xlogy(ratio, ratio) - ratio


def score_entropy_loss(
    log_score: torch.Tensor,
    input_ids: torch.LongTensor,
    masked: torch.BoolTensor,
    t: torch.Tensor,
    noise_schedule: NoiseSchedule,
    mask_token_id: int,
) -> torch.Tensor:
    """sigma(t) sum_m `score_entropy` over the masked positions m of each row, (B,); `log_score` is (N, V) there."""
    row = masked.nonzero()[:, 0]
    ratio = noise_schedule.score_scale(t).to(log_score)[row]
    entropy = score_entropy(log_score, input_ids[masked].long(), ratio, mask_token_id)
    return noise_schedule.rate(t).to(log_score) * sum_over_masked(entropy, masked)


def score_entropy_diffusion_loss(
    model: nn.Module,
    input_ids: torch.LongTensor,
    *,
    noise_schedule: NoiseSchedule | str | None = None,
    attention_mask: torch.Tensor | None = None,
    loss_mask: torch.Tensor | None = None,
    time_sampling: str = "stratified",
    time_eps: float = DEFAULT_TIME_EPS,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """
    One Monte Carlo draw of SEDD's training loss for each sequence: mask at t, run the network there, weigh.

    Args:
        model (`SEDDForMaskedDiffusion`): The network.
        input_ids, noise_schedule, attention_mask, loss_mask, time_sampling, time_eps, generator: As for
            `losses.diffusion_loss`, whose "dse" masks in the same way.

    Returns:
        `torch.Tensor` of shape `(B,)`, float32: nats per sequence; its mean bounds the negative log-likelihood.

    Raises:
        ValueError: Ids outside the vocabulary, mask tokens where text may be masked, masks of another shape.
    """
    config = model_config(model)
    mask_token_id = resolve_mask_token_id(None, config)
    check_token_ids(input_ids, config.vocab_size)
    maskable = maskable_positions(input_ids, attention_mask, loss_mask)
    check_clean(input_ids, maskable, mask_token_id)
    schedule = get_noise_schedule(config if noise_schedule is None else noise_schedule)
    drawn = corrupt(
        input_ids,
        "dse",
        mask_token_id,
        maskable,
        noise_schedule=schedule,
        time_sampling=time_sampling,
        time_eps=time_eps,
        generator=generator,
    )
    output = model(
        drawn.noisy_ids, schedule.total(drawn.level), attention_mask=attention_mask, logits_to_keep=drawn.masked
    )
    log_score = output.logits.float()
    return score_entropy_loss(log_score, input_ids, drawn.masked, drawn.level, schedule, mask_token_id).float()
