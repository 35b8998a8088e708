"""The four losses: means against the exact bound, draws against the full score entropy, the original's figures."""

import json
import math
import pathlib
from collections.abc import Callable

import pytest
import reference as ref
import torch
from safetensors.torch import load_file
from torch import nn

from radd_hf.configuration_radd import RADDConfig
from radd_hf.losses import (
    LOSS_TYPES,
    Corruption,
    ao_loss,
    corrupt,
    diffusion_loss,
    diffusion_loss_terms,
    dse_loss,
    lambda_dce_loss,
    masked_token_nll,
    sum_over_masked,
    t_dce_loss,
    weigh,
)
from radd_hf.modeling_radd import RADDForMaskedDiffusion
from radd_hf.noise_schedule_radd import CosineNoise, GeometricNoise, LogLinearNoise

GOLDEN = pathlib.Path(__file__).parent / "fixtures/radd_original"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
X0 = (2, 0, 1, 1)
TIME_EPS = 1e-3
SCHEDULES = {
    "log_linear": (LogLinearNoise(), ref.Schedule("log_linear")),
    "geometric": (GeometricNoise(), ref.Schedule("geometric")),
    "cosine": (CosineNoise(), ref.Schedule("cosine")),
}
LOSSES = pytest.mark.parametrize("loss_type", LOSS_TYPES)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_model(mask_token_id: int = 3, dtype: torch.dtype = torch.float32, **fields) -> RADDForMaskedDiffusion:
    """V = 3, hidden 16, one block, weights large enough that contexts matter and orders disagree; no dropout."""
    config = RADDConfig(
        vocab_size=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        hidden_dropout=0.0,
        mask_token_id=mask_token_id,
        **fields,
    )
    model = RADDForMaskedDiffusion(config).eval().to(dtype)
    generator = seeded(100)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                scale = 0.4 if "lm_head" in name else 0.6
                weight.copy_(scale * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return model


def conditional(model: nn.Module) -> ref.Conditional:
    """The oracle's view of a model: probabilities in float64."""
    return ref.conditional_of_network(
        lambda ids: model(ids).logits.double().log_softmax(-1), model.config.mask_token_id
    )


class Recorder(nn.Module):
    """A model that keeps the arguments of its calls."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.config, self.calls = model, model.config, []

    def forward(self, **kwargs):
        self.calls.append(kwargs)
        return self.model(**kwargs)


MODEL = tiny_model()
CONDITIONAL = conditional(MODEL)


def exact_mean(loss_type: str, oracle: ref.Schedule, x0: tuple[int, ...], positions=None, model=CONDITIONAL) -> float:
    """The exact mean of one draw: the bound, restricted to the range of lambda that eps and time_eps leave."""
    if loss_type in ("lambda_dce", "ao"):
        return ref.exact_bound(model, x0, 3, positions)
    moment = ref.dse_moment if loss_type == "dse" else ref.t_dce_moment
    return moment(model, x0, 3, oracle, TIME_EPS, positions)


def exact_deviation(loss_type: str, oracle: ref.Schedule, x0: tuple[int, ...], positions=None) -> float:
    """The exact standard deviation of one draw (finite for these three)."""
    if loss_type == "ao":
        return math.sqrt(ref.ao_moment(CONDITIONAL, x0, 3, positions, power=2) - exact_mean("ao", oracle, x0) ** 2)
    moment = ref.dse_moment if loss_type == "dse" else ref.t_dce_moment
    second = moment(CONDITIONAL, x0, 3, oracle, TIME_EPS, positions, power=2)
    return math.sqrt(second - exact_mean(loss_type, oracle, x0, positions) ** 2)


def test_the_tiny_model_tells_orders_apart():
    """Otherwise a loss with a wrong weight over k could have the right mean."""
    by_size = [0.0] * 5
    for mask in ref.all_masks(range(4)):
        if mask:
            by_size[len(mask)] += ref.cross_entropy(CONDITIONAL, X0, mask, 3) / len(mask) / math.comb(4, len(mask))
    assert max(by_size[1:]) - min(by_size[1:]) > 0.1


# Means


@pytest.mark.parametrize(
    ("loss_type", "schedule"),
    [(loss_type, name) for loss_type in ("dse", "t_dce") for name in SCHEDULES]
    + [("lambda_dce", "log_linear"), ("ao", "log_linear")],
)
def test_mean_is_the_exact_bound(loss_type: str, schedule: str):
    noise, oracle = SCHEDULES[schedule]
    rows = 40_000
    input_ids = torch.tensor([X0]).expand(rows, 4)
    with torch.no_grad():
        loss = diffusion_loss(
            MODEL, input_ids, loss_type, noise_schedule=noise, time_sampling="uniform", generator=seeded(1)
        )
    assert loss.shape == (rows,) and loss.dtype == torch.float32
    # plain lambda_dce has no variance: the sample's own, with a fixed seed
    deviation = loss.std().item() if loss_type == "lambda_dce" else exact_deviation(loss_type, oracle, X0)
    expected = exact_mean(loss_type, oracle, X0)
    assert loss.double().mean().item() == pytest.approx(expected, abs=4 * deviation / math.sqrt(rows))
    if loss_type == "ao" or schedule == "geometric":  # bounded weights; the others' own deviation converges too slowly
        assert loss.double().std().item() == pytest.approx(deviation, rel=0.03)


@pytest.mark.parametrize("time_sampling", ["stratified", "antithetic"])
@LOSSES
def test_mean_is_the_exact_bound_when_draws_depend(loss_type: str, time_sampling: str):
    oracle = SCHEDULES["log_linear"][1]
    batches, generator = 200, seeded(2)
    input_ids = torch.tensor([X0]).expand(16, 4)
    with torch.no_grad():
        means = torch.stack(
            [
                diffusion_loss(MODEL, input_ids, loss_type, time_sampling=time_sampling, generator=generator).mean()
                for _ in range(batches)
            ]
        ).double()
    error = means.std().item() / math.sqrt(batches)
    assert means.mean().item() == pytest.approx(exact_mean(loss_type, oracle, X0), abs=4 * error)


@LOSSES
def test_mean_of_rows_with_padding_and_context(loss_type: str):
    """L is a row's own number of maskable positions; a row with none costs nothing. One batch holds all kinds."""
    pad, oracle = 1, SCHEDULES["log_linear"][1]
    kinds = [  # ids, attention_mask, loss_mask, positions that are scored within the real tokens
        ((2, 0, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), (0, 1, 2, 3)),
        ((pad, 2, 0, 1), (0, 1, 1, 1), (1, 1, 1, 1), (0, 1, 2)),  # loss_mask True at padding changes nothing
        ((2, 0, 1, pad), (1, 1, 1, 0), (0, 1, 1, 0), (1, 2)),
        ((2, 0, 1, 1), (1, 1, 1, 1), (1, 0, 0, 1), (0, 3)),
        ((2, 0, 1, 1), (1, 1, 1, 1), (0, 0, 0, 0), ()),
    ]
    repeat = 12_000
    input_ids, attention_mask, loss_mask = (
        torch.tensor([kind[i] for kind in kinds]).repeat(repeat, 1) for i in range(3)
    )
    with torch.no_grad():
        loss = diffusion_loss(
            MODEL,
            input_ids,
            loss_type,
            attention_mask=attention_mask,
            loss_mask=loss_mask.bool(),
            time_sampling="uniform",
            generator=seeded(3),
        ).double()
    loss = loss.reshape(repeat, len(kinds))
    for column, (ids, seen, _, positions) in enumerate(kinds):
        real = tuple(token for token, visible in zip(ids, seen, strict=True) if visible)
        error = loss[:, column].std().item() / math.sqrt(repeat)
        expected = exact_mean(loss_type, oracle, real, positions)
        assert loss[:, column].mean().item() == pytest.approx(expected, abs=4 * error), column
    assert loss[:, -1].abs().max() == 0.0


@pytest.mark.parametrize("mask_token_id", [0, 2])
def test_mean_with_a_mask_token_that_is_not_last(mask_token_id: int):
    model = tiny_model(mask_token_id)
    clean = ref.token_ids(3, mask_token_id)
    x0 = tuple(clean[i] for i in X0)
    bound = ref.exact_bound(conditional(model), x0, mask_token_id)
    with torch.no_grad():
        loss = diffusion_loss(model, torch.tensor([x0]).expand(20_000, 4), "ao", generator=seeded(4)).double()
    assert loss.mean().item() == pytest.approx(bound, abs=4 * loss.std().item() / math.sqrt(20_000))


# Draw by draw


@LOSSES
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_draw_equals_its_definition(loss_type: str, schedule: str):
    """In float64: `dse` equals the full score entropy (sum over the vocabulary, K term), the others their formula."""
    noise, oracle = SCHEDULES[schedule]
    model = tiny_model(dtype=torch.float64)
    exact = conditional(model)
    x0 = torch.randint(0, 3, (60, 4), generator=seeded(5))
    maskable = torch.ones_like(x0, dtype=torch.bool)
    maskable[::3, 1] = False
    corruption = corrupt(
        x0, loss_type, 3, maskable, noise_schedule=noise, time_sampling="stratified", generator=seeded(6)
    )
    with torch.no_grad():
        token_nll = masked_token_nll(model, x0, corruption.noisy_ids, corruption.masked)
        nll = sum_over_masked(token_nll, corruption.masked)
    loss = weigh(nll, corruption, loss_type, noise)
    assert loss.dtype == torch.float64
    for row in range(len(x0)):
        clean, noisy, level = tuple(x0[row].tolist()), tuple(corruption.noisy_ids[row].tolist()), corruption.level[row]
        mask, free = ref.masked_positions(noisy, 3), maskable[row].nonzero()[:, 0].tolist()
        entropy, level = ref.cross_entropy(exact, clean, mask, 3), level.item()
        if loss_type == "dse":
            expected = ref.score_entropy(exact, clean, noisy, level, oracle, 3, free)
        elif loss_type == "t_dce":
            expected = oracle.weight(level) * (entropy - len(mask) * math.log(oracle.score_scale(level)))
        elif loss_type == "lambda_dce":
            expected = entropy / level
        else:
            assert level == len(mask) > 0
            expected = len(free) / len(mask) * entropy
        assert set(mask) <= set(free)
        assert loss[row].item() == pytest.approx(expected, rel=1e-8, abs=1e-13)
    assert corruption.length.tolist() == maskable.sum(-1).tolist()


def test_levels_cover_their_range():
    x0 = torch.zeros(4096, 8, dtype=torch.long)
    maskable = torch.ones_like(x0, dtype=torch.bool)
    noise = LogLinearNoise()

    def levels(loss_type: str, **options) -> torch.Tensor:
        return corrupt(x0, loss_type, 3, maskable, noise_schedule=noise, generator=seeded(7), **options).level

    t = levels("dse", time_eps=0.25)
    assert 0.25 < t.min() < 0.2505 and 0.9995 < t.max() <= 1.0
    assert t.mean().item() == pytest.approx(0.625, abs=1e-4)
    lam = levels("lambda_dce", time_eps=0.25)  # time_eps is for the losses over t alone
    assert 0.0 < lam.min() < 5e-4 and 0.9995 < lam.max() <= 1.0
    k = levels("ao")
    assert torch.bincount(k).tolist() == [0] + [512] * 8  # stratified: each of 1..8 equally often


def test_default_time_eps_and_schedule():
    x0 = torch.tensor([X0]).expand(64, 4)
    geometric = tiny_model(noise_schedule="geometric", noise_sigma_min=0.01, noise_sigma_max=5.0)
    with torch.no_grad():
        default = diffusion_loss(geometric, x0, "dse", generator=seeded(8))
        same = diffusion_loss(
            geometric, x0, "dse", noise_schedule=GeometricNoise(0.01, 5.0), time_eps=1e-3, generator=seeded(8)
        )
        named = diffusion_loss(geometric, x0, "dse", noise_schedule="cosine", generator=seeded(8))
        other = diffusion_loss(geometric, x0, "dse", noise_schedule=CosineNoise(), generator=seeded(8))
    assert torch.equal(default, same) and torch.equal(named, other) and not torch.equal(default, named)


# The pure functions


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pure_functions_by_hand(schedule: str):
    noise, oracle = SCHEDULES[schedule]
    nll, k, t = torch.tensor([2.0, 3.0, 0.0]), torch.tensor([1, 3, 0]), torch.tensor([0.1, 0.6, 0.3])
    weights = [oracle.weight(value) for value in t.tolist()]
    assert dse_loss(nll, t, noise).tolist() == pytest.approx([weights[0] * 2, weights[1] * 3, 0.0], rel=1e-5)
    logs = [math.log(oracle.score_scale(value)) for value in t.tolist()]
    expected = [weights[0] * (2 - logs[0]), weights[1] * (3 - 3 * logs[1]), 0.0]
    assert t_dce_loss(nll, k, t, noise).tolist() == pytest.approx(expected, rel=1e-5)
    assert lambda_dce_loss(nll, t).tolist() == pytest.approx([20.0, 5.0, 0.0])
    assert ao_loss(nll, k, torch.tensor([4, 5, 0])).tolist() == pytest.approx([8.0, 5.0, 0.0])


def test_sum_over_masked():
    masked = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])
    assert sum_over_masked(torch.tensor([1.0, 2.0, 4.0]), masked).tolist() == [3.0, 0.0, 4.0]


# NLL per token


@LOSSES
def test_nll_per_token_of_a_zero_head_is_ln_v(loss_type: str):
    """An untrained model is uniform over its V clean tokens whatever is masked; rows without any mask do not count."""
    config = RADDConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = RADDForMaskedDiffusion(config)
    x0 = torch.randint(0, 10, (64, 6), generator=seeded(9))
    terms = diffusion_loss_terms(model, x0, loss_type, generator=seeded(10))
    if loss_type != "ao":
        assert bool((terms.num_masked == 0).any())
    assert terms.nll_per_token.item() == pytest.approx(math.log(10), rel=1e-6)
    assert terms.nll.tolist() == pytest.approx((terms.num_masked * math.log(10)).tolist(), rel=1e-5)
    if loss_type == "ao":
        assert terms.loss.tolist() == pytest.approx([6 * math.log(10)] * 64, rel=1e-5)


def test_nll_per_token_is_the_mean_over_rows_of_row_means():
    terms = diffusion_loss_terms(MODEL, torch.tensor([X0]).expand(64, 4), "dse", generator=seeded(11))
    rows = [n / k for n, k in zip(terms.nll.tolist(), terms.num_masked.tolist(), strict=True) if k > 0]
    assert len(rows) < 64
    assert terms.nll_per_token.item() == pytest.approx(sum(rows) / len(rows), rel=1e-5)
    loss = diffusion_loss(MODEL, torch.tensor([X0]).expand(64, 4), "dse", generator=seeded(11))
    assert torch.equal(loss, terms.loss)


# Invariances


@LOSSES
def test_context_and_padding_are_never_masked_and_the_network_sees_them(loss_type: str):
    recorder = Recorder(MODEL)
    x0 = torch.randint(0, 3, (64, 6), generator=seeded(12))
    loss_mask = torch.rand(64, 6, generator=seeded(13)) < 0.6
    attention_mask = (torch.arange(6) < torch.randint(1, 7, (64, 1), generator=seeded(14))).long()
    diffusion_loss(recorder, x0, loss_type, loss_mask=loss_mask, attention_mask=attention_mask, generator=seeded(15))
    (call,) = recorder.calls
    masked = call["input_ids"] == 3
    maskable = loss_mask & attention_mask.bool()
    assert bool(masked.any()) and not bool((masked & ~maskable).any())
    assert torch.equal(call["input_ids"][~masked], x0[~masked])
    assert torch.equal(call["attention_mask"], attention_mask)
    assert torch.equal(call["logits_to_keep"], masked)  # logits exist at masked positions alone


@LOSSES
def test_what_padding_holds_changes_nothing(loss_type: str):
    attention_mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0]]).repeat(8, 1)
    first = torch.randint(0, 3, (24, 5), generator=seeded(16))
    second = first.masked_fill(attention_mask == 0, 3)  # the mask token, of all things
    losses = [
        diffusion_loss(MODEL, ids, loss_type, attention_mask=attention_mask, generator=seeded(17)).detach()
        for ids in (first, second)
    ]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("places", [(3, 4, 5, 6), (0, 1, 2, 3), (2, 3, 4, 5), (0, 2, 5, 6)], ids=str)
def test_padding_anywhere_leaves_the_cross_entropy(places: tuple[int, ...]):
    """The four tokens at `places` of a row of seven, padding elsewhere, have the cross-entropy of the four alone."""
    x0, masked = torch.tensor([X0]), torch.tensor([[True, False, True, True]])

    def spread(values: torch.Tensor, padding: int) -> torch.Tensor:
        row = torch.full((1, 7), padding, dtype=values.dtype)
        row[:, list(places)] = values
        return row

    noisy = x0.masked_fill(masked, 3)
    plain = masked_token_nll(MODEL, x0, noisy, masked)
    padded = masked_token_nll(
        MODEL, spread(x0, 1), spread(noisy, 1), spread(masked, False), spread(torch.ones_like(x0), 0)
    )
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-6)


@LOSSES
def test_full_masks_equal_none(loss_type: str):
    x0 = torch.randint(0, 3, (16, 4), generator=seeded(18))
    plain = diffusion_loss(MODEL, x0, loss_type, generator=seeded(19))
    ones = torch.ones_like(x0)
    for masks in ({"attention_mask": ones}, {"loss_mask": ones}, {"loss_mask": ones.bool()}):
        torch.testing.assert_close(diffusion_loss(MODEL, x0, loss_type, generator=seeded(19), **masks), plain)


@LOSSES
def test_context_matters_to_the_loss(loss_type: str):
    first = torch.tensor([[2, 0, 1, 1]]).expand(32, 4)
    second = torch.tensor([[2, 0, 1, 0]]).expand(32, 4)
    loss_mask = torch.tensor([[True, True, True, False]]).expand(32, 4)
    losses = [
        diffusion_loss(MODEL, ids, loss_type, loss_mask=loss_mask, generator=seeded(20)) for ids in (first, second)
    ]
    assert not torch.allclose(*losses)


@LOSSES
def test_the_generator_alone_decides(loss_type: str):
    x0 = torch.tensor([X0]).expand(16, 4)
    state = torch.get_rng_state()
    first, second, other = (diffusion_loss(MODEL, x0, loss_type, generator=seeded(seed)) for seed in (21, 21, 22))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, second) and not torch.equal(first, other)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(23)
        first = diffusion_loss(MODEL, x0, loss_type)
        torch.manual_seed(23)
        assert torch.equal(first, diffusion_loss(MODEL, x0, loss_type))


@LOSSES
def test_gradient_is_that_of_the_weighted_cross_entropy(loss_type: str):
    """Against a dense computation from full logits; the mode of the model is left as it was."""
    model = tiny_model(dtype=torch.float64).train()
    x0 = torch.randint(0, 3, (12, 4), generator=seeded(24))
    terms = diffusion_loss_terms(model, x0, loss_type, generator=seeded(25))
    assert model.training
    (actual,) = torch.autograd.grad(terms.loss.sum(), model.model.embed_tokens.weight)
    noise = LogLinearNoise()
    maskable = torch.ones_like(x0, dtype=torch.bool)
    drawn = corrupt(x0, loss_type, 3, maskable, noise_schedule=noise, generator=seeded(25))
    log_probs = model(drawn.noisy_ids).logits.log_softmax(-1).gather(-1, x0[..., None])[..., 0]  # (B, L)
    factor = {
        "dse": lambda: noise.loss_weight(drawn.level),
        "t_dce": lambda: noise.loss_weight(drawn.level),
        "lambda_dce": lambda: 1 / drawn.level,
        "ao": lambda: 4 / drawn.masked.sum(-1),
    }[loss_type]()
    dense = -(factor * torch.where(drawn.masked, log_probs, 0.0).sum(-1)).sum()
    (expected,) = torch.autograd.grad(dense, model.model.embed_tokens.weight)
    # `loss` itself is rounded to float32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@LOSSES
def test_a_batch_without_anything_to_mask_costs_nothing_and_has_a_gradient(loss_type: str):
    model = tiny_model()
    x0 = torch.tensor([X0, X0])
    loss = diffusion_loss(model, x0, loss_type, loss_mask=torch.zeros_like(x0), generator=seeded(26))
    assert loss.tolist() == [0.0, 0.0]
    loss.mean().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters() if weight.grad is not None)


@LOSSES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_give_float32_losses(loss_type: str, dtype: torch.dtype):
    x0 = torch.tensor([X0]).expand(32, 4)
    with torch.no_grad():
        half = diffusion_loss_terms(tiny_model(dtype=dtype), x0, loss_type, generator=seeded(27))
        full = diffusion_loss_terms(MODEL, x0, loss_type, generator=seeded(27))
    assert half.loss.dtype == half.nll.dtype == torch.float32
    assert torch.equal(half.num_masked, full.num_masked)
    torch.testing.assert_close(half.nll, full.nll, rtol=0.1, atol=0.1)  # bfloat16 weights: two to three digits


def test_int32_ids():
    x0 = torch.randint(0, 3, (16, 4), generator=seeded(28))
    plain = diffusion_loss(MODEL, x0, "ao", generator=seeded(29))
    torch.testing.assert_close(diffusion_loss(MODEL, x0.int(), "ao", generator=seeded(29)), plain)


# The original code's figures


def golden_model() -> RADDForMaskedDiffusion:
    """The original checkpoint, key by key."""
    sizes = json.loads((GOLDEN / "config.json").read_text())
    config = RADDConfig(
        vocab_size=sizes["tokens"] + 1,
        hidden_size=sizes["model"]["hidden_size"],
        num_hidden_layers=sizes["model"]["n_blocks"],
        num_attention_heads=sizes["model"]["n_heads"],
        max_position_embeddings=sizes["model"]["length"],
    )
    original = load_file(GOLDEN / "model.safetensors")
    weights = {
        "model.embed_tokens.weight": original["vocab_embed.embedding"],
        "model.norm.weight": original["output_layer.norm_final.weight"],
        "model.norm.bias": original["output_layer.norm_final.bias"],
        "lm_head.weight": original["output_layer.linear.weight"],
        "lm_head.bias": original["output_layer.linear.bias"],
    }
    names = {"attn_out": "self_attn.o_proj", "norm1": "attn_norm", "norm2": "mlp_norm"}
    names |= {"mlp.0": "mlp.up_proj", "mlp.2": "mlp.down_proj"}
    for i in range(config.num_hidden_layers):
        for old, new in names.items():
            for kind in ("weight", "bias"):
                if f"blocks.{i}.{old}.{kind}" in original:
                    weights[f"model.layers.{i}.{new}.{kind}"] = original[f"blocks.{i}.{old}.{kind}"]
        parts = original[f"blocks.{i}.attn_qkv.weight"].chunk(3)
        for part, new in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True):
            weights[f"model.layers.{i}.self_attn.{new}.weight"] = part
    model = RADDForMaskedDiffusion(config).eval()
    model.load_state_dict(weights)
    return model


@pytest.fixture(scope="module")
def golden() -> tuple[RADDForMaskedDiffusion, dict[str, torch.Tensor]]:
    return golden_model(), load_file(GOLDEN / "io.safetensors")


def test_golden_log_probs(golden: tuple[RADDForMaskedDiffusion, dict[str, torch.Tensor]]):
    model, io = golden
    with torch.no_grad():
        logits = model(io["xt"]).logits
    torch.testing.assert_close(logits[..., :96], io["logits"][..., :96], rtol=0.0, atol=1e-4)
    masked = io["xt"] == 96
    expected = io["logits"][..., :96].log_softmax(-1)
    torch.testing.assert_close(logits.log_softmax(-1)[..., :96][masked], expected[masked], rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("loss_type", "figures"),
    [("dse", "dse"), ("t_dce", "t_dce"), ("lambda_dce", "lambda_dce_at_lambda_equal_t"), ("ao", "any_order_k")],
)
def test_golden_losses(golden: tuple[RADDForMaskedDiffusion, dict[str, torch.Tensor]], loss_type: str, figures: str):
    model, io = golden
    masked = io["xt"] == 96
    with torch.no_grad():
        nll = sum_over_masked(masked_token_nll(model, io["x0"], io["xt"], masked), masked)
    level = torch.tensor(EXPECTED["k"] if loss_type == "ao" else EXPECTED["t"])
    if loss_type == "ao":
        assert masked.sum(-1).tolist() == EXPECTED["k"]
    corruption = Corruption(io["xt"], masked, level, torch.full((3,), 32))
    assert weigh(nll, corruption, loss_type, LogLinearNoise()).tolist() == pytest.approx(EXPECTED[figures], rel=1e-4)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_golden_order_nlls_by_the_oracle(
    golden: tuple[RADDForMaskedDiffusion, dict[str, torch.Tensor]], direction: str
):
    model, io = golden
    exact = conditional(model)
    nll = ref.forward_nll if direction == "forward" else ref.backward_nll
    actual = [nll(exact, tuple(x0), 96) for x0 in io["x0"].tolist()]
    assert actual == pytest.approx(EXPECTED[f"ar_{direction}_nll"], rel=1e-4)


# Bad arguments


def model_without_mask_token() -> nn.Module:
    """A backbone whose config does not know a mask token."""
    recorder = Recorder(MODEL)
    recorder.config = type("Config", (), {"vocab_size": 4})()
    return recorder


IDS = torch.tensor([X0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_type": "t_DCE"}, r"`loss_type` must be one of \['dse', 't_dce', 'lambda_dce', 'ao'\], got 't_DCE'"),
        ({"loss_type": None}, r"`loss_type` must be one of .*got None"),
        ({"time_sampling": "naive"}, r"`time_sampling` must be one of \['uniform', .*\], got 'naive'"),
        ({"time_eps": -0.1}, r"`time_eps` must be in \[0, 1\), got -0.1"),
        ({"time_eps": 1.0}, r"`time_eps` must be in \[0, 1\), got 1.0"),
        ({"time_eps": float("nan")}, r"`time_eps` must be in \[0, 1\), got nan"),
        ({"noise_schedule": "linear"}, r"`noise_schedule` must be one of .*got 'linear'"),
        ({"mask_token_id": 4}, r"`mask_token_id` must be an id in \[0, vocab_size=4\).*got 4"),
        ({"mask_token_id": -1}, r"`mask_token_id` must be an id in \[0, vocab_size=4\).*got -1"),
        ({"model": model_without_mask_token()}, r"`mask_token_id` must be an id in .*got None"),
        ({"input_ids": IDS[0]}, r"`input_ids` must be an integer tensor of shape \(batch, length\).*\(4,\)"),
        ({"input_ids": IDS.float()}, r"`input_ids` must be an integer tensor .*float32"),
        ({"input_ids": IDS + 2}, r"`input_ids` must be in \[0, vocab_size=4\), got values from 2 to 4"),
        ({"input_ids": IDS - 1}, r"`input_ids` must be in \[0, vocab_size=4\), got values from -1 to 1"),
        ({"attention_mask": torch.ones(1, 3)}, r"`attention_mask` must have the shape .*\(1, 4\), got \(1, 3\)"),
        ({"attention_mask": torch.ones(4)}, r"`attention_mask` must have the shape .*\(1, 4\), got \(4,\)"),
        ({"loss_mask": torch.ones(2, 4)}, r"`loss_mask` must have the shape .*\(1, 4\), got \(2, 4\)"),
    ],
)
def test_bad_arguments(arguments: dict, message: str):
    state = torch.get_rng_state()
    call = {"model": MODEL, "input_ids": IDS, "loss_type": "ao"} | arguments
    with pytest.raises(ValueError, match=message):
        diffusion_loss(**call)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "call",
    [
        lambda: corrupt(IDS, "kl", 3, torch.ones_like(IDS, dtype=torch.bool), noise_schedule=LogLinearNoise()),
        lambda: weigh(torch.ones(1), Corruption(IDS, IDS == 3, torch.ones(1), torch.ones(1)), "kl", LogLinearNoise()),
    ],
)
def test_unknown_loss_type_below_diffusion_loss(call: Callable[[], object]):
    with pytest.raises(ValueError, match=r"`loss_type` must be one of .*got 'kl'"):
        call()


# Other masked language models


def bert(**fields) -> nn.Module:
    """A small BERT with weights that tell contexts apart, whose config knows no mask token."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 16, "initializer_range": 0.5}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(30)
        return BertForMaskedLM(BertConfig(**{**sizes, **fields})).eval()


@LOSSES
def test_any_masked_backbone_has_the_loss_of_its_full_logits(loss_type: str):
    """The output layer sees the masked positions alone, with padding too; the mask token has no probability."""
    model, mask_token_id = bert(), 4
    x0 = torch.randint(5, 9, (12, 6), generator=seeded(31))
    attention_mask = (torch.arange(6) < torch.randint(2, 7, (12, 1), generator=seeded(32))).long()
    shapes = []
    handle = model.get_output_embeddings().register_forward_hook(lambda m, args, out: shapes.append(out.shape))
    options = {"attention_mask": attention_mask, "mask_token_id": mask_token_id}
    terms = diffusion_loss_terms(model, x0, loss_type, generator=seeded(33), **options)
    terms.loss.sum().backward()
    handle.remove()
    assert shapes == [(int(terms.num_masked.sum()), 9)]
    gradient = model.bert.embeddings.word_embeddings.weight.grad.clone()
    model.zero_grad()
    drawn = corrupt(
        x0, loss_type, mask_token_id, attention_mask.bool(), noise_schedule=LogLinearNoise(), generator=seeded(33)
    )
    logits = model(drawn.noisy_ids, attention_mask=attention_mask).logits
    logits = logits.masked_fill(torch.arange(9) == mask_token_id, float("-inf"))
    token_nll = -logits.log_softmax(-1).gather(-1, x0[..., None])[..., 0]
    loss = weigh(torch.where(drawn.masked, token_nll, 0.0).sum(-1), drawn, loss_type, LogLinearNoise())
    torch.testing.assert_close(terms.loss, loss, rtol=1e-5, atol=1e-5)
    loss.sum().backward()
    expected = model.bert.embeddings.word_embeddings.weight.grad
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
