"""Original checkpoints: the converted folder against the original code's figures, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from radd_hf import conversion
from radd_hf.conversion import convert_config, convert_original_checkpoint, key_map, main
from radd_hf.generation_config_radd import RADDGenerationConfig
from radd_hf.losses import ao_loss, dse_loss, lambda_dce_loss, masked_token_nll, sum_over_masked, t_dce_loss
from radd_hf.modeling_radd import RADDForMaskedDiffusion
from radd_hf.noise_schedule_radd import get_noise_schedule

GOLDEN = Path(__file__).parent / "fixtures/radd_original"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
CONFIG = json.loads((GOLDEN / "config.json").read_text())
IO = load_file(GOLDEN / "io.safetensors")
MASK, LENGTH = 96, 32
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden checkpoint, converted."""
    return convert_original_checkpoint(GOLDEN, tmp_path_factory.mktemp("converted") / "a" / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> RADDForMaskedDiffusion:
    return RADDForMaskedDiffusion.from_pretrained(folder)


def write_original(folder: Path, weights: Weights | None = None, **config) -> Path:
    """A checkpoint in the original format: the golden one, with other weights or other config fields."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(load_file(GOLDEN / "model.safetensors") if weights is None else weights, folder / "model.safetensors")
    return folder


def assert_nothing_written(out_dir: Path):
    """Neither `out_dir` nor a temporary folder beside it; the sources are the only neighbours."""
    assert not out_dir.exists()
    assert [path.name for path in out_dir.parent.iterdir() if path.name != "source"] == []


# The original code's figures


def test_golden_logits_and_log_probs(folder: Path, model: RADDForMaskedDiffusion):
    auto = AutoModel.from_pretrained(folder)
    assert type(auto) is RADDForMaskedDiffusion and not auto.training
    masked = IO["xt"] == MASK
    assert 0 < masked.sum() < masked.numel()
    for loaded in (model, auto):
        with torch.no_grad():
            logits = loaded(IO["xt"]).logits
        assert logits.dtype == torch.float32 and bool((logits[..., MASK] == float("-inf")).all())
        torch.testing.assert_close(logits[..., :MASK], IO["logits"][..., :MASK], rtol=0.0, atol=1e-4)
        log_probs = logits.log_softmax(-1)[..., :MASK]
        torch.testing.assert_close(log_probs, IO["log_probs"][..., :MASK], rtol=0.0, atol=1e-4)


def test_golden_losses(model: RADDForMaskedDiffusion):
    """The original's losses at its own x_t, t and k, through the converted config's noise schedule."""
    masked = IO["xt"] == MASK
    with torch.no_grad():
        nll = sum_over_masked(masked_token_nll(model, IO["x0"], IO["xt"], masked), masked)
    t, k, noise = torch.tensor(EXPECTED["t"]), masked.sum(-1), get_noise_schedule(model.config)
    assert k.tolist() == EXPECTED["k"]
    assert dse_loss(nll, t, noise).tolist() == pytest.approx(EXPECTED["dse"], rel=1e-4)
    assert t_dce_loss(nll, k, t, noise).tolist() == pytest.approx(EXPECTED["t_dce"], rel=1e-4)
    assert lambda_dce_loss(nll, t).tolist() == pytest.approx(EXPECTED["lambda_dce_at_lambda_equal_t"], rel=1e-4)
    assert ao_loss(nll, k, torch.tensor(LENGTH)).tolist() == pytest.approx(EXPECTED["any_order_k"], rel=1e-4)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_golden_order_nlls(model: RADDForMaskedDiffusion, direction: str):
    """One network call a sequence: row i of the batch is the text before position i is revealed."""
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    hidden = hidden.triu() if direction == "forward" else hidden.tril()
    nlls = []
    for x0 in IO["x0"]:
        with torch.no_grad():
            log_probs = model(torch.where(hidden, MASK, x0)).logits.log_softmax(-1)  # (L, L, V)
        nlls.append(-log_probs.diagonal().T.gather(-1, x0[:, None]).sum().item())
    assert nlls == pytest.approx(EXPECTED[f"ar_{direction}_nll"], rel=1e-4)


# What the folder holds


def test_folder(folder: Path, model: RADDForMaskedDiffusion):
    assert {path.name for path in folder.parent.iterdir()} == {folder.name}
    files = {path.name for path in folder.iterdir()}
    code = {"configuration_radd.py", "modeling_radd.py", "noise_schedule_radd.py", "generation_radd.py"}
    assert files >= {"config.json", "generation_config.json", "model.safetensors"} | code
    assert isinstance(model.generation_config, RADDGenerationConfig)
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "model_type": "radd",
        "architectures": ["RADDForMaskedDiffusion"],
        "vocab_size": 97,
        "mask_token_id": 96,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "hidden_dropout": 0.02,
        "noise_schedule": "log_linear",
        "noise_eps": 1e-3,
        "training_loss": "lambda_dce",
        "dtype": "float32",
    }
    assert {name: config[name] for name in expected} == expected
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert sum(weight.numel() for weight in weights.values()) == model.num_parameters()


def test_key_map_covers_every_parameter_once(model: RADDForMaskedDiffusion):
    ours = [new for parts in key_map(2).values() for new in parts]
    assert sorted(ours) == sorted(name for name, _ in model.named_parameters())
    assert key_map(2).keys() == load_file(GOLDEN / "model.safetensors").keys() - {"rotary_emb.inv_freq"}


def test_conversion_draws_no_random_numbers_and_keeps_the_dtype(tmp_path: Path):
    weights = {key: weight.bfloat16() for key, weight in load_file(GOLDEN / "model.safetensors").items()}
    del weights["rotary_emb.inv_freq"]  # may be absent
    state = torch.get_rng_state()
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    out = convert_original_checkpoint(str(write_original(tmp_path / "source", weights)), str(tmp_path / "out"))
    assert torch.equal(state, torch.get_rng_state())
    assert {weight.dtype for weight in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("original", "ours"),
    [("t_DSE", "dse"), ("DSE", "dse"), ("t_DCE", "t_dce"), ("lambda_DCE", "lambda_dce"), ("k_DCE", "ao")],
)
def test_loss_names(original: str, ours: str):
    assert convert_config(CONFIG | {"training": {"loss_type": original}}).training_loss == ours


def test_config_without_a_loss():
    assert convert_config({key: CONFIG[key] for key in ("tokens", "model", "noise")}).training_loss is None


def test_noise_names():
    config = convert_config(CONFIG | {"noise": {"type": "geometric", "sigma_min": 1e-3, "sigma_max": 10}})
    assert (config.noise_schedule, config.noise_sigma_min, config.noise_sigma_max) == ("geometric", 1e-3, 10)
    figures = EXPECTED["noise"]["loglinear_eps1e-3"]
    noise = get_noise_schedule(convert_config(CONFIG | {"noise": {"type": "loglinear"}}))
    t = torch.tensor(figures["t"], dtype=torch.float64)
    assert noise.total(t).tolist() == pytest.approx(figures["sigma_bar"], rel=1e-4)


def test_a_hub_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def download(repo_id: str, **options) -> str:
        calls.append((repo_id, options))
        return str(GOLDEN)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    out = convert_original_checkpoint("someone/radd", tmp_path / "out")
    assert calls == [("someone/radd", {"allow_patterns": ["config.json", "model.safetensors"]})]
    assert (out / "model.safetensors").is_file()
    Path("someone").mkdir()
    write_original(Path("someone/radd"))
    convert_original_checkpoint("someone/radd", "relative")
    assert len(calls) == 1 and (tmp_path / "relative/config.json").is_file()  # a folder that exists wins


# What is refused


def rename(weights: Weights):
    weights["blocks.0.attn_qkv.bias"] = weights.pop("blocks.0.norm1.bias")


def drop(weights: Weights):
    del weights["output_layer.linear.bias"]


def misshape(weights: Weights):
    weights["blocks.1.attn_qkv.weight"] = torch.zeros(64, 64)


def all_three(weights: Weights):
    rename(weights), drop(weights), misshape(weights)


REPORTS = {
    rename: [r"missing keys: \['blocks.0.norm1.bias'\]", r"unexpected keys: \['blocks.0.attn_qkv.bias'\]"],
    drop: [r"missing keys: \['output_layer.linear.bias'\]"],
    misshape: [r"mis-shaped keys: \['blocks.1.attn_qkv.weight: \(64, 64\) instead of \(192, 64\)'\]"],
    all_three: [
        r"missing keys: \['blocks.0.norm1.bias', 'output_layer.linear.bias'\]",
        r"mis-shaped keys: \['blocks.1.attn_qkv.weight: \(64, 64\) instead of \(192, 64\)'\]",
        r"unexpected keys: \['blocks.0.attn_qkv.bias'\]",
    ],
}


@pytest.mark.parametrize("change", REPORTS, ids=lambda change: change.__name__)
def test_keys_are_listed_and_nothing_is_written(tmp_path: Path, change: Callable[[Weights], None]):
    weights = load_file(GOLDEN / "model.safetensors")
    change(weights)
    source = write_original(tmp_path / "source", weights)
    with pytest.raises(ValueError, match=".*; ".join(REPORTS[change]) + r"\.$") as error:
        convert_original_checkpoint(source, tmp_path / "out")
    assert "`source` must hold exactly the weights" in str(error.value)
    assert ("missing" in str(error.value)) == (change is not misshape)
    assert_nothing_written(tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "weight", "message"),
    [
        ("rotary_emb.inv_freq", torch.full((8,), 0.5), r"rotary frequencies: \['rotary_emb.inv_freq: \[0.5, .*1.0"),
        ("rotary_emb.inv_freq", torch.ones(4), r"mis-shaped keys: \['rotary_emb.inv_freq: \(4,\) instead of \(8,\)'"),
        ("blocks.0.norm1.bias", torch.ones(64).long(), r"not floating-point: \['blocks.0.norm1.bias: torch.int64'"),
    ],
)
def test_values_that_cannot_be_used(tmp_path: Path, key: str, weight: torch.Tensor, message: str):
    source = write_original(tmp_path / "source", load_file(GOLDEN / "model.safetensors") | {key: weight})
    with pytest.raises(ValueError, match=message):
        convert_original_checkpoint(source, tmp_path / "out")
    assert_nothing_written(tmp_path / "out")


def model_fields(**fields) -> dict:
    return {"model": CONFIG["model"] | fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"noise": {"type": "cosine"}}, r"`noise.type` .* must be one of \['loglinear', 'geometric'\], got 'cosine'"),
        ({"noise": {"type": ["loglinear"]}}, r"`noise.type` .*got \['loglinear'\]"),
        ({"noise": {}}, r"`source` must have `noise.type` in its config.json, got \{.*\"tokens\": 96"),
        ({"noise": {"type": "geometric", "sigma_min": 1e-4}}, r"must have `noise.sigma_max`"),
        ({"noise": {"type": "geometric", "sigma_min": 2, "sigma_max": 1}}, r"`noise_sigma_max` must be .*got 1"),
        ({"training": {"loss_type": "dce"}}, r"`training.loss_type` .* must be one of \['t_DSE', .*\], got 'dce'"),
        ({"tokens": "96"}, r"`tokens` in `source`'s config.json must be a positive integer, got '96'"),
        ({"tokens": True}, r"`tokens` .* must be a positive integer, got True"),
        ({"model": None}, r"must have `model.hidden_size`"),
        (model_fields(n_blocks=0), r"`model.n_blocks` .* must be a positive integer, got 0"),
        (model_fields(dropout="no"), r"`model.dropout` .* must be a number, got 'no'"),
        (model_fields(n_heads=5), r"`hidden_size` must be divisible by `num_attention_heads`"),
        (model_fields(n_blocks=3), r"missing keys: \['blocks.2.attn_out.weight', .*'blocks.2.norm2.weight'\]\.$"),
        (model_fields(n_blocks=1), r"unexpected keys: \['blocks.1.attn_out.weight', .*'blocks.1.norm2.weight'\]\.$"),
        ({"tokens": 95}, r"'vocab_embed.embedding: \(97, 64\) instead of \(96, 64\)'\]\.$"),
    ],
)
def test_configs_that_do_not_fit(tmp_path: Path, fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        convert_original_checkpoint(write_original(tmp_path / "source", **fields), tmp_path / "out")
    assert_nothing_written(tmp_path / "out")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"got '.*source' without \['config.json'\]"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"got '.*source' without \['model.safetensors'\]"),
        (lambda folder: (folder / "config.json").write_text("{"), r"valid JSON in config.json, got '.*json'"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff"), r"must hold valid JSON in config.json"),
        (lambda folder: (folder / "config.json").write_text("[" * 10**5), "valid JSON in config.json"),
        (lambda folder: (folder / "config.json").write_text("[1]"), r"must hold a JSON object .*got list"),
        (lambda folder: os.truncate(folder / "model.safetensors", 300_000), r"whole model.safetensors, got '.*'"),
        (lambda folder: os.truncate(folder / "model.safetensors", 0), r"whole model.safetensors, got '.*'"),
    ],
)
def test_damaged_files(tmp_path: Path, damage: Callable[[Path], object], message: str):
    source = write_original(tmp_path / "source")
    damage(source)
    with pytest.raises(ValueError, match=message):
        convert_original_checkpoint(source, tmp_path / "out")
    assert_nothing_written(tmp_path / "out")


def test_a_source_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The real Hub client, offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "source"))
    expected = r"`source` must be a folder with config.json and model.safetensors, or a Hub repository, got "
    with pytest.raises(ValueError, match=expected + r"'no/such': no such folder here, and the Hub says: Local"):
        convert_original_checkpoint("no/such", tmp_path / "out")
    with pytest.raises(ValueError, match=expected + r"'/no/such/folder': .*HFValidationError"):
        convert_original_checkpoint("/no/such/folder", tmp_path / "out")
    with pytest.raises(ValueError, match=expected + r"'no/such', which is no folder"):
        convert_original_checkpoint(Path("no/such"), tmp_path / "out")
    with pytest.raises(ValueError, match=expected + r"'.*config.json', which is no folder"):
        convert_original_checkpoint(str(GOLDEN / "config.json"), tmp_path / "out")
    assert_nothing_written(tmp_path / "out")


def test_an_out_dir_in_use(tmp_path: Path):
    used = tmp_path / "out"
    used.mkdir()
    (used / "mine.txt").write_text("keep")
    for out_dir in (used, used / "mine.txt", used / "mine.txt" / "below"):
        with pytest.raises(ValueError, match=r"`out_dir` must be a new or an empty folder, got '.*out"):
            convert_original_checkpoint(GOLDEN, out_dir)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]
    assert (used / "mine.txt").read_text() == "keep"


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert_original_checkpoint(GOLDEN, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "model.safetensors").is_file()


def test_no_source(tmp_path: Path):
    with pytest.raises(ValueError, match="`source` must be a path or a Hub repository, got None"):
        convert_original_checkpoint(None, tmp_path / "out")


@pytest.mark.parametrize("moment", ["while saving", "at the rename"])
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str):
    written = []

    def fail(*args):
        written.extend(path.name for path in tmp_path.rglob("*"))
        raise OSError("disk full")

    if moment == "while saving":  # after the weights
        save = RADDForMaskedDiffusion.save_pretrained
        monkeypatch.setattr(RADDForMaskedDiffusion, "save_pretrained", lambda *args: (save(*args), fail()))
    else:
        monkeypatch.setattr(conversion.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        convert_original_checkpoint(GOLDEN, tmp_path / "out")
    assert "model.safetensors" in written and "out" not in written
    assert_nothing_written(tmp_path / "out")


# Loading a converted folder that was damaged later


def test_from_pretrained_is_strict(folder: Path, tmp_path: Path):
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    weights = load_file(damaged / "model.safetensors")
    weights["model.final.weight"] = weights.pop("model.norm.weight")
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    message = r"missing keys: \['model.norm.weight'\].*unexpected keys: \['model.final.weight'\].*strict=False"
    with pytest.raises(ValueError, match=message):
        RADDForMaskedDiffusion.from_pretrained(damaged)
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(damaged)
    with CaptureLogger(logging.get_logger("transformers")) as log:
        model, info = RADDForMaskedDiffusion.from_pretrained(damaged, strict=False, output_loading_info=True)
    assert "model.norm.weight" in log.out and "model.final.weight" in log.out
    assert set(info["missing_keys"]) == {"model.norm.weight"}
    assert model.model.norm.weight.tolist() == [1.0] * 64
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


# The command line


def test_command_line(folder: Path, tmp_path: Path):
    """A process of its own, with the package from this work tree."""
    command = [sys.executable, "-m", "radd_hf.conversion", str(GOLDEN), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'out'}\n"
    assert "Warning" not in done.stderr
    for path in folder.glob("*.*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_command_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One line and an exit status, no traceback."""
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path), str(tmp_path / "out")])
    out, err = capsys.readouterr()
    assert stopped.value.code == 1 and out == ""
    assert err.startswith("error: `source` must hold config.json and model.safetensors, got ") and err.count("\n") == 1
    with pytest.raises(SystemExit) as stopped:
        main([str(GOLDEN)])
    assert stopped.value.code == 2
