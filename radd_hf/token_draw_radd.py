# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""From logits to tokens: processors, the categorical draw, and one random generator a row.

Shapes: N positions, L length, V vocabulary.
"""

import hashlib

import torch
from transformers import LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .checks_radd import is_int
from .generation_config_radd import RADDGenerationConfig


class TokenDraw:
    """
    Draws tokens from logits (N, V): processors, then Gumbel-max in `sampling_dtype`, or the likeliest token.

    Gumbel-max, argmax(logits - log E) with E ~ Exp(1), needs no normalisation and changes its outcome with
    probability of the order of the logits' error only, so other batch shapes or hardware rarely change a token.
    """

    def __init__(
        self,
        options: RADDGenerationConfig,
        mask_token_id: int,
        logits_processor: LogitsProcessorList | None,
        device: torch.device,
    ):
        self.greedy = options.is_greedy
        self.dtype = getattr(torch, options.sampling_dtype)
        self.algorithm = options.algorithm
        self.chunk_size = options.chunk_size
        self.with_log_probs = options.output_log_probs
        self.mask_token_id = mask_token_id
        self.processors = build_logits_processors(options, logits_processor, device)
        self.reads_ids = len(self.processors) > 0
        self._all_valid = torch.ones((), dtype=torch.bool, device=device)

    def scores(self, ids: torch.LongTensor | None, logits: torch.Tensor) -> torch.Tensor:
        """Processed logits (N, V), -inf at the mask token: their softmax is the law of the draw."""
        logits[:, self.mask_token_id] = float("-inf")
        if not self.processors:
            return logits
        # processors see no mask token as text; -inf columns stay so
        scores = self.processors(ids, logits.float())
        scores[:, self.mask_token_id] = float("-inf")
        return scores

    def __call__(
        self, ids: torch.LongTensor | None, logits: torch.Tensor, generators: list[torch.Generator]
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Tokens (N,) for logits (N, V), and their log-probabilities (N,) float32 if `output_log_probs`.

        `generators` has one entry a position, `ids` (N, L) is the canvas of each.
        """
        scores = law = self.scores(ids, logits)
        if not self.greedy:
            noise = torch.empty(scores.shape, dtype=self.dtype, device=generators[0].device)
            for one, generator in zip(noise, generators, strict=True):  # a call a position: chunks change nothing
                one.exponential_(generator=generator)
            scores = noise.log_().neg_().to(scores.device).add_(scores)
            scores[:, self.mask_token_id] = float("-inf")
        best, token = scores.max(dim=-1)
        self._all_valid &= (best > float("-inf")).all()
        if not self.with_log_probs:
            return token, None
        law = law.float()
        return token, law.gather(-1, token[:, None])[:, 0] - law.logsumexp(-1)

    def certainty(self, ids: torch.LongTensor | None, logits: torch.Tensor) -> torch.Tensor:
        """How sure the law of the draw is at each position, (N,) float32: see `AdaptiveReveals`."""
        log_probs = torch.log_softmax(self.scores(ids, logits).float(), dim=-1)
        if self.algorithm == "entropy":
            return torch.special.entr(log_probs.exp_()).sum(-1).neg()
        best = log_probs.topk(2, dim=-1).values.exp()
        return best[:, 0] if self.algorithm == "confidence" else best[:, 0] - best[:, 1]

    def check(self):
        """Raise a ValueError if some position had no token to draw: every logit -inf or not a number."""
        if not bool(self._all_valid):
            raise ValueError(
                "The logits of some position are all -inf or NaN: `suppress_tokens`, `logits_processor` or the model "
                "leave no token to draw."
            )


def build_logits_processors(
    options: RADDGenerationConfig, custom: LogitsProcessorList | None, device: torch.device
) -> LogitsProcessorList:
    """transformers' processors for `options`: penalties, then `custom`, then (unless greedy) the warpers."""
    processors = LogitsProcessorList()
    if options.repetition_penalty is not None and options.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=float(options.repetition_penalty)))
    if options.suppress_tokens:
        processors.append(SuppressTokensLogitsProcessor(list(options.suppress_tokens), device=device))
    processors.extend(custom or [])
    if options.is_greedy:
        return processors
    if options.temperature is not None and options.temperature != 1:
        processors.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k is not None:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p is not None and options.top_p < 1:
        processors.append(TopPLogitsWarper(float(options.top_p)))
    if options.min_p is not None:
        processors.append(MinPLogitsWarper(float(options.min_p)))
    if options.typical_p is not None and options.typical_p < 1:
        processors.append(TypicalLogitsWarper(float(options.typical_p)))
    return processors


def row_generators(
    num_rows: int, seed: int | list[int] | None, generator: torch.Generator | None, device: torch.device
) -> list[torch.Generator]:
    """One generator a row, from (seed, row), from a seed a row, or from seeds that `generator` draws."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"`generator` must be a torch.Generator or None, got {generator!r}.")
    if seed is not None and generator is not None:
        raise ValueError("Only one of `seed` and `generator` may be given.")
    if seed is None:
        source = {} if generator is None else {"generator": generator, "device": generator.device}
        seeds = torch.randint(2**62, (num_rows,), **source).tolist()
    elif is_int(seed):
        seeds = [mix_seed(seed, row) for row in range(num_rows)]
    elif isinstance(seed, (list, tuple)) and len(seed) == num_rows and all(is_int(s) for s in seed):
        seeds = [mix_seed(s, 0) for s in seed]
    else:
        raise ValueError(f"`seed` must be an integer or a list of {num_rows} integers, one a sequence, got {seed!r}.")
    device = device if generator is None else generator.device
    return [torch.Generator(device=device).manual_seed(s) for s in seeds]


def mix_seed(*key: int | str) -> int:
    """A 63-bit seed for `key`, such as (seed, row); torch's CPU generator uses its low 32 bits."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
