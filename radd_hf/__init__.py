# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""RADD, reparameterized absorbing discrete diffusion, for Hugging Face Transformers."""

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_radd import RADDConfig
from .configuration_sedd import SEDDConfig
from .evaluation import estimate_likelihood
from .generation_config_radd import RADDGenerationConfig
from .generation_radd import RADDGenerationOutput, diffusion_generate
from .losses import diffusion_loss
from .modeling_radd import RADDForMaskedDiffusion, RADDModel
from .modeling_sedd import SEDDForMaskedDiffusion
from .noise_schedule_radd import (
    CosineNoise,
    GeometricNoise,
    LogLinearNoise,
    NoiseSchedule,
    expected_nfe,
    get_noise_schedule,
)
from .pipeline_radd import InfillingPipeline
from .tokenization import add_mask_token

if TYPE_CHECKING:
    from .trainer import RADDTrainer
    from .training_args import RADDTrainingArguments

__version__ = "0.1.0"

__all__ = [
    "CosineNoise",
    "GeometricNoise",
    "InfillingPipeline",
    "LogLinearNoise",
    "NoiseSchedule",
    "RADDConfig",
    "RADDForMaskedDiffusion",
    "RADDGenerationConfig",
    "RADDGenerationOutput",
    "RADDModel",
    "RADDTrainer",
    "RADDTrainingArguments",
    "SEDDConfig",
    "SEDDForMaskedDiffusion",
    "add_mask_token",
    "diffusion_generate",
    "diffusion_loss",
    "estimate_likelihood",
    "expected_nfe",
    "get_noise_schedule",
]

for _config, _model in ((RADDConfig, RADDForMaskedDiffusion), (SEDDConfig, SEDDForMaskedDiffusion)):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForMaskedLM.register(_config, _model, exist_ok=True)
    _config.register_for_auto_class()
    _model.register_for_auto_class("AutoModelForMaskedLM")
PIPELINE_REGISTRY.register_pipeline(
    "radd-infilling", pipeline_class=InfillingPipeline, pt_model=AutoModelForMaskedLM, type="text"
)


def __getattr__(name: str) -> Any:
    """Import the training classes when they are first asked for: transformers' Trainer takes seconds to import."""
    if name == "RADDTrainer":
        from .trainer import RADDTrainer

        return RADDTrainer
    if name == "RADDTrainingArguments":
        from .training_args import RADDTrainingArguments

        return RADDTrainingArguments
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
