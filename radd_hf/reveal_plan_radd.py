# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Which positions the next network call reveals: drawn in advance from time alone, or chosen by what the network says.

Shapes: B rows, L length, l free positions of a row, N candidates of a pass, V vocabulary.
"""

from dataclasses import dataclass

import torch

from .generation_config_radd import RADDGenerationConfig
from .noise_schedule_radd import NoiseSchedule, check_time_grid, first_reveal, uniform_time_grid

_TIE = 2**16  # certainties that agree after multiplication by this and rounding count as equal


@dataclass
class RevealPlan:
    """
    When each position is revealed and, with remasking, masked again, drawn before the network runs.

    Attributes:
        event (`torch.LongTensor` of shape `(R, B, L)`): Index of the row's network call that reveals the position for
            the r-th time; -1 if none. R = 1 without remasking.
        remask (`torch.LongTensor` of shape `(R, B, L)`): Index of the row's network call before which the r-th token
            is masked again; -1 if it stays.
        nfe (`torch.LongTensor` of shape `(B,)`): Network calls of each row.
    """

    event: torch.LongTensor
    remask: torch.LongTensor
    nfe: torch.LongTensor

    needs_certainty = False

    def next_pass(self, index: int, canvas: torch.LongTensor, mask_token_id: int) -> tuple | None:
        """Rows in pass `index` and the positions it reveals (rows, L); masks again in `canvas` what is due."""
        rows = (self.nfe > index).nonzero()[:, 0]
        if not len(rows):
            return None
        if index:  # the first call sees the canvas as it came
            canvas.masked_fill_((self.remask == index).any(0), mask_token_id)
        return rows, (self.event[:, rows] == index).any(0)

    def stop(self, rows: torch.BoolTensor, index: int):
        """No pass from `index` on for the rows where `rows` (B,) is True."""
        self.nfe = torch.where(rows, self.nfe.clamp(max=index), self.nfe)

    @property
    def num_passes(self) -> int:
        """Network calls of the longest row."""
        return int(self.nfe.max()) if len(self.nfe) else 0


def draw_reveal_plan(
    free: torch.BoolTensor,
    options: RADDGenerationConfig,
    noise_schedule: NoiseSchedule,
    generators: list[torch.Generator],
    order: torch.LongTensor | None = None,
    block: torch.LongTensor | None = None,
) -> RevealPlan:
    """
    Group the free positions (B, L) of each row into events, latest time first.

    Args:
        free (`torch.BoolTensor` of shape `(B, L)`): Positions to fill.
        options (`RADDGenerationConfig`): The sampler's options.
        noise_schedule (`NoiseSchedule`): Clock of "tweedie" and "euler".
        generators (list of `torch.Generator`): One a row.
        order (`torch.LongTensor` of shape `(B, L')`, *optional*): Positions of each row in the order of revealing.
        block (`torch.LongTensor` of shape `(B, L)`, *optional*): Blocks, filled one after the other; for "any_order".
    """
    clock = None
    if options.algorithm != "any_order" and (options.num_steps is not None or options.times is not None):
        grid = uniform_time_grid(options.num_steps) if options.times is None else check_time_grid(options.times)
        clock = _Clock.of(options, noise_schedule, grid)
    drawn, nfe = [], torch.zeros(len(free), dtype=torch.long)
    for row, positions in enumerate(free.cpu()):
        positions = positions.nonzero()[:, 0]  # (l,)
        if not len(positions):
            continue
        if clock is not None:
            steps, masked_again = clock.draw(len(positions), generators[row])  # (R, l) both
            nfe[row] = clock.num_steps
            if options.use_cache:
                values = steps[steps >= 0].unique()
                nfe[row] = len(values)
                # the network is next called at the first event after the step that masks again
                masked_again = torch.where(masked_again >= 0, torch.searchsorted(values, masked_again, right=True), -1)
                steps = torch.where(steps >= 0, torch.searchsorted(values, steps), -1)
            else:
                masked_again = torch.where(masked_again >= 0, masked_again + 1, -1)
        else:
            rank = _reveal_rank(positions, options, generators[row], None if order is None else order[row])
            if options.algorithm == "any_order":
                each = tokens_per_pass(len(positions), options)
                rank = _steps_by_block(rank, None if block is None else block[row, positions].cpu(), each)
            steps, masked_again = rank[None], torch.full((1, len(positions)), -1)
            nfe[row] = rank.max() + 1
        drawn.append((row, positions, steps, masked_again))
    most = max((len(steps) for _, _, steps, _ in drawn), default=1)
    event, remask = torch.full((2, most, *free.shape), -1, dtype=torch.long)
    for row, positions, steps, masked_again in drawn:
        event[: len(steps), row, positions] = steps
        remask[: len(steps), row, positions] = masked_again
    return RevealPlan(event.to(free.device), remask.to(free.device), nfe.to(free.device))


@dataclass
class _Clock:
    """
    The time-only part of a step-by-step sampler, in the order in which steps are taken.

    Attributes:
        revealed (`torch.Tensor` of shape `(n,)`): Probability of having been revealed once after each step.
        hazard (`torch.Tensor` of shape `(n,)`): Probability that a masked position is revealed in the step.
        remask (`torch.Tensor` of shape `(n,)`): Probability that a revealed position is masked again in the step.
    """

    revealed: torch.Tensor
    hazard: torch.Tensor
    remask: torch.Tensor

    @classmethod
    def of(cls, options: RADDGenerationConfig, noise_schedule: NoiseSchedule, grid: torch.Tensor) -> "_Clock":
        """The clock of `options.algorithm` on the grid t_0 < ... < t_n."""
        hazard = noise_schedule.unmask_probabilities(grid, options.algorithm)
        remask = torch.zeros_like(hazard)
        if options.remasking is not None:
            hazard, remask = noise_schedule.remdm_probabilities(grid, options.remasking, options.remasking_strength)
        return cls(first_reveal(hazard).flip(0).cumsum(0), hazard.flip(0), remask.flip(0))

    @property
    def num_steps(self) -> int:
        return len(self.hazard)

    def draw(self, count: int, generator: torch.Generator) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Steps that reveal each of `count` positions and steps that mask it again, (R, count) both; -1: none."""
        last = self.num_steps - 1
        step = torch.searchsorted(self.revealed, _uniform(count, generator), right=True).clamp(max=last)
        steps, masked_again = [step], []
        if bool((self.remask > 0).any()):
            # log survival, decreasing; a certain event is left a chance of 1e-15 so that later differences exist
            stay, wait = (torch.log1p(-p.clamp(max=1 - 1e-15)).cumsum(0) for p in (self.remask, self.hazard))
            wait[-1] = float("-inf")  # what is left is revealed in the last step
            while bool((step >= 0).any()):
                again = _next_event(stay, step, _uniform(count, generator))
                step = _next_event(wait, again, _uniform(count, generator))
                masked_again.append(again)
                steps.append(step)
            return torch.stack(steps[:-1]), torch.stack(masked_again)
        return step[None], torch.full((1, count), -1)


def _next_event(log_survival: torch.Tensor, after: torch.LongTensor, uniform: torch.Tensor) -> torch.LongTensor:
    """First step beyond `after` at which an event with this survival function happens; -1 if none, or if after < 0."""
    target = -log_survival[after.clamp(min=0)] - torch.log1p(-uniform)
    step = torch.searchsorted(-log_survival, target, right=True)
    return torch.where((after >= 0) & (step < len(log_survival)), step, -1)


def tokens_per_pass(count: int, options: RADDGenerationConfig) -> int:
    """Positions a pass reveals of `count`: `tokens_per_step`, or ceil(l / n) for n = `num_steps`, or one."""
    if options.tokens_per_step is not None:
        return min(options.tokens_per_step, max(count, 1))
    return -(-count // options.num_steps) if options.num_steps is not None and count else 1


def block_index(
    free: torch.BoolTensor, attention_mask: torch.Tensor | None, block_length: int | None
) -> torch.LongTensor | None:
    """Block of each position (B, L): `block_length` real tokens each, from the row's first free one; None for one."""
    if block_length is None or not free.numel():
        return None
    real = torch.ones_like(free) if attention_mask is None else attention_mask.bool()
    place = real.long().cumsum(-1)
    first = place.masked_fill(~free, place.shape[1] + 1).min(-1, keepdim=True).values
    return (place - first).clamp(min=0) // min(block_length, free.shape[1] + 1)


def _steps_by_block(rank: torch.LongTensor, block: torch.LongTensor | None, each: int) -> torch.LongTensor:
    """Pass (l,) of positions of these ranks: `each` a pass; a block (l,) is finished before the next one starts."""
    if block is None:
        return rank // each
    step, start = torch.empty_like(rank), 0
    for one in block.unique():
        inside = block == one
        step[inside] = start + rank[inside].argsort().argsort() // each
        start = int(step[inside].max()) + 1
    return step


def _reveal_rank(
    positions: torch.LongTensor, options: RADDGenerationConfig, generator: torch.Generator, order: torch.Tensor | None
) -> torch.LongTensor:
    """Rank 0..l-1 of each of the free `positions` (l,) in the order of revealing."""
    if options.algorithm != "any_order" or (order is None and options.order == "random"):
        return _uniform(len(positions), generator).argsort().argsort()
    if order is None:
        rank = torch.arange(len(positions))
        return rank if options.order == "forward" else rank.flip(0)
    place = torch.full((int(max(order.max(), positions.max())) + 1,), -1, dtype=torch.long)
    place[order] = torch.arange(len(order))
    place = place[positions]
    if bool((place < 0).any()):
        raise ValueError(f"`order` must contain every masked position, got none for {positions[place < 0].tolist()}.")
    return place.argsort().argsort()


def _uniform(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device).cpu()


class AdaptiveReveals:
    """
    Reveals of a pass chosen by how certain the network is of each candidate.

    The certainty is a number of the distribution, never of a drawn token: the largest probability ("confidence"),
    minus the entropy ("entropy") or the lead of the first token over the second ("margin"). The surest come first,
    and where they agree to about 2^-16 the leftmost, so that rounding decides nothing on a canvas of masks alone. The
    resulting law of the text is not that of the model's any-order factorisation.

    Args:
        free (`torch.BoolTensor` of shape `(B, L)`): Positions to fill.
        options (`RADDGenerationConfig`): The sampler's options.
        block (`torch.LongTensor` of shape `(B, L)`, *optional*): Blocks, filled one after the other.
    """

    needs_certainty = True
    num_passes = None

    def __init__(self, free: torch.BoolTensor, options: RADDGenerationConfig, block: torch.LongTensor | None):
        self.free = free.clone()
        self.block = block
        self.options = options
        self.quota = torch.tensor([tokens_per_pass(n, options) for n in free.sum(-1).tolist()], device=free.device)
        self.nfe = torch.zeros(len(free), dtype=torch.long, device=free.device)

    def next_pass(self, index: int, canvas: torch.LongTensor, mask_token_id: int) -> tuple | None:
        """Rows that still have holes, and the candidates among them (rows, L): those of the row's current block."""
        rows = self.free.any(-1).nonzero()[:, 0]
        if not len(rows):
            return None
        candidates = self.free[rows]
        if self.block is not None:
            block = self.block[rows]
            current = block.masked_fill(~candidates, block.max() + 1).min(-1, keepdim=True).values
            candidates = candidates & (block == current)
        self.nfe[rows] += 1
        return rows, candidates

    def stop(self, rows: torch.BoolTensor, index: int):
        """No pass any more for the rows where `rows` (B,) is True."""
        self.free &= ~rows[:, None]

    def choose(
        self, rows: torch.LongTensor, candidates: torch.BoolTensor, certainty: torch.Tensor
    ) -> torch.BoolTensor:
        """The candidates (rows, L) to reveal, from their certainty (N,), row-major; they are free no longer."""
        table = certainty.new_full(candidates.shape, float("-inf"))
        table[candidates] = certainty
        order = (table * _TIE).round().argsort(dim=-1, descending=True, stable=True)
        ordered = table.gather(-1, order)
        count = self.quota[rows]
        if self.options.confidence_threshold is not None:
            count = count.maximum((table >= self.options.confidence_threshold).sum(-1))
        if self.options.entropy_bound is not None:
            entropy = -ordered  # ascending; sum - max of the first k bounds their mutual information
            joint = entropy.cumsum(-1) - entropy
            count = count.maximum((joint <= self.options.entropy_bound).sum(-1))
        rank = order.argsort(dim=-1)
        reveal = candidates & (rank < count[:, None])
        self.free[rows] &= ~reveal
        return reveal
