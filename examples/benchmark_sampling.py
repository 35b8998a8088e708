"""Time of diffusion_generate against the dense cached sampler and no cache at all, and against its own trunk passes.

    python examples/benchmark_sampling.py --output examples/results/sampling_cpu.json
    python examples/benchmark_sampling.py --device cuda --dtype bfloat16 --output examples/results/sampling_cuda.json

GPT-2-small's shape and vocabulary, random weights, log-linear noise, masks alone to begin with, steps = L / 4, L, 4 L.
The two baselines run the network on all positions, form the transition probabilities (all tokens and the mask) of
every masked position in float64 at every step and draw from them: "dense" calls the network when some token of the
batch has changed (Algorithm 5), "no cache" at every step. They are timed on `--probes` steps spread over the
trajectory, half of them before and half after ours, and scaled to all steps; ours is run whole. Seconds are CPU
seconds of all threads, on a GPU wall-clock seconds after synchronisation; quote the ratios. "overhead" is what ours
takes beyond (rows through the network) x (a row's share of a full trunk pass of the batch).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers

from radd_hf import RADDConfig, RADDForMaskedDiffusion, expected_nfe

DEFAULTS = {"cpu": (256, [1, 4]), "cuda": (1024, [1, 4, 16])}  # length, batch sizes
COLUMNS = ("batch", "steps", "passes", "tokens_per_second", "overhead", "dense/ours", "no_cache/ours", "peak_gib")


class Stopwatch:
    """Seconds of calls: CPU seconds of this process, or on a GPU the time until it is idle."""

    def __init__(self, device: torch.device):
        self.device = device

    def _now(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __call__(self, function: Callable, *args) -> tuple[float, object]:
        """Seconds that the call took, and its result."""
        start = self._now()
        result = function(*args)
        return self._now() - start, result


def dense_network(model: RADDForMaskedDiffusion, ids: torch.LongTensor) -> torch.Tensor:
    """Log-probabilities (B, L, V) at every position."""
    return torch.log_softmax(model(ids).logits.float(), dim=-1)


def dense_draw(log_probs: torch.Tensor, ids: torch.LongTensor, mask_token_id: int, psi: float) -> torch.LongTensor:
    """A step of Algorithm 5: tokens or the mask again, at every masked position, from float64 probabilities."""
    hidden = ids == mask_token_id
    transition = psi * log_probs[hidden].double().exp()  # (masks, V)
    transition[:, mask_token_id] = 1 - psi
    return ids.masked_scatter(hidden, (transition / torch.empty_like(transition).exponential_()).argmax(-1))


class Case:
    """One batch size and number of steps: the times of both sides."""

    def __init__(self, model: RADDForMaskedDiffusion, batch_size: int, length: int, num_steps: int):
        self.model, self.batch_size, self.length, self.num_steps = model, batch_size, length, num_steps
        self.watch = Stopwatch(model.device)
        self.reveal = torch.randint(num_steps, (batch_size, length), device=model.device)  # each step is as likely
        self.tokens = torch.randint(model.config.mask_token_id, (batch_size, length), device=model.device)
        self.network, self.draw, self.trunk = [], [], []

    def probe(self, steps: list[int]):
        """Time the baselines' two halves, and a trunk pass, on the states before these steps."""
        mask_token_id = self.model.config.mask_token_id
        for step in steps:
            ids = self.tokens.masked_fill(self.reveal >= step, mask_token_id)
            seconds, log_probs = self.watch(dense_network, self.model, ids)
            self.network.append(seconds)
            psi = 1 / (self.num_steps - step)
            self.draw.append(self.watch(dense_draw, log_probs, ids, mask_token_id, psi)[0])
            self.trunk.append(self.watch(self.model.model, ids)[0])

    def generate(self):
        """The whole of ours."""
        return self.model.diffusion_generate(
            batch_size=self.batch_size,
            max_length=self.length,
            num_steps=self.num_steps,
            seed=0,
            return_dict_in_generate=True,
        )

    def run(self, probes: int) -> dict[str, float]:
        """Figures of the case."""
        on_gpu = self.model.device.type == "cuda"
        spread = [int((i + 0.5) * self.num_steps / probes) for i in range(probes)]
        self.probe(spread[::2])
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        ours, output = self.watch(self.generate)
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
        self.probe(spread[1::2])
        network, draw = statistics.mean(self.network), statistics.mean(self.draw)
        dense_calls = expected_nfe(self.num_steps, self.batch_size * self.length)  # any change calls for all rows
        rows = int(output.nfe.sum())
        return {
            "batch": self.batch_size,
            "steps": self.num_steps,
            "passes": output.forward_passes,
            "rows": rows,
            "seconds": ours,
            "tokens_per_second": self.batch_size * self.length / ours,
            "overhead": ours / (rows * statistics.median(self.trunk) / self.batch_size) - 1,
            "dense_passes": dense_calls,
            "dense/ours": (dense_calls * network + self.num_steps * draw) / ours,
            "no_cache/ours": self.num_steps * (network + draw) / ours,
            "peak_gib": peak,
        }


def device_name(device: torch.device) -> str:
    """What the times are of."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


@torch.no_grad()
def main(arguments: list[str] | None = None) -> list[dict]:
    """Print the table, write the JSON; the figures of each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(DEFAULTS), default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="of autocast")
    parser.add_argument("--length", type=int, help="default: 256 on a CPU, 1024 on a GPU")
    parser.add_argument("--batch_sizes", type=int, nargs="+", help="default: 1 4 on a CPU, 1 4 16 on a GPU")
    parser.add_argument("--steps_over_length", type=float, nargs="+", default=[0.25, 1, 4])
    parser.add_argument("--num_layers", type=int, default=12)
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--probes", type=int, default=16)
    parser.add_argument("--output")
    args = parser.parse_args(arguments)
    length, batch_sizes = DEFAULTS[args.device]
    length, batch_sizes = args.length or length, args.batch_sizes or batch_sizes
    device = torch.device(args.device)
    torch.manual_seed(0)
    config = RADDConfig(
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.hidden_size // 64,
        max_position_embeddings=length,
    )
    model = RADDForMaskedDiffusion(config).eval().to(device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    settings = {
        "device": device_name(device),
        "dtype": args.dtype,
        "shape": f"{args.num_layers} x {args.hidden_size}, vocabulary {config.vocab_size}",
        "length": length,
        "probes": args.probes,
        "weights_gib": weights / 2**30,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in settings.items()))
    print(" ".join(f"{name:>{max(len(name), 8)}}" for name in COLUMNS))
    autocast = nullcontext()
    if args.dtype != "float32":
        autocast = torch.autocast(args.device, getattr(torch, args.dtype))
    results = []
    with autocast:
        model(torch.zeros(1, length, dtype=torch.long, device=device))  # warm-up
        for batch_size in batch_sizes:
            for ratio in args.steps_over_length:
                result = Case(model, batch_size, length, max(1, round(ratio * length))).run(args.probes)
                results.append(result)
                cells = (
                    ("-" if x is None else f"{x:.3g}" if isinstance(x, float) else x) for x in map(result.get, COLUMNS)
                )
                print(" ".join(f"{x:>{max(len(n), 8)}}" for n, x in zip(COLUMNS, cells, strict=True)), flush=True)
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
