"""How much variance of the training loss goes when time is stratified, beside what the law of total variance predicts.

    python examples/measure_variance.py --draws 200

One fixed batch of held-out text under the shipped checkpoint. For each loss the mean over the batch is drawn again and
again, with independent times and with one time in each of B strata (in random order). By the law of total variance a
row's variance is the mean variance within strata plus the variance of the strata's means, and stratification takes
the second away from the batch: the predicted ratio is the share of the first, from the independent draws alone (an
analysis of variance over strata of each row's deviations from its own mean).

A ratio of two sample variances of n draws each has a relative error of about 2 / sqrt(n), more where the tails are
heavy: lambda_dce and dse have few masks under a large weight at small lambda, and their variance converges slowly.
"""

import argparse
import json
from collections.abc import Callable

import torch
from demo import CHECKPOINT, held_out_blocks
from transformers import AutoTokenizer

from radd_hf import RADDForMaskedDiffusion, get_noise_schedule
from radd_hf.losses import DEFAULT_TIME_EPS, LOSS_TYPES, corrupt, masked_token_nll, sum_over_masked, weigh

# Losses that share a corruption share the network's work.
CORRUPTIONS = {"dse": ("dse", "t_dce"), "lambda_dce": ("lambda_dce",), "ao": ("ao",)}


@torch.no_grad()
def draw_losses(
    model: RADDForMaskedDiffusion, ids: torch.LongTensor, corruption_of: str, time_sampling: str, draws: int
) -> tuple[dict[str, torch.Tensor], torch.LongTensor]:
    """Losses (draws, B), float64, of the loss types with this corruption, and the stratum of each draw of time."""
    schedule, (rows, length) = get_noise_schedule(model.config), ids.shape
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    losses, strata = {name: [] for name in CORRUPTIONS[corruption_of]}, []
    for draw in range(draws):
        drawn = corrupt(
            ids,
            corruption_of,
            model.config.mask_token_id,
            everywhere,
            noise_schedule=schedule,
            time_sampling=time_sampling,
            generator=torch.Generator().manual_seed(draw),
        )
        nll = sum_over_masked(masked_token_nll(model, ids, drawn.noisy_ids, drawn.masked), drawn.masked).double()
        for name in losses:
            losses[name].append(weigh(nll, drawn, name, schedule))
        unit = {
            "dse": lambda t: (t - DEFAULT_TIME_EPS) / (1 - DEFAULT_TIME_EPS),
            "lambda_dce": lambda level: level,
            "ao": lambda k: k.double() / length,
        }[corruption_of](drawn.level)
        strata.append(((unit * rows).ceil().long() - 1).clamp(0, rows - 1))
    return {name: torch.stack(values) for name, values in losses.items()}, torch.stack(strata)


def predicted_ratio(losses: torch.Tensor, strata: torch.LongTensor) -> float:
    """
    E Var(loss | stratum) / Var(loss) of each row's deviations from its own mean, both (draws, B), unbiased within
    strata.
    """
    deviation = (losses - losses.mean(0)).flatten()
    index = strata.flatten()
    count = torch.bincount(index).clamp(min=1).double()
    mean = torch.zeros_like(count).index_add(0, index, deviation) / count
    within = (deviation - mean[index]).square().sum() / (len(deviation) - len(count))
    return float(within / (deviation.square().sum() / (len(deviation) - losses.shape[1])))


def main(arguments: list[str] | None = None, report: Callable[[str], None] = print) -> dict[str, dict[str, float]]:
    """Print the table and a line of JSON; return the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=200, help="Batches drawn for each kind of time.")
    parser.add_argument("--batch_size", type=int, default=64, help="Rows, hence strata.")
    parser.add_argument("--length", type=int, default=128, help="Tokens a row.")
    args = parser.parse_args(arguments)
    model = RADDForMaskedDiffusion.from_pretrained(CHECKPOINT)
    tokens = held_out_blocks(AutoTokenizer.from_pretrained(CHECKPOINT)).flatten()
    blocks = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    if len(blocks) < args.batch_size:
        raise ValueError(f"`batch_size` must be at most {len(blocks)}, the rows of the text, got {args.batch_size}.")
    ids = blocks[: args.batch_size]
    report(f"{args.draws} draws of a batch of {args.batch_size} x {args.length} tokens; nats per sequence")
    report(f"{'':<11} {'mean':>8} {'var uniform':>12} {'var stratified':>15} {'ratio':>7} {'predicted':>10}")
    figures = {}
    for corruption_of in CORRUPTIONS:
        uniform, strata = draw_losses(model, ids, corruption_of, "uniform", args.draws)
        stratified, _ = draw_losses(model, ids, corruption_of, "stratified", args.draws)
        for name in CORRUPTIONS[corruption_of]:
            one, other = (float(losses[name].mean(1).var()) for losses in (uniform, stratified))
            predicted = predicted_ratio(uniform[name], strata)
            figures[name] = {"uniform": one, "stratified": other, "ratio": other / one, "predicted": predicted}
            mean = float(stratified[name].mean())
            report(f"{name:<11} {mean:>8.1f} {one:>12.2f} {other:>15.2f} {other / one:>7.3f} {predicted:>10.3f}")
    report(json.dumps({name: figures[name] for name in LOSS_TYPES}))
    return figures


if __name__ == "__main__":
    main()
