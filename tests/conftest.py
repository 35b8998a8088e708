"""A tiny network whose conditionals depend strongly on their context."""

from collections.abc import Callable

import pytest
import torch

from radd_hf.configuration_radd import RADDConfig
from radd_hf.modeling_radd import RADDForMaskedDiffusion


@pytest.fixture(scope="session")
def make_model() -> Callable[..., RADDForMaskedDiffusion]:
    """`make_model(seed=101, **config fields)`: V = 3 and M = 1 unless told otherwise, in evaluation mode.

    Every weight is drawn, the output layer too (it starts at zero), so contexts matter and orders disagree.
    """

    def build(seed: int = 101, **fields) -> RADDForMaskedDiffusion:
        sizes = {
            "vocab_size": 4,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
            "hidden_dropout": 0.0,
            "mask_token_id": 1,
        }
        model = RADDForMaskedDiffusion(RADDConfig(**{**sizes, **fields})).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" not in name:
                    scale = 0.4 if "lm_head" in name else 0.6
                    weight.copy_(scale * torch.randn(weight.shape, generator=generator))
        return model

    return build


@pytest.fixture(scope="module")
def model(make_model: Callable[..., RADDForMaskedDiffusion]) -> RADDForMaskedDiffusion:
    """V = 3, M = 1, one block."""
    return make_model()


@pytest.fixture(scope="module")
def wide_model(make_model: Callable[..., RADDForMaskedDiffusion]) -> RADDForMaskedDiffusion:
    """V = 10, M = 4, two blocks."""
    return make_model(vocab_size=11, mask_token_id=4, num_hidden_layers=2, max_position_embeddings=64)
