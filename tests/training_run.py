"""A training run in a process of its own, or in several under torchrun; what happened goes to a file.

python tests/training_run.py '{"folder": "runs/a", "result": "a.pt", "max_steps": 6}'
"""

import json
import os
import signal
import sys

import torch
from transformers import TrainerCallback

from radd_hf import RADDConfig, RADDForMaskedDiffusion, RADDTrainer, RADDTrainingArguments
from radd_hf.data import BlockDataset

VOCAB, LENGTH = 12, 8


def model(dropout: float) -> RADDForMaskedDiffusion:
    """Two blocks, an output layer that is not zero: contexts matter from the first step."""
    torch.manual_seed(0)
    config = RADDConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        hidden_dropout=dropout,
        initializer_range=0.1,
    )
    network = RADDForMaskedDiffusion(config)
    torch.nn.init.normal_(network.lm_head.weight, std=0.3)
    return network


def rows(count: int, ragged: bool) -> BlockDataset | list[dict]:
    """Rows that count upwards modulo V; of 2 to 8 tokens if `ragged`."""
    blocks = (torch.arange(count)[:, None] + torch.arange(LENGTH)) % (VOCAB - 1)
    if not ragged:
        return BlockDataset(blocks)
    return [{"input_ids": row[: 2 + i * 5 % 7]} for i, row in enumerate(blocks.tolist())]


class Kill(TrainerCallback):
    """kill -9 after step `step`."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class TracingTrainer(RADDTrainer):
    """`RADDTrainer` that keeps the rows it trained on and what was masked in them."""

    trace = ()

    def _loss_terms(self, network, inputs, loss_type, generator):
        def keep(module, args, kwargs):
            if network.training:
                self.trace = (*self.trace, (self.state.global_step, inputs["input_ids"], kwargs["input_ids"]))

        handle = network.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            return super()._loss_terms(network, inputs, loss_type, generator)
        finally:
            handle.remove()


def main(job: dict):
    """Train, evaluate where `eval_rows` says so, write the result of this process."""
    result, resume = job.pop("result"), job.pop("resume", None)
    kill, eval_rows = job.pop("kill", None), job.pop("eval_rows", 0)
    network, ragged = model(job.pop("dropout", 0.1)), job.pop("ragged", False)
    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    options |= {"learning_rate": 1e-2, "seed": 3, "ema_decay": 0.9, "per_device_train_batch_size": 4}
    args = RADDTrainingArguments(output_dir=job.pop("folder"), **{**options, **job})
    trainer = TracingTrainer(
        network, args, train_dataset=rows(job.pop("rows", 40), ragged), callbacks=[Kill(kill)] if kill else None
    )
    trainer.train(resume_from_checkpoint=resume)
    outcome = {"log": trainer.state.log_history, "trace": trainer.trace, "rng": torch.get_rng_state()}
    outcome["average"] = {} if trainer.ema is None else trainer.ema.average
    if eval_rows:
        outcome["metrics"] = trainer.evaluate(rows(eval_rows, True))
        prediction = trainer.predict(rows(eval_rows, True))
        outcome["prediction"] = torch.tensor(prediction.predictions), torch.tensor(prediction.label_ids)
    outcome["weights"] = {name: p.detach() for name, p in trainer.model.named_parameters()}
    outcome["optimizer"] = trainer.optimizer.state_dict()
    torch.save(outcome, f"{result}.{args.process_index}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
