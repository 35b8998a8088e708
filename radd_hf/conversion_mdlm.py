# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""MDLM checkpoints as RADD ones: where the conditioning is constant, it folds into the weights around it, exactly.

MDLM's block (Sahoo et al. 2024, arXiv 2406.07524) is RADD's with adaLN: norms without biases, then x (1 + scale) +
shift; a gate on each branch. Scale, shift and gate are linear in c = silu(MLP(embedding of sigma)). With time
conditioning off sigma is 0 everywhere, c is a constant, and
    norm:   weight (1 + scale), bias shift;
    branch: its last layer times the gate, row by row.
"""

from collections.abc import Mapping

import torch
from torch import nn

from . import conversion_original
from .configuration_radd import RADDConfig
from .conversion_files import Fields
from .conversion_original import LOG_LINEAR_EPS, shape_map
from .modeling_radd import RADDForMaskedDiffusion
from .modeling_sedd import FREQUENCIES, sigma_embedding

NAME = "MDLM"
MODEL = RADDForMaskedDiffusion

# Shapes of an adaLN network's weights: D width, V vocabulary, C width of the conditioning, F of sigma's embedding.
SIGMA_SHAPES = {
    "sigma_map.mlp.0.weight": ("C", "F"),
    "sigma_map.mlp.0.bias": ("C",),
    "sigma_map.mlp.2.weight": ("C", "C"),
    "sigma_map.mlp.2.bias": ("C",),
}
TRUNK_SHAPES = {
    **{key: shape for key, shape in conversion_original.TRUNK_SHAPES.items() if not key.endswith("norm_final.bias")},
    **SIGMA_SHAPES,
    "output_layer.adaLN_modulation.weight": ("2D", "C"),
    "output_layer.adaLN_modulation.bias": ("2D",),
}
BLOCK_SHAPES = {
    **{
        key: shape
        for key, shape in conversion_original.BLOCK_SHAPES.items()
        if key not in ("norm1.bias", "norm2.bias")
    },
    "adaLN_modulation.weight": ("6D", "C"),
    "adaLN_modulation.bias": ("6D",),
}


def convert_config(original: Mapping | Fields) -> RADDConfig:
    """
    MDLM's config.json as a RADDConfig: log-linear noise, and "dse", which is MDLM's loss draw by draw.

    Raises:
        ValueError: Time conditioning is on, or a field is absent or of the wrong kind.
    """
    original = Fields(original)
    if original.flag("time_conditioning"):
        raise ValueError(
            f"`time_conditioning` in `source`'s {original.file} must be false, got true: the network's answer changes "
            "with time, and RADD's takes no time, so no RADD weights are equal to it."
        )
    return RADDConfig(
        vocab_size=original.number("vocab_size", whole=True),
        hidden_size=original.number("hidden_dim", whole=True),
        num_hidden_layers=original.number("n_blocks", whole=True),
        num_attention_heads=original.number("n_heads", whole=True),
        max_position_embeddings=original.number("model_length", whole=True),
        hidden_dropout=original.number("dropout"),
        noise_schedule="log_linear",
        noise_eps=LOG_LINEAR_EPS,
        training_loss="dse",
    )


def expected_shapes(config: RADDConfig, original: Mapping | Fields) -> dict[str, tuple[int, ...]]:
    """The shape of each weight that the config describes."""
    width = Fields(original).number("cond_dim", whole=True)
    return shape_map(config, TRUNK_SHAPES, BLOCK_SHAPES, C=width, F=FREQUENCIES)


def constant_conditioning(original: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """c = silu(MLP(embedding of sigma = 0)), (C,), float64."""
    weights = {key: original[key].double() for key in SIGMA_SHAPES}
    hidden = sigma_embedding(torch.zeros((), dtype=torch.float64), FREQUENCIES)
    hidden = nn.functional.silu(hidden @ weights["sigma_map.mlp.0.weight"].T + weights["sigma_map.mlp.0.bias"])
    return nn.functional.silu(hidden @ weights["sigma_map.mlp.2.weight"].T + weights["sigma_map.mlp.2.bias"])


def fold_conditioning(original: Mapping[str, torch.Tensor], conditioning: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Weights of the original RADD network that is this adaLN network at the constant `conditioning`.

    Args:
        original (`Mapping`): Weights of an adaLN network (MDLM's, SEDD's) by its names.
        conditioning (`torch.Tensor` of shape `(C,)`, float64): c.

    Returns:
        `dict`: Weights by RADD's original names, in the dtypes they came in; products are formed in float64.
    """
    folded = {key: w for key, w in original.items() if "adaLN" not in key and not key.startswith("sigma_map.")}

    def put(key: str, value: torch.Tensor, like: str):
        folded[key] = value.to(original[like].dtype)

    def fold_norm(name: str, shift: torch.Tensor, scale: torch.Tensor):
        put(f"{name}.weight", original[f"{name}.weight"].double() * (1 + scale), f"{name}.weight")
        put(f"{name}.bias", shift, f"{name}.weight")

    for key in [key for key in original if key.endswith("adaLN_modulation.weight")]:
        place = key.removesuffix("adaLN_modulation.weight")
        modulation = original[key].double() @ conditioning + original[f"{place}adaLN_modulation.bias"].double()
        if place == "output_layer.":
            fold_norm("output_layer.norm_final", *modulation.chunk(2))
            continue
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation.chunk(6)
        fold_norm(f"{place}norm1", shift, scale)
        fold_norm(f"{place}norm2", mlp_shift, mlp_scale)
        for layer, factor in (("attn_out.weight", gate), ("mlp.2.weight", mlp_gate)):
            put(f"{place}{layer}", factor[:, None] * original[f"{place}{layer}"].double(), f"{place}{layer}")
        put(f"{place}mlp.2.bias", mlp_gate * original[f"{place}mlp.2.bias"].double(), f"{place}mlp.2.bias")
    return folded


def converted(config: RADDConfig, original: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of `RADDForMaskedDiffusion` from all weights of the original."""
    return conversion_original.converted(config, fold_conditioning(original, constant_conditioning(original)))
