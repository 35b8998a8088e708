# Every target sets up what it needs: an environment in .venv, made again only when setup.py or constraints.txt change.
PYTHON ?= python3
# On Linux, PyPI's torch brings the CUDA libraries (several GB). To take PyTorch's CPU build instead, pass its index:
# make venv TORCH_FLAGS="--index-url ...". A torch of the pinned version that is already in .venv is left as it is.
TORCH_FLAGS ?=
# For example PYTEST_FLAGS="-n 2" (pytest-xdist) where two cores are free.
PYTEST_FLAGS ?=
PIP_FLAGS := -qq --no-compile --disable-pip-version-check

# The name carries the folder: an environment that came along when the folder was moved or copied is installed again,
# since an editable install and the scripts in bin/ hold absolute paths.
HERE := $(shell pwd | cksum | cut -d ' ' -f 1)
VENV := .venv/.radd-hf-$(HERE)
LOWEST := .venv-lowest/.radd-hf-$(HERE)
PY := .venv/bin/python

# What a user has set for other projects must not leak into this environment.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv test test-slow test-lowest check demo demo-train style wheel clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F '|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

# $(call install,FOLDER,CONSTRAINTS): an environment in FOLDER, made if it is not there or broken, otherwise updated.
# torch comes first and alone: on CPU machines it may have an index of its own (TORCH_FLAGS); it brings setuptools, the
# build back end of the second step. pip compiles on one core and so leaves it to compileall (which fails on the
# templates in some packages: no matter). Without it, each run would compile torch again under PYTHONDONTWRITEBYTECODE.
define install
	@$(1)/bin/python -c "import pip" 2>/dev/null || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt needs Python 3.11 or newer: make PYTHON=python3.11 ...")' && \
	  $(PYTHON) -m venv $(1); }
	@echo "installing the pinned packages into $(1) (once; a few minutes)"
	$(1)/bin/python -m pip install $(PIP_FLAGS) -c $(2) $(TORCH_FLAGS) torch
	$(1)/bin/python -m pip install $(PIP_FLAGS) -c $(2) --no-build-isolation -e ".[test]"
	@$(1)/bin/python -m compileall -q -j 0 $(1)/lib >/dev/null 2>&1 || true
endef

$(VENV): setup.py constraints.txt
	$(call install,.venv,constraints.txt)
	@rm -f .venv/.radd-hf-* && touch $@

# constraints.txt with the oldest transformers that setup.py allows, and the hub client and tokenizers that it can use.
$(LOWEST): setup.py constraints.txt
	@mkdir -p .venv-lowest
	@grep -v -E '^(transformers|huggingface-hub|tokenizers)==' constraints.txt > .venv-lowest/constraints.txt
	@printf '%s\n' transformers==5.12.0 'huggingface-hub<2' >> .venv-lowest/constraints.txt
	$(call install,.venv-lowest,.venv-lowest/constraints.txt)
	@rm -f .venv-lowest/.radd-hf-* && touch $@

venv: $(VENV)  ## the development environment, in .venv

# The tests' tensors are tiny, and threads that wait for each other spin: 35 s of CPU time with one thread against 63 s
# with one per core (536 tests, one run each, on two cores that others used too).
test test-slow test-lowest: export OMP_NUM_THREADS = 1

test: $(VENV)  ## ruff and the fast tests: the gate
	$(PY) -m ruff check .
	$(PY) -m pytest $(PYTEST_FLAGS)

check: test  ## the same as test

test-slow: $(VENV)  ## the tests that take longer
	$(PY) -m pytest -m slow $(PYTEST_FLAGS)

test-lowest: $(LOWEST)  ## the fast tests on the oldest transformers that setup.py allows, in .venv-lowest
	.venv-lowest/bin/python -m pytest $(PYTEST_FLAGS)

demo: $(VENV)  ## load the shipped checkpoint: infilling, a sample, held-out likelihood
	$(PY) examples/demo.py

demo-train: $(VENV)  ## train a tiny model on the bundled novel for about three minutes
	$(PY) examples/demo_train.py

style: $(VENV)  ## let ruff repair and format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

wheel: $(VENV)  ## dist/: the source archive, and the wheel built from it
	rm -rf build dist
	$(PY) -m build --no-isolation

clean:  ## remove what builds, tests and runs leave behind; keep .venv
	rm -rf build dist radd_hf.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path "./.venv*" -prune -exec rm -rf {} +
