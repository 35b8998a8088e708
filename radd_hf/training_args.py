# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Training arguments: transformers' own, and what a masked diffusion loss needs besides."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from .checks_radd import is_int, is_number
from .forward_process import TIME_SAMPLING
from .losses import DEFAULT_TIME_EPS, LOSS_TYPES, check_loss_type

LOSS_REDUCTIONS = ("token_mean", "sequence_sum")


@dataclass
class RADDTrainingArguments(TrainingArguments):
    """
    `TrainingArguments` for `RADDTrainer`.

    Args:
        loss_type (`str`, *optional*, defaults to `"lambda_dce"`): "dse", "t_dce", "lambda_dce" or "ao".
        loss_reduction (`str`, *optional*, defaults to `"token_mean"`):
            "token_mean": nats per maskable token of the global batch, so gradients do not grow with the length.
            "sequence_sum": the mean over the batch of the sums over positions, as in the paper's code; its gradients
            are about L times larger, so clipping at norm 1 acts on nearly every step (the paper's recipe).
        time_sampling (`str`, *optional*, defaults to `"stratified"`): "uniform", "stratified" or "antithetic", over
            the global batch: all processes and accumulated batches.
        time_eps (`float`, *optional*, defaults to 1e-3): t ~ U[time_eps, 1] for "dse" and "t_dce".
        mask_token_id (`int`, *optional*): Defaults to the model config's.
        ema_decay (`float`, *optional*, defaults to 0.9999): Decay of the averaged weights, min(ema_decay, (1 + n) /
            (10 + n)) after n updates; 0 keeps no average. Evaluation, `save_model` and the Hub take the average.
        ema_on_cpu (`bool`, *optional*, defaults to `False`): Keep the average in CPU memory; each update then moves
            the weights there.
        eval_num_samples (`int`, *optional*, defaults to 4): Draws of the "ao" loss a sequence in `evaluate`.
    """

    loss_type: str = field(default="lambda_dce", metadata={"help": f"One of {list(LOSS_TYPES)}."})
    loss_reduction: str = field(default="token_mean", metadata={"help": f"One of {list(LOSS_REDUCTIONS)}."})
    time_sampling: str = field(default="stratified", metadata={"help": f"One of {list(TIME_SAMPLING)}."})
    time_eps: float = field(default=DEFAULT_TIME_EPS, metadata={"help": "t ~ U[time_eps, 1] for dse and t_dce."})
    mask_token_id: int | None = field(default=None, metadata={"help": "Defaults to the model config's."})
    ema_decay: float = field(default=0.9999, metadata={"help": "Decay of the averaged weights; 0 keeps none."})
    ema_on_cpu: bool = field(default=False, metadata={"help": "Keep the averaged weights in CPU memory."})
    eval_num_samples: int = field(default=4, metadata={"help": "Draws of the ao loss a sequence in evaluate()."})

    # transformers' defaults that would hurt here
    remove_unused_columns: bool = field(default=False, metadata={"help": "Keep attention_mask and loss_mask."})
    label_names: list[str] | None = field(
        default_factory=lambda: ["input_ids"], metadata={"help": "The clean tokens are the labels."}
    )
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "A diverged loss must show in the log."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Every parameter is used."})

    def __post_init__(self):
        super().__post_init__()
        check_loss_type(self.loss_type)
        for name, choices in (("loss_reduction", LOSS_REDUCTIONS), ("time_sampling", TIME_SAMPLING)):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {list(choices)}, got {getattr(self, name)!r}.")
        for name in ("time_eps", "ema_decay"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                raise ValueError(f"`{name}` must be in [0, 1), got {value!r}.")
        if not is_int(self.eval_num_samples) or self.eval_num_samples < 1:
            raise ValueError(f"`eval_num_samples` must be at least 1, got {self.eval_num_samples!r}.")
        if self.batch_eval_metrics or not self.eval_do_concat_batches:  # the bound is a ratio of sums over all batches
            raise ValueError(
                "`batch_eval_metrics` must be False and `eval_do_concat_batches` True, got "
                f"{self.batch_eval_metrics} and {self.eval_do_concat_batches}."
            )
