"""Show what the shipped checkpoint does: infilling, a continuation, a sample from nothing, held-out likelihood.

python examples/demo.py
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

import radd_hf
from radd_hf.data import pack_blocks

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoints" / "radd-demo"
HELD_OUT = HERE / "data" / "held_out.txt"
UNIGRAM_COUNTS = HERE / "data" / "unigram_counts.json"  # tokens of the checkpoint's training text
BLOCK_SIZE = 128


def held_out_blocks(tokenizer, block_size: int = BLOCK_SIZE) -> torch.LongTensor:
    """The bundled held-out text in blocks (number, block_size)."""
    lines = HELD_OUT.read_text(encoding="utf-8").splitlines(keepends=True)
    ids = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]  # lines may be long
    return pack_blocks([[i for line in ids for i in line]], block_size)


def unigram_nll(blocks: torch.LongTensor, counts: list[int]) -> float:
    """Cross-entropy of `blocks` under the training text's token `counts` (add-one), nats per token."""
    frequency = torch.tensor(counts, dtype=torch.float64) + 1
    return float(-(frequency / frequency.sum()).log()[blocks.flatten()].mean())


def mask_words(tokenizer, text: str, words: list[str]) -> str:
    """`text` with each of `words` replaced by as many mask tokens as the word has pieces."""
    for word in words:
        pieces = len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"])
        text = text.replace(f" {word}", f" {tokenizer.mask_token}" * pieces, 1)
    return text


def infill(pipe, title: str, seed: int, sampler: dict, **kwargs):
    """One call of the pipeline, shown with its cost."""
    start = time.perf_counter()
    result = pipe(**kwargs, **sampler, seed=seed, num_return_sequences=2)
    seconds = time.perf_counter() - start
    options = ", ".join(f"{name}={value!r}" for name, value in sampler.items())
    print(f"\n== {title}; {options}  [NFE {[r['nfe'] for r in result]}, {seconds:.2f} s]")
    for candidate in result:
        print(f"   ({candidate['score']:+.2f}) {candidate['text']!r}")
        print(f"           filled: {candidate['infills']}")


def main():
    """Load, infill, sample, score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(CHECKPOINT), help="a folder or a Hub name")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForMaskedLM.from_pretrained(args.model)
    pipe = pipeline("radd-infilling", model=model, tokenizer=tokenizer)
    size = sum(p.numel() for p in model.parameters())
    print(f"radd_hf {radd_hf.__version__}: {size:,} parameters, {len(tokenizer)} tokens, on {model.device}")

    print("\nThe number in brackets is the mean log-probability of the filled tokens, in nats.")
    sure, exact = {"algorithm": "confidence", "temperature": 0.7}, {"algorithm": "any_order", "order": "random"}
    text = "And the LORD said unto Moses, Go unto Pharaoh, and say unto him, Thus saith the LORD"
    masked = mask_words(tokenizer, text, ["said", "unto", "saith"])
    ends = {"prefix": "I hope the Congress will", "suffix": " the people of the United States.", "length": 8}
    infill(pipe, "single words masked", args.seed, sure, inputs=masked)
    infill(pipe, "both ends fixed", args.seed, sure, **ends)
    infill(pipe, "both ends fixed", args.seed, exact, **ends)
    infill(pipe, "a continuation", args.seed, sure, prefix="She was not at all", suffix="", length=24)

    start = time.perf_counter()
    sample = model.diffusion_generate(
        batch_size=1, max_length=BLOCK_SIZE, num_steps=64, seed=args.seed, return_dict_in_generate=True
    )
    seconds = time.perf_counter() - start
    expected = radd_hf.expected_nfe(64, BLOCK_SIZE)
    print(f"\n== from nothing, 64 steps  [NFE {sample.nfe.tolist()}, expected {expected:.1f}, {seconds:.2f} s]")
    print(f"   {tokenizer.decode(sample.sequences[0])!r}")

    blocks = held_out_blocks(tokenizer)
    start = time.perf_counter()
    estimate = radd_hf.estimate_likelihood(model, blocks, num_samples=8, seed=args.seed)
    seconds = time.perf_counter() - start
    unigram = unigram_nll(blocks, json.loads(UNIGRAM_COUNTS.read_text(encoding="utf-8")))
    print(f"\n== held-out text, {blocks.numel():,} tokens  [NFE {estimate.nfe} a block, {seconds:.1f} s]")
    print(f"   NLL bound  {estimate.nll_per_token:.3f} +- {estimate.nll_per_token_standard_error:.3f} nats per token")
    print(f"   unigram    {unigram:.3f} nats per token; uniform {torch.log(torch.tensor(len(tokenizer) - 1.0)):.3f}")


if __name__ == "__main__":
    main()
