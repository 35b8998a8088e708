# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""What a user sees of a training run: the progress bar, tokens a second, samples, the curve."""

import time
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import ProgressCallback, TrainerCallback

from .checks_radd import is_int
from .generation_radd import diffusion_generate


class TokenRate(TrainerCallback):
    """Tokens a second over all processes since the last figure, by the wall clock: evaluation and saving count too."""

    def __init__(self):
        self._restart()

    def on_train_begin(self, args, state, control, **kwargs):
        self._restart()

    def count(self, input_ids: torch.LongTensor):
        """Add the tokens of a batch (B, L), padding included."""
        self._tokens += input_ids.numel()

    def take(self, accelerator) -> float:
        """The rate since the last call; every process must ask."""
        tokens = torch.tensor([self._tokens], device=accelerator.device)
        total = int(accelerator.gather(tokens).sum())
        rate = total / max(time.perf_counter() - self._start, 1e-9)
        self._restart()
        return rate

    def _restart(self):
        self._tokens, self._start = 0, time.perf_counter()


class DiffusionProgressCallback(ProgressCallback):
    """transformers' progress bar with NLL per token and tokens a second in it, and samples printed as text."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and logs is not None:
            if "nll_per_token" in logs and "tokens_per_second" in logs:
                self.training_bar.set_postfix_str(
                    f"NLL {logs['nll_per_token']:.3f} nats/token, {logs['tokens_per_second']:,.0f} tokens/s"
                )
            for name, value in logs.items():
                if isinstance(value, str):
                    self.training_bar.write(f"{name} at step {state.global_step}: {value}")
            logs = {name: value for name, value in logs.items() if not isinstance(value, str)}
        super().on_log(args, state, control, logs=logs, **kwargs)


class SampleCallback(TrainerCallback):
    """
    Every N steps, texts drawn by the sampler from the averaged weights (the raw ones where there is no average).

    They go through `trainer.log` as `sample_0`, `sample_1`, ...: to the progress bar, the log history and, as text, to
    TensorBoard. Each time the same seed is used, so the texts differ by the weights alone; torch's own generators are
    not touched. All processes draw the same, which a sharded model needs.

    Args:
        trainer (`RADDTrainer`): The trainer; its `processing_class` decodes.
        every (`int`): Steps from one to the next.
        prompt (`str`, *optional*): Text to continue; without one the samples are unconditional.
        num_samples (`int`, *optional*, defaults to 1): Texts each time.
        seed (`int`, *optional*, defaults to 0): Of the sampler.
        options: Of `diffusion_generate`, for example `max_length=128, num_steps=64`.

    Raises:
        ValueError: `every` or `num_samples` is not positive, or the trainer has no tokenizer.
    """

    def __init__(
        self, trainer, every: int, *, prompt: str | None = None, num_samples: int = 1, seed: int = 0, **options
    ):
        for name, value in (("every", every), ("num_samples", num_samples)):
            if not is_int(value) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
        if trainer.processing_class is None:
            raise ValueError("`trainer` must have a tokenizer as `processing_class`, got None.")
        self.trainer, self.every, self.prompt = trainer, every, prompt
        self.num_samples, self.seed, self.options = num_samples, seed, options

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            should_log = control.should_log  # `log` takes it for done
            self.trainer.log({f"sample_{i}": text for i, text in enumerate(self.draw())})
            control.should_log = should_log

    def draw(self) -> list[str]:
        """The texts of the weights as they are now."""
        trainer, tokenizer = self.trainer, self.trainer.processing_class
        model = trainer.accelerator.unwrap_model(trainer.model)
        canvas = {"batch_size": self.num_samples}
        if self.prompt is not None:
            ids = tokenizer([self.prompt], add_special_tokens=False, return_tensors="pt")["input_ids"]
            canvas = {"input_ids": ids.expand(self.num_samples, -1).to(trainer.args.device)}
        was_training = model.training
        with nullcontext() if trainer.ema is None else trainer.ema.applied_to(trainer.model):
            model.eval()
            try:
                texts = diffusion_generate(model, **canvas, seed=self.seed, **self.options)
            finally:
                model.train(was_training)
        return tokenizer.batch_decode(texts)


def plot_training_curve(log_history: list[dict], path: str | Path):
    """
    Draw NLL per token against steps, in training and evaluation, as a PNG.

    Args:
        log_history (`list[dict]`): `trainer.state.log_history`.
        path (`str` or `Path`): The file, written whole or not at all.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: Nothing was logged.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A training curve needs matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, label in (("nll_per_token", "training"), ("eval_nll_per_token", "evaluation (bound)")):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 50 else None, markersize=3, label=label)
    if not axes.lines:
        raise ValueError("`log_history` must have entries with `nll_per_token` or `eval_nll_per_token`, got none.")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("NLL, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    partial = Path(path).with_suffix(".partial")
    figure.savefig(partial, format="png", dpi=120)
    partial.replace(path)
