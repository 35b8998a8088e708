"""Builds radd-hf. Ranges live here; the exact versions that are tested live in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read_version() -> str:
    """`__version__` of radd_hf/__init__.py, read as text: a build needs neither torch nor transformers."""
    text = (HERE / "radd_hf" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError('radd_hf/__init__.py has no line of the form __version__ = "x.y.z"')
    return match.group(1)


def read_readme() -> str:
    """README.md, or nothing where a partial copy of the tree has none."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


install_requires = [
    "torch>=2.6",
    "transformers>=5.12,<6",
    "accelerate>=1.1",  # the lower bound of transformers' Trainer
    "safetensors>=0.4.3",  # the lower bound of transformers 5.12
    "huggingface-hub>=1.5",  # the lower bound of transformers 5.12
]

extras = {
    "data": ["datasets>=3.0"],
    "eval": ["evaluate>=0.4.3", "scipy>=1.11"],
    "train": ["peft>=0.18", "tensorboard>=2.15"],
    "plot": ["matplotlib>=3.8"],
    # No marker tells a CUDA machine from a CPU one, and liger-kernel needs triton with its GPU tool chain:
    # these two are asked for by name.
    "train-cuda": ["peft>=0.18", "tensorboard>=2.15", "liger-kernel>=0.6"],
    "flash": ["flash-attn>=2.6"],
    "harness": ["lm-eval>=0.4.13"],  # radd_hf.lm_eval
    "mauve": ["mauve-text>=0.4"],  # radd_hf.metrics.mauve_score
}
# Everything the tests, the examples and the lint need on a CPU.
extras["test"] = [
    *(requirement for name in ("data", "eval", "train", "plot") for requirement in extras[name]),
    "build>=1.2",
    "packaging>=24.0",
    "pytest>=8.0",
    "pytest-xdist>=3.6",
    "ruff>=0.12",
    "setuptools>=77.0.3",
]
extras["dev"] = extras["test"]

setup(
    name="radd-hf",
    version=read_version(),
    description=(
        "Masked (absorbing-state) discrete diffusion language models after RADD, as Hugging Face transformers models: "
        "training, likelihood, infilling and exact fast sampling."
    ),
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    author="The radd_hf authors",
    keywords=[
        "diffusion language model",
        "masked diffusion",
        "absorbing discrete diffusion",
        "RADD",
        "infilling",
        "transformers",
        "pytorch",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["radd_hf", "radd_hf.*"]),
    package_data={"radd_hf": ["py.typed"]},
    zip_safe=False,
    python_requires=">=3.10",
    install_requires=install_requires,
    extras_require=extras,
)
