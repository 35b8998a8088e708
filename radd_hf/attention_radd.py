# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Bidirectional attention with rotary positions, from all positions or from some of them to all.

Shapes: B batch, L length, D width, H heads, K kept positions of the fullest row.
"""

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_radd import RADDConfig


class RADDRotaryEmbedding(nn.Module):
    """Cosines and sines of rotary positions, computed in float32 whatever the weights are."""

    def __init__(self, config: RADDConfig):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        rope_init = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = rope_init(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def _apply(self, fn, recurse: bool = True):
        """Moves as any module, but `model.half()` and the like leave the frequencies in float32."""
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            rope_init = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
            inv_freq, self.attention_scaling = rope_init(self.config)
            self.inv_freq = inv_freq.to(self.inv_freq.device)
            self.original_inv_freq = self.inv_freq.clone()
        return self

    @staticmethod
    def compute_default_rope_parameters(config: RADDConfig, *args, **kwargs) -> tuple[torch.Tensor, float]:
        """theta^(-2i / head_dim) for each pair i, and the attention scaling 1."""
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponent), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors (B or 1, L, D / H) in x's dtype from positions (B or 1, L)."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float32)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x (B, H, L, D / H) by its positions; cos and sin are (B or 1, L, D / H)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def gather_rows(x: torch.Tensor, index: torch.LongTensor) -> torch.Tensor:
    """x (B or 1, L, ...) at the positions `index` (B, K): (B, K, ...)."""
    x = x.expand(index.shape[0], *x.shape[1:])
    return x[torch.arange(index.shape[0], device=index.device)[:, None], index]


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out, with its weights: the only backend that can return them."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:  # a 4-D mask of the caller's
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class RADDAttention(nn.Module):
    """Bidirectional multi-head attention with rotary positions and no biases."""

    def __init__(self, config: RADDConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.is_causal = False  # without it sdpa would attend causally when there is no padding
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, L, D / H)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        query_index: torch.LongTensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from the positions `query_index` (B, K), or from all, to all: (B, K or L, D) and the weights."""
        cos, sin = position_embeddings
        key = rotate(self._heads(self.k_proj(hidden_states)), cos, sin)
        value = self._heads(self.v_proj(hidden_states))
        if query_index is not None:
            hidden_states = gather_rows(hidden_states, query_index)
            cos, sin = gather_rows(cos, query_index), gather_rows(sin, query_index)
            if attention_mask is not None:
                attention_mask = gather_rows(attention_mask.transpose(1, 2), query_index).transpose(1, 2)
        query = rotate(self._heads(self.q_proj(hidden_states)), cos, sin)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attention(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.flatten(2)), weights
