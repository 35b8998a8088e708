"""Tokens/s and peak memory of a training step against dense losses and against no output layer at all.

    python examples/benchmark_training.py --output examples/results/training_cpu.json
    python examples/benchmark_training.py --device cuda --output examples/results/training_cuda.json

A step is forward, backward, fused AdamW and zero_grad, in four forms that take turns within each repeat on one
corruption (stratified over the batch) of random ids:

- "original": the code base of SEDD and RADD. log_softmax at all positions; for lambda_dce a gather; for dse log-scores
  log s(t) + log c (0 at the token itself), and the score entropy over the vocabulary of what is masked (Eq.
  score_entropy);
- "cross_entropy": logits at all positions, `F.cross_entropy` with unmasked positions ignored;
- "ours": `masked_token_nll`, output layer and cross-entropy at masked positions, in chunks;
- "trunk": no output layer, neither its step: the ceiling, on the trunk that ours runs.

Networks have random weights that stay as they are (learning rate 0) and no dropout, so that the first three have one
loss, which is checked. Seconds are medians, CPU seconds of all threads, on a GPU wall-clock seconds after
synchronisation; quote the ratios: "form/ours" in seconds, "ours/form" in memory.

Peak memory is beyond weights, gradients and optimiser state. On a CPU a dispatch mode follows every storage made in a
step that starts without gradients, as `Trainer`'s do, and leaves out those that become gradients. On a GPU it is the
allocator's peak in a step that adds to gradients that are there.

Model FLOPs utilisation (MFU) is F / (seconds x peak FLOP/s), where F is what the loss needs, whatever a form computes:
3 (forward once, backward twice) times, for N layers of width D and inner width I, S scored (masked) positions, V ids,
    B L N (2 (4 D^2 + 2 D I) + 4 L D) + 2 S D V        (the last term without an output layer: 0).
"""

import argparse
import json
import statistics
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers
from benchmark_sampling import Stopwatch, device_name
from peak_memory import PeakMemory
from torch import nn

from radd_hf import NoiseSchedule, RADDConfig, RADDForMaskedDiffusion, get_noise_schedule
from radd_hf.losses import Corruption, corrupt, masked_token_nll, row_weights, sum_over_masked, weigh

DEFAULTS = {  # the paper's models and, on a GPU, its length
    "cpu": {"models": ["small"], "length": 256, "batch_size": 8, "dtype": "float32", "compile": ["off"], "repeats": 3},
    "cuda": {
        "models": ["small", "medium"],
        "length": 1024,
        "batch_size": 16,
        "dtype": "bfloat16",
        "compile": ["off", "on"],
        "repeats": 10,
    },
}
WARM_UP = 5  # steps of a GPU or a compiled network, which is compiled again for some numbers of masks
PEAK_TFLOPS = {"H100": 989.4, "H200": 989.4, "A100": 312.0}  # SXM, dense bfloat16: NVIDIA's data sheets
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
COLUMNS = ("model", "compile", "loss_type", "form", "loss", "seconds", "tokens_per_second", "form/ours", "mfu")
COLUMNS += ("peak_mib", "ours/form")


def original_score_entropy(
    log_probs: torch.Tensor, ids: torch.LongTensor, drawn: Corruption, schedule: NoiseSchedule
) -> torch.Tensor:
    """Eq. (score_entropy) of each row (B,) by log-scores (B, L, V) and a sum over the vocabulary, whose last is M."""
    ratio = schedule.score_scale(drawn.level).to(log_probs)[:, None]  # s(t), (B, 1)
    log_score = (log_probs + ratio.log()[..., None]).scatter(-1, drawn.noisy_ids[..., None], 0.0)
    log_score, ratio = log_score[drawn.masked], ratio.expand_as(ids)[drawn.masked]  # (N, V), (N,)
    positive = log_score[:, :-1].exp().sum(-1)
    negative = ratio * log_score.gather(-1, ids[drawn.masked][:, None])[:, 0]
    entropy = positive - negative + ratio * (ratio.log() - 1)
    return schedule.rate(drawn.level).to(entropy) * sum_over_masked(entropy, drawn.masked)


class Case:
    """A network and the steps of the four forms on it."""

    def __init__(self, config: RADDConfig, args: argparse.Namespace, compiled: bool):
        self.device, self.dtype, self.compiled = torch.device(args.device), getattr(torch, args.dtype), compiled
        self.model = RADDForMaskedDiffusion(config).to(self.device).train()
        nn.init.normal_(self.model.lm_head.weight, std=config.initializer_range)  # zero would make all losses ln V
        self.network, self.trunk_network = self.model, self.model.model
        if compiled:
            self.network, self.trunk_network = torch.compile(self.network), torch.compile(self.trunk_network)
        self.schedule, self.watch = get_noise_schedule(config), Stopwatch(self.device)
        self.ids = torch.randint(config.mask_token_id, (args.batch_size, args.length))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self._make_gradients()
        self.optimizer.step()  # its state exists from here on
        self.optimizer.zero_grad()

    def _make_gradients(self):
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def draw(self, loss_type: str, seed: int) -> Corruption:
        """A corruption, the same on every device."""
        everywhere, generator = torch.ones_like(self.ids, dtype=torch.bool), torch.Generator().manual_seed(seed)
        mask_token_id = self.model.config.mask_token_id
        drawn = corrupt(
            self.ids, loss_type, mask_token_id, everywhere, noise_schedule=self.schedule, generator=generator
        )
        return Corruption(*(getattr(drawn, name).to(self.device) for name in vars(drawn)))

    def original(self, loss_type: str, drawn: Corruption) -> torch.Tensor:
        """Losses (B,) by log_softmax at all positions."""
        ids = self.ids.to(self.device)
        log_probs = torch.log_softmax(self.network(drawn.noisy_ids).logits, dim=-1, dtype=torch.float32)
        if loss_type == "dse":
            return original_score_entropy(log_probs, ids, drawn, self.schedule)
        nll = -log_probs.gather(-1, ids[..., None])[..., 0].masked_fill(~drawn.masked, 0.0)
        return weigh(nll.sum(-1), drawn, loss_type, self.schedule)

    def cross_entropy(self, loss_type: str, drawn: Corruption) -> torch.Tensor:
        """Losses (B,) by `F.cross_entropy` at all positions."""
        logits = self.network(drawn.noisy_ids).logits.float()
        labels = self.ids.to(self.device).masked_fill(~drawn.masked, -100)
        nll = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return weigh(nll.view_as(labels).sum(-1), drawn, loss_type, self.schedule)

    def ours(self, loss_type: str, drawn: Corruption) -> torch.Tensor:
        """Losses (B,) as `diffusion_loss` takes them."""
        weight = row_weights(drawn, loss_type, self.schedule)
        ids = self.ids.to(self.device)
        token_nll = masked_token_nll(self.network, ids, drawn.noisy_ids, drawn.masked, row_weight=weight)
        return weigh(sum_over_masked(token_nll, drawn.masked), drawn, loss_type, self.schedule)

    def trunk(self, loss_type: str, drawn: Corruption) -> torch.Tensor:
        """The mean square of the states, (1,): something to send a gradient back from."""
        states = self.trunk_network(drawn.noisy_ids, keep_mask=drawn.masked).last_hidden_state
        return states.float().square().mean()[None]

    def forward_backward(self, form: str, loss_type: str, drawn: Corruption) -> torch.Tensor:
        """The loss, a scalar, after its gradients were added."""
        mixed = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype) if mixed else nullcontext():
            loss = getattr(self, form)(loss_type, drawn).mean()
        loss.backward()
        return loss.detach()

    def step(self, form: str, loss_type: str, drawn: Corruption) -> torch.Tensor:
        """A whole step; its loss."""
        loss = self.forward_backward(form, loss_type, drawn)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def peak_bytes(self, form: str, loss_type: str, drawn: Corruption) -> tuple[float, int | None]:
        """Loss of a step, and its peak memory beyond weights, gradients and optimiser state.

        None for a network compiled for a CPU: under the dispatch mode it would not run compiled.
        """
        if self.device.type == "cuda":
            self._make_gradients()
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            loss = self.step(form, loss_type, drawn).item()
            return loss, torch.cuda.max_memory_allocated(self.device) - before
        if self.compiled:
            return self.step(form, loss_type, drawn).item(), None
        with PeakMemory() as tracker:
            loss = self.forward_backward(form, loss_type, drawn).item()
            self.optimizer.step()
        peak = tracker.peak_beyond(tuple(p.grad for p in self.model.parameters() if p.grad is not None))
        self.optimizer.zero_grad()
        return loss, peak


FORMS = ("original", "cross_entropy", "ours", "trunk")


def model_flops(config: RADDConfig, batch_size: int, length: int, scored: float) -> float:
    """F of the module's docstring, FLOPs of a step whose loss scores `scored` positions of the batch."""
    width, layers = config.hidden_size, config.num_hidden_layers
    block = 2 * (4 * width**2 + 2 * width * config.intermediate_size) + 4 * length * width
    return 3 * (batch_size * length * layers * block + 2 * scored * width * config.vocab_size)


def peak_flops(args: argparse.Namespace) -> float | None:
    """FLOP/s of the device, None where nobody said."""
    if args.peak_tflops is not None:
        return args.peak_tflops * 1e12
    name = device_name(torch.device(args.device)) if args.dtype == "bfloat16" else ""
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS.items() if key in name), None)


def check_losses(losses: dict[str, float], dtype: str):
    """Raise unless the three forms of the loss agree."""
    for form in ("original", "cross_entropy"):
        if abs(losses[form] - losses["ours"]) > TOLERANCE[dtype] * abs(losses["ours"]):
            raise ValueError(f"The losses must agree to {TOLERANCE[dtype]}, got {losses}.")


def measure(case: Case, args: argparse.Namespace) -> list[dict[str, object]]:
    """Figures of each loss and form."""
    keys = [(loss_type, form) for loss_type in args.loss_types for form in FORMS]
    seconds, first, scored = {key: [] for key in keys}, {}, {loss_type: [] for loss_type in args.loss_types}
    warm_up = WARM_UP if case.compiled or args.device == "cuda" else 0
    for seed in range(-warm_up, args.repeats + 1):
        drawn = {loss_type: case.draw(loss_type, seed + warm_up) for loss_type in args.loss_types}
        for loss_type, form in keys:
            if seed < 0:
                case.step(form, loss_type, drawn[loss_type])
            elif seed == 0:
                first[loss_type, form] = case.peak_bytes(form, loss_type, drawn[loss_type])
            else:
                seconds[loss_type, form].append(case.watch(case.step, form, loss_type, drawn[loss_type])[0])
                scored[loss_type].append(int(drawn[loss_type].masked.sum()))
    peak_rate, results = peak_flops(args), []
    for loss_type, form in keys:
        check_losses({form: first[loss_type, form][0] for form in FORMS}, args.dtype)
        median, ours = (statistics.median(seconds[loss_type, name]) for name in (form, "ours"))
        peak, our_peak = first[loss_type, form][1], first[loss_type, "ours"][1]
        share = 0.0 if form == "trunk" else statistics.mean(scored[loss_type])
        flops = model_flops(case.model.config, args.batch_size, args.length, share)
        results.append(
            {
                "loss_type": loss_type,
                "form": form,
                "loss": first[loss_type, form][0],
                "seconds": median,
                "tokens_per_second": args.batch_size * args.length / median,
                "form/ours": median / ours,
                "mfu": None if peak_rate is None else flops / (median * peak_rate),
                "peak_mib": None if peak is None else peak / 2**20,
                "ours/form": None if peak is None else our_peak / peak,
            }
        )
    return results


def build_parser() -> argparse.ArgumentParser:
    """What can be asked for; what is not given follows from the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(DEFAULTS), default="cpu")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), help="of autocast; default: bfloat16 on a GPU")
    parser.add_argument("--models", choices=["small", "medium"], nargs="+", help="default: small, on a GPU both")
    parser.add_argument("--compile", choices=["off", "on"], nargs="+", help="default: off, on a GPU both")
    parser.add_argument("--loss_types", choices=["lambda_dce", "dse"], nargs="+", default=["lambda_dce", "dse"])
    parser.add_argument("--length", type=int, help="default: 256 on a CPU, 1024 on a GPU")
    parser.add_argument("--batch_size", type=int, help="default: 8 on a CPU, 16 on a GPU")
    parser.add_argument("--repeats", type=int, help="default: 3 on a CPU, 10 on a GPU")
    parser.add_argument("--num_layers", type=int, help="instead of the model's, as the next two")
    parser.add_argument("--hidden_size", type=int)
    parser.add_argument("--vocab_size", type=int)
    parser.add_argument("--peak_tflops", type=float, help="of the device, for MFU; known for bfloat16 on some GPUs")
    parser.add_argument("--output")
    return parser


def network_config(name: str, args: argparse.Namespace) -> RADDConfig:
    """The paper's `name`, without dropout, in the size asked for."""
    fields = {"hidden_dropout": 0.0, "max_position_embeddings": args.length}
    if args.num_layers is not None:
        fields["num_hidden_layers"] = args.num_layers
    if args.hidden_size is not None:
        fields |= {"hidden_size": args.hidden_size, "num_attention_heads": args.hidden_size // 64}
    if args.vocab_size is not None:
        fields["vocab_size"] = args.vocab_size
    return getattr(RADDConfig, name)(**fields)


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    """Print the table, write the JSON; the figures of each case."""
    args = build_parser().parse_args(arguments)
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    torch.manual_seed(0)
    settings = {"device": device_name(torch.device(args.device))}
    settings |= {name: getattr(args, name) for name in ("dtype", "batch_size", "length", "repeats")}
    settings |= {"torch": torch.__version__, "transformers": transformers.__version__}
    print(", ".join(f"{key} {value}" for key, value in settings.items()))
    widths = [max(len(name), 13 if name in ("loss_type", "form") else 7) for name in COLUMNS]
    print(" ".join(f"{name:>{width}}" for name, width in zip(COLUMNS, widths, strict=True)))
    results = []
    for name in args.models:
        config = network_config(name, args)
        shape = f"{config.num_hidden_layers} x {config.hidden_size}, vocabulary {config.vocab_size}"
        for compiled in args.compile:
            for figures in measure(Case(config, args, compiled == "on"), args):
                result = {"model": name, "shape": shape, "compile": compiled, **figures}
                results.append(result)
                values = (result[column] for column in COLUMNS)
                cells = ("-" if x is None else f"{x:.4g}" if isinstance(x, float) else x for x in values)
                print(" ".join(f"{x:>{width}}" for x, width in zip(cells, widths, strict=True)), flush=True)
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
