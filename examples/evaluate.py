"""Perplexity of a data set: the paper's zero-shot protocol, or any local text, by a diffusion or a causal model.

    python examples/evaluate.py --data text --path examples/data/held_out.txt --block_size 128 --num_samples 8
    python examples/evaluate.py --model HUB_NAME --data lambada wikitext2 ptb wikitext103 lm1b --output table1.json
    torchrun --nproc_per_node 2 examples/evaluate.py ...       (or accelerate launch; the same numbers)

The control row of the tables is --causal with a causal model (gpt2), in fixed blocks or with --stride. --path reads
local files instead of the Hub, one a data set (.jsonl or one row a line). The JSON holds every argument, the model's
revision and the versions; --repeat FILE runs it again.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import radd_hf  # noqa: F401  registers the Auto classes
from radd_hf.configuration_radd import LOSS_TYPES
from radd_hf.evaluation import EXACT_ORDERS
from radd_hf.perplexity import PerplexityReport, causal_perplexity, dataset_perplexity
from radd_hf.zero_shot import BLOCK_SIZE, ZERO_SHOT_SETS, build_blocks

CHECKPOINT = Path(__file__).parent / "checkpoints" / "radd-demo"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments, or those of --repeat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(CHECKPOINT), help="a folder or a Hub name")
    parser.add_argument("--revision", help="branch, tag or commit of the model on the Hub")
    parser.add_argument("--data", nargs="+", default=["text"], choices=list(ZERO_SHOT_SETS))
    parser.add_argument("--path", nargs="+", help="a local file for each data set")
    parser.add_argument("--loss_type", default="ao", choices=[*LOSS_TYPES, *EXACT_ORDERS])
    parser.add_argument("--num_samples", type=int, default=128, help="network rows a block")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=64, help="rows in one network call")
    parser.add_argument("--block_size", type=int, help=f"default: {BLOCK_SIZE}, or the model's context if shorter")
    parser.add_argument("--max_blocks", type=int, help="only so many blocks, the first ones")
    parser.add_argument("--last_block", default="drop", choices=["drop", "pad"])
    parser.add_argument("--packing", default="concatenated", choices=["concatenated", "original"])
    parser.add_argument("--original_split", action="store_true", help="wikitext2: train, as the paper's code reads")
    parser.add_argument("--causal", action="store_true", help="the control row: a causal language model")
    parser.add_argument("--stride", type=int, help="of a causal model's sliding window; without it fixed blocks")
    parser.add_argument("--bos", action="store_true", help="a causal model sees EOS first and scores every token")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", help="cpu, cuda; default: what accelerate finds")
    parser.add_argument("--output", help="a JSON file")
    parser.add_argument("--repeat", help="the JSON file of a run: its arguments, but this --output")
    args = parser.parse_args(arguments)
    if args.repeat is not None:
        saved = json.loads(Path(args.repeat).read_text(encoding="utf-8"))["arguments"]
        args = argparse.Namespace(**{**saved, "output": args.output})
    if args.path is not None and len(args.path) != len(args.data):
        parser.error(f"--path must name one file a data set, {len(args.data)}, got {len(args.path)}")
    return args


def score(args: argparse.Namespace, model, tokenizer, name: str, path: str | None) -> PerplexityReport:
    """One data set."""
    options = {"last_block": args.last_block, "packing": args.packing, "original_split": args.original_split}
    context = getattr(model.config, "max_position_embeddings", None) or BLOCK_SIZE
    block_size = args.block_size or min(BLOCK_SIZE, context)
    if block_size > context and args.stride is None:
        raise ValueError(f"`block_size` must fit the model's max_position_embeddings={context}, got {block_size}.")
    blocks = build_blocks(name, tokenizer, path=path, block_size=block_size, **options)
    blocks = blocks.first(args.max_blocks, tokenizer) if args.max_blocks else blocks
    counts = {"num_bytes": blocks.num_bytes, "num_words": blocks.num_words, "settings": blocks.settings}
    if args.causal:
        bos = tokenizer.eos_token_id if args.bos else None
        options = {"stride": args.stride, "bos_token_id": bos, "batch_size": args.batch_size}
        return causal_perplexity(model, blocks.sequences(), **options, **counts)
    options = {"loss_type": args.loss_type, "num_samples": args.num_samples, "batch_size": args.batch_size}
    return dataset_perplexity(model, blocks.sequences(), **options, seed=args.seed, **counts)


def show(name: str, report: PerplexityReport):
    """A few lines of what the JSON holds in full."""
    low, high = report.confidence_interval
    print(f"== {name}: {report.num_sequences} sequences, {report.num_tokens:,} tokens, {report.num_bytes:,} bytes")
    print(
        f"   nats per token  {report.nll_per_token:.4f} +- {report.monte_carlo_error:.4f} (draws); 95 % over texts "
        f"[{low:.4f}, {high:.4f}]"
    )
    print(
        f"   perplexity {report.perplexity:.2f} per token, {report.word_perplexity:.2f} per word; bits "
        f"{report.bits_per_token:.4f} per token, {report.bits_per_byte:.4f} per byte"
    )
    settings = report.settings
    print(f"   {settings['source']}, split {settings['split']}, detokenized: {settings['detokenize']}, ", end="")
    print(f"blocks of {settings['block_size']}, {settings['packing']}, last block: {settings['last_block']}")
    print(f"   {report.nfe:.1f} network rows a sequence, {report.seconds:.1f} s")


def main(arguments: list[str] | None = None) -> dict[str, PerplexityReport]:
    """Score, print, write."""
    args = parse(arguments)
    state = PartialState(cpu=args.device == "cpu")
    device = torch.device(args.device) if args.device else state.device
    tokenizer = AutoTokenizer.from_pretrained(args.model, revision=args.revision)
    loader = AutoModelForCausalLM if args.causal else AutoModelForMaskedLM
    model = loader.from_pretrained(args.model, revision=args.revision, dtype=getattr(torch, args.dtype)).to(device)
    reports = {}
    for name, path in zip(args.data, args.path or [None] * len(args.data), strict=True):
        reports[name] = score(args, model.eval(), tokenizer, name, path)
        if state.is_main_process:
            show(name, reports[name])
    if args.output is not None and state.is_main_process:
        result = {"arguments": vars(args), "results": {name: report.to_dict() for name, report in reports.items()}}
        draft = Path(f"{args.output}.part")
        draft.write_text(json.dumps(result, indent=2), encoding="utf-8")
        os.replace(draft, args.output)
    return reports


if __name__ == "__main__":
    main()
