"""Sampling: the law of every algorithm, its cost, the canvas, the options, the errors."""

import math
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import reference as ref
import torch
import transformers
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

import radd_hf.generation_radd as generation_radd
from radd_hf.configuration_radd import RADDConfig
from radd_hf.generation_config_radd import GENERATION_OPTIONS, RADDGenerationConfig
from radd_hf.generation_radd import RADDGenerationOutput, draw_reveal_plan
from radd_hf.modeling_radd import RADDForMaskedDiffusion
from radd_hf.noise_schedule_radd import get_noise_schedule

M = 1  # mask id of the three-token networks, in the middle of the vocabulary
BLANK, PROMPT = (M, M, M), (M, 2, M)
DRAWS = 20_000
P_VALUE = 1e-3
SCHEDULES = ("log_linear", "geometric")
Builder = Callable[..., RADDForMaskedDiffusion]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def conditional(model: nn.Module) -> ref.Conditional:
    """The oracle's view of a model."""
    return ref.conditional_of_network(lambda ids: model(ids).logits.double().log_softmax(-1), M)


def count(sequences: torch.Tensor) -> Counter:
    return Counter(map(tuple, sequences.tolist()))


def sample(model: nn.Module, x: tuple[int, ...], draws: int = DRAWS, **options) -> Counter:
    """How often each filling of `x` came in `draws` rows of one call."""
    return count(model.diffusion_generate(torch.tensor([x]).repeat(draws, 1), **options))


PROBABILITIES = (0.5, 0.25, 0.15, 0.07, 0.03)


@pytest.fixture(scope="module")
def bias_model() -> RADDForMaskedDiffusion:
    """PROBABILITIES at every position whatever the context; M = 5."""
    config = RADDConfig(
        vocab_size=6, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=512
    )
    model = RADDForMaskedDiffusion(config).eval()
    with torch.no_grad():
        model.lm_head.bias[:5] = torch.tensor(PROBABILITIES).log()
    return model


def drawn(model: nn.Module, draws: int = 2000, **options) -> Counter:
    """Tokens of `draws` positions, in one pass of rows of 500."""
    options = {"seed": 5, "num_steps": 1, "batch_size": draws // 500, "max_length": 500, **options}
    return Counter((token,) for token in model.diffusion_generate(**options).flatten().tolist())


def law_of(weights: dict[int, float]) -> ref.Law:
    return {(token,): weight / sum(weights.values()) for token, weight in weights.items()}


# The law


FAST_CASES = [
    *((algorithm, schedule, BLANK, n) for algorithm in ("tweedie", "euler") for schedule in SCHEDULES for n in (2, 5)),
    ("tweedie", "log_linear", PROMPT, 5),
    ("euler", "geometric", PROMPT, 5),
    ("tweedie", "log_linear", BLANK, 1),
    ("euler", "geometric", PROMPT, 1),
]
ALL_CASES = [
    (algorithm, schedule, x, n)
    for algorithm in ("tweedie", "euler")
    for schedule in SCHEDULES
    for x in (BLANK, PROMPT)
    for n in (1, 2, 5)
]


@pytest.mark.parametrize(
    ("algorithm", "schedule", "x", "num_steps"),
    [pytest.param(*case, marks=() if case in FAST_CASES else pytest.mark.slow) for case in ALL_CASES],
)
def test_final_law_is_that_of_the_step_by_step_sampler(
    make_model: Builder, algorithm: str, schedule: str, x: tuple[int, ...], num_steps: int
):
    model = make_model(noise_schedule=schedule)
    law = ref.step_by_step_law(
        conditional(model), x, M, ref.Schedule(schedule), algorithm, ref.uniform_grid(num_steps)
    )
    counts = sample(model, x, algorithm=algorithm, num_steps=num_steps, seed=11)
    assert ref.chi_square_p_value(counts, law) > P_VALUE


def test_law_check_refuses_one_pass_for_all(model: RADDForMaskedDiffusion):
    law = ref.step_by_step_law(
        conditional(model), BLANK, M, ref.Schedule("log_linear"), "tweedie", ref.uniform_grid(5)
    )
    counts = sample(model, BLANK, num_steps=1, seed=11)
    assert ref.chi_square_p_value(counts, ref.one_pass_law(conditional(model), BLANK, M)) > P_VALUE
    assert ref.chi_square_p_value(counts, law) < P_VALUE


@pytest.mark.parametrize("algorithm", ["tweedie", "any_order"])
def test_continuous_time_limit_is_random_order(model: RADDForMaskedDiffusion, algorithm: str):
    """No `num_steps`: one position a pass; one pass for both masks fails (user case 17)."""
    law = ref.random_order_law(conditional(model), PROMPT, M)
    counts = sample(model, PROMPT, 10_000, algorithm=algorithm, seed=3)
    assert all(x[1] == 2 for x in counts)
    assert ref.chi_square_p_value(counts, law) > 0.01
    assert ref.chi_square_p_value(sample(model, PROMPT, 3000, num_steps=1, seed=3), law) < P_VALUE


@pytest.mark.parametrize(("order", "positions"), [("forward", (0, 1, 2)), ("backward", (2, 1, 0)), ([1, 0, 2],) * 2])
@pytest.mark.parametrize("num_steps", [None, 2])
def test_any_order_has_the_law_of_its_order(
    model: RADDForMaskedDiffusion, order: str | list[int], positions: tuple[int, ...], num_steps: int | None
):
    law = ref.given_order_law(conditional(model), BLANK, M, positions, num_steps)
    counts = sample(model, BLANK, 5000, algorithm="any_order", order=order, num_steps=num_steps, seed=4)
    assert ref.chi_square_p_value(counts, law) > P_VALUE
    other = ref.given_order_law(conditional(model), BLANK, M, positions[::-1], num_steps)
    assert ref.chi_square_p_value(counts, other) < P_VALUE


@pytest.mark.parametrize("num_steps", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_any_order_random_has_the_mean_law_of_all_orders(model: RADDForMaskedDiffusion, num_steps: int | None):
    law = ref.random_order_law(conditional(model), BLANK, M, num_steps)
    counts = sample(model, BLANK, algorithm="any_order", num_steps=num_steps, seed=6)
    assert ref.chi_square_p_value(counts, law) > P_VALUE


def test_an_order_per_row(model: RADDForMaskedDiffusion):
    orders = torch.tensor([[0, 1, 2], [2, 0, 1]])
    x = torch.tensor([BLANK]).repeat(2, 1)
    out = model.diffusion_generate(x, algorithm="any_order", order=orders, num_return_sequences=4000, seed=8)
    for row, order in enumerate(orders.tolist()):
        counts = count(out[row * 4000 : (row + 1) * 4000])
        assert ref.chi_square_p_value(counts, ref.given_order_law(conditional(model), BLANK, M, order)) > P_VALUE
        other = orders[1 - row].tolist()
        assert ref.chi_square_p_value(counts, ref.given_order_law(conditional(model), BLANK, M, other)) < P_VALUE


def test_a_given_order_reveals_in_that_order_and_skips_fixed_positions(model: RADDForMaskedDiffusion):
    x = torch.tensor([[M, 0, M, M, 2, M]])
    options = {"algorithm": "any_order", "output_history": True, "return_dict_in_generate": True, "seed": 0}
    for order in ([3, 1, 0, 4, 5, 2], torch.tensor([3, 0, 5, 2]), torch.tensor([[3, 4, 0, 5, 2]])):
        out = model.diffusion_generate(x, order=order, **options)
        assert out.nfe.tolist() == [4]
        masks = [(ids[0] == M).nonzero()[:, 0].tolist() for _, ids in out.history]
        assert masks == [[0, 2, 5], [2, 5], [2], []]


def test_any_order_with_steps_reveals_groups(model: RADDForMaskedDiffusion):
    x = torch.full((1, 7), M)
    for num_steps, sizes in ((1, [7]), (2, [4, 3]), (3, [3, 3, 1]), (5, [2, 2, 2, 1]), (7, [1] * 7), (20, [1] * 7)):
        out = model.diffusion_generate(
            x,
            algorithm="any_order",
            order="forward",
            num_steps=num_steps,
            output_history=True,
            return_dict_in_generate=True,
        )
        left = [7] + [int((ids == M).sum()) for _, ids in out.history]
        assert [a - b for a, b in zip(left, left[1:], strict=False)] == sizes
        assert out.forward_passes == len(sizes)
        assert out.nfe.item() == ref.expected_nfe(None, "any_order", ref.uniform_grid(num_steps), 7)


# Reveal plans and cost


@pytest.mark.parametrize("schedule", ["log_linear", "geometric", "cosine"])
@pytest.mark.parametrize("algorithm", ["tweedie", "euler"])
def test_reveal_steps_follow_the_reveal_distribution(algorithm: str, schedule: str):
    options = RADDGenerationConfig(algorithm=algorithm, num_steps=6, use_cache=False)
    free = torch.ones(2, 15_000, dtype=torch.bool)
    free[0, ::3] = False
    plan = draw_reveal_plan(free, options, get_noise_schedule(schedule), [seeded(1), seeded(2)])
    assert plan.event.shape == (1, *free.shape)
    assert torch.equal(plan.event[0] >= 0, free)
    r = ref.reveal_distribution(ref.Schedule(schedule), algorithm, ref.uniform_grid(6))
    law = {(step,): p for step, p in enumerate(reversed(r))}  # event 0 is the step from t_n
    assert ref.chi_square_p_value(Counter((step,) for step in plan.event[0][free].tolist()), law) > P_VALUE


def test_cached_plan_drops_empty_steps_only():
    free = torch.rand(40, 9, generator=seeded(0)) < 0.6
    free[3] = False
    plans = []
    for use_cache in (True, False):
        options = RADDGenerationConfig(num_steps=7, use_cache=use_cache)
        plans.append(draw_reveal_plan(free, options, get_noise_schedule(), [seeded(i) for i in range(40)]))
    cached, full = plans
    assert cached.nfe[3] == full.nfe[3] == 0
    assert (full.nfe[free.any(-1)] == 7).all()
    for row in free.any(-1).nonzero()[:, 0].tolist():
        steps, rank = full.event[0, row][free[row]].unique(return_inverse=True)
        assert torch.equal(cached.event[0, row][free[row]], rank)
        assert cached.nfe[row] == len(steps)


class Passes:
    """Counts the batched calls of a network's trunk and the rows in them."""

    def __init__(self, model: RADDForMaskedDiffusion):
        self.rows: list[int] = []
        self.handle = model.model.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module: nn.Module, args: tuple, kwargs: dict):
        self.rows.append(len(kwargs["input_ids"]))

    def __enter__(self) -> "Passes":
        return self

    def __exit__(self, *error):
        self.handle.remove()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("algorithm", ["tweedie", "euler"])
def test_measured_nfe_is_expected_nfe(make_model: Builder, algorithm: str, schedule: str):
    model = make_model(noise_schedule=schedule)
    options = {"batch_size": 400, "max_length": 12, "num_steps": 8, "algorithm": algorithm, "seed": 1}
    with Passes(model) as passes:
        out = model.diffusion_generate(return_dict_in_generate=True, **options)
    assert isinstance(out, RADDGenerationOutput)
    assert len(passes.rows) == out.forward_passes == out.nfe.max()
    assert sum(passes.rows) == out.nfe.sum()
    nfe = out.nfe.double()
    expected = ref.expected_nfe(ref.Schedule(schedule), algorithm, ref.uniform_grid(8), 12)
    assert abs(nfe.mean() - expected) < 3 * nfe.std() / math.sqrt(len(nfe))
    assert radd_hf_expected_nfe(8, 12, algorithm, schedule) == pytest.approx(expected, rel=1e-9)


def radd_hf_expected_nfe(*args) -> float:
    from radd_hf import expected_nfe

    return expected_nfe(*args)


def test_nfe_of_a_long_sequence():
    """1,024 tokens in 1,024 steps: n (1 - (1 - 1/n)^l), user case 42."""
    free = torch.ones(50, 1024, dtype=torch.bool)
    options = RADDGenerationConfig(num_steps=1024)
    nfe = draw_reveal_plan(free, options, get_noise_schedule(), [seeded(i) for i in range(50)]).nfe.double()
    expected = 1024 * (1 - (1 - 1 / 1024) ** 1024)
    assert abs(nfe.mean() - expected) < 3 * nfe.std() / math.sqrt(50)


@pytest.mark.parametrize("algorithm", ["tweedie", "euler"])
def test_without_cache_the_tokens_are_the_same(wide_model: RADDForMaskedDiffusion, algorithm: str):
    x = torch.tensor([[4, 4, 4, 0, 4], [1, 4, 2, 3, 0], [5, 5, 5, 5, 5]])
    options = {"algorithm": algorithm, "num_steps": 30, "seed": 2, "return_dict_in_generate": True}
    cached = wide_model.diffusion_generate(x, **options)
    with Passes(wide_model) as passes:
        full = wide_model.diffusion_generate(x, use_cache=False, **options)
    assert torch.equal(cached.sequences, full.sequences)
    assert full.nfe.tolist() == [30, 30, 0] and full.forward_passes == len(passes.rows) == 30
    assert cached.nfe[1] == 1 and 1 < cached.nfe[0] <= 4 and cached.nfe[2] == 0


# What never happens


FILTERS = {
    "plain": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "temperature": {"temperature": 3.0},
    "greedy": {"do_sample": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["tweedie", "euler", "any_order"])
def test_fixed_ids_stay_and_no_mask_comes_out(make_model: Builder, algorithm: str, dtype: torch.dtype):
    model = make_model(vocab_size=11, mask_token_id=4).to(dtype)
    with torch.no_grad():
        model.lm_head.bias[4] = 100.0  # the mask would win if anything looked at its column
    generator = seeded(0)
    for num_steps in (1, 2, 7, 64):
        for name, filters in FILTERS.items():
            x = torch.randint(11, (4, 9), generator=generator)
            fixed = torch.rand(4, 9, generator=generator) < 0.4
            x = torch.where(fixed & (x != 4), x, torch.full_like(x, 4))
            given = x.clone()
            out = model.diffusion_generate(x, algorithm=algorithm, num_steps=num_steps, seed=num_steps, **filters)
            assert torch.equal(x, given), "the argument was changed in place"
            assert torch.equal(out[x != 4], x[x != 4]), name
            assert not (out == 4).any(), name
            assert ((out >= 0) & (out < 11)).all()


@pytest.mark.parametrize("algorithm", ["tweedie", "any_order"])
def test_padding_is_never_filled(wide_model: RADDForMaskedDiffusion, algorithm: str):
    x = torch.tensor([[4, 4, 3, 4, 4], [4, 4, 4, 4, 4]])
    real = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    out = wide_model.diffusion_generate(
        x, attention_mask=real, algorithm=algorithm, num_steps=3, seed=0, return_dict_in_generate=True
    )
    assert out.sequences[0, [0, 4]].tolist() == [4, 4]
    assert not (out.sequences[real.bool()] == 4).any()
    assert out.nfe[0] <= 2


def test_no_mask_returns_the_input_with_a_warning(model: RADDForMaskedDiffusion):
    x = torch.tensor([[0, 2, 3]])
    with Passes(model) as passes, pytest.warns(UserWarning, match="No mask token in `input_ids`"):
        out = model.diffusion_generate(x, return_dict_in_generate=True)
    assert torch.equal(out.sequences, x)
    assert out.nfe.tolist() == [0] and out.forward_passes == 0 and passes.rows == []


# Reproducibility


def ragged_rows() -> list[torch.Tensor]:
    generator = seeded(9)
    rows = [torch.randint(11, (length,), generator=generator) for length in (5, 9, 3, 7, 4, 12, 6, 8)]
    return [torch.where(torch.rand(len(row), generator=generator) < 0.7, 4, row) for row in rows]


@pytest.mark.parametrize("options", [{"num_steps": 5}, {"algorithm": "any_order"}, {"top_p": 0.8, "num_steps": 3}])
def test_a_row_does_not_depend_on_its_batch_or_padding(wide_model: RADDForMaskedDiffusion, options: dict):
    rows = ragged_rows()
    seeds = [100 + i for i in range(len(rows))]
    single = [
        wide_model.diffusion_generate(row[None], seed=[s], return_dict_in_generate=True, **options)
        for row, s in zip(rows, seeds, strict=True)
    ]
    for size in (3, 8):
        for side in ("left", "right"):
            x = nn.utils.rnn.pad_sequence(rows[:size], batch_first=True, padding_value=0, padding_side=side)
            ones = [torch.ones(len(row), dtype=torch.long) for row in rows[:size]]
            real = nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side=side)
            out = wide_model.diffusion_generate(
                x, attention_mask=real, seed=seeds[:size], return_dict_in_generate=True, **options
            )
            assert (out.sequences[~real.bool()] == 0).all()
            for i in range(size):
                assert torch.equal(out.sequences[i][real[i].bool()], single[i].sequences[0]), (size, side, i)
                assert out.nfe[i] == single[i].nfe[0]


def test_seeds(wide_model: RADDForMaskedDiffusion):
    def draw(rows: int, **options) -> torch.Tensor:
        return wide_model.diffusion_generate(batch_size=rows, max_length=10, **options)

    eight = draw(8, seed=5)
    assert torch.equal(eight, draw(8, seed=5))
    assert torch.equal(eight[:3], draw(3, seed=5)) and torch.equal(eight[:1], draw(1, seed=5))
    assert not torch.equal(eight, draw(8, seed=6))
    assert len(eight.unique(dim=0)) == 8
    listed = draw(3, seed=[7, 5, 7])
    assert torch.equal(listed[0], listed[2]) and not torch.equal(listed[0], listed[1])
    assert torch.equal(listed[1], eight[0])
    several = draw(2, seed=[1, 2, 3, 4], num_return_sequences=2)
    assert torch.equal(several[2], draw(1, seed=3)[0])


def test_generator_draws_the_row_seeds(wide_model: RADDForMaskedDiffusion):
    def draw(rows: int, generator: torch.Generator, **options) -> torch.Tensor:
        return wide_model.diffusion_generate(batch_size=rows, max_length=10, generator=generator, **options)

    generator = seeded(3)
    eight = draw(8, generator)
    state = generator.get_state()
    assert torch.equal(eight[:3], draw(3, seeded(3)))
    assert not torch.equal(eight, draw(8, generator)), "the generator must move on"
    other = seeded(3)
    draw(8, other, num_steps=2)
    assert torch.equal(other.get_state(), state), "only the row seeds come from it"


def test_global_random_state(wide_model: RADDForMaskedDiffusion):
    x = torch.full((2, 6), 4)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for source in ({"seed": 1}, {"seed": [1, 2]}, {"generator": seeded(1)}):
        wide_model.diffusion_generate(x, num_steps=3, **source)
        assert torch.equal(torch.get_rng_state(), state), source
    first = wide_model.diffusion_generate(x)
    assert not torch.equal(wide_model.diffusion_generate(x), first)
    torch.manual_seed(0)
    assert torch.equal(wide_model.diffusion_generate(x), first)


# The canvas


def test_max_new_tokens_with_a_padded_batch(wide_model: RADDForMaskedDiffusion):
    rows = [torch.tensor([1, 2, 3]), torch.tensor([5]), torch.tensor([6, 4, 7, 8])]
    options = {"max_new_tokens": 3, "num_steps": 4, "pad_token_id": 9}
    for side in ("left", "right"):
        x = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0, padding_side=side)
        real = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True, padding_side=side)
        out = wide_model.diffusion_generate(x, attention_mask=real, seed=[1, 2, 3], **options)
        assert out.shape == (3, 7)
        assert out[0, :1].tolist() == [9] and out[1, :3].tolist() == [9, 9, 9]
        assert out[0, 1:4].tolist() == [1, 2, 3] and out[1, 3] == 5
        assert out[2, [0, 2, 3]].tolist() == [6, 7, 8] and not (out == 4).any()
        for i, row in enumerate(rows):
            alone = wide_model.diffusion_generate(row[None], seed=[i + 1], **options)[0]
            assert torch.equal(out[i, 7 - len(alone) :], alone), (side, i)


def test_max_length_fills_up_to_it(wide_model: RADDForMaskedDiffusion):
    out = wide_model.diffusion_generate(torch.tensor([[1, 2, 3]]), max_length=8, seed=0)
    assert out.shape == (1, 8) and out[0, :3].tolist() == [1, 2, 3] and not (out == 4).any()
    x, real = torch.tensor([[1, 2, 3], [0, 0, 5]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    out = wide_model.diffusion_generate(x, attention_mask=real, max_length=6, seed=0)
    assert out.shape == (2, 6) and out[1, 0] == 5 and not (out == 4).any()
    out = wide_model.diffusion_generate(torch.tensor([[1, 2, 3]]), max_length=8, max_new_tokens=1, seed=0)
    assert out.shape == (1, 4), "max_new_tokens comes first"


def test_no_new_tokens_fills_the_holes(wide_model: RADDForMaskedDiffusion):
    x = torch.tensor([[1, 4, 3, 4]])
    out = wide_model.diffusion_generate(x, max_new_tokens=0, seed=0)
    assert out.shape == (1, 4) and out[0, [0, 2]].tolist() == [1, 3] and not (out == 4).any()
    assert torch.equal(out, wide_model.diffusion_generate(x, seed=0))


def test_unconditional_shapes(wide_model: RADDForMaskedDiffusion):
    assert wide_model.diffusion_generate(num_steps=2).shape == (1, 64)
    assert wide_model.diffusion_generate(batch_size=3, max_length=5).shape == (3, 5)
    assert wide_model.diffusion_generate(batch_size=2, max_new_tokens=4).shape == (2, 4)
    assert wide_model.diffusion_generate(batch_size=2, max_length=4, num_return_sequences=3).shape == (6, 4)


def test_generate_is_diffusion_generate(wide_model: RADDForMaskedDiffusion):
    x = torch.tensor([[1, 4, 4]])
    assert torch.equal(wide_model.generate(x, seed=1), wide_model.diffusion_generate(x, seed=1))


# Options, one at a time


def test_filters_keep_what_they_should(bias_model: RADDForMaskedDiffusion):
    tokens = {
        name: {token for (token,) in drawn(bias_model, **filters)}
        for name, filters in {
            "none": {},
            "top_k": {"top_k": 2},
            "top_k above V": {"top_k": 50},
            "top_p": {"top_p": 0.7},
            "top_p 1": {"top_p": 1.0},
            "min_p": {"min_p": 0.2},
            "typical_p": {"typical_p": 0.2},
            "greedy": {"do_sample": False},
            "temperature 0": {"temperature": 0.0},
            "suppress": {"suppress_tokens": [0, 3]},
        }.items()
    }
    assert tokens == {
        "none": {0, 1, 2, 3, 4},
        "top_k": {0, 1},
        "top_k above V": {0, 1, 2, 3, 4},
        "top_p": {0, 1},
        "top_p 1": {0, 1, 2, 3, 4},
        "min_p": {0, 1, 2},
        "typical_p": {1},
        "greedy": {0},
        "temperature 0": {0},
        "suppress": {1, 2, 4},
    }


@pytest.mark.parametrize("sampling_dtype", ["float64", "float32"])
def test_draws_have_the_softmax_law(
    bias_model: RADDForMaskedDiffusion, sampling_dtype: str, monkeypatch: pytest.MonkeyPatch
):
    dtypes, exponential = set(), torch.Tensor.exponential_
    monkeypatch.setattr(
        torch.Tensor, "exponential_", lambda x, *a, **k: (dtypes.add(x.dtype), exponential(x, *a, **k))[1]
    )
    for temperature in (None, 0.5, 2.0):
        power = 1 / (temperature or 1.0)
        counts = drawn(bias_model, 5000, temperature=temperature, sampling_dtype=sampling_dtype)
        law = law_of({token: p**power for token, p in enumerate(PROBABILITIES)})
        assert ref.chi_square_p_value(counts, law) > P_VALUE, temperature
    assert dtypes == {getattr(torch, sampling_dtype)}
    assert ref.chi_square_p_value(counts, law_of(dict(enumerate(PROBABILITIES)))) < P_VALUE


def test_suppressed_favourite_never_appears(bias_model: RADDForMaskedDiffusion):
    counts = drawn(bias_model, 5000, suppress_tokens=[0])
    assert ref.chi_square_p_value(counts, law_of({t: p for t, p in enumerate(PROBABILITIES) if t})) > P_VALUE
    assert drawn(bias_model, suppress_tokens=[0], do_sample=False) == {(1,): 2000}


def test_repetition_penalty_reads_the_canvas(bias_model: RADDForMaskedDiffusion):
    x = torch.full((10, 300), 5)
    x[:, 0] = 0
    out = bias_model.diffusion_generate(x, repetition_penalty=3.0, num_steps=1, seed=1)[:, 1:]
    law = law_of({token: p**3 if token == 0 else p for token, p in enumerate(PROBABILITIES)})
    counts = Counter((token,) for token in out.flatten().tolist())
    assert ref.chi_square_p_value(counts, law) > P_VALUE


def test_algorithm_steps_and_order_options(make_model: Builder):
    model = make_model(noise_schedule="geometric")
    x = torch.full((200, 10), M)

    def nfe(**options) -> torch.Tensor:
        return model.diffusion_generate(x, seed=1, return_dict_in_generate=True, **options).nfe.double()

    assert (nfe() == 10).all(), "the default is one position a pass"
    assert (nfe(num_steps=1) == 1).all()
    tweedie, euler = nfe(num_steps=6), nfe(num_steps=6, algorithm="euler")
    assert abs(tweedie.mean() - euler.mean()) > 0.1
    assert (nfe(num_steps=6, algorithm="any_order") == 5).all()
    history = {}
    for order in ("forward", "backward"):
        out = model.diffusion_generate(
            x[:1], algorithm="any_order", order=order, output_history=True, return_dict_in_generate=True
        )
        history[order] = int((out.history[0][1][0] != M).nonzero())
    assert history == {"forward": 0, "backward": 9}


def test_greedy_takes_the_likeliest_token(wide_model: RADDForMaskedDiffusion):
    x = torch.tensor([[4, 1, 4, 4, 2]])
    expected = x.clone()
    for i in (0, 2, 3):
        expected[0, i] = wide_model(expected).logits[0, i].argmax()
    for options in ({"do_sample": False}, {"temperature": 0}, {"temperature": 0.0, "top_k": 2}):
        for seed in (0, 1):
            out = wide_model.diffusion_generate(x, algorithm="any_order", order="forward", seed=seed, **options)
            assert torch.equal(out, expected)


def test_num_return_sequences_are_independent_and_in_row_order(wide_model: RADDForMaskedDiffusion):
    x = torch.tensor([[1, 4, 4, 4, 4, 4], [2, 4, 4, 4, 4, 4]])
    out = wide_model.diffusion_generate(x, num_return_sequences=4, seed=0)
    assert out[:, 0].tolist() == [1] * 4 + [2] * 4
    assert len(out.unique(dim=0)) == 8
    repeated = wide_model.diffusion_generate(x.repeat_interleave(4, 0), seed=0)
    assert torch.equal(out, repeated)


def test_history_has_one_entry_a_pass(wide_model: RADDForMaskedDiffusion):
    x = torch.tensor([[4, 4, 4, 4, 0], [1, 4, 2, 4, 3]])
    out = wide_model.diffusion_generate(x, seed=1, output_history=True, return_dict_in_generate=True)
    assert out.nfe.tolist() == [4, 2] and len(out.history) == out.forward_passes == 4
    assert [rows.tolist() for rows, _ in out.history] == [[0, 1], [0, 1], [0], [0]]
    canvas = x.clone()
    for rows, ids in out.history:
        changed = ids != canvas[rows]
        assert (changed.sum(-1) == 1).all() and (canvas[rows][changed] == 4).all()
        canvas[rows] = ids
    assert torch.equal(canvas, out.sequences)
    assert wide_model.diffusion_generate(x, return_dict_in_generate=True).history is None


def test_output_type(wide_model: RADDForMaskedDiffusion):
    x = torch.tensor([[4, 4]])
    assert torch.is_tensor(wide_model.diffusion_generate(x))
    out = wide_model.diffusion_generate(x, return_dict_in_generate=True)
    assert isinstance(out, RADDGenerationOutput) and torch.is_tensor(out.sequences)


@pytest.mark.parametrize(("algorithm", "total"), [("tweedie", 6), ("confidence", None)])
def test_progress_bar_counts_passes(
    wide_model: RADDForMaskedDiffusion, monkeypatch: pytest.MonkeyPatch, algorithm: str, total: int | None
):
    bars = []

    def tqdm(**kwargs) -> transformers.utils.logging.EmptyTqdm:
        bar = transformers.utils.logging.EmptyTqdm()
        bar.total, bar.disable, bar.updates = kwargs["total"], kwargs["disable"], 0
        bar.update = lambda: setattr(bar, "updates", bar.updates + 1)
        bars.append(bar)
        return bar

    monkeypatch.setattr(generation_radd.logging, "tqdm", tqdm)
    wide_model.diffusion_generate(torch.full((1, 6), 4), algorithm=algorithm)
    wide_model.diffusion_generate(torch.full((1, 6), 4), algorithm=algorithm, progress_bar=True)
    assert [(bar.total, bar.disable, bar.updates) for bar in bars] == [(total, True, 6), (total, False, 6)]


def test_chunks_bound_the_logits_and_change_nothing(
    wide_model: RADDForMaskedDiffusion, monkeypatch: pytest.MonkeyPatch
):
    sizes, compute = [], wide_model.compute_logits

    def spy(hidden_states: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden_states)
        sizes.append(tuple(logits.shape))
        return logits

    monkeypatch.setattr(wide_model, "compute_logits", spy)
    x = torch.full((6, 20), 4)
    results = {}
    for chunk_size in (1, 7, 256):
        sizes.clear()
        results[chunk_size] = wide_model.diffusion_generate(x, num_steps=3, seed=2, top_k=5, chunk_size=chunk_size)
        assert max(rows for rows, _ in sizes) <= chunk_size
        assert sum(rows for rows, _ in sizes) == 120, "each position is computed once"
    assert max(rows for rows, _ in sizes) > 7
    assert torch.equal(results[1], results[7]) and torch.equal(results[7], results[256])


def test_mask_and_pad_token_options(make_model: Builder):
    wide_model = make_model(vocab_size=11, mask_token_id=4)
    with torch.no_grad():
        wide_model.lm_head.bias[7] = 100.0  # this network itself does not exclude id 7
    x = torch.tensor([[7, 1, 7]])
    for options in ({}, {"do_sample": False}, {"top_k": 1}, {"top_p": 0.5}):
        out = wide_model.diffusion_generate(x, mask_token_id=7, seed=0, **options)
        assert out[0, 1] == 1 and not (out == 7).any()
    x, real = torch.tensor([[1, 2], [0, 3]]), torch.tensor([[1, 1], [0, 1]])
    for pad in (8, 9):
        out = wide_model.diffusion_generate(x, attention_mask=real, max_new_tokens=1, pad_token_id=pad)
        assert out[1, 0] == pad


def test_options_come_from_the_call_then_the_config_then_the_model(make_model: Builder):
    model = make_model()
    x = torch.full((1, 8), M)

    def passes(*args, **kwargs) -> int:
        return model.diffusion_generate(x, *args, return_dict_in_generate=True, **kwargs).forward_passes

    model.generation_config = RADDGenerationConfig(algorithm="any_order", num_steps=2)
    assert passes() == 2
    assert passes(RADDGenerationConfig(algorithm="any_order", num_steps=4)) == 4
    assert passes(RADDGenerationConfig(algorithm="any_order", num_steps=4), num_steps=1) == 1
    assert model.generation_config.num_steps == 2


def test_generation_config_round_trip(tmp_path):
    config = RADDGenerationConfig(algorithm="euler", num_steps=9, top_p=0.5, order=[2, 0, 1], chunk_size=3)
    config.save_pretrained(tmp_path)
    loaded = RADDGenerationConfig.from_pretrained(tmp_path)
    for name in GENERATION_OPTIONS:
        assert getattr(loaded, name) == getattr(config, name), name


class Recording(LogitsProcessor):
    """Keeps the shapes it sees and forbids some tokens."""

    def __init__(self, forbidden: list[int]):
        self.forbidden, self.seen = forbidden, []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.seen.append((tuple(input_ids.shape), tuple(scores.shape), scores.dtype, input_ids.clone()))
        scores = scores.clone()
        scores[:, self.forbidden] = float("-inf")
        scores[:, 4] = 50.0  # a processor cannot bring the mask back
        return scores


def test_logits_processors_see_every_revealed_position(make_model: Builder):
    model = make_model(vocab_size=11, mask_token_id=4).to(torch.bfloat16)
    processor = Recording([0, 1, 2, 3, 5, 6, 7, 8])
    x = torch.tensor([[4, 4, 0, 4], [4, 1, 2, 3]])
    for processors in ([processor], LogitsProcessorList([processor])):
        for do_sample in (False, True):
            processor.seen.clear()
            out = model.diffusion_generate(x, logits_processor=processors, num_steps=1, seed=0, do_sample=do_sample)
            assert set(out[x == 4].tolist()) <= {9, 10} and torch.equal(out[x != 4], x[x != 4])
        assert [seen[:3] for seen in processor.seen] == [((4, 4), (4, 11), torch.float32)]
        assert torch.equal(processor.seen[0][3], x[[0, 0, 0, 1]])


# Streamers


class Tokenizer:
    """Letters for ids."""

    def decode(self, ids, **kwargs) -> str:
        return "".join("abcd_fghijk"[int(i)] for i in ids)


class Queue:
    """What `TextIteratorStreamer` has: put and end, no drafts."""

    def __init__(self):
        self.values: list = []

    def put(self, value: torch.Tensor):
        self.values.append(value.clone())

    def end(self):
        self.values.append(None)


class DraftQueue(Queue):
    """What `TextDiffusionStreamer` adds."""

    def __init__(self):
        super().__init__()
        self.drafts: list[torch.Tensor] = []

    def put_draft(self, value: torch.Tensor, **kwargs):
        self.drafts.append(value.clone())


def test_streamer_receives_prefix_drafts_and_rest(wide_model: RADDForMaskedDiffusion):
    x = torch.tensor([[1, 2, 4, 3, 4, 4]])
    for streamer in (Queue(), DraftQueue()):
        out = wide_model.diffusion_generate(x, streamer=streamer, seed=0)
        assert streamer.values[0].tolist() == [1, 2]
        assert streamer.values[1].tolist() == out[0, 2:].tolist()
        assert streamer.values[2] is None and len(streamer.values) == 3
    assert [int((draft == 4).sum()) for draft in streamer.drafts] == [2, 1, 0]
    assert torch.equal(out, wide_model.diffusion_generate(x, seed=0))


def test_text_iterator_streamer(wide_model: RADDForMaskedDiffusion):
    streamer = transformers.TextIteratorStreamer(Tokenizer(), skip_prompt=True)
    out = wide_model.diffusion_generate(torch.tensor([[1, 2, 4, 3, 4]]), streamer=streamer, seed=0)
    assert "".join(streamer) == Tokenizer().decode(out[0, 2:])


@pytest.mark.skipif(not hasattr(transformers, "TextDiffusionStreamer"), reason="transformers is older")
def test_text_diffusion_streamer(wide_model: RADDForMaskedDiffusion, capsys: pytest.CaptureFixture):
    streamer = transformers.TextDiffusionStreamer(Tokenizer())
    out = wide_model.diffusion_generate(torch.tensor([[4, 4, 3, 4]]), streamer=streamer, seed=0)
    text = capsys.readouterr().out
    assert text.count("\033[33m") == 3, "one draft a pass"
    assert text.rsplit("\033[J", 1)[1] == Tokenizer().decode(out[0]) + "\n"


# The model's state


def test_dropout_is_off_and_training_mode_comes_back(make_model: Builder):
    model = make_model(hidden_dropout=0.9, num_hidden_layers=2)
    x = torch.full((3, 8), M)
    expected = model.diffusion_generate(x, num_steps=4, seed=1)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert torch.equal(model.diffusion_generate(x, num_steps=4, seed=1), expected)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ValueError, match="leave no token to draw"):
        model.diffusion_generate(x, suppress_tokens=[0, 2, 3])
    assert [module.training for module in model.modules()] == modes


def test_no_gradients_are_kept(model: RADDForMaskedDiffusion):
    with torch.enable_grad():
        out = model.diffusion_generate(torch.full((1, 3), M))
    assert not out.requires_grad


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_step": 4}, r"Unknown generation option\(s\) \['num_step'\]; valid options: .*'num_steps'.*'top_p'"),
        ({"num_beams": 4}, r"Unknown generation option\(s\) \['num_beams'\]"),
        (
            {"algorithm": "ddim"},
            r"`algorithm` must be one of \['tweedie', 'euler', 'any_order', 'confidence', .*\], got 'ddim'",
        ),
        ({"order": "left"}, r"`order` must be one of \['random', 'forward', 'backward'\] or a list .*, got 'left'"),
        ({"sampling_dtype": "float16"}, r"`sampling_dtype` must be one of \['float64', 'float32'\], got 'float16'"),
        ({"num_steps": 0}, r"`num_steps` must be a positive integer or None, got 0"),
        ({"num_steps": -1}, r"`num_steps` must be a positive integer or None, got -1"),
        ({"num_steps": 2.5}, r"`num_steps` must be a positive integer or None, got 2.5"),
        ({"temperature": -1.0}, r"`temperature` must be None or a number in \[0.0, 1e\+30\], got -1.0"),
        ({"top_p": 1.5}, r"`top_p` must be None or a number in \[0.0, 1.0\], got 1.5"),
        ({"top_k": 0}, r"`top_k` must be None or an integer of at least 1, got 0"),
        ({"chunk_size": 0}, r"`chunk_size` must be an integer of at least 1, got 0"),
        ({"num_return_sequences": 0}, r"`num_return_sequences` must be an integer of at least 1, got 0"),
        ({"max_new_tokens": -1}, r"`max_new_tokens` must be None or an integer of at least 0, got -1"),
        ({"do_sample": "yes"}, r"`do_sample` must be True or False, got 'yes'"),
        ({"suppress_tokens": ["a"]}, r"`suppress_tokens` must be a list of token ids"),
        ({"suppress_tokens": [0, 2, 3]}, "`suppress_tokens`, .* or the model leave no token to draw"),
        ({"mask_token_id": 4}, r"`mask_token_id` must be an id in \[0, vocab_size=4\), .* got 4"),
        ({"mask_token_id": -1}, r"`mask_token_id` must be None or an integer of at least 0, got -1"),
        ({"attention_mask": torch.ones(1, 4)}, r"`attention_mask` must have the shape .* \(2, 3\), got \(1, 4\)"),
        ({"attention_mask": torch.ones(2, 1, 3, 3)}, r"`attention_mask` must have the shape"),
        ({"max_new_tokens": 14}, r"fit max_position_embeddings=16, got length 17"),
        ({"max_length": 2}, r"`max_length` must be at least the length of `input_ids`, got 2 for a row of 3 tokens"),
        ({"batch_size": 2}, r"`batch_size` must be None where `input_ids` are given"),
        ({"seed": 1, "generator": torch.Generator()}, r"Only one of `seed` and `generator` may be given"),
        ({"seed": [1]}, r"`seed` must be an integer or a list of 2 integers, .* got \[1\]"),
        ({"seed": "one"}, r"`seed` must be an integer or a list of 2 integers, .* got 'one'"),
        ({"streamer": Queue()}, r"`streamer` must be None for more than one sequence, got 2 sequences"),
        ({"order": [0, 1, 2]}, r"`order` must be left at its default unless algorithm='any_order', got 'tweedie'"),
    ],
)
def test_bad_options_raise(model: RADDForMaskedDiffusion, options: dict, message: str):
    x = torch.tensor([[M, 2, M], [M, M, M]])
    given = x.clone()
    with pytest.raises(ValueError, match=message):
        model.diffusion_generate(x, **options)
    assert torch.equal(x, given)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (torch.tensor([0, 1, 3]), r"`order` must hold positions in \[0, 3\), got 0 to 3"),
        ([0, 1, -1], r"`order` must hold positions in \[0, 3\), got -1 to 1"),
        ([0, 1, 1], r"`order` must name each position once"),
        (torch.tensor([[0, 1, 2]] * 3), r"`order` must have shape \(L,\) or \(B, L\) .*\(2, 3\), got \(3, 3\)"),
        (torch.zeros(1, 1, 3, dtype=torch.long), r"`order` must have shape .* got \(1, 1, 3\)"),
        ([0, 2], r"`order` must contain every masked position, got none for \[1\]"),
        ([0.5, 1], r"`order` must be one of .* or a list of positions, got \[0.5, 1\]"),
    ],
)
def test_bad_orders_raise(model: RADDForMaskedDiffusion, order: object, message: str):
    with pytest.raises(ValueError, match=message):
        model.diffusion_generate(torch.full((2, 3), M), algorithm="any_order", order=order)


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        (torch.tensor([[M, 4]]), r"`input_ids` must be in \[0, vocab_size=4\), got values from 1 to 4"),
        (torch.tensor([[M, -1]]), r"`input_ids` must be in \[0, vocab_size=4\), got values from -1 to 1"),
        (torch.tensor([M, M]), r"`input_ids` must be an integer tensor of shape \(batch, length\), got \(2,\)"),
        (torch.ones(1, 2), r"`input_ids` must be an integer tensor"),
        ([[M, M]], r"`input_ids` must be an integer tensor of shape \(batch, length\), got list"),
        (torch.full((1, 17), M), r"fit max_position_embeddings=16, got length 17"),
    ],
)
def test_bad_ids_raise(model: RADDForMaskedDiffusion, input_ids: object, message: str):
    with Passes(model) as passes, pytest.raises(ValueError, match=message):
        model.diffusion_generate(input_ids)
    assert passes.rows == []


def test_bad_unconditional_calls_raise(model: RADDForMaskedDiffusion):
    with pytest.raises(ValueError, match="`attention_mask` must be None without `input_ids`"):
        model.diffusion_generate(attention_mask=torch.ones(1, 3))
    for batch_size in (0, -1, 1.5):
        with pytest.raises(ValueError, match="`batch_size` must be a positive integer"):
            model.diffusion_generate(batch_size=batch_size)
    with pytest.raises(ValueError, match="fit max_position_embeddings=16, got length 17"):
        model.diffusion_generate(max_length=17)


def test_filled_without_warnings(model: RADDForMaskedDiffusion):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.diffusion_generate(torch.full((1, 3), M), num_steps=2, top_p=0.9, top_k=2)
