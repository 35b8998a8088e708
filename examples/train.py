"""Train a RADD model, from scratch or from a checkpoint, on text files or a data set of the `datasets` library.

    python examples/train.py --train_file examples/data/moby_dick.txt --validation_file held_out.txt \
        --output_dir runs/train --max_steps 2000 --learning_rate 2e-3 --loss_type ao

The paper's recipe is one flag away (`--recipe paper`; RECIPES lists what it sets, and any flag given wins over it):

    torchrun --nproc_per_node 8 examples/train.py --recipe paper --size small --bf16 --dataset_name NAME --streaming \
        --output_dir runs/small

Fine-tune on JSON lines with `prompt` and `completion`, the prompt being context that is never masked:

    python examples/train.py --model_name_or_path FOLDER --train_file pairs.jsonl --num_train_epochs 3 \
        --output_dir runs/tuned

A small network leaves the unigram plateau sooner with --curriculum_steps. Resume an interrupted run with
--resume_from_checkpoint FOLDER. The output folder gets the averaged weights, a model card and training_curve.png.
"""

import shlex
import sys
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoTokenizer, HfArgumentParser, set_seed

from radd_hf import RADDConfig, RADDForMaskedDiffusion, RADDTrainer, RADDTrainingArguments
from radd_hf.corpora import (
    DOCUMENT_UNITS,
    DatasetTexts,
    PackedStream,
    TextFiles,
    load_dataset_texts,
    pack_to_disk,
    prompt_completion_examples,
    read_json_lines,
)
from radd_hf.data import (
    BlockDataset,
    MaskedDiffusionCollator,
    add_mask_token,
    bpe_tokenizer,
    character_tokenizer,
    check_tokenizer,
    stack_blocks,
)
from radd_hf.forward_process import mask_exactly
from radd_hf.logging_callbacks import SampleCallback, plot_training_curve
from radd_hf.model_card import write_training_card

TOKENIZER_TEXTS = 100_000  # pieces of text a new tokenizer is built from: a stream may have no end

# The paper's appendix E and its code base. Its released configuration decays no weight at all, its text says 0.03.
# The precision is not in it (--fp16 in the paper, or --bf16): it depends on the machine.
RECIPES = {
    "paper": {
        "size": "small",
        "tokenizer": "openai-community/gpt2",
        "block_size": 1024,
        "hidden_dropout": 0.02,
        "initializer_range": 0.02,
        "loss_type": "lambda_dce",
        "loss_reduction": "sequence_sum",
        "global_batch_size": 512,
        "max_steps": 400_000,
        "learning_rate": 3e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2500,
        "max_grad_norm": 1.0,
        "weight_decay": 0.03,
        "decay_all_parameters": True,
        "ema_decay": 0.9999,
    },
}
SIZES = {
    name: {key: getattr(config, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    for name, config in (("small", RADDConfig.small()), ("medium", RADDConfig.medium()))
}


@dataclass
class ScriptArguments:
    """What to train on, which network, and what the trainer's own arguments lack."""

    recipe: str | None = field(default=None, metadata={"help": f"Defaults to start from: {list(RECIPES)}."})
    train_file: list[str] | None = field(default=None, metadata={"help": "UTF-8 text, or JSON lines (.jsonl)."})
    validation_file: list[str] | None = field(
        default=None, metadata={"help": "Scored at the end and at --eval_steps."}
    )
    document: str = field(default="file", metadata={"help": f"What a document of a text file is: {DOCUMENT_UNITS}."})
    dataset_name: str | None = field(default=None, metadata={"help": "Name or folder for `datasets`, not a file."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_split: str = field(default="train", metadata={"help": "Its split to train on."})
    validation_split: str | None = field(default=None, metadata={"help": "Its split to evaluate on."})
    validation_blocks: int | None = field(default=None, metadata={"help": "Evaluate on so many blocks at most."})
    text_column: str = field(default="text", metadata={"help": "Column of texts of a data set or JSON lines."})
    streaming: bool = field(default=False, metadata={"help": "Read and pack while training; needs --max_steps."})
    shuffle_buffer: int = field(default=10_000, metadata={"help": "Rows among which a `datasets` stream is shuffled."})
    pack_as_original: bool = field(
        default=False, metadata={"help": "Drop the remainder of every 1,000 documents, as the paper's code does."}
    )
    document_boundaries: bool = field(default=False, metadata={"help": "Tokens see their own document alone."})
    never_mask_tokens: list[str] | None = field(default=None, metadata={"help": "Tokens that are always context."})
    model_name_or_path: str | None = field(default=None, metadata={"help": "Start from this checkpoint."})
    tokenizer: str = field(default="bpe", metadata={"help": "'bpe' or 'characters' (built here), a name or a folder."})
    vocab_size: int = field(default=1024, metadata={"help": "Tokens of a BPE built here."})
    block_size: int = field(default=128, metadata={"help": "Tokens a training sequence."})
    size: str | None = field(default=None, metadata={"help": f"The paper's sizes of a new network: {list(SIZES)}."})
    hidden_size: int = field(default=192, metadata={"help": "Width of a new network."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Blocks of a new network."})
    num_attention_heads: int = field(default=6, metadata={"help": "Heads of a new network."})
    hidden_dropout: float = field(default=0.0, metadata={"help": "Dropout of a new network."})
    initializer_range: float = field(default=0.06, metadata={"help": "Initial scale of a new network."})
    global_batch_size: int | None = field(
        default=None, metadata={"help": "Sequences a step over all processes; sets --gradient_accumulation_steps."}
    )
    decay_all_parameters: bool = field(
        default=False, metadata={"help": "Weight decay on biases and norms too, as in the paper's code."}
    )
    curriculum_steps: int = field(
        default=0,
        metadata={"help": "Steps over which the share of tokens that may be masked grows from 15 %% to all."},
    )
    sample_steps: int = field(default=0, metadata={"help": "Log a sample every so many steps; 0: never."})
    sample_prompt: str | None = field(default=None, metadata={"help": "Text that the samples continue."})

    def __post_init__(self):
        if (self.train_file is None) == (self.dataset_name is None):
            raise ValueError("Exactly one of `train_file` and `dataset_name` must be given.")
        if self.validation_split is not None and self.dataset_name is None:
            raise ValueError("`validation_split` belongs to a `dataset_name`; files have `validation_file`.")


class CurriculumTrainer(RADDTrainer):
    """
    `RADDTrainer` that first keeps some tokens as context.

    In step n of the first N a random subset of a block, 0.15 + 0.85 n / N of it, may be masked; the rest is context,
    which leaves the loss the exact bound on that subset given the rest.
    """

    def __init__(self, *args, curriculum_steps: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.curriculum_steps = curriculum_steps

    def _share(self) -> float:
        """Of a block's tokens, those that may be masked in this step."""
        return 0.15 + 0.85 * self.state.global_step / self.curriculum_steps if self.curriculum_steps else 1.0

    def _num_items(self, inputs):
        items = super()._num_items(inputs)
        # the loss of the subset counts its own tokens
        return items * self._share() if self.model.training and self._share() < 1 else items

    def _loss_terms(self, model, inputs, loss_type, generator):
        share = self._share()
        if model.training and share < 1:
            ids = inputs["input_ids"]
            count = torch.full((len(ids),), max(1, round(share * ids.shape[1])))
            _, chosen = mask_exactly(ids, count, mask_token_id=0, generator=generator)
            inputs = {**inputs, "loss_mask": chosen & inputs["loss_mask"] if "loss_mask" in inputs else chosen}
        return super()._loss_terms(model, inputs, loss_type, generator)


class RecipeTrainer(CurriculumTrainer):
    """A trainer that can decay all weights, as the paper's optimiser does, biases and norms included."""

    def __init__(self, *args, decay_all_parameters: bool = False, **kwargs):
        self.decay_all_parameters = decay_all_parameters
        super().__init__(*args, **kwargs)

    def get_decay_parameter_names(self, model) -> list[str]:
        """Names of the parameters that `weight_decay` acts on."""
        if self.decay_all_parameters:
            return [name for name, _ in model.named_parameters()]
        return super().get_decay_parameter_names(model)


def parse(arguments: list[str]) -> tuple[ScriptArguments, RADDTrainingArguments]:
    """The arguments, over those of `--recipe` and `--size`; a checkpoint's loss goes on unless another is given."""
    parser = HfArgumentParser((ScriptArguments, RADDTrainingArguments))
    script, _ = parser.parse_args_into_dataclasses(arguments)
    defaults = {}
    if script.recipe is not None:
        defaults.update(choose("recipe", script.recipe, RECIPES))
    size = script.size or defaults.get("size")
    if size is not None:
        defaults.update(choose("size", size, SIZES))
    if script.model_name_or_path is not None:
        loss_type = RADDConfig.from_pretrained(script.model_name_or_path).training_loss
        defaults.update({"loss_type": loss_type} if loss_type else {})
    words = [word for name, value in defaults.items() for word in (f"--{name}", str(value))]
    script, args = parser.parse_args_into_dataclasses([*words, *arguments])
    if script.global_batch_size is not None:
        together = args.train_batch_size * args.world_size
        if script.global_batch_size % together:
            raise ValueError(
                f"`global_batch_size` must be a multiple of {together}, the sequences that all processes take at "
                f"once, got {script.global_batch_size}."
            )
        args.gradient_accumulation_steps = script.global_batch_size // together
    return script, args


def choose(name: str, value: str, choices: dict) -> dict:
    """`choices[value]`, or a ValueError that lists them."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {list(choices)}, got {value!r}.")
    return choices[value]


def load_tokenizer(script: ScriptArguments, source: str | None, pieces):
    """The tokenizer of the checkpoint `source`, or the one that `--tokenizer` names, with a mask token."""
    if source is not None:
        return AutoTokenizer.from_pretrained(source)
    texts = (text for text, _ in islice(pieces, TOKENIZER_TEXTS))
    if script.tokenizer == "characters":
        return character_tokenizer(texts)
    if script.tokenizer == "bpe":
        return bpe_tokenizer(texts, script.vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(script.tokenizer)
    add_mask_token(tokenizer)
    return tokenizer


def load_model(script: ScriptArguments, resumed: str | None, tokenizer) -> RADDForMaskedDiffusion:
    """A network of the sizes of the run to resume, the checkpoint to start from, or a new one for the tokenizer."""
    if resumed is not None:
        return RADDForMaskedDiffusion(RADDConfig.from_pretrained(resumed))  # the trainer loads its weights
    if script.model_name_or_path is not None:
        model = RADDForMaskedDiffusion.from_pretrained(script.model_name_or_path)
        check_tokenizer(tokenizer, model.config)
        return model
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


def open_source(script: ScriptArguments, files: list[str] | None, split: str, seed: int):
    """The texts of `files` or of a split of the data set; pairs of prompt and completion as a list of rows."""
    if files is None:
        return load_dataset_texts(
            script.dataset_name,
            script.dataset_config,
            split,
            script.text_column,
            streaming=script.streaming,
            shuffle_buffer=script.shuffle_buffer,
            seed=seed,
        )
    if all(Path(name).suffix == ".jsonl" for name in files):
        rows = [row for name in files for row in read_json_lines(name)]
        if rows and {"prompt", "completion"} <= set(rows[0]):
            return rows
        return DatasetTexts(rows, script.text_column)
    return TextFiles(files, script.document)


def training_pieces(source):
    """The texts of a source, for a tokenizer to be built from."""
    return source if not isinstance(source, list) else ((row["prompt"] + row["completion"], True) for row in source)


def training_data(script: ScriptArguments, source, tokenizer):
    """Blocks of the source, in memory (files), memory-mapped (`datasets`) or streamed; or the examples of pairs."""
    if isinstance(source, list):
        return prompt_completion_examples(source, tokenizer, script.block_size)
    stream = PackedStream(source, tokenizer, script.block_size, as_original=script.pack_as_original)
    if script.streaming:
        return stream
    if script.dataset_name is not None:
        return pack_to_disk(stream)
    return BlockDataset(stack_blocks((row["input_ids"] for row in stream), script.block_size))


def validation_data(script: ScriptArguments, tokenizer, seed: int):
    """At most `validation_blocks` blocks or pairs to evaluate on, in memory; `None` where none are asked for."""
    if script.validation_file is None and script.validation_split is None:
        return None
    source = open_source(script, script.validation_file, script.validation_split, seed)
    if isinstance(source, list):
        return prompt_completion_examples(source[: script.validation_blocks], tokenizer, script.block_size)
    stream = PackedStream(source, tokenizer, script.block_size, as_original=script.pack_as_original)
    blocks = (row["input_ids"] for row in islice(stream, script.validation_blocks))
    return BlockDataset(stack_blocks(blocks, script.block_size))


def build_collator(script: ScriptArguments, tokenizer) -> MaskedDiffusionCollator:
    """Padding, document boundaries, and the tokens that are never masked."""
    never = tokenizer.convert_tokens_to_ids(script.never_mask_tokens or [])
    unknown = [
        t for t, i in zip(script.never_mask_tokens or [], never, strict=True) if i in (None, tokenizer.unk_token_id)
    ]
    if unknown:
        raise ValueError(f"`never_mask_tokens` must be tokens of the vocabulary, got {unknown}.")
    pad = tokenizer.pad_token_id or 0
    return MaskedDiffusionCollator(pad, never, tokenizer.eos_token_id if script.document_boundaries else None)


def report(trainer: RecipeTrainer, script: ScriptArguments, arguments: list[str]):
    """The model card and the curve, beside the saved weights."""
    folder = Path(trainer.args.output_dir)
    data = ", ".join(f"`{Path(name).name}`" for name in script.train_file or [script.dataset_name])
    write_training_card(
        trainer,
        folder,
        data=f"{data}, in sequences of at most {script.block_size} tokens.",
        datasets=[script.dataset_name] if script.dataset_name and not Path(script.dataset_name).exists() else None,
        command=f"python examples/train.py {shlex.join(arguments)}",
    )
    try:
        plot_training_curve(trainer.state.log_history, folder / "training_curve.png")
    except (ImportError, ValueError) as error:  # no matplotlib, or a run too short for a log
        print(f"no training curve: {error}")
    print(f"saved to {folder}")


def main(arguments: list[str]):
    """Parse, train, evaluate, save."""
    script, args = parse(arguments)
    set_seed(args.seed)
    source = open_source(script, script.train_file, script.train_split, args.seed)
    start = args.resume_from_checkpoint or script.model_name_or_path
    tokenizer = load_tokenizer(script, start, training_pieces(source))
    tokenizer.model_max_length = script.block_size
    with args.main_process_first():  # the others find what `datasets` has cached
        train = training_data(script, source, tokenizer)
    validation = validation_data(script, tokenizer, args.seed)
    trainer = RecipeTrainer(
        load_model(script, args.resume_from_checkpoint, tokenizer),
        args,
        build_collator(script, tokenizer),
        curriculum_steps=script.curriculum_steps,
        decay_all_parameters=script.decay_all_parameters,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
    )
    if script.sample_steps:
        options = {"max_length": script.block_size, "num_steps": script.block_size}
        trainer.add_callback(SampleCallback(trainer, script.sample_steps, prompt=script.sample_prompt, **options))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if validation is not None:
        trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        report(trainer, script, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
