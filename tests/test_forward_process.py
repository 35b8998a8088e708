"""The draws of t, lambda, k and of the masks: exact counts, exact laws, and nothing random but the generator."""

import collections
import itertools

import pytest
import reference as ref
import torch
from scipy.stats import kstest

from radd_hf.forward_process import TIME_SAMPLING, GlobalBatchNoise, draw_unit, mask_exactly, mask_tokens

M = 9
SAMPLINGS = pytest.mark.parametrize("time_sampling", TIME_SAMPLING)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def counts_of(masked: torch.Tensor) -> collections.Counter:
    """How often each mask occurs, as tuples of 0 and 1."""
    return collections.Counter(tuple(row) for row in masked.int().tolist())


# Draws of one number a row


@SAMPLINGS
@pytest.mark.parametrize("row", [0, 3])
def test_each_row_is_uniform_on_its_own(time_sampling: str, row: int):
    generator = seeded(1)
    draws = torch.stack([draw_unit(4, time_sampling, generator) for _ in range(4000)])  # (4000, B)
    assert draws.dtype == torch.float64
    assert bool((draws > 0).all()) and bool((draws <= 1).all())
    assert kstest(draws[:, row].numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("time_sampling", ["stratified", "antithetic"])
@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_one_draw_in_each_stratum(time_sampling: str, batch_size: int):
    for seed in range(50):
        unit = draw_unit(batch_size, time_sampling, seeded(seed))
        assert unit.shape == (batch_size,)
        # (i / B, (i + 1) / B] for i = 0..B - 1
        strata = torch.ceil(unit * batch_size).long() - 1
        assert sorted(strata.tolist()) == list(range(batch_size))


def test_antithetic_is_one_draw_shifted():
    for seed in range(20):
        unit = draw_unit(8, "antithetic", seeded(seed)).sort().values
        torch.testing.assert_close(unit.diff(), torch.full((7,), 1 / 8, dtype=torch.float64))


def test_strata_have_draws_of_their_own():
    unit = draw_unit(64, "stratified", seeded()).sort().values
    within = unit * 64 - torch.arange(64)
    assert within.std() > 0.2  # the offsets of different strata differ; antithetic has one for all


def test_uniform_is_not_stratified():
    filled = [len(set(torch.ceil(draw_unit(16, "uniform", seeded(seed)) * 16).tolist())) for seed in range(50)]
    assert sum(filled) / 50 == pytest.approx(16 * (1 - (15 / 16) ** 16), abs=0.7)


@pytest.mark.parametrize("time_sampling", ["stratified", "antithetic"])
def test_strata_come_in_random_order(time_sampling: str):
    """Rows 0 and 1 see every ordered pair of different strata equally often: no row always has the small times."""
    generator = seeded(2)
    counts = collections.Counter()
    for _ in range(3000):
        counts[tuple(torch.ceil(draw_unit(3, time_sampling, generator) * 3).long().tolist()[:2])] += 1
    law = dict.fromkeys(itertools.permutations((1, 2, 3), 2), 1 / 6)
    assert ref.chi_square_p_value(counts, law) > 1e-3


def test_stratified_mean_has_less_variance():
    def variance(time_sampling: str) -> float:
        generator = seeded(3)
        return torch.stack([draw_unit(16, time_sampling, generator).mean() for _ in range(400)]).var().item()

    # uniform 1 / (12 B); stratified and antithetic 1 / (12 B^3) and 1 / (12 B^2)
    assert variance("uniform") == pytest.approx(1 / (12 * 16), rel=0.3)
    assert variance("stratified") == pytest.approx(1 / (12 * 16**3), rel=0.3)
    assert variance("antithetic") == pytest.approx(1 / (12 * 16**2), rel=0.3)


def test_empty_batch():
    for time_sampling in TIME_SAMPLING:
        assert draw_unit(0, time_sampling, seeded()).shape == (0,)


def test_unknown_time_sampling():
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"`time_sampling` must be one of \['uniform', .*\], got 'naive'"):
        draw_unit(4, "naive")
    assert torch.equal(before, torch.get_rng_state())


# Masks of independent tokens


def test_mask_tokens_has_the_product_law():
    generator = seeded(4)
    for level in (0.2, 0.7):
        rows = 20_000
        x0 = torch.tensor([[1, 2, 3, 4]] * rows)
        xt, masked = mask_tokens(x0, torch.full((rows,), level), M, generator=generator)
        law = {
            mask: level ** sum(mask) * (1 - level) ** (4 - sum(mask)) for mask in itertools.product((0, 1), repeat=4)
        }
        assert ref.chi_square_p_value(counts_of(masked), law) > 1e-3
        assert torch.equal(xt, torch.where(masked, M, x0))


def test_mask_tokens_uses_each_rows_own_probability():
    rows = 20_000
    levels = torch.tensor([0.0, 0.1, 0.5, 1.0], dtype=torch.float64)
    x0 = torch.ones(4, rows, dtype=torch.long)
    _, masked = mask_tokens(x0, levels, M, generator=seeded(5))
    share = masked.double().mean(-1)
    assert share[0] == 0.0 and share[3] == 1.0
    for row in (1, 2):
        error = (levels[row] * (1 - levels[row]) / rows).sqrt().item()
        assert share[row].item() == pytest.approx(levels[row].item(), abs=4 * error)


# Masks of exactly k tokens


def test_mask_exactly_masks_exactly_k():
    k = torch.arange(7)
    x0 = torch.arange(7 * 6).reshape(7, 6) + 10
    for seed in range(20):
        xt, masked = mask_exactly(x0, k, M, generator=seeded(seed))
        assert masked.sum(-1).tolist() == k.tolist()
        assert torch.equal(xt, torch.where(masked, M, x0))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_mask_exactly_is_uniform_over_subsets(k: int):
    rows = 12_000
    x0 = torch.ones(rows, 5, dtype=torch.long)
    _, masked = mask_exactly(x0, torch.full((rows,), k), M, generator=seeded(6))
    subsets = [mask for mask in itertools.product((0, 1), repeat=5) if sum(mask) == k]
    assert ref.chi_square_p_value(counts_of(masked), dict.fromkeys(subsets, 1 / len(subsets))) > 1e-3


def test_mask_exactly_is_uniform_over_the_maskable_subsets():
    rows = 12_000
    maskable = torch.tensor([[True, False, True, True, False]]).expand(rows, 5)
    _, masked = mask_exactly(torch.ones(rows, 5, dtype=torch.long), torch.full((rows,), 2), M, maskable, seeded(7))
    law = {(1, 0, 1, 0, 0): 1 / 3, (1, 0, 0, 1, 0): 1 / 3, (0, 0, 1, 1, 0): 1 / 3}
    assert ref.chi_square_p_value(counts_of(masked), law) > 1e-3


# Both


def mask_some(maskable: torch.Tensor | None, x0: torch.Tensor, generator: torch.Generator | None, exactly: bool):
    """All of `maskable`, or about half of x0 without it, by either function."""
    if exactly:
        number = torch.full((len(x0),), 6) if maskable is None else maskable.sum(-1)
        return mask_exactly(x0, number, M, maskable, generator)
    probability = torch.full((len(x0),), 0.5 if maskable is None else 1.0)
    return mask_tokens(x0, probability, M, maskable, generator)


BOTH = pytest.mark.parametrize("exactly", [False, True], ids=["mask_tokens", "mask_exactly"])


@BOTH
def test_context_is_never_masked(exactly: bool):
    x0 = torch.randint(0, 9, (200, 12), generator=seeded(8))
    maskable = torch.rand(200, 12, generator=seeded(9)) < 0.6
    maskable[0] = False
    xt, masked = mask_some(maskable, x0, seeded(10), exactly)
    assert torch.equal(masked, maskable)  # everything maskable was asked for: that, and nothing else
    assert torch.equal(xt[~maskable], x0[~maskable]) and bool((xt[maskable] == M).all())


@BOTH
def test_inputs_are_left_alone(exactly: bool):
    x0 = torch.randint(0, 9, (30, 12), generator=seeded(11))
    maskable = torch.ones(30, 12, dtype=torch.bool)
    maskable[:, 0] = False
    x0_before, maskable_before = x0.clone(), maskable.clone()
    mask_some(maskable, x0, seeded(12), exactly)
    assert torch.equal(x0, x0_before) and torch.equal(maskable, maskable_before)


@BOTH
def test_the_generator_alone_decides_the_mask(exactly: bool):
    x0 = torch.zeros(30, 12, dtype=torch.long)
    state = torch.get_rng_state()
    first, second, other = (mask_some(None, x0, seeded(seed), exactly)[1] for seed in (13, 13, 14))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, second) and not torch.equal(first, other)


@BOTH
def test_without_a_generator_the_global_one_decides(exactly: bool):
    x0 = torch.zeros(30, 12, dtype=torch.long)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(15)
        first, moved_on = mask_some(None, x0, None, exactly)[1], mask_some(None, x0, None, exactly)[1]
        torch.manual_seed(15)
        second = mask_some(None, x0, None, exactly)[1]
    assert torch.equal(first, second) and not torch.equal(first, moved_on)


@SAMPLINGS
def test_the_generator_alone_decides_the_draw(time_sampling: str):
    state = torch.get_rng_state()
    first, second, other = (draw_unit(8, time_sampling, seeded(seed)) for seed in (16, 16, 17))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, second) and not torch.equal(first, other)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(18)
        first = draw_unit(8, time_sampling)
        torch.manual_seed(18)
        assert torch.equal(first, draw_unit(8, time_sampling))


# Noise by rows of a global batch


def noise(first_row: int = 0, key: tuple = (3, 7), size: int = 32) -> GlobalBatchNoise:
    return GlobalBatchNoise(key, first_row, size)


@SAMPLINGS
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_parts_of_a_global_batch_draw_what_the_whole_does(time_sampling: str, rows: int):
    whole, parts = noise(), [noise(first) for first in range(0, 32, rows)]
    times = [draw_unit(rows, time_sampling, part) for part in parts]
    assert torch.equal(torch.cat(times), draw_unit(32, time_sampling, whole))
    x0, k = torch.zeros(32, 12, dtype=torch.long), torch.arange(32) % 13
    for _ in range(2):  # a second draw differs from the first, and the parts still agree
        masks = [mask_exactly(x0[:rows], k[i * rows :][:rows], M, generator=part)[1] for i, part in enumerate(parts)]
        assert torch.equal(torch.cat(masks), mask_exactly(x0, k, M, generator=whole)[1])
    first, second = (mask_tokens(x0, torch.full((32,), 0.5), M, generator=whole)[1] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("time_sampling", ["stratified", "antithetic"])
def test_strata_fill_the_global_batch_from_all_parts(time_sampling: str):
    unit = torch.cat([draw_unit(4, time_sampling, noise(first)) for first in (0, 4, 8, 12, 16, 20, 24, 28)])
    assert sorted((torch.ceil(unit * 32).long() - 1).tolist()) == list(range(32))
    part = torch.ceil(draw_unit(4, time_sampling, noise(8)) * 4)
    assert sorted(part.tolist()) != [1, 2, 3, 4]  # a part alone need not


def test_rows_keys_and_windows_share_nothing():
    x0 = torch.zeros(8, 64, dtype=torch.long)
    half = torch.full((8,), 0.5)
    masks = [
        mask_tokens(x0, half, M, generator=source)[1] for source in (noise(), noise(8), noise(0, (3, 8)), noise(32))
    ]
    rows = torch.cat(masks)
    assert len(rows.unique(dim=0)) == len(rows)
    times = torch.cat([draw_unit(32, "stratified", source) for source in (noise(), noise(32), noise(0, (3, 8)))])
    assert len(times.unique()) == len(times)
    across = draw_unit(32, "uniform", noise(16))  # rows 16 to 47: two windows
    assert torch.equal(
        across, torch.cat([draw_unit(32, "uniform", noise())[16:], draw_unit(32, "uniform", noise(32))[:16]])
    )


@BOTH
@pytest.mark.parametrize("left", [False, True])
def test_padding_moves_no_noise(exactly: bool, left: bool):
    """The i-th maskable token of a row is masked or not wherever padding and context put it."""
    x0 = torch.zeros(16, 10, dtype=torch.long)
    place = slice(4, None) if left else slice(0, 10)
    padded, maskable = torch.zeros(16, 14, dtype=torch.long), torch.zeros(16, 14, dtype=torch.bool)
    maskable[:, place] = True
    masks = []
    for ids, where in ((x0, None), (padded, maskable)):
        if exactly:
            masks.append(mask_exactly(ids, torch.arange(16) % 11, M, where, noise())[1])
        else:
            masks.append(mask_tokens(ids, torch.full((16,), 0.5), M, where, noise())[1])
    assert torch.equal(masks[0], masks[1][:, place])
    assert not bool((masks[1] & ~maskable).any())


def test_noise_of_rows_has_the_product_law():
    xs = [
        mask_tokens(torch.zeros(64, 3, dtype=torch.long), torch.full((64,), 0.3), M, None, noise(0, (i,), 64))[1]
        for i in range(100)
    ]
    law = {mask: 0.3 ** sum(mask) * 0.7 ** (3 - sum(mask)) for mask in itertools.product((0, 1), repeat=3)}
    assert ref.chi_square_p_value(counts_of(torch.cat(xs)), law) > 1e-3  # 6,400 draws


def test_noise_leaves_the_global_state_alone():
    state = torch.get_rng_state()
    mask_exactly(torch.zeros(4, 5, dtype=torch.long), torch.ones(4), M, None, noise())
    draw_unit(4, "stratified", noise())
    assert draw_unit(0, "stratified", noise()).shape == (0,)
    assert torch.equal(state, torch.get_rng_state())
