# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Text to fixed blocks of tokens, the collator that pads what is not in blocks, and small tokenizers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast


def pack_blocks(
    documents: Iterable[Sequence[int]], block_size: int, eos_token_id: int | None = None
) -> torch.LongTensor:
    """
    Concatenate tokenized documents, an EOS after each, and cut into blocks; the remainder is dropped.

    Args:
        documents (iterable of `list[int]`): Token ids of each document.
        block_size (`int`): Tokens a block.
        eos_token_id (`int`, *optional*): Put after each document; `None` puts nothing.

    Returns:
        `torch.LongTensor` of shape `(number of blocks, block_size)`.

    Raises:
        ValueError: All documents together are shorter than one block.
    """
    if block_size < 1:
        raise ValueError(f"`block_size` must be positive, got {block_size}.")
    end = [] if eos_token_id is None else [eos_token_id]
    ids = [i for document in documents for i in (*document, *end)]
    count = len(ids) // block_size
    if count == 0:
        raise ValueError(f"`documents` must hold at least one block of {block_size} tokens, got {len(ids)} tokens.")
    return torch.tensor(ids[: count * block_size], dtype=torch.long).view(count, block_size)


class BlockDataset(Dataset):
    """Rows of a LongTensor (number of blocks, L) as `{"input_ids": (L,)}`."""

    def __init__(self, blocks: torch.LongTensor):
        if blocks.dim() != 2 or len(blocks) == 0:
            raise ValueError(f"`blocks` must have shape (number, length) with number > 0, got {tuple(blocks.shape)}.")
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.LongTensor]:
        return {"input_ids": self.blocks[index]}


@dataclass
class MaskedDiffusionCollator:
    """
    Stack examples of `input_ids` and, where present, `attention_mask` and `loss_mask`, padding on the right.

    Attributes:
        pad_token_id (`int`): Id put at padding; never read, since the attention mask hides it.
    """

    pad_token_id: int = 0

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        if not all(isinstance(example, Mapping) and "input_ids" in example for example in examples):
            raise ValueError(f"Examples must be dicts with `input_ids`, got {type(examples[0]).__name__}.")
        rows = [torch.as_tensor(example["input_ids"]) for example in examples]
        if any(row.is_floating_point() for row in rows):
            raise ValueError("`input_ids` must hold whole numbers, got floating-point ones.")
        rows = [row.long() for row in rows]
        batch = {"input_ids": _pad(rows, self.pad_token_id)}
        ragged = len({len(row) for row in rows}) > 1
        if ragged or any("attention_mask" in example for example in examples):
            batch["attention_mask"] = _pad(_masks(examples, rows, "attention_mask"), 0)
        if any("loss_mask" in example for example in examples):
            batch["loss_mask"] = _pad([mask.bool() for mask in _masks(examples, rows, "loss_mask")], False)
        return batch


def _masks(examples: list[dict], rows: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """The mask `name` of each example, all ones where it has none."""
    masks = []
    for example, row in zip(examples, rows, strict=True):
        mask = torch.as_tensor(example[name]) if name in example else torch.ones_like(row)
        if bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError(f"`{name}` must hold 0 and 1 alone, got {mask.unique()[:4].tolist()}.")
        mask = mask.long()
        if mask.shape != row.shape:
            raise ValueError(f"`{name}` must have the length of `input_ids`, {len(row)}, got {tuple(mask.shape)}.")
        masks.append(mask)
    return masks


def _pad(rows: list[torch.Tensor], value: int | bool) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def character_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """
    A tokenizer whose tokens are the characters of `text`, then `<unk>` for all others, `<|endoftext|>` (end and
    padding) and `[MASK]`.
    """
    characters = sorted(set(text))
    if not characters:
        raise ValueError("`text` must have at least one character, got an empty string.")
    vocabulary = {token: i for i, token in enumerate([*characters, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _with_special_tokens(tokenizer, lstrip=False, unk_token="<unk>")


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab_size` tokens for `texts`; the last two are `<|endoftext|>`, `[MASK]`."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 2:
        raise ValueError(
            f"`vocab_size` must be at least {len(alphabet) + 2} (bytes and two specials), got {vocab_size}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _with_special_tokens(tokenizer, lstrip=True)


def _with_special_tokens(tokenizer: Tokenizer, lstrip: bool, **special_tokens: str) -> PreTrainedTokenizerFast:
    # lstrip: the mask stands for a piece with its leading space, so the space before "[MASK]" is not a token
    mask = AddedToken("[MASK]", lstrip=lstrip, special=True, normalized=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token=mask,
        **special_tokens,
    )
