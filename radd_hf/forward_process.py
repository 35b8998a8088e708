# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The forward process q(x_t | x_0): draws of t, lambda or k, and the masks they mean.

Shapes: B batch, L length. `maskable` (B, L) is False at padding and at context, which are never masked. Random numbers
come from `generator` (on its own device) or from torch's default generator, and land on the inputs' device.
"""

import torch

TIME_SAMPLING = ("uniform", "stratified", "antithetic")


def draw_unit(
    batch_size: int, time_sampling: str = "stratified", generator: torch.Generator | None = None
) -> torch.Tensor:
    """
    One number in (0, 1] a row, each uniform on its own; `time_sampling` says how they depend on each other.

    Args:
        batch_size (`int`): B.
        time_sampling (`str`, *optional*, defaults to `"stratified"`):
            "uniform": independent. "stratified": one in each stratum (i / B, (i + 1) / B], in random order.
            "antithetic": one uniform draw shifted by i / B modulo 1, in random order.
        generator (`torch.Generator`, *optional*): Source of randomness.

    Returns:
        `torch.Tensor` of shape `(B,)`, float64, on the generator's device (CPU without one).
    """
    device = "cpu" if generator is None else generator.device
    options = {"generator": generator, "device": device}
    if time_sampling == "uniform":
        return 1 - torch.rand(batch_size, dtype=torch.float64, **options)
    if time_sampling == "stratified":
        offset = torch.rand(batch_size, dtype=torch.float64, **options)
    elif time_sampling == "antithetic":
        offset = torch.rand(1, dtype=torch.float64, **options)
    else:
        raise ValueError(f"`time_sampling` must be one of {list(TIME_SAMPLING)}, got {time_sampling!r}.")
    stratum = torch.randperm(batch_size, **options)
    # 1 - u turns [0, 1) into (0, 1]; the clamp catches the rounding of (B - 1 + u) / B up to 1
    return (1 - (stratum + offset) / max(batch_size, 1)).clamp(min=torch.finfo(torch.float64).tiny)


def mask_tokens(
    input_ids: torch.LongTensor,
    mask_probability: torch.Tensor,
    mask_token_id: int,
    maskable: torch.BoolTensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """
    x_t ~ q(x_t | x_0): each maskable token becomes M independently with probability lambda.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, L)`): x_0.
        mask_probability (`torch.Tensor` of shape `(B,)`): lambda of each row.
        mask_token_id (`int`): M.
        maskable (`torch.BoolTensor` of shape `(B, L)`, *optional*): Defaults to everywhere.
        generator (`torch.Generator`, *optional*): Source of randomness.

    Returns:
        x_t (B, L) and the positions masked now (B, L).
    """
    uniform = _uniform_like(input_ids, generator)
    masked = uniform < mask_probability.to(uniform)[:, None]
    if maskable is not None:
        masked &= maskable
    return input_ids.masked_fill(masked, mask_token_id), masked


def mask_exactly(
    input_ids: torch.LongTensor,
    num_masked: torch.LongTensor,
    mask_token_id: int,
    maskable: torch.BoolTensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """
    Mask exactly k of a row's maskable tokens, all subsets equally likely (Algorithm 1: the last k of a random order).

    Args:
        input_ids (`torch.LongTensor` of shape `(B, L)`): x_0.
        num_masked (`torch.LongTensor` of shape `(B,)`): k of each row, at most its number of maskable tokens.
        mask_token_id, maskable, generator: As in `mask_tokens`.

    Returns:
        x_t (B, L) and the positions masked now (B, L).
    """
    uniform = _uniform_like(input_ids, generator)
    if maskable is not None:
        uniform = uniform.masked_fill(~maskable, 2.0)  # after every maskable position
    rank = uniform.argsort(dim=-1).argsort(dim=-1)
    masked = rank < num_masked.to(rank.device)[:, None]
    return input_ids.masked_fill(masked, mask_token_id), masked


def _uniform_like(input_ids: torch.LongTensor, generator: torch.Generator | None) -> torch.Tensor:
    device = input_ids.device if generator is None else generator.device
    uniform = torch.rand(input_ids.shape, dtype=torch.float64, generator=generator, device=device)
    return uniform.to(input_ids.device)
