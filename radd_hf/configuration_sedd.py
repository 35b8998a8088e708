# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Configuration of a SEDD network, the baseline: a RADD network that is told the time and is not normalised."""

from .checks_radd import is_int
from .configuration_radd import RADDConfig


class SEDDConfig(RADDConfig):
    r"""
    Sizes of an absorbing SEDD network (Lou et al. 2024, arXiv 2310.16834). The defaults are its small model.

    Args:
        cond_dim (`int`, *optional*, defaults to 128): Width C of the conditioning on the noise level.
        scale_by_sigma (`bool`, *optional*, defaults to `True`): Divide the score by expm1(sigma_bar) and the number of
            clean tokens, so that the network's own output is about 1 ("SEDD-Scale"; `False`: "SEDD-Unscale").
        hidden_dropout (`float`, *optional*, defaults to 0.1): As its public code has it.
        kwargs: The fields of `RADDConfig`.

    Raises:
        ValueError: A field has a value the network cannot have; the message names the field and the value.
    """

    model_type = "sedd"

    cond_dim: int = 128
    scale_by_sigma: bool = True
    hidden_dropout: float | int = 0.1

    def _check_fields(self):
        super()._check_fields()
        if not is_int(self.cond_dim) or self.cond_dim < 1:
            raise ValueError(f"`cond_dim` must be a positive integer, got {self.cond_dim!r}.")
        if not isinstance(self.scale_by_sigma, bool):
            raise ValueError(f"`scale_by_sigma` must be True or False, got {self.scale_by_sigma!r}.")
