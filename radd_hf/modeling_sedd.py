# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""SEDD (Lou et al. 2024, arXiv 2310.16834): the score s_theta(x, sigma)[i, j] = p(x with x^i = j) / p(x), absorbing.

RADD's blocks, each told the noise level by adaLN-zero, and an output that is not normalised: nothing else differs.

Shapes: B batch, L length, D width, C conditioning, V vocabulary (mask column included), N kept positions.
"""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_radd import RADDAttention, RADDRotaryEmbedding
from .configuration_sedd import SEDDConfig
from .generation_config_radd import RADDGenerationConfig
from .generation_radd import DiffusionGenerationMixin, RADDGenerationOutput
from .modeling_radd import RADDMLP, RADDPreTrainedModel, default_position_ids
from .noise_schedule_radd import get_noise_schedule
from .sampling_sedd import TimedSampler

FREQUENCIES = 256  # width of the embedding of sigma, a constant of the public code


def sigma_embedding(sigma: torch.Tensor, width: int = FREQUENCIES) -> torch.Tensor:
    """cos(sigma f_i), sin(sigma f_i) with f_i = 10000^(-2i / width): (...) -> (..., width)."""
    half = width // 2
    exponent = torch.arange(half, dtype=sigma.dtype, device=sigma.device) / half
    angles = sigma[..., None] * torch.exp(-math.log(10000.0) * exponent)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class SEDDSigmaMap(nn.Module):
    """The conditioning c = silu(MLP(embedding of sigma_bar))."""

    def __init__(self, config: SEDDConfig):
        super().__init__()
        self.in_proj = nn.Linear(FREQUENCIES, config.cond_dim)
        self.out_proj = nn.Linear(config.cond_dim, config.cond_dim)

    def forward(self, sigma: torch.Tensor) -> torch.Tensor:
        """(B,) -> (B, C)."""
        embedded = sigma_embedding(sigma.float()).to(self.in_proj.weight.dtype)
        return nn.functional.silu(self.out_proj(nn.functional.silu(self.in_proj(embedded))))


class SEDDModulation(nn.Linear):
    """c (B, C) to shifts, scales and gates: adaLN-zero, since it starts at zero."""


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """adaLN: x (1 + scale) + shift; x (B, L, D), the others (B, 1, D)."""
    return x * (1 + scale) + shift


class SEDDLayer(GradientCheckpointingLayer):
    """RADD's block with norms that are modulated by c, and a gate on each branch."""

    def __init__(self, config: SEDDConfig):
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=False)
        self.self_attn = RADDAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=False)
        self.mlp = RADDMLP(config)
        self.modulation = SEDDModulation(config.cond_dim, 6 * config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        conditioning: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """(B, L, D) and c (B, C) -> (B, L, D)."""
        modulation = self.modulation(conditioning)[:, None].chunk(6, dim=-1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        attended, _ = self.self_attn(
            modulate(self.attn_norm(hidden_states), shift, scale), attention_mask, position_embeddings, **kwargs
        )
        hidden_states = hidden_states + gate * self.dropout(attended)
        fed = self.mlp(modulate(self.mlp_norm(hidden_states), mlp_shift, mlp_scale))
        return hidden_states + mlp_gate * self.dropout(fed)


class SEDDPreTrainedModel(RADDPreTrainedModel):
    """What SEDD models share with RADD's: strict loading and saving with code; adaLN starts at zero."""

    config_class = SEDDConfig
    config: SEDDConfig
    _no_split_modules = ["SEDDLayer"]
    _can_record_outputs = {"hidden_states": SEDDLayer, "attentions": RADDAttention}
    _hub_classes = {
        "AutoConfig": "configuration_sedd.SEDDConfig",
        "AutoModel": "modeling_sedd.SEDDForMaskedDiffusion",
        "AutoModelForMaskedLM": "modeling_sedd.SEDDForMaskedDiffusion",
    }
    _hub_pipelines = {}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, SEDDModulation):
            init.zeros_(module.weight)
            init.zeros_(module.bias)


class SEDDModel(SEDDPreTrainedModel):
    """The trunk: embedding, noise level, blocks and final norm."""

    def __init__(self, config: SEDDConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.sigma_map = SEDDSigmaMap(config)
        self.layers = nn.ModuleList([SEDDLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=False)
        self.modulation = SEDDModulation(config.cond_dim, 2 * config.hidden_size)
        self.rotary_emb = RADDRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor,
        sigma: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(B, L)`): Text with holes.
            sigma (`torch.Tensor` of shape `(B,)`): Total noise sigma_bar(t) of each row.
            attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding, on any side.
            position_ids (`torch.LongTensor` of shape `(B, L)`, *optional*): Defaults to the count of real tokens.

        Returns:
            `BaseModelOutput` with `last_hidden_state` (B, L, D).
        """
        hidden_states = self.embed_tokens(input_ids)
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask.bool()
        if position_ids is None:
            position_ids = default_position_ids(hidden_states, attention_mask)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        conditioning = self.sigma_map(sigma)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                conditioning,
                attention_mask=mask,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        shift, scale = self.modulation(conditioning)[:, None].chunk(2, dim=-1)
        return BaseModelOutput(last_hidden_state=modulate(self.norm(hidden_states), shift, scale))


class SEDDForMaskedDiffusion(SEDDPreTrainedModel, DiffusionGenerationMixin):
    """
    s_theta(x, sigma_bar)[i, j]: the ratio p(x with x^i = j) / p(x) under noise sigma_bar, as a log-score.

    Unlike c_theta it changes with time and is not normalised, so no output can be kept from one step to the next.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    generation_config_class = RADDGenerationConfig

    def __init__(self, config: SEDDConfig):
        super().__init__(config)
        self.model = SEDDModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear):
        self.lm_head = new_embeddings

    def compute_log_score(
        self, hidden_states: torch.Tensor, input_ids: torch.LongTensor, sigma: torch.Tensor
    ) -> torch.Tensor:
        """
        Output layer: log-scores (..., V) from (..., D), the ids there (...) and sigma_bar, which broadcasts to (...).

        With `scale_by_sigma`, less log(expm1(sigma_bar)) and log(V - 1); 0 at the id itself.
        """
        log_score = self.lm_head(hidden_states)
        if self.config.scale_by_sigma:
            scale = torch.log(torch.expm1(sigma.double())) + math.log(self.config.vocab_size - 1)
            log_score = log_score - scale[..., None].to(log_score.dtype)
        return log_score.scatter(-1, input_ids[..., None], 0.0)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor,
        sigma: torch.Tensor | float | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        logits_to_keep: torch.BoolTensor | None = None,
        *,
        t: torch.Tensor | float | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(B, L)`): x, with `config.mask_token_id` at the holes.
            sigma (`torch.Tensor` of shape `(B,)` or `float`, *optional*): Total noise sigma_bar, above 0; or `t`.
            attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding, on any side.
            position_ids (`torch.LongTensor` of shape `(B, L)`, *optional*): Rotary positions.
            logits_to_keep (`torch.BoolTensor` of shape `(B, L)`, *optional*): Positions wanted: the others have no
                output, and `logits` is (N, V), row-major.
            t (`torch.Tensor` of shape `(B,)` or `float`, *optional*): Time in (0, 1] under the config's schedule.

        Returns:
            `MaskedLMOutput` with `logits` (B, L, V): log-scores, 0 at the id that stands there; not normalised.

        Raises:
            ValueError: Not exactly one of `sigma` and `t`, or one of them out of its range or of another shape.
        """
        sigma = self._total_noise(input_ids, sigma, t)
        outputs = self.model(input_ids, sigma, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        hidden_states, sigma = outputs.last_hidden_state, sigma[:, None].expand(input_ids.shape)
        if logits_to_keep is not None:
            hidden_states, input_ids, sigma = (x[logits_to_keep] for x in (hidden_states, input_ids, sigma))
        return MaskedLMOutput(
            logits=self.compute_log_score(hidden_states, input_ids, sigma),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _total_noise(
        self, input_ids: torch.LongTensor, sigma: torch.Tensor | float | None, t: torch.Tensor | float | None
    ) -> torch.Tensor:
        """sigma_bar of each row, (B,), float64."""
        if (sigma is None) == (t is None):
            raise ValueError("Exactly one of `sigma` and `t` must be given: SEDD's score depends on the noise level.")
        name, value, highest = ("t", t, 1.0) if sigma is None else ("sigma", sigma, math.inf)
        value = torch.as_tensor(value, dtype=torch.float64, device=input_ids.device)
        if value.shape not in ((), input_ids.shape[:1]) or not bool(((value > 0) & (value <= highest)).all()):
            raise ValueError(
                f"`{name}` must be in (0, {highest}], one number or one a row {tuple(input_ids.shape[:1])}, got "
                f"{tuple(value.shape)} with values {value.flatten()[:4].tolist()}."
            )
        return (value if t is None else get_noise_schedule(self.config).total(value)).expand(input_ids.shape[:1])

    def concrete_score(
        self, input_ids: torch.LongTensor, t: torch.Tensor | float, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """p_t(x^) / p_t(x) as in `RADDForMaskedDiffusion.concrete_score`, (B, L, V), float32: exp of the log-score."""
        return self(input_ids, t=t, attention_mask=attention_mask).logits.float().exp()

    def diffusion_generate(self, *args, **kwargs) -> RADDGenerationOutput | torch.LongTensor:
        """
        `DiffusionGenerationMixin.diffusion_generate` with "tweedie" or "euler" and `num_steps` or `times`.

        Whether a position is revealed in a step depends on the score, so the network is called in every step on rows
        that still have a mask; there is nothing to cache. See `TimedSampler` for the law of a step.

        Raises:
            ValueError: As there; or an option that needs a network without time.
        """
        return TimedSampler(self).diffusion_generate(*args, **kwargs)


__all__ = ["SEDDForMaskedDiffusion", "SEDDModel", "SEDDPreTrainedModel"]
