# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Options of the samplers: their defaults, their checks and how they are merged."""

from transformers import CompileConfig, GenerationConfig

from .checks_radd import is_int, is_number
from .noise_schedule_radd import check_num_steps, check_time_grid

TIMED_ALGORITHMS = ("tweedie", "euler")
ADAPTIVE_ALGORITHMS = ("confidence", "entropy", "margin")
ALGORITHMS = (*TIMED_ALGORITHMS, "any_order", *ADAPTIVE_ALGORITHMS)
REMASKING = ("cap", "rescale")
ORDERS = ("random", "forward", "backward")
SAMPLING_DTYPES = ("float64", "float32")
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e30  # beyond, float32 logits divided by it are infinite or not a number

# Options that transformers' GenerationConfig does not have, with their defaults.
_OWN_OPTIONS = {
    "algorithm": "tweedie",
    "num_steps": None,
    "times": None,
    "tokens_per_step": None,
    "confidence_threshold": None,
    "entropy_bound": None,
    "block_length": None,
    "remasking": None,
    "remasking_strength": 0.0,
    "order": "random",
    "sampling_dtype": "float64",
    "chunk_size": 256,
    "mask_token_id": None,
    "output_history": False,
    "output_log_probs": False,
    "trim_at_eos": False,
    "progress_bar": False,
    "compile": False,
}
# Options of GenerationConfig that mean the same here, with our defaults.
_SHARED_OPTIONS = {
    "max_length": None,
    "max_new_tokens": None,
    "do_sample": True,
    "use_cache": True,
    "temperature": None,
    "top_k": None,
    "top_p": None,
    "min_p": None,
    "typical_p": None,
    "repetition_penalty": None,
    "suppress_tokens": None,
    "bad_words_ids": None,
    "compile_config": None,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "pad_token_id": None,
    "eos_token_id": None,
}
GENERATION_OPTIONS = tuple(sorted({**_OWN_OPTIONS, **_SHARED_OPTIONS}))
# What a saved config may hold besides: transformers' trainer copies the tokenizer's first token into it.
_METADATA = ("transformers_version", "_from_model_config", "_commit_hash", "bos_token_id")


class RADDGenerationConfig(GenerationConfig):
    """
    Options of `diffusion_generate`; saved with the model as generation_config.json. An unknown option raises.

    Args:
        algorithm (`str`, *optional*, defaults to `"tweedie"`):
            "tweedie" or "euler": each position's step is drawn from the reveal distribution of the model's noise
            schedule on the grid t_k = k / `num_steps`, or `times`. "any_order": positions are revealed in `order`.
            These sample the law of their step-by-step definition exactly. "confidence", "entropy" and "margin" reveal
            where the network is surest (largest probability, lowest entropy, largest lead of the first token over
            the second, after the processors and before noise is added): better single texts, another law.
        num_steps (`int`, *optional*): Steps n of the grid; else ceil(l / n) positions are revealed a pass. `None` is
            the limit: one position a pass, l passes.
        times (`list[float]`, *optional*): Grid t_0 < ... < t_n in [0, 1] of "tweedie" and "euler" instead.
        tokens_per_step (`int`, *optional*): Positions revealed a pass by the other algorithms, instead of `num_steps`.
        confidence_threshold (`float`, *optional*): "confidence" also reveals every position with at least this
            probability; above 1 none has.
        entropy_bound (`float`, *optional*): "entropy" also reveals the k surest positions while the sum of their
            entropies less the largest, which bounds their mutual information, is at most this many nats
            (Ben-Hamu et al. 2025, arXiv 2505.24857).
        block_length (`int`, *optional*): Fill the text block by block, this many tokens each, counted from the first
            mask; for all algorithms but "tweedie" and "euler". Each block takes whole passes, so there may be more of
            them than `num_steps`.
        remasking (`str`, *optional*): "cap" or "rescale": "tweedie" masks revealed tokens again and redraws them
            (ReMDM, Wang et al. 2025, arXiv 2503.00307); needs a grid. Given tokens are never masked.
        remasking_strength (`float`, *optional*, defaults to 0.0): eta in [0, 1]; 0 is plain "tweedie".
        order (`str` or `list[int]`, *optional*, defaults to `"random"`): For "any_order": "random", "forward",
            "backward" or a list of positions (columns of the canvas); fixed positions are skipped.
        use_cache (`bool`, *optional*, defaults to `True`): Skip the network in steps that reveal nothing. `False`
            calls it in each of the `num_steps` steps, as a time-conditioned model must, and draws the same tokens.
        max_new_tokens (`int`, *optional*): Masks appended after each row's last real token.
        max_length (`int`, *optional*): Length up to which masks are appended; without `input_ids` the length of the
            samples, by default the model's `max_position_embeddings`.
        do_sample (`bool`, *optional*, defaults to `True`): `False`, or `temperature=0`, takes the likeliest token.
        temperature, top_k, top_p, min_p, typical_p, repetition_penalty, suppress_tokens (*optional*):
            As in transformers, applied by its own processors to the logits before the draw. A repetition penalty
            looks at the whole canvas.
        bad_words_ids (`list[list[int]]`, *optional*): Token sequences that must not come about, wherever their last
            token is drawn; positions of one pass are then drawn from left to right.
        sampling_dtype (`str`, *optional*, defaults to `"float64"`): Precision of the Gumbel-max draw, or "float32".
        chunk_size (`int`, *optional*, defaults to 256): Positions whose logits exist at the same time.
        num_return_sequences (`int`, *optional*, defaults to 1): Independent samples for each row.
        return_dict_in_generate (`bool`, *optional*, defaults to `False`): Return a `RADDGenerationOutput`.
        output_history (`bool`, *optional*, defaults to `False`): Record the sequences after each pass.
        output_log_probs (`bool`, *optional*, defaults to `False`): Return the log-probability of each drawn token.
        trim_at_eos (`bool`, *optional*, defaults to `False`): Pad what follows the first `eos_token_id` in the masks
            at the end of a row, and return `lengths`. Without `remasking` a row is done once nothing before that
            token is masked. Where nobody names a padding id it is the end token.
        progress_bar (`bool`, *optional*, defaults to `False`): Show forward passes with tqdm.
        compile (`bool`, *optional*, defaults to `False`): Run the network through `torch.compile`, CUDA graphs
            included, at one static shape: rows that are done ride along and every position is computed, so it pays
            where launching kernels is the bottleneck (small batches on a GPU). On a CPU without `compile_config` it
            does nothing but say so.
        compile_config (`CompileConfig`, *optional*): Arguments of `torch.compile`; by default static shapes and mode
            "reduce-overhead". Not saved, as in transformers.
        mask_token_id (`int`, *optional*): Defaults to the model config's.
        pad_token_id, eos_token_id (`int`, *optional*): Special ids; padding fills the left of rows of
            unequal length after `max_new_tokens`.

    Raises:
        ValueError: An unknown option, or a value an option cannot have.
    """

    def __init__(self, **kwargs):
        reject_unknown_options({k: v for k, v in kwargs.items() if v is not None and k not in _METADATA})
        for name, default in _OWN_OPTIONS.items():
            value = kwargs.pop(name, None)
            setattr(self, name, default if value is None else value)
        if hasattr(self.times, "tolist"):
            self.times = self.times.tolist()
        super().__init__(**{**_SHARED_OPTIONS, **{k: v for k, v in kwargs.items() if v is not None}})

    @classmethod
    def from_model_config(cls, model_config):
        raise NotImplementedError("Sampling options live in generation_config.json, not in the model's config.")

    @staticmethod
    def _get_default_generation_params() -> dict:
        return {}

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None):
        """Check every option by itself; what depends on the inputs is checked in `diffusion_generate`."""
        _check_choice("algorithm", self.algorithm, ALGORITHMS)
        _check_choice("sampling_dtype", self.sampling_dtype, SAMPLING_DTYPES)
        if not (isinstance(self.order, (list, tuple)) and all(is_int(i) for i in self.order)):
            if not isinstance(self.order, str) or self.order not in ORDERS:
                raise ValueError(f"`order` must be one of {list(ORDERS)} or a list of positions, got {self.order!r}.")
        self._check_reveals()
        for name, lowest in (("num_return_sequences", 1), ("chunk_size", 1)):
            value = getattr(self, name)
            if not is_int(value) or value < lowest:
                raise ValueError(f"`{name}` must be an integer of at least {lowest}, got {value!r}.")
        for name, lowest in (
            ("max_length", 1),
            ("max_new_tokens", 0),
            ("mask_token_id", 0),
            ("pad_token_id", 0),
            ("top_k", 1),
            ("tokens_per_step", 1),
            ("block_length", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < lowest):
                raise ValueError(f"`{name}` must be None or an integer of at least {lowest}, got {value!r}.")
        for name, low, high, open_below in (
            ("temperature", 0.0, MAX_TEMPERATURE, False),
            ("top_p", 0.0, 1.0, False),
            ("min_p", 0.0, 1.0, False),
            ("typical_p", 0.0, 1.0, True),
            ("repetition_penalty", 0.0, float("inf"), True),
            ("confidence_threshold", 0.0, float("inf"), True),
            ("entropy_bound", 0.0, float("inf"), False),
            ("remasking_strength", 0.0, 1.0, False),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if not is_number(value) or not low <= value <= high or (open_below and value == low):
                interval = f"{'(' if open_below else '['}{low}, {high}{')' if high == float('inf') else ']'}"
                raise ValueError(f"`{name}` must be None or a number in {interval}, got {value!r}.")
        if self.temperature and self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"`temperature` must be 0 (the likeliest token) or at least {MIN_TEMPERATURE}, got {self.temperature}."
            )
        suppress = self.suppress_tokens
        if suppress is not None and not _are_ids(suppress):
            raise ValueError(f"`suppress_tokens` must be a list of token ids, got {suppress!r}.")
        if self.eos_token_id is not None and not is_int(self.eos_token_id) and not _are_ids(self.eos_token_id):
            raise ValueError(f"`eos_token_id` must be an id or a list of ids, got {self.eos_token_id!r}.")
        words = self.bad_words_ids
        if words is not None and not (
            isinstance(words, (list, tuple)) and all(_are_ids(word) and len(word) for word in words)
        ):
            raise ValueError(f"`bad_words_ids` must be a list of non-empty lists of token ids, got {words!r}.")
        if self.compile_config is not None and not isinstance(self.compile_config, CompileConfig):
            raise ValueError(f"`compile_config` must be a CompileConfig or None, got {self.compile_config!r}.")
        for name in (
            "do_sample",
            "use_cache",
            "return_dict_in_generate",
            "output_history",
            "output_log_probs",
            "trim_at_eos",
            "progress_bar",
            "compile",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False, got {getattr(self, name)!r}.")

    def _check_reveals(self):
        """What decides how many positions are revealed when: each option alone, and no two that contradict."""
        if self.num_steps is not None:
            check_num_steps(self.num_steps)
        if self.times is not None:
            grid = check_time_grid(self.times)
            if self.num_steps not in (None, len(grid) - 1):
                raise ValueError(
                    f"`num_steps` must be len(times) - 1 = {len(grid) - 1} or None, got {self.num_steps}."
                )
        if self.remasking is not None:
            _check_choice("remasking", self.remasking, REMASKING)
            if self.num_steps is None and self.times is None:
                raise ValueError("`num_steps` or `times` must be given with `remasking`, which needs a grid.")
        if self.tokens_per_step is not None and self.num_steps is not None:
            raise ValueError("Only one of `num_steps` and `tokens_per_step` may be given.")
        untimed = tuple(name for name in ALGORITHMS if name not in TIMED_ALGORITHMS)
        for name, default, algorithms in (
            ("times", None, TIMED_ALGORITHMS),
            ("remasking", None, ("tweedie",)),
            ("tokens_per_step", None, untimed),
            ("block_length", None, untimed),
            ("confidence_threshold", None, ("confidence",)),
            ("entropy_bound", None, ("entropy",)),
        ):
            if getattr(self, name) != default and self.algorithm not in algorithms:
                raise ValueError(
                    f"`{name}` must be left out with algorithm={self.algorithm!r}: it is for {list(algorithms)}."
                )
        if self.remasking_strength and self.remasking is None:
            raise ValueError(
                f"`remasking` must be one of {list(REMASKING)} where `remasking_strength` is given, got None."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a draw."""
        return not self.do_sample or self.temperature == 0


def merge_options(own: GenerationConfig | None, given: GenerationConfig | None, kwargs: dict) -> RADDGenerationConfig:
    """One checked config: `kwargs` over the `given` config if there is one, else over the model's `own`."""
    reject_unknown_options(kwargs)
    if given is not None and not isinstance(given, GenerationConfig):
        raise ValueError(f"`generation_config` must be a GenerationConfig or None, got {type(given).__name__}.")
    base = given if given is not None else own
    stored = {} if base is None else base.to_dict()
    stored = {k: v for k, v in stored.items() if v is not None and k not in _METADATA}
    if stored.get("compile_config") is not None:  # the very object: torch.compile knows a backend by identity
        stored["compile_config"] = base.compile_config
    return RADDGenerationConfig(**{**stored, **kwargs})


def reject_unknown_options(options: dict):
    """Raise a ValueError that lists the valid options if `options` has another key."""
    unknown = sorted(set(options) - set(GENERATION_OPTIONS))
    if unknown:
        raise ValueError(f"Unknown generation option(s) {unknown}; valid options: {list(GENERATION_OPTIONS)}.")


def _are_ids(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(is_int(i) and i >= 0 for i in value)


def _check_choice(name: str, value: object, choices: tuple[str, ...]):
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {list(choices)}, got {value!r}.")
