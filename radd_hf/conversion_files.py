# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints as the public code bases write them: what is found, named and checked before a number is read.

Two layouts: the Hub's (config.json beside model.safetensors or pytorch_model.bin) and a training run's folder
(.hydra/config.yaml and checkpoints-meta/checkpoint.pth). Pickles are read with `weights_only=True`: data, never code.
"""

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import huggingface_hub
import torch
import yaml
from safetensors import SafetensorError, safe_open

CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = "config.json", "model.safetensors", "pytorch_model.bin"
RUN_CONFIG, RUN_CHECKPOINT = ".hydra/config.yaml", "checkpoints-meta/checkpoint.pth"
MAX_CONFIG_BYTES = 2**20  # the originals' have one or two thousand

# What wrappers put before a key: DistributedDataParallel, torch.compile, a parent module, MDLM's Hub class.
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ROTARY_KEY = "rotary_emb.inv_freq"  # a buffer of the originals, which follows from the config


class Fields:
    """
    A config of the originals, read field by field with errors that name the field, the file and what was found.

    Args:
        values (`Mapping`): The parsed file.
        file (`str`, *optional*): Its name, for the messages.
    """

    def __init__(self, values: "Mapping | Fields", file: str = CONFIG_FILE):
        self.values, self.file = (values.values, values.file) if isinstance(values, Fields) else (values, file)

    def has(self, path: str) -> bool:
        """Whether the dotted `path` leads to a value."""
        value = self.values
        for name in path.split("."):
            if not isinstance(value, Mapping) or name not in value:
                return False
            value = value[name]
        return True

    def get(self, path: str) -> object:
        """The value at the dotted `path`."""
        if not self.has(path):
            raise ValueError(f"`source` must have `{path}` in its {self.file}, got {_shown(self.values)}.")
        value = self.values
        for name in path.split("."):
            value = value[name]
        return value

    def number(self, path: str, whole: bool = False) -> int | float:
        """A number, or with `whole` a positive integer."""
        value = self.get(path)
        if isinstance(value, bool) or not isinstance(value, int if whole else Real) or (whole and value < 1):
            kind = "a positive integer" if whole else "a number"
            raise ValueError(f"`{path}` in `source`'s {self.file} must be {kind}, got {value!r}.")
        return value

    def flag(self, path: str) -> bool:
        """True or False."""
        value = self.get(path)
        if not isinstance(value, bool):
            raise ValueError(f"`{path}` in `source`'s {self.file} must be true or false, got {value!r}.")
        return value

    def choice(self, path: str, names: Mapping[str, str]) -> str:
        """Our name for the value, which must be one of the keys of `names`."""
        value = self.get(path)
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"`{path}` in `source`'s {self.file} must be one of {list(names)}, got {value!r}.")
        return names[value]


@dataclass
class OriginalCheckpoint:
    """
    A checkpoint whose header has been read, and no weight yet.

    Attributes:
        path (`Path`): The weights file.
        config (`Fields`): The config.
        shapes (`dict`): Shape of each weight, by its name without the wrappers' prefixes.
        read (`Callable`): Reads the weights, by the same names.
        from_ema (`bool`): Whether they are the exponential average that a training run kept.
    """

    path: Path
    config: Fields
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[], dict[str, torch.Tensor]]
    from_ema: bool = False


def key_problems(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """How weights of the shapes `found` differ from those of the shapes `expected`, by kind; empty if they do not."""
    shapes = [
        f"{key}: {tuple(found[key])} instead of {tuple(expected[key])}"
        for key in sorted(expected.keys() & found.keys())
        if tuple(found[key]) != tuple(expected[key])
    ]
    problems = {
        "missing keys": sorted(expected.keys() - found.keys()),
        "mis-shaped keys": shapes,
        "unexpected keys": sorted(found.keys() - expected.keys()),
    }
    return {kind: keys for kind, keys in problems.items() if keys}


def value_problems(weights: Mapping[str, torch.Tensor], rotary: torch.Tensor) -> dict[str, list[str]]:
    """Weights of the right shape that cannot be used: no numbers, no plain floats, or other rotary frequencies."""
    whole = [f"{key}: {w.dtype}" for key, w in weights.items() if not w.is_floating_point()]
    narrow = [f"{key}: {w.dtype}" for key, w in weights.items() if w.is_floating_point() and w.dtype not in DTYPES]
    problems = {"keys that are not floating-point": sorted(whole), "keys of fewer than 16 bits": sorted(narrow)}
    if not whole and not narrow:
        problems["keys with NaN or infinity"] = sorted(k for k, w in weights.items() if not bool(w.isfinite().all()))
        found = weights.get(ROTARY_KEY)
        if found is not None and not torch.allclose(found.float(), rotary, rtol=1e-5, atol=0.0):
            problems["rotary frequencies"] = [f"{ROTARY_KEY}: {found.tolist()} instead of {rotary.tolist()}"]
    return {kind: keys for kind, keys in problems.items() if keys}


def open_checkpoint(source: str | os.PathLike, ema: bool = True) -> OriginalCheckpoint:
    """
    The config and the header of a checkpoint in either layout.

    Args:
        source (`str` or `os.PathLike`): A folder, or, where no such folder exists, a Hub repository.
        ema (`bool`, *optional*, defaults to `True`): From a training run, the averaged weights instead of the raw
            ones. The Hub layout has one set.

    Raises:
        ValueError: Neither folder nor repository, a file is absent, damaged or holds anything but tensors.
    """
    folder = Path(source)
    if (folder / RUN_CHECKPOINT).is_file() and (folder / RUN_CONFIG).is_file():
        config = Fields(_read_config(folder / RUN_CONFIG), RUN_CONFIG)
        return _open_run(folder / RUN_CHECKPOINT, config, ema)
    folder, weights_file = _find_hub_layout(source)
    config = Fields(_read_config(folder / CONFIG_FILE))
    path = folder / weights_file
    if weights_file == PICKLE_FILE:
        return _from_state_dict(path, config, _read_pickle(path))
    names, shapes = {}, {}
    try:
        with safe_open(path, framework="pt") as file:
            names = bare_names(file.keys(), path)
            shapes = {bare: tuple(file.get_slice(key).get_shape()) for bare, key in names.items()}
    except SafetensorError as error:
        raise _damaged(path, error) from error

    def read() -> dict[str, torch.Tensor]:
        try:
            with safe_open(path, framework="pt") as file:
                return {bare: file.get_tensor(key) for bare, key in names.items()}
        except SafetensorError as error:
            raise _damaged(path, error) from error

    return OriginalCheckpoint(path, config, shapes, read)


def bare_names(keys: Sequence[str], path: Path) -> dict[str, str]:
    """Each key without the prefixes of wrappers, and the key itself; two keys of one name are refused."""
    names: dict[str, str] = {}
    for key in keys:
        bare = key
        while prefix := next((p for p in PREFIXES if bare.startswith(p)), None):
            bare = bare.removeprefix(prefix)
        if bare in names:
            raise ValueError(f"`source` must hold each weight once, got {names[bare]!r} and {key!r} in {str(path)!r}.")
        names[bare] = key
    return names


def _open_run(path: Path, config: Fields, ema: bool) -> OriginalCheckpoint:
    """A training run: `model`, the raw weights, and `ema`, their average as a list in the order of the parameters."""
    state = _read_pickle(path)
    if not isinstance(state.get("model"), Mapping):
        raise ValueError(f"`source` must hold the raw weights as `model` in {str(path)!r}, got {_shown(state)}.")
    raw = _from_state_dict(path, config, state["model"])
    if not ema:
        return raw
    average = state.get("ema")
    shadow = average.get("shadow_params") if isinstance(average, Mapping) else None
    if not isinstance(shadow, (list, tuple)):
        raise ValueError(
            f"`source` must hold averaged weights as `ema.shadow_params` in {str(path)!r}, got none; ask for the raw "
            "ones with ema=False (--raw)."
        )
    names = [name for name in raw.shapes if name != ROTARY_KEY]  # the average is of parameters, not of buffers
    if len(shadow) != len(names):
        raise ValueError(
            f"`source` must hold one averaged weight for each of its {len(names)} parameters in {str(path)!r}, got "
            f"{len(shadow)}."
        )
    averaged = _from_state_dict(path, config, dict(zip(names, shadow, strict=True)))
    averaged.from_ema = True
    return averaged


def _from_state_dict(path: Path, config: Fields, state: Mapping) -> OriginalCheckpoint:
    for key, value in state.items():
        if not isinstance(key, str) or not torch.is_tensor(value) or value.layout != torch.strided:
            raise ValueError(
                f"`source` must hold named tensors in {str(path)!r}, got {key!r}: {type(value).__name__}."
            )
        present = 0 if value.is_meta else value.untyped_storage().nbytes()
        if value.numel() * value.element_size() > present:  # an expanded tensor is small here and huge once copied
            raise ValueError(f"`source` must hold whole tensors in {str(path)!r}, got {key!r} without its numbers.")
    weights = {bare: state[key].detach() for bare, key in bare_names(list(state), path).items()}
    return OriginalCheckpoint(path, config, {k: tuple(w.shape) for k, w in weights.items()}, lambda: weights)


def _read_pickle(path: Path) -> Mapping:
    """What torch.save wrote, memory-mapped: nothing is executed, and nothing allocated that the file does not hold."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("its records are compressed")
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # torch.load raises errors of a dozen types on a damaged file
        reason = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, pickle.UnpicklingError):
            reason = f"it holds more than tensors, and no code of a checkpoint is run: {first_line(error)}"
        raise ValueError(
            f"`source` must hold a whole {path.name} as torch.save writes it, got {str(path)!r}: {reason}"
        ) from error
    if not isinstance(state, Mapping):
        raise ValueError(f"`source` must hold a dict in {str(path)!r}, got {type(state).__name__}.")
    return state


def _find_hub_layout(source: str | os.PathLike) -> tuple[Path, str]:
    """The local folder of `source`, downloaded if it is a Hub repository's name, and the name of its weights file."""
    folder = Path(source)
    if not folder.is_dir():
        expected = f"`source` must be a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a Hub repository"
        if folder.exists() or not isinstance(source, str):
            raise ValueError(f"{expected}, got {str(source)!r}, which is no folder.")
        try:
            folder = Path(huggingface_hub.snapshot_download(source, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
            if not (folder / WEIGHTS_FILE).is_file():
                folder = Path(huggingface_hub.snapshot_download(source, allow_patterns=[CONFIG_FILE, PICKLE_FILE]))
        except (OSError, ValueError) as error:  # what the Hub client raises for bad names, absent ones, no network
            raise ValueError(
                f"{expected}, got {source!r}: no such folder here, and the Hub says: {type(error).__name__}: {error}"
            ) from error
    pickled = (folder / PICKLE_FILE).is_file() and not (folder / WEIGHTS_FILE).is_file()
    weights_file = PICKLE_FILE if pickled else WEIGHTS_FILE
    absent = [name for name in (CONFIG_FILE, weights_file) if not (folder / name).is_file()]
    if absent:
        raise ValueError(
            f"`source` must hold {CONFIG_FILE} and {WEIGHTS_FILE}, got {str(source)!r} without {absent}; "
            f"{PICKLE_FILE}, or a training run's {RUN_CONFIG} and {RUN_CHECKPOINT}, would do as well."
        )
    return folder, weights_file


class _PlainLoader(yaml.SafeLoader):
    """YAML without references: some lines of them can stand for a structure too large for any memory."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("references (*name) are not read")
        return super().compose_node(parent, index)


def _read_config(path: Path) -> Mapping:
    kind = "JSON" if path.suffix == ".json" else "YAML"
    name = CONFIG_FILE if kind == "JSON" else RUN_CONFIG
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"more than {MAX_CONFIG_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        original = json.loads(text) if kind == "JSON" else yaml.load(text, Loader=_PlainLoader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(
            f"`source` must hold valid {kind} in {name}, got {str(path)!r}: {first_line(error)}"
        ) from error
    if not isinstance(original, Mapping):
        raise ValueError(f"`source` must hold a {kind} object in {name}, got {type(original).__name__}.")
    return original


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"`source` must hold a whole {WEIGHTS_FILE}, got {str(path)!r}: {first_line(error)}")


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _shown(values: Mapping) -> str:
    """A mapping on one line of bounded length."""
    try:
        text = json.dumps(values, default=lambda value: type(value).__name__, skipkeys=True)
    except (ValueError, RecursionError):
        text = type(values).__name__
    return text if len(text) <= 2000 else f"{text[:2000]}..."
