# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""RADD models in lm-evaluation-harness: after `import radd_hf.lm_eval` the model "radd", with `pretrained=FOLDER`."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from .checks_radd import is_int, resolve_mask_token_id
from .evaluation import estimate_likelihood
from .generation_config_radd import RADDGenerationConfig
from .generation_radd import diffusion_generate
from .perplexity import run_settings
from .token_draw_radd import mix_seed

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError("radd_hf.lm_eval needs `pip install lm-eval`.") from error

# Spans scored together: enough to fill batches, few enough for the bar to move.
_SPANS_AT_ONCE = 64
# Options of `generate_until` that mean the same in `diffusion_generate`.
_GENERATION_OPTIONS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def scoring_windows(
    context: Sequence[int], continuation: Sequence[int], max_length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """
    (given, scored) pieces of at most `max_length` tokens together that score each token of `continuation` once.

    One piece, its context cut on the left, where the continuation fits; otherwise pieces of half a window, each given
    the tokens before it as far as they fit.
    """
    size = len(continuation) if len(continuation) <= max_length else max(1, max_length // 2)
    text = [*context, *continuation]
    for start in range(len(context), len(text), size or 1):
        scored = text[start : start + size]
        yield text[max(0, start + len(scored) - max_length) : start], scored


def rolling_windows(tokens: Sequence[int], max_length: int) -> list[list[int]]:
    """Consecutive windows of `max_length` tokens, the last one shorter: as `dataset_perplexity` scores a text."""
    return [list(tokens[i : i + max_length]) for i in range(0, len(tokens), max_length)]


@register_model("radd")
class RADDEvalLM(TemplateLM):
    """
    Likelihoods by `estimate_likelihood` (nats; bounds unless `loss_type` is an order), text by `diffusion_generate`.

    A continuation is scored given its context: log p(continuation | context), the context's right end kept. What is
    longer than the model reads is scored in windows, never skipped. An empty context is none, not an EOS token.

    Args:
        pretrained (`str` or `nn.Module`): A folder, a Hub name or a model.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Defaults to that of `pretrained`.
        revision (`str`, *optional*): Of the model on the Hub.
        loss_type (`str`, *optional*, defaults to `"ao"`), num_samples (`int`, *optional*, defaults to 128):
            As in `estimate_likelihood`.
        is_greedy (`bool`, *optional*, defaults to `True`): Also fill each continuation greedily from left to right, at
            one network call a token, for the harness's `is_greedy`; False reports False for all.
        batch_size (`int` or `str`, *optional*, defaults to 64): Rows in one network call ("auto" is 64).
        max_length (`int`, *optional*): Defaults to the config's `max_position_embeddings`.
        max_gen_toks (`int`, *optional*, defaults to 64): Tokens generated where a task does not say.
        seed (`int`, *optional*, defaults to 0): Request i draws from (`seed`, i).
        device (`str`, *optional*): Where a loaded model goes; a given model stays where it is.
        dtype (`str`, *optional*, defaults to `"float32"`): Of a loaded model.
        generation (`Any`): Any other option of `RADDGenerationConfig`, such as `algorithm=confidence`.
    """

    def __init__(
        self,
        pretrained: str | nn.Module,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        *,
        revision: str | None = None,
        loss_type: str = "ao",
        num_samples: int = 128,
        is_greedy: bool = True,
        batch_size: int | str = 64,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 64,
        seed: int = 0,
        device: str | None = None,
        dtype: str = "float32",
        **generation,
    ):
        super().__init__()
        if isinstance(pretrained, str):
            model = AutoModelForMaskedLM.from_pretrained(pretrained, revision=revision, dtype=getattr(torch, dtype))
            self.model = model.to(device or "cpu").eval()
            tokenizer = tokenizer or pretrained
        else:
            self.model = pretrained
        if isinstance(tokenizer, str):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer, revision=revision)
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given with a model that is not loaded by name.")
        self.tokenizer = tokenizer
        self._device = next(self.model.parameters()).device
        self.mask_token_id = resolve_mask_token_id(None, self.model.config)
        self.max_length = max_length or self.model.config.max_position_embeddings
        # the harness passes numbers as text
        rows = str(batch_size).partition(":")[0]
        self.batch_size = 64 if rows == "auto" else int(rows)
        self.options = {"loss_type": loss_type, "num_samples": num_samples}
        self.greedy, self.max_gen_toks, self.seed = is_greedy, max_gen_toks, seed
        if not is_int(seed):
            raise ValueError(f"`seed` must be an integer, got {seed!r}.")
        own = getattr(self.model, "generation_config", None)
        own = own.to_dict() if isinstance(own, RADDGenerationConfig) else {}
        for name in ("max_length", "max_new_tokens", "num_return_sequences"):
            own.pop(name, None)
        self.generation_config = RADDGenerationConfig.from_dict({**own, **generation})

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's EOS."""
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def get_model_info(self) -> dict:
        """Everything a result depends on, for the harness's result file."""
        return {
            **run_settings(self.model),
            **self.options,
            "seed": self.seed,
            "max_length": self.max_length,
            "is_greedy": self.greedy,
            "generation_config": self.generation_config.to_dict(),
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Token ids, without special tokens unless asked for."""
        return self.tokenizer(string, add_special_tokens=bool(add_special_tokens), verbose=False)["input_ids"]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context) in nats and whether greedy left-to-right filling gives it, a request."""
        pairs = []
        for context, continuation in (request.args for request in requests):
            given, scored = (
                self._encode_pair(context, continuation) if context else ([], self.tok_encode(continuation))
            )
            pairs.append(((context, continuation), given, scored))
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs
    ) -> list[tuple[float, bool]]:
        windows = [list(scoring_windows(given, scored, self.max_length)) for _, given, scored in requests]
        flat = [window for some in windows for window in some]
        scores = iter(self._score(flat, disable_tqdm))
        greedy = iter(self._is_greedy(flat, disable_tqdm) if self.greedy else [False] * len(flat))
        results = []
        for (texts, _, _), some in zip(requests, windows, strict=True):
            total = -sum(next(scores) for _ in some)
            agrees = [next(greedy) for _ in some]
            results.append((total, all(agrees)))
            self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of each text in nats, in consecutive windows: the sum that `dataset_perplexity` gives for these."""
        windows = [rolling_windows(self.tok_encode(request.args[0]), self.max_length) for request in requests]
        scores = iter(self._score([([], window) for some in windows for window in some], disable_tqdm))
        results = []
        for request, some in zip(requests, windows, strict=True):
            results.append(-sum(next(scores) for _ in some))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, results[-1])
        return results

    def _score(self, windows: list[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[float]:
        """NLL of each (given, scored) piece, nats."""
        results = []
        with logging.tqdm(total=len(windows), desc="likelihood", disable=True if disable_tqdm else None) as bar:
            for first in range(0, len(windows), _SPANS_AT_ONCE):
                part = windows[first : first + _SPANS_AT_ONCE]
                ids, mask = self._pad([[*given, *scored] for given, scored in part])
                loss_mask = mask.bool()
                for row, (given, _) in zip(loss_mask, part, strict=True):
                    row[: len(given)] = False
                seeds = [mix_seed(self.seed, first + i) for i in range(len(part))]
                masks = {"attention_mask": mask, "loss_mask": loss_mask}
                found = estimate_likelihood(
                    self.model, ids, **masks, **self.options, batch_size=self.batch_size, seed=seeds
                )
                results += found.nll.tolist()
                bar.update(len(part))
        return results

    def _is_greedy(self, windows: list[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[bool]:
        """Whether each scored piece is what greedy filling from left to right gives."""
        config = RADDGenerationConfig(algorithm="any_order", order="forward", do_sample=False)
        results = [True] * len(windows)
        order = sorted(range(len(windows)), key=lambda i: len(windows[i][1]))
        with logging.tqdm(total=len(windows), desc="greedy", disable=True if disable_tqdm else None) as bar:
            for first in range(0, len(order), self.batch_size):
                part = order[first : first + self.batch_size]
                rows = [[*windows[i][0], *[self.mask_token_id] * len(windows[i][1])] for i in part]
                ids, mask = self._pad(rows)
                if bool((ids == self.mask_token_id).any()):
                    filled = diffusion_generate(self.model, ids, config, attention_mask=mask, seed=self.seed)
                    for i, row in zip(part, filled.tolist(), strict=True):
                        given, scored = windows[i]
                        results[i] = row[len(given) : len(given) + len(scored)] == list(scored)
                bar.update(len(part))
        return results

    def _pad(self, rows: list[list[int]]) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Ids and attention mask on the model's device, padded on the right."""
        tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
        ids = nn.utils.rnn.pad_sequence(tensors, batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        return ids.to(self._device), mask.long().to(self._device)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Text after each context, cut at EOS and at the first of `until`; greedy unless the task samples."""
        results = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        with logging.tqdm(total=len(requests), desc="generation", disable=True if disable_tqdm else None) as bar:
            for members in groups.values():
                members.sort(key=lambda i: len(requests[i].args[0]))
                for first in range(0, len(members), self.batch_size):
                    part = members[first : first + self.batch_size]
                    contexts = [requests[i].args[0] for i in part]
                    texts = self._generate(contexts, requests[part[0]].args[1], part)
                    for i, text in zip(part, texts, strict=True):
                        results[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    bar.update(len(part))
        return results

    def _generate(self, contexts: list[str], options: Mapping, indices: list[int]) -> list[str]:
        """Continuations of `contexts` under one set of the harness's options."""
        length = int(options.get("max_gen_toks", self.max_gen_toks))
        if not 1 <= length < self.max_length:
            raise ValueError(f"`max_gen_toks` must be in [1, max_length={self.max_length}), got {length}.")
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        given = {name: options[name] for name in _GENERATION_OPTIONS if options.get(name) is not None}
        given.setdefault("do_sample", given.get("temperature", 0) > 0)
        if given.get("temperature") == 0:
            given.pop("temperature")
            given["do_sample"] = False
        rows = [self.tok_encode(context)[length - self.max_length :] or [self.eot_token_id] for context in contexts]
        ids, mask = self._pad(rows)
        seeds = [mix_seed(self.seed, i) for i in indices]
        found = diffusion_generate(
            self.model, ids, self.generation_config, attention_mask=mask, seed=seeds, max_new_tokens=length, **given
        )
        texts = []
        for row in found[:, -length:].tolist():
            row = row[: row.index(self.eot_token_id)] if self.eot_token_id in row else row
            text = self.tokenizer.decode(row, skip_special_tokens=True)
            for stop in filter(None, until):
                text = text.partition(stop)[0]
            texts.append(text)
        return texts
