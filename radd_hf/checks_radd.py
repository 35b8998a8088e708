# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Checks of arguments that several modules share."""

import math

import torch


def is_int(value: object) -> bool:
    """Whether `value` is a whole number that a tensor can hold; `True` and `False` are not."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def resolve_mask_token_id(mask_token_id: int | None, config) -> int:
    """`mask_token_id`, or the model config's; a ValueError where neither is an id of the vocabulary."""
    if mask_token_id is None:
        mask_token_id = getattr(config, "mask_token_id", None)
    if not is_int(mask_token_id) or not 0 <= mask_token_id < config.vocab_size:
        raise ValueError(
            f"`mask_token_id` must be an id in [0, vocab_size={config.vocab_size}), given or in the model's config, "
            f"got {mask_token_id!r}."
        )
    return mask_token_id


def check_token_ids(input_ids: torch.LongTensor, vocab_size: int):
    """Raise a ValueError unless `input_ids` is a (B, L) integer tensor of ids in [0, vocab_size)."""
    if not torch.is_tensor(input_ids) or input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        found = type(input_ids).__name__
        if torch.is_tensor(input_ids):
            found = f"{tuple(input_ids.shape)} of {input_ids.dtype}"
        raise ValueError(f"`input_ids` must be an integer tensor of shape (batch, length), got {found}.")
    if input_ids.numel() and (int(input_ids.min()) < 0 or int(input_ids.max()) >= vocab_size):
        raise ValueError(
            f"`input_ids` must be in [0, vocab_size={vocab_size}), got values from {int(input_ids.min())} to "
            f"{int(input_ids.max())}."
        )


def is_number(value: object) -> bool:
    """Whether `value` is a finite float or an int that `is_int` takes; `True` and `False` are not."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def check_mask(name: str, mask: torch.Tensor | None, input_ids: torch.LongTensor):
    """Raise a ValueError naming the mask unless it is `None` or of the shape of `input_ids`, of 0 and 1 alone."""
    if mask is None:
        return
    if not torch.is_tensor(mask) or mask.shape != input_ids.shape:
        found = tuple(mask.shape) if torch.is_tensor(mask) else type(mask).__name__
        raise ValueError(f"`{name}` must have the shape of `input_ids`, {tuple(input_ids.shape)}, got {found}.")
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"`{name}` must hold 0 and 1 alone, got {mask.unique()[:4].tolist()}.")
