# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The canvas: checked ids with every mask to fill in place, their padding, and a given order over them.

Shapes: B rows, L length.
"""

import torch
from torch import nn

from .checks_radd import check_mask, check_token_ids, is_int
from .generation_config_radd import RADDGenerationConfig


def prepare_canvas(
    input_ids: torch.LongTensor | None,
    attention_mask: torch.Tensor | None,
    options: RADDGenerationConfig,
    mask_token_id: int,
    config,
    batch_size: int | None,
    device: torch.device,
) -> tuple[torch.LongTensor, torch.Tensor | None]:
    """Checked ids (B, L) with all masks to fill in place, and their attention mask (`None` without padding)."""
    longest = config_length(config)
    if input_ids is None:
        if attention_mask is not None:
            raise ValueError("`attention_mask` must be None without `input_ids`.")
        if batch_size is not None and (not is_int(batch_size) or batch_size < 1):
            raise ValueError(f"`batch_size` must be a positive integer, got {batch_size!r}.")
        if options.max_new_tokens == 0:
            raise ValueError("`max_new_tokens` must be greater than 0 without `input_ids`, got 0.")
        length = options.max_new_tokens or options.max_length or longest
        if length is None:
            raise ValueError("`max_length` must be given: the model's config has no `max_position_embeddings`.")
        _check_length(length, longest)
        canvas = torch.full((batch_size or 1, length), mask_token_id, device=device)
    else:
        if batch_size is not None:
            raise ValueError("`batch_size` must be None where `input_ids` are given; see `num_return_sequences`.")
        check_token_ids(input_ids, config.vocab_size)
        check_mask("attention_mask", attention_mask, input_ids)
        canvas = input_ids.to(device=device, dtype=torch.long, copy=True)
        if attention_mask is not None:
            attention_mask = attention_mask.to(device)
            if bool(attention_mask.bool().all()):
                attention_mask = None
        if options.max_new_tokens or (options.max_new_tokens is None and options.max_length is not None):
            canvas, attention_mask = append_masks(canvas, attention_mask, options, mask_token_id, config)
    _check_length(canvas.shape[1], longest)
    return canvas, attention_mask


def config_length(config) -> int | None:
    """Longest canvas of a model; `None` if its config does not say."""
    return getattr(config, "max_position_embeddings", None)


def _check_length(length: int, longest: int | None):
    if longest is not None and length > longest:
        raise ValueError(
            f"`input_ids` and new tokens must fit max_position_embeddings={longest}, got length {length}."
        )


def append_masks(
    canvas: torch.LongTensor,
    attention_mask: torch.Tensor | None,
    options: RADDGenerationConfig,
    mask_token_id: int,
    config,
) -> tuple[torch.LongTensor, torch.Tensor | None]:
    """Masks after each row's last real token: `max_new_tokens` more or `max_length` in all; padding on the left."""
    if not len(canvas):
        length = options.max_length if options.max_new_tokens is None else canvas.shape[1] + options.max_new_tokens
        return canvas.new_empty(0, length), None
    rows = canvas if attention_mask is None else [ids[m] for ids, m in zip(canvas, attention_mask.bool(), strict=True)]
    if options.max_new_tokens is not None:
        counts = [options.max_new_tokens] * len(rows)
    else:
        counts = [options.max_length - len(row) for row in rows]
        if min(counts) < 0:
            raise ValueError(
                f"`max_length` must be at least the length of `input_ids`, got {options.max_length} for a row of "
                f"{max(len(row) for row in rows)} tokens."
            )
    _check_length(max(len(row) + n for row, n in zip(rows, counts, strict=True)), config_length(config))
    rows = [torch.cat([row, row.new_full((n,), mask_token_id)]) for row, n in zip(rows, counts, strict=True)]
    pad = padding_token_id(options, mask_token_id, config)
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows], device=canvas.device)
    real = torch.arange(padded.shape[1], device=canvas.device) >= padded.shape[1] - lengths[:, None]
    return padded, None if bool(real.all()) else real.long()


def padding_token_id(options: RADDGenerationConfig, mask_token_id: int, config) -> int:
    """The pad id of `options` or of the model, or else their end token, or else any id; never M."""
    ends = [options.eos_token_id, getattr(config, "eos_token_id", None)]
    ends = [ids[0] if isinstance(ids, (list, tuple)) and ids else ids for ids in ends]
    candidates = [options.pad_token_id, getattr(config, "pad_token_id", None), *ends, 0, 1]
    pad = next(i for i in candidates if i is not None and i != mask_token_id)
    if not is_int(pad) or not 0 <= pad < config.vocab_size:
        raise ValueError(f"`pad_token_id` must be an id in [0, vocab_size={config.vocab_size}), got {pad!r}.")
    return pad


def end_token_ids(options: RADDGenerationConfig, config) -> list[int]:
    """The ids that end a text, from `options` or the model's config; a ValueError if there are none."""
    ids = options.eos_token_id if options.eos_token_id is not None else getattr(config, "eos_token_id", None)
    if ids is None:
        raise ValueError("`eos_token_id` must be given, or in the model's config, with `trim_at_eos`, got None.")
    ids = list(ids) if isinstance(ids, (list, tuple)) else [ids]
    if not ids or not all(is_int(i) for i in ids):
        raise ValueError(f"`eos_token_id` must be an id or a list of ids, got {ids!r}.")
    reject_ids_outside("eos_token_id", ids, config.vocab_size)
    return ids


def beyond_end(
    canvas: torch.LongTensor, free: torch.BoolTensor, attention_mask: torch.Tensor | None, ends: list[int]
) -> torch.BoolTensor:
    """What follows (B, L) the first of the tokens `ends` in the free positions at the end of a row."""
    real = torch.ones_like(free) if attention_mask is None else attention_mask.bool()
    given_after = (real & ~free).flip(-1).cumsum(-1).flip(-1)
    ended = (given_after == 0) & free & torch.isin(canvas, torch.tensor(ends, device=canvas.device))
    return real & (ended.cumsum(-1) - ended.long() > 0)


def reject_ids_outside(name: str, ids, vocab_size: int):
    """Raise a ValueError naming the option if one of `ids` is no id of the vocabulary."""
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"`{name}` must hold ids in [0, vocab_size={vocab_size}), got {outside}.")


def check_order(order, shape: torch.Size, algorithm: str) -> torch.LongTensor | None:
    """A given order as a CPU tensor (B, L'), or `None` for a named one."""
    if isinstance(order, str) and (order == "random" or algorithm == "any_order"):
        return None
    if algorithm != "any_order":
        raise ValueError(f"`order` must be left at its default unless algorithm='any_order', got {algorithm!r}.")
    order = torch.as_tensor(order, dtype=None if len(order) else torch.long).cpu()
    if order.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`order` must hold integers, got {order.dtype}.")
    order = order.long()
    if order.dim() == 1:
        order = order.expand(shape[0], -1)
    if order.dim() != 2 or order.shape[0] != shape[0] or order.shape[1] == 0:
        raise ValueError(
            f"`order` must have shape (L,) or (B, L) for a canvas {tuple(shape)}, got {tuple(order.shape)}."
        )
    if bool((order < 0).any()) or bool((order >= shape[1]).any()):
        raise ValueError(f"`order` must hold positions in [0, {shape[1]}), got {order.min()} to {order.max()}.")
    ordered = order.sort(-1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError("`order` must name each position once, got repeated positions.")
    return order
