# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""What a saved model holds, checked before a weight is read: whole files of plain names, and the config's shapes.

The header of a safetensors file gives every shape. It is compared with the config's network on the meta device, so a
config that asks for more than the file has is an error and never an allocation.
"""

import copy
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import PurePath

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
)

_HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
# With these the weights come from elsewhere, or under other names or in other shapes.
_OTHER_SOURCES = ("state_dict", "gguf_file", "key_mapping", "quantization_config", "distributed_checkpoint_dir")


def check_saved_weights(cls: type[PreTrainedModel], source: str | os.PathLike, options: Mapping):
    """
    Compare the headers of the weights files at `source` with the config, before `from_pretrained` allocates anything.

    Args:
        cls (`type`): The model's class.
        source (`str` or `os.PathLike`): Folder or Hub repository.
        options (`Mapping`): Keyword arguments of `from_pretrained`.

    Raises:
        ValueError: A damaged file, by name; or the missing and mis-shaped keys.
        OSError: A file that cannot be had.
    """
    if source is None or any(options.get(name) is not None for name in _OTHER_SOURCES):
        return
    hub = {name: options[name] for name in _HUB_OPTIONS if name in options}
    for name in (CONFIG_NAME, GENERATION_CONFIG_NAME):
        _check_json(cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub))
    config = options.get("config")
    if not isinstance(config, PreTrainedConfig):
        config = _read_config(cls, config or source, options)
    if getattr(config, "transformers_weights", None) is not None:
        raise ValueError(
            f"The config of {str(source)!r} must not name a weights file, got {config.transformers_weights!r}."
        )
    if getattr(config, "quantization_config", None) is not None:
        return
    shapes = {}
    for file in weights_files(source, options.get("variant"), hub):
        shapes |= read_header(file)
    if not shapes:
        return  # `from_pretrained` says what is absent
    if config.num_hidden_layers > len(shapes):  # no list of a billion missing keys
        raise ValueError(
            f"The checkpoint {str(source)!r} must hold the weights of {config.num_hidden_layers} blocks, as its "
            f"config says, got {len(shapes)} weights."
        )
    try:
        with torch.device("meta"):  # shapes only
            model = cls(copy.deepcopy(config))
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(
            f"The config of {str(source)!r} must have sizes that a tensor can have, got: {error}"
        ) from error
    missing, misshaped = [], []
    prefix = f"{cls.base_model_prefix}."
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for key, weight in model.state_dict().items():
        found = next((k for k in (key, prefix + key, key.removeprefix(prefix)) if k in shapes), None)
        if found is None and key not in tied:
            missing.append(key)
        elif found is not None and shapes[found] != tuple(weight.shape):
            misshaped.append((found, shapes[found], tuple(weight.shape)))
        shapes.pop(found, None)
    if missing or misshaped:
        raise misfit(cls, source, missing, misshaped, shapes)


def _read_config(cls: type[PreTrainedModel], source: str | os.PathLike, options: Mapping) -> PreTrainedConfig:
    """The config that `from_pretrained` will use; a malformed one is a ValueError."""
    try:
        return cls.config_class.from_pretrained(source, **{**options, "return_unused_kwargs": True})[0]
    except (ValueError, OSError):
        raise
    except Exception as error:  # whatever transformers stumbles over, which differs from version to version
        raise ValueError(f"The config of {str(source)!r} must be a model config, got {error!r}.") from error


def _check_json(file: str | None):
    """Raise a ValueError that names the file, if there is one, where it holds JSON other than an object."""
    if file is None:
        return
    try:
        with open(file, encoding="utf-8") as opened:
            kind = type(json.load(opened))
    except ValueError:
        return  # transformers says so
    except RecursionError as error:
        raise ValueError(f"{str(file)!r} must hold a JSON object, got: {error}.") from error
    if kind is not dict:
        raise ValueError(f"{str(file)!r} must hold a JSON object, got {kind.__name__}.")


def misfit(
    cls: type, source: str | os.PathLike, missing: Iterable[str], misshaped: Iterable[tuple], unexpected: Iterable[str]
) -> ValueError:
    """The error of weights that are not the config's: every key by name, mis-shaped ones as (key, found, own)."""
    shapes = [f"{key}: {tuple(found)} instead of {tuple(own)}" for key, found, own in misshaped]
    return ValueError(
        f"The checkpoint {source!r} does not fit {cls.__name__}; missing keys: {sorted(missing)}; mis-shaped keys: "
        f"{sorted(shapes)}; unexpected keys: {sorted(unexpected)}. Pass strict=False to load what fits."
    )


def weights_files(source: str | os.PathLike, variant: str | None, hub: Mapping) -> list[str]:
    """The safetensors files of `source`, one or those of its index; their names must be plain."""
    names = [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME]
    if variant is not None:  # model.fp16.safetensors, model.safetensors.index.fp16.json
        names = [f"{name.rpartition('.')[0]}.{variant}.{name.rpartition('.')[2]}" for name in names]
    one = cached_file(source, names[0], _raise_exceptions_for_missing_entries=False, **hub)
    if one is not None:
        return [one]
    index = cached_file(source, names[1], _raise_exceptions_for_missing_entries=False, **hub)
    if index is None:
        return []
    try:
        with open(index, encoding="utf-8") as file:
            content = json.load(file)
        parts = sorted(set(content["weight_map"].values()))
        if not all(isinstance(part, str) for part in parts) or not isinstance(content["metadata"], dict):
            raise TypeError("names that are no strings, or `metadata` that is no object")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{str(index)!r} must hold `metadata` and, in `weight_map`, a file name for each key, got: {error!r}"
        ) from error
    outside = [
        part for part in parts if PurePath(part).name != part or "\\" in part or not part.endswith(".safetensors")
    ]
    if outside:
        raise ValueError(f"{str(index)!r} must name safetensors files beside it, got {outside}.")
    return [cached_file(source, part, **hub) for part in parts]


def read_header(file: str | os.PathLike) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a safetensors file, whose length must be what its header says."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}
    except SafetensorError as error:
        raise damaged(file, error) from error


def damaged(file: str | os.PathLike, error: Exception) -> ValueError:
    """The error of a weights file that cannot be read."""
    return ValueError(f"The weights of {str(file)!r} must be whole safetensors files, got: {error}.")
