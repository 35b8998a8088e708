"""The oracle against itself: identities of the paper that tie its functions to each other."""

import collections
import itertools
import math
import random

import pytest
import reference as ref
import torch

V, L, M = 3, 4, 3
CONDITIONAL = ref.random_conditional(V, seed=1, sharpness=1.0)
X0 = (2, 0, 1, 1)
FREE = (M,) * L
PROMPT = (M, 1, M, M)
SCHEDULES = [ref.Schedule("log_linear"), ref.Schedule("geometric"), ref.Schedule("cosine")]
BY_KIND = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
ALGORITHMS = pytest.mark.parametrize("algorithm", ["tweedie", "euler"])


def log_probs_of_table(ids: torch.Tensor) -> torch.Tensor:
    """CONDITIONAL as a network: ids (B, L) -> log-probabilities (B, L, V + 1), mask column -inf."""
    rows = torch.tensor([CONDITIONAL(tuple(row)) for row in ids.tolist()], dtype=torch.float64)
    return torch.cat([rows, torch.zeros_like(rows[..., :1])], dim=-1).log()


def reveal_plan_law(schedule: ref.Schedule, algorithm: str, num_steps: int, x: tuple[int, ...]) -> ref.Law:
    """DESIGN's sampler: every mask draws its step from r, steps without a position are skipped, n down to 1."""
    reveal = ref.reveal_distribution(schedule, algorithm, ref.uniform_grid(num_steps))
    hidden = ref.masked_positions(x, M)
    result: ref.Law = {}
    for steps in itertools.product(range(1, num_steps + 1), repeat=len(hidden)):
        law = {x: math.prod(reveal[step - 1] for step in steps)}
        for step in sorted(set(steps), reverse=True):
            now = [i for i, own in zip(hidden, steps, strict=True) if own == step]
            law = ref.fill(law, CONDITIONAL, now, M)
        for y, probability in law.items():
            result[y] = result.get(y, 0.0) + probability
    return result


# Schedules


@BY_KIND
def test_rate_is_the_derivative_of_the_total(schedule: ref.Schedule):
    for t in (0.05, 0.3, 0.5, 0.9, 0.97):
        h = 1e-6
        numerical = (schedule.sigma_bar(t + h) - schedule.sigma_bar(t - h)) / (2 * h)
        assert schedule.sigma(t) == pytest.approx(numerical, rel=1e-6)


@BY_KIND
def test_weight_is_the_log_derivative_of_the_mask_probability(schedule: ref.Schedule):
    for t in (0.05, 0.3, 0.5, 0.7, 0.95):
        h = 1e-6
        numerical = (math.log(schedule.mask_probability(t + h)) - math.log(schedule.mask_probability(t - h))) / (2 * h)
        # geometric at t = 0.95: lambda is within 1e-5 of 1, its logarithm's difference keeps fewer digits
        assert schedule.weight(t) == pytest.approx(numerical, rel=1e-5, abs=1e-9)


@BY_KIND
def test_inverse_undoes_the_mask_probability(schedule: ref.Schedule):
    for t in (0.05, 0.3, 0.5, 0.7):
        assert schedule.inverse(schedule.mask_probability(t)) == pytest.approx(t, abs=1e-9)


def test_mask_probabilities_by_hand():
    log_linear, geometric, cosine = SCHEDULES
    assert log_linear.mask_probability(0.25) == pytest.approx(0.999 * 0.25, rel=1e-12)
    assert log_linear.weight(0.25) == pytest.approx(4.0, rel=1e-12)
    assert cosine.mask_probability(2 / 3) == pytest.approx(0.999 * 0.5, rel=1e-12)
    assert geometric.sigma_bar(0.0) == pytest.approx(1e-4) and geometric.sigma_bar(1.0) == pytest.approx(20.0)
    assert geometric.sigma_bar(0.5) == pytest.approx(math.sqrt(1e-4 * 20.0))


@ALGORITHMS
def test_log_linear_unmask_probability_is_relative_time(algorithm: str):
    for t, s in ((1.0, 0.5), (0.6, 0.55), (0.2, 0.0)):
        assert ref.unmask_probability(SCHEDULES[0], algorithm, t, s) == pytest.approx((t - s) / t, rel=1e-12)


def test_euler_is_tweedie_to_first_order():
    for schedule in SCHEDULES[1:]:
        errors = []
        for h in (1e-3, 5e-4):
            tweedie = ref.unmask_probability(schedule, "tweedie", 0.5, 0.5 - h)
            errors.append(abs(tweedie - ref.unmask_probability(schedule, "euler", 0.5, 0.5 - h)))
        assert errors[0] / errors[1] == pytest.approx(4.0, rel=0.01)


# Bounds and losses


def test_quadrature_is_exact_on_polynomials_and_logarithms():
    nodes = ref.gauss_legendre(0.25, 1.0)
    assert sum(weight for _, weight in nodes) == pytest.approx(0.75, rel=1e-13)
    assert sum(weight * x**9 for x, weight in nodes) == pytest.approx((1 - 0.25**10) / 10, rel=1e-13)
    assert sum(weight / x for x, weight in nodes) == pytest.approx(math.log(4.0), rel=1e-13)


def test_bound_is_the_average_over_orders():
    bound = ref.exact_bound(CONDITIONAL, X0, M)
    assert bound == pytest.approx(ref.average_order_nll(CONDITIONAL, X0, M), rel=1e-12)
    assert ref.order_mixture_nll(CONDITIONAL, X0, M) < bound  # Jensen
    orders = [ref.order_nll(CONDITIONAL, X0, order, M) for order in itertools.permutations(range(L))]
    assert ref.forward_nll(CONDITIONAL, X0, M) == orders[0] and ref.backward_nll(CONDITIONAL, X0, M) == orders[-1]
    assert max(orders) - min(orders) > 0.1  # the random table's orders disagree, or the tests above say nothing


def test_bound_of_a_uniform_model_is_length_times_log_v():
    def uniform(x: ref.State) -> list[list[float]]:
        return [[1.0 / V] * V for _ in x]

    assert ref.exact_bound(uniform, X0, M) == pytest.approx(L * math.log(V), rel=1e-12)
    assert ref.exact_bound(uniform, X0, M, positions=(0, 2)) == pytest.approx(2 * math.log(V), rel=1e-12)


def test_context_equals_a_shorter_sequence():
    """With positions 1 and 3 fixed, the bound is that of a two-token model which has them built in."""

    def short(y: ref.State) -> list[list[float]]:
        rows = CONDITIONAL((y[0], X0[1], y[1], X0[3]))
        return [rows[0], rows[2]]

    expected = ref.exact_bound(short, (X0[0], X0[2]), M)
    assert ref.exact_bound(CONDITIONAL, X0, M, positions=(0, 2)) == pytest.approx(expected, rel=1e-12)
    assert ref.average_order_nll(CONDITIONAL, X0, M, positions=(0, 2)) == pytest.approx(expected, rel=1e-12)


def test_means_of_the_untruncated_losses_equal_the_bound():
    bound = ref.exact_bound(CONDITIONAL, X0, M)
    assert ref.ao_moment(CONDITIONAL, X0, M) == pytest.approx(bound, rel=1e-12)
    assert ref.lambda_dce_mean(CONDITIONAL, X0, M) == pytest.approx(bound, rel=1e-12)
    assert ref.truncated_bound(CONDITIONAL, X0, M, 0.0, 1.0) == pytest.approx(bound, rel=1e-12)


@BY_KIND
@pytest.mark.parametrize("time_eps", [1e-3, 0.2])
def test_means_of_the_time_losses_equal_the_truncated_bound(schedule: ref.Schedule, time_eps: float):
    low, high = schedule.mask_probability(time_eps), schedule.mask_probability(1.0)
    expected = ref.truncated_bound(CONDITIONAL, X0, M, low, high) / (1.0 - time_eps)
    assert ref.dse_moment(CONDITIONAL, X0, M, schedule, time_eps) == pytest.approx(expected, rel=1e-9)

    def entropy(p: float) -> float:
        return -p * math.log(p) - (1.0 - p) * math.log1p(-p)

    # t-DCE has -L int log((1 - lambda) / lambda) d lambda more, and that integral is the binary entropy
    expected -= L * (entropy(high) - entropy(low)) / (1.0 - time_eps)
    assert ref.t_dce_moment(CONDITIONAL, X0, M, schedule, time_eps) == pytest.approx(expected, rel=1e-9)


def test_truncation_bias_of_the_training_defaults_is_small():
    """With the log-linear eps = time_eps = 1e-3, the mean for a uniform model is the bound times 1 - eps: -0.1 %."""
    schedule = SCHEDULES[0]
    low, high = schedule.mask_probability(1e-3), schedule.mask_probability(1.0)
    # lambda-density 1 / lambda times lambda L log V masked nats: (high - low) L log V, divided by 1 - time_eps
    assert (high - low) / (1.0 - 1e-3) - 1.0 == pytest.approx(-1e-3, rel=1e-6)

    def uniform(x: ref.State) -> list[list[float]]:
        return [[1.0 / V] * V for _ in x]

    assert ref.dse_moment(uniform, X0, M, schedule, 1e-3) == pytest.approx((1.0 - 1e-3) * L * math.log(V), rel=1e-9)


@BY_KIND
def test_score_entropy_is_weight_times_cross_entropy(schedule: ref.Schedule):
    for t in (0.05, 0.5, 0.95):
        for mask in ref.all_masks(range(L)):
            xt = ref.masked(X0, mask, M)
            expected = schedule.weight(t) * ref.cross_entropy(CONDITIONAL, X0, mask, M)
            actual = ref.score_entropy(CONDITIONAL, X0, xt, t, schedule, M)
            assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_mask_token_id_may_be_any_id():
    """The same model with M moved from 3 to 1: ids 1, 2 become 2, 3; every figure stays."""
    there = {0: 0, 1: 2, 2: 3, M: 1}
    back = {new: old for old, new in there.items()}

    def moved(x: ref.State) -> list[list[float]]:
        return CONDITIONAL(tuple(back[token] for token in x))

    y0 = tuple(there[token] for token in X0)
    assert ref.token_ids(V, 1) == [0, 2, 3]
    assert ref.exact_bound(moved, y0, 1) == pytest.approx(ref.exact_bound(CONDITIONAL, X0, M), rel=1e-12)
    law = ref.random_order_law(moved, (1,) * L, 1)
    expected = ref.random_order_law(CONDITIONAL, FREE, M)
    assert ref.total_variation(law, {tuple(there[i] for i in x): p for x, p in expected.items()}) < 1e-12


# Laws


@BY_KIND
@ALGORITHMS
@pytest.mark.parametrize("start", [FREE, PROMPT], ids=["free", "prompt"])
def test_step_by_step_law_equals_the_reveal_plan_law(schedule: ref.Schedule, algorithm: str, start: ref.State):
    for num_steps in (1, 2, 4):
        law = ref.step_by_step_law(CONDITIONAL, start, M, schedule, algorithm, ref.uniform_grid(num_steps))
        assert sum(law.values()) == pytest.approx(1.0, rel=1e-12)
        assert all(M not in x for x in law)
        assert all(token in (M, y) for x in law for token, y in zip(start, x, strict=True))
        assert ref.total_variation(law, reveal_plan_law(schedule, algorithm, num_steps, start)) < 1e-12


def test_one_step_is_the_one_pass_law_and_many_steps_the_random_order_law():
    schedule = SCHEDULES[0]
    exact = ref.random_order_law(CONDITIONAL, FREE, M)
    one_pass = ref.one_pass_law(CONDITIONAL, FREE, M)
    one_step = ref.step_by_step_law(CONDITIONAL, FREE, M, schedule, "tweedie", ref.uniform_grid(1))
    assert ref.total_variation(one_step, one_pass) < 1e-12
    distances = []
    for num_steps in (1, 10, 20):
        law = ref.step_by_step_law(CONDITIONAL, FREE, M, schedule, "tweedie", ref.uniform_grid(num_steps))
        distances.append(ref.total_variation(law, exact))
    assert distances[0] > 0.1  # a chi-square test can tell the wrong sampler
    assert distances[1] / distances[2] == pytest.approx(2.0, rel=0.05)  # first order in 1 / n
    assert distances[2] < 0.03


def test_random_order_law_is_the_mean_of_order_probabilities():
    law = ref.random_order_law(CONDITIONAL, FREE, M)
    assert sum(law.values()) == pytest.approx(1.0, rel=1e-12)
    assert -math.log(law[X0]) == pytest.approx(ref.order_mixture_nll(CONDITIONAL, X0, M), rel=1e-12)


def test_given_order_law():
    law = ref.given_order_law(CONDITIONAL, FREE, M, (2, 0, 3, 1))
    assert -math.log(law[X0]) == pytest.approx(ref.order_nll(CONDITIONAL, X0, (2, 0, 3, 1), M), rel=1e-12)
    prompted = ref.given_order_law(CONDITIONAL, PROMPT, M, (2, 0, 3, 1))
    short = ref.given_order_law(CONDITIONAL, PROMPT, M, (2, 0, 3))
    assert ref.total_variation(prompted, short) == 0.0  # fixed positions are skipped
    assert (
        ref.total_variation(
            ref.given_order_law(CONDITIONAL, FREE, M, range(L), 9), ref.given_order_law(CONDITIONAL, FREE, M, range(L))
        )
        == 0.0
    )


def test_any_order_in_groups():
    one_pass = ref.one_pass_law(CONDITIONAL, FREE, M)
    assert ref.total_variation(ref.random_order_law(CONDITIONAL, FREE, M, 1), one_pass) < 1e-12
    pairs = ref.given_order_law(CONDITIONAL, FREE, M, (3, 1, 0, 2), num_steps=2)
    first = ref.fill({FREE: 1.0}, CONDITIONAL, (1, 3), M)
    assert ref.total_variation(pairs, ref.fill(first, CONDITIONAL, (0, 2), M)) < 1e-12
    # three steps for four masks: ceil(4 / 3) = 2 at once, so two passes
    assert ref.total_variation(pairs, ref.given_order_law(CONDITIONAL, FREE, M, (3, 1, 0, 2), num_steps=3)) < 1e-12


# Number of passes


@ALGORITHMS
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_log_linear_reveal_distribution_is_uniform(algorithm: str, num_steps: int):
    reveal = ref.reveal_distribution(SCHEDULES[0], algorithm, ref.uniform_grid(num_steps))
    assert reveal == pytest.approx([1.0 / num_steps] * num_steps, rel=1e-12)
    closed_form = num_steps * (1.0 - (1.0 - 1.0 / num_steps) ** 5)  # eq. (Tweedie_E_NFE), l = 5
    assert ref.expected_nfe(SCHEDULES[0], algorithm, ref.uniform_grid(num_steps), 5) == pytest.approx(closed_form)


@BY_KIND
def test_tweedie_reveal_distribution_has_the_closed_form(schedule: ref.Schedule):
    """Eq. (r_k_tweedie), last member (erratum 4); with psi_1 := 1, r_1 has what was masked at t_0 as well."""
    times = [0.0, 0.1, 0.45, 0.5, 0.8, 1.0]
    reveal = ref.reveal_distribution(schedule, "tweedie", times)
    lam = [schedule.mask_probability(t) for t in times]
    assert sum(reveal) == pytest.approx(1.0, rel=1e-12)
    assert reveal[0] == pytest.approx(lam[1] / lam[-1], rel=1e-9)
    for k in range(2, len(times)):
        assert reveal[k - 1] == pytest.approx((lam[k] - lam[k - 1]) / lam[-1], rel=1e-6, abs=1e-12)


@BY_KIND
@ALGORITHMS
def test_reveal_distribution_sums_to_one(schedule: ref.Schedule, algorithm: str):
    assert sum(ref.reveal_distribution(schedule, algorithm, ref.uniform_grid(6))) == pytest.approx(1.0, rel=1e-12)


def test_expected_nfe_any_order_and_limits():
    assert ref.expected_nfe(SCHEDULES[0], "any_order", ref.uniform_grid(3), 8) == 3.0
    assert ref.expected_nfe(SCHEDULES[0], "any_order", ref.uniform_grid(5), 8) == 4.0
    assert ref.expected_nfe(SCHEDULES[1], "euler", ref.uniform_grid(4), 0) == 0.0
    assert ref.expected_nfe(SCHEDULES[0], "tweedie", ref.uniform_grid(1000), 8) == pytest.approx(8.0, rel=5e-3)


# The dense sampler and the chi-square helper


@pytest.mark.parametrize(
    ("schedule", "algorithm", "num_steps", "start"),
    [
        (SCHEDULES[0], "tweedie", 5, FREE),
        (SCHEDULES[1], "euler", 5, PROMPT),
        (SCHEDULES[1], "tweedie", 2, FREE),
    ],
    ids=["log_linear-tweedie", "geometric-euler-prompt", "geometric-tweedie"],
)
def test_dense_sampler_has_the_enumerated_law(
    schedule: ref.Schedule, algorithm: str, num_steps: int, start: ref.State
):
    rows, generator = 20_000, torch.Generator().manual_seed(11)
    ids, nfe, passes = ref.dense_cached_sampler(
        log_probs_of_table, torch.tensor([start] * rows), M, schedule, algorithm, num_steps, generator
    )
    counts = collections.Counter(tuple(row) for row in ids.tolist())
    law = ref.step_by_step_law(CONDITIONAL, start, M, schedule, algorithm, ref.uniform_grid(num_steps))
    assert ref.chi_square_p_value(counts, law) > 1e-3
    expected = ref.expected_nfe(schedule, algorithm, ref.uniform_grid(num_steps), len(ref.masked_positions(start, M)))
    error = nfe.double().std().item() / math.sqrt(rows)
    assert nfe.double().mean().item() == pytest.approx(expected, abs=4 * error)
    assert nfe.max().item() <= passes <= num_steps  # a pass serves the whole batch, whichever row changed


def test_dense_sampler_passes_equal_nfe_for_one_row():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        calls = []

        def network(ids: torch.Tensor, calls: list = calls) -> torch.Tensor:
            calls.append(ids)
            return log_probs_of_table(ids)

        ids, nfe, passes = ref.dense_cached_sampler(
            network, torch.tensor([PROMPT]), M, SCHEDULES[0], "tweedie", 12, generator
        )
        assert len(calls) == passes == nfe.item() <= 3
        assert ids[0, 1] == PROMPT[1] and not bool((ids == M).any())


def test_chi_square_accepts_its_own_law_and_rejects_another():
    law = ref.random_order_law(CONDITIONAL, FREE, M)
    states, weights = list(law), list(law.values())
    counts = collections.Counter(random.Random(5).choices(states, weights, k=20_000))
    assert ref.chi_square_p_value(counts, law) > 1e-3
    assert ref.chi_square_p_value(counts, ref.one_pass_law(CONDITIONAL, FREE, M)) < 1e-6
    five = ref.step_by_step_law(CONDITIONAL, FREE, M, SCHEDULES[0], "tweedie", ref.uniform_grid(5))
    wrong = random.Random(6).choices(states, [ref.one_pass_law(CONDITIONAL, FREE, M)[x] for x in states], k=20_000)
    assert ref.chi_square_p_value(collections.Counter(wrong), five) < 1e-6
    assert ref.chi_square_p_value({(0, 0, 0, 9): 1}, law) == 0.0


def test_chi_square_p_values_are_uniform_under_the_law():
    """300 samples of 400 draws, so that many cells are merged: about a tenth of the p-values lie below 0.1."""
    law = ref.random_order_law(CONDITIONAL, FREE, M)
    states, weights, generator = list(law), list(law.values()), random.Random(7)
    values = [
        ref.chi_square_p_value(collections.Counter(generator.choices(states, weights, k=400)), law) for _ in range(300)
    ]
    assert 0.05 < sum(value < 0.1 for value in values) / 300 < 0.16
    assert 0.4 < sum(value < 0.5 for value in values) / 300 < 0.6


def test_chi_square_merges_small_cells():
    law = {(0,): 0.5, (1,): 0.48, (2,): 0.01, (3,): 0.01}
    # expected 50, 48, 1, 1: the last two are 2 together, still below five, so (1,) joins them and one degree is left
    assert ref.chi_square_p_value({(0,): 50, (1,): 50}, law) == pytest.approx(1.0)
    assert ref.chi_square_p_value({(0,): 60, (1,): 40}, law) == pytest.approx(0.0455, abs=1e-4)
    assert ref.chi_square_p_value({(0,): 3}, {(0,): 1.0}) == 1.0


def test_wrapping_a_network_gives_the_same_conditional():
    wrapped = ref.conditional_of_network(log_probs_of_table, M)
    assert ref.exact_bound(wrapped, X0, M) == pytest.approx(ref.exact_bound(CONDITIONAL, X0, M), rel=1e-12)
