# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Tokens to fixed blocks, document boundaries, the collator that pads what is not in blocks, small tokenizers.

Shapes: B batch, L length.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

# What `datasets.map` hands over at once: the paper's code packs these rows and drops what is left of them.
ORIGINAL_BATCH_ROWS = 1000
ORIGINAL_WORKERS = 8


def iterate_blocks(
    pieces: Iterable[tuple[Sequence[int], bool]],
    block_size: int,
    eos_token_id: int | None = None,
    batch_sizes: Iterable[int] | None = None,
) -> Iterator[list[int]]:
    """
    Concatenate pieces of documents, an EOS after each document, and cut into blocks; the remainder is dropped.

    Holds one piece and less than a block besides, however long the stream is.

    Args:
        pieces (iterable of `(list[int], bool)`): Token ids, and whether they end a document.
        block_size (`int`): Tokens a block.
        eos_token_id (`int`, *optional*): Put after each document; `None` puts nothing.
        batch_sizes (iterable of `int`, *optional*): Drop the remainder after so many documents each, as
            `original_batch_sizes` says the paper's code does; `None` drops it at the end alone.

    Yields:
        `list[int]` of length `block_size`.
    """
    if block_size < 1:
        raise ValueError(f"`block_size` must be positive, got {block_size}.")
    end = [] if eos_token_id is None else [eos_token_id]
    sizes = repeat(0) if batch_sizes is None else iter(batch_sizes)
    left = next(sizes, 0)  # documents of this batch to come; 0: there is no end to it
    rest: list[int] = []
    for ids, ends_document in pieces:
        rest.extend(ids)
        if ends_document:
            rest.extend(end)
        whole = len(rest) - len(rest) % block_size
        for start in range(0, whole, block_size):
            yield rest[start : start + block_size]
        del rest[:whole]
        if ends_document and left:
            left -= 1
            if left == 0:
                rest.clear()
                left = next(sizes, 0)


def original_batch_sizes(num_documents: int | None = None, num_workers: int = ORIGINAL_WORKERS) -> Iterator[int]:
    """
    Documents that the paper's code packs together: batches of 1,000 within each worker's contiguous share.

    Args:
        num_documents (`int`, *optional*): Rows of the data set; `None` for a stream, which has no shares.
        num_workers (`int`, *optional*, defaults to 8): Processes of its `datasets.map`.
    """
    if num_documents is None:
        yield from repeat(ORIGINAL_BATCH_ROWS)
    share, extra = divmod(num_documents, num_workers)
    for worker in range(num_workers):
        rows = share + (worker < extra)
        yield from repeat(ORIGINAL_BATCH_ROWS, rows // ORIGINAL_BATCH_ROWS)
        if rows % ORIGINAL_BATCH_ROWS:
            yield rows % ORIGINAL_BATCH_ROWS


def pack_blocks(
    documents: Iterable[Sequence[int]],
    block_size: int,
    eos_token_id: int | None = None,
    batch_sizes: Iterable[int] | None = None,
) -> torch.LongTensor:
    """
    The blocks of `iterate_blocks` as one tensor.

    Args:
        documents (iterable of `list[int]`): Token ids of each document.
        block_size, eos_token_id, batch_sizes: As in `iterate_blocks`.

    Returns:
        `torch.LongTensor` of shape `(number of blocks, block_size)`.

    Raises:
        ValueError: All documents together are shorter than one block.
    """
    pieces = ((document, True) for document in documents)
    return stack_blocks(iterate_blocks(pieces, block_size, eos_token_id, batch_sizes), block_size)


def stack_blocks(blocks: Iterable[Sequence[int]], block_size: int) -> torch.LongTensor:
    """Blocks of `block_size` ids as a LongTensor (number, block_size); a ValueError if there are none."""
    # int32 while they wait: a list of Python ints takes ten times as much
    rows = [torch.as_tensor(block, dtype=torch.int32) for block in blocks]
    if not rows:
        raise ValueError(f"`documents` must hold at least one block of {block_size} tokens, got fewer.")
    return torch.stack(rows).long()


def number_documents(input_ids: torch.LongTensor, end_id: int) -> torch.LongTensor:
    """The number within its row, from 1, of the document of each clean token, (B, L): it ends with its `end_id`."""
    ends = (input_ids == end_id).long()
    return ends.cumsum(-1) - ends + 1


def document_attention_mask(
    document_ids: torch.LongTensor, attention_mask: torch.Tensor | None = None
) -> torch.BoolTensor:
    """
    The block-diagonal mask under which tokens see their own document alone.

    Rotary positions are relative, so positions that go on from the document before change nothing.

    Args:
        document_ids (`torch.LongTensor` of shape `(B, L)`): Number of each token's document.
        attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding, which sees padding only.

    Returns:
        `torch.BoolTensor` of shape `(B, 1, L, L)`: whether query i sees key j.
    """
    if attention_mask is not None:
        document_ids = document_ids.masked_fill(attention_mask == 0, -1)
    return (document_ids[:, :, None] == document_ids[:, None, :])[:, None]


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
        never_mask_ids (sequence of `int`): Ids that are context wherever they stand: never masked, never scored.
        document_end_id (`int`, *optional*): Add `document_ids` (B, L), which end with this id, so that
            `RADDTrainer` lets tokens see their own document alone.
    """

    pad_token_id: int = 0
    never_mask_ids: Sequence[int] = ()
    document_end_id: int | None = None

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
        if len(self.never_mask_ids):
            scored = ~torch.isin(batch["input_ids"], torch.tensor(list(self.never_mask_ids)))
            batch["loss_mask"] = batch.get("loss_mask", True) & scored
        if self.document_end_id is not None:
            batch["document_ids"] = number_documents(batch["input_ids"], self.document_end_id)
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


def character_tokenizer(text: str | Iterable[str]) -> PreTrainedTokenizerFast:
    """
    A tokenizer whose tokens are the characters of `text` (or of several), then `<unk>` for all others,
    `<|endoftext|>` (end and padding) and `[MASK]`.
    """
    characters = sorted(set(chain.from_iterable(text)))
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token=_mask_token(lstrip),
        **special_tokens,
    )


def add_mask_token(tokenizer) -> int:
    """Give a tokenizer that lacks them `[MASK]` and padding (its EOS); the number of tokens added."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.mask_token is not None:
        return 0
    return tokenizer.add_special_tokens({"mask_token": _mask_token(lstrip=True)})


def _mask_token(lstrip: bool) -> AddedToken:
    # lstrip: the mask stands for a piece with its leading space, so the space before "[MASK]" is not a token
    return AddedToken("[MASK]", lstrip=lstrip, special=True, normalized=False)


def check_tokenizer(tokenizer, config):
    """Raise a ValueError if the tokenizer's mask token or vocabulary is not the model's."""
    mask_token_id = getattr(config, "mask_token_id", None)
    if None not in (mask_token_id, tokenizer.mask_token_id) and tokenizer.mask_token_id != mask_token_id:
        raise ValueError(
            f"The tokenizer's mask token must be the model's, id {mask_token_id}, got {tokenizer.mask_token!r} with "
            f"id {tokenizer.mask_token_id}."
        )
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"The tokenizer must have at most the model's vocab_size={config.vocab_size} tokens, got {len(tokenizer)}."
        )
