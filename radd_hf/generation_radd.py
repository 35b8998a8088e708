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
from transformers import CompileConfig, GenerationConfig, LogitsProcessorList
from transformers.utils import GENERATION_CONFIG_NAME, ModelOutput, cached_file, logging

from .canvas_radd import beyond_end, check_order, end_token_ids, padding_token_id, prepare_canvas, reject_ids_outside
from .checks_radd import resolve_mask_token_id
from .generation_config_radd import ADAPTIVE_ALGORITHMS, RADDGenerationConfig, merge_options
from .noise_schedule_radd import get_noise_schedule
from .reveal_plan_radd import AdaptiveReveals, RevealPlan, block_index, draw_reveal_plan
from .token_draw_radd import Chunk, TokenDraw, row_generators


@dataclass
class RADDGenerationOutput(ModelOutput):
    """
    Attributes:
        sequences (`torch.LongTensor` of shape `(B * num_return_sequences, L)`): Filled ids.
        nfe (`torch.LongTensor` of shape `(B * num_return_sequences,)`): Network calls each row took part in.
        forward_passes (`int`): Batched network calls: the largest `nfe`.
        reveal_pass (`torch.LongTensor` of shape `(B * num_return_sequences, L)`): Index of the row's network call that
            the token was drawn from; -1 at given tokens and, with `trim_at_eos`, beyond the end.
        lengths (`torch.LongTensor` of shape `(B * num_return_sequences,)`, *optional*): With `trim_at_eos`, real
            tokens of each row, the end token included.
        log_probs (`torch.Tensor` of shape `(B * num_return_sequences, L)`, *optional*): With `output_log_probs`, the
            log-probability, nats, of each token under the softmax of its logits after all processors (greedy: before
            the likeliest is taken); 0 at given tokens and, with `trim_at_eos`, beyond the end. Where one position is
            revealed a pass, their sum is the log-probability of the text in that order.
        history (`list` of `(rows, sequences)`, *optional*): After each pass, the rows in it and their ids.
    """

    sequences: torch.LongTensor | None = None
    nfe: torch.LongTensor | None = None
    forward_passes: int | None = None
    reveal_pass: torch.LongTensor | None = None
    lengths: torch.LongTensor | None = None
    log_probs: torch.Tensor | None = None
    history: list[tuple[torch.LongTensor, torch.LongTensor]] | None = None


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
                penalties and before the temperature; the ids hold the mask token at holes and at padding.
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
        ends = end_token_ids(options, self.config) if options.trim_at_eos else None
        reject_ids_outside("suppress_tokens", options.suppress_tokens or (), self.config.vocab_size)
        words = [i for word in options.bad_words_ids or () for i in word]
        reject_ids_outside("bad_words_ids", words, self.config.vocab_size)
        if mask_token_id in words:
            raise ValueError(
                f"`bad_words_ids` must not hold the mask token's id, {mask_token_id}: it never comes out."
            )
        # 2. canvas
        canvas, attention_mask = prepare_canvas(
            input_ids, attention_mask, options, mask_token_id, self.config, batch_size, self.device
        )
        order = check_order(options.order if order is None else order, canvas.shape, options.algorithm)
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
            warnings.warn("No mask token in `input_ids`: nothing to fill, it is returned as it came.", stacklevel=3)
        # 3. plan
        generators = row_generators(len(canvas), seed, generator, self.device)
        plan = self._draw_plan(free, attention_mask, options, generators, order)
        # 4. loop
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise ValueError(f"`streamer` must be a BaseStreamer or None, got {streamer!r}.")
        if streamer is not None and len(canvas) != 1:
            raise ValueError(f"`streamer` must be None for more than one sequence, got {len(canvas)} sequences.")
        draw = TokenDraw(options, mask_token_id, logits_processor, canvas.device)
        output = RADDGenerationOutput(
            sequences=canvas,
            reveal_pass=torch.full_like(canvas, -1),
            log_probs=torch.zeros(canvas.shape, device=canvas.device) if options.output_log_probs else None,
            history=[] if options.output_history else None,
        )
        stream = None if streamer is None else _Stream(streamer, canvas, free, attention_mask)
        with evaluation_mode(self):
            self._run_plan(output, free, attention_mask, plan, draw, generators, options, ends, stream)
        draw.check()
        # 5. output
        output.nfe = plan.nfe
        output.forward_passes = int(plan.nfe.max()) if len(plan.nfe) else 0
        if ends is not None:
            beyond = beyond_end(canvas, free, attention_mask, ends)
            canvas.masked_fill_(beyond, padding_token_id(options, mask_token_id, self.config))
            output.reveal_pass.masked_fill_(beyond, -1)
            if output.log_probs is not None:
                output.log_probs.masked_fill_(beyond, 0.0)
            real = torch.ones_like(free) if attention_mask is None else attention_mask.bool()
            output.lengths = (real & ~beyond).sum(-1)
        if stream is not None:
            stream.end(output.lengths)
        return output if options.return_dict_in_generate else canvas

    def generate(self, *args, **kwargs) -> RADDGenerationOutput | torch.LongTensor:
        """`diffusion_generate`: a bidirectional model has no other way to generate."""
        return self.diffusion_generate(*args, **kwargs)

    def _draw_plan(
        self,
        free: torch.BoolTensor,
        attention_mask: torch.Tensor | None,
        options: RADDGenerationConfig,
        generators: list[torch.Generator],
        order: torch.LongTensor | None,
    ) -> RevealPlan | AdaptiveReveals:
        """Which positions each pass reveals, drawn now or decided pass by pass."""
        block = block_index(free, attention_mask, options.block_length)
        if options.algorithm in ADAPTIVE_ALGORITHMS:
            return AdaptiveReveals(free, options, block)
        return draw_reveal_plan(free, options, get_noise_schedule(self.config), generators, order, block)

    def _run_plan(
        self,
        output: RADDGenerationOutput,
        free: torch.BoolTensor,
        attention_mask: torch.Tensor | None,
        plan: RevealPlan | AdaptiveReveals,
        draw: TokenDraw,
        generators: list[torch.Generator],
        options: RADDGenerationConfig,
        ends: list[int] | None,
        stream: "_Stream | None",
    ):
        """Fill `output.sequences` in place, pass by pass, each row at its own next event; record what is asked for."""
        canvas, index = output.sequences, 0
        reveal_states = self._compiled_states(len(canvas), options) or self._reveal_states
        with logging.tqdm(
            total=plan.num_passes, desc="Sampling", unit="pass", disable=not options.progress_bar
        ) as bar:
            while (step := plan.next_pass(index, canvas, draw.mask_token_id)) is not None:
                rows, reveal = step
                ids = text = canvas[rows]
                row_mask = None if attention_mask is None else attention_mask[rows]
                if row_mask is not None and draw.reads_ids:
                    text = ids.masked_fill(~row_mask.bool(), draw.mask_token_id)  # no processor reads padding
                states = reveal_states(ids, row_mask, reveal)
                if plan.needs_certainty:
                    certainty = [draw.certainty(chunk) for chunk in self._chunks(text, states, reveal, draw)]
                    chosen = plan.choose(rows, reveal, torch.cat(certainty))
                    states, reveal = states[chosen[reveal]], chosen
                drawn = [
                    draw(chunk, [generators[i] for i in rows[chunk.row].tolist()])
                    for chunk in self._chunks(text, states, reveal, draw)
                ]
                if drawn:
                    ids[reveal] = torch.cat([tokens for tokens, _ in drawn])
                    canvas[rows] = ids
                    output.reveal_pass[rows] = output.reveal_pass[rows].masked_fill(reveal, index)
                if drawn and output.log_probs is not None:
                    log_probs = output.log_probs[rows]
                    log_probs[reveal] = torch.cat([value for _, value in drawn])
                    output.log_probs[rows] = log_probs
                if output.history is not None:
                    output.history.append((rows, ids))
                if stream is not None:
                    stream.draft()
                index += 1
                bar.update()
                if ends is not None and options.remasking is None:  # which may open holes again
                    beyond = beyond_end(canvas, free, attention_mask, ends)
                    holes = free & ~beyond & (canvas == draw.mask_token_id)
                    plan.stop(beyond.any(-1) & ~holes.any(-1), index)

    def _chunks(
        self, text: torch.LongTensor, states: torch.Tensor, reveal: torch.BoolTensor, draw: TokenDraw
    ) -> Iterator[Chunk]:
        """The positions in `reveal` (R, L), `chunk_size` at a time, with their logits; `text` as in `Chunk`."""
        row, column = reveal.nonzero(as_tuple=True)  # row-major, as the states are
        filled = text.clone() if draw.bad_words else text
        parts = (x.split(draw.chunk_size) for x in (states, row, column))
        for some, rows, columns in zip(*parts, strict=True):
            if len(rows):
                yield Chunk(self._state_logits(some), rows, columns, text, filled)

    def _compiled_states(self, num_rows: int, options: RADDGenerationConfig) -> "_CompiledStates | None":
        """`_reveal_states` through torch.compile if that is asked for."""
        if not options.compile:
            return None
        if options.compile_config is None and self.device.type == "cpu":
            warnings.warn("`compile=True` does nothing on a CPU without a `compile_config`.", stacklevel=5)
            return None
        return _CompiledStates(*self._state_source(), num_rows, options.compile_config)

    def _state_source(self) -> tuple[nn.Module, str]:
        """The module that gives all positions what `_state_logits` needs, and the name of that output."""
        return self, "logits"

    def _reveal_states(
        self, ids: torch.LongTensor, attention_mask: torch.Tensor | None, reveal: torch.BoolTensor
    ) -> torch.Tensor:
        """What `_state_logits` needs of the positions in `reveal` (B, L), row-major: here their logits (N, V)."""
        return self(input_ids=ids, attention_mask=attention_mask).logits[reveal]

    def _state_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits (n, V), free to be overwritten, from a part of `_reveal_states`."""
        return states.clone()

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


class _Stream:
    """What a streamer gets of one row: the text before the first mask, drafts of the rest, the finished rest."""

    def __init__(
        self, streamer, canvas: torch.LongTensor, free: torch.BoolTensor, attention_mask: torch.Tensor | None
    ):
        self.streamer, self.canvas = streamer, canvas
        self.real = slice(None) if attention_mask is None else attention_mask[0].bool()
        free = free[0, self.real]
        self.start = int(free.int().argmax()) if bool(free.any()) else len(free)
        streamer.put(self._text()[: self.start])

    def draft(self):
        """After a pass; a streamer without drafts ignores it."""
        if hasattr(self.streamer, "put_draft"):
            self.streamer.put_draft(self._text()[self.start :])

    def end(self, lengths: torch.LongTensor | None):
        """After the last pass, with the row's number of tokens where an end token was looked for."""
        self.streamer.put(self._text()[self.start : None if lengths is None else int(lengths[0])])
        self.streamer.end()

    def _text(self) -> torch.LongTensor:
        return self.canvas[0, self.real].cpu()


class _CompiledStates:
    """`_reveal_states` by a compiled network at one shape: missing rows are filled up, all positions are computed."""

    def __init__(self, module: nn.Module, name: str, num_rows: int, config: CompileConfig | None):
        # torch finds the code it has compiled before again, so a wrapper a call costs nothing; not `to_dict`, which
        # copies the backend, by which torch knows it
        config = config or CompileConfig(dynamic=False)
        names = ("fullgraph", "dynamic", "backend", "mode", "options")
        self.network = torch.compile(module, **{name: getattr(config, name) for name in names})
        self.name, self.num_rows = name, num_rows

    def __call__(
        self, ids: torch.LongTensor, attention_mask: torch.Tensor | None, reveal: torch.BoolTensor
    ) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        output = self.network(input_ids=self._fill_up(ids), attention_mask=self._fill_up(attention_mask))
        return getattr(output, self.name)[: len(ids)][reveal]

    def _fill_up(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """(R, L) -> (B, L): the last row again for each row that is done."""
        return x if x is None else torch.cat([x, x[-1:].expand(self.num_rows - len(x), -1)])


class _Backbone(DiffusionGenerationMixin):
    """The face of a sampler on a model that is not a `DiffusionGenerationMixin`."""

    def __init__(self, model: nn.Module):
        self.model, self.config = model, model.config

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()

    def __call__(self, **kwargs):
        return self.model(**kwargs)

    def _state_source(self) -> tuple[nn.Module, str]:
        return self.model, "logits"


def diffusion_generate(model: nn.Module, *args, **kwargs) -> RADDGenerationOutput | torch.LongTensor:
    """
    `DiffusionGenerationMixin.diffusion_generate` for any masked language model, such as a `BertForMaskedLM`.

    Args:
        model (`nn.Module`): Maps `input_ids` and `attention_mask` to an output with `logits` (B, L, V), and has a
            `config` with `vocab_size` and, unless the option is given, `mask_token_id`. Without a
            `config.noise_schedule` the clock is log-linear. It gets nothing else (no `token_type_ids`). Where its
            positions are absolute, padding on the left moves them; where they do not start at 0 (RoBERTa), give a
            `max_length` below its `max_position_embeddings`.
        args, kwargs: As for the method. Options start from `RADDGenerationConfig`'s defaults, not from those of the
            model's generation config.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ValueError(f"`model` must be a masked language model with a config, got {type(model).__name__}.")
    own = isinstance(model, DiffusionGenerationMixin)
    return (model if own else _Backbone(model)).diffusion_generate(*args, **kwargs)
