# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Every function of time alone: noise schedules, unmask probabilities, reveal distributions, expected NFE.

Notation (the paper's): t in [0, 1], sigma_bar the total noise, sigma its rate, lambda(t) = 1 - exp(-sigma_bar(t)) the
probability that a token is masked at t, M the mask token. Times are floats or tensors; a float gives a float64 tensor.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from .checks_radd import is_int

TIME_GRID_ALGORITHMS = ("tweedie", "euler")


class NoiseSchedule(ABC):
    """
    A forward process that masks each token independently, described by three functions of time.

    A subclass defines `total`, `mask_rate` and `inverse`; every other quantity follows from them here, once. All
    methods work elementwise on tensors of any shape.
    """

    @abstractmethod
    def total(self, t: torch.Tensor | float) -> torch.Tensor:
        """sigma_bar(t), the integral of sigma from 0 to t."""

    @abstractmethod
    def mask_rate(self, t: torch.Tensor | float) -> torch.Tensor:
        """lambda'(t), the derivative of the mask probability."""

    @abstractmethod
    def inverse(self, mask_probability: torch.Tensor | float) -> torch.Tensor:
        """The time t with lambda(t) equal to `mask_probability`."""

    def rate(self, t: torch.Tensor | float) -> torch.Tensor:
        """sigma(t) = lambda'(t) / (1 - lambda(t))."""
        return self.mask_rate(t) * torch.exp(self.total(t))

    def mask_probability(self, t: torch.Tensor | float) -> torch.Tensor:
        """lambda(t) = 1 - exp(-sigma_bar(t))."""
        return -torch.expm1(-self.total(t))

    def score_scale(self, t: torch.Tensor | float) -> torch.Tensor:
        """s(t) = exp(-sigma_bar) / (1 - exp(-sigma_bar)), the time-dependent factor of Theorem 1."""
        return 1.0 / torch.expm1(self.total(t))

    def loss_weight(self, t: torch.Tensor | float) -> torch.Tensor:
        """w(t) = sigma(t) s(t) = lambda'(t) / lambda(t), the weight of the t-DCE and DSE losses."""
        return self.mask_rate(t) / self.mask_probability(t)

    def tweedie_probability(self, t: torch.Tensor | float, s: torch.Tensor | float) -> torch.Tensor:
        """Probability that a token masked at t is unmasked at s < t under Tweedie tau-leaping (the exact reverse)."""
        masked = self.mask_probability(t)
        return (masked - self.mask_probability(s)) / masked

    def euler_probability(self, t: torch.Tensor | float, s: torch.Tensor | float) -> torch.Tensor:
        """Probability that a token masked at t is unmasked at s < t in one Euler step: min(1, w(t) (t - s))."""
        return (self.loss_weight(t) * (_as_tensor(t) - _as_tensor(s))).clamp(max=1.0)

    def reveal_distribution(self, times: torch.Tensor, algorithm: str = "tweedie") -> torch.Tensor:
        """
        r_k, the probability that a masked token is revealed in the step from t_k to t_{k-1} (paper, Eq. r_k).

        r_k = psi_k prod_{j > k} (1 - psi_j), psi_k the unmask probability of the step; psi_1 := 1, since the last
        step reveals whatever is left.

        Args:
            times (`torch.Tensor` of shape `(n + 1,)`): Increasing grid t_0 < ... < t_n.
            algorithm (`str`, *optional*, defaults to `"tweedie"`): "tweedie" or "euler".

        Returns:
            `torch.Tensor` of shape `(n,)`, float64: r_1, ..., r_n (r_n is the first step taken); the sum is 1.
        """
        return first_reveal(self.unmask_probabilities(times, algorithm))

    def unmask_probabilities(self, times: torch.Tensor, algorithm: str = "tweedie") -> torch.Tensor:
        """psi_1, ..., psi_n of the steps of `reveal_distribution`, psi_1 := 1; float64 of shape (n,)."""
        times = check_time_grid(times)
        later, earlier = times[1:], times[:-1]
        if algorithm == "tweedie":
            psi = self.tweedie_probability(later, earlier)
        elif algorithm == "euler":
            psi = self.euler_probability(later, earlier)
        else:
            raise ValueError(f"`algorithm` must be one of {list(TIME_GRID_ALGORITHMS)}, got {algorithm!r}.")
        return torch.cat([psi.new_ones(1), psi[1:]])

    def remdm_probabilities(
        self, times: torch.Tensor, remasking: str, strength: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Unmask and remask probabilities of each step of ReMDM (Wang et al. 2025, arXiv 2503.00307), float64 (n,) both.

        With alpha = 1 - lambda and the step from t to s, a revealed token is masked again with probability sigma_t and
        a masked one is revealed with (alpha_s - (1 - sigma_t) alpha_t) / (1 - alpha_t), which keeps the marginals at
        every time. sigma_t is at most sigma_max = min(1, (1 - alpha_s) / alpha_t); "cap" takes min(strength,
        sigma_max), "rescale" strength sigma_max. The last step reveals what is left and masks nothing.
        """
        times = check_time_grid(times)
        kept = 1 - self.mask_probability(times)  # alpha
        later, earlier = kept[1:], kept[:-1]
        largest = ((1 - earlier) / later).clamp(max=1.0)
        sigma = largest.clamp(max=strength) if remasking == "cap" else strength * largest
        psi = self.unmask_probabilities(times, "tweedie") + sigma * later / (1 - later)
        first = torch.tensor([1.0], dtype=psi.dtype)
        return torch.cat([first, psi[1:].clamp(max=1.0)]), torch.cat([torch.zeros_like(first), sigma[1:]])


def first_reveal(psi: torch.Tensor) -> torch.Tensor:
    """r_k = psi_k prod_{j > k} (1 - psi_j) for k = 1..n, step n being the first taken (paper, Eq. r_k); (n,)."""
    still_masked = torch.cumprod((1 - psi).flip(0), 0).flip(0)  # entry k: prod_{j >= k} (1 - psi_j)
    return psi * torch.cat([still_masked[1:], psi.new_ones(1)])


class LogLinearNoise(NoiseSchedule):
    """lambda(t) = (1 - eps) t, sigma_bar(t) = -log(1 - (1 - eps) t). The schedule of the paper's experiments."""

    def __init__(self, eps: float = 1e-3):
        self.eps = _check_eps(eps)

    def total(self, t: torch.Tensor | float) -> torch.Tensor:
        return -torch.log1p(-(1 - self.eps) * _as_tensor(t))

    def mask_rate(self, t: torch.Tensor | float) -> torch.Tensor:
        return torch.full_like(_as_tensor(t), 1 - self.eps)

    def inverse(self, mask_probability: torch.Tensor | float) -> torch.Tensor:
        return _as_tensor(mask_probability) / (1 - self.eps)


class GeometricNoise(NoiseSchedule):
    """sigma_bar(t) = sigma_min^(1 - t) sigma_max^t. A little noise is left at t = 0: lambda(0) > 0."""

    def __init__(self, sigma_min: float = 1e-4, sigma_max: float = 20.0):
        if not 0 < sigma_min < sigma_max < float("inf"):
            raise ValueError(
                f"`sigma_min` and `sigma_max` must satisfy 0 < sigma_min < sigma_max, got {sigma_min} and {sigma_max}."
            )
        self.sigma_min, self.sigma_max = sigma_min, sigma_max
        self._log_ratio = math.log(sigma_max / sigma_min)

    def total(self, t: torch.Tensor | float) -> torch.Tensor:
        return self.sigma_min * torch.exp(self._log_ratio * _as_tensor(t))

    def mask_rate(self, t: torch.Tensor | float) -> torch.Tensor:
        total = self.total(t)
        return self._log_ratio * total * torch.exp(-total)

    def inverse(self, mask_probability: torch.Tensor | float) -> torch.Tensor:
        total = -torch.log1p(-_as_tensor(mask_probability))
        return torch.log(total / self.sigma_min) / self._log_ratio


class CosineNoise(NoiseSchedule):
    """lambda(t) = (1 - eps) (1 - cos(pi t / 2)): few tokens masked at small times."""

    def __init__(self, eps: float = 1e-3):
        self.eps = _check_eps(eps)

    def total(self, t: torch.Tensor | float) -> torch.Tensor:
        # 1 - cos(x) = 2 sin^2(x / 2), without the cancellation at small x
        return -torch.log1p(-(1 - self.eps) * 2 * torch.sin(_as_tensor(t) * (math.pi / 4)) ** 2)

    def mask_rate(self, t: torch.Tensor | float) -> torch.Tensor:
        return (1 - self.eps) * (math.pi / 2) * torch.sin(_as_tensor(t) * (math.pi / 2))

    def inverse(self, mask_probability: torch.Tensor | float) -> torch.Tensor:
        return torch.asin(torch.sqrt(_as_tensor(mask_probability) / (2 * (1 - self.eps)))) * (4 / math.pi)


_SCHEDULES = {
    "log_linear": (LogLinearNoise, {"eps": "noise_eps"}),
    "geometric": (GeometricNoise, {"sigma_min": "noise_sigma_min", "sigma_max": "noise_sigma_max"}),
    "cosine": (CosineNoise, {"eps": "noise_eps"}),
}


def get_noise_schedule(schedule=None, **params: float) -> NoiseSchedule:
    """
    A noise schedule from its name, from a model's config, or from nothing (log-linear).

    Args:
        schedule (`str`, `PreTrainedConfig` or `NoiseSchedule`, *optional*):
            "log_linear", "geometric" or "cosine"; or a config, whose `noise_schedule` and `noise_*` fields are read (a
            config without them, such as BERT's, means the default log-linear schedule); a schedule is returned as is.
        params (`float`): `eps`, or `sigma_min` and `sigma_max`: they take precedence over a config's.

    Raises:
        ValueError: The name is none of the three, or a parameter is not one of that schedule.
    """
    if isinstance(schedule, NoiseSchedule):
        if params:
            raise ValueError(f"`params` must be empty when a NoiseSchedule is given, got {sorted(params)}.")
        return schedule
    config = None if schedule is None or isinstance(schedule, str) else schedule
    if config is not None and not hasattr(config, "model_type"):
        raise ValueError(f"`noise_schedule` must be a NoiseSchedule, a name or a model config, got {schedule!r}.")
    name = schedule if isinstance(schedule, str) else getattr(config, "noise_schedule", "log_linear")
    if name not in _SCHEDULES:
        raise ValueError(f"`noise_schedule` must be one of {list(_SCHEDULES)}, got {name!r}.")
    cls, fields = _SCHEDULES[name]
    unknown = sorted(set(params) - set(fields))
    if unknown:
        raise ValueError(f"`params` of the {name} schedule must be among {sorted(fields)}, got {unknown}.")
    stored = {key: getattr(config, field) for key, field in fields.items() if hasattr(config, field)}
    return cls(**{**stored, **params})


def expected_nfe(
    num_steps: int | None,
    length: int,
    algorithm: str = "tweedie",
    noise_schedule: NoiseSchedule | str | None = None,
    times: Sequence[float] | torch.Tensor | None = None,
) -> float:
    """
    E-NFE(n) = sum_k 1 - (1 - r_k)^l: expected network calls per sequence of a sampler with an output cache.

    Args:
        num_steps (`int` or `None`): Steps n of the uniform grid t_k = k / n; `None` is the continuous-time limit, in
            which every position has a pass of its own, or the steps of `times`.
        length (`int`): Free positions l.
        algorithm (`str`, *optional*, defaults to `"tweedie"`): "tweedie", "euler" or "any_order".
        noise_schedule (`NoiseSchedule` or `str`, *optional*): Defaults to log-linear, where E-NFE is
            n (1 - (1 - 1/n)^l) for both methods.
        times (sequence of `float`, *optional*): A grid t_0 < ... < t_n of one's own.

    Returns:
        `float`: network calls (NFE), not steps.
    """
    if algorithm not in (*TIME_GRID_ALGORITHMS, "any_order"):
        raise ValueError(f"`algorithm` must be one of {[*TIME_GRID_ALGORITHMS, 'any_order']}, got {algorithm!r}.")
    if not is_int(length) or length < 0:
        raise ValueError(f"`length` must be a non-negative integer, got {length!r}.")
    if num_steps is not None:
        check_num_steps(num_steps)
    if times is not None:
        times = check_time_grid(times)
        if num_steps is not None and num_steps != len(times) - 1:
            raise ValueError(f"`num_steps` must be len(times) - 1 = {len(times) - 1} or None, got {num_steps}.")
    elif num_steps is None:
        return float(length)
    if algorithm == "any_order":
        if times is not None:
            raise ValueError("`times` must be None for algorithm='any_order', which has no clock.")
        return float(math.ceil(length / math.ceil(length / num_steps))) if length else 0.0
    if times is None:
        times = uniform_time_grid(num_steps)
    reveal = get_noise_schedule(noise_schedule).reveal_distribution(times, algorithm)
    return float((1 - (1 - reveal) ** length).sum())


def uniform_time_grid(num_steps: int) -> torch.Tensor:
    """t_k = k / n for k = 0..n, float64 of shape (n + 1,)."""
    check_num_steps(num_steps)
    return torch.arange(num_steps + 1, dtype=torch.float64) / num_steps


def check_num_steps(num_steps: int):
    """Raise a ValueError unless `num_steps` is a positive integer."""
    if not is_int(num_steps) or num_steps < 1:
        raise ValueError(f"`num_steps` must be a positive integer or None, got {num_steps!r}.")


def check_time_grid(times: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """`times` as a float64 tensor, after checking that it increases inside [0, 1]."""
    try:
        grid = torch.as_tensor(times, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`times` must be a list of numbers, got {times!r}.") from error
    if grid.dim() != 1 or len(grid) < 2 or not bool((grid.diff() > 0).all()) or grid[0] < 0 or grid[-1] > 1:
        raise ValueError(f"`times` must increase strictly inside [0, 1] and have two entries or more, got {times}.")
    return grid


def _as_tensor(t: torch.Tensor | float) -> torch.Tensor:
    return t if torch.is_tensor(t) else torch.as_tensor(t, dtype=torch.float64)


def _check_eps(eps: float) -> float:
    if not 0 <= eps < 1:
        raise ValueError(f"`eps` must be in [0, 1), got {eps}.")
    return eps
