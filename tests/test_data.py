"""Packing, streams, document boundaries, pairs and the collator; block counts on real data where it lies."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, GPT2TokenizerFast, Trainer, TrainingArguments

from radd_hf import RADDConfig, RADDForMaskedDiffusion, RADDTrainer, RADDTrainingArguments
from radd_hf.corpora import (
    DatasetTexts,
    PackedStream,
    TextFiles,
    load_dataset_texts,
    pack_to_disk,
    prompt_completion_examples,
    read_json_lines,
)
from radd_hf.data import (
    BlockDataset,
    MaskedDiffusionCollator,
    add_mask_token,
    bpe_tokenizer,
    character_tokenizer,
    check_tokenizer,
    document_attention_mask,
    iterate_blocks,
    number_documents,
    original_batch_sizes,
    pack_blocks,
    stack_blocks,
)
from radd_hf.losses import LOSS_TYPES, corrupt, diffusion_loss_terms, maskable_positions
from radd_hf.noise_schedule_radd import get_noise_schedule

SHARED = Path(__file__).parents[2] / "shared" / "data"
TEXT = "the cat sat on the mat and the dog sat on the log.\n"


def packed_by_hand(documents: list[list[int]], block_size: int, eos: int, batches: list[int]) -> list[list[int]]:
    """What SEDD's and RADD's `group_texts` makes of these batches of documents, by loops."""
    blocks, start = [], 0
    for size in batches:
        joined = []
        for document in documents[start : start + size]:
            joined += [*document, eos]
        blocks += [joined[i : i + block_size] for i in range(0, len(joined) // block_size * block_size, block_size)]
        start += size
    return blocks


def random_documents(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 9, (count,), generator=generator).tolist()
    return [torch.randint(0, 50, (n,), generator=generator).tolist() for n in lengths]


class TestPacking:
    def test_concatenated_and_the_original_way(self):
        documents = random_documents(2500)
        together = pack_blocks(documents, 7, eos_token_id=99)
        assert together.tolist() == packed_by_hand(documents, 7, 99, [2500])
        sizes = list(original_batch_sizes(2500, num_workers=2))
        assert sizes == [1000, 250, 1000, 250]
        original = pack_blocks(documents, 7, eos_token_id=99, batch_sizes=sizes)
        assert original.tolist() == packed_by_hand(documents, 7, 99, sizes)
        assert len(together) > len(original)

    def test_the_shares_of_the_original(self):
        """`datasets` gives the first workers one row more; a stream has no shares."""
        assert list(original_batch_sizes(11, num_workers=8)) == [2, 2, 2, 1, 1, 1, 1, 1]
        assert list(original_batch_sizes(3, num_workers=8)) == [1, 1, 1]
        stream = original_batch_sizes(None)
        assert [next(stream) for _ in range(3)] == [1000, 1000, 1000]

    def test_pieces_of_a_document_are_joined_without_eos(self):
        pieces = [([1, 2], False), ([3], True), ([], True), ([4, 5, 6], True)]
        assert list(iterate_blocks(pieces, 3, 9)) == [[1, 2, 3], [9, 9, 4], [5, 6, 9]]

    def test_a_stream_is_cut_as_it_comes(self):
        """Each block is out before the next document is asked for, of a stream without end."""
        taken = 0

        def endless():
            nonlocal taken
            while True:
                taken += 1
                yield [taken] * 3, True

        blocks = iterate_blocks(endless(), 4, 0)
        assert [next(blocks) for _ in range(3)] == [[1, 1, 1, 0], [2, 2, 2, 0], [3, 3, 3, 0]]
        assert taken == 3

    @pytest.mark.parametrize(("as_original", "count"), [(False, 418), (True, 414)])
    def test_the_block_counts_of_lambada(self, as_original: bool, count: int):
        """The paper's code makes 414 blocks of 1,024 tokens of LAMBADA's test set with its eight workers."""
        if not (SHARED / "zero_shot").is_dir():
            pytest.skip("the LAMBADA file is not here")
        tokenizer = GPT2TokenizerFast.from_pretrained(SHARED / "gpt2")
        assert len(tokenizer) == 50257
        rows = read_json_lines(SHARED / "zero_shot" / "lambada_test.jsonl")
        for row in rows:  # as its detokenizer does
            row["text"] = "\n" + row["text"].replace("“", '"').replace("”", '"').strip()
        stream = PackedStream(DatasetTexts(rows), tokenizer, 1024, as_original=as_original)
        assert sum(1 for _ in stream) == count


class TestFiles:
    def write(self, folder: Path, text: str) -> Path:
        (folder / "text.txt").write_text(text, encoding="utf-8")
        return folder / "text.txt"

    def test_units(self, tmp_path: Path):
        path = self.write(tmp_path, "a\nb\n\n\nc\n")
        pieces = {unit: list(TextFiles([path], unit)) for unit in ("file", "line", "paragraph")}
        assert pieces["file"] == [("a\n", False), ("b\n", False), ("\n", False), ("\n", False), ("c\n", True)]
        assert pieces["line"] == [(line, True) for line in ("a", "b", "", "", "c")]
        assert pieces["paragraph"] == [("a\nb", True), ("c", True)]
        assert list(TextFiles([self.write(tmp_path, "")])) == []

    def test_errors_name_the_argument(self, tmp_path: Path):
        with pytest.raises(ValueError, match=r"`unit` must be one of \['file', 'line', 'paragraph'\], got 'word'"):
            TextFiles([self.write(tmp_path, "a")], "word")
        with pytest.raises(ValueError, match="`paths` must name text files that exist, got .*none.txt"):
            TextFiles([tmp_path / "none.txt"])
        with pytest.raises(ValueError, match=r"`column` must be one of \['text'\], got 'body'"):
            DatasetTexts([{"text": "a"}], "body")

    def test_a_stream_yields_what_is_packed_at_once(self, tmp_path: Path):
        path = self.write(tmp_path, TEXT * 30)
        tokenizer = character_tokenizer(TEXT)
        stream = PackedStream(TextFiles([path, path], "line"), tokenizer, 16)
        once = [row["input_ids"].tolist() for row in stream]
        assert once == [row["input_ids"].tolist() for row in stream]  # iterable again
        lines = tokenizer([TEXT.rstrip("\n")] * 60)["input_ids"]
        assert once == pack_blocks(lines, 16, tokenizer.eos_token_id).tolist()
        assert stack_blocks((row["input_ids"] for row in stream), 16).tolist() == once

    def test_a_special_token_that_the_text_spells_is_text(self, tmp_path: Path):
        tokenizer = bpe_tokenizer([TEXT], 300)
        stream = PackedStream(TextFiles([self.write(tmp_path, "[MASK] <|endoftext|> " * 20)]), tokenizer, 8)
        ids = torch.cat([row["input_ids"] for row in stream])
        assert not bool(torch.isin(ids, torch.tensor([tokenizer.mask_token_id, tokenizer.eos_token_id])).any())

    def test_workers_share_the_documents_out(self, tmp_path: Path):
        """Blocks of two tokens are a letter and its EOS: two workers read each letter once, between them."""
        letters = "abcdefghij"
        path = self.write(tmp_path, "\n".join(letters))
        tokenizer = character_tokenizer(letters)
        stream = PackedStream(TextFiles([path], "line"), tokenizer, 2)
        rows = [tokenizer.decode(row["input_ids"][0, 0]) for row in DataLoader(stream, num_workers=2)]
        assert sorted(rows) == list(letters)

    def test_training_on_a_stream_resumes_exactly(self, tmp_path: Path):
        """Three steps and a resumed run of six, against six at once: the same blocks, noise and weights."""
        path = self.write(tmp_path, TEXT * 30)
        tokenizer = character_tokenizer(TEXT)

        def run(folder: str, resume: str | None = None) -> RADDTrainer:
            torch.manual_seed(0)
            options = {"max_steps": 6, "save_steps": 3, "per_device_train_batch_size": 8, "report_to": []}
            trainer = RADDTrainer(
                RADDForMaskedDiffusion(
                    RADDConfig(
                        vocab_size=len(tokenizer),
                        mask_token_id=tokenizer.mask_token_id,
                        hidden_size=8,
                        num_hidden_layers=1,
                        num_attention_heads=2,
                    )
                ),
                RADDTrainingArguments(str(tmp_path / folder), use_cpu=True, disable_tqdm=True, **options),
                train_dataset=PackedStream(TextFiles([path], "line"), tokenizer, 16),
            )
            trainer.train(resume_from_checkpoint=resume)
            return trainer

        straight = run("a")
        resumed = run("b", str(tmp_path / "a" / "checkpoint-3"))
        for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(one, other)

    def test_a_tokenizer_without_end_is_refused(self):
        tokenizer = character_tokenizer(TEXT)
        tokenizer.eos_token = None
        with pytest.raises(ValueError, match="`tokenizer` must have an EOS token"):
            PackedStream([], tokenizer, 4)


class TestDatasets:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / "set").mkdir()
        for shard in range(2):
            rows = "".join(json.dumps({"body": c}) + "\n" for c in "abcdefghijkl"[shard::2])
            (tmp_path / "set" / f"train{shard}.jsonl").write_text(rows, encoding="utf-8")
        return tmp_path / "set"

    @pytest.mark.parametrize("streaming", [False, True])
    def test_by_name(self, folder: Path, streaming: bool):
        tokenizer = character_tokenizer("abcdefghijkl")
        source = load_dataset_texts(str(folder), column="body", streaming=streaming)
        stream = PackedStream(source, tokenizer, 4)
        texts = [tokenizer.decode(row["input_ids"]) for row in stream]
        end = tokenizer.eos_token
        assert texts == [f"{a}{end}{b}{end}" for a, b in ("ac", "eg", "ik", "bd", "fh", "jl")]
        if not streaming:
            packed = pack_to_disk(stream)
            assert [tokenizer.decode(row["input_ids"]) for row in packed] == texts
            assert packed.cache_files  # memory-mapped

    def test_workers_read_shards_of_their_own(self, folder: Path):
        tokenizer = character_tokenizer("abcdefghijkl")
        source = load_dataset_texts(str(folder), column="body", streaming=True)
        loader = DataLoader(PackedStream(source, tokenizer, 2), num_workers=2)
        assert sorted(tokenizer.decode(row["input_ids"][0, 0]) for row in loader) == list("abcdefghijkl")

    def test_a_shuffled_stream_differs_by_epoch(self, folder: Path):
        tokenizer = character_tokenizer("abcdefghijkl")
        source = load_dataset_texts(str(folder), column="body", streaming=True, shuffle_buffer=12, seed=1)
        stream = PackedStream(source, tokenizer, 2)
        epochs = []
        for epoch in (0, 1, 0):
            stream.set_epoch(epoch)
            epochs.append("".join(tokenizer.decode(row["input_ids"][0]) for row in stream))
        assert epochs[0] == epochs[2] != epochs[1]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list("abcdefghijkl")

    def test_a_missing_library_is_named(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(__import__("sys").modules, "datasets", None)
        with pytest.raises(ImportError, match="pip install datasets"):
            load_dataset_texts("anything")


class TestDocumentBoundaries:
    def test_documents_end_with_their_end(self):
        ids = torch.tensor([[5, 9, 9, 6, 7, 9], [9, 1, 2, 3, 4, 5]])
        assert number_documents(ids, 9).tolist() == [[1, 1, 2, 3, 3, 3], [1, 2, 2, 2, 2, 2]]

    def test_padding_sees_padding_alone(self):
        mask = document_attention_mask(torch.tensor([[1, 2, 2, 2]]), torch.tensor([[1, 1, 1, 0]]))
        assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("restart", [False, True])
    def test_a_packed_block_equals_its_documents_apart(self, make_model, attention: str, restart: bool):
        """Also where the positions go on: rotary ones are relative. Without the mask the logits differ."""
        model = make_model(vocab_size=12, mask_token_id=11, num_hidden_layers=2)
        model.set_attn_implementation(attention)
        documents = [[3, 11, 5, 9], [11, 9], [1, 2, 11, 11, 6, 9]]
        packed = torch.tensor([sum(documents, [])])
        clean = torch.tensor([[3, 4, 5, 9, 8, 9, 1, 2, 3, 4, 6, 9]])
        mask = document_attention_mask(number_documents(clean, 9))
        positions = torch.cat([torch.arange(len(d)) for d in documents])[None] if restart else None
        with torch.no_grad():
            together = model(packed, attention_mask=mask, position_ids=positions).logits[0]
            apart = torch.cat([model(torch.tensor([d])).logits[0] for d in documents])
            unbounded = model(packed).logits[0]
            kept = model(packed, attention_mask=mask, logits_to_keep=packed == 11).logits
        real = [i for i in range(12) if i != 11]
        assert torch.allclose(together[:, real], apart[:, real], atol=2e-6)
        assert torch.allclose(kept[:, real], apart[packed[0] == 11][:, real], atol=2e-6)
        assert not torch.allclose(unbounded[:, real], apart[:, real], atol=1e-2)

    def test_other_attention_refuses_the_mask(self, make_model):
        model = make_model()
        model.config._attn_implementation = "flex_attention"
        with pytest.raises(ValueError, match="4-D `attention_mask` needs an attention implementation in .*'flex_att"):
            model(torch.zeros(1, 2, dtype=torch.long), attention_mask=torch.ones(1, 1, 2, 2, dtype=torch.bool))

    @pytest.mark.parametrize("padded", [False, True])
    def test_the_trainer_keeps_documents_apart(self, make_model, tmp_path: Path, monkeypatch, padded: bool):
        """The cross-entropy at the corruption that was drawn, against the documents run one by one."""
        model = make_model(vocab_size=12, mask_token_id=11).train()
        documents = [[3, 4, 5, 9], [8, 9], [1, 2, 3, 4, 6, 9]]
        examples = [{"input_ids": sum(documents, [])}]
        if padded:
            examples.append({"input_ids": [7, 9]})
        batch = MaskedDiffusionCollator(pad_token_id=0, document_end_id=9)(examples)
        trainer = RADDTrainer(model, RADDTrainingArguments(str(tmp_path), loss_type="ao", use_cpu=True, report_to=[]))
        draws = []

        def spy(*args, **kwargs):
            draws.append(corrupt(*args, **kwargs))
            return draws[-1]

        monkeypatch.setattr("radd_hf.losses.corrupt", spy)
        _, terms = trainer.compute_loss(model, batch, return_outputs=True)
        (drawn,) = draws
        ids = batch["input_ids"]
        assert terms.length.tolist() == ([12, 2] if padded else [12])
        nll, start = 0.0, 0
        for document in documents:
            part = slice(start, start + len(document))
            noisy, masked = drawn.noisy_ids[:1, part], drawn.masked[0, part]
            log_probs = model(noisy).logits[0].log_softmax(-1)
            nll -= log_probs[masked, ids[0, part][masked]].sum().item()
            start += len(document)
        assert terms.nll[0].item() == pytest.approx(nll, rel=1e-5)


class TestCollator:
    @pytest.mark.parametrize("loss_type", LOSS_TYPES)
    def test_some_ids_are_never_masked(self, loss_type: str):
        """10,000 rows of 6 tokens, 40 % of them of ids 2 and 3: never corrupted, and no part of L."""
        ids = torch.randint(0, 5, (10_000, 6), generator=torch.Generator().manual_seed(0))
        batch = MaskedDiffusionCollator(never_mask_ids=[2, 3])([{"input_ids": row} for row in ids])
        kept = (ids == 2) | (ids == 3)
        maskable = maskable_positions(ids, None, batch["loss_mask"])
        assert torch.equal(maskable, ~kept)
        drawn = corrupt(
            ids,
            loss_type,
            5,
            maskable,
            noise_schedule=get_noise_schedule("log_linear"),
            generator=torch.Generator().manual_seed(1),
        )
        assert torch.equal(drawn.noisy_ids[kept], ids[kept]) and not bool(drawn.masked[kept].any())
        assert bool(drawn.masked[~kept].any()) and torch.equal(drawn.length, (~kept).sum(-1))

    def test_never_masked_ids_join_the_context(self):
        collate = MaskedDiffusionCollator(never_mask_ids=[4])
        batch = collate([{"input_ids": [1, 4, 2], "loss_mask": [0, 1, 1]}, {"input_ids": [4]}])
        assert batch["loss_mask"].tolist() == [[False, False, True], [False, False, False]]


class TestPairs:
    ROWS = [{"prompt": "ab", "completion": "cde"}, {"prompt": "", "completion": "e"}]

    def test_the_completion_and_its_end_are_scored(self):
        tokenizer = character_tokenizer("abcde")
        examples = prompt_completion_examples(self.ROWS, tokenizer, 8)
        end = tokenizer.eos_token_id
        assert examples == [
            {"input_ids": [0, 1, 2, 3, 4, end], "loss_mask": [0, 0, 1, 1, 1, 1]},
            {"input_ids": [4, end], "loss_mask": [1, 1]},
        ]
        batch = MaskedDiffusionCollator(tokenizer.pad_token_id)(examples)
        model = RADDForMaskedDiffusion(
            RADDConfig(
                vocab_size=len(tokenizer),
                mask_token_id=tokenizer.mask_token_id,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
            )
        )
        terms = diffusion_loss_terms(model, **batch, loss_type="ao", generator=torch.Generator())
        assert terms.length.tolist() == [4, 2]

    def test_long_pairs_lose_their_start(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
        tokenizer = character_tokenizer("abcde")
        monkeypatch.setattr("radd_hf.corpora.logger", __import__("logging").getLogger("test"))
        examples = prompt_completion_examples(self.ROWS, tokenizer, 5)
        assert examples[0] == {"input_ids": [1, 2, 3, 4, tokenizer.eos_token_id], "loss_mask": [0, 1, 1, 1, 1]}
        assert "1 of 2 pairs were longer than 5 tokens" in caplog.text
        assert prompt_completion_examples(self.ROWS, tokenizer, 2)[0] == {"input_ids": [2, 3], "loss_mask": [1, 1]}

    def test_errors_name_the_row(self, tmp_path: Path):
        tokenizer = character_tokenizer("abcde")
        with pytest.raises(ValueError, match="Row 1 must be a dict with the text 'completion', got"):
            prompt_completion_examples([self.ROWS[0], {"prompt": "a"}], tokenizer, 8)
        with pytest.raises(ValueError, match="`rows` must hold at least one pair"):
            prompt_completion_examples([], tokenizer, 8)
        (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n{"a": \n', encoding="utf-8")
        with pytest.raises(ValueError, match="Line 3 of .*x.jsonl' must be a JSON object"):
            read_json_lines(tmp_path / "x.jsonl")


class TestTokenizers:
    def test_a_mask_token_is_added_once(self):
        tokenizer = character_tokenizer("ab")
        assert add_mask_token(tokenizer) == 0
        tokenizer._special_tokens_map["mask_token"] = None
        tokenizer.pad_token = None
        assert tokenizer.mask_token is None
        add_mask_token(tokenizer)
        assert tokenizer.mask_token == "[MASK]" and tokenizer.pad_token == tokenizer.eos_token

    def test_another_models_tokenizer_is_refused(self):
        tokenizer = character_tokenizer("ab")  # a, b, <unk>, <|endoftext|>, [MASK]
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        check_tokenizer(tokenizer, RADDConfig(vocab_size=5, mask_token_id=4, **sizes))
        with pytest.raises(ValueError, match="mask token must be the model's, id 5, got '\\[MASK\\]' with id 4"):
            check_tokenizer(tokenizer, RADDConfig(vocab_size=6, **sizes))
        with pytest.raises(ValueError, match="at most the model's vocab_size=4 tokens, got 5"):
            check_tokenizer(tokenizer, _Sizes())


class _Sizes:
    """The config of a backbone without a mask token of its own."""

    vocab_size = 4


def test_a_plain_trainer_trains_through_labels(tmp_path: Path):
    """transformers' Trainer and masked-LM collator: the loss falls from ln(V) by a tenth at least within 60 steps."""
    tokenizer = character_tokenizer(TEXT)
    blocks = pack_blocks([tokenizer(TEXT * 40)["input_ids"]], 16)
    torch.manual_seed(0)
    config = RADDConfig(
        vocab_size=len(tokenizer),
        mask_token_id=tokenizer.mask_token_id,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.1,
    )
    args = TrainingArguments(
        str(tmp_path),
        max_steps=60,
        learning_rate=1e-2,
        logging_steps=10,
        per_device_train_batch_size=16,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        RADDForMaskedDiffusion(config),
        args,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.3),
        train_dataset=BlockDataset(blocks[:-20]),
        eval_dataset=BlockDataset(blocks[-20:]),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert before == pytest.approx(torch.log(torch.tensor(len(tokenizer) - 1.0)).item(), rel=1e-3)
    assert after < 0.9 * before
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
