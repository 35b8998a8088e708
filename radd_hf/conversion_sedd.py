# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Original SEDD checkpoints, such as louaaron/sedd-small: the same function under other weight names."""

from collections.abc import Mapping

import torch

from . import conversion_original
from .configuration_sedd import SEDDConfig
from .conversion_files import Fields
from .conversion_mdlm import BLOCK_SHAPES, TRUNK_SHAPES
from .conversion_original import base_fields, convert_weights, key_map, shape_map
from .modeling_sedd import FREQUENCIES, SEDDForMaskedDiffusion

NAME = "SEDD"
MODEL = SEDDForMaskedDiffusion

# Original key -> our key, where RADD has none.
_TRUNK_KEYS = {
    "sigma_map.mlp.0.weight": ("model.sigma_map.in_proj.weight",),
    "sigma_map.mlp.0.bias": ("model.sigma_map.in_proj.bias",),
    "sigma_map.mlp.2.weight": ("model.sigma_map.out_proj.weight",),
    "sigma_map.mlp.2.bias": ("model.sigma_map.out_proj.bias",),
    "output_layer.adaLN_modulation.weight": ("model.modulation.weight",),
    "output_layer.adaLN_modulation.bias": ("model.modulation.bias",),
}
_BLOCK_KEYS = {
    "adaLN_modulation.weight": ("modulation.weight",),
    "adaLN_modulation.bias": ("modulation.bias",),
}
TRUNK_KEYS = {key: new for key, new in (conversion_original.TRUNK_KEYS | _TRUNK_KEYS).items() if key in TRUNK_SHAPES}
BLOCK_KEYS = {key: new for key, new in (conversion_original.BLOCK_KEYS | _BLOCK_KEYS).items() if key in BLOCK_SHAPES}


def convert_config(original: Mapping | Fields) -> SEDDConfig:
    """
    The original's config as a SEDDConfig, its loss recorded as "dse", denoising score entropy.

    Raises:
        ValueError: A uniform graph, which has no mask; or a field that is absent or of the wrong kind.
    """
    original = Fields(original)
    original.choice("graph.type", {"absorb": "absorb"})
    return SEDDConfig(
        cond_dim=original.number("model.cond_dim", whole=True),
        scale_by_sigma=original.flag("model.scale_by_sigma"),
        training_loss="dse",
        **base_fields(original),
    )


def expected_shapes(config: SEDDConfig, original: Mapping | Fields) -> dict[str, tuple[int, ...]]:
    """The shape of each weight that the config describes."""
    return shape_map(config, TRUNK_SHAPES, BLOCK_SHAPES, C=config.cond_dim, F=FREQUENCIES)


def converted(config: SEDDConfig, original: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of `SEDDForMaskedDiffusion` from all weights of the original."""
    return convert_weights(original, key_map(config.num_hidden_layers, TRUNK_KEYS, BLOCK_KEYS))
