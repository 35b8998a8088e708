# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The four training losses: one cross-entropy, four weights (Theorem 2). All in nats per sequence.

Shapes: B batch, L length, V vocabulary, N masked positions of the batch. `nll` (B,) is sum_m [-log q_i] over the
masked positions m of a row, q_i = c_theta(x_t)[i, x_0^i].
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .checks_radd import check_mask, check_token_ids, is_number, resolve_mask_token_id
from .configuration_radd import LOSS_TYPES
from .forward_process import GlobalBatchNoise, draw_unit, mask_exactly, mask_tokens
from .modeling_radd import token_cross_entropy
from .noise_schedule_radd import NoiseSchedule, get_noise_schedule

# The paper's code base draws t from [1e-3, 1] and does not reweight: a mean bias of about -0.12 %.
DEFAULT_TIME_EPS = 1e-3


def dse_loss(nll: torch.Tensor, t: torch.Tensor, noise_schedule: NoiseSchedule) -> torch.Tensor:
    """
    Denoising score entropy (Eq. score_entropy) for a normalised network: w(t) sum_m [-log q_i], (B,), nats.

    Exact draw by draw: sum_j s c_j = s, and the constant K(s) = s log s - s cancels the log s term.
    """
    return noise_schedule.loss_weight(t).to(nll) * nll


def t_dce_loss(
    nll: torch.Tensor, num_masked: torch.Tensor, t: torch.Tensor, noise_schedule: NoiseSchedule
) -> torch.Tensor:
    """
    t-denoising cross-entropy (Eq. tDCE_q): w(t) sum_m [-log q_i - log s(t)], (B,), nats.

    The mean is that of `dse_loss`; the log s term has mean zero over t and only adds variance.
    """
    log_scale = torch.log(noise_schedule.score_scale(t)).to(nll)
    return noise_schedule.loss_weight(t).to(nll) * (nll - num_masked.to(nll) * log_scale)


def lambda_dce_loss(nll: torch.Tensor, mask_probability: torch.Tensor) -> torch.Tensor:
    """lambda-denoising cross-entropy (Eq. DCEloss_lambda): 1 / lambda sum_m [-log q_i], (B,), nats."""
    return nll / mask_probability.to(nll)


def ao_loss(nll: torch.Tensor, num_masked: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Any-order autoregressive loss (Eq. ao_loss_parallel_k): L / k sum_m [-log q_i], (B,), nats; 0 if k = 0."""
    return nll * length.to(nll) / num_masked.clamp(min=1).to(nll)


@dataclass
class Corruption:
    """
    A corrupted batch and the numbers its loss weight needs.

    Attributes:
        noisy_ids (`torch.LongTensor` of shape `(B, L)`): x_t.
        masked (`torch.BoolTensor` of shape `(B, L)`): Positions masked, hence scored.
        level (`torch.Tensor` of shape `(B,)`): t for "dse" and "t_dce", lambda for "lambda_dce", k for "ao".
        length (`torch.LongTensor` of shape `(B,)`): Maskable positions of each row.
    """

    noisy_ids: torch.LongTensor
    masked: torch.BoolTensor
    level: torch.Tensor
    length: torch.LongTensor


@dataclass
class DiffusionLossOutput:
    """
    Attributes:
        loss (`torch.Tensor` of shape `(B,)`): Weighted loss of each sequence, nats, float32.
        nll (`torch.Tensor` of shape `(B,)`): Unweighted sum_m [-log q_i], nats.
        num_masked (`torch.LongTensor` of shape `(B,)`): Masked positions k of each row.
        length (`torch.LongTensor` of shape `(B,)`): Maskable positions L of each row.
    """

    loss: torch.Tensor
    nll: torch.Tensor
    num_masked: torch.LongTensor
    length: torch.LongTensor

    @property
    def nll_per_token(self) -> torch.Tensor:
        """Mean over the rows with k >= 1 of nll / k, a scalar in nats per token: ln V for a zero output layer.

        Not a number where no row has a masked position.
        """
        scored = self.num_masked > 0
        return (self.nll[scored] / self.num_masked[scored]).mean()


def corrupt(
    input_ids: torch.LongTensor,
    loss_type: str,
    mask_token_id: int,
    maskable: torch.BoolTensor,
    *,
    noise_schedule: NoiseSchedule,
    time_sampling: str = "stratified",
    time_eps: float = DEFAULT_TIME_EPS,
    generator: torch.Generator | GlobalBatchNoise | None = None,
) -> Corruption:
    """Draw t, lambda or k for each row and mask accordingly; arguments as in `diffusion_loss`."""
    check_loss_type(loss_type)
    length = maskable.sum(-1)
    unit = draw_unit(len(input_ids), time_sampling, generator).to(input_ids.device)
    if loss_type == "ao":
        level = torch.ceil(unit * length).long()
        noisy_ids, masked = mask_exactly(input_ids, level, mask_token_id, maskable, generator)
        return Corruption(noisy_ids, masked, level, length)
    if loss_type == "lambda_dce":
        level = mask_probability = unit
    else:
        level = time_eps + (1 - time_eps) * unit
        mask_probability = noise_schedule.mask_probability(level)
    noisy_ids, masked = mask_tokens(input_ids, mask_probability, mask_token_id, maskable, generator)
    return Corruption(noisy_ids, masked, level, length)


def weigh(nll: torch.Tensor, corruption: Corruption, loss_type: str, noise_schedule: NoiseSchedule) -> torch.Tensor:
    """The loss `loss_type` of each row (B,) from its masked cross-entropy (B,), nats."""
    check_loss_type(loss_type)
    num_masked = corruption.masked.sum(-1)
    if loss_type == "dse":
        return dse_loss(nll, corruption.level, noise_schedule)
    if loss_type == "t_dce":
        return t_dce_loss(nll, num_masked, corruption.level, noise_schedule)
    if loss_type == "lambda_dce":
        return lambda_dce_loss(nll, corruption.level)
    return ao_loss(nll, num_masked, corruption.length)


def row_weights(corruption: Corruption, loss_type: str, noise_schedule: NoiseSchedule) -> torch.Tensor:
    """The factor of the cross-entropy in the loss of each row, (B,), float64: every loss is linear in it."""
    unit = torch.ones(len(corruption.masked), dtype=torch.float64, device=corruption.masked.device)
    return weigh(unit, corruption, loss_type, noise_schedule) - weigh(0 * unit, corruption, loss_type, noise_schedule)


def masked_token_nll(
    model: nn.Module,
    input_ids: torch.LongTensor,
    noisy_ids: torch.LongTensor,
    masked: torch.BoolTensor,
    attention_mask: torch.Tensor | None = None,
    *,
    row_weight: torch.Tensor | None = None,
    mask_token_id: int | None = None,
) -> torch.Tensor:
    """
    -log q_i at every masked position, (N,) in row-major order, float32 or wider: logits exist nowhere else.

    Args:
        model (`nn.Module`): A `RADDForMaskedDiffusion`, wrapped or not: output layer and cross-entropy in chunks. Of
            another model the output layer alone runs at the masked positions alone.
        input_ids, noisy_ids (`torch.LongTensor` of shape `(B, L)`): x_0 and x_t.
        masked (`torch.BoolTensor` of shape `(B, L)`): Positions scored.
        attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding.
        row_weight (`torch.Tensor` of shape `(B,)`, *optional*): Gradient to come, up to a factor: see the model.
        mask_token_id (`int`, *optional*): Defaults to the model config's, where it has one: never predicted.
    """
    arguments = {"input_ids": noisy_ids, "attention_mask": attention_mask}
    targets = input_ids[masked].long()
    inner = unwrapped(model)
    accepted = inspect.signature(type(inner).forward).parameters
    if "return_token_nll" in accepted:
        options = {"logits_to_keep": masked, "return_token_nll": True, "row_weight": row_weight}
        return model(**arguments, labels=input_ids, **options).loss
    if "logits_to_keep" in accepted or not hasattr(inner, "get_output_embeddings"):
        logits = model(**arguments, logits_to_keep=masked).logits
    else:
        with output_layer_at(inner, masked):
            logits = model(**arguments).logits
        logits = logits[masked] if logits.dim() == 3 else logits
    if mask_token_id is None:
        mask_token_id = getattr(inner.config, "mask_token_id", None)
    if mask_token_id is not None:
        column = torch.arange(logits.shape[-1], device=logits.device) == mask_token_id
        logits = logits.masked_fill(column, float("-inf"))
    return token_cross_entropy(logits, targets)


@contextmanager
def output_layer_at(model: nn.Module, masked: torch.BoolTensor) -> Iterator[None]:
    """Inside the block the model's output layer sees the masked positions alone: its logits are (N, V)."""
    head = model.get_output_embeddings()
    if head is None or model._compiled_call_impl is not None:  # a hook would be compiled again in each step
        yield
        return

    def keep(module: nn.Module, args: tuple) -> tuple:
        # packed states (tokens, D), as without padding, stay as they are
        return (args[0][masked], *args[1:]) if args and args[0].shape[:-1] == masked.shape else args

    handle = head.register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def sum_over_masked(token_nll: torch.Tensor, masked: torch.BoolTensor) -> torch.Tensor:
    """Sum of (N,) row-major values over each row of `masked` (B, L): (B,)."""
    row = masked.nonzero()[:, 0]
    return token_nll.new_zeros(len(masked)).index_add(0, row, token_nll)


def diffusion_loss_terms(
    model: nn.Module,
    input_ids: torch.LongTensor,
    loss_type: str,
    *,
    noise_schedule: NoiseSchedule | str | None = None,
    attention_mask: torch.Tensor | None = None,
    loss_mask: torch.Tensor | None = None,
    time_sampling: str = "stratified",
    time_eps: float = DEFAULT_TIME_EPS,
    mask_token_id: int | None = None,
    generator: torch.Generator | GlobalBatchNoise | None = None,
) -> DiffusionLossOutput:
    """`diffusion_loss` with the unweighted cross-entropy beside the loss; arguments are those of `diffusion_loss`."""
    check_loss_type(loss_type)
    if not is_number(time_eps) or not 0 <= time_eps < 1:
        raise ValueError(f"`time_eps` must be in [0, 1), got {time_eps!r}.")
    config = model_config(model)
    mask_token_id = resolve_mask_token_id(mask_token_id, config)
    check_token_ids(input_ids, config.vocab_size)
    maskable = maskable_positions(input_ids, attention_mask, loss_mask)
    check_clean(input_ids, maskable, mask_token_id)
    schedule = get_noise_schedule(config if noise_schedule is None else noise_schedule)
    corruption = corrupt(
        input_ids,
        loss_type,
        mask_token_id,
        maskable,
        noise_schedule=schedule,
        time_sampling=time_sampling,
        time_eps=time_eps,
        generator=generator,
    )
    token_nll = masked_token_nll(
        model,
        input_ids,
        corruption.noisy_ids,
        corruption.masked,
        attention_mask,
        row_weight=row_weights(corruption, loss_type, schedule),
        mask_token_id=mask_token_id,
    )
    nll = sum_over_masked(token_nll, corruption.masked)
    loss = weigh(nll, corruption, loss_type, schedule)
    return DiffusionLossOutput(
        loss=loss.float(), nll=nll, num_masked=corruption.masked.sum(-1), length=corruption.length
    )


def diffusion_loss(
    model: nn.Module,
    input_ids: torch.LongTensor,
    loss_type: str,
    *,
    noise_schedule: NoiseSchedule | str | None = None,
    attention_mask: torch.Tensor | None = None,
    loss_mask: torch.Tensor | None = None,
    time_sampling: str = "stratified",
    time_eps: float = DEFAULT_TIME_EPS,
    mask_token_id: int | None = None,
    generator: torch.Generator | GlobalBatchNoise | None = None,
) -> torch.Tensor:
    """
    One Monte Carlo draw of a training loss for each sequence: corrupt, run the network at the masks, weigh.

    All four have the same mean, the bound sum over non-empty masks m of (k-1)! (L-k)! / L! CE(m), k = |m| (Theorem 2);
    "dse" and "t_dce" up to the range of lambda that `time_eps` and the schedule leave.

    Args:
        model (`nn.Module`): A masked language model that takes `logits_to_keep` as a boolean mask.
        input_ids (`torch.LongTensor` of shape `(B, L)`): Clean tokens x_0.
        loss_type (`str`): "dse", "t_dce", "lambda_dce" or "ao".
        noise_schedule (`NoiseSchedule` or `str`, *optional*): For "dse" and "t_dce"; defaults to the model config's.
        attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding: invisible, never masked. Of shape
            `(B, 1, L, L)` it goes to the model as it is, and `loss_mask` has to leave out padding.
        loss_mask (`torch.Tensor` of shape `(B, L)`, *optional*): False at context: never masked, never scored.
        time_sampling (`str`, *optional*, defaults to `"stratified"`): See `draw_unit`.
        time_eps (`float`, *optional*, defaults to 1e-3): t ~ U[time_eps, 1] for "dse" and "t_dce".
        mask_token_id (`int`, *optional*): Defaults to the model config's.
        generator (`torch.Generator` or `GlobalBatchNoise`, *optional*): Source of the corruption.

    Returns:
        `torch.Tensor` of shape `(B,)`, float32: nats per sequence; a row without maskable positions costs 0.

    Raises:
        ValueError: An unknown `loss_type` or `time_sampling`, ids outside the vocabulary, masks of another shape.
    """
    return diffusion_loss_terms(
        model,
        input_ids,
        loss_type,
        noise_schedule=noise_schedule,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        time_sampling=time_sampling,
        time_eps=time_eps,
        mask_token_id=mask_token_id,
        generator=generator,
    ).loss


def check_loss_type(loss_type: str):
    """Raise a ValueError that lists the valid names unless `loss_type` is one."""
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"`loss_type` must be one of {list(LOSS_TYPES)}, got {loss_type!r}.")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model below torch.compile, data parallelism and adapters, which hand their arguments on."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def model_config(model: nn.Module):
    """The config of a model, however it is wrapped."""
    return unwrapped(model).config


def check_clean(input_ids: torch.LongTensor, maskable: torch.BoolTensor, mask_token_id: int):
    """Raise a ValueError if a mask token stands where text may be masked."""
    if bool((maskable & (input_ids == mask_token_id)).any()):
        raise ValueError(
            f"`input_ids` must be clean text where it may be masked, got mask tokens (id {mask_token_id}) there."
        )


def maskable_positions(
    input_ids: torch.LongTensor, attention_mask: torch.Tensor | None, loss_mask: torch.Tensor | None
) -> torch.BoolTensor:
    """Where tokens may be masked, (B, L): real tokens that `loss_mask` does not make context."""
    maskable = torch.ones_like(input_ids, dtype=torch.bool)
    if getattr(attention_mask, "ndim", None) == 4:
        attention_mask = None  # it says which token sees which, not which are real: that is `loss_mask`'s to say
    for name, mask in (("attention_mask", attention_mask), ("loss_mask", loss_mask)):
        check_mask(name, mask, input_ids)
        if mask is not None:
            maskable &= mask.to(input_ids.device).bool()
    return maskable
