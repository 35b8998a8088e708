"""What single precision does to categorical draws: step by step with the mask class, against one draw a position.

    python examples/measure_precision.py --positions 2000 --steps 1024

The network is a fixed Zipf distribution, so the right answer is known. "step by step" is the sampler of the paper's
code: in each step every masked position draws among the mask and all tokens, with Gumbel noise of the given precision.
"plan" is radd_hf's: the step is drawn from time alone, then one draw without the mask. The table shows the mean
surprisal -log p of the drawn tokens, whose expectation is the entropy if the draws are right, and the share of tokens
beyond the commonest tenth. Its first line is exact, with the standard errors of such means.
"""

import argparse
import math
from collections.abc import Callable

import torch

from radd_hf import RADDGenerationConfig
from radd_hf.token_draw_radd import Chunk, TokenDraw


def gumbel_argmax(probability: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.LongTensor:
    """The draw of the paper's code: argmax of p / (1e-10 - log(u + 1e-10)), (N, V) -> (N,)."""
    uniform = torch.rand(probability.shape, dtype=dtype, generator=generator)
    return (probability.to(dtype) / (1e-10 - (uniform + 1e-10).log())).argmax(-1)


def step_by_step(
    law: torch.Tensor, positions: int, steps: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.LongTensor:
    """Tokens (N,) of the log-linear Tweedie sampler; in step k = n..1 a mask stays with probability 1 - 1 / k."""
    drawn, masked = torch.empty(positions, dtype=torch.long), torch.arange(positions)
    for k in range(steps, 0, -1):
        classes = torch.cat([law / k, law.new_tensor([1 - 1 / k])])
        token = torch.cat(
            [gumbel_argmax(classes.expand(len(part), -1), dtype, generator) for part in masked.split(512)]
        )
        if k == 1:
            token = torch.cat(
                [gumbel_argmax(law.expand(len(part), -1), dtype, generator) for part in masked.split(512)]
            )
        revealed = token < len(law)
        drawn[masked[revealed]] = token[revealed]
        masked = masked[~revealed]
        if not len(masked):
            break
    return drawn


def plan(law: torch.Tensor, positions: int, precision: str, seed: int) -> torch.LongTensor:
    """Tokens (N,) as `diffusion_generate` draws them: the steps do not matter, each position is drawn once."""
    options = RADDGenerationConfig(sampling_dtype=precision)
    draw = TokenDraw(options, mask_token_id=len(law), logits_processor=None, device=torch.device("cpu"))
    logits = torch.cat([law.log(), law.new_zeros(1)]).float()
    generator = torch.Generator().manual_seed(seed)
    text = torch.full((1, positions), draw.mask_token_id)
    chunks = [
        Chunk(logits.repeat(len(column), 1), torch.zeros_like(column), column, text, text)
        for column in torch.arange(positions).split(512)
    ]
    return torch.cat([draw(chunk, [generator] * len(chunk.row))[0] for chunk in chunks])


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print the table; deviations of the mean surprisal from the entropy, in standard errors, by name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab_size", type=int, default=10_000)
    parser.add_argument("--positions", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    law = 1 / torch.arange(1, args.vocab_size + 1, dtype=torch.float64)
    law /= law.sum()
    exact = float(torch.special.entr(law).sum())
    rare = float(law[args.vocab_size // 10 :].sum())
    error = math.sqrt(float((law * (law.log() + exact) ** 2).sum()) / args.positions)
    rare_error = math.sqrt(rare * (1 - rare) / args.positions)
    generator = torch.Generator().manual_seed(args.seed)
    rows: dict[str, Callable[[], torch.Tensor]] = {
        "step by step, float32": lambda: step_by_step(law, args.positions, args.steps, torch.float32, generator),
        "step by step, float64": lambda: step_by_step(law, args.positions, args.steps, torch.float64, generator),
        "plan, float32": lambda: plan(law, args.positions, "float32", args.seed),
        "plan, float64": lambda: plan(law, args.positions, "float64", args.seed),
    }
    print(f"Zipf over {args.vocab_size} tokens, {args.positions} positions, {args.steps} steps")
    print(f"{'':>22} {'surprisal':>9} {'rare share':>10}")
    print(f"{'exact':>22} {exact:>9.4f} {rare:>10.4f}   (standard errors {error:.4f} and {rare_error:.4f})")
    deviations = {}
    for name, draw in rows.items():
        tokens = draw()
        surprisal = float(-law.log()[tokens].mean())
        deviations[name] = (surprisal - exact) / error
        share = float((tokens >= args.vocab_size // 10).double().mean())
        print(f"{name:>22} {surprisal:>9.4f} {share:>10.4f}   ({deviations[name]:+.1f} standard errors)", flush=True)
    return deviations


if __name__ == "__main__":
    main()
