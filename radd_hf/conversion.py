# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of the public code bases (RADD, MDLM, SEDD) as folders for from_pretrained, and RADD's way back.

    python -m radd_hf.conversion SOURCE OUT_DIR [--push REPO]

The network is the same function: see conversion_original.py,
conversion_mdlm.py and conversion_sedd.py.
"""

import argparse
import copy
import json
import os
import shutil
import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import huggingface_hub
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import conversion_mdlm, conversion_original, conversion_sedd
from .attention_radd import RADDRotaryEmbedding
from .conversion_card import conversion_card
from .conversion_files import (
    CONFIG_FILE,
    ROTARY_KEY,
    WEIGHTS_FILE,
    OriginalCheckpoint,
    first_line,
    key_problems,
    open_checkpoint,
    value_problems,
)
from .conversion_original import convert_config, convert_weights, key_map, original_config, original_weights
from .modeling_radd import RADDForMaskedDiffusion
from .tokenization import GPT2, GPT2_TOKENS, add_mask_token, load_tokenizer


def convert_original_checkpoint(
    source: str | os.PathLike,
    out_dir: str | os.PathLike,
    *,
    ema: bool = True,
    tokenizer: PreTrainedTokenizerBase | str | os.PathLike | None = None,
    model_name: str | None = None,
) -> Path:
    """
    Convert a checkpoint of a public code base. All or nothing: `out_dir` appears when it is complete.

    Args:
        source (`str` or `os.PathLike`): Folder in the Hub's layout (config.json, and model.safetensors or
            pytorch_model.bin) or of a training run (.hydra/config.yaml, checkpoints-meta/checkpoint.pth); or, where no
            such folder exists, a Hub repository such as "JingyangOu/radd-lambda-dce" or "kuleshov-group/mdlm-owt".
        out_dir (`str` or `os.PathLike`): New or empty folder: weights in the original's dtype, config.json with the
            noise schedule and the training loss, generation_config.json, the code files, README.md and, where one can
            be had, the tokenizer with its mask token.
        ema (`bool`, *optional*, defaults to `True`): From a training run, take the averaged weights; `False`: the raw.
        tokenizer (`PreTrainedTokenizerBase`, `str` or `os.PathLike`, *optional*): The original's tokenizer, or where
            it is; a mask token is added to it if it has none. By default a model of GPT-2's vocabulary gets GPT-2's,
            from the Hub or its cache, with a warning where it cannot be had; another model gets none.
        model_name (`str`, *optional*): Name on the card, such as the Hub repository to be; defaults to the source's.

    Returns:
        `Path`: `out_dir`, for `from_pretrained`.

    Raises:
        ValueError: `source` is neither folder nor repository, or does not hold exactly the weights that its config
            describes (every missing, unexpected and mis-shaped key is listed, and every one with NaN), or cannot be
            expressed as a RADD network, `tokenizer` does not fit it, or `out_dir` is in use.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"`source` must be a path or a Hub repository, got {source!r}.")
    out_dir = _new_folder(out_dir)
    checkpoint = open_checkpoint(source, ema)
    model = _build(checkpoint)
    tokenizer = _tokenizer_for(model.config, tokenizer)
    shown = Path(source).resolve().name if Path(source).is_dir() else str(source)  # no path of this machine
    card = conversion_card(
        model,
        name=shown.rpartition("/")[2] if model_name is None else model_name,
        source=shown,
        family=_family(checkpoint).NAME,
        from_ema=checkpoint.from_ema,
        has_tokenizer=tokenizer is not None,
    )

    def save(folder: Path):
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        card.save(folder / "README.md")

    _write(out_dir, save)
    return out_dir


def load_original_checkpoint(source: str | os.PathLike, *, ema: bool = True) -> PreTrainedModel:
    """The model of `convert_original_checkpoint`, in memory and in evaluation mode."""
    return _build(open_checkpoint(source, ema)).eval()


def _build(checkpoint: OriginalCheckpoint) -> PreTrainedModel:
    family = _family(checkpoint)
    config = family.convert_config(checkpoint.config)
    original = _checked_weights(checkpoint, family, config)
    with torch.device("meta"):  # shapes only: no memory, no random numbers
        model = family.MODEL(config)
    model.load_state_dict(family.converted(config, original), assign=True)
    model.model.rotary_emb = RADDRotaryEmbedding(config)  # its buffers are not in a state dict
    return model


def _tokenizer_for(
    config, tokenizer: PreTrainedTokenizerBase | str | os.PathLike | None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer with its mask token, checked to be the config's; `None` where none can be had."""
    if tokenizer is None:
        if config.vocab_size != GPT2_TOKENS + 1:
            return None
        try:
            tokenizer = load_tokenizer(GPT2)
        except (OSError, ValueError) as error:
            warnings.warn(f"No tokenizer is written: {GPT2} cannot be had ({first_line(error)}).", stacklevel=3)
            return None
    elif not isinstance(tokenizer, PreTrainedTokenizerBase):
        try:
            tokenizer = load_tokenizer(tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`tokenizer` must be one, or its folder or Hub name, got {str(tokenizer)!r}: {first_line(error)}"
            ) from error
    return add_mask_token(copy.deepcopy(tokenizer), config=config)


def export_original_checkpoint(model: RADDForMaskedDiffusion | str | os.PathLike, out_dir: str | os.PathLike) -> Path:
    """
    The way back: a RADD model in the original's Hub layout, config.json and model.safetensors.

    Args:
        model (`RADDForMaskedDiffusion`, `str` or `os.PathLike`): The model, or where `from_pretrained` finds it.
        out_dir (`str` or `os.PathLike`): New or empty folder.

    Raises:
        ValueError: The original code cannot express the config, or `out_dir` is in use.
    """
    out_dir = _new_folder(out_dir)
    if not isinstance(model, RADDForMaskedDiffusion):
        model = RADDForMaskedDiffusion.from_pretrained(model)
    config = original_config(model.config)
    weights = original_weights(model.state_dict(), key_map(model.config.num_hidden_layers), model.config)

    def save(folder: Path):
        folder.mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({key: weight.contiguous() for key, weight in weights.items()}, folder / WEIGHTS_FILE)

    _write(out_dir, save)
    return out_dir


def _family(checkpoint: OriginalCheckpoint) -> ModuleType:
    """The module that knows this kind of checkpoint."""
    if checkpoint.config.has("model_type") and checkpoint.config.get("model_type") == "mdlm":
        return conversion_mdlm
    if any("adaLN" in key or key.startswith("sigma_map.") for key in checkpoint.shapes):
        return conversion_sedd
    return conversion_original


def _checked_weights(checkpoint: OriginalCheckpoint, family: ModuleType, config) -> dict[str, torch.Tensor]:
    """The original's weights; the header is checked against the config before anything is read."""
    if config.num_hidden_layers > len(checkpoint.shapes):  # no list of a billion missing keys
        raise ValueError(
            f"`source` must hold the weights of {config.num_hidden_layers} blocks, as its config says, got "
            f"{len(checkpoint.shapes)} weights in {str(checkpoint.path)!r}."
        )
    expected = family.expected_shapes(config, checkpoint.config)
    if ROTARY_KEY in checkpoint.shapes:
        expected[ROTARY_KEY] = (config.head_dim // 2,)
    problems, original = key_problems(checkpoint.shapes, expected), {}
    if not problems:
        original = checkpoint.read()
        problems = value_problems(original, conversion_original.rotary_frequencies(config))
    if problems:
        listed = "; ".join(f"{kind}: {keys}" for kind, keys in problems.items())
        raise ValueError(
            f"`source` must hold exactly the weights its {checkpoint.config.file} describes, got "
            f"{str(checkpoint.path)!r} with {listed}."
        )
    return original


def _new_folder(out_dir: str | os.PathLike) -> Path:
    """`out_dir` as an absolute path, checked to be new or empty."""
    if not isinstance(out_dir, (str, os.PathLike)):
        raise ValueError(f"`out_dir` must be a path, got {out_dir!r}.")
    out_dir = Path(out_dir).resolve()  # a link to an empty folder is filled, not replaced
    if any(parent.exists() and not parent.is_dir() for parent in out_dir.parents):
        raise ValueError(f"`out_dir` must be a new or an empty folder, got {str(out_dir)!r}, which is below a file.")
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise ValueError(f"`out_dir` must be a new or an empty folder, got {str(out_dir)!r}, which is not.")
    return out_dir


def _write(out_dir: Path, save: Callable[[Path], object]):
    """Save beside `out_dir`, then rename: whatever fails, nothing half-written stays."""
    partial = out_dir.with_name(f".{out_dir.name}.{uuid.uuid4().hex}")
    try:
        save(partial)
        os.replace(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def push_folder(folder: str | os.PathLike, repo_id: str) -> str:
    """Upload `folder` to the Hub repository `repo_id`, made if it is not there, in one commit; returns its address."""
    api = huggingface_hub.HfApi()
    url = api.create_repo(repo_id, exist_ok=True)
    api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Converted with radd_hf")
    return str(url)


def main(arguments: Sequence[str] | None = None):
    """The command line: writes the converted folder's path to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m radd_hf.conversion",
        description="Convert a checkpoint of the public RADD, MDLM or SEDD code for from_pretrained.",
    )
    parser.add_argument("source", help="folder of a checkpoint or of a training run, or a Hub repository")
    parser.add_argument("out_dir", help="new or empty folder")
    parser.add_argument("--raw", action="store_true", help="from a training run, the raw weights, not their average")
    parser.add_argument("--tokenizer", help="folder or Hub name of the original's tokenizer; GPT-2's by default")
    parser.add_argument(
        "--to-original", action="store_true", help="the way back: from our format to the original RADD's"
    )
    parser.add_argument("--push", metavar="REPO", help="then upload the folder to this Hub repository")
    options = parser.parse_args(arguments)
    try:
        if options.to_original:
            out_dir = export_original_checkpoint(options.source, options.out_dir)
        else:
            out_dir = convert_original_checkpoint(
                options.source,
                options.out_dir,
                ema=not options.raw,
                tokenizer=options.tokenizer,
                model_name=options.push,
            )
        if options.push is not None:
            sys.stderr.write(f"{push_folder(out_dir, options.push)}\n")
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    sys.stdout.write(f"{out_dir}\n")


if __name__ == "__main__":
    main()

__all__ = [
    "convert_config",
    "convert_original_checkpoint",
    "convert_weights",
    "export_original_checkpoint",
    "key_map",
    "key_problems",
    "load_original_checkpoint",
    "main",
    "push_folder",
]
