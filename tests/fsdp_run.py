"""Two steps of a model sharded by FSDP2 in each process of torchrun, against the whole model with the whole batch.

torchrun --nproc_per_node=2 tests/fsdp_run.py FOLDER
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training_run import model, rows

from radd_hf.callbacks import EMACallback
from radd_hf.forward_process import GlobalBatchNoise
from radd_hf.losses import diffusion_loss_terms

START = SimpleNamespace(global_step=0)


def train(network, ema: EMACallback, ids: torch.LongTensor, first_row: int, world: int) -> list[float]:
    """Two steps on these rows of the global batch of 8; the part of the loss in each."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    ema.on_train_begin(None, START, None, model=network)
    losses = []
    for step in range(2):
        terms = diffusion_loss_terms(network, ids, "lambda_dce", generator=GlobalBatchNoise((0, step), first_row, 8))
        loss = terms.loss.sum() / 64 * world
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.on_optimizer_step(None, START, None, model=network)
        losses.append(loss.item() / world)
    return losses


def main(folder: Path):
    """Raise unless losses, weights and averages agree, and the average survives its file."""
    distributed.init_process_group("gloo")
    rank, mesh = distributed.get_rank(), init_device_mesh("cpu", (2,))
    ids = rows(8, ragged=False).blocks
    whole = model(0.0)
    whole_ema = EMACallback(whole, 0.9)
    expected = train(whole, whole_ema, ids, 0, 1)
    sharded = model(0.0)
    ema = EMACallback(sharded, 0.9)  # made before sharding, as the trainer does
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    losses = torch.tensor(train(sharded, ema, ids[4 * rank : 4 * rank + 4], 4 * rank, 2))
    distributed.all_reduce(losses)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=0, atol=1e-4, msg=name)
        assert ema.average[name].numel() < other.numel(), "the average is sharded, too"
    ema.save(folder, sharded, write=rank == 0)
    distributed.barrier()
    again, plain = EMACallback(whole, 0.9), EMACallback(whole, 0.9, device="cpu")
    again.load(folder, sharded)
    plain.load(folder, whole)
    assert again.num_updates == plain.num_updates == 2
    for name, average in whole_ema.average.items():
        assert torch.equal(again.average[name], ema.average[name])
        torch.testing.assert_close(plain.average[name], average, rtol=0, atol=1e-4, msg=name)
    with torch.no_grad(), ema.applied_to(sharded), whole_ema.applied_to(whole):
        torch.testing.assert_close(sharded(ids).logits, whole(ids).logits, rtol=0, atol=1e-2)
    (folder / f"passed.{rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
