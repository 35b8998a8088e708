# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The forward process q(x_t | x_0): draws of t, lambda or k, and the masks they mean.

Shapes: B batch, L length, G global batch. `maskable` (B, L) is False at padding and at context, which are never
masked. Random numbers come from `generator` (a `torch.Generator` on its own device or a `GlobalBatchNoise`) or from
torch's default generator, and land on the inputs' device.
"""

import torch

from .token_draw_radd import mix_seed

TIME_SAMPLING = ("uniform", "stratified", "antithetic")


class GlobalBatchNoise:
    """
    In the place of a generator: the randomness of some rows of a global batch, whichever way it is cut into devices,
    accumulated batches and padding.

    The noise of a row is a function of `key` and of the row's index alone, so the rows of 4 x 8 are those of 32, and
    no two devices share any. What rows share, the strata of t, lambda or k, is a function of `key` alone.

    Args:
        key (`tuple`): Integers and strings that name the global batch, such as (seed, step).
        first_row (`int`): Index of the first of these rows in the global batch.
        global_batch_size (`int`): G. Rows past it begin another set of strata.
    """

    device = torch.device("cpu")

    def __init__(self, key: tuple[int | str, ...], first_row: int, global_batch_size: int):
        self.key, self.first_row, self.global_batch_size = key, first_row, global_batch_size
        self._draws = 0

    def unit(self, batch_size: int, time_sampling: str) -> torch.Tensor:
        """`draw_unit` over each G rows, (B,): the part of these rows."""
        size = self.global_batch_size
        first, last = self.first_row // size, (self.first_row + batch_size + size - 1) // size
        units = [
            draw_unit(size, time_sampling, self._generator("time", i)) for i in range(first, max(last, first + 1))
        ]
        start = self.first_row - first * size
        return torch.cat(units)[start : start + batch_size]

    def uniform(self, maskable: torch.BoolTensor) -> torch.Tensor:
        """Independent numbers in [0, 1), float64 (B, L): the i-th of a row at its i-th maskable position."""
        self._draws += 1
        index = (maskable.cpu().long().cumsum(-1) - 1).clamp(min=0)
        rows = [
            torch.rand(maskable.shape[1], dtype=torch.float64, generator=self._generator("row", row, self._draws))
            for row in range(self.first_row, self.first_row + len(maskable))
        ]
        return torch.stack(rows).gather(1, index) if rows else torch.zeros(maskable.shape, dtype=torch.float64)

    def _generator(self, *key: int | str) -> torch.Generator:
        return torch.Generator().manual_seed(mix_seed(*self.key, *key))


def draw_unit(
    batch_size: int,
    time_sampling: str = "stratified",
    generator: torch.Generator | GlobalBatchNoise | None = None,
) -> torch.Tensor:
    """
    One number in (0, 1] a row, each uniform on its own; `time_sampling` says how they depend on each other.

    Args:
        batch_size (`int`): B.
        time_sampling (`str`, *optional*, defaults to `"stratified"`):
            "uniform": independent. "stratified": one in each stratum (i / B, (i + 1) / B], in random order.
            "antithetic": one uniform draw shifted by i / B modulo 1, in random order.
        generator (`torch.Generator` or `GlobalBatchNoise`, *optional*): Source of randomness.

    Returns:
        `torch.Tensor` of shape `(B,)`, float64, on the generator's device (CPU without one).
    """
    if isinstance(generator, GlobalBatchNoise):
        return generator.unit(batch_size, time_sampling)
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
    generator: torch.Generator | GlobalBatchNoise | None = None,
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """
    x_t ~ q(x_t | x_0): each maskable token becomes M independently with probability lambda.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, L)`): x_0.
        mask_probability (`torch.Tensor` of shape `(B,)`): lambda of each row.
        mask_token_id (`int`): M.
        maskable (`torch.BoolTensor` of shape `(B, L)`, *optional*): Defaults to everywhere.
        generator (`torch.Generator` or `GlobalBatchNoise`, *optional*): Source of randomness.

    Returns:
        x_t (B, L) and the positions masked now (B, L).
    """
    uniform = _uniform_like(input_ids, maskable, generator)
    masked = uniform < mask_probability.to(uniform)[:, None]
    if maskable is not None:
        masked &= maskable
    return input_ids.masked_fill(masked, mask_token_id), masked


def mask_exactly(
    input_ids: torch.LongTensor,
    num_masked: torch.LongTensor,
    mask_token_id: int,
    maskable: torch.BoolTensor | None = None,
    generator: torch.Generator | GlobalBatchNoise | None = None,
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
    uniform = _uniform_like(input_ids, maskable, generator)
    if maskable is not None:
        uniform = uniform.masked_fill(~maskable, 2.0)  # after every maskable position
    rank = uniform.argsort(dim=-1).argsort(dim=-1)
    masked = rank < num_masked.to(rank.device)[:, None]
    return input_ids.masked_fill(masked, mask_token_id), masked


def _uniform_like(
    input_ids: torch.LongTensor,
    maskable: torch.BoolTensor | None,
    generator: torch.Generator | GlobalBatchNoise | None,
) -> torch.Tensor:
    if isinstance(generator, GlobalBatchNoise):
        everywhere = torch.ones_like(input_ids, dtype=torch.bool)
        return generator.uniform(everywhere if maskable is None else maskable).to(input_ids.device)
    device = input_ids.device if generator is None else generator.device
    uniform = torch.rand(input_ids.shape, dtype=torch.float64, generator=generator, device=device)
    return uniform.to(input_ids.device)
