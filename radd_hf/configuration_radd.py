# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Configuration of a RADD network: its sizes, its vocabulary and the noise schedule it is used with."""

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .checks_radd import is_int, is_number

NOISE_SCHEDULES = ("log_linear", "geometric", "cosine")
LOSS_TYPES = ("dse", "t_dce", "lambda_dce", "ao")

# Fields that count something, so they are whole numbers of at least one.
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)

_DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
_MOST_LABELS = 1000


class RADDConfig(PreTrainedConfig):
    r"""
    Sizes and special ids of a RADD network. The defaults are the paper's small model.

    Args:
        vocab_size (`int`, *optional*, defaults to 50258):
            Rows of the embedding and columns of the logits, the mask token included (GPT-2's 50,257 tokens + 1).
        hidden_size (`int`, *optional*, defaults to 768): Width D of the residual stream.
        num_hidden_layers (`int`, *optional*, defaults to 12): Number of blocks.
        num_attention_heads (`int`, *optional*, defaults to 12):
            Heads of an attention layer; must divide `hidden_size` into even head sizes (rotary positions need pairs).
        intermediate_size (`int`, *optional*, defaults to `4 * hidden_size`): Width of the MLP.
        hidden_act (`str`, *optional*, defaults to `"gelu_pytorch_tanh"`): Activation of the MLP.
        max_position_embeddings (`int`, *optional*, defaults to 1024): Longest sequence the model is meant for.
        hidden_dropout (`float`, *optional*, defaults to 0.02): Dropout on both residual branches (paper, App. E).
        layer_norm_eps (`float`, *optional*, defaults to 1e-5): Epsilon of the layer norms.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of the initial weights.
        rope_parameters (`dict`, *optional*): Rotary settings in transformers' format; theta is 10,000 by default.
        mask_token_id (`int`, *optional*, defaults to `vocab_size - 1`):
            Id of the absorbing state. It is resolved once and stored: resizing the vocabulary never moves it.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Other special ids, unused by the network.
        tie_word_embeddings (`bool`, *optional*, defaults to `False`): Share the embedding with the output layer.
        noise_schedule (`str`, *optional*, defaults to `"log_linear"`): "log_linear", "geometric" or "cosine".
        noise_eps (`float`, *optional*, defaults to 1e-3): `eps` of the log-linear and cosine schedules.
        noise_sigma_min (`float`, *optional*, defaults to 1e-4): sigma_bar(0) of the geometric schedule.
        noise_sigma_max (`float`, *optional*, defaults to 20.0): sigma_bar(1) of the geometric schedule.
        training_loss (`str`, *optional*): Loss the weights were trained with, recorded by trainer and converter.

    Raises:
        ValueError: A field has a value the network cannot have; the message names the field and the value.
    """

    model_type = "radd"
    default_theta = 10000.0

    vocab_size: int = 50258
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 1024
    hidden_dropout: float | int = 0.02
    layer_norm_eps: float | int = 1e-5
    initializer_range: float | int = 0.02
    rope_parameters: dict | None = None
    mask_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    noise_schedule: str = "log_linear"
    noise_eps: float | int = 1e-3
    noise_sigma_min: float | int = 1e-4
    noise_sigma_max: float | int = 20.0
    training_loss: str | None = None

    def __post_init__(self, **kwargs):
        # A pipeline entry makes transformers ask for trust_remote_code even where this package is imported.
        if not __name__.startswith("transformers_modules"):
            kwargs.pop("custom_pipelines", None)
        self._check_kinds(kwargs)
        super().__post_init__(**kwargs)
        if self.intermediate_size is None and is_int(self.hidden_size):
            self.intermediate_size = 4 * self.hidden_size
        if self.mask_token_id is None and is_int(self.vocab_size):
            self.mask_token_id = self.vocab_size - 1
        self._check_fields()

    @classmethod
    def small(cls, **overrides) -> "RADDConfig":
        """The paper's small model: 12 blocks, width 768, 12 heads; 162,265,682 parameters."""
        return cls(**{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, **overrides})

    @classmethod
    def medium(cls, **overrides) -> "RADDConfig":
        """The paper's medium model: 24 blocks, width 1024, 16 heads; 405,191,762 parameters."""
        return cls(**{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, **overrides})

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def _check_kinds(self, kwargs: dict):
        """What transformers reads before `_check_fields` can: a hostile file must not crash it or fill the memory."""
        labels = kwargs.get("num_labels")  # the base class makes a name for each; the network has none
        if labels is not None and (not is_int(labels) or not 0 <= labels <= _MOST_LABELS):
            raise ValueError(f"`num_labels` must be None or an integer in [0, {_MOST_LABELS}], got {labels!r}.")
        for name, value in (("rope_parameters", self.rope_parameters), ("rope_scaling", kwargs.get("rope_scaling"))):
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"`{name}` must be None or a dict, got {value!r}.")
        if not isinstance(kwargs.get("model_type", self.model_type), str):
            raise ValueError(f"`model_type` must be a string, got {kwargs['model_type']!r}.")
        if self.dtype is not None and str(self.dtype).removeprefix("torch.") not in _DTYPES:
            raise ValueError(f"`dtype` must be None or one of {list(_DTYPES)}, got {self.dtype!r}.")

    def _check_fields(self):
        for name in _COUNTS:
            value = getattr(self, name)
            if not is_int(value) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
        if self.vocab_size < 2:
            raise ValueError("`vocab_size` must be at least 2, a token and the mask token, got 1.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"`hidden_size` must be divisible by `num_attention_heads`, got hidden_size={self.hidden_size} and "
                f"num_attention_heads={self.num_attention_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"`hidden_size / num_attention_heads` must be even (rotary positions turn pairs), got "
                f"{self.hidden_size} / {self.num_attention_heads} = {self.head_dim}."
            )
        if not is_int(self.mask_token_id) or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must be an integer in [0, vocab_size={self.vocab_size}), got {self.mask_token_id!r}."
            )
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
            if value is not None and not all(is_int(i) and 0 <= i < self.vocab_size for i in ids):
                raise ValueError(f"`{name}` must be None or in [0, vocab_size={self.vocab_size}), got {value!r}.")
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            valid = ["default", *ROPE_INIT_FUNCTIONS]
            raise ValueError(f"`rope_parameters['rope_type']` must be one of {valid}, got {rope_type!r}.")
        theta = self.rope_parameters.get("rope_theta")
        _check_number("rope_parameters['rope_theta']", theta, _number(theta) > 0, "greater than 0")
        for name, choices in (
            ("hidden_act", list(ACT2FN)),
            ("noise_schedule", list(NOISE_SCHEDULES)),
            ("training_loss", [None, *LOSS_TYPES]),
            ("tie_word_embeddings", [True, False]),
        ):
            if not isinstance(getattr(self, name), (str, bool, type(None))) or getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {choices}, got {getattr(self, name)!r}.")
        _check_number("hidden_dropout", self.hidden_dropout, 0 <= _number(self.hidden_dropout) < 1, "in [0, 1)")
        for name in ("layer_norm_eps", "initializer_range"):
            _check_number(name, getattr(self, name), _number(getattr(self, name)) > 0, "greater than 0")
        _check_number("noise_eps", self.noise_eps, 0 <= _number(self.noise_eps) < 1, "in [0, 1)")
        low, high = _number(self.noise_sigma_min), _number(self.noise_sigma_max)
        _check_number("noise_sigma_min", self.noise_sigma_min, low > 0, "greater than 0")
        _check_number("noise_sigma_max", self.noise_sigma_max, high > low, f"greater than noise_sigma_min={low}")


def _number(value: object) -> float:
    return value if is_number(value) else float("nan")


def _check_number(name: str, value: object, valid: bool, expected: str):
    if not valid:
        raise ValueError(f"`{name}` must be a number {expected}, got {value!r}.")
