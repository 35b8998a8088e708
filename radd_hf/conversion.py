# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of the original RADD code base as folders for from_pretrained.

    python -m radd_hf.conversion SOURCE OUT_DIR

The network is the same function: weights are renamed, and the fused attention projection is split into three.
"""

import argparse
import json
import os
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open

from .attention_radd import RADDRotaryEmbedding
from .configuration_radd import RADDConfig
from .modeling_radd import RADDForMaskedDiffusion

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"

# Names of the original's config.json, and ours.
NOISE_NAMES = {"loglinear": "log_linear", "geometric": "geometric"}
LOSS_NAMES = {"t_DSE": "dse", "DSE": "dse", "t_DCE": "t_dce", "lambda_DCE": "lambda_dce", "k_DCE": "ao"}
LOG_LINEAR_EPS = 1e-3  # a constant of the original's log-linear noise, not written in its config

# Original key -> our keys. Several: equal parts of the original along its first dimension, in this order.
_TRUNK_KEYS = {
    "vocab_embed.embedding": ("model.embed_tokens.weight",),
    "output_layer.norm_final.weight": ("model.norm.weight",),
    "output_layer.norm_final.bias": ("model.norm.bias",),
    "output_layer.linear.weight": ("lm_head.weight",),
    "output_layer.linear.bias": ("lm_head.bias",),
}
_BLOCK_KEYS = {
    "norm1.weight": ("attn_norm.weight",),
    "norm1.bias": ("attn_norm.bias",),
    "attn_qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attn_out.weight": ("self_attn.o_proj.weight",),
    "norm2.weight": ("mlp_norm.weight",),
    "norm2.bias": ("mlp_norm.bias",),
    "mlp.0.weight": ("mlp.up_proj.weight",),
    "mlp.0.bias": ("mlp.up_proj.bias",),
    "mlp.2.weight": ("mlp.down_proj.weight",),
    "mlp.2.bias": ("mlp.down_proj.bias",),
}
# A buffer of the original, which follows from the config: compared, then dropped.
_ROTARY_KEY = "rotary_emb.inv_freq"


def key_map(num_layers: int) -> dict[str, tuple[str, ...]]:
    """Each weight of the original by name, and the weights of ours that it holds, stacked along dimension 0."""
    names = dict(_TRUNK_KEYS)
    for i in range(num_layers):
        for old, new in _BLOCK_KEYS.items():
            names[f"blocks.{i}.{old}"] = tuple(f"model.layers.{i}.{part}" for part in new)
    return names


def convert_config(original: Mapping) -> RADDConfig:
    """
    The original's config.json as a RADDConfig.

    Args:
        original (`Mapping`): `tokens` (clean tokens; the mask token's id is that number), `model`, `noise` and
            `training`. A config without `training.loss_type` gives `training_loss=None`.

    Raises:
        ValueError: A field that is absent, of the wrong kind, or a noise or loss that the original does not have.
    """
    tokens = _number(original, "tokens", whole=True)
    noise = _name(_get(original, "noise.type"), "noise.type", NOISE_NAMES)
    noise_fields = {"noise_eps": LOG_LINEAR_EPS}
    if noise == "geometric":
        noise_fields = {f"noise_{name}": _number(original, f"noise.{name}") for name in ("sigma_min", "sigma_max")}
    training = original.get("training")
    loss = training.get("loss_type") if isinstance(training, Mapping) else None
    return RADDConfig(
        vocab_size=tokens + 1,
        mask_token_id=tokens,
        hidden_size=_number(original, "model.hidden_size", whole=True),
        num_hidden_layers=_number(original, "model.n_blocks", whole=True),
        num_attention_heads=_number(original, "model.n_heads", whole=True),
        max_position_embeddings=_number(original, "model.length", whole=True),
        hidden_dropout=_number(original, "model.dropout"),
        noise_schedule=noise,
        training_loss=None if loss is None else _name(loss, "training.loss_type", LOSS_NAMES),
        **noise_fields,
    )


def convert_weights(
    original: Mapping[str, torch.Tensor], names: Mapping[str, tuple[str, ...]]
) -> dict[str, torch.Tensor]:
    """Weights under our names, in the original's dtype; `names` as from `key_map`."""
    weights = {}
    for old, new in names.items():
        weights.update(zip(new, original[old].chunk(len(new)), strict=True))
    return weights


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


def convert_original_checkpoint(source: str | os.PathLike, out_dir: str | os.PathLike) -> Path:
    """
    Convert a checkpoint in the original code base's Hub format. All or nothing: `out_dir` appears when it is complete.

    Args:
        source (`str` or `os.PathLike`): Folder with config.json and model.safetensors, or, where no such folder
            exists, a Hub repository such as "JingyangOu/radd-lambda-dce".
        out_dir (`str` or `os.PathLike`): New or empty folder: weights in the original's dtype, config.json with the
            noise schedule and the training loss, generation_config.json and the code files.

    Returns:
        `Path`: `out_dir`, for `RADDForMaskedDiffusion.from_pretrained`.

    Raises:
        ValueError: `source` is neither folder nor repository, or does not hold exactly the weights that its config
            describes (every missing, unexpected and mis-shaped key is listed), or `out_dir` is in use.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"`source` must be a path or a Hub repository, got {source!r}.")
    if not isinstance(out_dir, (str, os.PathLike)):
        raise ValueError(f"`out_dir` must be a path, got {out_dir!r}.")
    out_dir = Path(out_dir).resolve()  # a link to an empty folder is filled, not replaced
    if any(parent.exists() and not parent.is_dir() for parent in out_dir.parents):
        raise ValueError(f"`out_dir` must be a new or an empty folder, got {str(out_dir)!r}, which is below a file.")
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise ValueError(f"`out_dir` must be a new or an empty folder, got {str(out_dir)!r}, which is not.")
    folder = _find_source(source)
    config = convert_config(_read_config(folder / CONFIG_FILE))
    with torch.device("meta"):  # shapes only: no memory, no random numbers
        model = RADDForMaskedDiffusion(config)
    names = key_map(config.num_hidden_layers)
    original = _read_weights(folder / WEIGHTS_FILE, names, config, model.state_dict())
    model.load_state_dict(convert_weights(original, names), assign=True)
    _write(model, out_dir)
    return out_dir


def _find_source(source: str | os.PathLike) -> Path:
    """The local folder of `source`, downloaded if it is a Hub repository's name."""
    folder = Path(source)
    if not folder.is_dir():
        expected = f"`source` must be a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a Hub repository"
        if folder.exists() or not isinstance(source, str):
            raise ValueError(f"{expected}, got {str(source)!r}, which is no folder.")
        try:
            folder = Path(huggingface_hub.snapshot_download(source, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
        except (OSError, ValueError) as error:  # what the Hub client raises for bad names, absent ones, no network
            raise ValueError(
                f"{expected}, got {source!r}: no such folder here, and the Hub says: {type(error).__name__}: {error}"
            ) from error
    absent = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"`source` must hold {CONFIG_FILE} and {WEIGHTS_FILE}, got {str(source)!r} without {absent}.")
    return folder


def _read_config(path: Path) -> Mapping:
    try:
        original = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`source` must hold valid JSON in {CONFIG_FILE}, got {str(path)!r}: {error}") from error
    if not isinstance(original, Mapping):
        raise ValueError(f"`source` must hold a JSON object in {CONFIG_FILE}, got {type(original).__name__}.")
    return original


def _read_weights(
    path: Path, names: Mapping[str, tuple[str, ...]], config: RADDConfig, own: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The original's weights by its names; the header is checked against our shapes `own` before anything is read."""
    expected = {}
    for old, new in names.items():
        rows, *rest = own[new[0]].shape
        expected[old] = (len(new) * rows, *rest)
    rotary = RADDRotaryEmbedding.compute_default_rope_parameters(config)[0]
    try:
        with safe_open(path, framework="pt") as file:
            found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
            if _ROTARY_KEY in found:
                expected[_ROTARY_KEY] = tuple(rotary.shape)
            problems = key_problems(found, expected)
            original = {} if problems else {key: file.get_tensor(key) for key in expected}
    except SafetensorError as error:
        raise ValueError(f"`source` must hold a whole {WEIGHTS_FILE}, got {str(path)!r}: {error}") from error
    if not problems:
        problems = _value_problems(original, rotary)
    if problems:
        listed = "; ".join(f"{kind}: {keys}" for kind, keys in problems.items())
        raise ValueError(
            f"`source` must hold exactly the weights its {CONFIG_FILE} describes, got {str(path)!r} with {listed}."
        )
    return original


def _value_problems(original: Mapping[str, torch.Tensor], rotary: torch.Tensor) -> dict[str, list[str]]:
    """Weights of the right shape that cannot be used: whole numbers, or rotary frequencies other than ours."""
    problems = {}
    whole = [f"{key}: {weight.dtype}" for key, weight in original.items() if not weight.is_floating_point()]
    if whole:
        problems["keys that are not floating-point"] = sorted(whole)
    found = original.get(_ROTARY_KEY)
    if found is not None and not torch.allclose(found.float(), rotary, rtol=1e-5, atol=0.0):
        problems["rotary frequencies"] = [f"{_ROTARY_KEY}: {found.tolist()} instead of {rotary.tolist()}"]
    return problems


def _write(model: RADDForMaskedDiffusion, out_dir: Path):
    """Save beside `out_dir`, then rename: whatever fails, nothing half-written stays."""
    partial = out_dir.with_name(f".{out_dir.name}.{uuid.uuid4().hex}")
    try:
        model.save_pretrained(partial)
        os.replace(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _get(original: Mapping, path: str) -> object:
    value = original
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"`source` must have `{path}` in its {CONFIG_FILE}, got {json.dumps(original)}.")
        value = value[name]
    return value


def _number(original: Mapping, path: str, whole: bool = False) -> int | float:
    value = _get(original, path)
    if isinstance(value, bool) or not isinstance(value, int if whole else Real) or (whole and value < 1):
        kind = "a positive integer" if whole else "a number"
        raise ValueError(f"`{path}` in `source`'s {CONFIG_FILE} must be {kind}, got {value!r}.")
    return value


def _name(value: object, path: str, names: Mapping[str, str]) -> str:
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"`{path}` in `source`'s {CONFIG_FILE} must be one of {list(names)}, got {value!r}.")
    return names[value]


def main(arguments: Sequence[str] | None = None):
    """The command line: writes the converted folder's path to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m radd_hf.conversion", description="Convert an original RADD checkpoint for from_pretrained."
    )
    parser.add_argument("source", help=f"folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a Hub repository")
    parser.add_argument("out_dir", help="new or empty folder")
    options = parser.parse_args(arguments)
    try:
        out_dir = convert_original_checkpoint(options.source, options.out_dir)
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    sys.stdout.write(f"{out_dir}\n")


if __name__ == "__main__":
    main()

__all__ = ["convert_config", "convert_original_checkpoint", "convert_weights", "key_map", "key_problems", "main"]
