"""Samples over step counts: perplexity under a judge and entropy against NFE and seconds (the paper's figure).

    python examples/evaluate_generation.py --judge JUDGE --steps 8 16 32 64 --num_samples 32 --output samples

From a checkpoint to a table, samples.json (which --repeat runs again) and samples.png. The judge is any causal
model, a folder or a Hub name; the paper's is gpt2-large (the default), and only its figures compare with the paper's.
"""

import argparse
import json
import os
import time
from pathlib import Path

import matplotlib
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import radd_hf  # noqa: F401  registers the Auto classes
from radd_hf.metrics import DEFAULT_JUDGE, GenerationReport, generation_report
from radd_hf.perplexity import run_settings

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  after the choice of a backend without a screen

CHECKPOINT = Path(__file__).parent / "checkpoints" / "radd-demo"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments, or those of --repeat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(CHECKPOINT), help="a folder or a Hub name")
    parser.add_argument("--judge", default=DEFAULT_JUDGE, help="a causal language model, a folder or a Hub name")
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--num_samples", type=int, default=32)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--max_length", type=int, help="tokens a sample; default: the model's context")
    parser.add_argument("--algorithm", default="tweedie")
    parser.add_argument("--sampling_dtype", default="float64", choices=["float64", "float32"])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", default="generation", help="path of the JSON and the PNG, without their endings")
    parser.add_argument("--repeat", help="the JSON file of a run: its arguments, but this --output")
    args = parser.parse_args(arguments)
    if args.repeat is not None:
        saved = json.loads(Path(args.repeat).read_text(encoding="utf-8"))["arguments"]
        args = argparse.Namespace(**{**saved, "output": args.output})
    return args


def sample(model, args: argparse.Namespace, num_steps: int) -> tuple[torch.LongTensor, float, float, dict]:
    """Sequences (n, L), their mean NFE, seconds a sample, and the generation options in full."""
    length = args.max_length or model.config.max_position_embeddings
    options = {"algorithm": args.algorithm, "num_steps": num_steps, "sampling_dtype": args.sampling_dtype}
    options |= {"temperature": args.temperature, "top_p": args.top_p, "max_length": length}
    sequences, nfe, start = [], [], time.perf_counter()
    for first in range(0, args.num_samples, args.batch_size):
        size = min(args.batch_size, args.num_samples - first)
        seeds = [args.seed * 1_000_003 + first + i for i in range(size)]
        output = model.diffusion_generate(batch_size=size, seed=seeds, return_dict_in_generate=True, **options)
        sequences.append(output.sequences.cpu())
        nfe += output.nfe.tolist()
    seconds = (time.perf_counter() - start) / args.num_samples
    return torch.cat(sequences), sum(nfe) / len(nfe), seconds, {**model.generation_config.to_dict(), **options}


def draw(reports: list[GenerationReport], steps: list[int], path: str):
    """Perplexity and entropy against network calls and against seconds."""
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharey="row")
    for column, (name, cost) in enumerate(
        (("network calls a sample", [r.nfe for r in reports]), ("seconds a sample", [r.seconds for r in reports]))
    ):
        quality = [r.perplexity.mean_of_samples for r in reports]
        errors = [r.perplexity.standard_error for r in reports]
        axes[0, column].errorbar(cost, quality, yerr=errors, marker="o")
        axes[1, column].plot(cost, [r.entropy for r in reports], marker="o", color="tab:green")
        axes[1, column].set(xscale="log", xlabel=name)
        axes[0, column].set(xscale="log")
        for row in axes[:, column]:  # a tick a point: a logarithmic axis labels too many of its own
            row.minorticks_off()
            row.set_xticks(cost, [f"{x:.2g}" for x in cost])
        for x, y, n in zip(cost, quality, steps, strict=True):
            axes[0, column].annotate(str(n), (x, y), textcoords="offset points", xytext=(4, 4))
    axes[0, 0].set_ylabel(f"perplexity under {Path(reports[0].perplexity.judge).name}")
    axes[1, 0].set_ylabel("unigram entropy, nats")
    figure.suptitle(f"draws in {reports[0].sampling_dtype}; figures at the points: steps")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> list[GenerationReport]:
    """Sample, judge, print, write."""
    args = parse(arguments)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForMaskedLM.from_pretrained(args.model).to(args.device).eval()
    judge = AutoModelForCausalLM.from_pretrained(args.judge).to(args.device).eval()
    judge_tokenizer = AutoTokenizer.from_pretrained(args.judge)
    print(f"judge {args.judge}; draws in {args.sampling_dtype}; {args.num_samples} samples a row")
    print(
        f"{'steps':>6} {'NFE':>7} {'s':>7} {'PPL (mean)':>11} {'s.e.':>7} {'PPL (token)':>12} {'entropy':>8} "
        f"{'distinct-2':>11} {'repeat-4':>9}"
    )
    reports, options = [], []
    for steps in args.steps:
        sequences, nfe, seconds, option = sample(model, args, steps)
        texts = tokenizer.batch_decode(sequences, skip_special_tokens=True)
        costs = {"nfe": nfe, "sampling_dtype": args.sampling_dtype, "seconds": seconds}
        report = generation_report(sequences.tolist(), texts, judge, judge_tokenizer, **costs)
        found = report.perplexity
        print(
            f"{steps:>6} {nfe:>7.1f} {seconds:>7.2f} {found.mean_of_samples:>11.1f} {found.standard_error:>7.1f} "
            f"{found.token_level:>12.1f} {report.entropy:>8.3f} {report.distinct_2:>11.3f} "
            f"{report.repetition_4:>9.3f}",
            flush=True,
        )
        reports.append(report)
        options.append(option)
    rows = [
        {"steps": steps, "generation_config": option, **report.to_dict()}
        for steps, option, report in zip(args.steps, options, reports, strict=True)
    ]
    result = {"arguments": vars(args), "settings": run_settings(model), "results": rows}
    draft = Path(f"{args.output}.json.part")
    draft.write_text(json.dumps(result, indent=2), encoding="utf-8")
    os.replace(draft, f"{args.output}.json")
    draw(reports, args.steps, f"{args.output}.png")
    print(f"saved {args.output}.json and {args.output}.png")
    return reports


if __name__ == "__main__":
    main()
