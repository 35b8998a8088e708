"""The zero-shot protocol: detokenizers, packing, counts on the real files (skipped where they are absent)."""

import json
from pathlib import Path

import pytest
from transformers import GPT2TokenizerFast

from radd_hf.data import bpe_tokenizer
from radd_hf.zero_shot import ZERO_SHOT_SETS, build_blocks, load_rows, original_batches, pack_documents, text_size

DATA = Path(__file__).parents[1] / ".." / "shared" / "data"


@pytest.fixture(scope="module")
def tokenizer():
    return bpe_tokenizer(["the cat sat on the mat, \u00e9l\u00e8ve\n"] * 3, vocab_size=300)


@pytest.mark.parametrize(
    ("name", "stored", "restored"),
    [
        ("wikitext2", " = = Early life = = \n", " == Early life ==\n"),
        ("wikitext2", ' a guest @-@ role , in 1 @,@ 200 @.@ 5 . It \'s " big " ( red ) .', None),
        ("wikitext103", " Is it ? No ! It : is ; so . ", " Is it? No! It: is; so. "),
        ("ptb", "it 's N N and $ N of the <unk> 's boys ' toys do n't \\/ do", None),
        ("lm1b", 'He said , " It \'s 5 . " ( yes ) at http : / / x in May . Really ?', None),
        ("lambada", " \u201cI know,\u201d he said ", '\n"I know," he said'),
    ],
)
def test_detokenizers(name: str, stored: str, restored: str | None):
    written_out = {
        "wikitext2": ' a guest-role, in 1,200.5. It\'s "big" (red) .',
        "ptb": "it's 1 1 and $1 of the ?'s boys' toys don't / do",
        "lm1b": 'He said, "It\'s 5." (yes) at http://x in May. Really?',
    }
    assert ZERO_SHOT_SETS[name].detokenize(stored) == (restored or written_out[name])


def test_blocks_hold_the_text_and_an_end_after_each_row(tokenizer, tmp_path: Path):
    rows = ["the cat", "", "sat on the mat", "\u00e9l\u00e8ve sat"]
    path = tmp_path / "rows.txt"
    path.write_text("\r\n".join(rows) + "\n", encoding="utf-8", newline="")
    assert load_rows("text", path=path) == rows
    eos = tokenizer.eos_token_id
    ids = [i for row in rows for i in (*tokenizer(row)["input_ids"], eos)]
    dropped = build_blocks("text", tokenizer, path=path, block_size=4)
    assert dropped.input_ids.flatten().tolist() == ids[: len(ids) // 4 * 4] and dropped.num_tokens == len(ids)
    assert bool(dropped.attention_mask.all()) and dropped.num_rows == 4
    padded = build_blocks("text", tokenizer, path=path, block_size=100, last_block="pad")
    assert padded.input_ids.shape == (1, 100) and padded.attention_mask.sum() == len(ids)
    assert padded.input_ids[0, : len(ids)].tolist() == ids
    assert padded.num_bytes == sum(len(row.encode()) for row in rows)
    assert padded.num_words == sum(len(row.split()) for row in rows)
    assert len(padded.sequences()) == 1 and padded.settings["last_block"] == "pad"
    few = build_blocks("text", tokenizer, path=path, block_size=4).first(1, tokenizer)
    assert few.input_ids.shape == (1, 4) and few.num_bytes == text_size(tokenizer, ids[:4])[0]


def test_a_set_shorter_than_a_block_is_refused(tokenizer, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "the cat"}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"at least one block of 64 tokens, got \d tokens: .*last_block='pad'"):
        build_blocks("text", tokenizer, path=path, block_size=64)


def test_original_packing_drops_the_rest_of_each_batch():
    """2,005 rows of one token: 8 shares of 251 or 250; blocks of 100 tokens with EOS keep 500 of 502 and of 500."""
    batches = original_batches(list(range(2005)))
    assert [len(batch) for batch in batches] == [251] * 5 + [250] * 3
    assert [row for batch in batches for row in batch] == list(range(2005))
    assert [len(b) for b in original_batches(range(9000))] == [1000, 125] * 8
    ids, mask = pack_documents([[7]] * 2005, 100, 0, original=True)
    assert len(ids) == 5 * 8 and bool(mask.all())
    assert len(pack_documents([[7]] * 2005, 100, 0)[0]) == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "wiki"}, "`name` must be one of .*'lambada'.* got 'wiki'"),
        ({"last_block": "keep"}, r"`last_block` must be one of \['drop', 'pad'\], got 'keep'"),
        ({"packing": "greedy"}, "`packing` must be one of .* got 'greedy'"),
        ({"block_size": 0}, "`block_size` must be a positive integer, got 0"),
        ({"name": "ptb"}, "`path` must hold a string 'sentence' in each line"),
        ({"path": None}, "`path` must be given for the data set 'text'"),
    ],
)
def test_bad_arguments_are_named(tokenizer, tmp_path: Path, options: dict, message: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "the cat"}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        build_blocks(**{"name": "text", "tokenizer": tokenizer, "path": path, "block_size": 2, **options})


def test_a_tokenizer_without_an_end_is_refused(tokenizer, tmp_path: Path):
    other = bpe_tokenizer(["a"], vocab_size=300)
    other.eos_token = None
    with pytest.raises(ValueError, match="`tokenizer` must have an EOS token"):
        build_blocks("text", other, path=tmp_path / "none.txt")


# What the paper's code reads; recorded once, so that a change of a name or split is a decision.
def test_sets_are_those_of_the_paper():
    assert list(ZERO_SHOT_SETS)[:5] == ["lambada", "wikitext2", "ptb", "wikitext103", "lm1b"]
    found = ZERO_SHOT_SETS["wikitext2"]
    assert (found.split, found.original_split) == ("test", "train")
    assert all(one.split == one.original_split for name, one in ZERO_SHOT_SETS.items() if name != "wikitext2")


def test_hub_sets_are_asked_for_by_name_and_split(monkeypatch: pytest.MonkeyPatch):
    """What `datasets.load_dataset` is asked, by a stand-in that has the column and nothing else."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name, config, *, revision, split):
        asked.append((name, config, revision, split))
        column = "sentence" if "ptb" in name else "text"
        return datasets.Dataset.from_dict({column: ["a", "b"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in list(ZERO_SHOT_SETS)[:5]:
        assert load_rows(name) == ["a", "b"]
    load_rows("wikitext2", original_split=True)
    assert asked[1] == ("Salesforce/wikitext", "wikitext-2-raw-v1", None, "test")
    assert asked[-1] == ("Salesforce/wikitext", "wikitext-2-raw-v1", None, "train")
    assert asked[2][2] == asked[4][2] == "refs/convert/parquet"


# Counts on the real files


@pytest.fixture(scope="module")
def gpt2():
    folder = DATA / "gpt2"
    if not folder.is_dir():
        pytest.skip("there is no ../shared/data/gpt2")
    tokenizer = GPT2TokenizerFast(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    assert len(tokenizer) == 50257 and tokenizer("Hello world")["input_ids"] == [15496, 995]
    return tokenizer


@pytest.mark.parametrize(
    ("name", "file", "rows", "tokens", "blocks", "original_blocks"),
    [
        ("lambada", "lambada_test.jsonl", 5153, 428_743, 418, 414),
        ("wikitext2", "wikitext2_raw_test.txt", 2891, 273_329, 266, 262),
    ],
)
def test_counts_on_the_real_files(
    gpt2, name: str, file: str, rows: int, tokens: int, blocks: int, original_blocks: int
):
    path = DATA / "zero_shot" / file
    if not path.is_file():
        pytest.skip("there is no ../shared/data/zero_shot")
    found = build_blocks(name, gpt2, path=path)
    assert (found.num_rows, found.num_tokens, len(found.input_ids)) == (rows, tokens, blocks)
    assert len(build_blocks(name, gpt2, path=path, packing="original").input_ids) == original_blocks
