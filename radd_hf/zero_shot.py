# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""The zero-shot data sets of the paper (or a local text): where they lie, how text is restored and cut into blocks."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from .checks_radd import is_int
from .data import pack_blocks

BLOCK_SIZE = 1024  # the paper's
# The original code tokenizes with `datasets.map` in batches of 1,000 rows, by default in 8 processes.
ORIGINAL_BATCH, ORIGINAL_WORKERS = 1000, 8

Rules = Sequence[tuple[str, str]]


def _substitute(rules: Rules) -> Callable[[str], str]:
    """A function that applies regular expressions one after the other."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def apply(text: str) -> str:
        for pattern, replacement in compiled:
            text = pattern.sub(replacement, text)
        return text

    return apply


# WikiText separates punctuation by spaces and joins hyphens, commas and points inside words and numbers by @.
_WIKITEXT = _substitute(
    [
        (r"s '", "s'"),  # a plural's apostrophe
        (r" @([-,.])@ ", r"\1"),
        *((f" [{mark}] ", f"{mark} ") for mark in ":;.!?,"),  # one by one: neighbours share a space
        (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
        (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
        (r'"\s*([^"]*?)\s*"', r'"\1"'),
        (r"'\s*([^']*?)\s*'", r"'\1'"),
        (r"= = = =", "===="),
        (r"= = =", "==="),
        (r"= =", "=="),
        (r" ° ", "°"),
        (r" \n", "\n"),
        (r"\n ", "\n"),
        (r" N ", " 1 "),
        (r" 's", "'s"),
    ]
)
# The Penn Treebank: contractions are split, numbers are N, rare words <unk>.
_PTB = _substitute(
    [
        (r" 's", "'s"),
        (r"s ' ", "s' "),
        (r" n't", "n't"),
        (r" \n ", "\n"),
        (r"\\/", "/"),
        (r" N(?= )", " 1"),
        (r"([$#]) 1", r"\g<1>1"),
        (r"<unk>", "?"),
    ]
)
_LM1B = _substitute(
    [
        (r"(https?) : / / ", r"\1://"),
        (r" '(\w+)", r"'\1"),
        (r" (\w+) \.(?= |$)", r" \1."),
        (r" ([?!])(?= |$)", r"\1"),
        *((f" {mark} ", f"{mark} ") for mark in ",:;"),
        (r" / ", "/"),
        (r'" ([^"]+) "', r'"\1"'),
        (r"' ([^']+) '", r"'\1'"),
        (r"\( ([^()]+) \)", r"(\1)"),
        (r"\[ ([^\[\]]+) \]", r"[\1]"),
        (r"([$£]) ", r"\1"),
    ]
)


def _lambada(text: str) -> str:
    """Straight quotation marks, a line break before the passage."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


@dataclass(frozen=True)
class ZeroShotSet:
    """
    One data set of the protocol.

    Attributes:
        hub_name, hub_config, revision (`str`, *optional*): For `datasets.load_dataset`; no name: local files only.
        split (`str`): What is scored by default.
        original_split (`str`): What the paper's code reads.
        column (`str`): The text.
        detokenize (`Callable[[str], str]`): Restores ordinary writing, as the paper's code does.
    """

    hub_name: str | None
    hub_config: str | None
    revision: str | None
    split: str
    original_split: str
    column: str
    detokenize: Callable[[str], str]


# Data sets that the Hub knows as scripts are read from the Parquet files it makes of them.
_PARQUET = "refs/convert/parquet"
ZERO_SHOT_SETS = {
    "lambada": ZeroShotSet("EleutherAI/lambada_openai", "default", None, "test", "test", "text", _lambada),
    "wikitext2": ZeroShotSet("Salesforce/wikitext", "wikitext-2-raw-v1", None, "test", "train", "text", _WIKITEXT),
    "ptb": ZeroShotSet("ptb-text-only/ptb_text_only", None, _PARQUET, "test", "test", "sentence", _PTB),
    "wikitext103": ZeroShotSet("Salesforce/wikitext", "wikitext-103-raw-v1", None, "test", "test", "text", _WIKITEXT),
    "lm1b": ZeroShotSet("billion-word-benchmark/lm1b", None, _PARQUET, "test", "test", "text", _LM1B),
    "text": ZeroShotSet(None, None, None, "", "", "text", str),  # any local file, as it is
}


def find_set(name: str) -> ZeroShotSet:
    """The data set `name`; a ValueError lists the names there are."""
    if name not in ZERO_SHOT_SETS:
        raise ValueError(f"`name` must be one of {list(ZERO_SHOT_SETS)}, got {name!r}.")
    return ZERO_SHOT_SETS[name]


def load_rows(name: str, *, path: str | Path | None = None, original_split: bool = False) -> list[str]:
    """
    The rows of a data set as they are stored.

    Args:
        name (`str`): A key of `ZERO_SHOT_SETS`.
        path (`str` or `Path`, *optional*): A local file instead of the Hub: `.jsonl` with the data set's column, or
            text with one row a line (without its line break, which the Hub's WikiText rows keep).
        original_split (`bool`, *optional*, defaults to `False`): The split that the paper's code reads, where it is
            another one (wikitext2: train).

    Raises:
        ValueError: An unknown `name`, a file without the column, no `path` for "text".
        ImportError: Without `path` where `datasets` is missing.
    """
    found = find_set(name)
    if path is not None:
        path = Path(path)
        with open(path, encoding="utf-8", newline="\n") as file:
            lines = list(file)
        if path.suffix != ".jsonl":
            return [line.rstrip("\r\n") for line in lines]
        rows = [json.loads(line) for line in lines if line.strip()]
        if not all(isinstance(row, dict) and isinstance(row.get(found.column), str) for row in rows):
            raise ValueError(f"`path` must hold a string {found.column!r} in each line, got {path}.")
        return [row[found.column] for row in rows]
    if found.hub_name is None:
        raise ValueError(f"`path` must be given for the data set {name!r}: it is no data set of the Hub.")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            "Loading from the Hub needs `pip install datasets`; or give `path`, a local file."
        ) from error
    split = found.original_split if original_split else found.split
    data = load_dataset(found.hub_name, found.hub_config, revision=found.revision, split=split)
    return list(data[found.column])


@dataclass
class ZeroShotBlocks:
    """
    A data set as the network sees it.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(N, block_size)`): Blocks.
        attention_mask (`torch.LongTensor` of shape `(N, block_size)`): 0 at the padding of a last block.
        num_rows (`int`): Rows of the data set.
        num_tokens (`int`): Tokens of all rows, an EOS a row included, before the remainder is dropped.
        num_bytes, num_words (`int`): Of the text in the blocks.
        settings (`dict`): How it was made.
    """

    input_ids: torch.LongTensor
    attention_mask: torch.LongTensor
    num_rows: int
    num_tokens: int
    num_bytes: int
    num_words: int
    settings: dict

    def first(self, count: int, tokenizer: PreTrainedTokenizerBase) -> "ZeroShotBlocks":
        """The first `count` blocks, with their own byte and word counts."""
        ids, mask = self.input_ids[:count], self.attention_mask[:count]
        num_bytes, num_words = text_size(tokenizer, ids[mask.bool()].tolist())
        settings = {**self.settings, "max_blocks": count}
        return replace(
            self, input_ids=ids, attention_mask=mask, num_bytes=num_bytes, num_words=num_words, settings=settings
        )

    def sequences(self) -> list[dict[str, torch.LongTensor]]:
        """One dict a block, as `dataset_perplexity` and `causal_perplexity` take them."""
        return [
            {"input_ids": ids, "attention_mask": mask}
            for ids, mask in zip(self.input_ids, self.attention_mask, strict=True)
        ]


def build_blocks(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    path: str | Path | None = None,
    block_size: int = BLOCK_SIZE,
    last_block: str = "drop",
    packing: str = "concatenated",
    original_split: bool = False,
    detokenize: bool = True,
) -> ZeroShotBlocks:
    """
    The protocol: rows, detokenized, tokenized, an EOS after each (blank ones too), concatenated and cut into blocks.

    Args:
        name, path, original_split: As in `load_rows`.
        tokenizer (`PreTrainedTokenizerBase`): The model's; it needs an EOS token.
        block_size (`int`, *optional*, defaults to 1024): Tokens a block.
        last_block (`str`, *optional*, defaults to `"drop"`): "drop" the remainder, or "pad" it to a block (masked).
        packing (`str`, *optional*, defaults to `"concatenated"`): All rows together, or "original": as the paper's
            code does, in 8 workers' batches of 1,000 rows, each packed by itself.
        detokenize (`bool`, *optional*, defaults to `True`): False leaves the rows as they are stored.

    Raises:
        ValueError: Less than one block with last_block="drop", or an unknown option.
    """
    for option, value, valid in (
        ("last_block", last_block, ("drop", "pad")),
        ("packing", packing, ("concatenated", "original")),
    ):
        if value not in valid:
            raise ValueError(f"`{option}` must be one of {list(valid)}, got {value!r}.")
    if tokenizer.eos_token_id is None:
        raise ValueError("`tokenizer` must have an EOS token: the protocol puts one after each row.")
    found = find_set(name)
    rows = load_rows(name, path=path, original_split=original_split)
    texts = [found.detokenize(row) for row in rows] if detokenize else rows
    documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    ids, mask = pack_documents(
        documents, block_size, tokenizer.eos_token_id, last_block=last_block, original=packing == "original"
    )
    num_bytes, num_words = text_size(tokenizer, ids[mask.bool()].tolist())
    split = found.original_split if original_split else found.split
    return ZeroShotBlocks(
        input_ids=ids,
        attention_mask=mask,
        num_rows=len(rows),
        num_tokens=sum(len(document) + 1 for document in documents),
        num_bytes=num_bytes,
        num_words=num_words,
        settings={
            "data": name,
            "source": found.hub_name if path is None else str(path),
            "split": split if path is None else None,
            "detokenize": detokenize,
            "block_size": block_size,
            "last_block": last_block,
            "packing": packing,
            "original_split": original_split,
        },
    )


def pack_documents(
    documents: Sequence[Sequence[int]],
    block_size: int,
    eos_token_id: int,
    *,
    last_block: str = "drop",
    original: bool = False,
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """
    Blocks (N, block_size) of `documents` with an EOS after each, and their attention mask.

    `last_block` "drop" or "pad"; `original`: each batch of the original code by itself. A ValueError if there is no
    block.
    """
    if not is_int(block_size) or block_size < 1:
        raise ValueError(f"`block_size` must be a positive integer, got {block_size!r}.")
    parts = original_batches(documents) if original else [documents]
    blocks, masks = [], []
    for part in parts:
        ids = [i for document in part for i in (*document, eos_token_id)]
        whole = len(ids) // block_size * block_size
        if whole:
            blocks.append(pack_blocks([ids], block_size))
            masks.append(torch.ones_like(blocks[-1]))
        if last_block == "pad" and whole < len(ids):
            rest = torch.full((1, block_size), eos_token_id)
            rest[0, : len(ids) - whole] = torch.tensor(ids[whole:])
            blocks.append(rest)
            masks.append((torch.arange(block_size) < len(ids) - whole).long()[None])
    if not blocks:
        total = sum(len(document) + 1 for document in documents)
        raise ValueError(
            f"The data must fill at least one block of {block_size} tokens, got {total} tokens: take a smaller "
            f"`block_size`, or last_block='pad'."
        )
    return torch.cat(blocks), torch.cat(masks)


def original_batches(documents: Sequence) -> list[Sequence]:
    """The batches of `datasets.map` in 8 processes: contiguous shares, longer ones first, cut at 1,000 rows."""
    share, more = divmod(len(documents), ORIGINAL_WORKERS)
    ends = [i * share + min(i, more) for i in range(ORIGINAL_WORKERS + 1)]
    return [
        documents[first : min(first + ORIGINAL_BATCH, end)]
        for start, end in zip(ends, ends[1:], strict=False)
        for first in range(start, end, ORIGINAL_BATCH)
    ]


def text_size(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> tuple[int, int]:
    """UTF-8 bytes and white-space separated words of the text in `ids`; special tokens are neither, and part words."""
    special, piece, pieces = set(tokenizer.all_special_ids), [], []
    for token in ids:
        if token in special:
            pieces.append(piece)
            piece = []
        else:
            piece.append(token)
    texts = [tokenizer.decode(piece, clean_up_tokenization_spaces=False) for piece in (*pieces, piece) if piece]
    return sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts)
