# Copyright 2026 The radd_hf authors. Licensed under the Apache License, Version 2.0.
"""Draws of masks for likelihood, the network over all of them in full batches, and the estimate with its error.

Shapes: K masks of one sequence, L its real tokens, S <= L the scored ones, G independent groups of masks. Everything
but the network runs on the CPU in float64.

The bound (Theorem 2) is sum_{k=1}^{S} f(k), f(k) = E[CE(m) / k] over masks m of k scored positions. For "ao":

1. k = S has one mask. Its row gives f(S) exactly, and a first guess of what each token costs.
2. **Stratified importance draws of k.** For x uniform in (0, S - 1], k = ceil(x), sum_{k<S} f(k) = (S - 1) E[f(k)]. A
   group cuts (0, S - 1] into n strata, draws one x in each and weighs CE(m) / k with the width of the stratum. Narrow
   strata mean many draws: the proposal is p(k) ~ 1 / width. Inside the strata the variance is sum_j width_j^2 v(k_j),
   v(k) that of CE(m) / k, so about sum_k v(k) / (n p(k)); by Cauchy-Schwarz the best p(k) is proportional to
   sqrt(v(k)). The mean of k of S tokens drawn without replacement has v(k) ~ 1/k - 1/S, hence p(k) ~ k^(-1/2): strata
   that end at (S - 1) (j / n)^2. Steps 4 and 5 take most from v(k) at small k and leave it flatter, down to a constant
   (p uniform, strata that end at (S - 1) j / n); the power 3/2 between the two was best on the shipped checkpoint.
   Since the weight is constant in a stratum, of the differences between the f(k) only those inside one add variance.
3. **Masks that share out the tokens.** A group lays its masks one after the other around one random circle of the
   scored positions. Each is a uniform subset, and two meet only where the circle closes: they are complementary where
   two sizes sum to S.
4. **A control variate for which tokens are masked.** Tokens differ more in cost than contexts do. With h_l the mean
   cost of token l in the rows of the *other* groups (and the full mask), the mean of h over a mask has the known
   expectation mean(h): subtracting it changes no expectation, since h does not depend on this group's masks, and
   removes most of v(k) where few tokens are masked.
5. **A control variate for the level.** f grows smoothly with k. A parabola g(k) through f(S), fitted to the other
   groups, has a known sum, and only f - g is left to vary inside a stratum.

Group means are independent up to terms of order 1 / G; their spread gives the standard error.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .losses import corrupt, masked_token_nll, model_config, weigh
from .noise_schedule_radd import NoiseSchedule

# Independent groups, at least and where there are draws for them (a standard error from G groups is itself uncertain
# by about 1 / sqrt(2 G)), and draws of a group once there are more.
NUM_GROUPS = 16
DRAWS_PER_GROUP = 4
# Strata end at (S - 1) (j / n)^STRATUM_POWER: see above.
STRATUM_POWER = 1.5
# Fewer rows than this are all draws: too few to spend one on the full mask.
_MIN_ROWS_WITH_FULL_MASK = 4
# Logits of one network call, so that a full batch of long sequences over a large vocabulary fits.
_MAX_LOGITS = 2**28


@dataclass
class RowRequest:
    """
    Network rows of one sequence.

    Attributes:
        ids (`torch.LongTensor` of shape `(L,)`): Its real tokens.
        hidden (`torch.BoolTensor` of shape `(K, L)`): Where a row has the mask token.
        wanted (`torch.BoolTensor` of shape `(K, L)`): Where its -log q_i is asked for.
    """

    ids: torch.LongTensor
    hidden: torch.BoolTensor
    wanted: torch.BoolTensor


def run_rows(model: nn.Module, requests: list[RowRequest], mask_token_id: int, batch_size: int) -> list[torch.Tensor]:
    """
    -log q_i in nats at the wanted positions of every row, 0 elsewhere: one (K, L) float64 tensor a request.

    Rows of all requests are sorted by length (and by the number of wanted positions, which saves work in the last
    block) and cut into full batches, so what padding there is comes at most to `batch_size` times the longest length.
    """
    num_rows, lengths = [len(q.hidden) for q in requests], [len(q.ids) for q in requests]
    owner = torch.arange(len(requests)).repeat_interleave(torch.tensor(num_rows))  # (R,)
    length = torch.tensor(lengths)[owner]
    ids = nn.utils.rnn.pad_sequence([q.ids for q in requests], batch_first=True)
    hidden, wanted = torch.zeros(2, len(owner), ids.shape[1], dtype=torch.bool)
    for request, rows in zip(requests, torch.arange(len(owner)).split(num_rows), strict=True):
        hidden[rows, : len(request.ids)], wanted[rows, : len(request.ids)] = request.hidden, request.wanted
    count = wanted.sum(-1)
    results = torch.zeros(wanted.shape, dtype=torch.float64)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    order = (length * (ids.shape[1] + 1) + count).argsort(stable=True)
    for rows in _batches(order, count, batch_size, _MAX_LOGITS // model_config(model).vocab_size):
        width = int(length[rows].max())
        clean, asked = ids[owner[rows], :width].to(device), wanted[rows, :width]
        noisy = clean.masked_fill(hidden[rows, :width].to(device), mask_token_id)
        real = torch.arange(width) < length[rows, None]
        attention_mask = None if bool(real.all()) else real.long().to(device)
        values = torch.zeros(asked.shape, dtype=torch.float64)
        nll = masked_token_nll(model, clean, noisy, asked.to(device), attention_mask, mask_token_id=mask_token_id)
        values[asked] = nll.double().cpu()
        results[rows, :width] = values
    return [part[:, :size] for part, size in zip(results.split(num_rows), lengths, strict=True)]


def _batches(
    order: torch.LongTensor, count: torch.LongTensor, batch_size: int, max_wanted: int
) -> Iterator[torch.LongTensor]:
    """Cut `order` into runs of at most `batch_size` rows that want at most `max_wanted` positions; one at least."""
    first, total = 0, 0
    for place, size in enumerate(count[order].tolist()):
        if place > first and (place - first == batch_size or total + size > max_wanted):
            yield order[first:place]
            first, total = place, 0
        total += size
    if first < len(order):
        yield order[first:]


def group_sizes(num_draws: int, draws_per_group: int | None = None) -> list[int]:
    """Draws of each group: 16 groups, more from 16 `draws_per_group` on; pairs (or singles) below 32 draws."""
    groups = max(min(NUM_GROUPS, num_draws // 2), min(2, num_draws))
    if draws_per_group is not None:
        groups = max(groups, num_draws // draws_per_group)
    return [num_draws // groups + (i < num_draws % groups) for i in range(groups)]


@dataclass
class Draws:
    """
    Masks of one sequence. A group's estimate is the sum over its rows of scale sum_m [-log q_i] + offset.

    Attributes:
        masked (`torch.BoolTensor` of shape `(K, S)`): Over the scored positions.
        scale, offset (`torch.Tensor` of shape `(K,)`): float64.
        group (`torch.LongTensor` of shape `(K,)`): 0, 1, ...
    """

    masked: torch.BoolTensor
    scale: torch.Tensor
    offset: torch.Tensor
    group: torch.LongTensor


def draw_ao(length: int, sizes: list[int], largest: int, generator: torch.Generator) -> Draws:
    """Masks for sum_{k = 1}^{largest} f(k) of S = `length` positions: steps 2 and 3 of the module's docstring."""
    masked, scale, group, first = [], [], [], 0
    for size, groups in Counter(sizes).items():
        edge = largest * (torch.arange(size + 1, dtype=torch.float64) / size) ** STRATUM_POWER
        width = edge.diff()
        offset = torch.rand(groups, size, dtype=torch.float64, generator=generator)
        k = (edge[1:] - offset * width).ceil().clamp(1, largest).long()  # (groups, size)
        circle = torch.rand(groups, 1, length, dtype=torch.float64, generator=generator).argsort(-1).argsort(-1)
        start = (k.cumsum(-1) - k)[..., None]
        masked.append(((circle - start) % length < k[..., None]).flatten(0, 1))
        scale.append((width / k).flatten())
        group.append(torch.arange(first, first + groups).repeat_interleave(size))
        first += groups
    scale = torch.cat(scale)
    return Draws(torch.cat(masked), scale, torch.zeros_like(scale), torch.cat(group))


def draw_stratified(
    length: int, sizes: list[int], loss_type: str, noise_schedule: NoiseSchedule | None, generator: torch.Generator
) -> Draws:
    """Masks for "dse", "t_dce" and "lambda_dce", the time or lambda stratified in each group; no time is left out."""
    corruptions = []
    for size in sizes:
        everywhere = torch.ones(size, length, dtype=torch.bool)
        options = {"noise_schedule": noise_schedule, "time_sampling": "stratified", "time_eps": 0.0}
        corruptions.append(corrupt(everywhere.long(), loss_type, 0, everywhere, **options, generator=generator))
    scale, offset = [], []
    for size, corruption in zip(sizes, corruptions, strict=True):
        none = torch.zeros(size, dtype=torch.float64)
        fixed = weigh(none, corruption, loss_type, noise_schedule)
        scale.append((weigh(none + 1, corruption, loss_type, noise_schedule) - fixed) / size)
        offset.append(fixed / size)
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return Draws(torch.cat([c.masked for c in corruptions]), torch.cat(scale), torch.cat(offset), group)


class SequenceBound:
    """
    The bound of one sequence while its draws come in: `request`, run, `add`, and again as often as wanted.

    Args:
        ids (`torch.LongTensor` of shape `(L,)`): Real tokens.
        scored (`torch.BoolTensor` of shape `(L,)`): False at context.
        loss_type (`str`): One of the four losses.
        noise_schedule (`NoiseSchedule`): For "dse" and "t_dce".
        generator (`torch.Generator`): Of the CPU.
    """

    def __init__(
        self,
        ids: torch.LongTensor,
        scored: torch.BoolTensor,
        loss_type: str,
        noise_schedule: NoiseSchedule | None,
        generator: torch.Generator,
    ):
        self.ids, self.scored, self.loss_type = ids, scored, loss_type
        self.noise_schedule, self.generator = noise_schedule, generator
        self.positions = scored.nonzero()[:, 0]
        self.full_mask_nll: torch.Tensor | None = None  # (S,), once known
        self.num_rows = 0
        self._uses_full_mask: bool | None = None
        self._group_size: int | None = None
        self._draws: Draws | None = None
        self._sums: list[_GroupSums] = []

    def request(self, num_rows: int) -> RowRequest:
        """The next rows to run; the first call decides from `num_rows` whether the full mask is among them."""
        length = len(self.positions)
        if self._uses_full_mask is None:
            self._uses_full_mask = self.loss_type == "ao" and (length == 1 or num_rows >= _MIN_ROWS_WITH_FULL_MASK)
        masked = torch.zeros(0, length, dtype=torch.bool)
        if self._uses_full_mask and self.full_mask_nll is None and length:
            masked, num_rows = torch.ones(1, length, dtype=torch.bool), num_rows - 1
        if length > (1 if self._uses_full_mask else 0) and num_rows:
            if self._group_size is None:
                # the other losses gain from ever finer strata: lambda near 0 has a share of the bound in few draws
                sizes = group_sizes(num_rows, DRAWS_PER_GROUP if self.loss_type == "ao" else None)
                self._group_size = sizes[0]
            else:
                sizes = [self._group_size] * max(1, num_rows // self._group_size)
            if self.loss_type == "ao":
                self._draws = draw_ao(length, sizes, length - self._uses_full_mask, self.generator)
            else:
                self._draws = draw_stratified(length, sizes, self.loss_type, self.noise_schedule, self.generator)
            masked = torch.cat([masked, self._draws.masked])
        hidden = torch.zeros(len(masked), len(self.ids), dtype=torch.bool)
        hidden[:, self.positions] = masked
        return RowRequest(self.ids, hidden, hidden)

    def add(self, nll: torch.Tensor):
        """The costs (K, L) of the rows last requested, in nats."""
        self.num_rows += len(nll)
        nll = nll[:, self.positions]
        if self._uses_full_mask and self.full_mask_nll is None and len(nll):
            self.full_mask_nll, nll = nll[0], nll[1:]
        if self._draws is None:
            return
        draws, self._draws = self._draws, None
        masked, scale = draws.masked.double(), draws.scale[:, None]
        num_masked = masked.sum(-1)
        shared = (draws.offset / num_masked.clamp(min=1))[:, None]
        powers = _level_powers(num_masked / nll.shape[1])  # (K, 3)
        level = 0.0 if self.full_mask_nll is None else self.full_mask_nll.mean()
        slopes = powers[:, 1:]
        rows = _GroupSums(
            weighted=(scale * nll + shared) * masked,
            scale=(scale * masked)[..., None] * powers[:, None],
            cost=nll * masked,
            count=masked[..., None] * powers[:, None],
            gram=num_masked[:, None, None] * slopes[:, :, None] * slopes[:, None],
            moment=((nll - level) * masked).sum(-1, keepdim=True) * slopes,
        )
        groups = int(draws.group[-1]) + 1
        self._sums.append(
            _GroupSums(*(x.new_zeros(groups, *x.shape[1:]).index_add_(0, draws.group, x) for x in vars(rows).values()))
        )

    def estimate(self) -> tuple[torch.Tensor, float]:
        """Token scores (L,), whose sum is the bound, and its standard error; NaN from a single group. Nats."""
        token_nll = torch.zeros(len(self.ids), dtype=torch.float64)
        length = len(self.positions)
        exact = torch.zeros(length, dtype=torch.float64) if self.full_mask_nll is None else self.full_mask_nll / length
        if not self._sums:
            token_nll[self.positions] = exact
            return token_nll, 0.0
        sums = _GroupSums(*(torch.cat(parts) for parts in zip(*(vars(s).values() for s in self._sums), strict=True)))
        estimate = sums.weighted  # (G, S)
        if self.full_mask_nll is not None and len(estimate) > 1:
            estimate = estimate + control_variate(sums, self.full_mask_nll)
        token_nll[self.positions] = exact + estimate.mean(0)
        of_groups = estimate.sum(-1)
        return token_nll, float(of_groups.std() / math.sqrt(len(of_groups))) if len(of_groups) > 1 else float("nan")


@dataclass
class _GroupSums:
    """Sums over the rows of each group; p = (1, k/S - 1, (k/S - 1)^2) of a row's k, m its masked positions."""

    weighted: torch.Tensor  # (G, S): scale nll + offset / k at m
    scale: torch.Tensor  # (G, S, 3): scale p at m
    cost: torch.Tensor  # (G, S): nll at m
    count: torch.Tensor  # (G, S, 3): p at m
    gram: torch.Tensor  # (G, 2, 2): k p p^T without the first entry
    moment: torch.Tensor  # (G, 2): p sum_m (nll - f(S)) without the first entry


def _level_powers(share: torch.Tensor) -> torch.Tensor:
    """(1, share - 1, (share - 1)^2): (K,) -> (K, 3)."""
    return (share - 1)[:, None] ** torch.arange(3)


def control_variate(sums: _GroupSums, full_mask_nll: torch.Tensor) -> torch.Tensor:
    """
    Steps 4 and 5 of the module's docstring: what to add to each group's token scores, (G, S), of mean zero.

    A group's g and h come from the other groups and the full mask; the ridge is worth one token.
    """
    length = len(full_mask_nll)
    level = full_mask_nll.mean()
    gram = sums.gram.sum(0) - sums.gram + torch.eye(2, dtype=torch.float64)
    slope = torch.linalg.solve(gram, sums.moment.sum(0) - sums.moment)  # (G, 2)
    coefficients = torch.cat([level.expand(len(slope), 1), slope], dim=1)  # (G, 3)
    others = sums.count.sum(0) - sums.count
    residual = sums.cost.sum(0) - sums.cost - torch.einsum("gsp,gp->gs", others, coefficients)
    token_effect = (full_mask_nll - level + residual) / (1 + others[..., 0])
    # widths sum to S - 1 and a mask holds each token with probability k / S: the expectation of `sums.scale`
    share = torch.arange(1, length, dtype=torch.float64) / length
    expected = _level_powers(share).sum(0) / length - sums.scale
    return torch.einsum("gsp,gp->gs", expected, coefficients) + expected[..., 0] * token_effect


def order_request(ids: torch.LongTensor, positions: torch.LongTensor) -> RowRequest:
    """Rows for one order (Eq. L_AO_def): row l hides positions[l], positions[l + 1], ... and asks for positions[l]."""
    steps = torch.arange(len(positions))
    rank = torch.full((len(ids),), -1)
    rank[positions] = steps
    return RowRequest(ids, rank >= steps[:, None], rank == steps[:, None])
