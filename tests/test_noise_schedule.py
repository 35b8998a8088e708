"""The functions of time alone, against the oracle, autograd and the original code's figures."""

import json
import math
import pathlib

import numpy as np
import pytest
import reference as ref
import torch

from radd_hf.configuration_radd import RADDConfig
from radd_hf.noise_schedule_radd import (
    CosineNoise,
    GeometricNoise,
    LogLinearNoise,
    NoiseSchedule,
    check_time_grid,
    expected_nfe,
    get_noise_schedule,
    uniform_time_grid,
)

GOLDEN = json.loads((pathlib.Path(__file__).parent / "fixtures/radd_original/expected.json").read_text())
PAIRS = {
    "log_linear": (LogLinearNoise(), ref.Schedule("log_linear")),
    "log_linear_eps": (LogLinearNoise(eps=0.25), ref.Schedule("log_linear", eps=0.25)),
    "geometric": (GeometricNoise(), ref.Schedule("geometric")),
    "geometric_narrow": (GeometricNoise(0.01, 5.0), ref.Schedule("geometric", sigma_min=0.01, sigma_max=5.0)),
    "cosine": (CosineNoise(), ref.Schedule("cosine")),
    "cosine_eps": (CosineNoise(eps=0.1), ref.Schedule("cosine", eps=0.1)),
}
BOTH = pytest.mark.parametrize(("schedule", "oracle"), PAIRS.values(), ids=PAIRS)
TIMES = torch.tensor([1e-5, 1e-3, 0.02, 0.1, 0.25, 0.5, 0.77, 0.9, 0.999, 1.0], dtype=torch.float64)


@BOTH
@pytest.mark.parametrize(
    ("method", "oracle_method"),
    [
        ("total", "sigma_bar"),
        ("rate", "sigma"),
        ("mask_probability", "mask_probability"),
        ("score_scale", "score_scale"),
        ("loss_weight", "weight"),
    ],
)
def test_functions_equal_the_oracle(schedule: NoiseSchedule, oracle: ref.Schedule, method: str, oracle_method: str):
    expected = [getattr(oracle, oracle_method)(t) for t in TIMES.tolist()]
    assert getattr(schedule, method)(TIMES).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-300)


@BOTH
@pytest.mark.parametrize("algorithm", ["tweedie", "euler"])
def test_unmask_probabilities_equal_the_oracle(schedule: NoiseSchedule, oracle: ref.Schedule, algorithm: str):
    psi = getattr(schedule, f"{algorithm}_probability")
    pairs = [(1.0, 0.9), (1.0, 0.0), (0.6, 0.59), (0.3, 0.05), (0.1, 0.0), (0.01, 0.005)]
    expected = [ref.unmask_probability(oracle, algorithm, t, s) for t, s in pairs]
    later, earlier = torch.tensor(pairs, dtype=torch.float64).unbind(-1)
    actual = psi(later, earlier)
    assert actual.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert bool(((actual >= 0) & (actual <= 1)).all())
    assert [psi(t, s).item() for t, s in pairs] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_euler_probability_is_cut_at_one():
    schedule = GeometricNoise()
    assert schedule.loss_weight(0.2).item() * 0.2 > 1.0
    assert schedule.euler_probability(0.2, 0.0).item() == 1.0


@BOTH
def test_rate_is_the_autograd_derivative_of_the_total(schedule: NoiseSchedule, oracle: ref.Schedule):
    t = TIMES.clone().requires_grad_()
    (slope,) = torch.autograd.grad(schedule.total(t).sum(), t)
    torch.testing.assert_close(schedule.rate(TIMES), slope, rtol=1e-9, atol=0.0)


@BOTH
def test_mask_rate_is_the_autograd_derivative_of_the_mask_probability(schedule: NoiseSchedule, oracle: ref.Schedule):
    t = TIMES.clone().requires_grad_()
    (slope,) = torch.autograd.grad(schedule.mask_probability(t).sum(), t)
    # autograd takes exp(-sigma_bar) as 1 + expm1(-sigma_bar): nine digits of 1 - lambda at sigma_bar = 20
    torch.testing.assert_close(schedule.mask_rate(TIMES), slope, rtol=1e-9, atol=1e-13)


@BOTH
def test_weight_is_rate_times_scale_and_log_derivative(schedule: NoiseSchedule, oracle: ref.Schedule):
    t = TIMES.clone().requires_grad_()
    (slope,) = torch.autograd.grad(schedule.mask_probability(t).sum(), t)
    weight = schedule.loss_weight(TIMES)
    torch.testing.assert_close(weight, schedule.rate(TIMES) * schedule.score_scale(TIMES), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(weight, slope / schedule.mask_probability(TIMES), rtol=1e-9, atol=1e-13)


def test_log_linear_weight_is_one_over_t_for_every_eps():
    for eps in (0.0, 1e-3, 0.5):
        torch.testing.assert_close(LogLinearNoise(eps).loss_weight(TIMES), 1 / TIMES, rtol=1e-12, atol=0.0)


@BOTH
def test_inverse_round_trip(schedule: NoiseSchedule, oracle: ref.Schedule):
    # Above 1 - 1e-6 (geometric, t > 0.94) float64 no longer holds t inside lambda.
    times = TIMES[schedule.mask_probability(TIMES) < 1 - 1e-6]
    torch.testing.assert_close(schedule.inverse(schedule.mask_probability(times)), times, rtol=1e-7, atol=1e-9)
    low, high = oracle.mask_probability(0.0), oracle.mask_probability(0.9)
    levels = torch.linspace(low + 1e-3 * (high - low), high, 7, dtype=torch.float64)[:-1]
    torch.testing.assert_close(schedule.mask_probability(schedule.inverse(levels)), levels, rtol=1e-9, atol=0.0)
    expected = [oracle.inverse(level) for level in levels.tolist()]
    assert schedule.inverse(levels).tolist() == pytest.approx(expected, rel=1e-7)


@BOTH
def test_mask_probability_increases(schedule: NoiseSchedule, oracle: ref.Schedule):
    grid = torch.linspace(0.0, 1.0, 501, dtype=torch.float64)
    assert bool((schedule.total(grid).diff() > 0).all())
    assert bool((schedule.mask_probability(grid).diff() >= 0).all())


def test_ends_of_the_schedules():
    assert LogLinearNoise().mask_probability(0.0).item() == 0.0
    assert LogLinearNoise().mask_probability(1.0).item() == pytest.approx(0.999, rel=1e-12)  # erratum 6
    assert CosineNoise().mask_probability(0.0).item() == 0.0
    assert CosineNoise().mask_probability(1.0).item() == pytest.approx(0.999, rel=1e-12)
    assert GeometricNoise().mask_probability(0.0).item() == pytest.approx(-math.expm1(-1e-4), rel=1e-12)
    assert GeometricNoise().total(1.0).item() == pytest.approx(20.0, rel=1e-12)


@pytest.mark.parametrize("name", ["geometric", "cosine"])
def test_euler_agrees_with_tweedie_to_first_order(name: str):
    """|psi_euler - psi_tweedie| is O(h^2) at fixed t: the fitted slope on log-log axes is 2."""
    schedule = PAIRS[name][0]
    for t in (0.3, 0.5, 0.8):
        steps = torch.logspace(-2, -4, 9, dtype=torch.float64)
        gap = schedule.euler_probability(t, t - steps) - schedule.tweedie_probability(t, t - steps)
        slope = np.polyfit(np.log(steps.numpy()), np.log(gap.abs().numpy()), 1)[0]
        assert slope == pytest.approx(2.0, abs=0.05)


def test_euler_equals_tweedie_on_log_linear():
    later, earlier = TIMES, TIMES * 0.6
    schedule = LogLinearNoise()
    torch.testing.assert_close(
        schedule.euler_probability(later, earlier), schedule.tweedie_probability(later, earlier), rtol=1e-9, atol=0.0
    )
    torch.testing.assert_close(
        schedule.tweedie_probability(later, earlier), torch.full_like(TIMES, 0.4), rtol=1e-9, atol=0.0
    )


@BOTH
def test_floats_and_dtypes(schedule: NoiseSchedule, oracle: ref.Schedule):
    for method in ("total", "rate", "mask_probability", "score_scale", "loss_weight"):
        function = getattr(schedule, method)
        assert function(0.3).dtype == torch.float64 and function(0.3).shape == ()
        t = torch.tensor([[0.2, 0.3], [0.4, 0.5]])
        assert function(t).dtype == torch.float32 and function(t).shape == (2, 2)
        torch.testing.assert_close(function(t).double(), function(t.double()), rtol=1e-5, atol=1e-7)


# The original code's figures


@pytest.mark.parametrize(
    ("figures", "schedule"), [("loglinear_eps1e-3", LogLinearNoise()), ("geometric_1e-4_20", GeometricNoise())]
)
def test_golden_noise(figures: str, schedule: NoiseSchedule):
    golden = GOLDEN["noise"][figures]
    t = torch.tensor(golden["t"], dtype=torch.float64)
    assert schedule.total(t).tolist() == pytest.approx(golden["sigma_bar"], rel=1e-4)
    assert schedule.rate(t).tolist() == pytest.approx(golden["sigma"], rel=1e-4)


@pytest.mark.parametrize("algorithm", ["tweedie", "euler"])
@pytest.mark.parametrize(("name", "schedule"), [("loglinear", LogLinearNoise()), ("geometric", GeometricNoise())])
def test_golden_unmask_probabilities(name: str, schedule: NoiseSchedule, algorithm: str):
    golden = GOLDEN["unmask_probability"]
    later = torch.tensor(golden["t"], dtype=torch.float64)
    earlier = later - (1 - golden["eps"]) / golden["steps"]
    psi = getattr(schedule, f"{algorithm}_probability")(later, earlier)
    assert psi.tolist() == pytest.approx(golden[f"{name}_{algorithm}"], abs=1e-4)


# Reveal distribution and expected NFE


@BOTH
@pytest.mark.parametrize("algorithm", ["tweedie", "euler"])
@pytest.mark.parametrize("times", [[0.0, 1.0], [0.0, 0.5, 1.0], [0.01, 0.1, 0.45, 0.5, 0.8, 1.0]], ids=len)
def test_reveal_distribution_equals_the_oracle(
    schedule: NoiseSchedule, oracle: ref.Schedule, algorithm: str, times: list[float]
):
    reveal = schedule.reveal_distribution(torch.tensor(times, dtype=torch.float64), algorithm)
    assert reveal.dtype == torch.float64
    assert reveal.tolist() == pytest.approx(ref.reveal_distribution(oracle, algorithm, times), rel=1e-6, abs=1e-12)
    assert reveal.sum().item() == pytest.approx(1.0, rel=1e-12)


@BOTH
@pytest.mark.parametrize("algorithm", ["tweedie", "euler", "any_order"])
def test_expected_nfe_equals_the_oracle(schedule: NoiseSchedule, oracle: ref.Schedule, algorithm: str):
    for num_steps, length in ((1, 3), (2, 1), (5, 4), (5, 8), (16, 8), (7, 0)):
        expected = ref.expected_nfe(oracle, algorithm, ref.uniform_grid(num_steps), length)
        assert expected_nfe(num_steps, length, algorithm, schedule) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_expected_nfe_closed_form_and_grids():
    assert expected_nfe(1024, 1024) == pytest.approx(1024 * (1 - (1 - 1 / 1024) ** 1024), rel=1e-9)
    assert expected_nfe(None, 17) == 17.0
    assert expected_nfe(None, 17, "any_order") == 17.0
    times = [0.0, 0.1, 0.7, 1.0]
    expected = ref.expected_nfe(ref.Schedule("cosine"), "euler", times, 6)
    for grid in (times, torch.tensor(times, dtype=torch.float64)):
        assert expected_nfe(None, 6, "euler", "cosine", times=grid) == pytest.approx(expected, rel=1e-9)
        assert expected_nfe(3, 6, "euler", CosineNoise(), times=grid) == pytest.approx(expected, rel=1e-9)
    assert uniform_time_grid(4).tolist() == ref.uniform_grid(4)


# Construction and bad arguments


def test_get_noise_schedule():
    assert isinstance(get_noise_schedule(), LogLinearNoise) and get_noise_schedule().eps == 1e-3
    assert isinstance(get_noise_schedule("cosine", eps=0.2), CosineNoise)
    assert get_noise_schedule("log_linear", eps=0.2).eps == 0.2
    given = GeometricNoise(0.1, 2.0)
    assert get_noise_schedule(given) is given
    config = RADDConfig(noise_schedule="geometric", noise_sigma_min=0.01, noise_sigma_max=5.0)
    built = get_noise_schedule(config)
    assert isinstance(built, GeometricNoise) and (built.sigma_min, built.sigma_max) == (0.01, 5.0)
    assert get_noise_schedule(config, sigma_max=7.0).sigma_max == 7.0
    assert get_noise_schedule(RADDConfig(noise_eps=0.25)).eps == 0.25

    class Backbone:
        """A config that knows nothing of noise, such as BERT's."""

        model_type = "bert"

    assert isinstance(get_noise_schedule(Backbone()), LogLinearNoise)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_noise_schedule("linear"), r"`noise_schedule` must be one of .*log_linear.*got 'linear'"),
        (lambda: get_noise_schedule("cosine", sigma_min=1.0), r"`params` of the cosine schedule .*sigma_min"),
        (lambda: get_noise_schedule(CosineNoise(), eps=0.1), r"`params` must be empty .*eps"),
        (lambda: LogLinearNoise(eps=1.0), r"`eps` must be in \[0, 1\), got 1.0"),
        (lambda: get_noise_schedule(3), "`noise_schedule` must be a NoiseSchedule, a name or a model config, got 3"),
        (lambda: CosineNoise(eps=-0.1), r"`eps` must be in \[0, 1\), got -0.1"),
        (lambda: LogLinearNoise(eps=float("nan")), r"`eps` must be in \[0, 1\), got nan"),
        (lambda: GeometricNoise(0.0, 1.0), r"`sigma_min` and `sigma_max` must satisfy .*got 0.0 and 1.0"),
        (lambda: GeometricNoise(2.0, 1.0), r"`sigma_min` and `sigma_max` must satisfy .*got 2.0 and 1.0"),
        (lambda: RADDConfig(noise_schedule="linear"), r"`noise_schedule` must be one of .*got 'linear'"),
        (lambda: RADDConfig(noise_eps=1.0), r"`noise_eps` must be a number in \[0, 1\), got 1.0"),
        (lambda: RADDConfig(noise_sigma_min=0.0), r"`noise_sigma_min` must be a number greater than 0, got 0.0"),
        (lambda: RADDConfig(noise_sigma_max=1e-5), r"`noise_sigma_max` must be a number greater than .*got 1e-05"),
        (lambda: expected_nfe(0, 3), r"`num_steps` must be a positive integer or None, got 0"),
        (lambda: expected_nfe(-2, 3), r"`num_steps` must be a positive integer or None, got -2"),
        (lambda: expected_nfe(2.5, 3), r"`num_steps` must be a positive integer or None, got 2.5"),
        (lambda: expected_nfe(True, 3), r"`num_steps` must be a positive integer or None, got True"),
        (lambda: expected_nfe(4, -1), r"`length` must be a non-negative integer, got -1"),
        (lambda: expected_nfe(4, 1.0), r"`length` must be a non-negative integer, got 1.0"),
        (lambda: expected_nfe(4, 3, "heun"), r"`algorithm` must be one of .*any_order.*got 'heun'"),
        (lambda: expected_nfe(4, 3, times=[0.0, 1.0]), r"`num_steps` must be len\(times\) - 1 = 1 or None, got 4"),
        (lambda: expected_nfe(None, 3, "any_order", times=[0.0, 1.0]), r"`times` must be None for .*any_order"),
        (lambda: expected_nfe(None, 3, times=[0.0, 0.5, 0.5]), r"`times` must increase strictly"),
        (lambda: expected_nfe(None, 3, times=[-0.1, 1.0]), r"`times` must increase strictly inside \[0, 1\]"),
        (lambda: expected_nfe(None, 3, times=[0.0, 1.1]), r"`times` must increase strictly inside \[0, 1\]"),
        (lambda: expected_nfe(None, 3, times=[1.0]), r"`times` must .* two entries"),
        (lambda: expected_nfe(None, 3, noise_schedule="linear", times=[0.0, 1.0]), r"`noise_schedule` must be one of"),
        (lambda: uniform_time_grid(0), r"`num_steps` must be a positive integer"),
        (lambda: check_time_grid([[0.0, 1.0]]), r"`times` must increase strictly"),
        (lambda: CosineNoise().reveal_distribution([0.0, 1.0], "heun"), r"`algorithm` must be one of .*got 'heun'"),
    ],
)
def test_bad_arguments(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
