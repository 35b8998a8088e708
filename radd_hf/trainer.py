# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""RADDTrainer: transformers' Trainer with any of the four diffusion losses."""

import copy
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import ProgressCallback, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalPrediction

from .callbacks import DropoutSeedCallback, EMACallback, StopOnSigtermCallback
from .data import MaskedDiffusionCollator, check_tokenizer, document_attention_mask
from .evaluation import perplexity
from .forward_process import GlobalBatchNoise
from .logging_callbacks import DiffusionProgressCallback, TokenRate
from .losses import DiffusionLossOutput, diffusion_loss_terms, maskable_positions
from .model_card import write_training_card
from .training_args import RADDTrainingArguments

# Rows of an evaluation that share strata: a fixed number, so that no figure depends on processes or batch sizes.
EVAL_STRATA = 64


class RADDTrainer(Trainer):
    """
    A `Trainer` whose loss is a diffusion loss on `input_ids` (with `attention_mask` and `loss_mask` where present).

    The log shows the weighted loss as `loss`, in the units of `args.loss_reduction`, and beside it `nll_per_token`,
    the plain cross-entropy in nats per masked token, which starts at ln(V). `evaluate()` gives `eval_nll_per_token`
    (the bound), its perplexity and bits.

    The corruption of a sequence is a function of (seed, step, index in the global batch), with t, lambda or k
    stratified over the global batch: a resumed run draws what the uninterrupted one would have, batches that are
    accumulated or spread over processes what one batch would have, and no two processes share noise. The loss is
    divided by the tokens (or sequences) of the global batch, so these have one loss and one gradient, too.

    Args:
        model (`PreTrainedModel`): The network: RADD, adapters on it, or another masked language model.
        args (`RADDTrainingArguments`, *optional*): Training arguments.
        data_collator (*optional*): Defaults to `MaskedDiffusionCollator`.
        kwargs: As for `Trainer`.

    Raises:
        ValueError: A data set is empty, `args` are plain `TrainingArguments`, or the tokenizer given as
            `processing_class` has another mask token or more tokens than the model.
    """

    def __init__(
        self, model: nn.Module | None = None, args: RADDTrainingArguments | None = None, data_collator=None, **kwargs
    ):
        for name in ("train_dataset", "eval_dataset"):
            _reject_empty(name, kwargs.get(name))
        if args is None:
            args = RADDTrainingArguments("tmp_trainer")
        if not isinstance(args, RADDTrainingArguments):
            raise ValueError(f"`args` must be RADDTrainingArguments or None, got {type(args).__name__}.")
        kwargs.setdefault("compute_metrics", likelihood_metrics)
        super().__init__(model, args, data_collator or MaskedDiffusionCollator(), **kwargs)
        if getattr(self.processing_class, "mask_token_id", None) is not None:
            check_tokenizer(self.processing_class, self.model.config)
        self.model_accepts_loss_kwargs = True  # compute_loss divides by the whole global batch: nothing else must
        self._record_loss(self.model)
        self.add_callback(DropoutSeedCallback())
        self.sigterm = StopOnSigtermCallback(self)
        self.add_callback(self.sigterm)
        device = "cpu" if self.args.ema_on_cpu else None
        self.ema = EMACallback(self.model, self.args.ema_decay, device) if self.args.ema_decay else None
        if self.ema is not None:
            self.add_callback(self.ema)
        if self.pop_callback(ProgressCallback) is not None:  # a notebook has a table instead
            self.add_callback(DiffusionProgressCallback)
        self.token_rate = TokenRate()
        self.add_callback(self.token_rate)
        self._row_nll = torch.zeros(2, device=self.args.device)  # sum of nll / k over rows with k >= 1; their number
        self._micro_step, self._noise_step = 0, None
        self._eval_step = 0

    def compute_loss(
        self, model: nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch=None
    ) -> torch.Tensor | tuple[torch.Tensor, DiffusionLossOutput]:
        """
        The loss `args.loss_type` of a batch, over what `args.loss_reduction` counts: `num_items_in_batch` of them in
        the global batch, or (`None`) those of this batch alone.
        """
        terms = self._loss_terms(model, inputs, self.args.loss_type, self._training_noise())
        if model.training:
            self.token_rate.count(inputs["input_ids"])
            scored = terms.num_masked > 0
            row_nll = terms.nll.detach()[scored] / terms.num_masked[scored]
            self._row_nll += torch.stack([row_nll.sum(), scored.sum()]).to(self._row_nll)
        if num_items_in_batch is None:
            divisor = self._num_items(inputs)
        else:
            divisor = num_items_in_batch / self.args.world_size  # gradients are averaged over the processes
        loss = terms.loss.sum() / torch.as_tensor(divisor).clamp(min=1 / self.args.world_size).to(terms.loss)
        if model.training and not bool(loss.isfinite()):
            self._raise_not_finite(terms, inputs)
        return (loss, terms) if return_outputs else loss

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict], torch.Tensor]:
        """`Trainer.get_batch_samples`, with what the loss is divided by: tokens or sequences of the global batch."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        count = torch.tensor(sum(int(self._num_items(batch)) for batch in batches), device=device)
        return batches, self.accelerator.gather(count).sum()

    def prediction_step(
        self, model: nn.Module, inputs: dict, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The bound in nats (B,) as "logits" and token counts (B,) as "labels": their sums are exact on any layout."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            nll = 0.0
            first_row = self.args.eval_batch_size * (self._eval_step * self.args.world_size + self.args.process_index)
            self._eval_step += 1
            for draw in range(self.args.eval_num_samples):
                noise = GlobalBatchNoise((self.args.seed, "eval", draw), first_row, EVAL_STRATA)
                terms = self._loss_terms(model, inputs, "ao", noise)
                nll = nll + terms.loss / self.args.eval_num_samples
        loss = nll.sum() / terms.length.sum().clamp(min=1)
        return (loss, None, None) if prediction_loss_only else (loss, nll, terms.length)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """
        `Trainer.train`; `True` resumes from the last checkpoint that was written to its end.

        SIGTERM ends it with a checkpoint and `SystemExit` (status 143).

        Raises:
            ValueError: A loss that is not finite; the message names the step and the batch.
            OSError: A checkpoint cannot be written: earlier ones stay, nothing half-written does.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
        with self.sigterm.listening():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluate(self, eval_dataset=None, *args, **kwargs) -> dict[str, float]:
        """`Trainer.evaluate` on the averaged weights (if there are any), with the same noise every time."""
        _reject_empty("eval_dataset", eval_dataset)
        with self._evaluation():
            return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, test_dataset, *args, **kwargs):
        """`Trainer.predict`, as `evaluate` does it: `predictions` are nats a sequence (B,), `label_ids` its tokens."""
        _reject_empty("test_dataset", test_dataset)
        with self._evaluation():
            return super().predict(test_dataset, *args, **kwargs)

    def call_model_init(self, trial=None) -> nn.Module:
        """`Trainer.call_model_init`, and the loss is recorded in the new model's config."""
        model = super().call_model_init(trial)
        self._record_loss(model)
        return model

    def log(self, logs: dict[str, float], start_time: float | None = None):
        """Add `nll_per_token` over the rows of all processes since the last log, and their `tokens_per_second`."""
        if "loss" in logs:
            total, count = self.accelerator.gather(self._row_nll[None]).sum(0).tolist()
            if count:
                logs["nll_per_token"] = round(total / count, 4)
            self._row_nll.zero_()
            logs["tokens_per_second"] = round(self.token_rate.take(self.accelerator), 1)
        super().log(logs, start_time)

    def ema_model(self) -> nn.Module:
        """A copy of the model with the averaged weights, in evaluation mode."""
        if self.ema is None:
            raise ValueError("`ema_decay` must be greater than 0 for an averaged model, got 0.")
        with self.ema.applied_to(self.model):
            return copy.deepcopy(self.model).eval()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        """Write the averaged weights and a model card; checkpoints (internal calls) hold the raw ones to resume."""
        averaged = self.ema is not None and not _internal_call
        with self.ema.applied_to(self.model) if averaged else nullcontext():
            super().save_model(output_dir, _internal_call)
        if not _internal_call and self.args.should_save:
            write_training_card(self, output_dir or self.args.output_dir)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ):
        """`Trainer.create_model_card` with the recipe, data and metrics of a diffusion model: see `training_card`."""
        if not self.is_world_process_zero():
            return
        tags, dataset_tags, dataset, dataset_args = (
            [value] if isinstance(value, str) else value for value in (tags, dataset_tags, dataset, dataset_args)
        )
        write_training_card(
            self,
            self.args.output_dir,
            data=", ".join([*(dataset or dataset_tags or []), *(dataset_args or [])]) or None,
            model_name=model_name,
            base_model=finetuned_from,
            language=language,
            license=license,
            tags=tags,
            datasets=dataset_tags,
            task=tasks or "fill-mask",
        )

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """Averaged weights, the same noise every time, and torch's generator as it was."""
        self._eval_step = 0
        averaged = nullcontext() if self.ema is None else self.ema.applied_to(self.model)
        with averaged, torch.random.fork_rng(devices=[]):  # a data loader's start would shift dropout in training
            yield

    def _record_loss(self, model: nn.Module):
        if hasattr(model.config, "training_loss"):
            model.config.training_loss = self.args.loss_type

    def _save_checkpoint(self, model: nn.Module, trial):
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        existed = folder.exists()
        try:
            # first: neither an interrupted save nor the rotation at its end may leave weights without their average
            if self.ema is not None:
                self.ema.save(folder, self.model, write=self.args.should_save)
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is each of them, by what writes
            if not existed and self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"The checkpoint of step {self.state.global_step} could not be written to {str(folder)!r}, earlier "
                f"ones are as they were: {type(error).__name__}: {error}"
            ) from error

    def _raise_not_finite(self, terms: DiffusionLossOutput, inputs: dict):
        """Name the step, the batch and its rows: `max_steps` of it would be lost otherwise."""
        rows = (~terms.loss.isfinite()).nonzero()[:, 0].tolist()
        first = inputs["input_ids"][rows[0] if rows else 0].tolist()[:16]
        raise ValueError(
            f"The loss must be finite, got {terms.loss.sum().item()} at step {self.state.global_step + 1}, batch "
            f"{self._micro_step} of {self.args.gradient_accumulation_steps} on process {self.args.process_index}, in "
            f"its rows {rows}; the first of them begins with the ids {first}."
        )

    def _load_best_model(self):
        super()._load_best_model()
        if self.ema is not None:
            self.ema.load(self.state.best_model_checkpoint, self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None):
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.ema is not None and checkpoint is not None:  # here the weights are sharded, where they are at all
            self.ema.load(checkpoint, self.model)

    def _loss_terms(
        self, model: nn.Module, inputs: dict, loss_type: str, generator: GlobalBatchNoise
    ) -> DiffusionLossOutput:
        attention_mask, loss_mask = inputs.get("attention_mask"), inputs.get("loss_mask")
        if "document_ids" in inputs:
            if attention_mask is not None:
                loss_mask = attention_mask.bool() if loss_mask is None else attention_mask.bool() & loss_mask
            attention_mask = document_attention_mask(inputs["document_ids"], attention_mask)
        return diffusion_loss_terms(
            model,
            inputs["input_ids"],
            loss_type,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
            time_sampling=self.args.time_sampling,
            time_eps=self.args.time_eps,
            mask_token_id=self.args.mask_token_id,
            generator=generator,
        )

    def _num_items(self, inputs: dict) -> torch.Tensor | int:
        """What `args.loss_reduction` divides by: the batch's maskable tokens or its sequences."""
        if self.args.loss_reduction == "sequence_sum":
            return len(inputs["input_ids"])
        return maskable_positions(inputs["input_ids"], inputs.get("attention_mask"), inputs.get("loss_mask")).sum()

    def _training_noise(self) -> GlobalBatchNoise:
        """Rows are numbered as in one process with the whole global batch: by accumulated batch, process, row."""
        if self._noise_step != self.state.global_step:
            self._noise_step, self._micro_step = self.state.global_step, 0
        rows, world = self._train_batch_size, self.args.world_size
        first_row = rows * (self._micro_step * world + self.args.process_index)
        self._micro_step += 1
        size = rows * world * self.args.gradient_accumulation_steps
        return GlobalBatchNoise((self.args.seed, self.state.global_step), first_row, size)


def last_complete_checkpoint(folder: str | Path) -> str:
    """The newest checkpoint in `folder` whose trainer state, which is written last, is whole."""
    found = {}
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            found[json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]] = path
        except (OSError, ValueError, TypeError, KeyError):  # an interrupted save
            continue
    if not found:
        raise ValueError(f"`resume_from_checkpoint` is True but {str(folder)!r} holds no complete checkpoint.")
    return str(found[max(found)])


def likelihood_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """NLL per token (nats), perplexity and bits per token from per-sequence sums and token counts."""
    tokens = int(prediction.label_ids.sum())
    nll = float(prediction.predictions.astype("float64").sum()) / max(tokens, 1)
    return {
        "loss": nll,  # the Trainer's own mean weighs batches, not tokens
        "nll_per_token": nll,
        "perplexity": perplexity(nll),
        "bits_per_token": nll / math.log(2),
        "num_tokens": tokens,
    }


def _reject_empty(name: str, dataset):
    """Raise a ValueError if a data set, or one of a dict of them, has a length of 0."""
    if isinstance(dataset, dict) and dataset:
        for key, one in dataset.items():
            _reject_empty(f"{name}[{key!r}]", one)
    elif dataset is not None and hasattr(dataset, "__len__") and len(dataset) == 0:
        raise ValueError(f"`{name}` must have at least one example, got an empty data set.")
