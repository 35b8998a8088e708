"""The package as a user gets it: the built wheel, its metadata, a core-only environment, what the repository holds.

Everything is built from a copy of the sources and offline, so a run leaves nothing in the work tree.
"""

import email
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "radd_hf"
OPTIONAL = ("datasets", "evaluate", "flash_attn", "liger_kernel", "matplotlib", "peft", "scipy", "tensorboard")

# Run where OPTIONAL is absent: every finder of the import system is asked for all names but these, so that both
# `import scipy` and `importlib.util.find_spec("scipy")` answer as on a machine that never had it.
CORE_ONLY = """
import sys

HIDDEN = set(sys.argv[1].split(","))


class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
for name in sorted(HIDDEN):
    try:
        __import__(name)
    except ModuleNotFoundError:
        pass
    else:
        raise SystemExit(f"{name} is not hidden: this test would show nothing")

import json

import torch

import radd_hf

torch.manual_seed(0)
config = radd_hf.RADDConfig(
    vocab_size=11, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16
)
model = radd_hf.RADDForMaskedDiffusion(config)
clean = torch.randint(0, 10, (4, 8))

with torch.no_grad():
    logits = model(clean).logits

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
loss = radd_hf.diffusion_loss(model, clean, "lambda_dce", generator=torch.Generator().manual_seed(0))
loss.mean().backward()
optimizer.step()
moved = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]

prompt = clean.clone()
prompt[:, 2:6] = config.mask_token_id
filled = model.eval().diffusion_generate(prompt, num_steps=3, generator=torch.Generator().manual_seed(0))
given = prompt != config.mask_token_id

report = {
    "file": radd_hf.__file__,
    "version": radd_hf.__version__,
    "logits_shape": list(logits.shape),
    "loss_shape": list(loss.shape),
    "loss_finite": bool(torch.isfinite(loss).all()),
    "moved": len(moved),
    "masks_left": int((filled == config.mask_token_id).sum()),
    "prompt_kept": bool(torch.equal(filled[given], prompt[given])),
    "imported": sorted(HIDDEN & set(sys.modules)),
}
print(json.dumps(report))
"""


def run(command: list[str], cwd: Path, **environment: str) -> str:
    """The standard output of `command`; a failure shows all that it wrote."""
    # No PYTHONPATH of the caller, and no Hub: what runs here must find everything on this machine.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command[:4]} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def declared_version() -> str:
    """`__version__` as the source states it."""
    return re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text("utf-8"), re.MULTILINE).group(1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources: a build/ left in the work tree would smuggle deleted modules in."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, source / name)
    shutil.copytree(PACKAGE, source / "radd_hf", ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)], cwd=source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """METADATA of the wheel, parsed."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel alone was installed into."""
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(wheel)], cwd=target)
    return target


@pytest.fixture(scope="module")
def core_only(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What CORE_ONLY reports, run on the installed wheel from a folder outside the source tree."""
    script = tmp_path_factory.mktemp("elsewhere") / "core_only.py"
    script.write_text(CORE_ONLY, encoding="utf-8")
    output = run([sys.executable, str(script), ",".join(OPTIONAL)], cwd=script.parent, PYTHONPATH=str(installed))
    return json.loads(output.splitlines()[-1])


def requirements(metadata: Message, extra: str | None = None) -> dict[str, str]:
    """Requirements of the core (`extra=None`) or of one extra, as canonical name -> version range."""
    found = {}
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if extra is None:
            applies = requirement.marker is None
        else:
            applies = requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
        if applies:
            found[canonicalize_name(requirement.name)] = str(requirement.specifier)
    return found


def repository_files() -> list[Path]:
    """What is tracked or about to be: untracked files that git does not ignore count too."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    return [path for path in (ROOT / name for name in listing.split("\0") if name) if path.is_file()]


class TestWheel:
    def test_holds_every_module_and_nothing_else(self, wheel: Path):
        with zipfile.ZipFile(wheel) as archive:
            shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
        modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
        assert shipped == modules | {"radd_hf/py.typed"}

    def test_carries_the_licence(self, wheel: Path, metadata: Message):
        assert metadata["License-Expression"] == "Apache-2.0"
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
            assert archive.read(name) == (ROOT / "LICENSE").read_bytes()

    def test_names_itself(self, wheel: Path, metadata: Message):
        assert metadata["Name"] == "radd-hf"
        assert metadata["Version"] == declared_version()
        assert metadata["Requires-Python"] == ">=3.10"
        assert wheel.name == f"radd_hf-{declared_version()}-py3-none-any.whl"

    def test_shows_the_readme(self, metadata: Message):
        readme = ROOT / "README.md"
        if not readme.is_file():
            pytest.skip("there is no README.md yet")
        assert metadata.get_payload(decode=True).decode("utf-8").strip() == readme.read_text(encoding="utf-8").strip()

    def test_core_depends_on_exactly_five_packages(self, metadata: Message):
        core = requirements(metadata)
        assert set(core) == {"torch", "transformers", "accelerate", "safetensors", "huggingface-hub"}
        assert core["torch"] == ">=2.6"
        assert set(core["transformers"].split(",")) == {">=5.12", "<6"}

    def test_extras(self, metadata: Message):
        extras = {extra: set(requirements(metadata, extra)) for extra in metadata.get_all("Provides-Extra")}
        assert extras.pop("dev") == extras["test"]
        test = extras.pop("test")
        assert extras == {
            "data": {"datasets"},
            "eval": {"evaluate", "scipy"},
            "train": {"peft", "tensorboard"},
            "train-cuda": {"peft", "tensorboard", "liger-kernel"},
            "plot": {"matplotlib"},
            "flash": {"flash-attn"},
            "harness": {"lm-eval"},
            "mauve": {"mauve-text"},
        }
        assert set.union(*(extras[name] for name in ("data", "eval", "train", "plot"))) < test
        assert not test & {"liger-kernel", "flash-attn"}, "the tests must install where there is no GPU"


class TestInstalledWheel:
    """The wheel installed by itself, in a process that cannot import any optional package."""

    def test_is_imported_from_where_it_was_installed(self, core_only: dict, installed: Path):
        assert Path(core_only["file"]).resolve() == (installed / "radd_hf" / "__init__.py").resolve()
        assert core_only["version"] == declared_version()
        assert (installed / "radd_hf" / "py.typed").is_file()

    def test_forward_and_a_training_step(self, core_only: dict):
        assert core_only["logits_shape"] == [4, 8, 11]
        assert core_only["loss_shape"] == [4]
        assert core_only["loss_finite"]
        assert core_only["moved"] > 0

    def test_generation(self, core_only: dict):
        assert core_only["masks_left"] == 0
        assert core_only["prompt_kept"]

    def test_no_optional_package_was_imported(self, core_only: dict):
        assert core_only["imported"] == []


class TestConstraints:
    def pins(self) -> dict[str, str]:
        """constraints.txt as canonical name -> version."""
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
        return {canonicalize_name(name): version for name, version in pairs}

    def test_pins_lie_in_the_ranges_of_setup(self, metadata: Message):
        pins = self.pins()
        for name, specifier in {**requirements(metadata), **requirements(metadata, "test")}.items():
            assert name in pins, f"constraints.txt does not pin {name}"
            assert Requirement(f"{name}{specifier}").specifier.contains(pins[name]), f"{name}=={pins[name]}"

    def test_pins_are_complete(self, metadata: Message):
        """Every package that radd-hf[test] brings in on this machine, direct or not, has its pin."""
        pins = self.pins()
        if importlib.metadata.version("transformers") != pins["transformers"]:
            pytest.skip("another transformers than the pinned one may need other packages")
        needed: set[tuple[str, frozenset[str]]] = set()
        waiting = [Requirement(name) for name in {**requirements(metadata), **requirements(metadata, "test")}]
        while waiting:
            requirement = waiting.pop()
            key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if key in needed:
                continue
            needed.add(key)
            for line in importlib.metadata.requires(requirement.name) or []:
                child = Requirement(line)
                extras = requirement.extras or {""}
                if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                    waiting.append(child)
        assert {name for name, _ in needed} - set(pins) == set()


class TestRepository:
    def test_names_no_machine_path_and_no_registry_host(self):
        files = repository_files()
        assert ROOT / "setup.py" in files
        # Written in pieces, so that this file passes its own test.
        folders = "|".join(("work", "root", "home", "Users", "opt", "mnt", "etc/xdg"))
        hosts = "|".join(
            re.escape(".".join(parts))
            for parts in (
                ("pypi", "org"),
                ("pythonhosted", "org"),
                ("download", "pytorch", "org"),
                ("registry", "npmjs", "org"),
                ("deb", "debian", "org"),
                ("conda", "anaconda", "org"),
            )
        )
        # A folder counts at the start of a path only: not after ".." nor inside a web address.
        pattern = re.compile(rf"(?<![\w.~*$}})-])/(?:{folders})/[\w.-]|{hosts}".encode())
        assert pattern.search(b"open('/" + b"work/x')") and pattern.search(b"https://files.python" + b"hosted.org/a")
        assert not pattern.search(b"../wo" + b"rk/x https://example.com/ho" + b"me/x")
        found = []
        for path in files:
            for match in pattern.finditer(path.read_bytes()):
                found.append(f"{path.relative_to(ROOT)}: {match.group().decode()}")
        assert found == []

    def test_ci_runs_the_gate_and_fails_without_tests(self):
        script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
        assert [line for line in script if line and not line.startswith("#")] == [
            "set -eu",
            'cd "$(dirname "$0")/.."',
            "make test",
        ]
        assert os.access(ROOT / ".ci" / "run", os.X_OK)
