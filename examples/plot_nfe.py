"""The paper's figure of expected network calls over sampling steps: the formula as curves, measured means as points.

    python examples/plot_nfe.py --output nfe.png

Measured means are `nfe` of `diffusion_generate` over `--rows` samples of `--length` tokens from a tiny random network:
how often the sampler calls the network depends on the schedule, the steps and the length alone. The last line gives
the largest deviation from the formula in standard errors of the mean.
"""

import argparse
import math

import matplotlib
import torch

from radd_hf import RADDConfig, RADDForMaskedDiffusion, expected_nfe

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  after the choice of a backend without a screen

CASES = (("tweedie", "log_linear"), ("tweedie", "cosine"), ("euler", "geometric"))


def build_model(length: int, noise_schedule: str) -> RADDForMaskedDiffusion:
    """One block of width 8 over 7 tokens."""
    config = RADDConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=length,
        noise_schedule=noise_schedule,
    )
    return RADDForMaskedDiffusion(config)


def main(arguments: list[str] | None = None) -> float:
    """Draw the figure; the largest deviation in standard errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="nfe.png")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
    args = parser.parse_args(arguments)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    worst = 0.0
    print(f"{'algorithm':>9} {'schedule':>10} {'steps':>5} {'formula':>8} {'measured':>8} {'s.e.':>6}")
    for algorithm, schedule in CASES:
        model = build_model(args.length, schedule)
        formula, measured, errors = [], [], []
        for steps in args.steps:
            output = model.diffusion_generate(
                batch_size=args.rows,
                max_length=args.length,
                algorithm=algorithm,
                num_steps=steps,
                seed=steps,
                return_dict_in_generate=True,
            )
            nfe = output.nfe.double()
            formula.append(expected_nfe(steps, args.length, algorithm, schedule))
            measured.append(float(nfe.mean()))
            errors.append(float(nfe.std()) / math.sqrt(args.rows))
            if errors[-1] > 0:
                worst = max(worst, abs(measured[-1] - formula[-1]) / errors[-1])
            figures = f"{formula[-1]:>8.2f} {measured[-1]:>8.2f} {errors[-1]:>6.2f}"
            print(f"{algorithm:>9} {schedule:>10} {steps:>5} {figures}", flush=True)
        (line,) = axes.plot(args.steps, formula, label=f"{algorithm}, {schedule}")
        axes.errorbar(args.steps, measured, yerr=errors, fmt="*", color=line.get_color())
    axes.axhline(args.length, color="grey", linestyle=":", label=f"one token a call: {args.length}")
    axes.set(xscale="log", xlabel="sampling steps", ylabel=f"network calls for {args.length} tokens")
    axes.legend()
    figure.tight_layout()
    figure.savefig(args.output, dpi=150)
    print(
        f"saved {args.output}; largest deviation {worst:.2f} standard errors over {len(CASES) * len(args.steps)} means"
    )
    return worst


if __name__ == "__main__":
    torch.set_num_threads(1)  # the network is tiny
    main()
