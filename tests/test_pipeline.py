"""Text in, text out: what the infilling pipeline keeps, fills, counts and refuses; fill-mask on the same model."""

import itertools
import warnings

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast, pipeline
from transformers.utils import logging

from radd_hf import InfillingPipeline, RADDConfig, RADDForMaskedDiffusion, RADDGenerationConfig, diffusion_loss
from radd_hf.pipeline_radd import candidate_seed

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "|")
TEXTS = [
    "The capital of [MASK] is Paris [MASK]",
    "The [MASK]",
    "[MASK] [MASK] [MASK] quick brown fox",
    "a b c d e f g h [MASK]",
    "[MASK] fox",
]


def byte_tokenizer(**special) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2's: spells any text, "[MASK]" included."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["The capital of France is Paris. The quick brown fox jumps over"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "<eos>", **special})


def masked_byte_tokenizer(**special) -> PreTrainedTokenizerFast:
    return byte_tokenizer(mask_token=AddedToken("[MASK]", lstrip=True, special=True, normalized=False), **special)


def word_tokenizer(pre_tokenizer=None) -> PreTrainedTokenizerFast:
    """One id a word: small enough to enumerate."""
    vocab = {word: i for i, word in enumerate((*WORDS, "[UNK]", "[MASK]"))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", mask_token="[MASK]")


def tiny_model(tokenizer: PreTrainedTokenizerFast, **overrides) -> RADDForMaskedDiffusion:
    """Random weights large enough that tokens depend on each other strongly."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 48}
    torch.manual_seed(0)
    config = RADDConfig(
        **{
            "vocab_size": len(tokenizer),
            "mask_token_id": tokenizer.mask_token_id,
            "initializer_range": 0.2,
            **sizes,
            **overrides,
        }
    )
    model = RADDForMaskedDiffusion(config).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


@pytest.fixture(scope="module")
def pipe() -> InfillingPipeline:
    tokenizer = masked_byte_tokenizer()
    return pipeline("radd-infilling", model=tiny_model(tokenizer), tokenizer=tokenizer, device="cpu")


@pytest.fixture(scope="module")
def word_pipe() -> InfillingPipeline:
    tokenizer = word_tokenizer()
    return pipeline("radd-infilling", model=tiny_model(tokenizer), tokenizer=tokenizer, device="cpu")


@pytest.fixture
def spy(monkeypatch):
    """Call a pipeline and get (answer, ids given, ids returned) of its one batch."""

    def call(pipe, *args, **kwargs):
        seen, forward = {}, pipe._forward

        def recording(batch, **params):
            seen["batch"], seen["outputs"] = batch, forward(batch, **params)
            return seen["outputs"]

        with monkeypatch.context() as patch:
            patch.setattr(pipe, "_forward", recording)
            answer = pipe(*args, **kwargs)
        return answer, seen["batch"], seen["outputs"]

    return call


def assert_same(first, second):
    """Answers equal, scores to rounding."""
    assert type(first) is type(second)
    if isinstance(first, list):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first.keys() == second.keys()
        assert {**first, "score": 0} == {**second, "score": 0}
        assert first["score"] == pytest.approx(second["score"], abs=1e-4)


def test_it_is_the_registered_task(pipe):
    assert type(pipe) is InfillingPipeline
    assert "InfillingPipeline" in repr(pipe)


def test_given_tokens_are_bit_identical_and_masks_are_filled(pipe, spy):
    answer, batch, outputs = spy(pipe, TEXTS[0], seed=3)
    ids, filled = batch["input_ids"][0], outputs["sequences"][0, 0]
    assert ids.tolist() == pipe.tokenizer(TEXTS[0])["input_ids"]
    masked = ids == pipe.tokenizer.mask_token_id
    assert masked.sum() == 2
    assert torch.equal(filled[~masked], ids[~masked])
    assert not (filled == pipe.tokenizer.mask_token_id).any()
    assert set(answer) == {"text", "infills", "score", "nfe"}
    assert len(answer["infills"]) == answer["nfe"] == 2
    assert answer["text"].startswith("The capital of") and " is Paris" in answer["text"]
    assert "[MASK]" not in answer["text"]
    assert answer["text"] == pipe.tokenizer.decode(filled)
    assert answer["infills"] == [pipe.tokenizer.decode([i]) for i in filled[masked].tolist()]


def test_special_tokens_of_the_user_stay(pipe):
    text = "fox<eos>The  quick [MASK]<eos> ,a ."
    filled = pipe(text, seed=0)["text"]
    assert filled.startswith("fox<eos>The  quick") and filled.endswith("<eos> ,a .")


@pytest.mark.parametrize("parse_mask", [True, False])
def test_prefix_suffix_length_inserts_exactly_n_tokens(pipe, spy, parse_mask):
    for n in (1, 4):
        answer, batch, outputs = spy(pipe, prefix="The quick", suffix=" fox", length=n, seed=n, parse_mask=parse_mask)
        before, after = (pipe.tokenizer(part)["input_ids"] for part in ("The quick", " fox"))
        filled = outputs["sequences"][0, 0].tolist()
        assert batch["input_ids"][0].tolist() == before + [pipe.tokenizer.mask_token_id] * n + after
        assert filled[: len(before)] == before and filled[len(before) + n :] == after
        assert len(filled) == len(before) + n + len(after)
        assert len(answer["infills"]) == answer["nfe"] == n
        assert answer["text"].startswith("The quick") and answer["text"].endswith(" fox")
    assert_same(
        pipe([{"prefix": "The quick", "suffix": " fox", "length": 4}], seed=4, parse_mask=parse_mask), [answer]
    )
    assert len(pipe(prefix="The", length=3)["infills"]) == len(pipe(length=3)["infills"]) == 3


def test_one_token_a_pass_has_the_joint_law_of_both_orders_and_one_pass_has_not(word_pipe):
    """20,000 draws of two masks against enumeration; what a single pass gives must fail the same check."""
    model = word_pipe.model
    tokens = [word_pipe.tokenizer.convert_tokens_to_ids(word) for word in (*WORDS, "[UNK]")]
    text = "one [MASK] two [MASK]"
    ids = word_pipe.tokenizer(text, return_tensors="pt")["input_ids"]

    def conditional(position: int, **known: int) -> torch.Tensor:
        canvas = ids.clone()
        for place, token in known.items():
            canvas[0, int(place[1:])] = token
        with torch.no_grad():
            return model(canvas).logits[0, position].double().softmax(-1)

    first, second = conditional(1), conditional(3)
    joint = {
        (a, b): 0.5 * float(first[a] * conditional(3, p1=a)[b] + second[b] * conditional(1, p3=b)[a])
        for a, b in itertools.product(tokens, tokens)
    }
    assert sum(joint.values()) == pytest.approx(1)

    def p_value(draws: int, **options) -> float:
        candidates = word_pipe(text, num_return_sequences=draws, seed=0, **options)
        counts = dict.fromkeys(joint, 0)
        for candidate in candidates:
            assert candidate["text"].split()[::2] == ["one", "two"]
            counts[tuple(word_pipe.tokenizer.convert_tokens_to_ids(candidate["infills"]))] += 1
        cells = [(counts[pair], draws * p) for pair, p in joint.items() if draws * p >= 5]
        rare = [(counts[pair], draws * p) for pair, p in joint.items() if draws * p < 5]
        cells.append((sum(n for n, _ in rare), sum(e for _, e in rare)))
        statistic = sum((n - e) ** 2 / e for n, e in cells if e > 0)
        return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2).double(), torch.tensor(statistic / 2)))

    assert p_value(20_000) > 0.01
    assert p_value(4_000, algorithm="any_order") > 0.01
    assert p_value(4_000, num_steps=1) < 1e-6


def test_a_model_that_copies_fills_by_the_context():
    """Trained on "w x y z | w x y z": suffixes follow their prefix; with the prefix masked too they are chance."""
    tokenizer = word_tokenizer()
    model = tiny_model(
        tokenizer, hidden_size=64, initializer_range=0.02, hidden_dropout=0.0, max_position_embeddings=9
    )
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    bar = tokenizer.convert_tokens_to_ids("|")

    def batch(rows: int) -> torch.Tensor:
        words = torch.randint(8, (rows, 4), generator=generator)
        return torch.cat([words, torch.full((rows, 1), bar), words], dim=1)

    for _ in range(300):
        loss = diffusion_loss(model, batch(48), "ao", generator=generator).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    copier = InfillingPipeline(model=model, tokenizer=tokenizer, device=-1)
    prefixes = [" ".join(tokenizer.convert_ids_to_tokens(row[:4])) for row in batch(50)]
    masks = " ".join(["[MASK]"] * 4)

    def match(texts: list[str]) -> float:
        suffixes = [answer["text"].split()[5:] for answer in copier(texts, seed=0, progress_bar=False)]
        pairs = [(a, b) for s, p in zip(suffixes, prefixes, strict=True) for a, b in zip(s, p.split(), strict=True)]
        return sum(a == b for a, b in pairs) / len(pairs)

    assert match([f"{prefix} | {masks}" for prefix in prefixes]) >= 0.95
    assert match([f"{masks} | {masks}"] * 50) < 0.25  # 1/8 by chance, 200 words


def test_without_a_mask_the_text_comes_back_with_a_warning(pipe, monkeypatch):
    monkeypatch.setattr(type(pipe.model), "forward", None)
    monkeypatch.setattr(pipe.model, "_reveal_states", None)
    for text in ("No mask  here", "", " "):
        with pytest.warns(UserWarning, match="No mask in input"):
            assert pipe(text) == {"text": text, "infills": [], "score": 0.0, "nfe": 0}
    with pytest.warns(UserWarning, match=r"No mask in input\(s\) \[0, 1\]"):
        answers = pipe(["a", "b"], num_return_sequences=2)
    assert [[one["text"] for one in answer] for answer in answers] == [["a", "a"], ["b", "b"]]
    with pytest.warns(UserWarning, match="No mask"):
        assert pipe(prefix="a", suffix="b", length=0)["text"] == "ab"


def test_a_text_without_mask_among_others_changes_nothing_for_them(pipe):
    with pytest.warns(UserWarning, match=r"\[1\]"):
        answers = pipe([TEXTS[0], "none", TEXTS[2]], seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        others = pipe([TEXTS[0], TEXTS[1], TEXTS[2]], seed=5)
    assert answers[1]["text"] == "none" and answers[1]["nfe"] == 0
    assert_same([answers[0], answers[2]], [others[0], others[2]])


def test_empty_list_and_empty_string(pipe):
    assert pipe([]) == []
    assert pipe(()) == []
    assert len(pipe("", max_new_tokens=3)["infills"]) == 3


def test_lists_iterators_and_data_sets(pipe):
    class Texts(Dataset):
        def __len__(self):
            return len(TEXTS)

        def __getitem__(self, i):
            return TEXTS[i] if i < len(TEXTS) else TEXTS[99]

    expected = pipe(TEXTS, seed=2, progress_bar=False)
    assert isinstance(expected, list) and [type(answer) for answer in expected] == [dict] * len(TEXTS)
    assert_same(pipe(tuple(TEXTS), seed=2), expected)
    pulled = []
    lazy = pipe((pulled.append(text) or text for text in TEXTS), seed=2, batch_size=2)
    assert_same(next(lazy), expected[0])
    assert len(pulled) == 2, "an iterator is read a batch at a time"
    assert_same([expected[0], *lazy], expected)
    assert_same(list(pipe(Texts(), seed=2)), expected)
    assert isinstance(pipe([TEXTS[0]]), list)


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("options", [{}, {"num_steps": 2}, {"algorithm": "any_order", "order": "backward"}])
def test_batches_of_mixed_lengths_equal_single_texts(pipe, monkeypatch, padding_side, options):
    monkeypatch.setattr(pipe.tokenizer, "padding_side", padding_side)
    singles = [pipe(text, seed=10 + i, **options) for i, text in enumerate(TEXTS)]
    together = pipe(TEXTS, seed=[10 + i for i in range(len(TEXTS))], progress_bar=False, **options)
    assert_same(together, singles)
    for batch_size in (1, 2):
        assert_same(pipe(TEXTS, seed=7, batch_size=batch_size, **options), pipe(TEXTS, seed=7, **options))


def test_the_padding_mask_reaches_the_model(pipe, spy):
    answers, batch, outputs = spy(pipe, [TEXTS[0], TEXTS[4]], seed=0)
    lengths = [len(pipe.tokenizer(text)["input_ids"]) for text in (TEXTS[0], TEXTS[4])]
    assert batch["attention_mask"].sum(-1).tolist() == lengths and lengths[0] != lengths[1]
    # without it the same padded rows give other scores
    outputs = pipe.forward(
        {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])},
        options=RADDGenerationConfig(
            mask_token_id=pipe.tokenizer.mask_token_id, max_new_tokens=0, return_dict_in_generate=True
        ),
    )
    unpadded = float(outputs["log_probs"][1, 0][outputs["free"][1]].mean())
    assert abs(unpadded - answers[1]["score"]) > 1e-3


def test_padding_id_may_be_any_or_absent():
    """No pad token: eos; neither, or one outside the model's vocabulary: 0. The answers are the same."""
    plain = masked_byte_tokenizer(eos_token=None)
    model = tiny_model(plain)
    answers = []
    for special in ({"eos_token": None}, {"eos_token": "The"}, {"eos_token": None, "pad_token": "a"}):
        tokenizer = masked_byte_tokenizer(**special)
        assert tokenizer.mask_token_id == plain.mask_token_id
        answers.append(InfillingPipeline(model=model, tokenizer=tokenizer, device=-1)(TEXTS[1:], seed=1))
    assert_same(answers[1], answers[0])
    assert_same(answers[2], answers[0])
    plain.add_special_tokens({"pad_token": "<new>"})
    assert plain.pad_token_id >= model.config.vocab_size
    assert_same(InfillingPipeline(model=model, tokenizer=plain, device=-1)(TEXTS[1:], seed=1), answers[0])


def test_seeds_are_those_of_the_docstring(pipe, spy):
    ids = pipe.tokenizer(TEXTS[2], return_tensors="pt")["input_ids"]

    def generated(seed: int) -> str:
        return pipe.tokenizer.decode(pipe.model.diffusion_generate(ids, seed=seed)[0])

    assert pipe(TEXTS[2], seed=11)["text"] == generated(11)
    _, batch, outputs = spy(pipe, [TEXTS[2]] * 2, seed=11, num_return_sequences=3)
    texts = [[pipe.tokenizer.decode(row) for row in rows] for rows in outputs["sequences"]]
    assert batch["seeds"] == [[candidate_seed(11, i, j) for j in range(3)] for i in range(2)]
    assert texts == [[generated(candidate_seed(11, i, j)) for j in range(3)] for i in range(2)]
    assert len({text for row in texts for text in row}) == 6
    numbers = [candidate_seed(s, i, j) for s in range(9) for i in range(9) for j in range(9)]
    assert len(set(numbers)) == len(numbers)
    assert pipe(TEXTS, seed=[4] * len(TEXTS))[2]["text"] == pipe(TEXTS[2], seed=4)["text"]


def test_without_a_seed_torchs_generator_decides(pipe):
    torch.manual_seed(3)
    first, second = pipe(TEXTS), pipe(TEXTS)
    torch.manual_seed(3)
    assert_same(pipe(TEXTS, batch_size=2, progress_bar=False), first)
    assert [one["text"] for one in first] != [one["text"] for one in second]
    generators = [torch.Generator().manual_seed(8) for _ in range(2)]
    assert_same(pipe(TEXTS, generator=generators[0]), pipe(TEXTS, generator=generators[1]))
    with pytest.raises(ValueError, match="`seed` and `generator`"):
        pipe(TEXTS[0], seed=1, generator=generators[0])


def test_score_is_the_mean_field_log_probability_and_sorts_the_candidates(pipe):
    ids = pipe.tokenizer(TEXTS[2], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        log_probs = pipe.model(ids).logits.log_softmax(-1)[0, :3]
    for options in ({}, {"temperature": 0.3, "top_k": 4}, {"num_steps": 1}):
        candidates = pipe(TEXTS[2], num_return_sequences=8, seed=0, **options)
        assert len(candidates) == 8
        scores = [candidate["score"] for candidate in candidates]
        assert scores == sorted(scores, reverse=True) and scores[0] > scores[-1]
        for candidate in candidates:
            tokens = pipe.tokenizer(candidate["text"])["input_ids"]
            if pipe.tokenizer.decode(tokens[:3]) == "".join(candidate["infills"]) and len(tokens) == ids.shape[1]:
                expected = float(log_probs[range(3), tokens[:3]].mean())
                break
        else:
            raise AssertionError("no candidate tokenizes back to what was filled: choose another seed")
        assert candidate["score"] == pytest.approx(expected, abs=1e-4)
    greedy = pipe(TEXTS[2], do_sample=False, num_steps=1)
    assert greedy["score"] == pytest.approx(float(log_probs.max(-1).values.mean()), abs=1e-4)
    assert greedy["score"] >= candidates[0]["score"]


def test_score_costs_one_pass_a_batch_and_is_not_in_nfe(pipe, monkeypatch):
    calls, original = [], type(pipe.model)._reveal_states
    monkeypatch.setattr(
        type(pipe.model), "_reveal_states", lambda self, *args: calls.append(1) or original(self, *args)
    )
    answers = pipe([TEXTS[2], TEXTS[1]], num_return_sequences=2, seed=0)
    assert [[one["nfe"] for one in answer] for answer in answers] == [[3, 3], [1, 1]]
    assert len(calls) == 3 + 1


def test_a_quoted_mask_is_text_with_parse_mask_false(pipe, spy):
    text = "The [MASK] token: [MASK]"
    with pytest.warns(UserWarning, match="No mask"):
        assert pipe(text, parse_mask=False) == {"text": text, "infills": [], "score": 0.0, "nfe": 0}
    answer, batch, outputs = spy(pipe, text, parse_mask=False, max_new_tokens=2, seed=0)
    assert answer["text"].startswith(text) and len(answer["infills"]) == 2
    assert (batch["input_ids"] == pipe.tokenizer.mask_token_id).sum() == 2
    given = outputs["sequences"][0, 0, :-2]
    assert torch.equal(given, batch["input_ids"][0, :-2])
    answer = pipe(prefix="a [MASK]", suffix="[MASK] b", length=1, parse_mask=False, seed=0)
    assert answer["text"].startswith("a [MASK]") and answer["text"].endswith("[MASK] b") and answer["nfe"] == 1
    # the next call parses masks again
    assert len(pipe(text, seed=0)["infills"]) == 2


def test_a_tokenizer_that_cannot_spell_the_mask_refuses(word_pipe):
    tokenizer = word_tokenizer(pre_tokenizers.WhitespaceSplit())
    pipe = InfillingPipeline(model=word_pipe.model, tokenizer=tokenizer, device=-1)
    with pytest.raises(ValueError, match="`parse_mask` must be True"):
        pipe("one [MASK] two", parse_mask=False)
    with pytest.warns(UserWarning, match="No mask"):
        assert pipe("one two", parse_mask=False)["nfe"] == 0


def test_tokens_that_the_tokenizer_adds_are_seen_by_the_model_but_not_returned(spy):
    tokenizer = masked_byte_tokenizer(bos_token="<bos>")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", bos), ("<eos>", eos)]
    )
    pipe = InfillingPipeline(model=tiny_model(tokenizer), tokenizer=tokenizer, device=-1)
    answer, batch, _ = spy(pipe, "The [MASK]", seed=0, max_new_tokens=2, suppress_tokens=[bos, eos])
    row = batch["input_ids"][0].tolist()
    assert row[0] == bos and row[-1] == eos and row[-4:-1] == [tokenizer.mask_token_id] * 3
    assert answer["text"].startswith("The") and "<bos>" not in answer["text"] and "<eos>" not in answer["text"]
    assert len(answer["infills"]) == 3
    _, batch, _ = spy(pipe, prefix="The", suffix=" fox", length=2)
    row = batch["input_ids"][0].tolist()
    assert row[0] == bos and row[-1] == eos and row.count(bos) == row.count(eos) == 1
    for text in ("The [MASK] fox", "[MASK]"):
        assert spy(pipe, text)[1]["input_ids"][0].tolist() == tokenizer(text)["input_ids"]


def test_a_text_ends_at_its_end_token(pipe):
    """User case 27: no padding in the text, the infills or the score, whatever the padding id."""
    end = pipe.tokenizer.eos_token_id
    text = "[MASK]" + " [MASK]" * 19
    options = {"algorithm": "any_order", "order": "forward", "eos_token_id": [end, 40, 41, 42, 43, 44, 45]}
    full = pipe([text] * 8, seed=3, **options)
    cut = pipe([text] * 8, seed=3, trim_at_eos=True, pad_token_id=60, batch_size=3, **options)
    assert any(len(one["infills"]) < 20 for one in cut)
    for one, whole in zip(cut, full, strict=True):
        assert one["infills"] == whole["infills"][: len(one["infills"])] and one["nfe"] == len(one["infills"])
        assert one["text"] == whole["text"][: len(one["text"])]
        assert one["text"].count(pipe.tokenizer.decode([60])) == "".join(one["infills"]).count(
            pipe.tokenizer.decode([60])
        )
    several = pipe(text, seed=3, trim_at_eos=True, num_return_sequences=6, **options)
    assert len({len(one["infills"]) for one in several}) > 1
    scores = [one["score"] for one in several]
    assert scores == sorted(scores, reverse=True) and min(scores) > -50
    tokenizer = masked_byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    closing = InfillingPipeline(model=tiny_model(tokenizer), tokenizer=tokenizer, device=-1)
    with pytest.raises(ValueError, match="`trim_at_eos` must be False: this tokenizer ends every text itself, with"):
        closing(text, trim_at_eos=True, eos_token_id=end)


def test_what_the_pipeline_cannot_do_is_said(pipe):
    for options, message in (
        ({"output_log_probs": True}, r"The pipeline sets the option\(s\) \['output_log_probs'\] itself"),
        ({"generator": 5}, "`generator` must be a torch.Generator or None, got 5"),
        ({"max_new_tokens": 10**12}, "`max_new_tokens` must fit max_position_embeddings=48, got 1000000000000"),
        ({"max_length": 10**12}, "`max_length` must fit max_position_embeddings=48"),
    ):
        with pytest.raises(ValueError, match=message):
            pipe("The [MASK]", **options)
    with pytest.raises(ValueError, match="`length` must fit max_position_embeddings=48, got 1000000000000"):
        pipe(prefix="The", length=10**12)
    order = tuple(range(12))
    both = ["The [MASK] [MASK]", "The quick brown fox [MASK]"]
    assert pipe(both, algorithm="any_order", order=order, batch_size=1, seed=0) == pipe(
        both, algorithm="any_order", order=list(order), batch_size=1, seed=0
    )
    bert = BertForMaskedLM(BertConfig(vocab_size=len(pipe.tokenizer), hidden_size=8, num_attention_heads=1))
    with pytest.raises(ValueError, match="`model` must have `diffusion_generate`, got BertForMaskedLM"):
        InfillingPipeline(model=bert, tokenizer=pipe.tokenizer, device=-1)


def test_options_reach_the_sampler(pipe, spy):
    masks = " ".join(["[MASK]"] * 12)
    assert pipe(masks, seed=0)["nfe"] == 12
    assert pipe(masks, seed=0, num_steps=1)["nfe"] == 1
    assert pipe(masks, seed=0, num_steps=5, algorithm="any_order")["nfe"] == 4
    assert pipe(masks, seed=0, num_steps=20, use_cache=False)["nfe"] == 20
    greedy = pipe(masks, seed=0, do_sample=False, num_steps=1)
    assert greedy == pipe(masks, seed=1, temperature=0.0, num_steps=1) == pipe(masks, seed=2, top_k=1, num_steps=1)
    assert greedy["text"] != pipe(masks, seed=0, num_steps=1)["text"]
    best = pipe.tokenizer(greedy["infills"][0])["input_ids"]
    _, _, outputs = spy(pipe, masks, seed=0, do_sample=False, num_steps=1, suppress_tokens=best)
    assert not torch.isin(outputs["sequences"], torch.tensor(best)).any()
    assert len(pipe("The [MASK]", max_new_tokens=3)["infills"]) == 4
    _, batch, _ = spy(pipe, ["The [MASK]", "a b c"], max_length=9)
    assert batch["input_ids"].shape == (2, 9) and batch["attention_mask"].all()
    own = RADDGenerationConfig(num_steps=1)
    assert pipe(masks, seed=0, generation_config=own) == pipe(masks, seed=0, num_steps=1)
    assert own.max_new_tokens is None and own.mask_token_id is None, "the given config was changed"


def test_the_models_generation_config_holds_and_stays(pipe, monkeypatch):
    own = RADDGenerationConfig(num_steps=1, num_return_sequences=2, return_dict_in_generate=True)
    monkeypatch.setattr(pipe.model, "generation_config", own)
    before = own.to_dict()
    answer = pipe(TEXTS[2], seed=0)
    assert [candidate["nfe"] for candidate in answer] == [1, 1]
    assert pipe(TEXTS[2], seed=0, num_steps=3, num_return_sequences=1, algorithm="any_order")["nfe"] == 3
    assert own.to_dict() == before


def test_order_counts_the_tokens_of_each_text(word_pipe, spy):
    texts = ["[MASK] one [MASK]", "[MASK] two [MASK] three four [MASK]"]
    order = [5, 2, 0]
    options = {"algorithm": "any_order", "order": order, "seed": 0}
    together = word_pipe(texts, **options)
    assert_same(word_pipe(texts, **options, batch_size=1, progress_bar=False), together)
    assert_same(word_pipe(texts, **{**options, "order": torch.tensor(order)}), together)
    assert [answer["nfe"] for answer in together] == [2, 3]
    ids = word_pipe.tokenizer(texts[1], return_tensors="pt")["input_ids"]
    expected = word_pipe.model.diffusion_generate(
        ids, algorithm="any_order", order=order, seed=candidate_seed(0, 1, 0)
    )
    assert together[1]["text"] == word_pipe.tokenizer.decode(expected[0])
    with pytest.raises(ValueError, match="`order` must have one dimension"):
        word_pipe(texts, algorithm="any_order", order=torch.tensor([order, order]))


def test_parameters_of_the_constructor_are_defaults_of_calls(pipe):
    fixed = pipeline(
        "radd-infilling", model=pipe.model, tokenizer=pipe.tokenizer, num_steps=1, seed=5, batch_size=2, device="cpu"
    )
    assert_same(fixed(TEXTS[2]), pipe(TEXTS[2], num_steps=1, seed=5))
    assert fixed(TEXTS[2], num_steps=None)["nfe"] in (1, 3)
    assert_same(fixed(TEXTS[2], seed=6), pipe(TEXTS[2], num_steps=1, seed=6))
    with pytest.raises(ValueError, match="Unknown generation option"):
        pipeline("radd-infilling", model=pipe.model, tokenizer=pipe.tokenizer, num_stepz=1)


def test_dropout_is_off_and_the_mode_is_kept(pipe):
    expected = pipe(TEXTS, seed=1, progress_bar=False)
    pipe.model.config.hidden_dropout, modules = 0.5, [m for m in pipe.model.modules() if type(m) is torch.nn.Dropout]
    rates = [module.p for module in modules]
    try:
        for module in modules:
            module.p = 0.5
        pipe.model.train()
        assert_same(pipe(TEXTS, seed=1, progress_bar=False), expected)
        assert pipe.model.training and all(module.training for module in modules) and modules
    finally:
        for module, rate in zip(modules, rates, strict=True):
            module.p = rate
        pipe.model.eval()


@pytest.mark.parametrize(
    ("texts", "options", "shown"),
    [
        (TEXTS[0], {}, None),
        (TEXTS, {}, None),
        (TEXTS, {"batch_size": 2}, "Infilling"),
        (TEXTS, {"batch_size": 2, "progress_bar": False}, None),
        (TEXTS, {"progress_bar": True}, "Sampling"),
        ("[MASK]" * 40, {}, "Sampling"),
        ("[MASK]" * 40, {"num_steps": 2}, None),
        ("[MASK]" * 40, {"progress_bar": False}, None),
    ],
)
def test_progress_bar_for_long_work(pipe, capsys, texts, options, shown):
    logging.enable_progress_bar()
    capsys.readouterr()
    pipe(texts, seed=0, **options)
    error = capsys.readouterr().err
    assert {name for name in ("Infilling", "Sampling") if name in error} == ({shown} if shown else set())


def test_a_streamer_gets_the_text(pipe):
    class Recorder:
        def __init__(self):
            self.ids, self.ended = [], False

        def put(self, value):
            self.ids += value.tolist()

        def end(self):
            self.ended = True

    recorder = Recorder()
    answer = pipe(TEXTS[0], seed=0, streamer=recorder)
    assert recorder.ended and pipe.tokenizer.decode(recorder.ids) == answer["text"]


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((TEXTS[0],), {"num_stepz": 3}, r"Unknown generation option\(s\) \['num_stepz'\]"),
        ((TEXTS[0],), {"algorithm": "gillespie"}, "`algorithm` must be one of"),
        ((TEXTS[0],), {"num_steps": 0}, "num_steps"),
        ((TEXTS[0],), {"num_return_sequences": 0}, "`num_return_sequences`"),
        ((TEXTS[0],), {"mask_token_id": 3}, "sets the option.* itself"),
        ((TEXTS[0],), {"return_dict_in_generate": True}, "sets the option.* itself"),
        ((TEXTS[0],), {"parse_mask": 1}, "`parse_mask` must be True or False"),
        ((TEXTS[0],), {"progress_bar": "yes"}, "`progress_bar` must be None, True or False"),
        ((TEXTS[0],), {"batch_size": 0}, "`batch_size` must be a positive integer"),
        ((TEXTS[0],), {"seed": 1.5}, "`seed` must be an integer"),
        ((TEXTS,), {"seed": [1, 2]}, "`seed` must be an integer or a list of 5"),
        ((TEXTS[0],), {"prefix": "a", "length": 1}, "`inputs` must be None"),
        ((), {}, "`inputs` must be a text"),
        ((3,), {}, "`inputs` must be a text"),
        (([3],), {}, "`inputs` must hold texts or dicts"),
        ((), {"prefix": "a", "suffix": "b"}, "`length` must be an integer"),
        ((), {"prefix": "a", "length": -1}, "`length` must be an integer"),
        ((), {"prefix": "a", "length": True}, "`length` must be an integer"),
        ((), {"prefix": 3, "length": 1}, "`prefix` must be a text"),
        (({"prefix": "a", "lenght": 1},), {}, "lenght"),
        (("[MASK]" * 49,), {}, "max_position_embeddings=48, got 49"),
        ((TEXTS[0],), {"max_new_tokens": 48}, "max_position_embeddings=48"),
        ((TEXTS[0],), {"max_length": 2}, "`max_length` must be at least"),
        ((), {"prefix": "a", "length": 48}, "max_position_embeddings=48, got 49"),
    ],
)
def test_bad_calls(pipe, args, options, message):
    with pytest.raises(ValueError, match=message):
        pipe(*args, **options)


def test_a_list_is_checked_before_any_of_it_is_run(pipe, monkeypatch):
    monkeypatch.setattr(pipe, "_forward", lambda *args, **kwargs: pytest.fail("ran before the check"))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        pipe([TEXTS[0], "[MASK]" * 60], batch_size=1)
    assert len(pipe.tokenizer("[MASK]" * 48)["input_ids"]) == 48


def test_the_longest_text_fits(pipe):
    assert pipe("[MASK]" * 48, num_steps=1)["nfe"] == 1


def test_bad_tokenizers(pipe):
    model = pipe.model
    with pytest.raises(ValueError, match="`tokenizer` must have a mask token"):
        InfillingPipeline(model=model, tokenizer=byte_tokenizer(), device=-1)
    with pytest.raises(ValueError, match="`tokenizer` must have a mask token"):
        InfillingPipeline(model=model, device=-1)
    other = masked_byte_tokenizer(bos_token="<bos>")
    with pytest.raises(ValueError, match=f"mask_token_id={model.config.mask_token_id}, got {other.mask_token_id}"):
        InfillingPipeline(model=model, tokenizer=other, device=-1)
    larger = masked_byte_tokenizer()
    larger.add_tokens(["<extra>"])
    with pytest.raises(ValueError, match=f"vocab_size={model.config.vocab_size}, got {model.config.vocab_size}"):
        InfillingPipeline(model=model, tokenizer=larger, device=-1)("<extra> [MASK]")


def test_fill_mask_pipeline(pipe):
    vocab = len(pipe.tokenizer)
    fill = pipeline("fill-mask", model=pipe.model, tokenizer=pipe.tokenizer, device="cpu", top_k=vocab)
    answers = fill(["The [MASK] fox", "The capital of [MASK]"])
    assert len(answers) == 2
    for answer in answers:
        assert len(answer) == vocab
        assert sum(one["score"] for one in answer) == pytest.approx(1, abs=1e-5)
        scores = {one["token"]: one["score"] for one in answer}
        assert scores[pipe.tokenizer.mask_token_id] == 0
        assert sum(score > 0 for score in scores.values()) == vocab - 1
    two = fill("The [MASK] [MASK] fox", top_k=3)
    assert [len(one) for one in two] == [3, 3]
