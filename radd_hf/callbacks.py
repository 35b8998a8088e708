# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""What runs beside training: the moving average of the weights, each process's own dropout, an orderly end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerCallback

from .token_draw_radd import mix_seed

EMA_FILE = "ema.safetensors"


class EMACallback(TrainerCallback):
    """
    After the n-th update: average <- d average + (1 - d) weights with d = min(decay, (1 + n) / (10 + n)).

    Each process averages what it holds of the weights: all of them, or its shards under FSDP2.

    Args:
        model (`nn.Module`): Its trainable parameters are averaged, in float32.
        decay (`float`): The largest d, in (0, 1).
        device (`torch.device` or `str`, *optional*): Where the average lives; defaults to the parameters' devices.
    """

    def __init__(self, model: nn.Module, decay: float, device: torch.device | str | None = None):
        self.decay, self.device = decay, device
        self.start(model)

    def start(self, model: nn.Module):
        """Forget the past: the average is that of the model's weights now."""
        self.num_updates = 0
        self.average = {name: self._own(_local(parameter)) for name, parameter in _trainable(model)}

    def on_train_begin(self, args, state, control, model: nn.Module | None = None, **kwargs):
        if state.global_step == 0:  # not resumed: train() was called again, or the model was made or sharded anew
            self.start(model)

    @torch.no_grad()
    def on_optimizer_step(self, args, state, control, model: nn.Module | None = None, optimizer=None, **kwargs):
        if getattr(optimizer, "step_was_skipped", False):  # float16: the gradients overflowed, no update was made
            return
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, parameter in _trainable(model):
            average, weight = self.average[name], _local(parameter)
            if self.device is None and average.device != weight.device:
                average = self.average[name] = average.to(weight.device)
            average.lerp_(weight.to(average.device, torch.float32), 1 - decay)

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """The averaged weights in `model` inside the block, its own afterwards."""
        own = {name: _local(parameter).clone() for name, parameter in _trainable(model)}
        _copy_into(model, self.average)
        try:
            yield
        finally:
            _copy_into(model, own)

    def save(self, folder: str | Path, model: nn.Module, write: bool = True):
        """
        Write the average and its number of updates to `folder`, whole or not at all.

        Where the model is sharded every process has to call it, and `write` chooses the one that writes.
        """
        tensors = {name: _whole(self.average[name], parameter) for name, parameter in _trainable(model)}
        if not write:
            return
        target = Path(folder) / EMA_FILE
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, partial, metadata={"num_updates": str(self.num_updates)})
        partial.replace(target)

    def load(self, folder: str | Path, model: nn.Module):
        """Read what `save` wrote; a ValueError if it is not the average of the parameters of `model`."""
        path = Path(folder) / EMA_FILE
        if not path.is_file():
            raise ValueError(f"`ema_decay` is set but the checkpoint has no {EMA_FILE}: {folder}.")
        parameters = dict(_trainable(model))
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(parameters):
                others = sorted(set(file.keys()) ^ set(parameters))
                raise ValueError(f"{path} averages other parameters than the model's: {others}.")
            self.average = {n: self._own(_part(file.get_tensor(n), p)) for n, p in parameters.items()}
            self.num_updates = int(file.metadata()["num_updates"])

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device or tensor.device, torch.float32, copy=True)


class DropoutSeedCallback(TrainerCallback):
    """Each process of several has dropout of its own: transformers seeds them all alike."""

    def on_train_begin(self, args, state, control, **kwargs):
        if args.world_size > 1:  # a resumed run then reads the state that its process has saved
            torch.manual_seed(mix_seed(args.seed, "dropout", args.process_index))


class StopOnSigtermCallback(TrainerCallback):
    """
    SIGTERM ends training after the step at hand, with a checkpoint; the process then exits with status 143.

    Args:
        trainer (`Trainer`): Its processes agree on the step.
    """

    def __init__(self, trainer):
        self.trainer, self.received, self.stopped = trainer, False, False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen inside the block (of the main thread) and exit at its end if training was stopped."""
        if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
            yield
            return
        self.received = self.stopped = False
        previous = signal.signal(signal.SIGTERM, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)
        if self.stopped:
            raise SystemExit(128 + signal.SIGTERM)

    def on_step_end(self, args, state, control, **kwargs):
        received = self.received
        if args.world_size > 1:  # one that saves alone would wait for the others forever
            received = bool(self.trainer.accelerator.gather(torch.tensor([received], device=args.device)).any())
        if received:
            self.stopped = control.should_save = control.should_training_stop = True

    def _receive(self, number: int, frame):
        self.received = True


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names, as they are without torch.compile, and parameters; a ValueError if they are flattened or elsewhere."""
    for module in model.modules():
        if hasattr(module, "reshard"):  # FSDP2: a forward pass without a backward one leaves the root whole
            module.reshard()
    for name, parameter in model.named_parameters():
        if "_fsdp_wrapped_module" in name or hasattr(parameter, "ds_tensor"):
            raise ValueError(
                "`ema_decay` must be 0 under FSDP version 1 and DeepSpeed ZeRO stage 3, whose parameters are "
                "flattened or partitioned; FSDP version 2 and ZeRO stages 1 and 2 keep an average."
            )
        if parameter.requires_grad:
            yield name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""), parameter


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """What this process holds of a parameter, as a view that can be written to."""
    return parameter.to_local().detach() if hasattr(parameter, "to_local") else parameter.detach()


def _part(whole: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """What this process holds of a tensor that is sharded as `parameter` is."""
    if not hasattr(parameter, "to_local"):
        return whole.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements).to_local()


def _whole(part: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The opposite of `_part`; every process has to call it."""
    if not hasattr(parameter, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    part = part.to(parameter.device)
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, **layout).full_tensor()


@torch.no_grad()
def _copy_into(model: nn.Module, values: dict[str, torch.Tensor]):
    for name, parameter in _trainable(model):
        _local(parameter).copy_(values[name])
