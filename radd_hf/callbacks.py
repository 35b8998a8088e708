# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The exponential moving average of the weights, kept beside them while training."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback

EMA_FILE = "ema.safetensors"


class EMACallback(TrainerCallback):
    """
    After the n-th update: average <- d average + (1 - d) weights with d = min(decay, (1 + n) / (10 + n)).

    Args:
        model (`nn.Module`): Its trainable parameters are averaged, in float32 on their own devices.
        decay (`float`): The largest d, in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.start(model)

    def start(self, model: nn.Module):
        """Forget the past: the average is that of the model's weights now."""
        self.num_updates = 0
        self.average = {n: p.detach().float().clone() for n, p in model.named_parameters() if p.requires_grad}

    def on_train_begin(self, args, state, control, model: nn.Module | None = None, **kwargs):
        if state.global_step == 0:  # not resumed: train() was called again, or the model was made anew
            self.start(model)

    def on_optimizer_step(self, args, state, control, model: nn.Module | None = None, **kwargs):
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in self.average:
                    average = self.average[name] = self.average[name].to(parameter.device)
                    average.lerp_(parameter.float(), 1 - decay)

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """The averaged weights in `model` inside the block, its own afterwards."""
        own = {}
        for name, parameter in model.named_parameters():
            if name in self.average:
                own[name] = parameter.data
                parameter.data = self.average[name].to(parameter.device, parameter.dtype)
        try:
            yield
        finally:
            for name, parameter in model.named_parameters():
                if name in own:
                    parameter.data = own[name]

    def save(self, folder: str | Path):
        """Write the average and its number of updates to `folder`, whole or not at all."""
        target = Path(folder) / EMA_FILE
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.average.items()}
        save_file(tensors, partial, metadata={"num_updates": str(self.num_updates)})
        partial.replace(target)

    def load(self, folder: str | Path):
        """Read what `save` wrote; a ValueError if it is not the average of these parameters."""
        path = Path(folder) / EMA_FILE
        if not path.is_file():
            raise ValueError(f"`ema_decay` is set but the checkpoint has no {EMA_FILE}: {folder}.")
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(self.average):
                others = sorted(set(file.keys()) ^ set(self.average))
                raise ValueError(f"{path} averages other parameters than the model's: {others}.")
            for name, tensor in self.average.items():
                self.average[name] = file.get_tensor(name).to(tensor.device)
            self.num_updates = int(file.metadata()["num_updates"])
