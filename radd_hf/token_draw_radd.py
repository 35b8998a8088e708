# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""From logits to tokens: processors, the categorical draw, and one random generator a row.

Shapes: N positions, L length, V vocabulary.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass
class Chunk:
    """
    Some positions of a pass over R rows.

    Attributes:
        logits (`torch.Tensor` of shape `(N, V)`): Theirs, free to be overwritten.
        row (`torch.LongTensor` of shape `(N,)`): Row of each in the pass, ascending.
        column (`torch.LongTensor` of shape `(N,)`): Column of each, ascending within a row.
        text (`torch.LongTensor` of shape `(R, L)`): Ids as the network saw them, with the mask token at padding.
        filled (`torch.LongTensor` of shape `(R, L)`): `text` and what was drawn in this pass so far.
        allowed (`torch.Tensor` of shape `(N, V)`, *optional*): With bad words, the scores that the warpers get.
    """

    logits: torch.Tensor
    row: torch.LongTensor
    column: torch.LongTensor
    text: torch.LongTensor
    filled: torch.LongTensor
    allowed: torch.Tensor | None = None


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
        self.penalties = build_penalties(options, logits_processor, device)
        self.warpers = build_warpers(options)
        self.bad_words = [word for word in options.bad_words_ids or () if len(word) > 1]
        self.reads_ids = len(self.penalties) + len(self.warpers) + len(self.bad_words) > 0
        self._all_valid = torch.ones((), dtype=torch.bool, device=device)

    def scores(self, chunk: "Chunk") -> torch.Tensor:
        """Processed logits (N, V), -inf at the mask token: their softmax is the law of the draw."""
        scores = chunk.logits
        scores[:, self.mask_token_id] = float("-inf")
        if self.penalties:  # they see no mask token as text; -inf columns stay so
            scores = self.penalties(chunk.text[chunk.row], scores.float())
            scores[:, self.mask_token_id] = float("-inf")
        if self.bad_words:
            for here, banned in zip(scores, self._banned(chunk, chunk.text), strict=True):
                here[banned] = float("-inf")
            chunk.allowed = scores.clone()
        return self._warp(chunk.text[chunk.row], scores) if self.warpers else scores

    def _warp(self, ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        scores = self.warpers(ids, scores.float())
        scores[:, self.mask_token_id] = float("-inf")
        return scores

    def __call__(
        self, chunk: "Chunk", generators: list[torch.Generator]
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Tokens (N,) of a chunk, drawn with one generator a position, and with `output_log_probs` their
        log-probabilities (N,) float32."""
        law = self.scores(chunk)
        token = self._draw(chunk, law, generators)
        if not self.with_log_probs:
            return token, None
        law = law.float()
        return token, law.gather(-1, token[:, None])[:, 0] - law.logsumexp(-1)

    def _draw(self, chunk: "Chunk", law: torch.Tensor, generators: list[torch.Generator]) -> torch.LongTensor:
        """A token (N,) from each law (N, V); what a bad word forbids becomes -inf there."""
        noise = None
        if not self.greedy:
            noise = torch.empty(law.shape, dtype=self.dtype, device=generators[0].device)
            for one, generator in zip(noise, generators, strict=True):  # a call a position: chunks change nothing
                one.exponential_(generator=generator)
            noise = noise.log_().neg_().to(law.device)  # standard Gumbel
        if self.bad_words:
            self._forbid_bad_words(chunk, law, noise)
        scores = law if noise is None else noise.add_(law)
        scores[:, self.mask_token_id] = float("-inf")
        best, token = scores.max(dim=-1)
        self._all_valid &= (best > float("-inf")).all()
        return token

    def _forbid_bad_words(self, chunk: "Chunk", law: torch.Tensor, noise: torch.Tensor | None):
        """From left to right, the law (in place) without what completes a bad word now that this pass has drawn."""
        for i, banned in enumerate(self._banned(chunk, chunk.filled)):
            if banned:
                here = slice(i, i + 1)
                chunk.allowed[i, banned] = float("-inf")
                allowed = chunk.allowed[here]
                law[here] = self._warp(chunk.text[chunk.row[here]], allowed) if self.warpers else allowed
            token = (law[i] if noise is None else law[i] + noise[i]).argmax()
            chunk.filled[chunk.row[i], chunk.column[i]] = token

    def _banned(self, chunk: "Chunk", text: torch.LongTensor) -> Iterator[list[int]]:
        """For each position, when its turn comes, the tokens that would complete a bad word in `text` (R, L)."""
        for row, column in zip(chunk.row.tolist(), chunk.column.tolist(), strict=True):
            yield completing_tokens(self.bad_words, text[row].tolist(), column)

    def certainty(self, chunk: "Chunk") -> torch.Tensor:
        """How sure the law of the draw is at each position, (N,) float32: see `AdaptiveReveals`."""
        log_probs = torch.log_softmax(self.scores(chunk).float(), dim=-1)
        if self.algorithm == "entropy":
            return torch.special.entr(log_probs.exp_()).sum(-1).neg()
        best = log_probs.topk(2, dim=-1).values.exp()
        return best[:, 0] if self.algorithm == "confidence" else best[:, 0] - best[:, 1]

    def check(self):
        """Raise a ValueError if some position had no token to draw: every logit -inf or not a number."""
        if not bool(self._all_valid):
            raise ValueError(
                "The logits of some position are all -inf or NaN: `suppress_tokens`, `bad_words_ids`, "
                "`logits_processor` or the model leave no token to draw."
            )


def build_penalties(
    options: RADDGenerationConfig, custom: LogitsProcessorList | None, device: torch.device
) -> LogitsProcessorList:
    """transformers' processors for `options` that say which tokens, then `custom`."""
    processors = LogitsProcessorList()
    if custom is not None and not (isinstance(custom, (list, tuple)) and all(map(callable, custom))):
        raise ValueError(f"`logits_processor` must be a LogitsProcessorList or None, got {type(custom).__name__}.")
    if options.repetition_penalty is not None and options.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=float(options.repetition_penalty)))
    suppressed = [*(options.suppress_tokens or ()), *(w[0] for w in options.bad_words_ids or () if len(w) == 1)]
    if suppressed:
        processors.append(SuppressTokensLogitsProcessor(suppressed, device=device))
    processors.extend(custom or [])
    return processors


def build_warpers(options: RADDGenerationConfig) -> LogitsProcessorList:
    """transformers' processors for `options` that reshape the law of the tokens that are left; none if greedy."""
    processors = LogitsProcessorList()
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


def completing_tokens(words: list[list[int]], ids: list[int], column: int) -> list[int]:
    """Tokens that, put at `column` of `ids` (L), would complete one of `words` there."""
    tokens = set()
    for word in words:
        for place, token in enumerate(word):
            start = column - place
            rest = [*word[:place], *word[place + 1 :]]
            if start >= 0 and [*ids[start:column], *ids[column + 1 : start + len(word)]] == rest:
                tokens.add(token)
    return sorted(tokens)


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
