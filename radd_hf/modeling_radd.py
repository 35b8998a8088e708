# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The network c_theta: a bidirectional transformer from a text with holes to clean-token distributions, without time.

Shapes: B batch, L length, D width, V vocabulary (mask column included), K kept positions of the fullest row,
N kept positions in all.
"""

from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_radd import RADDAttention, RADDRotaryEmbedding, gather_rows
from .configuration_radd import RADDConfig
from .generation_config_radd import RADDGenerationConfig
from .generation_radd import DiffusionGenerationMixin
from .linear_cross_entropy_radd import is_plain_linear, linear_cross_entropy
from .loading_radd import check_saved_weights, damaged, misfit
from .noise_schedule_radd import get_noise_schedule

if TYPE_CHECKING:  # never run: makes save_pretrained ship the pipeline's file beside the weights
    from .pipeline_radd import InfillingPipeline  # noqa: F401

# Backends whose kernels take any mask and fewer queries than keys; the others compute the last block everywhere.
_SLICEABLE_ATTENTION = ("sdpa", "eager")


class RADDMLP(nn.Module):
    """Two layers with a GELU between."""

    def __init__(self, config: RADDConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


class RADDLayer(GradientCheckpointingLayer):
    """Pre-norm block: attention, then MLP, each with dropout on its branch."""

    def __init__(self, config: RADDConfig):
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = RADDAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = RADDMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        query_index: torch.LongTensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """(B, L, D) -> (B, L, D), or (B, K, D) at the positions `query_index` (B, K) alone."""
        attended, _ = self.self_attn(
            self.attn_norm(hidden_states), attention_mask, position_embeddings, query_index, **kwargs
        )
        if query_index is not None:
            hidden_states = gather_rows(hidden_states, query_index)
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.mlp_norm(hidden_states)))


class RADDPreTrainedModel(PreTrainedModel):
    """What every RADD model shares: initialisation, strict loading, saving with code."""

    config_class = RADDConfig
    config: RADDConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RADDLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": RADDLayer, "attentions": RADDAttention}
    _hub_classes = {
        "AutoConfig": "configuration_radd.RADDConfig",
        "AutoModel": "modeling_radd.RADDForMaskedDiffusion",
        "AutoModelForMaskedLM": "modeling_radd.RADDForMaskedDiffusion",
    }
    _hub_pipelines = {"radd-infilling": {"impl": "pipeline_radd.InfillingPipeline", "pt": ["AutoModelForMaskedLM"]}}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if module is getattr(self, "lm_head", None) and not self.config.tie_word_embeddings:
            init.zeros_(module.weight)  # an untrained model is uniform: NLL per token is ln(V)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, strict: bool = True, **kwargs):
        """
        `PreTrainedModel.from_pretrained` that never leaves a weight at random in silence.

        Args:
            strict (`bool`, *optional*, defaults to `True`):
                Raise when the checkpoint lacks a weight, has one of another shape or more blocks than the config.
                `False` is transformers' own behaviour: warn and initialise those weights.

        Raises:
            ValueError: Lists the missing, unexpected and mis-shaped keys; or a weights file is damaged.
        """
        if kwargs.get("weights_only") is False:
            raise ValueError("`weights_only` must be True: no code of a checkpoint is run, got False.")
        wants_info = kwargs.pop("output_loading_info", False)
        if strict:
            kwargs["ignore_mismatched_sizes"] = True  # so that all of them can be listed at once
            check_saved_weights(cls, pretrained_model_name_or_path, kwargs)
            if pretrained_model_name_or_path is not None and kwargs.get("gguf_file") is None:
                kwargs.setdefault("use_safetensors", True)  # whose header was checked; a pickle has none
            kwargs.pop("force_download", None)  # done by the check
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise damaged(pretrained_model_name_or_path, error) from error
        layers = (f"{cls.base_model_prefix}.layers.", "layers.")  # blocks that the config does not have
        missing, misshaped, unexpected = (info[f"{kind}_keys"] for kind in ("missing", "mismatched", "unexpected"))
        if strict and (missing or misshaped or any(key.startswith(layers) for key in unexpected)):
            raise misfit(cls, pretrained_model_name_or_path, missing, misshaped, unexpected)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory, *args, **kwargs):
        """`PreTrainedModel.save_pretrained`, with the code files and the entries the Auto classes need."""
        if self._auto_class is not None:
            self.config.auto_map = dict(self._hub_classes)
            if self._hub_pipelines:
                self.config.custom_pipelines = dict(self._hub_pipelines)
        super().save_pretrained(save_directory, *args, **kwargs)


class RADDModel(RADDPreTrainedModel):
    """The trunk: embedding, blocks and final norm."""

    def __init__(self, config: RADDConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([RADDLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.rotary_emb = RADDRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        keep_mask: torch.BoolTensor | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(B, L)`): Text with holes; or `inputs_embeds` (B, L, D).
            attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding, on any side; 4-D masks pass.
            position_ids (`torch.LongTensor` of shape `(B, L)`, *optional*): Defaults to the count of real tokens
                before each, so that padding changes nothing.
            keep_mask (`torch.BoolTensor` of shape `(B, L)`, *optional*): Positions wanted.

        Returns:
            `BaseModelOutput` with `last_hidden_state` (B, L, D); with `keep_mask` (N, D), row-major, and the last
            block's queries and MLP computed there alone where the attention backend allows it.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Exactly one of `input_ids` and `inputs_embeds` must be given.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if (
            attention_mask is not None
            and attention_mask.dim() == 2
            and attention_mask.shape != inputs_embeds.shape[:2]
        ):
            raise ValueError(
                f"`attention_mask` must have the inputs' shape {tuple(inputs_embeds.shape[:2])}, got "
                f"{tuple(attention_mask.shape)}."
            )
        implementation = self.config._attn_implementation
        if attention_mask is not None and attention_mask.dim() == 4 and implementation not in _SLICEABLE_ATTENTION:
            raise ValueError(
                f"A 4-D `attention_mask` needs an attention implementation in {list(_SLICEABLE_ATTENTION)}, got "
                f"{implementation!r}."
            )
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask.bool()  # positions count real tokens: 2 or 0.5 must count as 1
        if position_ids is None:
            position_ids = default_position_ids(inputs_embeds, attention_mask)
        layers = self.layers if inputs_embeds.numel() else ()  # attention kernels need a token
        query_index, is_kept = None, None
        if keep_mask is not None and len(layers) and self._slices_last_block(kwargs):
            query_index, is_kept = kept_positions(keep_mask)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        last = len(layers) - 1
        for i, layer in enumerate(layers):
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_embeddings=position_embeddings,
                query_index=query_index if i == last else None,
                **kwargs,
            )
        if query_index is not None:
            hidden_states = hidden_states[is_kept]
        elif keep_mask is not None:
            hidden_states = hidden_states[keep_mask]
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def _slices_last_block(self, kwargs: dict) -> bool:
        recorded = any(
            kwargs.get(flag, getattr(self.config, flag, False))
            for flag in ("output_hidden_states", "output_attentions")
        )
        return self.config._attn_implementation in _SLICEABLE_ATTENTION and not recorded


def default_position_ids(inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.LongTensor:
    """Number of real tokens before each position, (B or 1, L)."""
    if attention_mask is not None and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    return torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]


def kept_positions(keep_mask: torch.BoolTensor) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """The kept positions of each row in order, filled up to the fullest row: indices and validity, both (B, K)."""
    counts = keep_mask.sum(-1)
    width = max(1, int(counts.max())) if len(counts) else 1  # attention kernels need a query, kept or not
    index = keep_mask.byte().argsort(dim=-1, descending=True, stable=True)[:, :width]
    return index, torch.arange(width, device=keep_mask.device) < counts[:, None]


class RADDForMaskedDiffusion(RADDPreTrainedModel, DiffusionGenerationMixin):
    """
    c_theta(x_t)[i, j] = q(x_0^i = j | unmasked tokens): the trunk and an output layer over clean tokens.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    generation_config_class = RADDGenerationConfig

    def __init__(self, config: RADDConfig):
        super().__init__(config)
        self.model = RADDModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear):
        self.lm_head = new_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs) -> nn.Embedding:
        """`PreTrainedModel.resize_token_embeddings`; the mask token keeps its id and must stay in the vocabulary."""
        if new_num_tokens is not None and new_num_tokens <= self.config.mask_token_id:
            raise ValueError(
                f"`new_num_tokens` must exceed mask_token_id={self.config.mask_token_id}, got {new_num_tokens}."
            )
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self.config, name)
            largest = max(value) if isinstance(value, list) else value
            if new_num_tokens is not None and largest is not None and new_num_tokens <= largest:
                raise ValueError(f"`new_num_tokens` must exceed the config's {name}={value}, got {new_num_tokens}.")
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Output layer: (..., D) -> (..., V) with the mask column at -inf, so no probability ever falls on M."""
        logits = self.lm_head(hidden_states)
        logits[..., self.config.mask_token_id] = float("-inf")
        return logits

    def _token_nll(
        self, hidden_states: torch.Tensor, targets: torch.LongTensor, expected_grad: torch.Tensor | None
    ) -> torch.Tensor:
        """-log q_i at each position, (N, D) -> (N,); through the output layer's own forward where it has adapters."""
        if is_plain_linear(self.lm_head):
            head, mask = self.lm_head, self.config.mask_token_id
            return linear_cross_entropy(hidden_states, head.weight, head.bias, targets, mask, expected_grad)
        return token_cross_entropy(self.compute_logits(hidden_states), targets)

    def _reveal_states(
        self, ids: torch.LongTensor, attention_mask: torch.Tensor | None, reveal: torch.BoolTensor
    ) -> torch.Tensor:
        """As in the mixin: final hidden states (N, D), so that the output layer runs where it is needed, in chunks."""
        return self.model(input_ids=ids, attention_mask=attention_mask, keep_mask=reveal).last_hidden_state

    def _state_source(self) -> tuple[nn.Module, str]:
        """As in the mixin: the trunk's final hidden states."""
        return self.model, "last_hidden_state"

    def _state_logits(self, states: torch.Tensor) -> torch.Tensor:
        """As in the mixin: the output layer, (n, D) -> (n, V)."""
        return self.compute_logits(states)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        return_token_nll: bool = False,
        row_weight: torch.Tensor | None = None,
        **kwargs,
    ) -> MaskedLMOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(B, L)`): Tokens, with `config.mask_token_id` at the holes.
            attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding, on any side.
            position_ids (`torch.LongTensor` of shape `(B, L)`, *optional*): Rotary positions.
            inputs_embeds (`torch.Tensor` of shape `(B, L, D)`, *optional*): Instead of `input_ids`.
            labels (`torch.LongTensor` of shape `(B, L)`, *optional*): Clean tokens; -100 is ignored.
            logits_to_keep (`int` or `torch.Tensor`, *optional*, defaults to 0):
                The last n positions (0: all), a 1-D tensor of positions, or a boolean mask (B, L): only the rows where
                it is True, as (N, V), and nothing is computed for the others that the output does not need.
            num_items_in_batch (`int`, *optional*): Divisor of the loss instead of the number of labels.
            return_token_nll (`bool`, *optional*, defaults to `False`): With `labels` and a boolean `logits_to_keep`:
                the loss of each kept position, and no logits: the output layer and its cross-entropy run in chunks.
            row_weight (`torch.Tensor` of shape `(B,)`, *optional*): With `return_token_nll`, what the gradient of
                each row's positions will be, up to one common factor: a hint that saves computing logits again.

        Returns:
            `MaskedLMOutput`: `logits` (B, L, V), normalised by nobody and -inf at the mask column; `loss` (with
            `labels`) the mean cross-entropy in nats per labelled token, without any diffusion weight; with
            `return_token_nll`, `loss` (N,) in float32, row-major, and `logits` None.
        """
        keep_mask = None
        if torch.is_tensor(logits_to_keep) and logits_to_keep.dtype == torch.bool:
            shape = (input_ids if input_ids is not None else inputs_embeds).shape[:2]
            if logits_to_keep.shape != shape:
                raise ValueError(
                    f"A boolean `logits_to_keep` must have the inputs' shape {tuple(shape)}, got "
                    f"{tuple(logits_to_keep.shape)}."
                )
            keep_mask = logits_to_keep
        if return_token_nll and (keep_mask is None or labels is None):
            raise ValueError("`return_token_nll` needs `labels` and a boolean `logits_to_keep`.")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            keep_mask=keep_mask,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if keep_mask is not None:
            labels = None if labels is None else labels[keep_mask]
        else:
            if torch.is_tensor(logits_to_keep) and logits_to_keep.dim() != 1:
                raise ValueError(
                    f"`logits_to_keep` must be an integer, a 1-D tensor of positions or a boolean mask, got a "
                    f"{logits_to_keep.dtype} tensor of shape {tuple(logits_to_keep.shape)}."
                )
            kept = logits_to_keep if torch.is_tensor(logits_to_keep) else slice(-logits_to_keep, None)
            hidden_states = hidden_states[:, kept]
            labels = None if labels is None else labels[:, kept]
        logits = None
        if return_token_nll:
            expected = None if row_weight is None else row_weight[keep_mask.nonzero()[:, 0]]
            loss = self._token_nll(hidden_states, labels.long(), expected)
        else:
            logits = self.compute_logits(hidden_states)
            loss = None if labels is None else masked_lm_loss(logits, labels, num_items_in_batch)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def concrete_score(
        self, input_ids: torch.LongTensor, t: torch.Tensor | float, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Theorem 1: p_t(x^) / p_t(x) = s(t) c_theta(x)[i, x^i] for every x^ that differs from x at one masked position.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, L)`): x, with holes.
            t (`float` or `torch.Tensor` of shape `(B,)`): Time in (0, 1], under the config's noise schedule.
            attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding.

        Returns:
            `torch.Tensor` of shape `(B, L, V)`, float32: the scores, 1 at x^i = x^i itself; meaningful at masked
            positions only (no reverse transition leaves an unmasked token).

        Raises:
            ValueError: `t` outside (0, 1] or of another shape.
        """
        t = torch.as_tensor(t, dtype=torch.float64, device=input_ids.device)
        if t.shape not in ((), input_ids.shape[:1]) or not bool(((t > 0) & (t <= 1)).all()):
            raise ValueError(
                f"`t` must be in (0, 1], one number or one a row {tuple(input_ids.shape[:1])}, got {tuple(t.shape)} "
                f"with values {t.flatten()[:4].tolist()}."
            )
        scale = get_noise_schedule(self.config).score_scale(t).float().reshape(-1, 1, 1)
        logits = self(input_ids, attention_mask=attention_mask).logits
        score = scale * torch.softmax(logits, dim=-1, dtype=torch.float32)
        return score.scatter(-1, input_ids[..., None], 1.0)


def token_cross_entropy(logits: torch.Tensor, targets: torch.LongTensor) -> torch.Tensor:
    """-log softmax(logits)[target], (N, V) -> (N,), nats, float32 or wider."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def masked_lm_loss(
    logits: torch.Tensor, labels: torch.LongTensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Cross-entropy in float32 over the labels that are not -100: mean, or sum over `num_items_in_batch`."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(
        logits.float().flatten(0, -2),
        labels.long().flatten().to(logits.device),
        ignore_index=-100,
        reduction=reduction,
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


__all__ = ["RADDForMaskedDiffusion", "RADDModel", "RADDPreTrainedModel"]
