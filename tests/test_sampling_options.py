"""Each sampling option by itself, bad words, ending early, compilation and memory."""

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import reference as ref
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CompileConfig,
    LogitsProcessor,
    LogitsProcessorList,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

import radd_hf.generation_radd as generation_radd
from radd_hf import RADDConfig, RADDForMaskedDiffusion, RADDGenerationConfig, RADDGenerationOutput, diffusion_generate
from radd_hf.generation_config_radd import GENERATION_OPTIONS
from radd_hf.token_draw_radd import completing_tokens

M = 4  # mask id of `wide_model`
Builder = Callable[..., RADDForMaskedDiffusion]


def run(model: nn.Module, ids: torch.LongTensor | None = None, **options) -> RADDGenerationOutput:
    """A call with full output; eight rows of eight masks unless told otherwise."""
    if ids is None and "batch_size" not in options:
        ids = torch.full((8, 8), M)
    return model.diffusion_generate(ids, **{"seed": 0, "return_dict_in_generate": True, **options})


# Every option by itself


def differs(name: str) -> Callable[[RADDGenerationOutput, RADDGenerationOutput], bool]:
    """Whether that part of the output is another one."""
    return lambda off, on: getattr(off, name).tolist() != getattr(on, name).tolist()


def becomes(name: str, value: Callable) -> Callable[[RADDGenerationOutput, RADDGenerationOutput], bool]:
    """Whether `value` holds of that part of the output with the option, and not without."""
    return lambda off, on: value(getattr(on, name)) and not value(getattr(off, name))


def only(*tokens: int) -> Callable[[torch.Tensor], bool]:
    return lambda sequences: set(sequences.flatten().tolist()) <= set(tokens)


def without(*tokens: int) -> Callable[[torch.Tensor], bool]:
    return lambda sequences: not set(tokens) & set(sequences.flatten().tolist())


def columns(number: int) -> Callable[[torch.Tensor], bool]:
    return lambda x: x.shape[1] == number


SHORT, PADDED = torch.tensor([[0, M], [1, 2]]), torch.tensor([[1, 1], [0, 1]])
# option: (what both calls have, what the second has besides, the difference that it must make)
TOGGLES = {
    "algorithm": ({"num_steps": 3}, {"algorithm": "euler"}, None),  # the two differ for a geometric clock: below
    "num_steps": ({}, {"num_steps": 3}, becomes("nfe", lambda x: int(x.max()) <= 3)),
    "times": ({"num_steps": 4}, {"times": [0.0, 0.9, 0.95, 0.99, 1.0]}, differs("nfe")),
    "tokens_per_step": (
        {"algorithm": "any_order"},
        {"tokens_per_step": 4},
        becomes("nfe", lambda x: int(x.max()) == 2),
    ),
    "confidence_threshold": ({"algorithm": "confidence"}, {"confidence_threshold": 0.1}, differs("nfe")),
    "entropy_bound": ({"algorithm": "entropy"}, {"entropy_bound": 3.0}, differs("nfe")),
    "block_length": (
        {"algorithm": "any_order"},
        {"block_length": 2},
        becomes("reveal_pass", lambda x: bool((x[:, :2].amax(-1) < x[:, 2:].amin(-1)).all())),
    ),
    "remasking": ({"num_steps": 8}, {"remasking": "rescale", "remasking_strength": 1.0}, differs("nfe")),
    "remasking_strength": ({"num_steps": 8, "remasking": "cap"}, {"remasking_strength": 0.5}, differs("nfe")),
    "order": (
        {"algorithm": "any_order"},
        {"order": "backward"},
        becomes("reveal_pass", lambda x: x.tolist() == [[7, 6, 5, 4, 3, 2, 1, 0]] * 8),
    ),
    "use_cache": ({"num_steps": 50}, {"use_cache": False}, becomes("nfe", lambda x: x.tolist() == [50] * 8)),
    "max_new_tokens": ({"ids": SHORT}, {"max_new_tokens": 2}, becomes("sequences", columns(4))),
    "max_length": ({"batch_size": 2}, {"max_length": 5}, becomes("sequences", columns(5))),
    "do_sample": ({"num_steps": 1}, {"do_sample": False}, becomes("sequences", lambda x: len(x.unique(dim=0)) == 1)),
    "temperature": ({"num_steps": 1}, {"temperature": 0.0}, becomes("sequences", lambda x: len(x.unique(dim=0)) == 1)),
    "top_k": ({"num_steps": 1}, {"top_k": 1}, becomes("sequences", lambda x: len(x.unique(dim=0)) == 1)),
    "top_p": ({"num_steps": 1}, {"top_p": 0.01}, becomes("sequences", lambda x: len(x.unique(dim=0)) == 1)),
    "min_p": ({"num_steps": 1}, {"min_p": 1.0}, becomes("sequences", lambda x: len(x.unique(dim=0)) == 1)),
    "typical_p": ({"num_steps": 1}, {"typical_p": 0.01}, becomes("sequences", lambda x: len(x.unique(dim=0)) == 1)),
    "repetition_penalty": ({}, {"repetition_penalty": 50.0}, differs("sequences")),
    "suppress_tokens": ({}, {"suppress_tokens": [0, 1, 2, 3]}, becomes("sequences", without(0, 1, 2, 3))),
    "bad_words_ids": ({}, {"bad_words_ids": [[0], [1], [2], [3]]}, becomes("sequences", without(0, 1, 2, 3))),
    "num_return_sequences": ({}, {"num_return_sequences": 3}, becomes("sequences", lambda x: len(x) == 24)),
    "output_history": ({}, {"output_history": True}, becomes("history", lambda x: x is not None)),
    "output_log_probs": ({}, {"output_log_probs": True}, becomes("log_probs", lambda x: x is not None)),
    "trim_at_eos": ({"eos_token_id": 9}, {"trim_at_eos": True}, becomes("lengths", lambda x: x is not None)),
    "eos_token_id": ({"eos_token_id": 9, "trim_at_eos": True}, {"eos_token_id": 8}, differs("lengths")),
    "pad_token_id": (
        {"ids": SHORT, "attention_mask": PADDED, "max_new_tokens": 1},
        {"pad_token_id": 7},
        becomes("sequences", lambda x: int(x[1, 0]) == 7),
    ),
    # what each of these does needs more than two outputs to see: test_<option>_... below or in test_generation.py
    "return_dict_in_generate": ({}, {"return_dict_in_generate": False}, None),
    "progress_bar": ({}, {"progress_bar": True}, None),
    "chunk_size": ({}, {"chunk_size": 1}, None),
    "mask_token_id": ({}, {"mask_token_id": 3}, None),
    "sampling_dtype": ({}, {"sampling_dtype": "float32"}, None),
    "compile": ({}, {"compile": True}, None),
    "compile_config": ({}, {"compile_config": CompileConfig()}, None),
}


@pytest.mark.parametrize("name", TOGGLES)
def test_each_option_does_what_it_says(wide_model: RADDForMaskedDiffusion, name: str):
    common, on, effect = TOGGLES[name]
    if effect is not None:
        assert effect(run(wide_model, **common), run(wide_model, **{**common, **on}))


def test_no_option_is_left_out():
    assert sorted(TOGGLES) == sorted(GENERATION_OPTIONS)


def test_options_with_an_effect_of_their_own(make_model: Builder, monkeypatch: pytest.MonkeyPatch):
    model = make_model(vocab_size=11, mask_token_id=M, noise_schedule="geometric")
    nfe = {a: run(model, num_steps=6, algorithm=a).nfe.tolist() for a in ("tweedie", "euler")}
    assert nfe["tweedie"] != nfe["euler"]
    assert torch.is_tensor(run(model, return_dict_in_generate=False))
    assert bool((run(model, torch.tensor([[3, M]]), mask_token_id=3).sequences[:, 1] == M).all())
    disabled, tqdm = [], generation_radd.logging.tqdm
    monkeypatch.setattr(
        generation_radd.logging, "tqdm", lambda **kwargs: disabled.append(kwargs["disable"]) or tqdm(**kwargs)
    )
    sizes, compute = [], model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda x: sizes.append(len(x)) or compute(x))
    for options in ({"num_steps": 1}, {"num_steps": 1, "chunk_size": 5, "progress_bar": True}):
        sizes.clear()
        run(model, **options)
        assert max(sizes) == options.get("chunk_size", 64)
    assert disabled == [True, False]
    dtypes, empty = [], torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **kwargs: dtypes.append(kwargs["dtype"]) or empty(*size, **kwargs)
    )
    for dtype in ("float32", "float64"):  # a row of CPU noise is the same in both up to rounding
        run(model, num_steps=1, sampling_dtype=dtype)
    assert dtypes == [torch.float32, torch.float64]


def test_an_option_that_nobody_reads_is_refused(wide_model: RADDForMaskedDiffusion):
    with pytest.raises(ValueError, match=r"Unknown generation option\(s\) \['bos_token_id'\]"):
        run(wide_model, bos_token_id=1)
    assert RADDGenerationConfig(bos_token_id=1).bos_token_id == 1  # what a trainer has put into a saved config
    wide_model.diffusion_generate(torch.full((1, 2), M), RADDGenerationConfig(bos_token_id=1))


def test_a_threshold_above_one_reveals_one_token_a_pass(wide_model: RADDForMaskedDiffusion):
    """User case 38."""
    nfe = {
        threshold: run(wide_model, algorithm="confidence", confidence_threshold=threshold).nfe.tolist()
        for threshold in (0.1, 0.99, 1.01)
    }
    assert nfe[1.01] == [8] * 8
    assert nfe[0.1] != nfe[0.99]


@pytest.mark.parametrize("algorithm", ["tweedie", "euler", "any_order", "confidence", "entropy", "margin"])
def test_length_one_and_steps_that_do_not_divide(wide_model: RADDForMaskedDiffusion, algorithm: str):
    for ids in (torch.tensor([[M]]), torch.tensor([[M], [2]]), torch.full((2, 7), M)):
        out = run(wide_model, ids, algorithm=algorithm, num_steps=3)
        assert not bool((out.sequences == M).any()) and int(out.nfe.max()) <= 3
        assert out.nfe[(ids == M).sum(-1) == 1].tolist() == [1] * int(((ids == M).sum(-1) == 1).sum())
        assert not bool(out.nfe[(ids != M).all(-1)].any())


def test_a_modernbert_is_sampled():
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ModernBertForMaskedLM(ModernBertConfig(**sizes, intermediate_size=16, pad_token_id=0)).eval()
    ids, mask = torch.tensor([[3, 11, 11], [11, 2, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    out = diffusion_generate(model, ids, attention_mask=mask, mask_token_id=11, seed=0)
    assert not bool((out == 11).any()) and torch.equal(out[ids != 11], ids[ids != 11])


# Bad words


def test_completing_tokens():
    words = [[1, 2], [2, 1, 2], [3, 3]]
    assert completing_tokens(words, [1, M, 2], 1) == [1, 2]  # . 1 2 and 1 2 .
    assert completing_tokens(words, [0, M, 0], 1) == []
    assert completing_tokens(words, [2, M, 2], 1) == [1]  # both 2 1 2 and . 1 2
    assert completing_tokens(words, [M, 3], 0) == [3]
    assert completing_tokens(words, [M, M], 0) == []


@pytest.mark.parametrize(
    "options",
    [
        {"num_steps": 1},
        {"num_steps": 3, "chunk_size": 2},
        {"algorithm": "confidence", "tokens_per_step": 3},
        {"num_steps": 6, "remasking": "rescale", "remasking_strength": 0.8},
        {"num_steps": 4, "do_sample": False},
    ],
)
def test_bad_words_never_come_about(make_model: Builder, options: dict):
    model = make_model(vocab_size=5, mask_token_id=M)  # four tokens: every pair is common
    words = [[0, 1], [2, 2], [3, 0, 3]]
    ids = torch.full((64, 9), M)
    ids[:, 4] = 2
    mask = torch.ones_like(ids)
    mask[::2, :2] = 0
    ids[::2, :2] = 0  # padding is no text: "0 1" across its edge is allowed

    def count(sequences: torch.Tensor) -> int:
        found = 0
        for row, real in zip(sequences, mask.bool(), strict=True):
            text = row[real].tolist()
            found += sum(text[i : i + len(w)] == w for w in words for i in range(len(text)))
        return found

    assert count(run(model, ids, attention_mask=mask, **options).sequences) > 0
    out = run(model, ids, attention_mask=mask, bad_words_ids=words, **options)
    assert count(out.sequences) == 0
    assert torch.equal(out.sequences[ids != M], ids[ids != M])


def test_a_bad_word_of_given_and_of_new_tokens(wide_model: RADDForMaskedDiffusion):
    ids = torch.tensor([[0, M, M]]).repeat(1000, 1)
    word = run(wide_model, ids, num_steps=1).sequences.mode(0).values.tolist()
    words = [word, *([0, i, word[2]] for i in (1, 2, 3))]
    out = run(wide_model, ids, num_steps=1, bad_words_ids=words).sequences.tolist()
    assert word in run(wide_model, ids, num_steps=1).sequences.tolist() and not any(word in out for word in words)


def test_bad_words_leave_the_law_of_all_other_texts(make_model: Builder):
    """One pass of 6,000 rows: conditionals from left to right, without the token that would complete 0 0."""
    model = make_model(vocab_size=4, mask_token_id=3)
    x = torch.full((1, 3), 3)
    q = model(x).logits[0].double().softmax(-1)[:, :3]
    law = {}
    for a in range(3):
        for b in range(3):
            for c in range(3):
                second = q[1].clone()
                second[0] *= a != 0
                third = q[2].clone()
                third[0] *= b != 0
                law[a, b, c] = float(q[0, a] * second[b] / second.sum() * third[c] / third.sum())
    out = run(model, x.repeat(6_000, 1), num_steps=1, bad_words_ids=[[0, 0]], output_log_probs=True)
    counts: dict[tuple[int, ...], int] = {}
    for row in out.sequences.tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    possible = {text: p for text, p in law.items() if p > 0}
    assert ref.chi_square_p_value(counts, possible) > 1e-3
    expected = [possible[tuple(row)] for row in out.sequences[:50].tolist()]
    assert out.log_probs[:50].sum(-1).exp().tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("warper", [{"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.9}])
@pytest.mark.parametrize("plan", [{"algorithm": "any_order", "order": "forward"}, {"num_steps": 1}])
def test_what_a_bad_word_forbids_is_no_candidate_of_the_warpers(plan: dict, warper: dict):
    """Logits 0, 1, 5: the likeliest token that may be next, one pass or many."""
    config = RADDConfig(
        vocab_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8
    )
    constant = RADDForMaskedDiffusion(config)
    with torch.no_grad():
        constant.lm_head.bias[:3] = torch.tensor([0.0, 1.0, 5.0])
    out = run(constant, torch.full((2, 6), 3), bad_words_ids=[[2, 2]], **warper, **plan)
    assert out.sequences.tolist() == [[2, 1, 2, 1, 2, 1]] * 2
    with pytest.raises(ValueError, match="`bad_words_ids`, .* leave no token to draw"):
        run(constant, torch.full((1, 2), 3), bad_words_ids=[[a, b] for a in range(3) for b in range(3)], **plan)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([1, 2], r"`bad_words_ids` must be a list of non-empty lists of token ids, got \[1, 2\]"),
        ([[]], r"`bad_words_ids` must be a list of non-empty lists"),
        ([[1, "a"]], r"`bad_words_ids` must be a list of non-empty lists"),
        ([[1, M]], r"`bad_words_ids` must not hold the mask token's id, 4"),
        ([[1, 99]], r"`bad_words_ids` must hold ids in \[0, vocab_size=11\), got \[99\]"),
    ],
)
def test_wrong_bad_words(wide_model: RADDForMaskedDiffusion, words: list, message: str):
    with pytest.raises(ValueError, match=message):
        run(wide_model, bad_words_ids=words)


# Ending early


@pytest.mark.parametrize(
    ("options", "saves"),
    [
        ({"algorithm": "any_order", "order": "forward"}, True),
        ({"algorithm": "any_order", "block_length": 6}, True),
        ({"algorithm": "confidence", "block_length": 6}, True),
        ({"algorithm": "any_order", "order": "backward"}, False),
        ({"num_steps": 40, "use_cache": False}, True),
        ({"num_steps": 12, "remasking": "cap", "remasking_strength": 0.5}, False),
    ],
)
def test_a_row_is_done_once_its_text_has_ended(wide_model: RADDForMaskedDiffusion, options: dict, saves: bool):
    """User case 30: the same texts up to the end token, at no more network calls."""
    ids = torch.full((24, 24), M)
    ids[:, 0] = 2
    ids[::3, 5] = 3  # no end token before a given one ends the text
    full = run(wide_model, ids, eos_token_id=9, pad_token_id=0, **options)
    called = []
    handle = wide_model.model.register_forward_pre_hook(
        lambda module, args, kwargs: called.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    out = run(
        wide_model,
        ids,
        eos_token_id=9,
        pad_token_id=0,
        trim_at_eos=True,
        output_history=True,
        output_log_probs=True,
        **options,
    )
    handle.remove()
    assert sum(called) == int(out.nfe.sum()) and len(called) == out.forward_passes
    ended = 0
    for row, whole, length, given in zip(out.sequences, full.sequences, out.lengths.tolist(), ids, strict=True):
        start = int((given != M).nonzero().max()) + 1
        ends = [i for i in range(start, 24) if int(whole[i]) == 9]
        assert length == (ends[0] + 1 if ends else 24)
        assert torch.equal(row[:length], whole[:length]) and bool((row[length:] == 0).all())
        ended += bool(ends)
    assert ended > 12
    beyond = torch.arange(24) >= out.lengths[:, None]
    assert bool((out.reveal_pass[beyond] == -1).all()) and bool((out.log_probs[beyond] == 0).all())
    assert torch.equal(out.reveal_pass[~beyond], full.reveal_pass[~beyond])
    assert bool((out.nfe <= full.nfe).all())
    assert (int(out.nfe.sum()) < int(full.nfe.sum())) == saves
    assert len(out.history) == out.forward_passes


def test_padding_without_a_padding_id_is_the_end_token(wide_model: RADDForMaskedDiffusion):
    options = {"eos_token_id": [9, 8], "algorithm": "any_order", "order": "forward"}
    out = run(wide_model, torch.full((8, 20), M), trim_at_eos=True, **options)
    assert int(out.lengths.min()) < 20
    for row, length in zip(out.sequences, out.lengths.tolist(), strict=True):
        assert bool((row[length:] == 9).all())


def test_a_streamer_ends_where_the_text_does(wide_model: RADDForMaskedDiffusion):
    class Put:
        def __init__(self):
            self.text = []

        def put(self, ids):
            self.text += ids.tolist()

        def end(self):
            self.text.append(None)

    streamer, ids = Put(), torch.tensor([[0, 2, 3] + [M] * 20])
    mask = (torch.arange(23) > 0).long()[None]
    out = run(
        wide_model,
        ids,
        attention_mask=mask,
        streamer=streamer,
        trim_at_eos=True,
        eos_token_id=9,
        algorithm="any_order",
        order="forward",
        seed=1,
    )
    length = int(out.lengths[0])
    assert streamer.text == [*out.sequences[0, 1 : 1 + length].tolist(), None] and streamer.text[-2] == 9
    assert length < 22 and M not in streamer.text


# torch.compile


class Backend:
    """A torch.compile backend that runs the graph as it is and notes what it compiles and runs."""

    def __init__(self):
        self.compiled, self.shapes = 0, set()

    def __call__(self, graph: nn.Module, inputs: list) -> Callable:
        self.compiled += 1

        def call(*args):
            self.shapes.add(tuple(tuple(x.shape) for x in args if torch.is_tensor(x) and x.dtype == torch.long))
            return graph(*args)

        return call


@pytest.mark.parametrize("options", [{"num_steps": 5}, {"algorithm": "confidence", "tokens_per_step": 3}])
def test_compiled_passes_give_the_same_tokens_at_one_shape(make_model: Builder, options: dict):
    model = make_model(vocab_size=11, mask_token_id=M, num_hidden_layers=2)
    ids = torch.full((5, 9), M)
    ids[1:, 3], ids[2:, :2], ids[4] = 2, 1, 0  # rows end at different passes; the last one has nothing to fill
    mask = torch.ones_like(ids)
    mask[3, :2] = 0
    eager = run(model, ids, attention_mask=mask, **options)
    backend = Backend()
    config = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode="default")
    for _ in range(2):  # the second call finds what the first has compiled
        out = run(model, ids, attention_mask=mask, compile=True, compile_config=config, **options)
        assert torch.equal(out.sequences, eager.sequences)
        assert out.nfe.tolist() == eager.nfe.tolist() and out.forward_passes == eager.forward_passes
    assert backend.compiled == 1 and len(backend.shapes) == 1


def test_a_compile_config_of_a_generation_config_is_compiled_once(make_model: Builder):
    model, backend = make_model(vocab_size=11, mask_token_id=M), Backend()
    config = CompileConfig(dynamic=False, backend=backend, mode="default")
    model.generation_config = RADDGenerationConfig(compile=True, compile_config=config)
    for _ in range(2):
        run(model)
    assert backend.compiled == 1


def test_compiled_bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    bert = BertForMaskedLM(config).eval()
    ids, backend = torch.full((2, 6), 11), Backend()
    compiled = CompileConfig(dynamic=False, backend=backend, mode="default")
    out = diffusion_generate(bert, ids, mask_token_id=11, seed=0, compile=True, compile_config=compiled)
    assert backend.compiled and torch.equal(out, diffusion_generate(bert, ids, mask_token_id=11, seed=0))


@pytest.mark.slow
def test_inductor(make_model: Builder):
    model = make_model(vocab_size=11, mask_token_id=M, num_hidden_layers=2)
    config = CompileConfig(fullgraph=True, dynamic=False)
    out = run(model, num_steps=5, compile=True, compile_config=config)
    assert torch.equal(out.sequences, run(model, num_steps=5).sequences)


def test_compile_on_a_cpu_says_that_it_does_nothing(wide_model: RADDForMaskedDiffusion):
    with pytest.warns(UserWarning, match="`compile=True` does nothing on a CPU without a `compile_config`"):
        out = run(wide_model, compile=True)
    assert torch.equal(out.sequences, run(wide_model).sequences)
    with pytest.raises(ValueError, match="`compile_config` must be a CompileConfig or None, got {}"):
        run(wide_model, compile=True, compile_config={})


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 10**9, "batch_size": 1}, "must fit max_position_embeddings=64, got length 1000000000"),
        ({"max_new_tokens": 10**12}, "must fit max_position_embeddings=64, got length 1000000000008"),
        ({"max_length": 10**12}, "must fit max_position_embeddings=64, got length 1000000000000"),
        ({"chunk_size": 2**70}, "`chunk_size` must be an integer of at least 1, got 1180591620717411303424"),
        ({"temperature": 10**400}, "`temperature` must be None or a number in"),
        ({"temperature": 1e39}, r"`temperature` must be None or a number in \[0.0, 1e\+30\], got 1e\+39"),
        ({"logits_processor": abs}, "`logits_processor` must be a LogitsProcessorList or None"),
        ({"logits_processor": "abc"}, "`logits_processor` must be a LogitsProcessorList or None, got str"),
        ({"streamer": 5}, "`streamer` must be a BaseStreamer or None, got 5"),
        ({"attention_mask": [1]}, "`attention_mask` must have the shape of `input_ids`"),
        ({"order": [], "algorithm": "any_order"}, "`order` must have shape"),
        ({"eos_token_id": [], "trim_at_eos": True}, r"`eos_token_id` must be an id or a list of ids, got \[\]"),
        ({"eos_token_id": 1.5}, "`eos_token_id` must be an id or a list of ids, got 1.5"),
        ({"pad_token_id": -5}, "`pad_token_id` must be None or an integer of at least 0, got -5"),
        ({"suppress_tokens": [-1]}, r"`suppress_tokens` must be a list of token ids, got \[-1\]"),
    ],
)
def test_more_wrong_values(wide_model: RADDForMaskedDiffusion, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        run(wide_model, **options)


def test_wrong_models():
    with pytest.raises(ValueError, match="`model` must be a masked language model with a config, got NoneType"):
        diffusion_generate(None, torch.zeros(1, 1, dtype=torch.long))


def test_empty_canvases(wide_model: RADDForMaskedDiffusion):
    none = torch.zeros(0, 4, dtype=torch.long)
    with pytest.warns(UserWarning, match="No mask token"):
        assert run(wide_model, none, max_new_tokens=3).sequences.shape == (0, 7)
    with pytest.warns(UserWarning, match="No mask token"):
        out = run(wide_model, torch.zeros(1, 0, dtype=torch.long), algorithm="confidence", block_length=2)
    assert out.sequences.shape == (1, 0) and out.forward_passes == 0


# Memory


def peak_memory(function: Callable) -> int:
    """Bytes of tensors that lived at the same time during a call."""
    path = Path(__file__).parents[1] / "examples" / "peak_memory.py"
    spec = importlib.util.spec_from_file_location("peak_memory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.PeakMemory() as tracker, torch.no_grad():
        function()
    return tracker.peak


def large_vocabulary(length: int) -> RADDForMaskedDiffusion:
    return RADDForMaskedDiffusion(
        RADDConfig(
            vocab_size=4001, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=length
        )
    ).eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"output_log_probs": True},
        {"sampling_dtype": "float32"},
        {"do_sample": False},
        {"algorithm": "confidence"},
        {"algorithm": "entropy"},
    ],
)
def test_memory_of_a_pass_is_that_of_a_chunk(options: dict):
    """At most 2.5 x (revealed rows in a chunk) x vocabulary x 8 bytes above a trunk pass."""
    model = large_vocabulary(64)
    ids = torch.full((4, 64), 4000)
    trunk = peak_memory(lambda: model.model(ids))
    for chunk_size in (16, 256):
        peak = peak_memory(lambda c=chunk_size: run(model, ids, num_steps=1, chunk_size=c, **options))
        assert peak - trunk <= 2.5 * chunk_size * 4001 * 8


def test_memory_of_64k_tokens():
    """65,536 positions in one pass: two gigabytes of float64 probabilities, of which a chunk of 256 is alive."""
    model = large_vocabulary(1024)
    ids = torch.full((64, 1024), 4000)
    trunk = peak_memory(lambda: model.model(ids))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peak = peak_memory(lambda: run(model, ids, num_steps=1, sampling_dtype="float32"))
    assert peak - trunk <= 2.5 * 256 * 4001 * 8


def test_buffers_of_processors_scale_with_the_chunk():
    shapes = []

    class Watch(LogitsProcessor):
        def __call__(self, ids, scores):
            shapes.append((tuple(ids.shape), tuple(scores.shape)))
            return scores

    model = large_vocabulary(64)
    run(model, torch.full((4, 64), 4000), num_steps=1, chunk_size=10, logits_processor=LogitsProcessorList([Watch()]))
    assert {rows for (rows, _), _ in shapes} == {rows for _, (rows, _) in shapes} == {10, 6}
