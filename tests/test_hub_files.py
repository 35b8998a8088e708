"""What travels with the weights: the shipped files, and that a folder or Hub repository works without radd_hf."""

import ast
import builtins
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)
from transformers.dynamic_module_utils import get_relative_imports

import radd_hf
from radd_hf import InfillingPipeline, RADDConfig, RADDForMaskedDiffusion, RADDGenerationConfig

PACKAGE = Path(radd_hf.__file__).parent
SHIPPED = {
    "attention_radd.py",
    "canvas_radd.py",
    "checks_radd.py",
    "configuration_radd.py",
    "generation_config_radd.py",
    "generation_radd.py",
    "linear_cross_entropy_radd.py",
    "loading_radd.py",
    "modeling_radd.py",
    "noise_schedule_radd.py",
    "reveal_plan_radd.py",
    "pipeline_radd.py",
    "token_draw_radd.py",
}
WEIGHTS = {"config.json", "generation_config.json", "model.safetensors"}
TEXT = "one [MASK] three [MASK] five"
ORDER = [3, 1]

# Runs where radd_hf cannot be imported: argv are the model (folder or repository), the input and the output folder.
REMOTE = """
import json, sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "radd_hf":
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


sys.meta_path.insert(0, Blocker())
try:
    import radd_hf
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("radd_hf can be imported: this test would show nothing")

import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

source, given, out = sys.argv[1:]
given = torch.load(given)
report = {}
try:
    AutoModelForMaskedLM.from_pretrained(source, trust_remote_code=False)
except ValueError as error:
    report["refused"] = str(error)
config = AutoConfig.from_pretrained(source, trust_remote_code=True)
report["config"] = [type(config).__name__, config.hidden_size, config.mask_token_id, config.noise_schedule]
for auto in (AutoModel, AutoModelForMaskedLM):
    model = auto.from_pretrained(source, trust_remote_code=True)
    with torch.no_grad():
        logits = model(given["ids"], attention_mask=given["attention_mask"]).logits
    options = model.generation_config
    report[auto.__name__] = {
        "class": type(model).__name__,
        "module": type(model).__module__,
        "logits": bool(torch.equal(logits, given["logits"])),
        "options": [type(options).__name__, options.algorithm, options.num_steps, options.order],
        "own": model.diffusion_generate(given["text_ids"], seed=5).tolist(),
        "tokens": model.diffusion_generate(
            given["ids"], attention_mask=given["attention_mask"], seed=5, algorithm="tweedie", order="random"
        ).tolist(),
    }
report["from_config"] = type(AutoModel.from_config(config, trust_remote_code=True)).__name__
pipe = pipeline("radd-infilling", model=source, trust_remote_code=True, device="cpu")
report["pipeline"] = [type(pipe).__name__, type(pipe).__module__, pipe(given["text"], seed=5)]
inferred = pipeline(model=source, trust_remote_code=True, device="cpu")
report["inferred"] = inferred(given["text"], seed=5)
model.save_pretrained(out + "/model")
AutoTokenizer.from_pretrained(source, trust_remote_code=True).save_pretrained(out + "/model")
pipe.save_pretrained(out + "/pipe")
again = pipeline("radd-infilling", model=out + "/pipe", trust_remote_code=True, device="cpu")
report["again"] = again(given["text"], seed=5)
report["imported"] = sorted(name for name in sys.modules if name.partition(".")[0] == "radd_hf")
with open(out + "/report.json", "w") as file:
    json.dump(report, file)
"""


def files(folder: Path) -> set[str]:
    return {path.name for path in Path(folder).iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "[UNK]"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    mask = AddedToken("[MASK]", special=True, normalized=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", mask_token=mask)


@pytest.fixture(scope="module")
def model(tokenizer) -> RADDForMaskedDiffusion:
    torch.manual_seed(0)
    config = RADDConfig(
        vocab_size=len(tokenizer) + 2,
        mask_token_id=tokenizer.mask_token_id,  # not the last id: must be read from the config
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        noise_schedule="cosine",
    )
    model = RADDForMaskedDiffusion(config).eval()
    torch.nn.init.normal_(model.lm_head.weight)
    model.generation_config = RADDGenerationConfig(algorithm="any_order", num_steps=3, order=ORDER)
    return model


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(model, tokenizer) -> dict:
    """Inputs and what this process, with radd_hf, makes of them."""
    mask = tokenizer.mask_token_id
    given = {
        "ids": torch.tensor([[1, mask, 3, mask, 5], [2, mask, 4, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "text": TEXT,
        "text_ids": tokenizer(TEXT, return_tensors="pt")["input_ids"],
    }
    with torch.no_grad():
        given["logits"] = model(given["ids"], attention_mask=given["attention_mask"]).logits
    given["own"] = model.diffusion_generate(given["text_ids"], seed=5).tolist()
    given["tokens"] = model.diffusion_generate(
        given["ids"], attention_mask=given["attention_mask"], seed=5, algorithm="tweedie", order="random"
    ).tolist()
    pipe = pipeline("radd-infilling", model=model, tokenizer=tokenizer, device="cpu")
    given["answer"] = pipe(TEXT, seed=5)
    return given


@pytest.fixture
def no_prompt(monkeypatch):
    """Whoever asks on the terminal whether to trust remote code fails the test."""
    monkeypatch.setattr(builtins, "input", lambda *args: pytest.fail(f"prompted: {args}"))


def test_the_shipped_set_is_every_file_with_the_suffix():
    assert {path.name for path in PACKAGE.glob("*_radd.py")} == SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_files_import_only_what_is_there_without_the_package(name):
    path = PACKAGE / name
    tree = ast.parse(path.read_text())
    siblings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            tops = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module and "." not in node.module, f"line {node.lineno}: not a sibling"
            siblings.add(node.module)
            continue
        elif isinstance(node, ast.ImportFrom):
            tops = {node.module.partition(".")[0]}
        else:
            continue
        assert tops <= {*sys.stdlib_module_names, "torch", "transformers", "safetensors"}, (
            f"line {node.lineno}: {tops}"
        )
    assert {f"{module}.py" for module in siblings} <= SHIPPED
    # transformers finds imports by a regular expression: it must see the same ones, none in a docstring
    assert set(get_relative_imports(path)) == siblings


def test_save_pretrained_writes_the_code(folder):
    assert {name for name in files(folder) if name.endswith(".py")} - {"__init__.py"} == SHIPPED
    for name in SHIPPED:
        assert (folder / name).read_text() == (PACKAGE / name).read_text()
    config = json.loads((folder / "config.json").read_text())
    head = "modeling_radd.RADDForMaskedDiffusion"
    assert config["auto_map"] == {
        "AutoConfig": "configuration_radd.RADDConfig",
        "AutoModel": head,
        "AutoModelForMaskedLM": head,
    }
    assert config["custom_pipelines"] == {
        "radd-infilling": {"impl": "pipeline_radd.InfillingPipeline", "pt": ["AutoModelForMaskedLM"]}
    }


def test_with_radd_hf_no_remote_code_is_asked_for(folder, expected, no_prompt):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = AutoConfig.from_pretrained(folder)
        assert type(config) is RADDConfig
        assert getattr(config, "custom_pipelines", None) is None
        for auto in (AutoModel, AutoModelForMaskedLM):
            model = auto.from_pretrained(folder)
            assert type(model) is RADDForMaskedDiffusion
            with torch.no_grad():
                logits = model(expected["ids"], attention_mask=expected["attention_mask"]).logits
            assert torch.equal(logits, expected["logits"])
            assert type(auto.from_config(config)) is RADDForMaskedDiffusion
        assert AutoTokenizer.from_pretrained(folder).mask_token == "[MASK]"
        pipe = pipeline("radd-infilling", model=str(folder), device="cpu")
        assert type(pipe) is InfillingPipeline
        assert pipe(TEXT, seed=5) == expected["answer"]
        fill = pipeline("fill-mask", model=str(folder), device="cpu")
        assert len(fill("one [MASK]")) == 5
    # the package wins over the files of the folder even where these are trusted
    assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)) is RADDForMaskedDiffusion


def test_generation_config_round_trip(folder, tmp_path):
    stored = json.loads((folder / "generation_config.json").read_text())
    assert (stored["algorithm"], stored["num_steps"], stored["order"]) == ("any_order", 3, ORDER)
    for source in (folder, tmp_path):
        model = AutoModelForMaskedLM.from_pretrained(source)
        options = model.generation_config
        assert type(options) is RADDGenerationConfig
        assert (options.algorithm, options.num_steps, options.order) == ("any_order", 3, ORDER)
        model.save_pretrained(tmp_path)
    plain = RADDForMaskedDiffusion(model.config)
    plain.save_pretrained(tmp_path / "plain")
    options = AutoModelForMaskedLM.from_pretrained(tmp_path / "plain").generation_config
    assert options.to_dict() == RADDGenerationConfig().to_dict()


def test_saving_again_keeps_the_code(folder, tokenizer, tmp_path, no_prompt):
    AutoModelForMaskedLM.from_pretrained(folder).save_pretrained(tmp_path / "model")
    pipeline("radd-infilling", model=str(folder), device="cpu").save_pretrained(tmp_path / "pipe")
    for name in ("model", "pipe"):
        assert SHIPPED | WEIGHTS <= files(tmp_path / name)
        first, again = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / name))
        assert again == first
    again = pipeline("radd-infilling", model=str(tmp_path / "pipe"), device="cpu")
    assert type(again) is InfillingPipeline and again.tokenizer.mask_token_id == tokenizer.mask_token_id


def hub_cache(home: Path, repository: str, folder: Path):
    """`folder` as huggingface_hub keeps a downloaded repository."""
    root = home / "hub" / f"models--{repository.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    shutil.copytree(folder, root / "snapshots" / commit)


@pytest.mark.parametrize("where", ["folder", "hub"])
def test_without_radd_hf_the_saved_code_does_the_same(where, folder, expected, tmp_path):
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    (out / "model").mkdir(parents=True)
    source = str(folder)
    if where == "hub":
        source = "radd-tests/tiny-radd"
        hub_cache(home, source, folder)
    torch.save(
        {k: expected[k] for k in ("ids", "attention_mask", "text", "text_ids", "logits")}, tmp_path / "given.pt"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_", "PYTHON"))}
    environment |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-I", "-c", REMOTE, source, str(tmp_path / "given.pt"), str(out)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads((out / "report.json").read_text())
    assert report["imported"] == []
    assert "trust_remote_code" in report["refused"]
    mask = int(expected["text_ids"][0, 1])
    assert report["config"] == ["RADDConfig", 32, mask, "cosine"]
    for auto in ("AutoModel", "AutoModelForMaskedLM"):
        loaded = report[auto]
        assert loaded["class"] == report["from_config"] == "RADDForMaskedDiffusion"
        assert loaded["module"].startswith("transformers_modules.")
        assert loaded["logits"] is True
        assert loaded["options"] == ["RADDGenerationConfig", "any_order", 3, ORDER]
        assert loaded["own"] == expected["own"]
        assert loaded["tokens"] == expected["tokens"]
    name, module, answer = report["pipeline"]
    assert name == "InfillingPipeline" and module.startswith("transformers_modules.")
    assert answer == report["inferred"] == report["again"] == expected["answer"]
    for saved in ("model", "pipe"):
        assert SHIPPED | WEIGHTS <= files(out / saved)
    # this process, with radd_hf, reads what the other one saved
    assert type(AutoModel.from_pretrained(out / "model")) is RADDForMaskedDiffusion
    assert re.search("custom_pipelines", (out / "pipe" / "config.json").read_text())
