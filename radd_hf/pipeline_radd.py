# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Text in, text out: the pipeline that tokenizes, fills the masks with `diffusion_generate` and decodes.

Shapes: B texts of a batch, R candidates a text, L length, n positions of a chunk.
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from string import whitespace

import torch
from transformers import Pipeline
from transformers.utils import logging

from .checks_radd import is_int
from .generation_config_radd import RADDGenerationConfig, merge_options, reject_unknown_options
from .generation_radd import evaluation_mode
from .token_draw_radd import mix_seed

DEFAULT_BATCH_SIZE = 8
MANY_PASSES = 32  # a lone batch with more forward passes than this gets a progress bar

# Arguments of a call of diffusion_generate that are not saved options.
_CALL_ARGUMENTS = ("generation_config", "generator", "logits_processor", "seed", "streamer")
# Options that the pipeline itself sets.
_RESERVED_OPTIONS = ("mask_token_id", "output_history", "output_log_probs", "return_dict_in_generate")


class InfillingPipeline(Pipeline):
    """
    Fill every mask of a text: `pipeline("radd-infilling", model=..., tokenizer=...)`.

    ```python
    pipe("The [MASK] [MASK] fox")
    pipe(prefix="It was a dark", suffix="night.", length=4, num_return_sequences=3, seed=0)
    pipe(["Call me [MASK].", {"prefix": "Call", "suffix": "Ishmael.", "length": 2}], batch_size=2)
    ```

    Args:
        inputs (`str`, `dict` or an iterable of them):
            A text with the tokenizer's mask token in it, or a dict of `prefix`, `suffix` and `length`. A list or tuple
            gives a list, any other iterable an iterator.
        prefix, suffix (`str`, *optional*): Instead of `inputs`: a text of exactly `length` masks between the two,
            which are tokenized apart, so that neither changes.
        length (`int`, *optional*): Number of tokens to insert between `prefix` and `suffix`.
        parse_mask (`bool`, *optional*, defaults to `True`): `False` reads the text, and any special token spelled in
            it, as ordinary text: a mask token that it quotes is kept. Then only `length`, `max_new_tokens` and
            `max_length` make masks.
        num_return_sequences (`int`, *optional*, defaults to 1): Candidates for each text.
        seed (`int` or list of `int`, *optional*): Candidate j of text i, counted over the whole call, is the row that
            `diffusion_generate(..., seed=[candidate_seed(seed, i, j)])` gives for that text alone; a list has one seed
            a text and gives candidate j of text i `candidate_seed(seed[i], 0, j)`. So answers depend neither on
            `batch_size` nor on `num_return_sequences`, and `pipe(text, seed=s)` is `diffusion_generate(ids, seed=s)`.
            Without it, `generator` or torch's default generator gives the seed of the call.
        batch_size (`int`, *optional*, defaults to 8): Texts of a forward pass.
        progress_bar (`bool`, *optional*): Count batches, or the forward passes of a lone batch. `None` shows it for
            several batches or more than 32 passes.
        kwargs: Any option of `RADDGenerationConfig` (`algorithm`, `num_steps`, `temperature`, `top_p`, ...), and
            `generation_config`, `generator`, `logits_processor`, `streamer`. `max_new_tokens` and `max_length` append
            masks to each text; a list of positions as `order` counts the tokens of each text.

    Returns:
        For each text a dict, or with `num_return_sequences > 1` a list of them, the best score first:

        - `text` (`str`): The filled text: all its tokens decoded. A text without a mask is returned as it came.
        - `infills` (`list[str]`): The token at each mask, decoded alone (part of a character decodes to U+FFFD).
        - `score` (`float`): Mean over the filled positions of log c_theta(token | given text), in nats, with all of
          them masked, whatever the temperature. It is a mean-field score: filled tokens do not see each other. It
          needs one more forward pass a batch, which `nfe` leaves out. 0 if nothing was filled.
        - `nfe` (`int`): Forward passes that this candidate took part in.

    Raises:
        ValueError: A tokenizer without mask token or with another one than the model's; an unknown option or a wrong
            value; a text longer than `max_position_embeddings`.
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._dropped: dict[str, bool] = {}  # characters seen so far: whether the tokenizer skips them
        if not hasattr(self.model, "diffusion_generate"):
            raise ValueError(f"`model` must have `diffusion_generate`, got {type(self.model).__name__}.")
        own = getattr(self.tokenizer, "mask_token_id", None)
        if own is None:
            raise ValueError(f"`tokenizer` must have a mask token, got {type(self.tokenizer).__name__} without one.")
        wanted = getattr(self.model.generation_config, "mask_token_id", None)
        if wanted is None:
            wanted = getattr(self.model.config, "mask_token_id", None)
        if wanted is not None and own != wanted:
            raise ValueError(f"`tokenizer.mask_token_id` must be the model's mask_token_id={wanted}, got {own}.")

    def _sanitize_parameters(self, parse_mask: bool | None = None, **kwargs) -> tuple[dict, dict, dict]:
        """Parameters of preprocess, of the call, and of postprocess (none)."""
        reserved = sorted(set(kwargs) & set(_RESERVED_OPTIONS))
        if reserved:
            raise ValueError(f"The pipeline sets the option(s) {reserved} itself: leave them out.")
        reject_unknown_options({name: v for name, v in kwargs.items() if name not in _CALL_ARGUMENTS})
        if parse_mask is not None and not isinstance(parse_mask, bool):
            raise ValueError(f"`parse_mask` must be True or False, got {parse_mask!r}.")
        return {} if parse_mask is None else {"parse_mask": parse_mask}, kwargs, {}

    def __call__(
        self,
        inputs: str | dict | Iterable[str | dict] | None = None,
        *,
        prefix: str | None = None,
        suffix: str | None = None,
        length: int | None = None,
        batch_size: int | None = None,
        **kwargs,
    ) -> dict | list | Iterator:
        """See the class."""
        # 1. inputs
        if not (prefix is None and suffix is None and length is None):
            if inputs is not None:
                raise ValueError("`inputs` must be None where `prefix`, `suffix` or `length` is given.")
            inputs = {"prefix": prefix, "suffix": suffix, "length": length}
        if not isinstance(inputs, Iterable) and not hasattr(inputs, "__getitem__"):
            raise ValueError(f"`inputs` must be a text, a dict or an iterable of them, got {inputs!r}.")
        batch_size = next(n for n in (batch_size, self._batch_size, DEFAULT_BATCH_SIZE) if n is not None)
        if not is_int(batch_size) or batch_size < 1:
            raise ValueError(f"`batch_size` must be a positive integer, got {batch_size!r}.")
        # 2. options
        preprocess_params, call_params, _ = self._sanitize_parameters(**kwargs)
        call_params = {**self._forward_params, **call_params}
        order = call_params.get("order")
        if isinstance(order, tuple):
            call_params["order"] = list(order)
        elif torch.is_tensor(order):
            if order.dim() != 1:
                raise ValueError(f"`order` must have one dimension, got shape {tuple(order.shape)}.")
            call_params["order"] = order.tolist()
        call = {name: call_params.pop(name, None) for name in _CALL_ARGUMENTS}
        show = call_params.pop("progress_bar", None)
        if show is not None and not isinstance(show, bool):
            raise ValueError(f"`progress_bar` must be None, True or False, got {show!r}.")
        options = merge_options(self.model.generation_config, call.pop("generation_config"), call_params)
        options.mask_token_id, options.output_history = self.tokenizer.mask_token_id, False
        options.return_dict_in_generate = True
        seed = _call_seed(call.pop("seed"), call.pop("generator"))
        preprocess_params = {
            **self._preprocess_params,
            **preprocess_params,
            "max_new_tokens": options.max_new_tokens,
            "max_length": options.max_length,
            "trim_at_eos": options.trim_at_eos,
        }
        options.max_new_tokens, options.max_length = 0, None  # preprocess appends the masks
        # 3. texts to ids, 4. batches
        single = isinstance(inputs, (str, dict))
        sized = single or isinstance(inputs, (list, tuple))
        items = (self.preprocess(item, **preprocess_params) for item in ([inputs] if single else inputs))
        if sized:
            items = list(items)  # all are checked before the first is run
            if isinstance(seed, list) and len(seed) != len(items):
                raise ValueError(f"`seed` must be an integer or a list of {len(items)}, one a text, got {len(seed)}.")
        results = self._run(items, batch_size, seed, options, show, call)
        if single:
            return next(results)
        return list(results) if sized else results

    def preprocess(
        self,
        inputs: str | dict,
        parse_mask: bool = True,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        trim_at_eos: bool = False,
    ) -> dict:
        """
        Ids of one input.

        Returns:
            `dict`: `source`, the text as given; `ids`; `frame`, how many ids the tokenizer itself put before and
            after the text; `num_masks`.
        """
        mask = self.tokenizer.mask_token_id
        longest = getattr(self.model.config, "max_position_embeddings", None)
        for name, number in (("max_new_tokens", max_new_tokens), ("max_length", max_length)):
            if longest is not None and (number or 0) > longest:
                raise ValueError(f"`{name}` must fit max_position_embeddings={longest}, got {number}.")
        framed, bare = self._encode(self.tokenizer.mask_token, True), self._encode(self.tokenizer.mask_token, False)
        start = framed.index(mask) - bare.index(mask)
        head, tail = framed[:start], framed[start + len(bare) :]
        if trim_at_eos and tail:
            raise ValueError(f"`trim_at_eos` must be False: this tokenizer ends every text itself, with {tail}.")
        if isinstance(inputs, dict):
            prefix, suffix, length = _check_parts(inputs, longest)
            source = prefix + suffix
            before, after = self._encode(prefix, False, parse_mask), self._encode(suffix, False, parse_mask)
            given, ids = before + after, before + [mask] * length + after
        elif isinstance(inputs, str):
            source = inputs
            given = ids = self._encode(inputs, False, parse_mask)
        else:
            raise ValueError(f"`inputs` must hold texts or dicts, got {inputs!r}.")
        self._warn_of_lost_text(source, parse_mask)
        if not parse_mask and mask in given:
            raise ValueError(f"`parse_mask` must be True: this tokenizer cannot spell {self.tokenizer.mask_token!r}.")
        used = len(head) + len(ids) + len(tail)
        if max_new_tokens is None and max_length is not None:
            if used > max_length:
                raise ValueError(f"`max_length` must be at least the length of the text, got {max_length} for {used}.")
            max_new_tokens = max_length - used
        ids = [*head, *ids, *[mask] * (max_new_tokens or 0), *tail]
        if longest is not None and len(ids) > longest:
            raise ValueError(
                f"`inputs` must fit max_position_embeddings={longest}, got {len(ids)} tokens, new ones included, for "
                f"{source[:60]!r}."
            )
        if max(ids, default=0) >= self.model.config.vocab_size:
            raise ValueError(
                f"`inputs` must have ids below the model's vocab_size={self.model.config.vocab_size}, got {max(ids)}."
            )
        return {"source": source, "ids": ids, "frame": (len(head), len(tail)), "num_masks": ids.count(mask)}

    def _encode(self, text: str, add_special_tokens: bool, parse_mask: bool = True) -> list[int]:
        return self.tokenizer(
            text, add_special_tokens=add_special_tokens, split_special_tokens=not parse_mask, truncation=False
        )["input_ids"]

    def _warn_of_lost_text(self, text: str, parse_mask: bool):
        """Warn where the tokenizer skips characters or has no token for them: the answer cannot repeat them."""
        for character in set(text) - self._dropped.keys():
            ids = self._encode(character, False)
            broken = not ids or (character != "\ufffd" and "\ufffd" in self._decode(ids))  # a byte of it is unknown
            self._dropped[character] = character not in whitespace and broken
        lost = {character for character in text if self._dropped[character]}
        unknown = self.tokenizer.unk_token_id
        if unknown is not None and self.tokenizer.is_fast:
            encoding = self.tokenizer(
                text,
                add_special_tokens=False,
                split_special_tokens=not parse_mask,
                truncation=False,
                return_offsets_mapping=True,
            )
            spans = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
            lost |= {text[start:end] for token, (start, end) in spans if token == unknown}
        lost -= {self.tokenizer.unk_token}
        mask = self.tokenizer.added_tokens_decoder.get(self.tokenizer.mask_token_id)
        if parse_mask and mask is not None and mask.lstrip:  # the mask stands for a word with one space before it
            spaces = re.findall(rf"(\s+){re.escape(mask.content)}", text)
            lost |= {space for space in spaces if space != " "}
        if lost:
            warnings.warn(
                f"The tokenizer has no token for {sorted(lost)[:10]}: the model does not see them and the answer does "
                f"not repeat them, in {text[:60]!r}.",
                stacklevel=5,
            )

    def _run(
        self,
        items: Iterable[dict],
        batch_size: int,
        seed: int | list[int],
        options: RADDGenerationConfig,
        show: bool | None,
        call: dict,
    ) -> Iterator[dict | list[dict]]:
        """Results in the order of `items`, which are run `batch_size` at a time."""
        num_batches = -(-len(items) // batch_size) if isinstance(items, list) else None
        lone = num_batches is not None and num_batches <= 1
        several = not lone and (show or (show is None and num_batches is not None))
        items, repeats, first = iter(items), options.num_return_sequences, 0
        with logging.tqdm(total=num_batches, desc="Infilling", unit="batch", disable=not several) as bar:
            while batch := list(islice(items, batch_size)):
                seeds = [[_text_seed(seed, first + i, j) for j in range(repeats)] for i in range(len(batch))]  # (B, R)
                full = [i for i, item in enumerate(batch) if item["num_masks"]]
                if len(full) < len(batch):
                    empty = [first + i for i in range(len(batch)) if i not in full]
                    warnings.warn(
                        f"No mask in input(s) {empty}: nothing to fill, returned as they came.", stacklevel=3
                    )
                filled = {}
                if full:
                    longest = max(batch[i]["num_masks"] for i in full)
                    passes = options.num_steps or longest
                    if options.use_cache:
                        passes = min(passes, longest)
                    options.progress_bar = bool(not several and (show or (show is None and passes > MANY_PASSES)))
                    outputs = self.forward(
                        self._collate([batch[i]["ids"] for i in full], [seeds[i] for i in full], options),
                        options=options,
                        **call,
                    )
                    filled = {i: {name: value[k] for name, value in outputs.items()} for k, i in enumerate(full)}
                for i, item in enumerate(batch):
                    candidates = self.postprocess({**item, **filled.get(i, {})}, repeats)
                    yield candidates if repeats > 1 else candidates[0]
                first += len(batch)
                bar.update()

    def _collate(self, rows: list[list[int]], seeds: list[list[int]], options: RADDGenerationConfig) -> dict:
        """Rows padded on the right, so that a column is the same token of a text alone and in a batch."""
        width = max(len(ids) for ids in rows)
        if isinstance(options.order, list):
            width = max(width, *(i + 1 for i in options.order)) if options.order else width
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        pad = next(i for i in candidates if i is not None and 0 <= i < self.model.config.vocab_size)
        return {
            "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in rows]),
            "seeds": seeds,
        }

    def _forward(
        self, batch: dict, options: RADDGenerationConfig, logits_processor=None, streamer=None
    ) -> dict[str, torch.Tensor]:
        """`sequences` (B, R, L), `free` (B, L), `nfe` and `ends` (B, R), and the tokens' mean-field `log_probs`."""
        ids, attention_mask, repeats = batch["input_ids"], batch["attention_mask"], options.num_return_sequences
        output = self.model.diffusion_generate(
            ids,
            generation_config=options,
            attention_mask=attention_mask,
            logits_processor=logits_processor,
            streamer=streamer,
            seed=[seed for seeds in batch["seeds"] for seed in seeds],
        )
        sequences = output.sequences.unflatten(0, (len(ids), repeats))  # (B, R, L)
        free = (ids == options.mask_token_id) & attention_mask.bool()
        log_probs = torch.zeros(sequences.shape, dtype=torch.float32, device=ids.device)
        ends = torch.full_like(output.nfe, ids.shape[1]) if output.lengths is None else output.lengths
        start, place = 0, free.nonzero()  # row-major
        with evaluation_mode(self.model):
            states = self.model._reveal_states(ids, attention_mask, free)
            for part in states.split(options.chunk_size):
                logits = self.model._state_logits(part)
                row, column = place[start : start + len(logits)].unbind(-1)
                logits[:, options.mask_token_id] = float("-inf")
                each = torch.log_softmax(logits.float(), dim=-1)  # (n, V)
                log_probs[row, :, column] = each.gather(-1, sequences[row, :, column])
                start += len(logits)
        return {
            "sequences": sequences,
            "free": free,
            "nfe": output.nfe.unflatten(0, (-1, repeats)),
            "log_probs": log_probs,
            "ends": ends.unflatten(0, (-1, repeats)),
        }

    def postprocess(self, outputs: dict, num_return_sequences: int = 1) -> list[dict]:
        """Candidates of one text, best first."""
        if "sequences" not in outputs:
            same = {"text": outputs["source"], "infills": [], "score": 0.0, "nfe": 0}
            return [{**same, "infills": []} for _ in range(num_return_sequences)]
        head, tail = outputs["frame"]
        candidates = []
        for ids, nfe, log_probs, end in zip(
            *(outputs[name] for name in ("sequences", "nfe", "log_probs", "ends")), strict=True
        ):
            end = min(len(outputs["ids"]) - tail, int(end))  # the text's, or with `trim_at_eos` its end token's
            filled = outputs["free"].nonzero()[:, 0]
            filled = filled[filled < end]
            candidates.append(
                {
                    "text": self._decode(ids[head:end].tolist()),
                    "infills": [self._decode([token]) for token in ids[filled].tolist()],
                    "score": float(log_probs[filled].double().mean()),
                    "nfe": int(nfe),
                }
            )
        return sorted(candidates, key=lambda candidate: -candidate["score"])

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def candidate_seed(seed: int, text: int, candidate: int) -> int:
    """A number for (seed, text, candidate): `seed` itself for the first candidate of the first text."""
    if text == candidate == 0:
        return seed
    return mix_seed("infilling", seed, text, candidate)


def _text_seed(seed: int | list[int], text: int, candidate: int) -> int:
    if not isinstance(seed, list):
        return candidate_seed(seed, text, candidate)
    if text >= len(seed):
        raise ValueError(f"`seed` must have one integer a text, got {len(seed)} for more texts.")
    return candidate_seed(seed[text], 0, candidate)


def _call_seed(seed: int | list[int] | None, generator: torch.Generator | None) -> int | list[int]:
    """The seed of a call: as given, or drawn from `generator` or from torch's default generator."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"`generator` must be a torch.Generator or None, got {generator!r}.")
    if seed is not None and generator is not None:
        raise ValueError("Only one of `seed` and `generator` may be given.")
    if seed is None:
        source = {} if generator is None else {"generator": generator, "device": generator.device}
        return int(torch.randint(2**62, (), **source))
    if is_int(seed):
        return seed
    if isinstance(seed, (list, tuple)) and all(is_int(one) for one in seed):
        return list(seed)
    raise ValueError(f"`seed` must be an integer or a list of integers, one a text, got {seed!r}.")


def _check_parts(parts: dict, longest: int | None) -> tuple[str, str, int]:
    """Checked `prefix`, `suffix` (empty if absent) and `length`, at most `longest`."""
    unknown = sorted(set(parts) - {"prefix", "suffix", "length"}, key=str)
    if unknown:
        raise ValueError(f"An input dict must have the keys prefix, suffix and length alone, got {unknown}.")
    for name in ("prefix", "suffix"):
        if not isinstance(parts.get(name), (str, type(None))):
            raise ValueError(f"`{name}` must be a text, got {parts[name]!r}.")
    length = parts.get("length")
    if not is_int(length) or length < 0:
        raise ValueError(f"`length` must be an integer of at least 0, the number of tokens to insert, got {length!r}.")
    if longest is not None and length > longest:
        raise ValueError(f"`length` must fit max_position_embeddings={longest}, got {length}.")
    return parts.get("prefix") or "", parts.get("suffix") or "", length


__all__ = ["InfillingPipeline", "candidate_seed"]
