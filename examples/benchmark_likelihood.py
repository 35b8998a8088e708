"""CPU time until the bound of a text is known to 1 %: `estimate_likelihood` against dense logits and uniform draws.

    python examples/benchmark_likelihood.py --blocks 16 --num_samples 129

The time is the product of two factors, both printed: CPU seconds a network row, at GPT-2-small shape (12 x 768, its
vocabulary) and L = 256, random weights; and rows times variance of the mean, on held-out blocks of the shipped
checkpoint (L = 128). The baselines draw lambda (or k) uniformly and independently, mask, run log_softmax over the
vocabulary at every position and gather, as the paper's code evaluates. Both sides run in one process, in turn.
"""

import argparse
import importlib.util
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from radd_hf import RADDConfig, RADDForMaskedDiffusion, estimate_likelihood
from radd_hf.forward_process import draw_unit, mask_exactly, mask_tokens
from radd_hf.likelihood import RowRequest, SequenceBound, run_rows
from radd_hf.losses import ao_loss, lambda_dce_loss

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoints" / "radd-demo"
TIMED_LENGTH, TIMED_BATCH = 256, 4


def demo_blocks(count: int) -> torch.LongTensor:
    """Held-out blocks (count, 128), evenly spread."""
    spec = importlib.util.spec_from_file_location("demo", HERE / "demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    blocks = demo.held_out_blocks(AutoTokenizer.from_pretrained(CHECKPOINT))
    return blocks[torch.linspace(0, len(blocks) - 1, count).long()]


@torch.no_grad()
def dense_losses(
    model: RADDForMaskedDiffusion, ids: torch.LongTensor, loss_type: str, generator: torch.Generator
) -> torch.Tensor:
    """One uniform draw for each row of `ids` (B, L), log_softmax everywhere: the losses (B,), nats."""
    unit, length = draw_unit(len(ids), "uniform", generator), ids.shape[1]
    if loss_type == "ao":
        num_masked = torch.ceil(unit * length).long()
        noisy, masked = mask_exactly(ids, num_masked, model.config.mask_token_id, generator=generator)
    else:
        noisy, masked = mask_tokens(ids, unit, model.config.mask_token_id, generator=generator)
    log_probs = torch.log_softmax(model(noisy).logits, dim=-1)
    nll = -log_probs.gather(-1, ids[..., None])[..., 0].masked_fill(~masked, 0.0).double().sum(-1)
    if loss_type == "ao":
        return ao_loss(nll, num_masked, torch.tensor(length))
    return lambda_dce_loss(nll, unit)


def seconds_per_row(rows: int) -> tuple[float, float]:
    """CPU seconds a row of the dense form and of ours: `rows` each, in batches in turn after a warm-up."""
    torch.manual_seed(0)
    model = RADDForMaskedDiffusion(RADDConfig(max_position_embeddings=TIMED_LENGTH)).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size - 1, (TIMED_LENGTH,), generator=generator)
    bound = SequenceBound(ids, torch.ones(TIMED_LENGTH, dtype=torch.bool), "ao", None, generator)
    masked = bound.request(rows).hidden
    masked = masked[masked.sum(-1).argsort()]  # as `run_rows` would sort them
    warm_up = torch.arange(TIMED_BATCH)
    seconds = {"dense": 0.0, "ours": 0.0}
    for turn, batch in enumerate([warm_up, *torch.arange(rows).split(TIMED_BATCH)]):
        start = time.process_time()
        dense_losses(model, ids.expand(len(batch), -1), "lambda_dce", generator)
        middle = time.process_time()
        request = RowRequest(ids, masked[batch], masked[batch])
        with torch.no_grad():
            run_rows(model, [request], model.config.mask_token_id, TIMED_BATCH)
        if turn:
            seconds["dense"] += middle - start
            seconds["ours"] += time.process_time() - middle
    return seconds["dense"] / rows, seconds["ours"] / rows


def row_variances(count: int, num_samples: int, plain_draws: int) -> tuple[float, dict[str, float]]:
    """Mean squared NLL of the blocks, and by method rows times variance of the mean, averaged over blocks; nats^2."""
    model = RADDForMaskedDiffusion.from_pretrained(CHECKPOINT).eval()
    blocks = demo_blocks(count)
    generator = torch.Generator().manual_seed(0)
    variances = {}
    for loss_type in ("lambda_dce", "ao"):
        draws = [
            torch.cat(
                [dense_losses(model, part, loss_type, generator) for part in row.expand(plain_draws, -1).split(64)]
            )
            for row in blocks
        ]
        variances[f"{loss_type}, uniform"] = float(torch.stack(draws).var(-1).mean())
    found = estimate_likelihood(model, blocks, num_samples=num_samples, seed=0)
    variances["estimate_likelihood"] = float(num_samples * found.standard_error.square().mean())
    return float(found.nll.square().mean()), variances


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print the table; CPU seconds to 1 % by method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=16, help="held-out blocks for the variance")
    parser.add_argument("--num_samples", type=int, default=129, help="network rows a block of estimate_likelihood")
    parser.add_argument("--plain_draws", type=int, default=256, help="uniform draws a block and baseline")
    parser.add_argument("--timed_rows", type=int, default=16, help="rows timed on each side")
    args = parser.parse_args(arguments)
    dense, ours = seconds_per_row(args.timed_rows)
    square, variances = row_variances(args.blocks, args.num_samples, args.plain_draws)
    print(f"{torch.get_num_threads()} threads; {args.blocks} blocks, {args.num_samples} rows a block")
    print(f"{'':<22} {'s / row':>8} {'variance x rows':>16} {'rows to 1 %':>12} {'CPU s to 1 %':>13} {'ratio':>7}")
    costs = {}
    for name, variance in variances.items():
        seconds = ours if name == "estimate_likelihood" else dense
        rows = variance / (1e-4 * square)
        costs[name] = seconds * rows
        ratio = costs["lambda_dce, uniform"] / costs[name]
        print(f"{name:<22} {seconds:>8.3f} {variance:>16.1f} {rows:>12.1f} {costs[name]:>13.1f} {ratio:>7.1f}")
    return costs


if __name__ == "__main__":
    main()
