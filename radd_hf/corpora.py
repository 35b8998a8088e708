# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Where training text comes from: local files, `datasets` names, streams of either, prompt and completion pairs.

A source is iterated anew each epoch and yields pieces of documents `(text, whether it ends the document)`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers.utils import logging

from .data import iterate_blocks, original_batch_sizes

logger = logging.get_logger(__name__)

DOCUMENT_UNITS = ("file", "line", "paragraph")
TOKENIZER_BATCH = 1000  # pieces handed to the tokenizer at once: fast ones work on them in parallel


@dataclass
class TextFiles:
    """
    UTF-8 text files, read line by line.

    Args:
        paths (sequence of `str` or `Path`): The files.
        unit (`str`, *optional*, defaults to `"file"`): What a document is: a "file", a "line" (blank ones too, without
            the line break, as `datasets` reads text) or a "paragraph" (lines between blank ones).

    Raises:
        ValueError: An unknown unit, no file, or a file that does not exist.
    """

    paths: Sequence[str | Path]
    unit: str = "file"

    def __post_init__(self):
        if self.unit not in DOCUMENT_UNITS:
            raise ValueError(f"`unit` must be one of {list(DOCUMENT_UNITS)}, got {self.unit!r}.")
        missing = [str(path) for path in self.paths if not Path(path).is_file()]
        if missing or not self.paths:
            raise ValueError(f"`paths` must name text files that exist, got {missing or 'none'}.")

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        for path in self.paths:
            with Path(path).open(encoding="utf-8") as lines:
                if self.unit == "line":
                    yield from ((line.removesuffix("\n"), True) for line in lines)
                elif self.unit == "file":
                    yield from _marked_last(lines)
                else:
                    yield from _paragraphs(lines)


@dataclass
class DatasetTexts:
    """
    One text column of a data set; each row is a document.

    Args:
        dataset (`datasets.Dataset`, `datasets.IterableDataset` or list of `dict`): The data set or stream.
        column (`str`, *optional*, defaults to `"text"`): Its column of texts.
    """

    dataset: Any
    column: str = "text"

    def __post_init__(self):
        rows = self.dataset
        columns = list(rows[0]) if isinstance(rows, list) and rows else getattr(rows, "column_names", None)
        if columns is not None and self.column not in columns:  # a stream may not know its columns
            raise ValueError(f"`column` must be one of {columns}, got {self.column!r}.")

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        return ((row[self.column], True) for row in self.dataset)


def _marked_last(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Each piece, and whether it is the last one."""
    iterator = iter(pieces)
    for piece in islice(iterator, 1):
        for following in iterator:
            yield piece, False
            piece = following
        yield piece, True


def _paragraphs(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Lines up to a blank one, joined as they are, without the last line break."""
    kept: list[str] = []
    for line in lines:
        if line.strip():
            kept.append(line)
        elif kept:
            yield "".join(kept).removesuffix("\n"), True
            kept = []
    if kept:
        yield "".join(kept).removesuffix("\n"), True


def tokenize(pieces: Iterable[tuple[str, bool]], tokenizer) -> Iterator[tuple[list[int], bool]]:
    """Token ids of each piece, without special tokens; a special token that the text spells is text."""
    iterator = iter(pieces)
    while batch := list(islice(iterator, TOKENIZER_BATCH)):
        texts = [text for text, _ in batch]
        ids = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        yield from zip(ids, (ends for _, ends in batch), strict=True)


class PackedStream(IterableDataset):
    """
    Blocks of a source as `{"input_ids": (L,)}`, tokenized and packed as they are read: never more in memory than a
    thousand pieces and the beginning of a block.

    Workers of a data loader share the documents out between them: `datasets` streams by their shards, everything else
    in turn. A stream is not shuffled here: shuffle the source.

    Args:
        source (iterable of `(str, bool)`): `TextFiles`, `DatasetTexts` or pieces of one's own, iterable again.
        tokenizer (`PreTrainedTokenizerBase`): Its EOS follows each document.
        block_size (`int`): Tokens a block, L.
        as_original (`bool`, *optional*, defaults to `False`): Drop the remainder of every 1,000 documents too, in
            eight shares where their number is known, as the paper's code does (`original_batch_sizes`).
    """

    def __init__(self, source: Iterable[tuple[str, bool]], tokenizer, block_size: int, *, as_original: bool = False):
        if tokenizer.eos_token_id is None:
            raise ValueError("`tokenizer` must have an EOS token to put between documents, got none.")
        self.source = source
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.as_original = as_original

    def __iter__(self) -> Iterator[dict[str, torch.LongTensor]]:
        pieces = tokenize(self._own_pieces(), self.tokenizer)
        sizes = original_batch_sizes(self._num_documents()) if self.as_original else None
        for block in iterate_blocks(pieces, self.block_size, self.tokenizer.eos_token_id, sizes):
            yield {"input_ids": torch.tensor(block)}

    def set_epoch(self, epoch: int):
        """Hand the epoch on to a source that shuffles by it."""
        dataset = getattr(self.source, "dataset", None)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)

    def _num_documents(self) -> int | None:
        """Documents of the source; `None` for a `datasets` stream and in a worker, which sees a part."""
        dataset = getattr(self.source, "dataset", None)
        if get_worker_info() is not None or isinstance(dataset, IterableDataset):
            return None
        return sum(ends for _, ends in self.source) if dataset is None else len(dataset)

    def _own_pieces(self) -> Iterator[tuple[str, bool]]:
        """The pieces of the documents that fall to this worker."""
        worker = get_worker_info()
        if worker is None or isinstance(getattr(self.source, "dataset", None), IterableDataset):
            yield from self.source  # `datasets` gives each worker shards of its own
            return
        document = 0
        for text, ends in self.source:
            if document % worker.num_workers == worker.id:
                yield text, ends
            document += ends


def pack_to_disk(stream: PackedStream) -> Any:
    """The blocks of a stream as a memory-mapped `datasets.Dataset` in the cache of `datasets`, in torch format."""
    datasets = _import_datasets()
    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))})
    packed = datasets.Dataset.from_generator(stream.__iter__, features=features)
    if len(packed) == 0:
        raise ValueError(f"The data set must hold at least one block of {stream.block_size} tokens, got fewer.")
    return packed.with_format("torch")


def load_dataset_texts(
    name: str,
    config_name: str | None = None,
    split: str = "train",
    column: str = "text",
    *,
    streaming: bool = False,
    shuffle_buffer: int = 0,
    seed: int = 0,
) -> DatasetTexts:
    """
    A data set of the `datasets` library by name or folder.

    Args:
        name, config_name, split: As for `datasets.load_dataset`.
        column (`str`, *optional*, defaults to `"text"`): Its column of texts.
        streaming (`bool`, *optional*, defaults to `False`): Read rows as they come instead of fetching the whole.
        shuffle_buffer (`int`, *optional*, defaults to 0): Rows among which a stream is shuffled, anew each epoch.
        seed (`int`, *optional*, defaults to 0): Of that shuffling.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: There is no such column.
    """
    dataset = _import_datasets().load_dataset(name, config_name, split=split, streaming=streaming)
    if streaming and shuffle_buffer:
        dataset = dataset.shuffle(seed=seed, buffer_size=shuffle_buffer)
    return DatasetTexts(dataset, column)


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("Data sets by name need the `datasets` library: pip install datasets.") from error
    return datasets


def prompt_completion_examples(
    rows: Iterable[dict[str, str]], tokenizer, max_length: int, prompt: str = "prompt", completion: str = "completion"
) -> list[dict[str, list]]:
    """
    Pairs for fine-tuning with a clean prompt: the completion and its EOS are masked and scored, the prompt never.

    Prompt and completion are tokenized apart. A pair that is too long loses the start of its prompt; a completion
    that is too long by itself loses its end as well, EOS included. A warning says how many.

    Args:
        rows (iterable of `dict`): With the texts `prompt` and `completion`.
        tokenizer (`PreTrainedTokenizerBase`): Its EOS follows each completion.
        max_length (`int`): Tokens of the longest example.
        prompt, completion (`str`, *optional*): Names of the two fields.

    Returns:
        A list of `{"input_ids": [...], "loss_mask": [...]}`, for `MaskedDiffusionCollator`, which pads.

    Raises:
        ValueError: A row lacks a field, or there is none.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces: list[tuple[str, bool]] = []
    for number, row in enumerate(rows):
        for name in (prompt, completion):
            if not isinstance(row, dict) or not isinstance(row.get(name), str):
                raise ValueError(f"Row {number} must be a dict with the text {name!r}, got {row!r:.80}.")
            pieces.append((row[name], name == completion))
    if not pieces:
        raise ValueError("`rows` must hold at least one pair, got none.")
    ids = [piece for piece, _ in tokenize(pieces, tokenizer)]
    examples, num_cut = [], 0
    for context, answer in zip(ids[::2], ids[1::2], strict=True):
        answer = [*answer, *end]
        num_cut += len(context) + len(answer) > max_length
        answer = answer[:max_length]
        context = context[max(0, len(context) + len(answer) - max_length) :]
        examples.append({"input_ids": context + answer, "loss_mask": [0] * len(context) + [1] * len(answer)})
    if num_cut:
        logger.warning(f"{num_cut} of {len(examples)} pairs were longer than {max_length} tokens and were cut.")
    return examples


def read_json_lines(path: str | Path) -> list[dict]:
    """The objects of a JSON-lines file; a ValueError names the line that is none."""
    rows = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"Line {number} of {str(path)!r} must be a JSON object: {error}.") from error
    return rows
