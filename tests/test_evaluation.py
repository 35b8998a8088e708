"""estimate_likelihood against enumeration, and its invariances."""

import itertools
import math

import pytest
import torch

from radd_hf import RADDConfig, RADDForMaskedDiffusion, estimate_likelihood

VOCAB, MASK, LENGTH = 4, 3, 4


@pytest.fixture(scope="module")
def model() -> RADDForMaskedDiffusion:
    torch.manual_seed(1)
    config = RADDConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        initializer_range=0.5,
    )
    model = RADDForMaskedDiffusion(config).eval().double()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


@pytest.fixture(scope="module")
def conditional(model):
    cache = {}

    def call(x: tuple[int, ...]):
        if x not in cache:
            with torch.no_grad():
                cache[x] = torch.softmax(model(torch.tensor([x])).logits[0, :, :MASK], -1)
        return cache[x]

    return call


IDS = torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])


def test_orders_are_exact(model, conditional):
    for row in IDS:
        x = tuple(row.tolist())
        for order, positions in (("forward", range(LENGTH)), ("backward", reversed(range(LENGTH)))):
            found = estimate_likelihood(model, row[None], loss_type=order)
            nll, seen = 0.0, [MASK] * LENGTH
            for i in positions:
                nll -= math.log(conditional(tuple(seen))[i, x[i]])
                seen[i] = x[i]
            assert found.nll.item() == pytest.approx(nll, rel=1e-6)
            assert found.standard_error.item() == 0 and found.num_tokens.item() == LENGTH and found.nfe == LENGTH


def exact_bound(conditional, x: tuple[int, ...]) -> float:
    """sum over non-empty masks m of (k-1)! (L-k)! / L! CE(m), written out."""
    total = 0.0
    for bits in range(1, 2 ** len(x)):
        masked = [i for i in range(len(x)) if bits >> i & 1]
        noisy = tuple(MASK if i in masked else x[i] for i in range(len(x)))
        entropy = -sum(math.log(conditional(noisy)[i, x[i]]) for i in masked)
        k = len(masked)
        total += math.factorial(k - 1) * math.factorial(len(x) - k) / math.factorial(len(x)) * entropy
    return total


@pytest.mark.parametrize(("loss_type", "draws"), [("ao", 4096), ("lambda_dce", 8192), ("t_dce", 8192)])
def test_bound_is_unbiased_with_a_true_error(model, conditional, loss_type: str, draws: int):
    """Fixed seed, both sequences within 4 of the estimate's own standard errors."""
    options = {} if loss_type != "t_dce" else {"noise_schedule": "log_linear"}
    found = estimate_likelihood(model, IDS, loss_type=loss_type, num_samples=draws, seed=0, batch_size=512, **options)
    for row, nll, error in zip(IDS, found.nll, found.standard_error, strict=True):
        exact = exact_bound(conditional, tuple(row.tolist()))
        assert abs(nll.item() - exact) < 4 * error.item() + (0.002 * exact if loss_type == "t_dce" else 0)
        assert error.item() < 0.05 * exact


def test_error_is_calibrated(model, conditional):
    """200 seeds of the default loss at 32 draws: the rms of (estimate - exact) / s.e. between 0.8 and 1.25."""
    exact = exact_bound(conditional, tuple(IDS[0].tolist()))
    many = IDS[:1].expand(200, -1)
    found = estimate_likelihood(model, many, num_samples=32, seed=7)
    z = (found.nll - exact) / found.standard_error
    assert 0.8 < z.square().mean().sqrt().item() < 1.25


def test_batch_padding_and_chunks_change_nothing(model):
    alone = [
        estimate_likelihood(model, row[None], num_samples=20, seed=[s]) for row, s in zip(IDS, (5, 6), strict=True)
    ]
    short = IDS.clone()
    padded = torch.cat([torch.full((2, 2), 1), short], dim=1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    together = estimate_likelihood(model, padded, attention_mask=mask, num_samples=20, seed=[5, 6], batch_size=7)
    assert together.num_tokens.tolist() == [LENGTH] * 2
    for one, nll, error in zip(alone, together.nll, together.standard_error, strict=True):
        assert one.nll.item() == pytest.approx(nll.item(), rel=1e-9)
        assert one.standard_error.item() == pytest.approx(error.item(), rel=1e-9)


def test_conditional_on_context(model, conditional):
    """-log p(x_1, x_3 | x_0, x_2) in the forward order."""
    scored = torch.tensor([[False, True, False, True]])
    found = estimate_likelihood(model, IDS[:1], loss_type="forward", loss_mask=scored)
    first = conditional((0, MASK, 1, MASK))[1, 2]
    second = conditional((0, 2, 1, MASK))[3, 1]
    assert found.nll.item() == pytest.approx(-math.log(first) - math.log(second), rel=1e-6)
    assert found.num_tokens.item() == 2


def test_units_and_rows_without_tokens(model):
    none = torch.zeros(2, LENGTH, dtype=torch.bool)
    none[0] = True
    found = estimate_likelihood(model, IDS, loss_mask=none, num_samples=8, seed=0)
    assert found.nll[1] == 0 and found.standard_error[1] == 0 and found.num_tokens.tolist() == [LENGTH, 0]
    assert found.nll_per_token == pytest.approx(found.nll[0].item() / LENGTH)
    assert found.perplexity == pytest.approx(math.exp(found.nll_per_token))
    assert found.bits_per_token == pytest.approx(found.nll_per_token / math.log(2))
    assert math.isnan(estimate_likelihood(model, IDS, num_samples=1, seed=0).standard_error[0])


def test_generator_is_the_only_randomness(model):
    state = torch.get_rng_state()
    first, second = (
        estimate_likelihood(model, IDS, num_samples=8, generator=torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(first.nll, second.nll)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "elbo"}, r"`loss_type` must be one of .*'random'.*got 'elbo'"),
        ({"num_samples": 0}, "`num_samples` must be a positive integer, got 0"),
        ({"batch_size": -1}, "`batch_size` must be a positive integer, got -1"),
        ({"attention_mask": torch.ones(1, 2)}, "`attention_mask` must have the shape of `input_ids`"),
    ],
)
def test_bad_arguments_are_named(model, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        estimate_likelihood(model, IDS, **options)


def test_bad_ids_are_named(model):
    with pytest.raises(ValueError, match=r"`input_ids` must be in \[0, vocab_size=4\)"):
        estimate_likelihood(model, torch.tensor([[0, 9]]))
    with pytest.raises(ValueError, match="must be clean text where it is scored"):
        estimate_likelihood(model, torch.tensor([[0, MASK]]))


def test_bound_is_the_average_over_orders(conditional):
    """The bound over masks is the average over all orders of the order NLLs (Theorem 2)."""
    x = tuple(IDS[0].tolist())
    total = 0.0
    orders = list(itertools.permutations(range(LENGTH)))
    for order in orders:
        seen = [MASK] * LENGTH
        for i in order:
            total -= math.log(conditional(tuple(seen))[i, x[i]]) / len(orders)
            seen[i] = x[i]
    assert exact_bound(conditional, x) == pytest.approx(total, rel=1e-9)
