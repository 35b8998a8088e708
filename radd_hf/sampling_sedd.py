# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Sampling with a score that changes with time: the engine of generation_radd with a plan that asks the network.

The step from t to s < t, at a masked position with the scores s_j of the clean tokens j and S = sum_j s_j:
    Tweedie (Lou et al. 2024, Theorem 4.2): revealed with probability expm1(sigma_bar(t) - sigma_bar(s)) S,
    Euler (tau-leaping): with probability sigma(t) (t - s) S,
each at most 1, and then as token j with probability s_j / S. The last step reveals what is left.

Shapes: B rows, L length, R rows in a pass, N candidates of a pass, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import nn

from .generation_config_radd import TIMED_ALGORITHMS, RADDGenerationConfig
from .generation_radd import DiffusionGenerationMixin
from .noise_schedule_radd import NoiseSchedule, check_time_grid, get_noise_schedule, uniform_time_grid


def step_coefficients(schedule: NoiseSchedule, times: torch.Tensor, algorithm: str) -> torch.Tensor:
    """What S is multiplied by in the steps from t_k to t_{k-1}, k = 1..n: float64 (n,)."""
    later, earlier = times[1:], times[:-1]
    if algorithm == "tweedie":
        return torch.expm1(schedule.total(later) - schedule.total(earlier))
    return schedule.rate(later) * (later - earlier)


class ScorePlan:
    """
    A plan whose reveals are decided pass by pass from the sum of the scores; see the module's docstring.

    Args:
        sampler (`TimedSampler`): Gives states and their log-scores.
        free (`torch.BoolTensor` of shape `(B, L)`): Positions to fill.
        attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*): 0 at padding.
        options (`RADDGenerationConfig`): The sampler's options.
        generators (list of `torch.Generator`): One a row.
    """

    needs_certainty = False

    def __init__(
        self,
        sampler: "TimedSampler",
        free: torch.BoolTensor,
        attention_mask: torch.Tensor | None,
        options: RADDGenerationConfig,
        generators: list[torch.Generator],
    ):
        times = uniform_time_grid(options.num_steps) if options.times is None else check_time_grid(options.times)
        schedule = get_noise_schedule(sampler.config)
        self.sampler, self.attention_mask, self.generators = sampler, attention_mask, generators
        self.sigma = schedule.total(times[1:]).flip(0)  # of the steps in the order in which they are taken
        self.coefficient = step_coefficients(schedule, times, options.algorithm).flip(0)
        self.chunk_size = options.chunk_size
        self.free = free.clone()
        self.nfe = torch.zeros(len(free), dtype=torch.long, device=free.device)

    @property
    def num_passes(self) -> int:
        """Steps of the grid."""
        return len(self.sigma)

    def stop(self, rows: torch.BoolTensor, index: int):
        """No pass any more for the rows where `rows` (B,) is True."""
        self.free &= ~rows[:, None]

    def next_pass(self, index: int, canvas: torch.LongTensor, mask_token_id: int) -> tuple | None:
        """Rows that still have holes, and the positions (R, L) that this step reveals, maybe none."""
        rows = self.free.any(-1).nonzero()[:, 0]
        if index == self.num_passes or not len(rows):
            return None
        candidates = self.free[rows]
        row_mask = None if self.attention_mask is None else self.attention_mask[rows]
        states = self.sampler.states(canvas[rows], self.sigma[index], row_mask)[candidates]
        self.nfe[rows] += 1
        reveal = candidates
        if index < self.num_passes - 1:
            total = torch.cat([self.sampler.total(part, self.sigma[index]) for part in states.split(self.chunk_size)])
            uniform = torch.cat([self._uniform(i, n) for i, n in zip(rows.tolist(), candidates.sum(-1), strict=True)])
            chosen = uniform.to(total.device) < self.coefficient[index].to(total.device) * total
            reveal = candidates.masked_scatter(candidates, chosen)
            states = states[chosen]
        self.sampler.revealed = states
        self.free[rows] &= ~reveal
        return rows, reveal

    def _uniform(self, row: int, count: torch.Tensor) -> torch.Tensor:
        generator = self.generators[row]
        return torch.rand(int(count), dtype=torch.float64, generator=generator, device=generator.device)


class TimedSampler(DiffusionGenerationMixin):
    """
    The face that a model with a time-dependent score shows to the engine, for one call.

    Args:
        model (`SEDDForMaskedDiffusion`): The network.
    """

    def __init__(self, model: nn.Module):
        self.model, self.config = model, model.config
        self.generation_config = model.generation_config
        self.revealed: torch.Tensor | None = None  # states of the positions that the pass reveals, (n, D)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()

    def states(self, ids: torch.LongTensor, sigma: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Final hidden states (R, L, D) at the noise sigma_bar, one number."""
        sigma = sigma.to(ids.device).expand(len(ids))
        return self.model.model(ids, sigma, attention_mask=attention_mask).last_hidden_state

    def total(self, states: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """S, the sum of the scores of all clean tokens, (n,), float64, from states (n, D) at masks."""
        mask = self.config.mask_token_id
        ids = torch.full(states.shape[:1], mask, device=states.device)
        log_score = self.model.compute_log_score(states, ids, sigma.to(states.device)).double()
        log_score[:, mask] = float("-inf")
        return log_score.logsumexp(-1).exp()

    def _draw_plan(
        self,
        free: torch.BoolTensor,
        attention_mask: torch.Tensor | None,
        options: RADDGenerationConfig,
        generators: list[torch.Generator],
        order: torch.LongTensor | None,
    ) -> ScorePlan:
        if options.algorithm not in TIMED_ALGORITHMS:
            raise ValueError(
                f"`algorithm` must be one of {list(TIMED_ALGORITHMS)} for a score that changes with time, got "
                f"{options.algorithm!r}."
            )
        if options.num_steps is None and options.times is None:
            raise ValueError("`num_steps` or `times` must be given for a score that changes with time, got neither.")
        if options.remasking is not None:
            raise ValueError(f"`remasking` must be None for an unnormalised score, got {options.remasking!r}.")
        if options.compile:
            raise ValueError("`compile` must be False for a score that changes with time, got True.")
        return ScorePlan(self, free, attention_mask, options, generators)

    def _reveal_states(
        self, ids: torch.LongTensor, attention_mask: torch.Tensor | None, reveal: torch.BoolTensor
    ) -> torch.Tensor:
        """As in the mixin: what the plan's call of the network gave at the positions it reveals."""
        return self.revealed

    def _state_logits(self, states: torch.Tensor) -> torch.Tensor:
        """As in the mixin: log-scores up to a constant a row, (n, D) -> (n, V)."""
        return self.model.lm_head(states)
