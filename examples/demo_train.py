"""Train a tiny character-level model on Moby Dick for about three minutes and watch the NLL fall.

    python examples/demo_train.py --output_dir runs/demo_train

Any `RADDTrainingArguments` option may follow, for example `--loss_type dse --max_steps 1000`.
"""

import re
import sys
import time
from pathlib import Path

import torch
from transformers import HfArgumentParser, set_seed

from radd_hf import RADDConfig, RADDForMaskedDiffusion, RADDTrainer, RADDTrainingArguments, estimate_likelihood
from radd_hf.data import BlockDataset, character_tokenizer, pack_blocks

NOVEL = Path(__file__).parent / "data" / "moby_dick.txt"
BLOCK_SIZE = 32
HELD_OUT_CHARACTERS = 60_000
# What three minutes on two CPU cores allow: "ao" has the least variance, and no average, since the run is so short.
DEFAULTS = {
    "output_dir": "runs/demo_train",
    "loss_type": "ao",
    "learning_rate": "1e-2",
    "lr_scheduler_type": "cosine",
    "warmup_steps": "10",
    "adam_beta2": "0.98",
    "per_device_train_batch_size": "64",
    "max_steps": "4000",
    "logging_steps": "100",
    "ema_decay": "0",
    "save_strategy": "no",
    "report_to": "none",
}


def novel() -> str:
    """The text with its line breaks inside paragraphs turned into spaces."""
    paragraphs = re.split(r"\n\s*\n", NOVEL.read_text(encoding="utf-8"))
    return "\n".join(" ".join(p.split()) for p in paragraphs if p.strip())


def character_blocks(block_size: int = BLOCK_SIZE):
    """The tokenizer, training blocks and held-out blocks (the end of the book), each (number, block_size)."""
    text = novel()
    tokenizer = character_tokenizer(text)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    train, held_out = ids[:-HELD_OUT_CHARACTERS], ids[-HELD_OUT_CHARACTERS:]
    return tokenizer, pack_blocks([train], block_size), pack_blocks([held_out], block_size)


def unigram_nll(train: torch.LongTensor, held_out: torch.LongTensor, vocab_size: int) -> float:
    """Cross-entropy of `held_out` under the character frequencies of `train` (add-one), nats per character."""
    counts = torch.bincount(train.flatten(), minlength=vocab_size).double() + 1
    return float(-(counts / counts.sum()).log()[held_out.flatten()].mean())


def build_model(vocab_size: int, mask_token_id: int) -> RADDForMaskedDiffusion:
    """Two blocks of width 64: small and short enough to leave the unigram plateau within seconds."""
    config = RADDConfig(
        vocab_size=vocab_size,
        mask_token_id=mask_token_id,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=BLOCK_SIZE,
        hidden_dropout=0.0,
        initializer_range=0.1,
    )
    return RADDForMaskedDiffusion(config)


def held_out_nll(model: RADDForMaskedDiffusion, held_out: torch.LongTensor, count: int = 100):
    """Likelihood estimate of `count` blocks spread over the held-out text."""
    chosen = held_out[torch.linspace(0, len(held_out) - 1, min(count, len(held_out))).long()]
    return estimate_likelihood(model.eval(), chosen.to(model.device), num_samples=16, seed=0)


def main(arguments: list[str]):
    """Parse, train, report, sample."""
    defaults = [word for name, value in DEFAULTS.items() for word in (f"--{name}", value)]
    (args,) = HfArgumentParser(RADDTrainingArguments).parse_args_into_dataclasses([*defaults, *arguments])
    set_seed(args.seed)
    tokenizer, train, held_out = character_blocks()
    model = build_model(len(tokenizer), tokenizer.mask_token_id)
    unigram = unigram_nll(train, held_out, len(tokenizer))
    print(f"{train.numel():,} characters to train on, {held_out.numel():,} held out, {len(tokenizer)} tokens")
    print(f"held-out unigram cross-entropy: {unigram:.3f} nats per character")
    start = time.perf_counter()
    trainer = RADDTrainer(model, args, train_dataset=BlockDataset(train), processing_class=tokenizer)
    trainer.train()
    seconds = time.perf_counter() - start
    estimate = held_out_nll(model, held_out)
    print(
        f"after {trainer.state.global_step} steps in {seconds:.0f} s: held-out NLL {estimate.nll_per_token:.3f} "
        f"+- {estimate.nll_per_token_standard_error:.3f} nats per character "
        f"(unigram {unigram:.3f}; perplexity {estimate.perplexity:.2f})"
    )
    sample = model.diffusion_generate(batch_size=1, max_length=BLOCK_SIZE, seed=args.seed)
    print("a sample:", repr(tokenizer.decode(sample[0])))
    trainer.save_model(args.output_dir)
    print(f"saved to {args.output_dir}")


if __name__ == "__main__":
    main(sys.argv[1:])
