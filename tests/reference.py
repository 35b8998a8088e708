"""The slow oracle: every exact quantity of the paper, by loops and enumeration, in plain float64.

Written from the paper (and DESIGN's errata) alone: nothing of radd_hf is imported here. A model is a plain callable
`conditional(x) -> rows`: `x` is a tuple of L ids with `mask_token_id` where a token is hidden, `rows[i][j]` the
probability of clean token j at position i, c_theta(x)[i, j] of eq. (c_q_def). Rows of unmasked positions are not read.

Shapes: B batch, L length (the paper's d), V clean tokens, M = mask_token_id. M may be any id: clean column j is id j
below M and j + 1 from M on (`token_ids`). A "state" is a tuple of L ids; a "law" maps states to probabilities. Losses
and NLLs are in nats per sequence, NFE in passes of the network per sequence.

`positions` (where a function takes it) are the maskable positions, None for all of them. The others are context: never
masked, never scored, always seen; L in a formula is then the number of maskable positions.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

State = tuple[int, ...]
Conditional = Callable[[State], Sequence[Sequence[float]]]
Law = dict[State, float]


# Models


def token_ids(num_clean: int, mask_token_id: int) -> list[int]:
    """Ids of the V clean tokens, column by column: 0..V without `mask_token_id`."""
    return [token for token in range(num_clean + 1) if token != mask_token_id]


def random_conditional(num_clean: int, seed: int, sharpness: float = 1.0) -> Conditional:
    """A model with unrelated random conditionals at every state: its orders disagree, so no test can pass by symmetry.

    `sharpness` is the standard deviation of the logits. Returns rows of (L, V) probabilities.
    """
    table: dict[State, list[list[float]]] = {}

    def conditional(x: State) -> list[list[float]]:
        if x not in table:
            generator = random.Random(f"{seed}:{x}")
            weights = [[math.exp(sharpness * generator.gauss(0.0, 1.0)) for _ in range(num_clean)] for _ in x]
            table[x] = [[weight / sum(row) for weight in row] for row in weights]
        return table[x]

    return conditional


def conditional_of_network(
    log_probs: Callable[[torch.Tensor], torch.Tensor], mask_token_id: int, dtype: torch.dtype = torch.float64
) -> Conditional:
    """Wrap a network: ids (B, L) -> log-probabilities (B, L, V + 1), mask column included and dropped here.

    States are remembered, so an enumeration runs the network once a state. `dtype` is that of the returned rows.
    """
    seen: dict[State, list[list[float]]] = {}

    def conditional(x: State) -> list[list[float]]:
        if x not in seen:
            with torch.no_grad():
                rows = log_probs(torch.tensor([x]))[0].to(dtype).exp()
            keep = token_ids(rows.shape[-1] - 1, mask_token_id)
            seen[x] = rows[:, keep].tolist()
        return seen[x]

    return conditional


# Noise schedules: functions of time alone, t in [0, 1]


@dataclass(frozen=True)
class Schedule:
    """A noise schedule by its closed form: `kind` is "log_linear", "geometric" or "cosine"."""

    kind: str
    eps: float = 1e-3
    sigma_min: float = 1e-4
    sigma_max: float = 20.0

    def sigma_bar(self, t: float) -> float:
        """Total noise. Log-linear: -log(1 - (1 - eps) t) (erratum 1); geometric: sigma_min^(1 - t) sigma_max^t;
        cosine: -log(1 - lambda(t)) with lambda(t) = (1 - eps) (1 - cos(pi t / 2)), 1 - cos a = 2 sin^2(a / 2)."""
        if self.kind == "log_linear":
            return -math.log1p(-(1.0 - self.eps) * t)
        if self.kind == "geometric":
            return self.sigma_min ** (1.0 - t) * self.sigma_max**t
        if self.kind == "cosine":
            return -math.log1p(-(1.0 - self.eps) * 2.0 * math.sin(math.pi * t / 4.0) ** 2)
        raise ValueError(f"unknown schedule {self.kind}")

    def sigma(self, t: float) -> float:
        """Rate of noise, d sigma_bar / d t, differentiated by hand."""
        if self.kind == "log_linear":
            return (1.0 - self.eps) / (1.0 - (1.0 - self.eps) * t)
        if self.kind == "geometric":
            return self.sigma_bar(t) * (math.log(self.sigma_max) - math.log(self.sigma_min))
        if self.kind == "cosine":
            remaining = 1.0 - (1.0 - self.eps) * (1.0 - math.cos(math.pi * t / 2.0))
            return (1.0 - self.eps) * (math.pi / 2.0) * math.sin(math.pi * t / 2.0) / remaining
        raise ValueError(f"unknown schedule {self.kind}")

    def mask_probability(self, t: float) -> float:
        """lambda(t) = 1 - exp(-sigma_bar(t)): the probability that a token is masked at time t."""
        return -math.expm1(-self.sigma_bar(t))

    def score_scale(self, t: float) -> float:
        """s(t) = exp(-sigma_bar) / (1 - exp(-sigma_bar)), the time-dependent factor of Theorem 1."""
        return math.exp(-self.sigma_bar(t)) / -math.expm1(-self.sigma_bar(t))

    def weight(self, t: float) -> float:
        """w(t) = sigma(t) s(t), the weight of the cross-entropy in eq. (tDCE_q)."""
        return self.sigma(t) * self.score_scale(t)

    def inverse(self, mask_probability: float) -> float:
        """The time t with lambda(t) = `mask_probability`, by bisection on [0, 1]."""
        low, high = 0.0, 1.0
        for _ in range(200):
            middle = (low + high) / 2.0
            if self.mask_probability(middle) < mask_probability:
                low = middle
            else:
                high = middle
        return (low + high) / 2.0


def unmask_probability(schedule: Schedule, algorithm: str, t: float, s: float) -> float:
    """psi(t, s), the probability that a mask at time t is gone at time s < t.

    Tweedie: eq. (psi_tweedie), (e^{-sigma_bar(s)} - e^{-sigma_bar(t)}) / (1 - e^{-sigma_bar(t)}).
    Euler: eq. (psi_euler), sigma(t) s(t) (t - s), cut at 1.
    """
    if algorithm == "tweedie":
        survived_t, survived_s = math.exp(-schedule.sigma_bar(t)), math.exp(-schedule.sigma_bar(s))
        return (survived_s - survived_t) / (1.0 - survived_t)
    if algorithm == "euler":
        return min(1.0, schedule.sigma(t) * schedule.score_scale(t) * (t - s))
    raise ValueError(f"unknown algorithm {algorithm}")


# Cross-entropies and bounds


def masked(x0: Sequence[int], mask: Sequence[int], mask_token_id: int) -> State:
    """x_0 with the positions of `mask` hidden."""
    return tuple(mask_token_id if i in mask else token for i, token in enumerate(x0))


def all_masks(positions: Sequence[int]) -> list[tuple[int, ...]]:
    """Every subset of `positions`, the empty one first: 2^L of them."""
    return [mask for k in range(len(positions) + 1) for mask in itertools.combinations(positions, k)]


def probability_of_truth(conditional: Conditional, x: State, i: int, token: int, mask_token_id: int) -> float:
    """c_theta(x)[i, token] for a clean id `token`."""
    row = conditional(x)[i]
    return float(row[token_ids(len(row), mask_token_id).index(token)])


def cross_entropy(conditional: Conditional, x0: Sequence[int], mask: Sequence[int], mask_token_id: int) -> float:
    """CE(m) = sum over i in m of -log q_theta(x_0^i | unmasked tokens), nats."""
    x = masked(x0, mask, mask_token_id)
    return sum(-math.log(probability_of_truth(conditional, x, i, x0[i], mask_token_id)) for i in mask)


def exact_bound(
    conditional: Conditional, x0: Sequence[int], mask_token_id: int, positions: Sequence[int] | None = None
) -> float:
    """Eq. (DCEloss_k_sum): sum over non-empty masks of (k - 1)! (L - k)! / L! CE(m), k = |m|. Nats per sequence."""
    positions = range(len(x0)) if positions is None else positions
    length = len(positions)
    total = 0.0
    for mask in all_masks(positions):
        if mask:
            k = len(mask)
            weight = math.factorial(k - 1) * math.factorial(length - k) / math.factorial(length)
            total += weight * cross_entropy(conditional, x0, mask, mask_token_id)
    return total


def truncated_bound(
    conditional: Conditional,
    x0: Sequence[int],
    mask_token_id: int,
    low: float,
    high: float,
    positions: Sequence[int] | None = None,
) -> float:
    """Eq. (DCEloss_lambda) over lambda in [low, high]: sum over masks of CE(m) int lambda^(k-1) (1-lambda)^(L-k).

    The integral is a polynomial's: (1 - lambda)^(L - k) is multiplied out. Nats per sequence, not divided by
    high - low.
    """
    positions = range(len(x0)) if positions is None else positions
    length = len(positions)
    total = 0.0
    for mask in all_masks(positions):
        if mask:
            k = len(mask)
            integral = 0.0
            for power in range(length - k + 1):
                coefficient = math.comb(length - k, power) * (-1.0) ** power
                integral += coefficient * (high ** (k + power) - low ** (k + power)) / (k + power)
            total += integral * cross_entropy(conditional, x0, mask, mask_token_id)
    return total


def gauss_legendre(low: float, high: float, panels: int = 40, order: int = 24) -> list[tuple[float, float]]:
    """Nodes and weights of composite Gauss-Legendre quadrature on [low, high]; the weights sum to high - low.

    The nodes of one panel are the roots of the Legendre polynomial P_order, found by Newton's method.
    """
    panel: list[tuple[float, float]] = []
    for i in range(1, order + 1):
        root = math.cos(math.pi * (i - 0.25) / (order + 0.5))
        for _ in range(100):
            previous, value = 1.0, root
            for n in range(2, order + 1):
                previous, value = value, ((2 * n - 1) * root * value - (n - 1) * previous) / n
            slope = order * (root * value - previous) / (root * root - 1.0)
            root -= value / slope
        panel.append((root, 2.0 / ((1.0 - root * root) * slope * slope)))
    half = (high - low) / (2.0 * panels)
    return [(low + half * (2 * p + 1 + root), half * weight) for p in range(panels) for root, weight in panel]


def expectation_over_masks(
    value: Callable[[tuple[int, ...]], float], mask_probability: float, positions: Sequence[int]
) -> float:
    """E[value(m)] when each of `positions` is masked independently with `mask_probability` (eq. of p_lambda)."""
    total = 0.0
    for mask in all_masks(positions):
        k = len(mask)
        total += mask_probability**k * (1.0 - mask_probability) ** (len(positions) - k) * value(mask)
    return total


def dse_moment(
    conditional: Conditional,
    x0: Sequence[int],
    mask_token_id: int,
    schedule: Schedule,
    time_eps: float,
    positions: Sequence[int] | None = None,
    power: int = 1,
) -> float:
    """E[loss^power] of one draw of `dse`: t ~ U[time_eps, 1], loss = w(t) CE(m), by quadrature in t. Nats^power."""
    positions = range(len(x0)) if positions is None else positions
    entropies = {mask: cross_entropy(conditional, x0, mask, mask_token_id) for mask in all_masks(positions)}
    total = 0.0
    for t, step in gauss_legendre(time_eps, 1.0):
        weight = schedule.weight(t)
        total += step * expectation_over_masks(
            lambda mask, weight=weight: (weight * entropies[mask]) ** power, schedule.mask_probability(t), positions
        )
    return total / (1.0 - time_eps)


def t_dce_moment(
    conditional: Conditional,
    x0: Sequence[int],
    mask_token_id: int,
    schedule: Schedule,
    time_eps: float,
    positions: Sequence[int] | None = None,
    power: int = 1,
) -> float:
    """E[loss^power] of one draw of `t_dce`: t ~ U[time_eps, 1], loss = w(t) sum_m [-log(s(t) q_i)], eq. (tDCE_q)."""
    positions = range(len(x0)) if positions is None else positions
    entropies = {mask: cross_entropy(conditional, x0, mask, mask_token_id) for mask in all_masks(positions)}
    total = 0.0
    for t, step in gauss_legendre(time_eps, 1.0):
        weight, log_scale = schedule.weight(t), math.log(schedule.score_scale(t))
        total += step * expectation_over_masks(
            lambda mask, w=weight, c=log_scale: (w * (entropies[mask] - len(mask) * c)) ** power,
            schedule.mask_probability(t),
            positions,
        )
    return total / (1.0 - time_eps)


def lambda_dce_mean(
    conditional: Conditional, x0: Sequence[int], mask_token_id: int, positions: Sequence[int] | None = None
) -> float:
    """E of one draw of `lambda_dce`: lambda ~ U(0, 1), loss = CE(m) / lambda, by quadrature (infinite variance)."""
    positions = range(len(x0)) if positions is None else positions
    entropies = {mask: cross_entropy(conditional, x0, mask, mask_token_id) for mask in all_masks(positions)}
    return sum(
        step * expectation_over_masks(lambda mask, lam=lam: entropies[mask] / lam, lam, positions)
        for lam, step in gauss_legendre(0.0, 1.0)
    )


def ao_moment(
    conditional: Conditional,
    x0: Sequence[int],
    mask_token_id: int,
    positions: Sequence[int] | None = None,
    power: int = 1,
) -> float:
    """E[loss^power] of one draw of `ao`, eq. (DCEloss_k_mc): k ~ U{1..L}, a uniform mask m of k, loss L / k CE(m)."""
    positions = range(len(x0)) if positions is None else positions
    length = len(positions)
    total = 0.0
    for k in range(1, length + 1):
        masks = list(itertools.combinations(positions, k))
        for mask in masks:
            loss = length / k * cross_entropy(conditional, x0, mask, mask_token_id)
            total += loss**power / (length * len(masks))
    return total


def forward_probability(
    x: Sequence[int], x0: Sequence[int], mask_probability: float, mask_token_id: int, positions: Sequence[int]
) -> float:
    """p_{t|0}(x | x_0), the product over positions: lambda where masked, 1 - lambda where x^i = x_0^i, else 0."""
    probability = 1.0
    for i in positions:
        if x[i] == mask_token_id:
            probability *= mask_probability
        elif x[i] == x0[i]:
            probability *= 1.0 - mask_probability
        else:
            probability *= 0.0
    return probability


def score_entropy(
    conditional: Conditional,
    x0: Sequence[int],
    xt: Sequence[int],
    t: float,
    schedule: Schedule,
    mask_token_id: int,
    positions: Sequence[int] | None = None,
) -> float:
    """The integrand of eq. (score_entropy) at one draw (x_t, t), term by term. Nats per sequence.

    Sum over masked i and clean j of sigma(t) [s_theta - a log s_theta + K(a)], where x^ is x_t with j written at i,
    s_theta = s(t) c_theta(x_t)[i, j] (Theorem 1), a = p_{t|0}(x^ | x_0) / p_{t|0}(x_t | x_0), K(a) = a log a - a and
    K(0) = 0.
    """
    positions = range(len(x0)) if positions is None else positions
    lam, sigma = schedule.mask_probability(t), schedule.sigma(t)
    here = forward_probability(xt, x0, lam, mask_token_id, positions)
    rows = conditional(tuple(xt))
    total = 0.0
    for i in positions:
        if xt[i] != mask_token_id:
            continue
        for column, j in enumerate(token_ids(len(rows[i]), mask_token_id)):
            other = list(xt)
            other[i] = j
            ratio = forward_probability(other, x0, lam, mask_token_id, positions) / here
            score = schedule.score_scale(t) * float(rows[i][column])
            constant = ratio * math.log(ratio) - ratio if ratio > 0.0 else 0.0
            entropy = ratio * math.log(score) if ratio > 0.0 else 0.0
            total += sigma * (score - entropy + constant)
    return total


# Orders


def order_nll(conditional: Conditional, x0: Sequence[int], order: Sequence[int], mask_token_id: int) -> float:
    """-log q_theta(x_0; pi) = sum over l of -log q_theta(x_0^pi(l) | x_0^pi(<l)), nats.

    `order` lists the scored positions, the first one revealed first; positions that it leaves out are context.
    """
    total = 0.0
    for step, i in enumerate(order):
        x = masked(x0, order[step:], mask_token_id)
        total -= math.log(probability_of_truth(conditional, x, i, x0[i], mask_token_id))
    return total


def forward_nll(
    conditional: Conditional, x0: Sequence[int], mask_token_id: int, positions: Sequence[int] | None = None
) -> float:
    """The NLL of the left-to-right order, nats."""
    return order_nll(conditional, x0, sorted(range(len(x0)) if positions is None else positions), mask_token_id)


def backward_nll(
    conditional: Conditional, x0: Sequence[int], mask_token_id: int, positions: Sequence[int] | None = None
) -> float:
    """The NLL of the right-to-left order, nats."""
    order = sorted(range(len(x0)) if positions is None else positions, reverse=True)
    return order_nll(conditional, x0, order, mask_token_id)


def average_order_nll(
    conditional: Conditional, x0: Sequence[int], mask_token_id: int, positions: Sequence[int] | None = None
) -> float:
    """Eq. (L_AO_def): the mean over all L! orders of the order's NLL, nats."""
    orders = list(itertools.permutations(range(len(x0)) if positions is None else positions))
    return sum(order_nll(conditional, x0, order, mask_token_id) for order in orders) / len(orders)


def order_mixture_nll(
    conditional: Conditional, x0: Sequence[int], mask_token_id: int, positions: Sequence[int] | None = None
) -> float:
    """-log of the mean over all L! orders of q_theta(x_0; pi): the NLL of random-order sampling (<= the bound)."""
    orders = list(itertools.permutations(range(len(x0)) if positions is None else positions))
    probabilities = [math.exp(-order_nll(conditional, x0, order, mask_token_id)) for order in orders]
    return -math.log(sum(probabilities) / len(orders))


# Laws of the samplers


def uniform_grid(num_steps: int) -> list[float]:
    """t_k = k / n for k = 0..n, ascending."""
    return [k / num_steps for k in range(num_steps + 1)]


def masked_positions(x: Sequence[int], mask_token_id: int) -> list[int]:
    """Positions of x that hold the mask."""
    return [i for i, token in enumerate(x) if token == mask_token_id]


def fill(law: Law, conditional: Conditional, positions: Sequence[int], mask_token_id: int) -> Law:
    """Reveal `positions` (masked in each state of `law`) in one pass, each independently from its row of c_theta."""
    result: Law = {}
    for x, probability in law.items():
        rows = conditional(x)
        choices = [list(zip(token_ids(len(rows[i]), mask_token_id), rows[i], strict=True)) for i in positions]
        for picks in itertools.product(*choices):
            y, p = list(x), probability
            for i, (token, chance) in zip(positions, picks, strict=True):
                y[i] = token
                p *= float(chance)
            result[tuple(y)] = result.get(tuple(y), 0.0) + p
    return result


def reverse_step(law: Law, conditional: Conditional, psi: float, mask_token_id: int) -> Law:
    """One step of eqs. (p_absorb_tweedie) and (p_absorb_euler): each mask goes with probability psi, independently."""
    result: Law = {}
    for x, probability in law.items():
        hidden = masked_positions(x, mask_token_id)
        for revealed in all_masks(hidden):
            p = probability * psi ** len(revealed) * (1.0 - psi) ** (len(hidden) - len(revealed))
            if p > 0.0:
                for y, q in fill({x: p}, conditional, revealed, mask_token_id).items():
                    result[y] = result.get(y, 0.0) + q
    return result


def step_by_step_law(
    conditional: Conditional,
    x: Sequence[int],
    mask_token_id: int,
    schedule: Schedule,
    algorithm: str,
    times: Sequence[float],
) -> Law:
    """The exact law of algorithms 5 and 6 started from `x`: final sequence -> probability.

    `times` is the ascending grid t_0..t_n; the step from t_1 to t_0 reveals whatever is left (psi_1 := 1).
    """
    law: Law = {tuple(x): 1.0}
    for k in range(len(times) - 1, 0, -1):
        psi = 1.0 if k == 1 else unmask_probability(schedule, algorithm, times[k], times[k - 1])
        law = reverse_step(law, conditional, psi, mask_token_id)
    return law


def one_pass_law(conditional: Conditional, x: Sequence[int], mask_token_id: int) -> Law:
    """The law of the wrong sampler that fills every mask of `x` independently in a single pass."""
    return fill({tuple(x): 1.0}, conditional, masked_positions(x, mask_token_id), mask_token_id)


def given_order_law(
    conditional: Conditional,
    x: Sequence[int],
    mask_token_id: int,
    order: Sequence[int],
    num_steps: int | None = None,
) -> Law:
    """Algorithm 2 (erratum 3) with a given order; positions of `order` that are not masked in `x` are skipped.

    With `num_steps` = n, groups of ceil(l / n) positions are revealed a pass (l masks), None reveals one a pass.
    """
    hidden = [i for i in order if x[i] == mask_token_id]
    size = 1 if num_steps is None else max(1, math.ceil(len(hidden) / num_steps))
    law: Law = {tuple(x): 1.0}
    for start in range(0, len(hidden), size):
        law = fill(law, conditional, hidden[start : start + size], mask_token_id)
    return law


def random_order_law(
    conditional: Conditional, x: Sequence[int], mask_token_id: int, num_steps: int | None = None
) -> Law:
    """Algorithm 2: the mean of `given_order_law` over all orders of the masks of `x`."""
    orders = list(itertools.permutations(masked_positions(x, mask_token_id)))
    result: Law = {}
    for order in orders:
        for y, probability in given_order_law(conditional, x, mask_token_id, order, num_steps).items():
            result[y] = result.get(y, 0.0) + probability / len(orders)
    return result


def remdm_law(
    conditional: Conditional,
    x: Sequence[int],
    mask_token_id: int,
    schedule: Schedule,
    times: Sequence[float],
    kind: str,
    strength: float,
) -> Law:
    """The law of ReMDM ("cap" or "rescale"), state by state; the last step reveals what is left and masks nothing."""
    free = masked_positions(x, mask_token_id)
    law: Law = {tuple(x): 1.0}
    for k in range(len(times) - 1, 0, -1):
        alpha_t, alpha_s = (1.0 - schedule.mask_probability(t) for t in (times[k], times[k - 1]))
        largest = min(1.0, (1.0 - alpha_s) / alpha_t)
        sigma = min(strength, largest) if kind == "cap" else strength * largest
        psi = (alpha_s - (1.0 - sigma) * alpha_t) / (1.0 - alpha_t)
        if k == 1:
            sigma, psi = 0.0, 1.0
        result: Law = {}
        for state, probability in law.items():
            shown = [i for i in free if state[i] != mask_token_id]
            revealed_law = reverse_step({state: probability}, conditional, min(1.0, psi), mask_token_id)
            for again in all_masks(shown):
                chance = sigma ** len(again) * (1.0 - sigma) ** (len(shown) - len(again))
                if chance > 0.0:
                    for y, q in revealed_law.items():
                        z = tuple(mask_token_id if i in again else token for i, token in enumerate(y))
                        result[z] = result.get(z, 0.0) + q * chance
        law = result
    return law


def certainty(probabilities: Sequence[float], measure: str) -> float:
    """How sure a distribution is: its largest probability, minus its entropy, or the lead of its first entry."""
    if measure == "confidence":
        return max(probabilities)
    if measure == "entropy":
        return sum(p * math.log(p) for p in probabilities if p > 0.0)
    first, second = sorted(probabilities, reverse=True)[:2]
    return first - second


def adaptive_law(
    conditional: Conditional,
    x: Sequence[int],
    mask_token_id: int,
    measure: str,
    *,
    each: int = 1,
    threshold: float | None = None,
    bound: float | None = None,
    block_length: int | None = None,
) -> Law:
    """The law of a sampler that reveals the surest `each` masks a pass, and all that `threshold` or `bound` allow."""
    law: Law = {tuple(x): 1.0}
    start = masked_positions(x, mask_token_id)[0]
    while any(masked_positions(state, mask_token_id) for state in law):
        result: Law = {}
        for state, probability in law.items():
            hidden = masked_positions(state, mask_token_id)
            if block_length is not None and hidden:
                current = min((i - start) // block_length for i in hidden)
                hidden = [i for i in hidden if (i - start) // block_length == current]
            rows = conditional(state)
            sure = {i: certainty([float(p) for p in rows[i]], measure) for i in hidden}
            ranked = sorted(hidden, key=lambda i: (-sure[i], i))
            number = min(each, len(ranked))
            for k in range(number + 1, len(ranked) + 1):
                entropies = [-sure[i] for i in ranked[:k]]
                if threshold is not None and sure[ranked[k - 1]] >= threshold:
                    number = k
                if bound is not None and sum(entropies) - max(entropies) <= bound:
                    number = k
            for y, q in fill({state: probability}, conditional, sorted(ranked[:number]), mask_token_id).items():
                result[y] = result.get(y, 0.0) + q
        law = result
    return law


def total_variation(first: Mapping[State, float], second: Mapping[State, float]) -> float:
    """Half the sum of absolute differences of two laws."""
    return 0.5 * sum(abs(first.get(x, 0.0) - second.get(x, 0.0)) for x in set(first) | set(second))


# Number of network passes


def reveal_distribution(schedule: Schedule, algorithm: str, times: Sequence[float]) -> list[float]:
    """Eq. (r_k): [r_1, ..., r_n], r_k = psi_k times the product over j > k of (1 - psi_j), with psi_1 := 1."""
    n = len(times) - 1
    psi = [1.0] + [unmask_probability(schedule, algorithm, times[k], times[k - 1]) for k in range(2, n + 1)]
    result = []
    for k in range(1, n + 1):
        r = psi[k - 1]
        for j in range(k + 1, n + 1):
            r *= 1.0 - psi[j - 1]
        result.append(r)
    return result


def expected_nfe(schedule: Schedule, algorithm: str, times: Sequence[float], length: int) -> float:
    """Eq. (ENFE_r_k): sum over k of 1 - (1 - r_k)^l, passes per sequence with l = `length` free positions.

    "any_order" takes len(times) - 1 as its number of steps: ceil(l / ceil(l / n)) passes.
    """
    if algorithm == "any_order":
        return 0.0 if length == 0 else float(math.ceil(length / math.ceil(length / (len(times) - 1))))
    return sum(1.0 - (1.0 - r) ** length for r in reveal_distribution(schedule, algorithm, times))


# The dense step-by-step sampler


@torch.no_grad()
def dense_cached_sampler(
    log_probs: Callable[[torch.Tensor], torch.Tensor],
    input_ids: torch.Tensor,
    mask_token_id: int,
    schedule: Schedule,
    algorithm: str,
    num_steps: int,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Algorithms 5 and 6 as printed, with erratum 2: the cache is refreshed on the new x when x has changed.

    At each of the `num_steps` steps the full transition probabilities (V tokens and the mask) of every masked position
    are formed from the cache and one token is drawn from each. The network sees the whole batch whenever any row has
    changed and some mask is left. The last step reveals whatever is left.

    Args:
        log_probs: ids (B, L) -> log-probabilities (B, L, V + 1), mask column -inf.
        input_ids: (B, L), masks to be filled, every other id kept.
        dtype: of the transition probabilities and of the draws.

    Returns:
        ids (B, L); NFE of each row (B,), the steps at which the row changed; number of batched network passes.
    """
    x = input_ids.clone()
    nfe = torch.zeros(x.shape[0], dtype=torch.long)
    cache, stale, passes = None, True, 0
    times = uniform_grid(num_steps)
    for k in range(num_steps, 0, -1):
        hidden = x == mask_token_id  # (B, L)
        if not bool(hidden.any()):
            break
        if stale:
            cache = log_probs(x)  # (B, L, V + 1)
            passes += 1
        psi = 1.0 if k == 1 else unmask_probability(schedule, algorithm, times[k], times[k - 1])
        transition = psi * cache[hidden].to(dtype).exp()  # (masks, V + 1)
        transition[:, mask_token_id] = 1.0 - psi
        # The smallest of independent exponentials with these rates is categorical with these probabilities.
        noise = torch.empty_like(transition).exponential_(generator=generator)
        drawn = (transition / noise).argmax(dim=-1)  # (masks,)
        y = x.clone()
        y[hidden] = drawn
        changed = (y != x).any(dim=-1)  # (B,)
        nfe += changed.long().cpu()
        stale = bool(changed.any())
        x = y
    return x, nfe, passes


# Statistics


def chi_square_p_value(counts: Mapping[State, int], law: Mapping[State, float], min_expected: float = 5.0) -> float:
    """p-value of Pearson's test that `counts` were drawn from `law`.

    Cells with an expected count below `min_expected` are merged into one; where that one is still too small the
    smallest of the other cells joins it. A draw that the law calls impossible gives 0.0.
    """
    from scipy.stats import chi2

    if any(count > 0 and law.get(x, 0.0) <= 0.0 for x, count in counts.items()):
        return 0.0
    total = sum(counts.values())
    cells = sorted((total * probability, counts.get(x, 0)) for x, probability in law.items())
    merged_expected, merged_observed, kept = 0.0, 0, []
    for expected, observed in cells:
        if expected < min_expected or 0.0 < merged_expected < min_expected:
            merged_expected += expected
            merged_observed += observed
        else:
            kept.append((expected, observed))
    if merged_expected > 0.0:
        kept.append((merged_expected, merged_observed))
    if len(kept) < 2:
        return 1.0
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in kept)
    return float(chi2.sf(statistic, df=len(kept) - 1))
