# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The original RADD network and ours, which are one function under two sets of names.

Weights are renamed, and the fused attention projection is split into three; the way back joins them again.
"""

from collections.abc import Mapping

import torch

from .attention_radd import RADDRotaryEmbedding
from .configuration_radd import RADDConfig
from .conversion_files import ROTARY_KEY, Fields
from .modeling_radd import RADDForMaskedDiffusion

NAME = "RADD"
MODEL = RADDForMaskedDiffusion

# Names of the original's config, and ours.
NOISE_NAMES = {"loglinear": "log_linear", "geometric": "geometric"}
LOSS_NAMES = {"t_DSE": "dse", "DSE": "dse", "t_DCE": "t_dce", "lambda_DCE": "lambda_dce", "k_DCE": "ao"}
LOG_LINEAR_EPS = 1e-3  # a constant of the originals' log-linear noise, not written in their configs

# Original key -> our keys. Several: equal parts of the original along its first dimension, in this order.
TRUNK_KEYS = {
    "vocab_embed.embedding": ("model.embed_tokens.weight",),
    "output_layer.norm_final.weight": ("model.norm.weight",),
    "output_layer.norm_final.bias": ("model.norm.bias",),
    "output_layer.linear.weight": ("lm_head.weight",),
    "output_layer.linear.bias": ("lm_head.bias",),
}
BLOCK_KEYS = {
    "norm1.weight": ("attn_norm.weight",),
    "norm1.bias": ("attn_norm.bias",),
    "attn_qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attn_out.weight": ("self_attn.o_proj.weight",),
    "norm2.weight": ("mlp_norm.weight",),
    "norm2.bias": ("mlp_norm.bias",),
    "mlp.0.weight": ("mlp.up_proj.weight",),
    "mlp.0.bias": ("mlp.up_proj.bias",),
    "mlp.2.weight": ("mlp.down_proj.weight",),
    "mlp.2.bias": ("mlp.down_proj.bias",),
}

# Shapes of the original's weights: D width, V vocabulary (mask included).
TRUNK_SHAPES = {
    "vocab_embed.embedding": ("V", "D"),
    "output_layer.norm_final.weight": ("D",),
    "output_layer.norm_final.bias": ("D",),
    "output_layer.linear.weight": ("V", "D"),
    "output_layer.linear.bias": ("V",),
}
BLOCK_SHAPES = {
    "norm1.weight": ("D",),
    "norm1.bias": ("D",),
    "attn_qkv.weight": ("3D", "D"),
    "attn_out.weight": ("D", "D"),
    "norm2.weight": ("D",),
    "norm2.bias": ("D",),
    "mlp.0.weight": ("4D", "D"),
    "mlp.0.bias": ("4D",),
    "mlp.2.weight": ("D", "4D"),
    "mlp.2.bias": ("D",),
}


def key_map(
    num_layers: int,
    trunk: Mapping[str, tuple[str, ...]] = TRUNK_KEYS,
    block: Mapping[str, tuple[str, ...]] = BLOCK_KEYS,
) -> dict[str, tuple[str, ...]]:
    """Each weight of the original by name, and the weights of ours that it holds, stacked along dimension 0."""
    names = dict(trunk)
    for i in range(num_layers):
        for old, new in block.items():
            names[f"blocks.{i}.{old}"] = tuple(f"model.layers.{i}.{part}" for part in new)
    return names


def shape_map(
    config: RADDConfig, trunk: Mapping[str, tuple[str, ...]], block: Mapping[str, tuple[str, ...]], **sizes: int
) -> dict[str, tuple[int, ...]]:
    """The shape of each of the original's weights, from the config alone: nothing is allocated."""
    width = config.hidden_size
    sizes |= {"D": width, "3D": 3 * width, "4D": 4 * width, "6D": 6 * width, "2D": 2 * width, "V": config.vocab_size}
    shapes = {key: tuple(sizes[name] for name in spec) for key, spec in trunk.items()}
    for i in range(config.num_hidden_layers):
        shapes |= {f"blocks.{i}.{key}": tuple(sizes[name] for name in spec) for key, spec in block.items()}
    return shapes


def expected_shapes(config: RADDConfig, original: Mapping | Fields) -> dict[str, tuple[int, ...]]:
    """The shape of each weight that the config describes."""
    return shape_map(config, TRUNK_SHAPES, BLOCK_SHAPES)


def base_fields(original: Fields) -> dict:
    """The fields that the original RADD and SEDD configs share."""
    tokens = original.number("tokens", whole=True)
    noise = original.choice("noise.type", NOISE_NAMES)
    fields = {"noise_eps": LOG_LINEAR_EPS}
    if noise == "geometric":
        fields = {f"noise_{name}": original.number(f"noise.{name}") for name in ("sigma_min", "sigma_max")}
    return {
        "vocab_size": tokens + 1,
        "mask_token_id": tokens,
        "hidden_size": original.number("model.hidden_size", whole=True),
        "num_hidden_layers": original.number("model.n_blocks", whole=True),
        "num_attention_heads": original.number("model.n_heads", whole=True),
        "max_position_embeddings": original.number("model.length", whole=True),
        "hidden_dropout": original.number("model.dropout"),
        "noise_schedule": noise,
        **fields,
    }


def convert_config(original: Mapping | Fields) -> RADDConfig:
    """
    The original's config as a RADDConfig.

    Args:
        original (`Mapping`): `tokens` (clean tokens; the mask token's id is that number), `model`, `noise` and
            `training`. A config without `training.loss_type` gives `training_loss=None`.

    Raises:
        ValueError: A field that is absent, of the wrong kind, or a noise or loss that the original does not have.
    """
    original = Fields(original)
    fields = base_fields(original)
    named = original.has("training.loss_type") and original.get("training.loss_type") is not None
    loss = original.choice("training.loss_type", LOSS_NAMES) if named else None
    return RADDConfig(training_loss=loss, **fields)


def convert_weights(
    original: Mapping[str, torch.Tensor], names: Mapping[str, tuple[str, ...]]
) -> dict[str, torch.Tensor]:
    """Weights under our names, in the original's dtype; `names` as from `key_map`."""
    weights = {}
    for old, new in names.items():
        weights.update(zip(new, original[old].chunk(len(new)), strict=True))
    return weights


def converted(config: RADDConfig, original: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of `RADDForMaskedDiffusion` from all weights of the original."""
    return convert_weights(original, key_map(config.num_hidden_layers))


def rotary_frequencies(config: RADDConfig) -> torch.Tensor:
    """The buffer `rotary_emb.inv_freq` of the originals, (D / heads / 2,)."""
    return RADDRotaryEmbedding.compute_default_rope_parameters(config)[0]


def original_weights(
    state: Mapping[str, torch.Tensor], names: Mapping[str, tuple[str, ...]], config: RADDConfig
) -> dict[str, torch.Tensor]:
    """The way back: weights under the original's names; `names` as from `key_map`."""
    weights = {old: torch.cat([state[part] for part in new]) for old, new in names.items()}
    return weights | {ROTARY_KEY: rotary_frequencies(config)}


def original_config(config: RADDConfig) -> dict:
    """
    The way back: the original's config.

    Raises:
        ValueError: Lists what the original code cannot express.
    """
    constants = {
        "mask_token_id": config.vocab_size - 1,
        "intermediate_size": 4 * config.hidden_size,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if config.noise_schedule == "log_linear":
        constants["noise_eps"] = LOG_LINEAR_EPS
    other = [
        f"{name}={getattr(config, name)!r} instead of {v!r}"
        for name, v in constants.items()
        if getattr(config, name) != v
    ]
    noise = {ours: theirs for theirs, ours in NOISE_NAMES.items()}
    if config.noise_schedule not in noise:
        other.append(f"noise_schedule={config.noise_schedule!r} instead of one of {list(noise)}")
    if other:
        raise ValueError(f"`config` must be one that the original code can express, got {'; '.join(other)}.")
    losses = {ours: theirs for theirs, ours in LOSS_NAMES.items() if theirs != "DSE"}
    training = {} if config.training_loss is None else {"loss_type": losses[config.training_loss]}
    return {
        "ngpus": 1,
        "tokens": config.vocab_size - 1,
        "training": training,
        "noise": {
            "type": noise[config.noise_schedule],
            "sigma_min": config.noise_sigma_min,
            "sigma_max": config.noise_sigma_max,
        },
        "model": {
            "name": "radd",
            "type": "ddit_wot",
            "hidden_size": config.hidden_size,
            "length": config.max_position_embeddings,
            "n_blocks": config.num_hidden_layers,
            "n_heads": config.num_attention_heads,
            "dropout": config.hidden_dropout,
        },
    }
