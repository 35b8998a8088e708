"""CPU time of diffusion_generate against the paper's dense cached sampler (Algorithm 5), side by side.

    python examples/benchmark_generation.py --lengths 64 128 256 --repeats 3

GPT-2's vocabulary, 6 blocks of width 384, as many steps as positions, log-linear noise. The baseline forms the full
transition probabilities of every masked position at each step, in float64 as in the paper's experiments. Both run in
one process, in turn; a row shows median CPU seconds and their ratio, which is the figure to quote.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from radd_hf import RADDConfig, RADDForMaskedDiffusion

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import reference  # noqa: E402  the slow oracle holds the baseline

BATCH_SIZE = 4


def build_model(longest: int) -> RADDForMaskedDiffusion:
    """A random network; the values drawn do not matter for its speed."""
    torch.manual_seed(0)
    config = RADDConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, max_position_embeddings=longest)
    return RADDForMaskedDiffusion(config).eval()


def dense(model: RADDForMaskedDiffusion, length: int, seed: int) -> int:
    """Passes of the paper's sampler on masks alone."""

    def log_probs(ids: torch.LongTensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(ids).logits.float(), dim=-1)

    masks = torch.full((BATCH_SIZE, length), model.config.mask_token_id)
    schedule = reference.Schedule("log_linear")
    generator = torch.Generator().manual_seed(seed)
    return reference.dense_cached_sampler(
        log_probs, masks, model.config.mask_token_id, schedule, "tweedie", length, generator
    )[2]


def planned(model: RADDForMaskedDiffusion, length: int, seed: int) -> int:
    """Passes of diffusion_generate for the same task."""
    output = model.diffusion_generate(
        batch_size=BATCH_SIZE, max_length=length, num_steps=length, seed=seed, return_dict_in_generate=True
    )
    return output.forward_passes


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = build_model(max(args.lengths))
    print(f"{torch.get_num_threads()} threads, batch {BATCH_SIZE}, vocabulary {model.config.vocab_size:,}, 6 x 384")
    print(f"{'length':>6} {'dense s':>9} {'passes':>6} {'planned s':>9} {'passes':>6} {'planned/dense':>13}")
    for length in args.lengths:
        seconds, passes = {dense: [], planned: []}, {dense: [], planned: []}
        for repeat in range(args.repeats):
            for sampler in (dense, planned):
                start = time.process_time()
                passes[sampler].append(sampler(model, length, repeat))
                seconds[sampler].append(time.process_time() - start)
        one, other = (statistics.median(seconds[s]) for s in (dense, planned))
        n_one, n_other = (statistics.mean(passes[s]) for s in (dense, planned))
        print(f"{length:>6} {one:>9.2f} {n_one:>6.0f} {other:>9.2f} {n_other:>6.0f} {other / one:>13.3f}", flush=True)


if __name__ == "__main__":
    main()
