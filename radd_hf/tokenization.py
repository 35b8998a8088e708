# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The mask token of a tokenizer: how it is added, and whether a tokenizer and a model agree on it."""

from pathlib import Path

from tokenizers import AddedToken
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase

MASK_TOKEN = "[MASK]"
GPT2 = "openai-community/gpt2"
GPT2_TOKENS = 50257


def add_mask_token(
    tokenizer: PreTrainedTokenizerBase,
    mask_token: str = MASK_TOKEN,
    *,
    lstrip: bool = True,
    parse_mask: bool = True,
    config=None,
) -> PreTrainedTokenizerBase:
    """
    Give `tokenizer` a mask token as its last id, in place: GPT-2's becomes 50,258 tokens with the mask 50257.

    The token is special and survives `save_pretrained`. No text without the string `mask_token` is ever encoded to it.
    A tokenizer that has a mask token keeps it. One without padding is given its end token to pad with.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Any tokenizer.
        mask_token (`str`, *optional*, defaults to `"[MASK]"`): Its spelling.
        lstrip (`bool`, *optional*, defaults to `True`): The mask stands for a word with the space before it, as
            GPT-2's tokens do: "a [MASK]" has no token for that space.
        parse_mask (`bool`, *optional*, defaults to `True`): `False`: special tokens spelled in a text are read as
            text, here and after saving, unless a call asks for them with `split_special_tokens=False`.
        config (`PreTrainedConfig`, *optional*): Model config that the result must fit: see `check_tokenizer`.

    Returns:
        `PreTrainedTokenizerBase`: `tokenizer`.

    Raises:
        ValueError: An empty tokenizer, one that has `mask_token` as an ordinary token, or one that `config` does not
            fit.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"`tokenizer` must be a tokenizer of transformers, got {type(tokenizer).__name__}.")
    if not isinstance(mask_token, str) or not mask_token.strip():
        raise ValueError(f"`mask_token` must be a string that is not blank, got {mask_token!r}.")
    if len(tokenizer) < 2:  # GPT2Tokenizer(vocab_file=...) is empty and says nothing
        raise ValueError(f"`tokenizer` must have tokens, got {type(tokenizer).__name__} with {len(tokenizer)}.")
    if tokenizer.mask_token is None:
        if mask_token in tokenizer.get_vocab():
            raise ValueError(
                f"`mask_token` must be a new token, got {mask_token!r}, which is token "
                f"{tokenizer.convert_tokens_to_ids(mask_token)} of the tokenizer."
            )
        token = AddedToken(mask_token, lstrip=lstrip, rstrip=False, special=True, normalized=False)
        tokenizer.add_special_tokens({"mask_token": token})
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if not parse_mask:
        tokenizer.split_special_tokens = tokenizer.init_kwargs["split_special_tokens"] = True
    if config is not None:
        check_tokenizer(tokenizer, config)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config):
    """Raise a ValueError unless the mask token is the model's and every token has a row of its embedding."""
    if tokenizer.mask_token_id != config.mask_token_id:
        raise ValueError(
            f"`tokenizer.mask_token_id` must be the config's mask_token_id={config.mask_token_id}, got "
            f"{tokenizer.mask_token_id}."
        )
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"`tokenizer` must have at most the config's vocab_size={config.vocab_size} tokens, got {len(tokenizer)}."
        )


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """A saved tokenizer, a Hub name, or a folder with GPT-2's own files vocab.json and merges.txt alone."""
    folder = Path(source)
    bare = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    named = (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file()
    return (GPT2Tokenizer if bare and not named else AutoTokenizer).from_pretrained(source)
