"""The model cards: their metadata, their numbers against a second copy of the paper's tables, their snippets."""

import ast
import builtins
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import jinja2
import jinja2.meta
import pytest
from huggingface_hub import ModelCard, ModelCardData
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radd_hf import RADDConfig, RADDForMaskedDiffusion, conversion
from radd_hf.conversion import export_original_checkpoint

FOLDER = Path(__file__).parents[1] / "model_cards"

# Copied from the paper's source, tables 1, 2 and 7: LAMBADA, WikiText2, PTB, WikiText103, One Billion Words.
TABLE_1 = {
    "GPT-2 (autoregressive)": (45.04, 42.43, 138.43, 41.60, 75.20),
    "D3PM": (93.47, 77.28, 200.82, 75.16, 138.92),
    "PLAID": (57.28, 51.80, 142.60, 50.86, 91.12),
    "SEDD-Uniform": (65.40, 50.27, 140.12, 49.60, 101.37),
    "SEDD-Unscale": (52.21, 44.75, 130.49, 43.14, 80.70),
    "SEDD-Scale": (50.92, 41.84, 114.24, 40.62, 79.29),
    "RADD-DSE": (49.57, 38.83, 111.74, 37.46, 72.35),
    "RADD-t-DCE": (50.56, 39.02, 109.03, 36.38, 72.60),
    "RADD-λ-DCE": (51.70, 39.98, 107.85, 37.98, 72.99),
    "RADD-AO": (50.27, 38.26, 110.38, 35.90, 74.28),
}
TABLE_2 = {
    "GPT-2 (autoregressive)": (35.66, 31.80, 123.14, 31.39, 55.72),
    "SEDD-Unscale": (44.60, 34.85, 93.26, 32.97, 67.91),
    "SEDD-Scale": (42.77, 31.04, 87.12, 29.98, 61.19),
    "RADD-DSE": (42.30, 29.17, 75.16, 28.03, 57.45),
    "RADD-t-DCE": (43.24, 30.19, 78.77, 29.36, 57.95),
    "RADD-λ-DCE": (44.10, 30.60, 82.08, 29.29, 60.32),
    "RADD-AO": (41.96, 29.96, 79.06, 28.51, 57.07),
}
TABLE_7 = {
    "RADD-t-DCE": (48.92, 37.44, 102.49, 37.20, 70.58),
    "RADD-λ-DCE": (49.74, 37.13, 98.84, 36.66, 69.77),
    "RADD-AO": (49.43, 36.86, 102.36, 35.25, 70.71),
}
# Steps, perplexity under GPT-2 large, entropy and seconds of RADD-medium, from table 3.
TABLE_3 = [
    [32, 64, 128, 256, 512, 1024, 2048, 4096],
    [158, 113, 96, 89, 84, 83, 81, 81],
    [8.28, 8.21, 8.18, 8.15, 8.14, 8.12, 8.13, 8.13],
    [0.45, 0.80, 1.54, 2.96, 5.32, 8.39, 12.28, 18.20],
]

# card name -> row of the paper, number of the table, loss_type, iterations, training tokens, equation
CARDS = {
    "radd-small-dse": ("RADD-DSE", 1, "dse", "400,000", "105 billion", "2.6"),
    "radd-small-t-dce": ("RADD-t-DCE", 1, "t_dce", "400,000", "105 billion", "3.5"),
    "radd-small-lambda-dce": ("RADD-λ-DCE", 1, "lambda_dce", "400,000", "105 billion", "3.6"),
    "radd-small-ao": ("RADD-AO", 1, "ao", "400,000", "105 billion", "2.11"),
    "radd-small-t-dce-1000k": ("RADD-t-DCE", 7, "t_dce", "1,000,000", "262 billion", "3.5"),
    "radd-small-lambda-dce-1000k": ("RADD-λ-DCE", 7, "lambda_dce", "1,000,000", "262 billion", "3.6"),
    "radd-small-ao-1000k": ("RADD-AO", 7, "ao", "1,000,000", "262 billion", "2.11"),
    "radd-medium-dse": ("RADD-DSE", 2, "dse", "400,000", "105 billion", "2.6"),
    "radd-medium-t-dce": ("RADD-t-DCE", 2, "t_dce", "400,000", "105 billion", "3.5"),
    "radd-medium-lambda-dce": ("RADD-λ-DCE", 2, "lambda_dce", "400,000", "105 billion", "3.6"),
    "radd-medium-ao": ("RADD-AO", 2, "ao", "400,000", "105 billion", "2.11"),
}
TABLES = {1: TABLE_1, 2: TABLE_2, 7: TABLE_7}

# The public interface (section 3 of the design), as far as a card may use it.
IMPORTS = {
    "radd_hf": {
        *("RADDConfig", "RADDModel", "RADDForMaskedDiffusion", "RADDGenerationConfig", "RADDGenerationOutput"),
        *("NoiseSchedule", "LogLinearNoise", "GeometricNoise", "CosineNoise", "get_noise_schedule"),
        *("diffusion_loss", "RADDTrainer", "RADDTrainingArguments", "InfillingPipeline"),
        *("estimate_likelihood", "expected_nfe"),
    },
    "radd_hf.conversion": {"convert_original_checkpoint"},
    "transformers": {"AutoTokenizer", "pipeline"},
}
MODULES = {"torch", "radd_hf"}
ATTRIBUTES = {
    "model": {"diffusion_generate", "generate", "concrete_score", "num_parameters", "config"},
    "output": {"sequences", "nfe", "forward_passes", "history"},
    "likelihood": {"nll", "standard_error", "num_tokens", "perplexity", "bits_per_token"},
    "radd_hf": IMPORTS["radd_hf"],
}
KEYWORDS = {
    "diffusion_generate": {
        *("input_ids", "generation_config", "attention_mask", "logits_processor", "streamer", "generator"),
        *("max_new_tokens", "max_length", "batch_size", "algorithm", "num_steps", "order", "use_cache", "temperature"),
        *("top_k", "top_p", "sampling_dtype", "num_return_sequences", "return_dict_in_generate", "output_history"),
        *("seed", "do_sample", "mask_token_id"),
    },
    "estimate_likelihood": {"loss_type", "num_samples", "attention_mask", "loss_mask", "generator", "mask_token_id"},
    "convert_original_checkpoint": {"source", "out_dir"},
    "pipeline": {"model", "tokenizer"},
}


def load_builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_cards_build", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def table_after(text: str, title: str) -> list[list[str]]:
    """The cells of the first Markdown table that follows `title`, without the ruler."""
    lines = text[text.index(title) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    stop = next(i for i, line in enumerate(lines) if i > start and not line.startswith("|"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:stop]]
    return [rows[0], *rows[2:]]


def snippets(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def test_there_is_one_card_for_each_model_of_the_paper() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} - {"template"} == set(CARDS)


def test_rendering_again_gives_the_committed_bytes(tmp_path: Path) -> None:
    load_builder().write_cards(tmp_path)
    rendered = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert rendered == {f"{name}.md": (FOLDER / f"{name}.md").read_bytes() for name in CARDS}


@pytest.mark.parametrize("name", CARDS)
def test_metadata(name: str) -> None:
    data = ModelCard.load(FOLDER / f"{name}.md").data
    assert (data.license, data.language, data.library_name) == ("apache-2.0", "en", "transformers")
    assert data.pipeline_tag == "fill-mask"
    assert data.tags == ["radd", "masked-diffusion", "discrete-diffusion"]
    assert data.datasets == ["Skylion007/openwebtext"]
    assert data.model_name == name


@pytest.mark.parametrize("name", CARDS)
def test_model_index_holds_the_reported_perplexities(name: str) -> None:
    row, table, *_ = CARDS[name]
    results = ModelCard.load(FOLDER / f"{name}.md").data.eval_results
    assert [result.dataset_name for result in results] == ["LAMBADA", "WikiText2", "PTB", "WikiText103", "1BW"]
    assert tuple(result.metric_value for result in results) == TABLES[table][row]
    for result in results:
        assert result.metric_type == "perplexity"
        assert "reported" in result.metric_name and "not re-measured" in result.metric_name
        assert result.verified is False
        assert result.source_name == f"Reported by the paper, table {table}"
        assert result.source_url == "https://arxiv.org/abs/2406.03736"


@pytest.mark.parametrize("name", CARDS)
def test_table_compares_with_every_row_of_the_size(name: str) -> None:
    row, table, *_ = CARDS[name]
    text = read(name)
    header, *rows = table_after(text, "Zero-shot perplexity")
    assert header == ["model", "iterations", "LAMBADA", "WikiText2", "PTB", "WikiText103", "1BW"]

    own = [cells for cells in rows if cells[0].startswith("**")]
    kilo = "1000k" if table == 7 else "400k"
    assert own == [[f"**{cell}**" for cell in (row, kilo, *(f"{value:.2f}" for value in TABLES[table][row]))]]

    def iterations(method: str) -> str:
        return "400k" if method.startswith(("SEDD", "RADD")) else "not stated"

    same_size = TABLE_1 if "small" in name else TABLE_2
    expected = {(method, iterations(method)): values for method, values in same_size.items()}
    if "small" in name:
        expected |= {(method, "1000k"): values for method, values in TABLE_7.items()}
    plain = [[cell.strip("*") for cell in cells] for cells in rows]
    assert len(plain) == len(expected)
    assert {(cells[0], cells[1]): tuple(map(float, cells[2:])) for cells in plain} == expected
    assert "reported by the paper, not re-measured here" in text
    assert "upper bounds" in text


def test_generation_numbers_are_on_the_card_of_the_model_that_made_them() -> None:
    assert [name for name in CARDS if "Unconditional samples:" in read(name)] == ["radd-medium-lambda-dce"]
    rows = table_after(read("radd-medium-lambda-dce"), "Unconditional samples: reported by the paper")
    assert [[float(cell) for cell in cells[1:]] for cells in rows] == TABLE_3


@pytest.mark.parametrize("name", CARDS)
def test_parameters_follow_from_the_architecture(name: str) -> None:
    text = read(name)
    facts = dict(table_after(text, "## Architecture"))
    layers, width = int(facts["layers"]), int(facts["hidden size"].replace(",", ""))
    assert (layers, width, int(facts["attention heads"])) == ((12, 768, 12) if "small" in name else (24, 1024, 16))
    vocabulary = 50_258
    attention, mlp, norm = 4 * width**2, 8 * width**2 + 5 * width, 2 * width
    output = width * vocabulary + vocabulary
    parameters = vocabulary * width + layers * (attention + mlp + 2 * norm) + norm + output
    assert facts["parameters"] == f"{parameters:,}"
    assert parameters == (162_265_682 if "small" in name else 405_191_762)
    assert f"model.num_parameters() == {parameters}\n" in text


@pytest.mark.parametrize("name", CARDS)
def test_recipe_is_the_papers(name: str) -> None:
    _, _, loss_type, iterations, tokens, equation = CARDS[name]
    text = read(name)
    _, *rows = table_after(text, "**Recipe.**")
    recipe = dict(rows)
    assert recipe == {
        "iterations": iterations,
        "training tokens, as the paper gives them": f"about {tokens}",
        "batch size": "512",
        "learning rate": "3e-4",
        "warm-up": "2,500 iterations",
        "weight decay": "0.03",
        "dropout": "0.02",
        "gradient clipping": "norm 1",
        "exponential moving average": "0.9999",
        "precision": "float16" if "small" in name else "not stated",
    }
    loss = next(line for line in text.splitlines() if line.startswith("**Loss.**"))
    assert f'`loss_type="{loss_type}"`' in loss and f"equation {equation} of the paper" in loss
    assert "**Noise schedule.** Log-linear" in text


@pytest.mark.parametrize("name", CARDS)
def test_original_source_is_named_only_where_it_is_known(name: str) -> None:
    (source,) = re.findall(r'convert_original_checkpoint\("(.*?)"', read(name))
    known = {"radd-small-lambda-dce": "JingyangOu/radd-lambda-dce"}
    assert source == known.get(name, "ORIGINAL_REPO_OR_FOLDER")
    assert read(name).count("JingyangOu/") == (name in known)


@pytest.mark.parametrize("name", CARDS)
def test_snippets_use_the_public_interface_only(name: str) -> None:
    codes = snippets(read(name))
    assert len(codes) == 5
    known = set(dir(builtins))
    called = set()
    for tree in map(ast.parse, codes):
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                assert {alias.name for alias in node.names} <= IMPORTS[node.module]
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= MODULES
            if isinstance(node, ast.Import | ast.ImportFrom):
                known |= {alias.asname or alias.name for alias in node.names}
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
        for node in nodes:
            if isinstance(node, ast.Name):
                assert node.id in known
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ATTRIBUTES:
                assert node.attr in ATTRIBUTES[node.value.id]
            if isinstance(node, ast.Call):
                function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                called.add(function)
                if function in KEYWORDS:
                    assert {keyword.arg for keyword in node.keywords} <= KEYWORDS[function]
                if function == "pipeline":
                    assert ast.literal_eval(node.args[0]) == "radd-infilling"
    assert called >= {*KEYWORDS, "from_pretrained"}


def test_snippets_differ_in_names_and_numbers_only() -> None:
    def plain(name: str) -> list[str]:
        source = re.search(r'convert_original_checkpoint\("(.*?)"', read(name)).group(1)
        parameters = r"num_parameters\(\) == \d+"
        return [re.sub(parameters, "", code.replace(name, "").replace(source, "")) for code in snippets(read(name))]

    assert all(plain(name) == plain("radd-small-lambda-dce") for name in CARDS)


def gpt2_sized_tokenizer() -> PreTrainedTokenizerFast:
    """50,257 tokens as GPT-2 has, its bytes and its end token among them; the others stand for nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"unused {i}" for i in range(50_256 - len(alphabet))), "<|endoftext|>"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All five in turn, on a stand-in of the original's format: GPT-2's vocabulary, one narrow block."""
    name = "radd-small-lambda-dce"
    monkeypatch.chdir(tmp_path)
    stand_in = RADDForMaskedDiffusion(RADDConfig(hidden_size=4, num_hidden_layers=1, num_attention_heads=1))
    export_original_checkpoint(stand_in, "JingyangOu/radd-lambda-dce")
    monkeypatch.setattr(conversion, "load_tokenizer", lambda source: gpt2_sized_tokenizer())
    printed: list[str] = []
    names = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    for code in snippets(read(name)):
        exec(code.replace("162265682", str(stand_in.num_parameters())), names)
    text, nfe, samples, infilled, nats, perplexity = printed
    assert text.startswith("The library opens at") and "[MASK]" not in text
    assert len(ast.literal_eval(samples)) == 2
    assert "The library opens at" in infilled and "'infills'" in infilled
    # the output layer of the stand-in is zero: every token costs ln(50257) nats
    assert float(perplexity.split()[0]) == pytest.approx(50_257, rel=1e-3)


@pytest.mark.parametrize("name", CARDS)
def test_card_says_what_it_is_not(name: str) -> None:
    limits = read(name).split("## Limits")[1].split("## Licence")[0]
    for subject in ("not the\n  exact likelihood", "1,024 tokens", "English", "no instructions", "biases"):
        assert subject in limits


@pytest.mark.parametrize("name", CARDS)
def test_citation(name: str) -> None:
    citation = read(name).split("```bibtex")[1]
    authors = "Jingyang Ou|Shen Nie|Kaiwen Xue|Fengqi Zhu|Jiacheng Sun|Zhenguo Li|Chongxuan Li".replace("|", " and ")
    assert f"author    = {{{authors}}}" in citation
    assert (
        "{Your Absorbing Discrete Diffusion Secretly Models the Conditional Distributions of Clean Data}" in citation
    )
    assert "{2025}" in citation and "arxiv.org/abs/2406.03736" in citation


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.*")), ids=lambda path: path.name)
def test_no_machine_path(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.:/])(/(work|home|root|tmp|mnt|data|opt|var|usr|Users)\b|~/|[A-Z]:\\)", text)


def test_builder_fills_every_placeholder_and_no_other() -> None:
    builder = load_builder()
    tree = jinja2.Environment().parse((FOLDER / "template.md").read_text(encoding="utf-8"))
    asked = jinja2.meta.find_undeclared_variables(tree) - {"card_data"}
    for model in builder.MODELS:
        assert set(builder.template_fields(model)) == asked


def test_template_serves_a_model_of_a_user() -> None:
    card = ModelCard.from_template(
        ModelCardData(license="mit", library_name="transformers"),
        template_path=str(FOLDER / "template.md"),
        model_name="novel-radd",
        summary="A small model of one novel.",
        architecture=[("layers", 2)],
        parameters=1234,
        loss_name="Any-order autoregressive loss (AO)",
        loss_type="ao",
        loss_text="Exactly k positions are masked.",
        schedule="Cosine.",
        data="One novel.",
        recipe=[("learning rate", "1e-3")],
        metrics=[
            {"title": "Perplexity", "note": "128 draws.", "header": ["split", "perplexity"], "rows": [["test", 9.5]]}
        ],
        model_path="someone/novel-radd",
        block_length=128,
        limits=["It has read one book."],
        license_text="MIT.",
    )
    assert card.data.license == "mit" and card.data.eval_results is None
    assert table_after(card.text, "## Architecture") == [["", ""], ["layers", "2"], ["parameters", "1,234"]]
    assert table_after(card.text, "**Recipe.**") == [["setting", "value"], ["learning rate", "1e-3"]]
    assert table_after(card.text, "**Perplexity**") == [["split", "perplexity"], ["test", "9.5"]]
    assert 'from_pretrained("someone/novel-radd")' in card.text and "- It has read one book." in card.text
    for foreign in ("Convert", "JingyangOu", "OpenWebText", "GPT-2", "English", "reported", "None", "{{", "{%"):
        assert foreign not in card.text
    assert "\n\n\n" not in card.text


@pytest.mark.parametrize("name", CARDS)
def test_nothing_of_the_template_is_left(name: str) -> None:
    text = read(name)
    assert not re.search(r"\{\{|\{%|None|Undefined", text)
    assert text.endswith("```\n") and "\n\n\n" not in text
