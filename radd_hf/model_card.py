# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The model card that a training run writes beside its weights: recipe, data, metrics."""

from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData

CARD_FILE = "README.md"
# A card that has lost this line was taken over by a person: it is not written again.
MARKER = "<!-- Written by RADDTrainer. Remove this line to keep your own edits. -->"

TEMPLATE = """---
{{ card_data }}
---

{{ marker }}

# {{ model_name }}

A masked diffusion language model of {{ "{:,}".format(parameters) }} parameters, \
{{ "fine-tuned from `" + base_model + "`" if base_model else "trained from scratch" }} with the `{{ loss_type }}` \
loss of RADD ([Ou et al., ICLR 2025](https://arxiv.org/abs/2406.03736)). It gives the distribution of the clean \
token at each masked position; time is not an input.

## Data

{{ data }}

## Recipe

| setting | value |
|---|---|
{%- for name, value in recipe %}
| {{ name }} | {{ value }} |
{%- endfor %}
{%- if command %}

```bash
{{ command }}
```
{%- endif %}

## Metrics
{% if metrics %}
The last evaluation of the run, at the step stated. The bound is an upper bound on the negative log-likelihood, \
estimated with {{ eval_num_samples }} draws of the `ao` loss a sequence, in nats.

| metric | value |
|---|---|
{%- for name, value in metrics %}
| {{ name }} | {{ value }} |
{%- endfor %}
{% else %}
No evaluation was logged.
{% endif %}
## Use

```python
import radd_hf
from transformers import AutoModelForMaskedLM, AutoTokenizer

model = AutoModelForMaskedLM.from_pretrained("{{ model_name }}")
tokenizer = AutoTokenizer.from_pretrained("{{ model_name }}")
tokenizer.batch_decode(radd_hf.diffusion_generate(model, batch_size=1, max_length={{ length }}, seed=0))
```

## Limits

No fact in a sample can be relied on without a check, and samples can repeat what is false or offensive in the data. \
Tokens revealed in the same pass are drawn independently, so few steps cost coherence.
"""


def training_card(
    trainer,
    *,
    data: str | None = None,
    command: str | None = None,
    model_name: str | None = None,
    base_model: str | None = None,
    language: str | None = None,
    license: str | None = None,
    tags: list[str] | None = None,
    datasets: list[str] | None = None,
    task: str = "fill-mask",
) -> ModelCard:
    """
    The card of a trainer's model as it is now.

    Args:
        trainer (`RADDTrainer`): Its arguments, state and last evaluation are what the card tells.
        data (`str`, *optional*): A sentence on the training data.
        command (`str`, *optional*): The command line that trained the model.
        model_name (`str`, *optional*): Defaults to the name of the output folder.
        base_model (`str`, *optional*): The model that was fine-tuned; defaults to where the model was loaded from.
        language, license (`str`, *optional*): For the metadata.
        tags (`list[str]`, *optional*): Added to the metadata's.
        datasets (`list[str]`, *optional*): Hub names of the training data, for the metadata.
        task (`str`, *optional*, defaults to `"fill-mask"`): The metadata's `pipeline_tag`.

    Returns:
        `huggingface_hub.ModelCard`; its metadata follow the Hub's model-index.
    """
    model, args = trainer.accelerator.unwrap_model(trainer.model), trainer.args
    model_name = model_name or Path(args.output_dir).name
    base_model = base_model or getattr(model.config, "_name_or_path", "") or None
    evaluations = [entry for entry in trainer.state.log_history if "eval_nll_per_token" in entry]
    metadata = ModelCardData(
        language=language,
        license=license,
        library_name="transformers",
        pipeline_tag=task,
        # a folder of this machine is no name on the Hub
        base_model=base_model if base_model and not Path(base_model).exists() else None,
        tags=["radd", "masked-diffusion", "discrete-diffusion", *(tags or [])],
        datasets=datasets,
        model_name=model_name,
        eval_results=_eval_results(evaluations[-1], task) if evaluations else None,
    )
    return ModelCard.from_template(
        metadata,
        template_str=TEMPLATE,
        marker=MARKER,
        model_name=model_name,
        base_model=Path(base_model).name if base_model and Path(base_model).exists() else base_model,
        parameters=model.num_parameters(),
        loss_type=args.loss_type,
        data=data or "Not stated.",
        recipe=recipe_rows(trainer),
        command=command,
        metrics=_metric_rows(evaluations[-1]) if evaluations else [],
        eval_num_samples=args.eval_num_samples,
        length=getattr(model.config, "max_position_embeddings", 128),
    )


def write_training_card(trainer, folder: str | Path, **details):
    """Write `training_card` as README.md, whole or not at all; a card that a person took over stays as it is."""
    path = Path(folder) / CARD_FILE
    if path.is_file() and MARKER not in path.read_text(encoding="utf-8"):
        return
    partial = path.with_suffix(".partial")
    partial.write_text(str(training_card(trainer, **details)), encoding="utf-8")
    partial.replace(path)


def recipe_rows(trainer) -> list[tuple[str, Any]]:
    """Names and values of what makes the run: enough to train the model again on the same data."""
    args, config = trainer.args, trainer.accelerator.unwrap_model(trainer.model).config
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    dropout = getattr(config, "hidden_dropout", None)
    warmup = f"{args.get_warmup_steps(trainer.state.max_steps)} steps"
    precision = "float16" if args.fp16 else "bfloat16" if args.bf16 else str(config.dtype).removeprefix("torch.")
    return [
        ("loss", f"`{args.loss_type}`, reduced by `{args.loss_reduction}`"),
        ("draws of time", f"{args.time_sampling}, t from {args.time_eps}"),
        ("steps", f"{trainer.state.global_step:,}"),
        ("sequences a step", batch),
        ("optimiser", f"{getattr(args.optim, 'value', args.optim)}, betas {args.adam_beta1} and {args.adam_beta2}"),
        ("epsilon of the optimiser", args.adam_epsilon),
        ("learning rate", args.learning_rate),
        ("schedule", f"{getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)} after {warmup} of warm-up"),
        ("weight decay", args.weight_decay),
        ("gradient clipping", f"norm {args.max_grad_norm}"),
        *([("dropout", dropout)] if dropout is not None else []),
        ("exponential moving average", args.ema_decay or "none"),
        ("precision", precision),
        ("seed", args.seed),
        ("versions", f"transformers {transformers.__version__}, torch {torch.__version__}"),
    ]


def _metric_rows(evaluation: dict) -> list[tuple[str, str]]:
    return [
        ("NLL bound per token", f"{evaluation['eval_nll_per_token']:.4f} nats"),
        ("perplexity (upper bound)", f"{evaluation['eval_perplexity']:.3f}"),
        ("bits per token", f"{evaluation['eval_bits_per_token']:.4f}"),
        ("tokens evaluated", f"{evaluation['eval_num_tokens']:,}"),
        ("at step", f"{evaluation['step']:,}"),
    ]


def _eval_results(evaluation: dict, task: str) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=task,
            dataset_type="held-out",
            dataset_name="held-out part of the training data's source",
            metric_type="perplexity",
            metric_name="Perplexity (upper bound)",
            metric_value=round(evaluation["eval_perplexity"], 4),
            verified=False,
        )
    ]
