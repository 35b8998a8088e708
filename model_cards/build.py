"""Render the model card of every model of the paper from `template.md`.

    python model_cards/build.py

rewrites the cards beside this file. Every perplexity is the paper's (tables 1, 2 and 7); none was measured here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

FOLDER = Path(__file__).parent
PAPER_URL = "https://arxiv.org/abs/2406.03736"
PLACEHOLDER = "ORIGINAL_REPO_OR_FOLDER"
BLOCK_LENGTH = 1024
BATCH_SIZE = 512
TRAINING_TOKENS = {400: "about 105 billion", 1000: "about 262 billion"}
# The identifier of each test set in the model-index is a plain slug: the paper names no dataset repository.
TEST_SETS = {"lambada": "LAMBADA", "wikitext2": "WikiText2", "ptb": "PTB", "wikitext103": "WikiText103", "1bw": "1BW"}


@dataclass(frozen=True)
class Size:
    """One of the two architectures, with what the paper tells about that size only."""

    name: str
    layers: int
    width: int
    heads: int
    parameters: int
    precision: str
    tables: str


@dataclass(frozen=True)
class Loss:
    """One of the four equivalent training losses."""

    loss_type: str
    slug: str
    label: str
    name: str
    reference: str
    text: str


@dataclass(frozen=True)
class PaperModel:
    """One trained model of the paper; `perplexities` follow the order of `TEST_SETS`."""

    size: str
    loss_type: str
    kilo_iterations: int
    perplexities: tuple[float, ...]
    original_source: str = PLACEHOLDER

    @property
    def name(self) -> str:
        suffix = "" if self.kilo_iterations == 400 else f"-{self.kilo_iterations}k"
        return f"radd-{self.size}-{LOSSES[self.loss_type].slug}{suffix}"

    @property
    def iterations(self) -> int:
        return 1000 * self.kilo_iterations

    @property
    def table(self) -> int:
        if self.kilo_iterations == 1000:
            return 7
        return 1 if self.size == "small" else 2


SIZES = {
    "small": Size("small", 12, 768, 12, 162_265_682, "float16", "tables 1 (400k iterations) and 7 (1000k)"),
    "medium": Size("medium", 24, 1024, 16, 405_191_762, "not stated", "table 2"),
}

_DIFFUSION_NOTE = (
    "A time t is drawn uniformly, each token is masked independently with probability λ(t), and the masked tokens are "
    "scored: `{formula}`, in nats per sequence, where q_i is the probability of the true token at a masked position i "
    "and w = λ'/λ, which is 1/t for the log-linear schedule."
)

LOSSES = {
    loss.loss_type: loss
    for loss in (
        Loss(
            "dse",
            "dse",
            "RADD-DSE",
            "Denoising score entropy (DSE)",
            "equation 2.6 of the paper for one position, the first display of appendix C.1 for a sequence",
            _DIFFUSION_NOTE.format(formula="w(t) * sum_i [-log q_i]")
            + " This short form is exact because the network's output is normalised.",
        ),
        Loss(
            "t_dce",
            "t-dce",
            "RADD-t-DCE",
            "t-denoising cross-entropy (t-DCE)",
            "equation 3.5 of the paper",
            _DIFFUSION_NOTE.format(formula="w(t) * sum_i [-log q_i - log s(t)]")
            + " s = (1 - λ)/λ is the scale of the concrete score; its term has mean zero.",
        ),
        Loss(
            "lambda_dce",
            "lambda-dce",
            "RADD-λ-DCE",
            "λ-denoising cross-entropy (λ-DCE)",
            "equation 3.6 of the paper",
            "The mask probability λ itself is drawn uniformly from (0, 1), each token is masked independently with "
            "it, and the masked tokens are scored: `1/λ * sum_i [-log q_i]`, in nats per sequence, where q_i is the "
            "probability of the true token at a masked position i.",
        ),
        Loss(
            "ao",
            "ao",
            "RADD-AO",
            "Any-order autoregressive loss (AO)",
            "equation 2.11 of the paper; equation C.20 and algorithm 1 for the form that is trained",
            "A number k is drawn uniformly from 1 to L, the sequence length, exactly k positions chosen at random "
            "are masked, and they are scored: `L/k * sum_i [-log q_i]`, in nats per sequence, where q_i is the "
            "probability of the true token at a masked position i.",
        ),
    )
}

SCHEDULE_USE = {
    **dict.fromkeys(("dse", "t_dce"), "The loss and the sampler use it."),
    **dict.fromkeys(("lambda_dce", "ao"), "The loss does not contain it; the sampler uses it."),
}

MODELS = (
    PaperModel("small", "dse", 400, (49.57, 38.83, 111.74, 37.46, 72.35)),
    PaperModel("small", "t_dce", 400, (50.56, 39.02, 109.03, 36.38, 72.60)),
    PaperModel("small", "lambda_dce", 400, (51.70, 39.98, 107.85, 37.98, 72.99), "JingyangOu/radd-lambda-dce"),
    PaperModel("small", "ao", 400, (50.27, 38.26, 110.38, 35.90, 74.28)),
    PaperModel("small", "t_dce", 1000, (48.92, 37.44, 102.49, 37.20, 70.58)),
    PaperModel("small", "lambda_dce", 1000, (49.74, 37.13, 98.84, 36.66, 69.77)),
    PaperModel("small", "ao", 1000, (49.43, 36.86, 102.36, 35.25, 70.71)),
    PaperModel("medium", "dse", 400, (42.30, 29.17, 75.16, 28.03, 57.45)),
    PaperModel("medium", "t_dce", 400, (43.24, 30.19, 78.77, 29.36, 57.95)),
    PaperModel("medium", "lambda_dce", 400, (44.10, 30.60, 82.08, 29.29, 60.32)),
    PaperModel("medium", "ao", 400, (41.96, 29.96, 79.06, 28.51, 57.07)),
)

# Iterations are None where the paper states none.
BASELINES: dict[str, tuple[tuple[str, int | None, tuple[float, ...]], ...]] = {
    "small": (
        ("GPT-2 (autoregressive)", None, (45.04, 42.43, 138.43, 41.60, 75.20)),
        ("D3PM", None, (93.47, 77.28, 200.82, 75.16, 138.92)),
        ("PLAID", None, (57.28, 51.80, 142.60, 50.86, 91.12)),
        ("SEDD-Uniform", 400, (65.40, 50.27, 140.12, 49.60, 101.37)),
        ("SEDD-Unscale", 400, (52.21, 44.75, 130.49, 43.14, 80.70)),
        ("SEDD-Scale", 400, (50.92, 41.84, 114.24, 40.62, 79.29)),
    ),
    "medium": (
        ("GPT-2 (autoregressive)", None, (35.66, 31.80, 123.14, 31.39, 55.72)),
        ("SEDD-Unscale", 400, (44.60, 34.85, 93.26, 32.97, 67.91)),
        ("SEDD-Scale", 400, (42.77, 31.04, 87.12, 29.98, 61.19)),
    ),
}

# Table 3 of the paper. Its text generation uses the medium model trained with the λ-DCE loss.
GENERATION_MODEL = "radd-medium-lambda-dce"
GENERATION_ROWS = (
    ("steps", ("32", "64", "128", "256", "512", "1024", "2048", "4096")),
    ("perplexity under GPT-2 large", ("158", "113", "96", "89", "84", "83", "81", "81")),
    ("unigram entropy, nats", ("8.28", "8.21", "8.18", "8.15", "8.14", "8.12", "8.13", "8.13")),
    ("seconds per sample", ("0.45", "0.80", "1.54", "2.96", "5.32", "8.39", "12.28", "18.20")),
)


def eval_results(model: PaperModel) -> list[EvalResult]:
    """The five perplexities of the paper as unverified results of a model-index."""
    return [
        EvalResult(
            task_type="fill-mask",
            task_name="Zero-shot language modeling",
            dataset_type=dataset_type,
            dataset_name=dataset_name,
            metric_type="perplexity",
            metric_name="Perplexity (upper bound), reported by the paper, not re-measured",
            metric_value=value,
            verified=False,
            source_name=f"Reported by the paper, table {model.table}",
            source_url=PAPER_URL,
        )
        for (dataset_type, dataset_name), value in zip(TEST_SETS.items(), model.perplexities, strict=True)
    ]


def perplexity_table(model: PaperModel) -> dict[str, Any]:
    """The paper's rows of the model's size, the model's own row in bold."""
    size = SIZES[model.size]
    rows = [_row(name, kilo, values) for name, kilo, values in BASELINES[model.size]]
    for other in (other for other in MODELS if other.size == model.size):
        row = _row(LOSSES[other.loss_type].label, other.kilo_iterations, other.perplexities)
        rows.append([f"**{cell}**" for cell in row] if other == model else row)
    return {
        "title": "Zero-shot perplexity (lower is better): reported by the paper, not re-measured here",
        "note": (
            f"The row in bold is this model; the others are the paper's other {size.name} models ({size.tables}). "
            f"The paper evaluates each RADD model with the loss it was trained with, for this one "
            f"`{model.loss_type}`. The rows of diffusion models are upper bounds."
        ),
        "header": ["model", "iterations", *TEST_SETS.values()],
        "rows": rows,
    }


def generation_table() -> dict[str, Any]:
    """The paper's measurement of unconditional samples."""
    (first, header), *rows = GENERATION_ROWS
    return {
        "title": "Unconditional samples: reported by the paper, not re-measured here",
        "note": (
            "Table 3 of the paper, averages over 1,024 samples: log-linear schedule, cached sampler, float64 "
            "categorical draws, no top-k or top-p, batch 16 on one accelerator that is not named. The seconds belong "
            "to that machine and to the original code."
        ),
        "header": [first, *header],
        "rows": [[name, *values] for name, values in rows],
    }


def template_fields(model: PaperModel) -> dict[str, Any]:
    """Everything that `template.md` asks for beside the metadata."""
    size, loss = SIZES[model.size], LOSSES[model.loss_type]
    metrics = [perplexity_table(model)]
    if model.name == GENERATION_MODEL:
        metrics.append(generation_table())
    return {
        "model_name": model.name,
        "summary": (
            f"The {size.name} reparameterized absorbing discrete diffusion model (RADD) of "
            f"[Ou et al., ICLR 2025]({PAPER_URL}), trained with the {loss.name} loss for "
            f"{model.iterations:,} iterations."
        ),
        "architecture": [
            ("layers", size.layers),
            ("hidden size", f"{size.width:,}"),
            ("attention heads", size.heads),
            ("MLP size", f"{4 * size.width:,}"),
            ("block length", f"{BLOCK_LENGTH:,} tokens"),
            ("vocabulary", "50,258: the 50,257 tokens of GPT-2 and the mask, id 50257"),
            ("attention", "bidirectional"),
            ("positions", "rotary, base 10,000"),
            ("output", "softmax over the clean tokens; weights not shared with the embedding"),
            ("time input", "none"),
        ],
        "parameters": size.parameters,
        "loss_name": loss.name,
        "loss_type": loss.loss_type,
        "loss_reference": loss.reference,
        "loss_text": loss.text,
        "schedule": (
            "Log-linear: a token is masked at time t with probability λ(t) = (1 - ε) t, with ε = 0.001. "
            f"{SCHEDULE_USE[loss.loss_type]}"
        ),
        "data": (
            f"OpenWebText, English web pages, packed into blocks of {BLOCK_LENGTH:,} tokens. The paper puts it at "
            "9 billion tokens, so that training saw each page many times."
        ),
        "recipe": [
            ("iterations", f"{model.iterations:,}"),
            ("training tokens, as the paper gives them", TRAINING_TOKENS[model.kilo_iterations]),
            ("batch size", BATCH_SIZE),
            ("learning rate", "3e-4"),
            ("warm-up", "2,500 iterations"),
            ("weight decay", "0.03"),
            ("dropout", "0.02"),
            ("gradient clipping", "norm 1"),
            ("exponential moving average", "0.9999"),
            ("precision", size.precision),
        ],
        "recipe_note": (
            "These are the paper's statements (appendix J.2); a released checkpoint was not compared with them. "
            f"{BATCH_SIZE} blocks of {BLOCK_LENGTH:,} tokens in each of {model.iterations:,} iterations would "
            f"make {BATCH_SIZE * BLOCK_LENGTH * model.iterations / 1e9:.0f} billion tokens, twice the paper's "
            "number; the paper does not say where the factor comes from."
        ),
        "metrics": metrics,
        "original_source": model.original_source,
        "conversion_note": conversion_note(model),
        "model_path": model.name,
        "block_length": f"{BLOCK_LENGTH:,}",
        "limits": [
            "The training text is English from the web. Other languages, code and specialised fields are outside it.",
            "The model follows no instructions and holds no conversation: it fills masks and continues text.",
            "Samples can repeat the biases, the falsehoods and the offensive language of web pages. How far they do "
            "was not studied here.",
        ],
        "license_text": (
            "Apache 2.0, as in the metadata. The weights are the work of the paper's authors: read the terms at their "
            "source before you pass on a converted copy."
        ),
    }


def conversion_note(model: PaperModel) -> str:
    """What is known about where the original weights are."""
    note = (
        "A checkpoint of the original code is converted once into a folder that `from_pretrained` reads, with GPT-2's "
        "tokenizer and its mask token beside the weights."
    )
    if model.original_source == PLACEHOLDER:
        return (
            f"{note} Where these weights are published is not known here: put the Hub name or the folder of the "
            f"original checkpoint in place of `{PLACEHOLDER}`."
        )
    return (
        f"{note} The Hub name states neither the size nor the number of iterations: the parameter count below checks "
        "the size; read the page of the source for the rest."
    )


def render(model: PaperModel) -> str:
    """The whole card of `model`."""
    metadata = ModelCardData(
        language="en",
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=["radd", "masked-diffusion", "discrete-diffusion"],
        datasets=["Skylion007/openwebtext"],
        model_name=model.name,
        eval_results=eval_results(model),
    )
    card = ModelCard.from_template(metadata, template_path=str(FOLDER / "template.md"), **template_fields(model))
    return f"{card.content.rstrip()}\n"


def write_cards(folder: Path = FOLDER) -> None:
    """Write one card a model into `folder`."""
    for model in MODELS:
        (folder / f"{model.name}.md").write_text(render(model), encoding="utf-8", newline="\n")


def _row(name: str, kilo_iterations: int | None, values: tuple[float, ...]) -> list[str]:
    iterations = "not stated" if kilo_iterations is None else f"{kilo_iterations}k"
    return [name, iterations, *(f"{value:.2f}" for value in values)]


if __name__ == "__main__":
    write_cards()
