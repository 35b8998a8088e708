# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Sampling: draw when each position is revealed, then run the network only at those moments.

Whether a masked position is revealed in a step depends on time alone, never on the network. So a reveal plan is drawn
first, and each row of a batch then goes from one of its events to its next: the law of the step-by-step sampler with
the paper's output cache (Algorithms 5 and 6), at exactly its number of network calls.

Shapes: B rows, L length, l free positions of a row, N positions revealed in a pass, V vocabulary.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList
from transformers.utils import GENERATION_CONFIG_NAME, ModelOutput, cached_file, logging

from .checks_radd import check_mask, check_token_ids, is_int, resolve_mask_token_id
from .generation_config_radd import RADDGenerationConfig, merge_options
from .noise_schedule_radd import NoiseSchedule, get_noise_schedule, uniform_time_grid
from .token_draw_radd import TokenDraw, row_generators


@dataclass
class RADDGenerationOutput(ModelOutput):
    """
    Attributes:
        sequences (`torch.LongTensor` of shape `(B * num_return_sequences, L)`): Filled ids.
        nfe (`torch.LongTensor` of shape `(B * num_return_sequences,)`): Network calls each row took part in.
        forward_passes (`int`): Batched network calls: the largest `nfe`.
        history (`list` of `(rows, sequences)`, *optional*): After each pass, the rows in it and their ids.
    """

    sequences: torch.LongTensor | None = None
    nfe: torch.LongTensor | None = None
    forward_passes: int | None = None
    history: list[tuple[torch.LongTensor, torch.LongTensor]] | None = None


@dataclass
class RevealPlan:
    """
    When each position is revealed, drawn before the network runs.

    Attributes:
        event (`torch.LongTensor` of shape `(B, L)`): Index of the row's network call that reveals it; -1 if fixed.
        nfe (`torch.LongTensor` of shape `(B,)`): Network calls of each row.
    """

    event: torch.LongTensor
    nfe: torch.LongTensor


def draw_reveal_plan(
    free: torch.BoolTensor,
    options: RADDGenerationConfig,
    noise_schedule: NoiseSchedule,
    generators: list[torch.Generator],
    order: torch.LongTensor | None = None,
) -> RevealPlan:
    """
    Group the free positions (B, L) of each row into events, latest time first.

    Args:
        free (`torch.BoolTensor` of shape `(B, L)`): Positions to fill.
        options (`RADDGenerationConfig`): `algorithm`, `num_steps`, `order` and `use_cache` are read.
        noise_schedule (`NoiseSchedule`): Clock of "tweedie" and "euler".
        generators (list of `torch.Generator`): One a row.
        order (`torch.LongTensor` of shape `(B, L')`, *optional*): Positions of each row in the order of revealing.
    """
    cumulative = None
    if options.algorithm != "any_order" and options.num_steps is not None:
        reveal = noise_schedule.reveal_distribution(uniform_time_grid(options.num_steps), options.algorithm)
        cumulative = reveal.flip(0).cumsum(0)  # entry j: revealed in the first j + 1 steps taken
    event = torch.full(free.shape, -1, dtype=torch.long)
    nfe = torch.zeros(len(free), dtype=torch.long)
    for row, positions in enumerate(free.cpu()):
        positions = positions.nonzero()[:, 0]  # (l,)
        if not len(positions):
            continue
        if cumulative is not None:
            uniform = _uniform(len(positions), generators[row])
            step = torch.searchsorted(cumulative, uniform, right=True).clamp(max=options.num_steps - 1)
            nfe[row] = options.num_steps
            if options.use_cache:
                values, step = torch.unique(step, return_inverse=True)
                nfe[row] = len(values)
        else:
            step = _reveal_rank(positions, options, generators[row], None if order is None else order[row])
            if options.algorithm == "any_order" and options.num_steps is not None:
                step = step // -(-len(positions) // options.num_steps)  # ceil(l / n) positions a pass
            nfe[row] = step.max() + 1
        event[row, positions] = step
    return RevealPlan(event=event.to(free.device), nfe=nfe.to(free.device))


def _reveal_rank(
    positions: torch.LongTensor, options: RADDGenerationConfig, generator: torch.Generator, order: torch.Tensor | None
) -> torch.LongTensor:
    """Rank 0..l-1 of each of the free `positions` (l,) in the order of revealing."""
    if options.algorithm != "any_order" or (order is None and options.order == "random"):
        return _uniform(len(positions), generator).argsort().argsort()
    if order is None:
        rank = torch.arange(len(positions))
        return rank if options.order == "forward" else rank.flip(0)
    place = torch.full((int(max(order.max(), positions.max())) + 1,), -1, dtype=torch.long)
    place[order] = torch.arange(len(order))
    place = place[positions]
    if bool((place < 0).any()):
        raise ValueError(f"`order` must contain every masked position, got none for {positions[place < 0].tolist()}.")
    return place.argsort().argsort()


def _uniform(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device).cpu()


class DiffusionGenerationMixin:
    """Sampling for any module that maps ids and an attention mask to logits; gives it `diffusion_generate`."""

    output_modalities = ("text",)

    @torch.no_grad()
    def diffusion_generate(
        self,
        input_ids: torch.LongTensor | None = None,
        generation_config: GenerationConfig | None = None,
        attention_mask: torch.Tensor | None = None,
        logits_processor: LogitsProcessorList | None = None,
        streamer=None,
        generator: torch.Generator | None = None,
        *,
        seed: int | list[int] | None = None,
        batch_size: int | None = None,
        **kwargs,
    ) -> RADDGenerationOutput | torch.LongTensor:
        """
        Fill every mask token; every other id is kept.

        1. merge the options; 2. lay out the canvas; 3. draw the reveal plan; 4. run the network once for each event
        of a row, drawing only the tokens revealed by it; 5. return the sequences and what they cost.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, L)`, *optional*):
                Text with mask tokens anywhere. Without it, `batch_size` samples of `max_length` from nothing.
            generation_config (`GenerationConfig`, *optional*): In place of the model's own, as a whole: an option
                that it leaves out has its default.
            attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding, on any side; never filled.
            logits_processor (`LogitsProcessorList`, *optional*): Applied to logits (N, V) with ids (N, L), after the
                penalties and before the temperature.
            streamer (`BaseStreamer`, *optional*): For one row: receives the text before the first mask, drafts of the
                rest (if it has `put_draft`) and the finished rest.
            generator (`torch.Generator`, *optional*):
                Draws one seed a row, in row order. Tokens are drawn on its device, so a CPU generator gives the same
                draws on any hardware.
            seed (`int` or list of `int`, *optional*):
                Row i draws from (seed, i), or from the i-th of the seeds: its sample depends on no other row. With
                neither `seed` nor `generator`, torch's default generator gives the row seeds.
            batch_size (`int`, *optional*): Number of unconditional samples, 1 by default.
            kwargs: Any option of `RADDGenerationConfig`; `order` may also be a LongTensor (L,) or (B, L).

        Returns:
            `torch.LongTensor` (B * num_return_sequences, L), or a `RADDGenerationOutput` with
            `return_dict_in_generate`.

        Raises:
            ValueError: An unknown option or wrong value, ids outside the vocabulary, masks of another shape, a canvas
                longer than `max_position_embeddings`.
        """
        # 1. options
        order = kwargs.pop("order", None)
        if order is not None and not torch.is_tensor(order):
            kwargs["order"], order = order, None
        options = merge_options(getattr(self, "generation_config", None), generation_config, kwargs)
        mask_token_id = resolve_mask_token_id(options.mask_token_id, self.config)
        reject_ids_outside("suppress_tokens", options.suppress_tokens or (), self.config.vocab_size)
        # 2. canvas
        canvas, attention_mask = prepare_canvas(
            input_ids, attention_mask, options, mask_token_id, self.config, batch_size, self.device
        )
        order = _check_order(options.order if order is None else order, canvas.shape, options.algorithm)
        repeats = options.num_return_sequences
        canvas = canvas.repeat_interleave(repeats, 0)
        if attention_mask is not None:
            attention_mask = attention_mask.repeat_interleave(repeats, 0)
        if order is not None:
            order = order.repeat_interleave(repeats, 0)
        free = canvas == mask_token_id
        if attention_mask is not None:
            free &= attention_mask.bool()
        if not bool(free.any()):
            warnings.warn("No mask token in `input_ids`: nothing to fill, it is returned as it came.", stacklevel=2)
        # 3. plan
        generators = row_generators(len(canvas), seed, generator, self.device)
        plan = draw_reveal_plan(free, options, get_noise_schedule(self.config), generators, order)
        # 4. loop
        if streamer is not None and len(canvas) != 1:
            raise ValueError(f"`streamer` must be None for more than one sequence, got {len(canvas)} sequences.")
        draw = TokenDraw(options, mask_token_id, logits_processor, canvas.device)
        with evaluation_mode(self):
            history = self._run_plan(canvas, attention_mask, plan, draw, generators, options, streamer)
        # 5. output
        if not options.return_dict_in_generate:
            return canvas
        passes = int(plan.nfe.max()) if len(plan.nfe) else 0
        return RADDGenerationOutput(sequences=canvas, nfe=plan.nfe, forward_passes=passes, history=history)

    def generate(self, *args, **kwargs) -> RADDGenerationOutput | torch.LongTensor:
        """`diffusion_generate`: a bidirectional model has no other way to generate."""
        return self.diffusion_generate(*args, **kwargs)

    def _run_plan(
        self,
        canvas: torch.LongTensor,
        attention_mask: torch.Tensor | None,
        plan: RevealPlan,
        draw: TokenDraw,
        generators: list[torch.Generator],
        options: RADDGenerationConfig,
        streamer,
    ) -> list[tuple[torch.LongTensor, torch.LongTensor]] | None:
        """Fill `canvas` in place, pass by pass: in pass p each unfinished row is at its own event p."""
        history = [] if options.output_history else None
        passes = int(plan.nfe.max()) if len(plan.nfe) else 0
        if streamer is not None:
            real = slice(None) if attention_mask is None else attention_mask[0].bool()
            event = plan.event[0, real]
            start = int((event >= 0).int().argmax()) if passes else len(event)
            streamer.put(canvas[0, real][:start].cpu())
        for p in logging.tqdm(range(passes), desc="Sampling", unit="pass", disable=not options.progress_bar):
            rows = (plan.nfe > p).nonzero()[:, 0]
            ids, reveal = canvas[rows], plan.event[rows] == p
            row_mask = None if attention_mask is None else attention_mask[rows]
            place = reveal.nonzero()  # (N, 2), row-major
            tokens, start_of_chunk = [], 0
            for logits in self._revealed_logits(ids, row_mask, reveal, options.chunk_size):
                local = place[start_of_chunk : start_of_chunk + len(logits), 0]
                sources = [generators[i] for i in rows[local].tolist()]
                tokens.append(draw(ids[local] if draw.reads_ids else None, logits, sources))
                start_of_chunk += len(logits)
            if tokens:
                ids[reveal] = torch.cat(tokens)
                canvas[rows] = ids
            if history is not None:
                history.append((rows, ids))
            if streamer is not None and hasattr(streamer, "put_draft"):
                streamer.put_draft(canvas[0, real][start:].cpu())
        draw.check()
        if streamer is not None:
            streamer.put(canvas[0, real][start:].cpu())
            streamer.end()
        return history

    def _revealed_logits(
        self, ids: torch.LongTensor, attention_mask: torch.Tensor | None, reveal: torch.BoolTensor, chunk_size: int
    ) -> Iterator[torch.Tensor]:
        """Logits (n, V) of the positions in `reveal` (B, L), row-major, at most `chunk_size` at a time."""
        logits = self(input_ids=ids, attention_mask=attention_mask).logits[reveal]
        yield from logits.split(chunk_size) if len(logits) else ()

    def adjust_generation_fn(
        self,
        generation_config,
        from_auto_class,
        from_pipeline,
        pretrained_model_name_or_path,
        cache_dir,
        force_download,
        proxies,
        local_files_only,
        token,
        revision,
        subfolder,
        trust_remote_code,
        **kwargs,
    ):
        """Called by `from_pretrained`: take the given generation config, or the one saved beside the weights."""
        if generation_config is not None:
            self.generation_config = merge_options(None, generation_config, {})
        elif pretrained_model_name_or_path is not None:
            source = {
                "cache_dir": cache_dir,
                "force_download": force_download,
                "proxies": proxies,
                "local_files_only": local_files_only,
                "token": token,
                "revision": revision,
                "subfolder": subfolder,
            }
            saved = cached_file(
                pretrained_model_name_or_path,
                GENERATION_CONFIG_NAME,
                _raise_exceptions_for_missing_entries=False,
                **source,
            )
            self.generation_config = self.generation_config_class()
            if saved is not None:  # weights without a generation config: the defaults hold
                self.generation_config = self.generation_config_class.from_pretrained(
                    pretrained_model_name_or_path,
                    _from_auto=from_auto_class,
                    _from_pipeline=from_pipeline,
                    **source,
                )


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
    longest = getattr(config, "max_position_embeddings", None)
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
    if longest is not None and canvas.shape[1] > longest:
        raise ValueError(
            f"`input_ids` and new tokens must fit max_position_embeddings={longest}, got length {canvas.shape[1]}."
        )
    return canvas, attention_mask


def append_masks(
    canvas: torch.LongTensor,
    attention_mask: torch.Tensor | None,
    options: RADDGenerationConfig,
    mask_token_id: int,
    config,
) -> tuple[torch.LongTensor, torch.Tensor | None]:
    """Masks after each row's last real token: `max_new_tokens` more or `max_length` in all; padding on the left."""
    if not len(canvas):
        return canvas, attention_mask
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
    rows = [torch.cat([row, row.new_full((n,), mask_token_id)]) for row, n in zip(rows, counts, strict=True)]
    pad = padding_token_id(options, mask_token_id, config)
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows], device=canvas.device)
    real = torch.arange(padded.shape[1], device=canvas.device) >= padded.shape[1] - lengths[:, None]
    return padded, None if bool(real.all()) else real.long()


def padding_token_id(options: RADDGenerationConfig, mask_token_id: int, config) -> int:
    """`options.pad_token_id`, or the model's, or any id; never M, which must not come out."""
    pad = options.pad_token_id
    if pad is None:
        pad = getattr(config, "pad_token_id", None)
    if pad is None or pad == mask_token_id:
        pad = 0 if mask_token_id else 1
    if not is_int(pad) or not 0 <= pad < config.vocab_size:
        raise ValueError(f"`pad_token_id` must be an id in [0, vocab_size={config.vocab_size}), got {pad!r}.")
    return pad


@contextmanager
def evaluation_mode(model: nn.Module):
    """Turn dropout off inside the block and leave every submodule's mode as it was."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def reject_ids_outside(name: str, ids, vocab_size: int):
    """Raise a ValueError naming the option if one of `ids` is no id of the vocabulary."""
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"`{name}` must hold ids in [0, vocab_size={vocab_size}), got {outside}.")


def _check_order(order, shape: torch.Size, algorithm: str) -> torch.LongTensor | None:
    """A given order as a CPU tensor (B, L'), or `None` for a named one."""
    if isinstance(order, str):
        return None
    if algorithm != "any_order":
        raise ValueError(f"`order` must be left at its default unless algorithm='any_order', got {algorithm!r}.")
    order = torch.as_tensor(order).cpu()
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
