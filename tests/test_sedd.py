"""SEDD: the original's figures, the law of its samplers by enumeration, its loss, and what it shares with RADD."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from reference_sedd import score_entropy as slow_score_entropy
from reference_sedd import text_law
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from radd_hf import RADDConfig, RADDForMaskedDiffusion, SEDDConfig, SEDDForMaskedDiffusion
from radd_hf.conversion import convert_original_checkpoint, load_original_checkpoint
from radd_hf.conversion_mdlm import fold_conditioning
from radd_hf.conversion_original import converted, key_map, original_weights
from radd_hf.conversion_sedd import BLOCK_KEYS, TRUNK_KEYS
from radd_hf.losses import dse_loss
from radd_hf.noise_schedule_radd import get_noise_schedule
from radd_hf.sampling_sedd import step_coefficients
from radd_hf.score_entropy import score_entropy, score_entropy_diffusion_loss, score_entropy_loss

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = ("scaled", "unscaled")
MASK = 1


def make_sedd(seed: int = 5, scale: float = 0.6, **fields) -> SEDDForMaskedDiffusion:
    """A tiny network whose scores depend strongly on context and time: every weight is drawn."""
    sizes = {
        "vocab_size": 4,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "hidden_dropout": 0.0,
        "mask_token_id": MASK,
        "cond_dim": 8,
    }
    model = SEDDForMaskedDiffusion(SEDDConfig(**{**sizes, **fields})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    return model


# The original code's figures


@pytest.mark.parametrize("kind", KINDS)
def test_golden_log_scores_and_losses(tmp_path: Path, kind: str):
    source = FIXTURES / f"sedd_original_{kind}"
    io = load_file(source / "io.safetensors")
    out = convert_original_checkpoint(source, tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(out)
    assert type(model) is SEDDForMaskedDiffusion and model.config.scale_by_sigma == (kind == "scaled")
    assert (model.config.training_loss, model.config.cond_dim, model.config.hidden_dropout) == ("dse", 32, 0.1)
    schedule, masked = get_noise_schedule(model.config), io["xt"] == 96
    torch.testing.assert_close(schedule.total(io["t"]), io["sigma"], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(schedule.rate(io["t"]), io["dsigma"], rtol=1e-5, atol=0.0)
    with torch.no_grad():
        for noise in ({"sigma": io["sigma"]}, {"t": io["t"]}):
            log_score = model(io["xt"], **noise).logits
            torch.testing.assert_close(log_score, io["log_score"], rtol=0.0, atol=1e-4)
        kept = model(io["xt"], t=io["t"], logits_to_keep=masked).logits
    torch.testing.assert_close(kept, log_score[masked])
    loss = score_entropy_loss(kept, io["x0"], masked, io["t"], schedule, 96)
    torch.testing.assert_close(loss, io["score_entropy_loss"], rtol=1e-4, atol=0.0)


def test_a_uniform_graph_is_refused(tmp_path: Path):
    shutil.copytree(FIXTURES / "sedd_original_scaled", tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(config | {"graph": {"type": "uniform"}}))
    with pytest.raises(ValueError, match=r"`graph.type` .* must be one of \['absorb'\], got 'uniform'"):
        convert_original_checkpoint(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# RADD's score


def test_with_constant_conditioning_and_normalised_it_is_radds_score():
    """Theorem 1: fold the conditioning away, normalise over the clean tokens, multiply by s(t): `concrete_score`."""
    sedd = make_sedd(mask_token_id=3)
    with torch.no_grad():
        for name, weight in sedd.named_parameters():
            if name.endswith("modulation.weight"):
                weight.zero_()
    names = key_map(1, TRUNK_KEYS, BLOCK_KEYS)
    folded = fold_conditioning(original_weights(sedd.state_dict(), names, sedd.config), torch.zeros(8).double())
    fields = sedd.config.to_dict()
    config = RADDConfig(
        **{k: fields[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")}, num_attention_heads=2
    )
    radd = RADDForMaskedDiffusion(config).eval()
    radd.load_state_dict(converted(config, folded))
    x = torch.tensor([[3, 0, 3, 2, 3], [3, 3, 3, 3, 3]])
    masked = x == 3
    for t in (0.05, 0.5, torch.tensor([0.3, 0.99])):
        with torch.no_grad():
            score, expected = sedd.concrete_score(x, t)[masked], radd.concrete_score(x, t)[masked]
        ratio = get_noise_schedule(config).score_scale(torch.as_tensor(t).double()).expand(2)[masked.nonzero()[:, 0]]
        normalised = score[:, :3] / score[:, :3].sum(-1, keepdim=True) * ratio[:, None].float()
        torch.testing.assert_close(normalised, expected[:, :3], rtol=1e-5, atol=1e-6)
        raw = radd(x).logits[masked][:, :3].exp() * ratio[:, None].float() / 3  # not normalised: scaled as it says
        torch.testing.assert_close(score[:, :3], raw, rtol=1e-5, atol=1e-6)


# The law of the samplers


@pytest.mark.parametrize("algorithm", ["tweedie", "euler"])
@pytest.mark.parametrize("fields", [{}, {"scale_by_sigma": False}], ids=KINDS)
def test_law_of_the_samplers(algorithm: str, fields: dict):
    """20,000 draws of 3 positions in 3 steps against enumeration of the matrix definition; chi-square over 27 texts.

    Threshold: the mean plus six standard deviations of the statistic. In some states of the scaled network staying
    masked would have a negative probability.
    """
    model = make_sedd(scale=0.25, noise_schedule="cosine", **fields)
    model.lm_head.bias.data -= 0.6 if model.config.scale_by_sigma else 3.3
    schedule = get_noise_schedule(model.config)
    memo: dict = {}

    def score(text: tuple[int, ...], t: float) -> torch.Tensor:
        if (text, t) not in memo:
            with torch.no_grad():
                memo[text, t] = model.concrete_score(torch.tensor([text]), t)[0]
        return memo[text, t]

    times = [0.0, 0.3, 0.6, 0.9]
    expected = text_law(
        score,
        (MASK, MASK, MASK),
        times,
        lambda t: float(schedule.total(t)),
        lambda t: float(schedule.rate(t)),
        MASK,
        algorithm == "euler",
    )
    draws = 20_000
    ids = torch.full((draws, 3), MASK)
    coefficient = step_coefficients(schedule, torch.tensor(times, dtype=torch.float64), algorithm)
    first = [float(coefficient[2] * p[[0, 2, 3]].sum()) for p in score((MASK,) * 3, 0.9)]
    others = [float(coefficient[1] * memo[x, 0.6][i, [0, 2, 3]].sum()) for x, t in memo if t == 0.6 for i in range(3)]
    assert 0.2 < min(first) and max(first) < 0.8
    assert max(others) > 1 or not model.config.scale_by_sigma
    found = Counter(map(tuple, model.diffusion_generate(ids, times=times, algorithm=algorithm, seed=1).tolist()))
    assert set(found) <= set(expected) and sum(found.values()) == draws
    statistic, cells, rest, rest_found = 0.0, 0, 0.0, 0
    for text, p in expected.items():
        if p * draws < 5:
            rest, rest_found = rest + p * draws, rest_found + found[text]
            continue
        statistic += (found[text] - p * draws) ** 2 / (p * draws)
        cells += 1
    assert cells >= 20 and abs(rest_found - rest) < 6 * math.sqrt(rest) + 6
    assert statistic < cells + 6 * math.sqrt(2 * cells), (statistic, cells)


def test_the_network_is_called_in_every_step_while_a_mask_is_left():
    model = make_sedd(vocab_size=9, scale_by_sigma=True)
    calls = []
    handle = model.model.register_forward_hook(lambda module, args, output: calls.append(args[1].tolist()))
    output = model.diffusion_generate(batch_size=2, max_length=12, num_steps=6, seed=3, return_dict_in_generate=True)
    handle.remove()
    sigma = get_noise_schedule(model.config).total(torch.arange(6, 0, -1).double() / 6)
    assert [row[0] for row in calls] == pytest.approx(sigma.tolist()[: len(calls)])
    assert output.nfe.tolist() == [sum(len(row) > i for row in calls) for i in range(2)] or output.nfe.max() == len(
        calls
    )
    assert not bool((output.sequences == MASK).any())
    assert bool((output.reveal_pass < output.nfe[:, None]).all())


def test_rows_do_not_depend_on_their_batch_and_given_tokens_stay():
    model = make_sedd(vocab_size=9)
    ids = torch.tensor([[2, MASK, 5, MASK, MASK, 0, 0], [MASK, 3, MASK, MASK, 8, MASK, 4]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7])
    both = model.diffusion_generate(ids, attention_mask=mask, num_steps=5, seed=[7, 8])
    first = model.diffusion_generate(ids[:1, :5], num_steps=5, seed=[7])
    second = model.diffusion_generate(ids[1:], num_steps=5, seed=[8])
    assert both[0, :5].tolist() == first[0].tolist() and both[1].tolist() == second[0].tolist()
    given = (ids != MASK) & mask.bool()
    assert torch.equal(both[given], ids[given])
    greedy = model.diffusion_generate(ids[1:], num_steps=1, do_sample=False)
    with torch.no_grad():
        best = model(ids[1:], t=1.0).logits
    best[..., MASK] = -torch.inf
    assert torch.equal(greedy, torch.where(ids[1:] == MASK, best.argmax(-1), ids[1:]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`num_steps` or `times` must be given for a score that changes with time"),
        ({"algorithm": "any_order"}, r"`algorithm` must be one of \['tweedie', 'euler'\] .*, got 'any_order'"),
        ({"algorithm": "confidence"}, r"`algorithm` must be one of \['tweedie', 'euler'\]"),
        ({"num_steps": 4, "remasking": "cap"}, "`remasking` must be None for an unnormalised score, got 'cap'"),
        ({"num_steps": 4, "compile": True}, "`compile` must be False for a score that changes with time, got True"),
    ],
)
def test_samplers_without_time_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_sedd().diffusion_generate(batch_size=1, max_length=4, **options)


# The loss


def test_score_entropy_is_the_definition():
    generator = torch.Generator().manual_seed(2)
    log_score = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    target, ratio = torch.tensor([0, 2, 3, 0, 2]), torch.tensor([0.1, 1.0, 3.0, 20.0, 0.5], dtype=torch.float64)
    value = score_entropy(log_score, target, ratio, MASK)
    expected = [
        slow_score_entropy(s.exp(), int(i), float(r), MASK) for s, i, r in zip(log_score, target, ratio, strict=True)
    ]
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64))
    assert bool((value > 0).all())
    truth = torch.full((5, 4), -torch.inf, dtype=torch.float64)
    truth[torch.arange(5), target] = ratio.log()
    torch.testing.assert_close(score_entropy(truth, target, ratio, MASK), torch.zeros(5, dtype=torch.float64))


def test_for_a_normalised_score_it_is_radds_dse():
    """The paper's remark: s(t) c_theta has the loss w(t) sum -log q, draw by draw."""
    schedule = get_noise_schedule("log_linear")
    generator = torch.Generator().manual_seed(4)
    input_ids = torch.tensor([[0, 2, 3, 0], [3, 3, 2, 0]])
    masked = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]).bool()
    t = torch.tensor([0.2, 0.9], dtype=torch.float64)
    logits = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    logits[:, MASK] = -torch.inf
    row = masked.nonzero()[:, 0]
    log_score = logits.log_softmax(-1) + schedule.score_scale(t).log()[row, None]
    nll = torch.zeros(2, dtype=torch.float64)
    nll.index_add_(0, row, torch.nn.functional.cross_entropy(logits, input_ids[masked], reduction="none"))
    loss = score_entropy_loss(log_score, input_ids, masked, t, schedule, MASK)
    torch.testing.assert_close(loss, dse_loss(nll, t, schedule))


def test_training_reaches_the_data():
    """250 steps of AdamW on two texts of one token each: from 5 ln 5 nats to their entropy, ln 2, and no lower."""
    config = make_sedd(vocab_size=6, hidden_size=32, cond_dim=16).config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SEDDForMaskedDiffusion(config)
    data = torch.tensor([[2] * 5, [4] * 5]).repeat(16, 1)
    generator = torch.Generator().manual_seed(0)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for _ in range(250):
        loss = score_entropy_diffusion_loss(model, data, generator=generator).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert sum(losses[:5]) / 5 > 4 and 0.55 < sum(losses[-50:]) / 50 < 0.9
    texts = model.diffusion_generate(batch_size=40, max_length=5, num_steps=64, seed=0).tolist()
    assert sum(text in data.tolist() for text in texts) >= 32


def test_the_loss_ignores_padding_and_context():
    model = make_sedd(vocab_size=9)
    ids = torch.tensor([[2, 3, 4, 5, 0, 0], [6, 7, 8, 2, 3, 4]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    context = torch.tensor([[0, 0, 1, 1, 1, 1], [0] * 6])
    with torch.no_grad():
        loss = score_entropy_diffusion_loss(
            model, ids, attention_mask=mask, loss_mask=context, generator=torch.Generator().manual_seed(1)
        )
        padded = model(ids, t=0.5, attention_mask=mask).logits[0, :4]
        torch.testing.assert_close(padded, model(ids[:1, :4], t=0.5).logits[0], rtol=1e-4, atol=1e-4)
    assert loss.shape == (2,) and loss[1] == 0
    with pytest.raises(ValueError, match="must be clean text where it may be masked"):
        score_entropy_diffusion_loss(model, torch.tensor([[2, MASK]]))


# A model like any other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Exactly one of `sigma` and `t` must be given"),
        ({"sigma": 1.0, "t": 0.5}, "Exactly one of `sigma` and `t` must be given"),
        ({"t": 0.0}, r"`t` must be in \(0, 1.0\], one number or one a row \(1,\), got"),
        ({"t": 1.5}, r"`t` must be in"),
        ({"sigma": torch.ones(3)}, r"`sigma` must be in \(0, inf\], one number or one a row \(1,\), got \(3,\)"),
    ],
)
def test_the_noise_level_is_checked(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_sedd()(torch.tensor([[MASK, 2]]), **arguments)


@pytest.mark.parametrize(("fields", "message"), [
    ({"cond_dim": 0}, "`cond_dim` must be a positive integer, got 0"),
    ({"scale_by_sigma": 1}, "`scale_by_sigma` must be True or False, got 1"),
    ({"hidden_size": 15}, "`hidden_size` must be divisible"),
])  # fmt: skip
def test_config_checks(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        SEDDConfig(**fields)


def test_an_untrained_network_has_a_flat_score():
    """adaLN-zero and a zero output layer: scaled, every clean token has the score s(t) / (V - 1)."""
    model = SEDDForMaskedDiffusion(make_sedd(vocab_size=9).config).eval()
    for layer in model.model.layers:
        assert not bool(layer.modulation.weight.any()) and not bool(layer.modulation.bias.any())
    with torch.no_grad():
        score = model.concrete_score(torch.tensor([[MASK, 2]]), 0.5)[0, 0]
    expected = torch.full((9,), float(get_noise_schedule(model.config).score_scale(0.5)) / 8)
    expected[MASK] = 1.0
    torch.testing.assert_close(score, expected)


def test_saving_and_checkpointing(tmp_path: Path):
    model = make_sedd()
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is SEDDConfig
    x = torch.tensor([[MASK, 2, MASK]])
    with torch.no_grad():
        expected = model(x, t=0.3).logits
        for auto in (AutoModel, AutoModelForMaskedLM, SEDDForMaskedDiffusion):
            loaded = auto.from_pretrained(tmp_path)
            assert type(loaded) is SEDDForMaskedDiffusion and torch.equal(loaded(x, t=0.3).logits, expected)
    gradients = []
    for checkpointing in (False, True):
        model.train()
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(x, t=0.3).logits.sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"]["AutoModelForMaskedLM"] == "modeling_sedd.SEDDForMaskedDiffusion"
    assert "custom_pipelines" not in config
    (tmp_path / "config.json").write_text(json.dumps(config | {"cond_dim": 9}))
    with pytest.raises(ValueError, match=r"'model.layers.0.modulation.weight: \(96, 8\) instead of \(96, 9\)'"):
        SEDDForMaskedDiffusion.from_pretrained(tmp_path)


REMOTE = """
import sys

sys.modules["radd_hf"] = None
import torch
from transformers import AutoModelForMaskedLM

model = AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules.")
print(model.diffusion_generate(batch_size=1, max_length=6, num_steps=4, seed=0).tolist())
"""


@pytest.mark.slow
def test_without_radd_hf_the_saved_code_does_the_same(tmp_path: Path):
    model = make_sedd(vocab_size=9)
    model.save_pretrained(tmp_path / "model")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_", "PYTHON"))}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-I", "-c", REMOTE, str(tmp_path / "model")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    expected = model.diffusion_generate(batch_size=1, max_length=6, num_steps=4, seed=0).tolist()
    assert json.loads(run.stdout.splitlines()[-1]) == expected


def test_load_original_checkpoint_is_in_evaluation_mode():
    assert not load_original_checkpoint(FIXTURES / "sedd_original_scaled").training
