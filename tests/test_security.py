"""Hostile and damaged checkpoints: an error that names the file, never a crash, code, a huge allocation or a rest."""

import ast
import json
import os
import resource
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fuzz import mutated
from safetensors.torch import load_file
from test_conversion_formats import MDLM, RADD, RADD_CONFIG, radd_weights, run_state, write_run

import radd_hf
from radd_hf import RADDForMaskedDiffusion, RADDModel
from radd_hf.conversion import convert_original_checkpoint

LOADED = ("config.json", "model.safetensors", "generation_config.json", "model.safetensors.index.json")
CONVERTED = (
    ("radd", "config.json"),
    ("radd", "model.safetensors"),
    ("mdlm", "config.json"),
    ("pickle", "pytorch_model.bin"),
    ("run", ".hydra/config.yaml"),
    ("run", "checkpoints-meta/checkpoint.pth"),
)
SECONDS = 20  # for one file, at most; the median is a twentieth of a second


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_original_checkpoint(RADD, tmp_path_factory.mktemp("good") / "model")


@pytest.fixture(scope="module")
def sharded(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    RADDForMaskedDiffusion.from_pretrained(saved).save_pretrained(folder, max_shard_size="150KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    shutil.copytree(RADD, folder / "radd")
    shutil.copytree(MDLM, folder / "mdlm")
    (folder / "pickle").mkdir()
    (folder / "pickle" / "config.json").write_text(json.dumps(RADD_CONFIG))
    torch.save(radd_weights(), folder / "pickle" / "pytorch_model.bin")
    write_run(folder / "run", run_state())
    return folder


@pytest.fixture
def bad(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "bad")
    return tmp_path / "bad"


def edit_json(path: Path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def outcome(action: Callable[[], object]) -> str:
    """What a call on a mutated file may do: work, or raise a ValueError or OSError that says something, in time."""
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
        result = "works"
    except (ValueError, OSError) as error:
        assert len(str(error)) > 10
        result = "refused"
    assert time.monotonic() - start < SECONDS
    return result


def fuzz_loader(good: Path, sharded: Path, work: Path, count: int) -> list[str]:
    results = []
    for name in LOADED:
        source = sharded if "index" in name else good
        for seed in range(count):
            shutil.copytree(source, work / "bad")
            (work / "bad" / name).write_bytes(mutated(source, name, seed))
            results.append(outcome(lambda: RADDForMaskedDiffusion.from_pretrained(work / "bad")))
            shutil.rmtree(work / "bad")
    return results


def fuzz_converter(originals: Path, work: Path, count: int) -> list[str]:
    results = []
    for kind, name in CONVERTED:
        for seed in range(count):
            shutil.copytree(originals / kind, work / "bad")
            (work / "bad" / name).write_bytes(mutated(originals / kind, name, seed))
            results.append(outcome(lambda: convert_original_checkpoint(work / "bad", work / "out")))
            left = {path.name for path in work.iterdir()}
            assert left == ({"bad", "out"} if results[-1] == "works" else {"bad"})
            shutil.rmtree(work / "bad")
            shutil.rmtree(work / "out", ignore_errors=True)
    return results


def test_some_mutated_files(saved: Path, sharded: Path, originals: Path, tmp_path: Path):
    """12 mutations of each of ten files."""
    results = fuzz_loader(saved, sharded, tmp_path, 12) + fuzz_converter(originals, tmp_path, 12)
    assert len(results) == 120 and results.count("refused") > 60


@pytest.mark.slow
def test_a_thousand_mutated_files(saved: Path, sharded: Path, originals: Path, tmp_path: Path):
    """150 mutations of each of ten files: 1,500; about two minutes on one core."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = fuzz_loader(saved, sharded, tmp_path, 150) + fuzz_converter(originals, tmp_path, 150)
    assert len(results) == 1500 and results.count("refused") > 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: no config filled the memory


# Configs that ask for more than there is


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 10**12}, r"mis-shaped keys: .*'model.embed_tokens.weight: \(97, 64\) instead of \(10{12}, "),
        ({"hidden_size": 2**40}, r"mis-shaped keys|sizes that a tensor can have"),
        ({"intermediate_size": 10**15}, r"'model.layers.0.mlp.up_proj.bias: \(256,\) instead of \(10{15},\)'"),
        ({"intermediate_size": 10**30}, "`intermediate_size` must be a positive integer, got 10{30}"),
        ({"intermediate_size": 2**62}, "must have sizes that a tensor can have"),
        ({"num_hidden_layers": 10**9}, "must hold the weights of 1000000000 blocks, as its config says, got 29"),
        ({"num_hidden_layers": 3}, r"missing keys: \['model.layers.2.attn_norm.bias', .*mis-shaped keys: \[\]"),
        ({"num_labels": 10**12}, r"`num_labels` must be None or an integer in \[0, 1000\]"),
        ({"rope_parameters": [1]}, r"`rope_parameters` must be None or a dict, got \[1\]"),
        ({"dtype": "int8"}, "`dtype` must be None or one of .*, got 'int8'"),
        ({"transformers_weights": "../other.safetensors"}, "must not name a weights file, got '../other.safetensors'"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)  # fmt: skip
def test_absurd_configs(bad: Path, fields: dict, message: str):
    edit_json(bad / "config.json", **fields)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        RADDForMaskedDiffusion.from_pretrained(bad)
    assert time.monotonic() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10  # KiB


def test_an_override_of_the_config_is_checked_too(saved: Path):
    with pytest.raises(ValueError, match=r"'lm_head.bias: \(97,\) instead of \(1000000,\)'"):
        RADDForMaskedDiffusion.from_pretrained(saved, vocab_size=10**6)


def test_the_check_changes_nothing_for_what_is_whole(saved: Path, sharded: Path, tmp_path: Path):
    state = torch.get_rng_state()
    model = RADDForMaskedDiffusion.from_pretrained(saved)
    assert torch.equal(state, torch.get_rng_state())
    trunk = RADDModel.from_pretrained(saved)  # its keys have a prefix in the file
    model.save_pretrained(tmp_path, variant="fp16", max_shard_size="150KB")
    for other in (
        RADDForMaskedDiffusion.from_pretrained(sharded),
        RADDForMaskedDiffusion.from_pretrained(tmp_path, variant="fp16"),
    ):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.model.parameters(), trunk.parameters(), strict=True))


# Damaged files are named


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: bytes([data[0] ^ 64]) + data[1:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: data.replace(b'"F32"', b'"F33"', 1),
    ],
    ids=["half", "five bytes", "empty", "longer", "length", "header", "dtype"],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_damaged_weights_file_is_named(bad: Path, damage: Callable[[bytes], bytes], strict: bool):
    path = bad / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    message = rf"The weights of '.*{'model.safetensors' if strict else 'bad'}'.* must be whole safetensors files, got"
    with pytest.raises(ValueError, match=message):
        RADDForMaskedDiffusion.from_pretrained(bad, strict=strict)


def test_a_damaged_shard_is_named(sharded: Path, tmp_path: Path):
    shutil.copytree(sharded, tmp_path / "bad")
    part = sorted((tmp_path / "bad").glob("*.safetensors"))[1]
    os.truncate(part, part.stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"The weights of '.*{part.name}' must be whole"):
        RADDForMaskedDiffusion.from_pretrained(tmp_path / "bad")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_damaged_config_is_named(bad: Path, name: str):
    for text, message in (
        ("{", "not a valid JSON"),
        ("[1]", "a JSON object, got list"),
        ("[" * 10**5, "a JSON object"),
    ):
        (bad / name).write_text(text)
        with pytest.raises((ValueError, OSError), match=message) as error:
            RADDForMaskedDiffusion.from_pretrained(bad)
        assert name in str(error.value)


# Names that lead out of the folder, and code


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "a\\b.safetensors", "model.bin", ".."],
)
def test_an_index_names_files_beside_it_only(sharded: Path, tmp_path: Path, name: str):
    shutil.copytree(sharded, tmp_path / "bad")
    shutil.copy(next(sharded.glob("*.safetensors")), tmp_path / "secret.safetensors")
    index = tmp_path / "bad" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {next(iter(weight_map)): name})
    with pytest.raises(ValueError, match=r"index.json' must name safetensors files beside it, got \["):
        RADDForMaskedDiffusion.from_pretrained(tmp_path / "bad")


def test_pickled_weights_are_not_loaded_unasked(bad: Path):
    torch.save(load_file(bad / "model.safetensors"), bad / "pytorch_model.bin")
    (bad / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no file named model.safetensors"):
        RADDForMaskedDiffusion.from_pretrained(bad)
    assert RADDForMaskedDiffusion.from_pretrained(bad, use_safetensors=False).num_parameters() > 0
    with pytest.raises(ValueError, match="`weights_only` must be True"):
        RADDForMaskedDiffusion.from_pretrained(bad, use_safetensors=False, weights_only=False)


def test_the_sources_run_no_foreign_code():
    """No eval, exec or pickle, and every torch.load with `weights_only=True`."""
    loads = 0
    for path in Path(radd_hf.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            assert name not in (
                "eval",
                "exec",
                "compile",
                "__import__",
                "pickle.load",
                "pickle.loads",
                "yaml.load_all",
            )
            if name == "torch.load":
                loads += 1
                assert {k.arg: ast.unparse(k.value) for k in node.keywords}["weights_only"] == "True", path.name
            if name == "yaml.load":
                assert "_PlainLoader" in ast.unparse(node)
    assert loads >= 1
