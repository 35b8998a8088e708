"""Train a RADD model on a text file, from scratch or from a checkpoint.

    python examples/train.py --train_file examples/data/moby_dick.txt --validation_file held_out.txt \
        --output_dir runs/train --max_steps 2000 --learning_rate 2e-3 --loss_type ao

The paper's recipe: --loss_type lambda_dce --loss_reduction sequence_sum --learning_rate 3e-4 --warmup_steps 2500
--lr_scheduler_type constant_with_warmup --max_grad_norm 1 --weight_decay 0.03 --ema_decay 0.9999, at a global batch of
512 blocks of 1,024 tokens. A small network leaves the unigram plateau sooner with --curriculum_steps. Resume an
interrupted run with --resume_from_checkpoint FOLDER.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer, HfArgumentParser, set_seed

from radd_hf import RADDConfig, RADDForMaskedDiffusion, RADDTrainer, RADDTrainingArguments
from radd_hf.data import BlockDataset, bpe_tokenizer, character_tokenizer, pack_blocks
from radd_hf.forward_process import mask_exactly


@dataclass
class ScriptArguments:
    """What to train on and which network."""

    train_file: str = field(metadata={"help": "A UTF-8 text file."})
    validation_file: str | None = field(default=None, metadata={"help": "Scored at the end and at --eval_steps."})
    model_name_or_path: str | None = field(default=None, metadata={"help": "Start from this checkpoint."})
    tokenizer: str = field(default="bpe", metadata={"help": "'bpe' or 'characters' (built here), a name or a folder."})
    vocab_size: int = field(default=1024, metadata={"help": "Tokens of a BPE built here."})
    block_size: int = field(default=128, metadata={"help": "Tokens a training sequence."})
    hidden_size: int = field(default=192, metadata={"help": "Width of a new network."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Blocks of a new network."})
    num_attention_heads: int = field(default=6, metadata={"help": "Heads of a new network."})
    hidden_dropout: float = field(default=0.0, metadata={"help": "Dropout of a new network."})
    initializer_range: float = field(default=0.06, metadata={"help": "Initial scale of a new network."})
    curriculum_steps: int = field(
        default=0, metadata={"help": "Steps over which the share of tokens that may be masked grows from 15 % to all."}
    )


class CurriculumTrainer(RADDTrainer):
    """
    `RADDTrainer` that first keeps some tokens as context.

    In step n of the first N a random subset of a block, 0.15 + 0.85 n / N of it, may be masked; the rest is context,
    which leaves the loss the exact bound on that subset given the rest.
    """

    def __init__(self, *args, curriculum_steps: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.curriculum_steps = curriculum_steps

    def _loss_terms(self, model, inputs, loss_type, generator):
        share = 0.15 + 0.85 * self.state.global_step / self.curriculum_steps if self.curriculum_steps else 1.0
        if model.training and share < 1:
            ids = inputs["input_ids"]
            count = torch.full((len(ids),), max(1, round(share * ids.shape[1])))
            _, chosen = mask_exactly(ids, count, mask_token_id=0, generator=generator)
            inputs = {**inputs, "loss_mask": chosen}
        return super()._loss_terms(model, inputs, loss_type, generator)


def load_tokenizer(script: ScriptArguments, source: str | None, text: str):
    """The tokenizer of the checkpoint `source`, or the one that `--tokenizer` names."""
    if source is not None:
        return AutoTokenizer.from_pretrained(source)
    if script.tokenizer == "characters":
        return character_tokenizer(text)
    if script.tokenizer == "bpe":
        return bpe_tokenizer(text.splitlines(keepends=True), script.vocab_size)
    return AutoTokenizer.from_pretrained(script.tokenizer)


def load_model(script: ScriptArguments, resumed: str | None, tokenizer) -> RADDForMaskedDiffusion:
    """A network of the sizes of the run to resume, the checkpoint to start from, or a new one for the tokenizer."""
    if resumed is not None:
        return RADDForMaskedDiffusion(RADDConfig.from_pretrained(resumed))  # the trainer loads its weights
    if script.model_name_or_path is not None:
        return RADDForMaskedDiffusion.from_pretrained(script.model_name_or_path)
    if tokenizer.mask_token_id is None:
        raise ValueError(f"`tokenizer` must have a mask token, got none in {script.tokenizer!r}.")
    config = RADDConfig(
        vocab_size=len(tokenizer),
        mask_token_id=tokenizer.mask_token_id,
        hidden_size=script.hidden_size,
        num_hidden_layers=script.num_hidden_layers,
        num_attention_heads=script.num_attention_heads,
        max_position_embeddings=script.block_size,
        hidden_dropout=script.hidden_dropout,
        initializer_range=script.initializer_range,
    )
    return RADDForMaskedDiffusion(config)


def text_blocks(tokenizer, text: str, block_size: int) -> torch.LongTensor:
    """One document cut into blocks (number, block_size), tokenized line by line."""
    lines = text.splitlines(keepends=True)
    # a special token that the text spells is text
    ids = tokenizer(lines, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return pack_blocks([[i for line in ids for i in line]], block_size, tokenizer.eos_token_id)


def main(arguments: list[str]):
    """Parse, train, evaluate, save."""
    script, args = HfArgumentParser((ScriptArguments, RADDTrainingArguments)).parse_args_into_dataclasses(arguments)
    set_seed(args.seed)
    text = Path(script.train_file).read_text(encoding="utf-8")
    if not text:
        raise ValueError(f"`train_file` must not be empty, got {script.train_file!r}.")
    tokenizer = load_tokenizer(script, args.resume_from_checkpoint or script.model_name_or_path, text)
    tokenizer.model_max_length = script.block_size
    train = BlockDataset(text_blocks(tokenizer, text, script.block_size))
    validation = None
    if script.validation_file is not None:
        held_out = Path(script.validation_file).read_text(encoding="utf-8")
        validation = BlockDataset(text_blocks(tokenizer, held_out, script.block_size))
    trainer = CurriculumTrainer(
        load_model(script, args.resume_from_checkpoint, tokenizer),
        args,
        curriculum_steps=script.curriculum_steps,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if validation is not None:
        trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model(args.output_dir)
    print(f"saved to {args.output_dir}")


if __name__ == "__main__":
    main(sys.argv[1:])
