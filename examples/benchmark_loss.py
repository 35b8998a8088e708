"""CPU time and peak memory of a lambda_dce training step against the dense form, side by side.

    python examples/benchmark_loss.py --repeats 5

GPT-2's vocabulary, 6 blocks of width 384, 8 sequences of 256 tokens, lambda stratified over the batch. The baseline
takes log_softmax at all positions and gathers. Both run forward and backward on the same corruption, in turn, in one
process; the last column is the ratio of medians. Memory is the peak of live tensors above weights and gradients, by a
dispatch mode that follows every allocation.
"""

import argparse
import statistics
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from radd_hf import RADDConfig, RADDForMaskedDiffusion, get_noise_schedule
from radd_hf.losses import corrupt, lambda_dce_loss, masked_token_nll, sum_over_masked

BATCH_SIZE, LENGTH = 8, 256


class PeakMemory(TorchDispatchMode):
    """Bytes of storages that live at the same time among those made inside the block."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage):
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int):
        self.known.discard(key)
        self.live -= size


def masked_only(model: RADDForMaskedDiffusion, ids: torch.LongTensor, corruption) -> torch.Tensor:
    """The package's form: logits at masked positions alone."""
    token_nll = masked_token_nll(model, ids, corruption.noisy_ids, corruption.masked)
    return lambda_dce_loss(sum_over_masked(token_nll, corruption.masked), corruption.level).mean()


def dense(model: RADDForMaskedDiffusion, ids: torch.LongTensor, corruption) -> torch.Tensor:
    """log_softmax everywhere, then a gather."""
    log_probs = torch.log_softmax(model(corruption.noisy_ids).logits, dim=-1)
    nll = -log_probs.gather(-1, ids[..., None])[..., 0].masked_fill(~corruption.masked, 0.0)
    return lambda_dce_loss(nll.sum(-1), corruption.level).mean()


def step(form, model: RADDForMaskedDiffusion, ids: torch.LongTensor, corruption) -> float:
    """Forward and backward; the loss."""
    loss = form(model, ids, corruption)
    loss.backward()
    return loss.item()


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = RADDConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, max_position_embeddings=LENGTH)
    model = RADDForMaskedDiffusion(config).eval()  # without dropout both forms have one value
    ids = torch.randint(config.vocab_size - 1, (BATCH_SIZE, LENGTH))
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    options = {"noise_schedule": get_noise_schedule(config)}
    seconds, values, memory = {dense: [], masked_only: []}, {}, {}
    for repeat in range(args.repeats + 1):
        generator = torch.Generator().manual_seed(repeat)
        corruption = corrupt(ids, "lambda_dce", config.mask_token_id, everywhere, generator=generator, **options)
        for form in (dense, masked_only):
            if repeat == 0:  # gradients exist from here on: what is measured next is above weights and gradients
                step(form, model, ids, corruption)
                with PeakMemory() as tracker:
                    values[form] = step(form, model, ids, corruption)
                memory[form] = tracker.peak
                continue
            start = time.process_time()
            step(form, model, ids, corruption)
            seconds[form].append(time.process_time() - start)
    one, other = (statistics.median(seconds[f]) for f in (dense, masked_only))
    print(f"{torch.get_num_threads()} threads, {BATCH_SIZE} x {LENGTH} tokens, V = {config.vocab_size:,}, 6 x 384")
    print(f"{'':<20} {'dense':>10} {'masked only':>12} {'ratio':>7}")
    print(f"{'loss':<20} {values[dense]:>10.3f} {values[masked_only]:>12.3f}")
    print(f"{'CPU seconds (median)':<20} {one:>10.2f} {other:>12.2f} {other / one:>7.3f}")
    mib = {form: size / 2**20 for form, size in memory.items()}
    ratio = mib[masked_only] / mib[dense]
    print(f"{'peak MiB':<20} {mib[dense]:>10.0f} {mib[masked_only]:>12.0f} {ratio:>7.3f}")


if __name__ == "__main__":
    main()
