"""The other formats of public checkpoints: MDLM's, pickles, training runs; the tokenizer; the way back; the upload."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from radd_hf import RADDConfig, RADDForMaskedDiffusion, conversion
from radd_hf.conversion import (
    convert_original_checkpoint,
    export_original_checkpoint,
    load_original_checkpoint,
    main,
)
from radd_hf.conversion_mdlm import fold_conditioning
from radd_hf.modeling_sedd import FREQUENCIES, sigma_embedding

FIXTURES = Path(__file__).parent / "fixtures"
RADD, MDLM = FIXTURES / "radd_original", FIXTURES / "mdlm_original"
RADD_CONFIG = json.loads((RADD / "config.json").read_text())
MDLM_CONFIG = json.loads((MDLM / "config.json").read_text())
# Parameters in the order in which the original's modules are made, which is that of its EMA list.
BLOCK = ("norm1.weight norm1.bias attn_qkv.weight attn_out.weight norm2.weight norm2.bias "
         "mlp.0.weight mlp.0.bias mlp.2.weight mlp.2.bias").split()  # fmt: skip
ORDER = [
    "vocab_embed.embedding",
    "rotary_emb.inv_freq",
    *(f"blocks.{i}.{name}" for i in range(2) for name in BLOCK),
    *("output_layer.norm_final.weight", "output_layer.norm_final.bias"),
    *("output_layer.linear.weight", "output_layer.linear.bias"),
]


def radd_weights() -> dict[str, torch.Tensor]:
    return load_file(RADD / "model.safetensors")


def write(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def write_run(folder: Path, state: object, config: dict = RADD_CONFIG) -> Path:
    """A training run's folder."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / "checkpoints-meta").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    torch.save(state, folder / "checkpoints-meta" / "checkpoint.pth")
    return folder


def run_state(**changes) -> dict:
    """What the original's trainer saves: the average is twice the raw weights here."""
    raw = {name: radd_weights()[name] for name in ORDER}
    shadow = [2 * weight for name, weight in raw.items() if name != "rotary_emb.inv_freq"]
    ema = {"decay": 0.9999, "num_updates": 7, "shadow_params": shadow}
    return {"optimizer": {"state": {}, "param_groups": []}, "model": raw, "ema": ema, "step": 7} | changes


def same_weights(model: RADDForMaskedDiffusion, other: RADDForMaskedDiffusion, factor: float = 1.0) -> bool:
    return all(torch.equal(a, factor * b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def assert_nothing_written(out_dir: Path):
    assert not out_dir.exists() and not list(out_dir.parent.glob(f".{out_dir.name}.*"))


@pytest.fixture(scope="module")
def radd() -> RADDForMaskedDiffusion:
    return load_original_checkpoint(RADD)


# MDLM


def test_mdlm_golden_logits(tmp_path: Path):
    """The original's logits at sigma = 0, everywhere, and its log-probabilities at the masks."""
    io = load_file(MDLM / "io.safetensors")
    out = convert_original_checkpoint(MDLM, tmp_path / "out")
    for model in (RADDForMaskedDiffusion.from_pretrained(out), load_original_checkpoint(MDLM)):
        with torch.no_grad():
            logits = model(io["xt"]).logits[..., :96]
        torch.testing.assert_close(logits, io["logits"][..., :96], rtol=0.0, atol=1e-5)
        masked = io["xt"] == 96
        assert 0 < masked.sum() < masked.numel()
        torch.testing.assert_close(logits.log_softmax(-1)[masked], io["log_probs"][masked], rtol=0.0, atol=1e-5)
    config = model.config
    assert (config.training_loss, config.noise_schedule, config.noise_eps) == ("dse", "log_linear", 1e-3)
    assert (config.hidden_dropout, config.mask_token_id, config.max_position_embeddings) == (0.1, 96, 32)


def test_mdlm_folding_is_the_definition():
    """One block's norms and gates by hand, in float64, at a conditioning of our own."""
    generator = torch.Generator().manual_seed(3)
    original = {k.removeprefix("backbone."): w for k, w in load_file(MDLM / "model.safetensors").items()}
    original = {k: torch.randn(w.shape, generator=generator, dtype=torch.float64) for k, w in original.items()}
    c = torch.randn(32, generator=generator, dtype=torch.float64)
    folded = fold_conditioning(original, c)
    x = torch.randn(64, generator=generator, dtype=torch.float64)
    m = original["blocks.1.adaLN_modulation.weight"] @ c + original["blocks.1.adaLN_modulation.bias"]
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = m.split(64)
    for name, one, two in (("norm1", shift, scale), ("norm2", mlp_shift, mlp_scale)):
        ours = folded[f"blocks.1.{name}.weight"] * x + folded[f"blocks.1.{name}.bias"]
        torch.testing.assert_close(ours, (original[f"blocks.1.{name}.weight"] * x) * (1 + two) + one)
    torch.testing.assert_close(
        folded["blocks.1.attn_out.weight"] @ x, gate * (original["blocks.1.attn_out.weight"] @ x)
    )
    h = torch.randn(256, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        folded["blocks.1.mlp.2.weight"] @ h + folded["blocks.1.mlp.2.bias"],
        mlp_gate * (original["blocks.1.mlp.2.weight"] @ h + original["blocks.1.mlp.2.bias"]),
    )
    assert sorted(folded) == sorted(radd_weights())  # RADD's names, all of them


def test_sigma_embedding():
    zero = sigma_embedding(torch.zeros(()), FREQUENCIES)
    assert zero.tolist() == [1.0] * 128 + [0.0] * 128
    one = sigma_embedding(torch.tensor([0.7]), 4)
    expected = torch.tensor([[0.7, 0.7 / 100]])
    torch.testing.assert_close(one, torch.cat([expected.cos(), expected.sin()], -1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"time_conditioning": True}, r"`time_conditioning` .* must be false, got true: the network's answer changes"),
        ({"time_conditioning": "no"}, r"`time_conditioning` .* must be true or false, got 'no'"),
        ({"cond_dim": 16}, r"mis-shaped keys: \['blocks.0.adaLN_modulation.weight: \(384, 32\) instead of \(384, 1"),
        ({"n_blocks": 10**9}, r"must hold the weights of 1000000000 blocks, as its config says, got 31 weights"),
        ({"hidden_dim": 10**12}, r"mis-shaped keys: .*'vocab_embed.embedding: \(97, 64\) instead of \(97, 10{12}\)'"),
        ({"dropout": None}, r"`dropout` .* must be a number, got None"),
    ],
)  # fmt: skip
def test_mdlm_refusals(tmp_path: Path, fields: dict, message: str):
    source = write(tmp_path / "source", MDLM_CONFIG | fields, load_file(MDLM / "model.safetensors"))
    with pytest.raises(ValueError, match=message):
        convert_original_checkpoint(source, tmp_path / "out")
    assert_nothing_written(tmp_path / "out")


def test_mdlm_that_does_not_say_whether_it_knows_the_time(tmp_path: Path):
    config = {key: value for key, value in MDLM_CONFIG.items() if key != "time_conditioning"}
    source = write(tmp_path / "source", config, load_file(MDLM / "model.safetensors"))
    with pytest.raises(ValueError, match="must have `time_conditioning` in its config.json"):
        convert_original_checkpoint(source, tmp_path / "out")


# Pickles, training runs and prefixes


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module.model."])
def test_prefixes_of_wrappers(tmp_path: Path, radd: RADDForMaskedDiffusion, prefix: str):
    weights = {prefix + key: weight for key, weight in radd_weights().items()}
    source = write(tmp_path / "source", RADD_CONFIG, weights)
    assert same_weights(load_original_checkpoint(source), radd)


def test_one_weight_under_two_prefixes(tmp_path: Path):
    weights = radd_weights()
    weights["module.vocab_embed.embedding"] = weights["vocab_embed.embedding"].clone()
    source = write(tmp_path / "source", RADD_CONFIG, weights)
    with pytest.raises(ValueError, match="hold each weight once, got '(module.)?vocab_embed.embedding' and"):
        convert_original_checkpoint(source, tmp_path / "out")


def test_pytorch_model_bin(tmp_path: Path, radd: RADDForMaskedDiffusion):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(RADD_CONFIG))
    torch.save(radd_weights(), source / "pytorch_model.bin")
    out = convert_original_checkpoint(source, tmp_path / "out")
    assert same_weights(RADDForMaskedDiffusion.from_pretrained(out), radd)
    assert not list(out.glob("*.bin"))


def test_a_hub_repository_with_a_pickle_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        (tmp_path / "hub").mkdir(exist_ok=True)
        (tmp_path / "hub" / "config.json").write_text(json.dumps(RADD_CONFIG))
        if "pytorch_model.bin" in allow_patterns:
            torch.save(radd_weights(), tmp_path / "hub" / "pytorch_model.bin")
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load_original_checkpoint("someone/radd")
    assert asked == [["config.json", "model.safetensors"], ["config.json", "pytorch_model.bin"]]


@pytest.mark.parametrize("ema", [True, False])
def test_training_run(tmp_path: Path, radd: RADDForMaskedDiffusion, ema: bool, capsys: pytest.CaptureFixture[str]):
    source = write_run(tmp_path / "source", run_state())
    main([str(source), str(tmp_path / "out"), *([] if ema else ["--raw"])])
    model = RADDForMaskedDiffusion.from_pretrained(tmp_path / "out")
    assert same_weights(model, radd, 2.0 if ema else 1.0)
    ours, expected = model.config.to_dict(), radd.config.to_dict()
    assert all(ours[name] == expected[name] for name in ("noise_schedule", "training_loss", "hidden_dropout"))
    assert ("exponential average" in (tmp_path / "out" / "README.md").read_text()) == ema


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, r"the raw weights as `model` in '.*checkpoint.pth', got \{.*\"step\": 7"),
        ({"ema": None}, r"as `ema.shadow_params` in '.*', got none; ask for the raw ones with ema=False \(--raw\)"),
        ({"ema": {"shadow_params": [torch.ones(2)]}}, "one averaged weight for each of its 25 parameters .*, got 1"),
        ({"ema": {"shadow_params": [torch.ones(2)] * 25}}, r"mis-shaped keys: .*'vocab_embed.embedding: \(2,\)"),
        ({"ema": {"shadow_params": [1] * 25}}, "hold named tensors in .*, got 'vocab_embed.embedding': int"),
        ({"model": {"a": torch.ones(1).to_sparse()}}, "hold named tensors in .*, got 'a': Tensor"),
        ({"model": {"a": torch.ones(1).expand(10**9)}}, "hold whole tensors in .*, got 'a' without its numbers"),
        ({"model": {"a": torch.ones(3, device="meta")}}, "hold whole tensors in .*, got 'a' without its numbers"),
    ],
)  # fmt: skip
def test_training_runs_that_are_refused(tmp_path: Path, changes: dict, message: str):
    source = write_run(tmp_path / "source", run_state(**changes))
    with pytest.raises(ValueError, match=message):
        convert_original_checkpoint(source, tmp_path / "out")
    assert_nothing_written(tmp_path / "out")


def test_a_field_of_a_run_is_named_with_its_file(tmp_path: Path):
    source = write_run(tmp_path / "source", run_state(), RADD_CONFIG | {"tokens": "96"})
    with pytest.raises(ValueError, match=r"`tokens` in `source`'s .hydra/config.yaml must be a positive integer"):
        convert_original_checkpoint(source, tmp_path / "out")


BOMB = "a: &a [x, x]\n" + "\n".join(f"{c}: &{c} [*{p}, *{p}]" for p, c in zip("abcdefgh", "bcdefghi", strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "valid YAML in .hydra/config.yaml, got '.*config.yaml': references"),
        ("!!python/object/apply:os.system ['true']", "valid YAML .*could not determine a constructor"),
        ("[" * 1500, "valid YAML"),
        ("tokens: [", "valid YAML"),
        ("- 1", "hold a YAML object in .hydra/config.yaml, got list"),
        ("x" * (2**20 + 1), "valid YAML .*more than 1048576 bytes"),
    ],
    ids=["references", "code", "deep", "open", "list", "large"],
)  # fmt: skip
def test_a_runs_config_is_data(tmp_path: Path, text: str, message: str):
    source = write_run(tmp_path / "source", run_state())
    (source / ".hydra" / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        convert_original_checkpoint(source, tmp_path / "out")
    assert_nothing_written(tmp_path / "out")


class Executed:
    """Unpickling this makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("layout", ["hub", "run"])
def test_a_pickle_is_never_executed(tmp_path: Path, layout: str):
    payload = {"model": radd_weights(), "more": Executed(tmp_path / "executed")}
    if layout == "run":
        source = write_run(tmp_path / "source", payload)
    else:
        source = tmp_path / "source"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(RADD_CONFIG))
        torch.save(payload, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match="it holds more than tensors, and no code of a checkpoint is run"):
        convert_original_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "executed").exists()
    assert_nothing_written(tmp_path / "out")
    torch.load(next(source.rglob("*.[bp][it][nh]")), weights_only=False)  # the payload works where it is let
    assert (tmp_path / "executed").exists()


def compressed(path: Path):
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, record in records.items():
            archive.writestr(name, record)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, path.stat().st_size // 2), "BadZipFile"),
        (lambda path: path.write_bytes(b""), "BadZipFile"),
        (lambda path: path.write_bytes(pickle.dumps({"model": 1})), "BadZipFile"),
        (compressed, "its records are compressed"),
        (lambda path: torch.save([1], path), "must hold a dict in '.*', got list"),
    ],
    ids=["half", "empty", "plain pickle", "compressed", "list"],
)
def test_damaged_pickles(tmp_path: Path, damage: Callable[[Path], object], message: str):
    source = write_run(tmp_path / "source", run_state())
    damage(source / "checkpoints-meta" / "checkpoint.pth")
    with pytest.raises(ValueError, match=message) as error:
        convert_original_checkpoint(source, tmp_path / "out")
    assert "checkpoint.pth" in str(error.value)
    assert_nothing_written(tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(tmp_path: Path, value: float):
    weights = radd_weights()
    for key in ("blocks.0.mlp.0.bias", "output_layer.linear.weight"):
        weights[key].view(-1)[-1] = value
    source = write(tmp_path / "source", RADD_CONFIG, weights)
    message = r"keys with NaN or infinity: \['blocks.0.mlp.0.bias', 'output_layer.linear.weight'\]"
    with pytest.raises(ValueError, match=message):
        convert_original_checkpoint(source, tmp_path / "out")
    assert_nothing_written(tmp_path / "out")


# The way back


def test_round_trip(tmp_path: Path):
    out = convert_original_checkpoint(RADD, tmp_path / "ours")
    back = export_original_checkpoint(out, tmp_path / "back")
    assert sorted(path.name for path in back.iterdir()) == ["config.json", "model.safetensors"]
    weights, original = load_file(back / "model.safetensors"), radd_weights()
    assert weights.keys() == original.keys()
    for key, weight in original.items():
        assert weights[key].dtype == weight.dtype
        assert torch.equal(weights[key], weight) or key == "rotary_emb.inv_freq", key
    torch.testing.assert_close(weights["rotary_emb.inv_freq"], original["rotary_emb.inv_freq"], rtol=1e-6, atol=0.0)
    config = json.loads((back / "config.json").read_text())
    names = {"hidden_size", "length", "n_blocks", "n_heads", "dropout", "type"}
    for part in ("tokens", "noise"):
        assert config[part] == RADD_CONFIG[part]
    assert {name: config["model"][name] for name in names} == {name: RADD_CONFIG["model"][name] for name in names}
    assert config["training"]["loss_type"] == RADD_CONFIG["training"]["loss_type"]
    again = convert_original_checkpoint(back, tmp_path / "again")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        assert (again / name).read_bytes() == (out / name).read_bytes()


def test_the_way_back_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = convert_original_checkpoint(MDLM, tmp_path / "ours")  # an MDLM network is a RADD network now
    main(["--to-original", str(out), str(tmp_path / "back")])
    assert capsys.readouterr().out == f"{tmp_path / 'back'}\n"
    assert same_weights(load_original_checkpoint(tmp_path / "back"), load_original_checkpoint(MDLM))


def test_what_the_original_cannot_express(tmp_path: Path):
    config = RADDConfig(
        vocab_size=9, mask_token_id=3, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, noise_schedule="cosine", tie_word_embeddings=True,
    )  # fmt: skip
    message = "mask_token_id=3 instead of 8; intermediate_size=32 instead of 64; tie_word_embeddings=True .*'cosine'"
    with pytest.raises(ValueError, match=message):
        export_original_checkpoint(RADDForMaskedDiffusion(config), tmp_path / "back")
    assert_nothing_written(tmp_path / "back")


# The tokenizer, the card, the upload


def word_tokenizer(count: int) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", eos_token="w1")


def test_a_given_tokenizer_gets_its_mask_token(tmp_path: Path):
    given = word_tokenizer(96)
    out = convert_original_checkpoint(RADD, tmp_path / "out", tokenizer=given)
    assert given.mask_token is None  # it is the caller's
    saved = AutoTokenizer.from_pretrained(out)
    assert saved.mask_token_id == 96 and saved("w3 [MASK] w5")["input_ids"] == [3, 96, 5]
    given.save_pretrained(tmp_path / "tokenizer")
    main([str(RADD), str(tmp_path / "other"), "--tokenizer", str(tmp_path / "tokenizer")])
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()


def test_tokenizers_that_do_not_fit(tmp_path: Path):
    with pytest.raises(ValueError, match="`tokenizer.mask_token_id` must be the config's mask_token_id=96, got 50"):
        convert_original_checkpoint(RADD, tmp_path / "out", tokenizer=word_tokenizer(50))
    with pytest.raises(ValueError, match="`tokenizer` must be one, or its folder or Hub name, got '.*nothing'"):
        convert_original_checkpoint(RADD, tmp_path / "out", tokenizer=tmp_path / "nothing")
    assert_nothing_written(tmp_path / "out")


def wide_checkpoint(folder: Path) -> Path:
    """A checkpoint of GPT-2's vocabulary, as narrow as can be."""
    config = RADDConfig(hidden_size=2, num_hidden_layers=1, num_attention_heads=1)
    return export_original_checkpoint(RADDForMaskedDiffusion(config), folder)


def test_a_model_of_gpt2s_vocabulary_gets_gpt2s_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(conversion, "load_tokenizer", lambda name: asked.append(name) or word_tokenizer(50257))
    out = convert_original_checkpoint(wide_checkpoint(tmp_path / "source"), tmp_path / "out")
    assert asked == ["openai-community/gpt2"]
    assert AutoTokenizer.from_pretrained(out).mask_token_id == 50257


def test_where_no_tokenizer_can_be_had_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The real Hub client, offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    source = wide_checkpoint(tmp_path / "source")
    with pytest.warns(UserWarning, match="No tokenizer is written: openai-community/gpt2 cannot be had"):
        out = convert_original_checkpoint(source, tmp_path / "out")
    assert not list(out.glob("tokenizer*")) and (out / "model.safetensors").is_file()


def run_snippet(card: ModelCard, name: str, folder: Path) -> str:
    """The card's Python, with the folder in place of the model's name."""
    (code,) = [part.partition("```")[0] for part in card.text.split("```python\n")[1:]]
    printed: list[str] = []
    exec(code.replace(f'"{name}"', repr(str(folder))), {"print": lambda *a: printed.append(" ".join(map(str, a)))})  # noqa: S102
    return "\n".join(printed)


def test_card(tmp_path: Path):
    out = convert_original_checkpoint(RADD, tmp_path / "out", model_name="someone/radd-tiny")
    card = ModelCard.load(out / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag, card.data.license) == (
        "transformers",
        "fill-mask",
        "unknown",
    )
    assert card.data.eval_results is None and "{{" not in card.text and "{%" not in card.text
    parameters = sum(weight.numel() for key, weight in radd_weights().items() if key != "rotary_emb.inv_freq")
    loss, schedule = "λ-denoising cross-entropy (`lambda_dce`)", "Log-linear, ε = 0.001."
    for fact in ("`radd_original`", f"| parameters | {parameters:,} |", loss, schedule, "(id 96)"):
        assert fact in card.text, fact
    assert str(FIXTURES) not in card.text
    assert run_snippet(card, "someone/radd-tiny", out).startswith("tensor([[")
    tokenizer = word_tokenizer(96)
    out = convert_original_checkpoint(MDLM, tmp_path / "mdlm", tokenizer=tokenizer)
    card = ModelCard.load(out / "README.md")
    assert "Sahoo" in card.text and "AutoTokenizer" in card.text
    text = run_snippet(card, "mdlm_original", out)
    assert text.startswith("['") and "[MASK]" not in text
