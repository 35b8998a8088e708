"""The slow oracle of SEDD: steps by matrices over the whole vocabulary, the law of the text by enumeration.

Written from Lou et al. 2024 and its public code; imports nothing of radd_hf.
"""

import itertools
from collections.abc import Callable

import torch

Score = Callable[[tuple[int, ...], float], torch.Tensor]  # text, t -> scores (L, V), 1 at the token itself


def absorbing_generator(vocab: int, mask: int) -> torch.Tensor:
    """Q with p_t = p_0 exp(sigma_bar Q), p a row: every token but the mask turns into the mask at rate 1."""
    rates = -torch.eye(vocab, dtype=torch.float64)
    rates[:, mask] += 1
    rates[mask] = 0
    return rates


def tweedie_step(score: torch.Tensor, delta: float, mask: int) -> torch.Tensor:
    """Theorem 4.2 at a mask: (s exp(-delta Q))_y exp(delta Q)(y, M), a vector over y; negative entries become 0."""
    rates = absorbing_generator(len(score), mask)
    law = (score @ torch.matrix_exp(-delta * rates)) * torch.matrix_exp(delta * rates)[:, mask]
    assert abs(float(law.sum()) - 1) < 1e-9 * max(1.0, float(law.abs().sum()))
    return law.clamp(min=0) / law.clamp(min=0).sum()


def euler_step(score: torch.Tensor, rate: float, dt: float, mask: int) -> torch.Tensor:
    """delta_M + dt R with R(M, y) = sigma s_y and R(M, M) = -sum; negative entries become 0."""
    law = torch.zeros_like(score)
    for y in range(len(score)):
        if y != mask:
            law[y] = dt * rate * score[y]
    law[mask] = 1 - law.sum()
    return law.clamp(min=0) / law.clamp(min=0).sum()


def text_law(
    score: Score, start: tuple[int, ...], times: list[float], total: Callable, rate: Callable, mask: int, euler: bool
) -> dict[tuple[int, ...], float]:
    """The probability of each text after the steps times[n] -> ... -> times[0]; the last leaves no mask."""
    law = {start: 1.0}
    for k in range(len(times) - 1, 0, -1):
        t, s = times[k], times[k - 1]
        after: dict[tuple[int, ...], float] = {}
        for text, weight in law.items():
            choices = []
            for i, token in enumerate(text):
                if token != mask:
                    choices.append({token: 1.0})
                    continue
                own = score(text, t)[i].double()
                step = euler_step(own, rate(t), t - s, mask) if euler else tweedie_step(own, total(t) - total(s), mask)
                if k == 1:
                    step = own.clone()
                    step[mask] = 0
                    step = step / step.sum()
                choices.append({y: float(p) for y, p in enumerate(step) if p > 0})
            for tokens in itertools.product(*choices):
                p = weight
                for options, token in zip(choices, tokens, strict=True):
                    p *= options[token]
                after[tokens] = after.get(tokens, 0.0) + p
        law = after
    assert abs(sum(law.values()) - 1) < 1e-9
    return law


def score_entropy(score: torch.Tensor, target: int, ratio: float, mask: int) -> float:
    """sum over y, the mask left out, of s_y - r_y log s_y + r_y (log r_y - 1); r_y = ratio at x_0, else 0."""
    value = 0.0
    for y in range(len(score)):
        if y == mask:
            continue
        value += float(score[y])
        if y == target:
            value += -ratio * float(torch.log(score[y])) + ratio * (float(torch.log(torch.tensor(ratio).double())) - 1)
    return value
