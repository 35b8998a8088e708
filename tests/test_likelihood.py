"""The variance-reduced bound: enumeration, calibration, cost, subsets, invariance to how rows are batched."""

import importlib.util
import itertools
import math
from pathlib import Path

import pytest
import torch
from reference import Conditional, average_order_nll, conditional_of_network, exact_bound, order_mixture_nll, order_nll
from torch import nn
from transformers.modeling_outputs import MaskedLMOutput

from radd_hf import estimate_likelihood
from radd_hf.likelihood import SequenceBound, draw_ao, group_sizes
from radd_hf.noise_schedule_radd import get_noise_schedule

MASK, LENGTH = 1, 4  # `make_model`: V = 3
IDS = torch.tensor([[0, 2, 3, 3], [2, 2, 0, 3]])


@pytest.fixture(scope="module")
def model(make_model):
    return make_model().double()


@pytest.fixture(scope="module")
def conditional(model) -> Conditional:
    return conditional_of_network(lambda x: torch.log_softmax(model(x).logits, -1), MASK)


class TableModel(nn.Module):
    """The exact conditionals q(x_i | unmasked tokens) of one joint distribution over {0, 2, 3}^4."""

    def __init__(self, seed: int):
        super().__init__()
        self.config = type("Config", (), {"vocab_size": 4, "mask_token_id": MASK})()
        states = list(itertools.product((0, 2, 3), repeat=LENGTH))
        self.states = torch.tensor(states)
        weight = torch.rand(len(states), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 4
        self.joint = weight / weight.sum()

    def probability(self, known: torch.LongTensor) -> float:
        """p of the positions that are not masked."""
        fits = ((self.states == known) | (known == MASK)).all(-1)
        return float(self.joint[fits].sum())

    def forward(self, input_ids, attention_mask=None, logits_to_keep=None):
        logits = torch.full((*input_ids.shape, 4), float("-inf"), dtype=torch.float64)
        for row, canvas in zip(logits, input_ids, strict=True):
            for i in range(LENGTH):
                for token in (0, 2, 3):
                    known = canvas.clone()
                    known[i] = token
                    row[i, token] = math.log(self.probability(known))
        return MaskedLMOutput(logits=logits if logits_to_keep is None else logits[logits_to_keep])


def splits() -> list[tuple[list[int], list[int]]]:
    """Every split of the 4 positions into two parts that are not empty: 14."""
    subsets = [list(s) for k in range(1, LENGTH) for s in itertools.combinations(range(LENGTH), k)]
    return [(s, [i for i in range(LENGTH) if i not in s]) for s in subsets]


def subset(positions: list[int]) -> torch.BoolTensor:
    return torch.zeros(1, LENGTH, dtype=torch.bool).index_fill(1, torch.tensor(positions), True)


# The draws


@pytest.mark.parametrize("size", [1, 3, 8])
def test_draws_weigh_every_mask_of_a_size_alike(size: int):
    """40,000 groups: E[sum over rows of scale 1(l in m)] = 1 - 1/S at each position, within 4.5 s.e."""
    length, groups = 5, 40_000
    draws = draw_ao(length, [size] * groups, length - 1, torch.Generator().manual_seed(size))
    terms = (draws.scale[:, None] * draws.masked).view(groups, size, length).sum(1)
    error = terms.std(0) / math.sqrt(groups)
    assert ((terms.mean(0) - (length - 1) / length).abs() < 4.5 * error).all()
    counts = draws.masked.sum(-1)
    assert counts.min() == 1 and counts.max() == length - 1
    weight = torch.zeros(length).double().index_add(0, counts, draws.scale * counts) / groups
    assert ((weight[1:] - 1).abs() < 0.05).all()  # E[width of rows with k masks] = 1 for each k


def test_masks_of_a_group_share_out_the_positions():
    """No position twice before each had its turn."""
    draws = draw_ao(12, [8] * 50, 11, torch.Generator().manual_seed(0))
    for group in draws.masked.view(50, 8, 12):
        covered = group.cumsum(0)
        assert (covered.max(-1).values - covered.min(-1).values <= 1).all()


@pytest.mark.parametrize("num_draws", [1, 2, 3, 7, 31, 32, 127, 128, 1000])
def test_group_sizes_use_every_draw(num_draws: int):
    sizes = group_sizes(num_draws, 8)
    assert sum(sizes) == num_draws and max(sizes) - min(sizes) <= 1
    assert len(sizes) >= min(num_draws, 2) and (num_draws < 32 or len(sizes) >= 16)
    assert num_draws < 128 or max(sizes) <= 9
    assert len(group_sizes(num_draws)) <= 16


# The estimate


@pytest.mark.parametrize(("loss_type", "draws"), [("ao", 4096), ("lambda_dce", 4096), ("dse", 4096), ("t_dce", 4096)])
def test_estimators_agree_with_enumeration(model, conditional, loss_type: str, draws: int):
    """Two sequences at a fixed seed within 3 s.e.; "dse" and "t_dce" leave out 0.1 % of the range of lambda."""
    found = estimate_likelihood(model, IDS, loss_type=loss_type, num_samples=draws, seed=3, batch_size=1024)
    for row, nll, error in zip(IDS.tolist(), found.nll.tolist(), found.standard_error.tolist(), strict=True):
        exact = exact_bound(conditional, row, MASK)
        left_out = 0.002 * exact if loss_type in ("dse", "t_dce") else 0.0
        assert abs(nll - exact) < 3 * error + left_out
        assert 0 < error < (0.15 if loss_type == "t_dce" else 0.05) * exact


@pytest.mark.parametrize("num_samples", [5, 33, 128])
def test_the_default_is_unbiased_and_its_error_calibrated(model, conditional, num_samples: int):
    """
    400 seeds: the mean within 4 of its errors; from 15 groups or more on, rms of (estimate - exact) / s.e. in
    [0.8, 1.25]; with fewer groups the mean squared error over the mean squared s.e. in [0.7, 1.4].
    """
    exact = exact_bound(conditional, IDS[0].tolist(), MASK)
    many = estimate_likelihood(model, IDS[:1].expand(400, -1), num_samples=num_samples, seed=11, batch_size=4096)
    deviation = many.nll - exact
    assert abs(deviation.mean()) < 4 * deviation.std() / 20
    if num_samples > 32:
        assert 0.8 < (deviation / many.standard_error).square().mean().sqrt() < 1.25
    assert 0.7 < deviation.square().mean() / many.standard_error.square().mean() < 1.4


def test_error_halves_with_four_times_the_draws(model):
    """Root mean square over 25 seeds, 65 against 257 draws and 257 against 1,025: a ratio of 0.5 within 20 %."""
    errors = [
        estimate_likelihood(model, IDS[:1].expand(25, -1), num_samples=n, seed=5, batch_size=4096)
        .standard_error.square()
        .mean()
        .sqrt()
        for n in (65, 257, 1025)
    ]
    for more, fewer in itertools.pairwise(errors):
        assert 0.4 < fewer / more < 0.6


def test_variance_is_a_tenth_of_plain_lambda_draws(make_model):
    """
    S = 48, 64 rows a sequence, 20 seeds: the mean squared s.e. at most 1/10 of the variance of plain uniform draws of
    lambda over 64 (4,000 such draws).
    """
    wide = make_model(vocab_size=32, max_position_embeddings=48)
    ids = torch.randint(2, 32, (1, 48), generator=torch.Generator().manual_seed(0))
    found = estimate_likelihood(wide, ids.expand(20, -1), num_samples=64, seed=0, batch_size=512)
    plain = SequenceBound(
        ids[0],
        torch.ones(48, dtype=torch.bool),
        "lambda_dce",
        get_noise_schedule("log_linear"),
        torch.Generator().manual_seed(1),
    )
    lam = torch.rand(4000, 1, generator=plain.generator, dtype=torch.float64)
    masked = torch.rand(4000, 48, generator=plain.generator, dtype=torch.float64) < lam
    with torch.no_grad():
        log_probs = torch.log_softmax(wide(torch.where(masked, MASK, ids)).logits, -1).double()
    cost = -log_probs.gather(-1, ids.expand(4000, -1)[..., None])[..., 0]
    variance = ((cost * masked).sum(-1) / lam[:, 0]).var() / 64
    assert found.standard_error.square().mean() < variance / 10


def load_benchmark():
    path = Path(__file__).parents[1] / "examples" / "benchmark_likelihood.py"
    spec = importlib.util.spec_from_file_location("benchmark_likelihood", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_draws_what_it_compares_with():
    """One block of the shipped checkpoint: the dense baselines' means within 4 s.e. of `estimate_likelihood`."""
    benchmark = load_benchmark()
    model = benchmark.RADDForMaskedDiffusion.from_pretrained(benchmark.CHECKPOINT).eval()
    block = benchmark.demo_blocks(1)
    found = estimate_likelihood(model, block, num_samples=65, seed=0)
    generator = torch.Generator().manual_seed(0)
    for loss_type in ("lambda_dce", "ao"):
        draws = benchmark.dense_losses(model, block.expand(64, -1), loss_type, generator)
        error = (draws.var() / 64 + found.standard_error[0] ** 2).sqrt()
        assert abs(draws.mean() - found.nll[0]) < 4 * error


@pytest.mark.slow
def test_variance_on_the_shipped_checkpoint():
    """4 held-out blocks at 33 and 129 rows: a tenth of the variance of plain lambda_dce draws, or less."""
    benchmark = load_benchmark()
    for num_samples in (33, 129):
        _, variances = benchmark.row_variances(4, num_samples, 256)
        assert variances["estimate_likelihood"] < variances["lambda_dce, uniform"] / 10


@pytest.mark.slow
def test_the_benchmark_as_a_whole():
    costs = load_benchmark().main("--blocks 4 --num_samples 33 --plain_draws 64 --timed_rows 4".split())
    assert costs["lambda_dce, uniform"] > 12 * costs["estimate_likelihood"]


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 16])
def test_rows_run_are_those_asked_for(make_model, num_samples: int):
    """The trunk sees exactly `num_samples` rows a sequence, and the output layer the masked positions alone."""
    model = make_model()
    rows, states = [], []
    model.model.register_forward_pre_hook(lambda m, a, k: rows.append(len(k["input_ids"])), with_kwargs=True)
    model.lm_head.register_forward_pre_hook(lambda m, a: states.append(a[0].shape[:-1].numel()))
    found = estimate_likelihood(model, IDS, num_samples=num_samples, seed=0, batch_size=7)
    assert sum(rows) == 2 * num_samples and found.num_rows.tolist() == [num_samples] * 2 and found.nfe == num_samples
    assert sum(states) < 2 * num_samples * LENGTH or num_samples == 1
    assert rows[:-1] == [7] * (len(rows) - 1)  # full batches, whatever the sequence


def test_one_token_has_one_mask(model, conditional):
    ids, scored = IDS[:1], subset([2])
    found = estimate_likelihood(model, ids, loss_mask=scored, num_samples=50, seed=0)
    assert found.nll.item() == pytest.approx(exact_bound(conditional, ids[0].tolist(), MASK, [2]), rel=1e-6)
    assert found.standard_error.item() == 0 and found.nfe == 1


def test_the_target_error_is_met_with_as_few_rows_as_it_takes(model, conditional):
    """Each sequence stops by itself; the estimates are within 4 of their errors of enumeration."""
    target = 0.03
    found = estimate_likelihood(model, IDS, target_standard_error=target, num_samples=33, seed=0, batch_size=2048)
    assert (found.standard_error <= target).all()
    loose = estimate_likelihood(model, IDS, target_standard_error=2 * target, num_samples=33, seed=0, batch_size=2048)
    assert 2 < found.num_rows.sum() / loose.num_rows.sum() < 8  # twice the precision: four times the rows
    for row, nll in zip(IDS.tolist(), found.nll.tolist(), strict=True):
        assert abs(nll - exact_bound(conditional, row, MASK)) < 4 * target
    with pytest.warns(UserWarning, match="After `max_num_samples`=64 rows the standard error"):
        few = estimate_likelihood(model, IDS, target_standard_error=1e-6, max_num_samples=64, seed=0)
    assert few.nfe == 64


# Orders and subsets


def test_given_orders_are_exact(model, conditional):
    for order in ([2, 0, 3, 1], [1, 3, 0, 2]):
        found = estimate_likelihood(model, IDS, order=order, return_token_nll=True)
        for i, row in enumerate(IDS.tolist()):
            assert found.nll[i].item() == pytest.approx(order_nll(conditional, row, order, MASK), rel=1e-6)
            last = torch.log_softmax(model(IDS[i : i + 1].index_fill(1, torch.tensor(order[3]), MASK)).logits, -1)
            assert found.token_nll[i, order[3]].item() == pytest.approx(-last[0, order[3], row[order[3]]].item())
    each = estimate_likelihood(model, IDS, order=torch.tensor([[3, 2, 1, 0], [0, 1, 2, 3]]))
    expected = [
        estimate_likelihood(model, IDS[i : i + 1], loss_type=name).nll
        for i, name in enumerate(("backward", "forward"))
    ]
    assert torch.allclose(each.nll, torch.cat(expected), rtol=1e-6)
    # padding and context are skipped, wherever they are in the list
    padded = torch.cat([torch.zeros(2, 1, dtype=torch.long), IDS], 1)
    real = torch.tensor([[0, 1, 1, 1, 1]] * 2)
    context = real.bool() & torch.tensor([True, True, False, True, True])
    found = estimate_likelihood(model, padded, order=[4, 0, 2, 1, 3], attention_mask=real, loss_mask=context)
    for i, row in enumerate(IDS.tolist()):
        assert found.nll[i].item() == pytest.approx(order_nll(conditional, row, [3, 0, 2], MASK), rel=1e-6)


def test_random_orders_average_to_the_bound(model, conditional):
    """600 random orders: their mean within 4 of its errors."""
    found = estimate_likelihood(model, IDS[:1].expand(600, -1), loss_type="random", seed=0, batch_size=4096)
    exact = average_order_nll(conditional, IDS[0].tolist(), MASK)
    assert abs(found.nll.mean() - exact) < 4 * found.nll.std() / math.sqrt(600)


@pytest.mark.parametrize("first", [part for part, _ in splits()], ids=str)
def test_conditional_and_marginal_make_the_joint_of_a_table(first: list[int]):
    """With exact conditionals every order has the joint's NLL, so the bound of each part is exact as well."""
    table = TableModel(seed=0)
    rest = [i for i in range(LENGTH) if i not in first]
    joint = -math.log(table.probability(IDS[0]))
    absent = IDS[:1].masked_fill(~subset(first), MASK)
    for options in ({"loss_type": "forward"}, {"num_samples": 100, "seed": 1, "batch_size": 100}):
        marginal = estimate_likelihood(table, absent, loss_mask=subset(first), **options)
        conditional = estimate_likelihood(table, IDS[:1], loss_mask=subset(rest), **options)
        error = float((marginal.standard_error**2 + conditional.standard_error**2).sqrt())
        assert abs(marginal.nll + conditional.nll - joint).item() < 4 * error + 1e-6
        if "loss_type" in options:
            assert marginal.nll.item() == pytest.approx(-math.log(table.probability(absent[0])), abs=1e-6)


@pytest.mark.parametrize("first", [part for part, _ in splits()], ids=str)
def test_conditional_and_marginal_of_a_network(model, conditional, first: list[int]):
    """Their sum is the mean over the orders that put the marginal's positions first: exactly, and by the bound."""
    rest = [i for i in range(LENGTH) if i not in first]
    row = IDS[0].tolist()
    orders = [[*a, *b] for a in itertools.permutations(first) for b in itertools.permutations(rest)]
    expected = sum(order_nll(conditional, row, order, MASK) for order in orders) / len(orders)
    absent = IDS[:1].masked_fill(~subset(first), MASK)
    for positions, ids in ((first, absent), (rest, IDS[:1])):
        every = list(itertools.permutations(positions))
        nll = [estimate_likelihood(model, ids, loss_mask=subset(positions), order=list(o)).nll.item() for o in every]
        expected -= sum(nll) / len(every)
    assert abs(expected) < 1e-6
    marginal = estimate_likelihood(model, absent, loss_mask=subset(first), num_samples=300, seed=2, batch_size=300)
    given = estimate_likelihood(model, IDS[:1], loss_mask=subset(rest), num_samples=300, seed=3, batch_size=300)
    error = float((marginal.standard_error**2 + given.standard_error**2).sqrt())
    exact = sum(order_nll(conditional, row, order, MASK) for order in orders) / len(orders)
    assert abs((marginal.nll + given.nll).item() - exact) < 4 * error + 1e-6


def test_a_mask_token_is_never_scored(model):
    absent = IDS[:1].masked_fill(~subset([0, 1]), MASK)
    with pytest.raises(
        ValueError, match=r"`input_ids` must be clean text where it is scored, got mask tokens \(id 1\)"
    ):
        estimate_likelihood(model, absent, loss_mask=subset([0, 1, 2]))


def test_the_bound_the_orders_and_their_mixture(model, conditional):
    """
    The bound is the mean NLL of all orders, and at least -log of their mean likelihood: the random-order sampler's own
    NLL. The bound from 2,000 rows within 4 s.e.
    """
    every = [list(order) for order in itertools.permutations(range(LENGTH))]
    nll = torch.stack([estimate_likelihood(model, IDS, order=order).nll for order in every])  # (24, B)
    bound = estimate_likelihood(model, IDS, num_samples=2000, seed=0, batch_size=2000)
    forward = estimate_likelihood(model, IDS, loss_type="forward").nll
    mixture = math.log(len(every)) - (-nll).logsumexp(0)
    for i, row in enumerate(IDS.tolist()):
        print(f"bound {bound.nll[i]:.4f}, mean of orders {nll[:, i].mean():.4f}, left to right {forward[i]:.4f}")
        assert nll[:, i].mean().item() == pytest.approx(average_order_nll(conditional, row, MASK), rel=1e-6)
        assert mixture[i].item() == pytest.approx(order_mixture_nll(conditional, row, MASK), rel=1e-6)
        assert abs(bound.nll[i] - nll[:, i].mean()) < 4 * bound.standard_error[i]
        assert nll[:, i].mean() > mixture[i]


# Tokens, batches, devices


@pytest.mark.parametrize("loss_type", ["ao", "lambda_dce", "t_dce", "random"])
def test_token_scores_sum_to_the_sequence(model, loss_type: str):
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.long), IDS], 1)
    real = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    scored = real.bool() & torch.tensor([True, True, True, False, True, True])
    options = {"loss_type": loss_type, "attention_mask": real, "loss_mask": scored, "num_samples": 40, "seed": 0}
    found = estimate_likelihood(model, padded, **options, return_token_nll=True)
    assert found.token_nll.shape == padded.shape and (found.token_nll[~scored] == 0).all()
    assert torch.allclose(found.token_nll.sum(-1), found.nll, rtol=1e-12) and (found.nll != 0).all()
    assert torch.equal(found.nll, estimate_likelihood(model, padded, **options).nll)
    assert estimate_likelihood(model, padded, **options).token_nll is None


def test_token_scores_are_mean_costs_over_orders(model, conditional):
    """16,000 rows: each token's score within 0.05 of its mean cost over all orders (measured error about 0.01)."""
    ids = IDS[:1].expand(16, -1)
    found = estimate_likelihood(model, ids, num_samples=1000, seed=0, batch_size=4000, return_token_nll=True)
    row, expected = IDS[0].tolist(), [0.0] * LENGTH
    orders = list(itertools.permutations(range(LENGTH)))
    for order in orders:
        for step, i in enumerate(order):
            rest = order_nll(conditional, row, order[step:], MASK) - order_nll(
                conditional, row, order[step + 1 :], MASK
            )
            expected[i] += rest / len(orders)
    assert found.token_nll.mean(0).tolist() == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("loss_type", ["ao", "lambda_dce", "forward"])
def test_batches_padding_and_company_change_nothing(make_model, loss_type: str):
    """Float32, rows of 2 to 16 tokens, batches of 1, 3 and 8, padding on either side: equal to 1e-5."""
    model = make_model()
    lengths = [2, 16, 7, 7, 11, 3]
    rows = [torch.randint(2, 4, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    options = {"loss_type": loss_type, "num_samples": 5}
    alone = torch.cat([estimate_likelihood(model, row[None], seed=[i], **options).nll for i, row in enumerate(rows)])
    seeds = list(range(len(rows)))
    for side in ("left", "right"):
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=3, padding_side=side)
        real = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
        for batch_size in (1, 3, 8):
            found = estimate_likelihood(model, ids, attention_mask=real, seed=seeds, batch_size=batch_size, **options)
            assert torch.allclose(found.nll, alone, rtol=1e-5)
            assert found.num_tokens.tolist() == lengths


def test_inputs_may_lie_elsewhere_than_the_model(make_model):
    """The device is taken from the model; a generator in its own place is enough."""
    found = estimate_likelihood(make_model(), IDS, num_samples=8, generator=torch.Generator().manual_seed(0))
    assert found.nll.device.type == found.num_tokens.device.type == "cpu"


# Units


def test_units_are_consistent(model):
    """Nats, bits, perplexities per token, byte and word agree to 1e-9 (relative)."""
    found = estimate_likelihood(model, IDS, num_samples=33, seed=0)
    nats = float(found.nll.sum())
    assert found.bits_per(8) * 8 == pytest.approx(nats / math.log(2), rel=1e-9)
    assert found.bits_per(int(found.num_tokens.sum())) == pytest.approx(found.bits_per_token, rel=1e-9)
    assert found.perplexity_per(5) ** 5 == pytest.approx(math.exp(nats), rel=1e-9)
    assert found.perplexity == pytest.approx(2**found.bits_per_token, rel=1e-9)
    assert math.isnan(found.bits_per(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_standard_error": 0.0}, "`target_standard_error` must be a positive number, got 0.0"),
        ({"max_num_samples": 0}, "`max_num_samples` must be a positive integer, got 0"),
        ({"order": [0, 1, 2, 3], "loss_type": "forward"}, "leave `loss_type` at 'ao', got 'forward'"),
        ({"order": [0, 1, 2, 2]}, "`order` must hold each scored position once, got"),
        ({"order": [0, 1, 2]}, "`order` must hold each scored position once, got"),
        ({"order": [0, 1, 2, 4]}, r"`order` must hold positions in \[0, 4\), got"),
        ({"order": torch.zeros(3, 4, dtype=torch.long)}, "`order` must have one row a sequence, 2, got 3"),
        ({"order": [0.5, 1.0]}, r"`order` must list positions, \(L,\) or \(B, L\), got"),
    ],
)
def test_bad_arguments_are_named(model, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        estimate_likelihood(model, IDS, **options)
