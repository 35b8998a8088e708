"""The mask token of a tokenizer: GPT-2's own where its files are, and a small byte-level one everywhere."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from radd_hf import RADDConfig
from radd_hf.tokenization import add_mask_token, check_tokenizer, load_tokenizer

GPT2_FILES = Path(__file__).parents[2] / "shared" / "data" / "gpt2"
TEXTS = [
    "",
    " ",
    "mask",
    "[ MASK ]",
    "[mask]",
    "MASK]",
    "[MASK",
    "a\n[M]ASK",
    "naïve 🙂 \x00",
    "<|endoftext|>",
    "[[MASK ]]",
]


def small_bpe() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    backend.train_from_iterator(["the mask of the red death [ MASK ] " * 3], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@pytest.fixture(params=["gpt2", "small"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    if request.param == "small":
        return small_bpe()
    if not GPT2_FILES.is_dir():
        pytest.skip("GPT-2's files are not here")
    return load_tokenizer(GPT2_FILES)


def test_gpt2_gets_id_50257(tokenizer: PreTrainedTokenizerBase):
    count = len(tokenizer)
    assert add_mask_token(tokenizer) is tokenizer
    assert (tokenizer.mask_token, tokenizer.mask_token_id, len(tokenizer)) == ("[MASK]", count, count + 1)
    assert tokenizer.mask_token_id in tokenizer.all_special_ids
    assert tokenizer.pad_token == "<|endoftext|>"
    if isinstance(tokenizer, GPT2Tokenizer):
        config = RADDConfig.small()
        assert tokenizer.mask_token_id == 50257 == config.mask_token_id == config.vocab_size - 1
        assert tokenizer("Hello world")["input_ids"] == [15496, 995]
        check_tokenizer(tokenizer, config)


def test_text_never_becomes_the_mask_unless_it_spells_it(tokenizer: PreTrainedTokenizerBase):
    before = [tokenizer(text)["input_ids"] for text in TEXTS]
    mask = add_mask_token(tokenizer).mask_token_id
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == before
    assert not any(mask in ids for ids in before)
    ids = tokenizer("the [MASK] of[MASK] the")["input_ids"]
    assert ids.count(mask) == 2
    plain = tokenizer("the of the")["input_ids"]
    assert [i for i in ids if i != mask] == plain  # the space before a mask is the mask's
    assert tokenizer.decode(ids) == "the[MASK] of[MASK] the"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the of the"


def test_a_mask_without_its_space(tokenizer: PreTrainedTokenizerBase):
    ids = add_mask_token(tokenizer, lstrip=False)("the [MASK]")["input_ids"]
    assert tokenizer.decode(ids) == "the [MASK]" and len(ids) == len(tokenizer("the ")["input_ids"]) + 1


@pytest.mark.parametrize("parse_mask", [True, False])
def test_it_survives_saving(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, parse_mask: bool):
    add_mask_token(tokenizer, parse_mask=parse_mask).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for one in (tokenizer, again):
        assert (one.mask_token_id, len(one), one.pad_token) == (
            tokenizer.mask_token_id,
            len(tokenizer),
            "<|endoftext|>",
        )
        assert one.mask_token_id in one.all_special_ids
        ids = one("a [MASK] b")["input_ids"]
        assert (one.mask_token_id in ids) == parse_mask
        assert one.decode(ids) == ("a[MASK] b" if parse_mask else "a [MASK] b")
        literal = one("a [MASK] b", split_special_tokens=True)["input_ids"]
        assert one.mask_token_id not in literal and one.decode(literal) == "a [MASK] b"
        assert one.mask_token_id in one("a [MASK] b", split_special_tokens=False)["input_ids"]
    assert add_mask_token(again).mask_token_id == tokenizer.mask_token_id and len(again) == len(tokenizer)


def test_a_mask_token_of_its_own_is_kept():
    tokenizer = small_bpe()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert add_mask_token(tokenizer).mask_token == "<mask>" and "[MASK]" not in tokenizer.get_vocab()


def test_refusals():
    with pytest.raises(ValueError, match="`tokenizer` must be a tokenizer of transformers, got str"):
        add_mask_token("gpt2")
    with pytest.raises(ValueError, match="`mask_token` must be a string that is not blank, got ' '"):
        add_mask_token(small_bpe(), " ")
    tokenizer = small_bpe()
    with pytest.raises(ValueError, match="`mask_token` must be a new token, got 'm', which is token"):
        add_mask_token(tokenizer, "m")
    assert tokenizer.mask_token is None
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<|endoftext|>")
    with pytest.raises(ValueError, match="`tokenizer` must have tokens, got .* with 1"):
        add_mask_token(empty)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 400}, r"`tokenizer.mask_token_id` must be the config's mask_token_id=399, got \d+"),
        ({"mask_token_id": 0}, r"`tokenizer.mask_token_id` must be the config's mask_token_id=0, got \d+"),
    ],
)
def test_a_config_that_does_not_fit(fields: dict, message: str):
    tokenizer = small_bpe()
    config = RADDConfig(**{"vocab_size": len(tokenizer) + 1, **fields})
    with pytest.raises(ValueError, match=message):
        add_mask_token(tokenizer, config=config)


def test_a_config_with_too_few_rows():
    tokenizer = add_mask_token(small_bpe())
    tokenizer.add_tokens(["new"])
    config = RADDConfig(vocab_size=len(tokenizer) - 1)
    with pytest.raises(ValueError, match=rf"at most the config's vocab_size={len(tokenizer) - 1} tokens, got"):
        check_tokenizer(tokenizer, config)
