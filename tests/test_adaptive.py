"""Reveals that the network chooses, remasking, other backbones, and what the output records."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
import reference as ref
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LogitsProcessor, LogitsProcessorList

from radd_hf import RADDConfig, RADDForMaskedDiffusion, RADDGenerationConfig, diffusion_generate
from radd_hf.noise_schedule_radd import get_noise_schedule, uniform_time_grid

M = 1  # mask id of the three-token networks
BLANK, PROMPT = (M, M, M), (M, 2, M, M)
DRAWS = 20_000
P_VALUE = 1e-3
Builder = Callable[..., RADDForMaskedDiffusion]


def conditional(model: nn.Module) -> ref.Conditional:
    """The oracle's view of a model."""
    return ref.conditional_of_network(lambda ids: model(ids).logits.double().log_softmax(-1), M)


def sample(model: nn.Module, x: tuple[int, ...], draws: int = DRAWS, **options) -> Counter:
    """How often each filling of `x` came in `draws` rows of one call."""
    ids = torch.tensor([x]).repeat(draws, 1)
    return Counter(map(tuple, model.diffusion_generate(ids, seed=3, **options).tolist()))


# Adaptive algorithms


LAWS = [
    ("confidence", {}, {}),
    ("entropy", {}, {}),
    ("margin", {}, {}),
    ("confidence", {"tokens_per_step": 2}, {"each": 2}),
    ("margin", {"block_length": 2}, {"block_length": 2}),
    ("confidence", {"confidence_threshold": 0.55}, {"threshold": 0.55}),
    ("entropy", {"entropy_bound": 0.9}, {"bound": 0.9}),
]


# a given token in each: with masks alone all positions tie up to rounding
@pytest.mark.parametrize("x", [(M, M, 2), pytest.param(PROMPT, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("measure", "options", "oracle"), LAWS)
def test_law_is_that_of_the_definition(model, x, measure: str, options: dict, oracle: dict):
    law = ref.adaptive_law(conditional(model), x, M, measure, **oracle)
    assert sum(law.values()) == pytest.approx(1)
    counts = sample(model, x, algorithm=measure, **options)
    assert ref.chi_square_p_value(counts, law) > P_VALUE


def test_num_steps_means_so_many_passes(wide_model):
    for algorithm in ("confidence", "entropy", "margin", "any_order"):
        out = wide_model.diffusion_generate(
            batch_size=3, max_length=10, algorithm=algorithm, num_steps=4, seed=0, return_dict_in_generate=True
        )
        assert out.nfe.tolist() == [4, 4, 4]  # ceil(10 / 4) = 3 a pass
        assert out.reveal_pass.sort(-1).values[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
        out = wide_model.diffusion_generate(
            batch_size=1, max_length=10, algorithm=algorithm, tokens_per_step=9, seed=0, return_dict_in_generate=True
        )
        assert out.nfe.tolist() == [2]


@pytest.mark.parametrize("algorithm", ["any_order", "confidence", "entropy", "margin"])
def test_blocks_are_filled_one_after_the_other(wide_model, algorithm: str):
    """Blocks of 4 real tokens from the first mask, whatever the padding; a pass never reaches into the next."""
    ids = torch.tensor([[0, 0, 2, 3, 4, 4, 5, 4, 4, 4, 4, 0], [2, 3, 4, 4, 5, 4, 4, 4, 4, 0, 0, 0]])
    mask = torch.tensor([[0, 0] + [1] * 9 + [0], [1] * 9 + [0] * 3])
    out = wide_model.diffusion_generate(
        ids,
        attention_mask=mask,
        algorithm=algorithm,
        block_length=4,
        tokens_per_step=2,
        seed=[7, 7],
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences[0, 2:11], out.sequences[1, :9])
    passes = out.reveal_pass[1]
    first, second = passes[[2, 3, 5]].tolist(), passes[6:9].tolist()
    assert max(first) == 1 and min(second) == 2 and max(second) == 3
    assert passes[[0, 1, 4, 9, 10, 11]].tolist() == [-1] * 6


def test_rows_do_not_depend_on_their_batch(wide_model):
    ids = torch.randint(5, 10, (8, 12), generator=torch.Generator().manual_seed(0))
    ids[torch.rand(8, 12, generator=torch.Generator().manual_seed(1)) < 0.6] = 4
    for options in (
        {"algorithm": "confidence", "confidence_threshold": 0.4},
        {"algorithm": "entropy", "entropy_bound": 1.0},
        {"algorithm": "margin", "tokens_per_step": 2, "temperature": 0.7},
        {"algorithm": "tweedie", "num_steps": 6, "remasking": "rescale", "remasking_strength": 0.7},
    ):
        whole = wide_model.diffusion_generate(ids, seed=list(range(8)), **options)
        assert not bool((whole == 4).any()) and torch.equal(whole[ids != 4], ids[ids != 4])
        for start in range(0, 8, 3):
            part = wide_model.diffusion_generate(
                ids[start : start + 3], seed=list(range(8))[start : start + 3], **options
            )
            assert torch.equal(part, whole[start : start + 3])
        for row in (0, 5):
            assert torch.equal(wide_model.diffusion_generate(ids[row : row + 1], seed=[row], **options)[0], whole[row])


def test_certainty_is_that_of_the_processed_law(wide_model):
    """A processor that makes position 3 sure is obeyed: it is revealed first."""

    class Sure(LogitsProcessor):
        def __call__(self, ids, scores):
            scores = scores.clone()
            scores[3::6, 7] += 50  # six candidates in the first pass
            return scores

    out = wide_model.diffusion_generate(
        torch.full((1, 6), 4),
        logits_processor=LogitsProcessorList([Sure()]),
        algorithm="confidence",
        seed=0,
        return_dict_in_generate=True,
    )
    assert int(out.reveal_pass[0, 3]) == 0


# Remasking


FAST_REMASKING = [(BLANK, "log_linear", "cap", 0.3), (PROMPT, "geometric", "rescale", 0.6)]
ALL_REMASKING = [
    (x, schedule, *kind)
    for x in (BLANK, PROMPT)
    for schedule in ("log_linear", "geometric")
    for kind in (("cap", 0.3), ("rescale", 0.6), ("rescale", 1.0))
]


@pytest.mark.parametrize(
    ("x", "schedule", "kind", "strength"),
    [pytest.param(*case, marks=() if case in FAST_REMASKING else pytest.mark.slow) for case in ALL_REMASKING],
)
def test_remasking_has_the_law_of_remdm(make_model: Builder, x, schedule: str, kind: str, strength: float):
    model = make_model(noise_schedule=schedule)
    grid = ref.uniform_grid(4)
    law = ref.remdm_law(conditional(model), x, M, ref.Schedule(schedule), grid, kind, strength)
    assert sum(law.values()) == pytest.approx(1)
    counts = sample(model, x, num_steps=4, remasking=kind, remasking_strength=strength)
    assert ref.chi_square_p_value(counts, law) > P_VALUE


def test_remasking_differs_from_its_start(make_model: Builder):
    """The same check tells remasking from plain sampling: it has the power to fail."""
    model = make_model()
    law = ref.remdm_law(conditional(model), BLANK, M, ref.Schedule("log_linear"), ref.uniform_grid(4), "rescale", 1.0)
    assert ref.chi_square_p_value(sample(model, BLANK, num_steps=4), law) < P_VALUE


@pytest.mark.parametrize("use_cache", [True, False])
def test_strength_zero_is_plain_sampling_token_for_token(wide_model, use_cache: bool):
    options = {"batch_size": 4, "max_length": 20, "num_steps": 9, "seed": 1, "use_cache": use_cache}
    plain = wide_model.diffusion_generate(return_dict_in_generate=True, **options)
    for kind in ("cap", "rescale"):
        again = wide_model.diffusion_generate(remasking=kind, return_dict_in_generate=True, **options)
        assert torch.equal(plain.sequences, again.sequences) and torch.equal(plain.nfe, again.nfe)


def test_remasking_without_cache_gives_the_same_tokens(wide_model):
    options = {"batch_size": 5, "max_length": 20, "num_steps": 12, "remasking": "rescale", "remasking_strength": 0.8}
    cached = wide_model.diffusion_generate(seed=1, return_dict_in_generate=True, **options)
    full = wide_model.diffusion_generate(seed=1, use_cache=False, return_dict_in_generate=True, **options)
    assert torch.equal(cached.sequences, full.sequences)
    assert full.nfe.tolist() == [12] * 5 and (cached.nfe <= 12).all()


def test_given_tokens_are_never_masked_again(wide_model):
    ids = torch.tensor([[2, 4, 4, 7, 4, 4, 4, 9]])
    out = wide_model.diffusion_generate(
        ids,
        num_steps=30,
        remasking="rescale",
        remasking_strength=1.0,
        seed=0,
        output_history=True,
        return_dict_in_generate=True,
    )
    states = torch.stack([sequences[0] for _, sequences in out.history])
    assert (states[:, [0, 3, 7]] == ids[0, [0, 3, 7]]).all()
    changed = (states[1:] != states[:-1]) & (states[:-1] != 4)
    assert bool(changed.any()), "nothing was drawn anew: this run shows nothing"
    assert not bool((out.sequences == 4).any())


@pytest.mark.parametrize("schedule", ["log_linear", "geometric", "cosine"])
def test_remasking_keeps_the_marginals(schedule: str):
    """P(masked at t_k) stays lambda(t_k): a' = a (1 - sigma) + (1 - a) psi, from the second grid point down."""
    grid = uniform_time_grid(8)
    noise = get_noise_schedule(schedule)
    for kind, strength in (("cap", 0.1), ("rescale", 0.9)):
        psi, sigma = noise.remdm_probabilities(grid, kind, strength)
        shown = float(1 - noise.mask_probability(grid[-1]))
        for k in range(8, 1, -1):
            shown = shown * float(1 - sigma[k - 1]) + (1 - shown) * float(psi[k - 1])
            assert shown == pytest.approx(float(1 - noise.mask_probability(grid[k - 1])), abs=1e-12)


# Grids, other backbones, the output


def test_times_is_the_grid(model):
    grid = [0.0, 0.05, 0.4, 1.0]
    law = ref.step_by_step_law(conditional(model), BLANK, M, ref.Schedule("log_linear"), "tweedie", grid)
    assert ref.chi_square_p_value(sample(model, BLANK, times=grid), law) > P_VALUE
    uniform = model.diffusion_generate(batch_size=9, max_length=9, num_steps=5, seed=0)
    same = model.diffusion_generate(batch_size=9, max_length=9, times=uniform_time_grid(5), num_steps=5, seed=0)
    assert torch.equal(uniform, same)
    assert RADDGenerationConfig(times=torch.tensor([0.0, 1.0])).to_dict()["times"] == [0.0, 1.0]


def test_a_bert_is_sampled_by_the_same_loop():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        initializer_range=0.5,
    )
    bert = BertForMaskedLM(config).eval()
    ids = torch.tensor([[3, 11, 11, 5, 11], [11, 2, 11, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    for options in ({"num_steps": 3}, {"algorithm": "confidence"}, {"algorithm": "any_order", "order": "forward"}):
        out = diffusion_generate(
            bert, ids, attention_mask=mask, mask_token_id=11, seed=0, return_dict_in_generate=True, **options
        )
        assert not bool((out.sequences == 11).any()) and torch.equal(out.sequences[ids != 11], ids[ids != 11])
    with pytest.raises(ValueError, match="`mask_token_id` must be an id in .*got None"):
        diffusion_generate(bert, ids)
    # its law, in one order: the product of its conditionals without the mask column
    x = (11, 3, 11)

    def log_probs(tokens):
        logits = bert(tokens).logits.double()
        logits[..., 11] = float("-inf")
        return logits.log_softmax(-1)

    law = ref.given_order_law(ref.conditional_of_network(log_probs, 11), x, 11, [2, 0])
    rows = torch.tensor([x]).repeat(DRAWS, 1)
    out = diffusion_generate(bert, rows, mask_token_id=11, algorithm="any_order", order="backward", seed=1)
    assert ref.chi_square_p_value(Counter(map(tuple, out.tolist())), law) > P_VALUE


def test_log_probs_of_one_token_a_pass_are_those_of_the_text(wide_model):
    ids = torch.tensor([[4, 4, 7, 4, 4]])
    out = wide_model.diffusion_generate(
        ids, algorithm="any_order", order="forward", output_log_probs=True, seed=0, return_dict_in_generate=True
    )
    state, expected = ids.clone(), []
    for i in (0, 1, 3, 4):
        expected.append(float(wide_model(state).logits[0, i].log_softmax(-1)[out.sequences[0, i]]))
        state[0, i] = out.sequences[0, i]
    assert out.log_probs[0, [0, 1, 3, 4]].tolist() == pytest.approx(expected, abs=1e-5)
    assert float(out.log_probs[0, 2]) == 0 and out.reveal_pass.tolist() == [[0, 1, -1, 2, 3]]
    greedy = wide_model.diffusion_generate(
        ids, temperature=0.0, output_log_probs=True, num_steps=1, return_dict_in_generate=True
    )
    assert greedy.log_probs[0, 0] == pytest.approx(float(wide_model(ids).logits[0, 0].log_softmax(-1).max()), abs=1e-5)


def test_what_follows_the_end_is_trimmed(wide_model):
    """The end token 9 comes out where its logit is raised; only ends inside the last run of masks count."""

    class Write(LogitsProcessor):
        def __call__(self, ids, scores):
            scores = scores.clone()
            scores[:, 9] = 100.0
            return scores

    ids = torch.tensor([[4, 2, 4, 4, 4], [4, 4, 4, 4, 2], [0, 2, 3, 4, 4]])
    mask = torch.tensor([[1] * 5, [1] * 5, [0, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "logits_processor": LogitsProcessorList([Write()]), "seed": 0}
    out = wide_model.diffusion_generate(
        ids, trim_at_eos=True, eos_token_id=9, pad_token_id=1, return_dict_in_generate=True, **options
    )
    assert out.sequences.tolist() == [[9, 2, 9, 1, 1], [9, 9, 9, 9, 2], [0, 2, 3, 9, 1]]
    assert out.lengths.tolist() == [3, 5, 3]
    out = wide_model.diffusion_generate(ids, eos_token_id=9, pad_token_id=1, return_dict_in_generate=True, **options)
    assert out.sequences[0].tolist() == [9, 2, 9, 9, 9] and out.lengths is None
    with pytest.raises(ValueError, match="`eos_token_id` must be given, or in the model's config, with `trim_at_eos`"):
        wide_model.diffusion_generate(ids, trim_at_eos=True, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tokens_per_step": 0, "algorithm": "margin"},
            "`tokens_per_step` must be None or an integer of at least 1, got 0",
        ),
        ({"tokens_per_step": 2}, "`tokens_per_step` must be left out with algorithm='tweedie'"),
        ({"block_length": 2, "algorithm": "euler"}, "`block_length` must be left out with algorithm='euler'"),
        ({"times": [0, 1], "algorithm": "margin"}, r"`times` must be left out .* it is for \['tweedie', 'euler'\]"),
        ({"times": [0, 0.5, 1], "num_steps": 3}, r"`num_steps` must be len\(times\) - 1 = 2 or None, got 3"),
        ({"times": [0.5, 0.2]}, "`times` must increase strictly inside"),
        ({"confidence_threshold": 0.5}, r"`confidence_threshold` must be left out .* for \['confidence'\]"),
        ({"confidence_threshold": 0.0, "algorithm": "confidence"}, r"`confidence_threshold` must be .*\(0.0, inf\)"),
        ({"entropy_bound": -1.0, "algorithm": "entropy"}, r"`entropy_bound` must be .* in \[0.0, inf\), got -1.0"),
        ({"entropy_bound": 1.0, "algorithm": "margin"}, "`entropy_bound` must be left out"),
        (
            {"num_steps": 2, "tokens_per_step": 2, "algorithm": "margin"},
            "Only one of `num_steps` and `tokens_per_step`",
        ),
        ({"remasking": "loop", "num_steps": 2}, r"`remasking` must be one of \['cap', 'rescale'\], got 'loop'"),
        ({"remasking": "cap"}, "`num_steps` or `times` must be given with `remasking`"),
        ({"remasking": "cap", "num_steps": 3, "algorithm": "euler"}, "`remasking` must be left out"),
        ({"remasking_strength": 0.2}, "`remasking` must be one of .* where `remasking_strength` is given, got None"),
        (
            {"remasking_strength": 1.2, "remasking": "cap", "num_steps": 3},
            r"`remasking_strength` must be .*\[0.0, 1.0\]",
        ),
        ({"trim_at_eos": 1}, "`trim_at_eos` must be True or False, got 1"),
    ],
)
def test_bad_options(model, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        model.diffusion_generate(torch.tensor([BLANK]), **options)


def test_entropy_of_float64_draws_is_ln_v():
    """V = 1,000 equal logits, 20,000 draws: the plug-in entropy, corrected by (V - 1) / 2N, within 1 % of ln V."""
    config = RADDConfig(
        vocab_size=1001, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=500
    )
    tokens = RADDForMaskedDiffusion(config).diffusion_generate(batch_size=40, num_steps=1, seed=0).flatten()
    share = tokens.bincount(minlength=1000).double() / len(tokens)
    entropy = float(torch.special.entr(share).sum()) + 999 / (2 * len(tokens))
    assert abs(entropy - math.log(1000)) < 0.01 * math.log(1000)
