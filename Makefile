# Everything a developer runs. Each target makes its virtual environment first, where there is none.
#
#   make demo          what Triax does, on whatever machine this is
#   make test          tests that need no GPU, on as many cores as there are (up to 8); all but the
#                      slow ones, which TESTS="not gpu" adds
#   make gpu-test      the tests that need one
#   make lint          style and types
#   make fuzz          random cases of the MoE ops against float64 (ARGS="--cases 50000 --jobs 8")
#   make coverage      which branches of src the tests run through (TESTS="not gpu" for all)
#   make mutants       small changes to the code that some test must see (hours; Python 3.12)
#   make cards         what every op compiles to on every card, from A100 to RTX 50 (Python 3.12)
#   make matrix        the tests on every supported JAX and Triton (ARGS="-s 'matrix(0.8.0)'")
#   make bench         how fast the MoE ops are here (ARGS="full --json record.json")
#   make models        the layer and a decoder against transformers (its environment has 6 GB)
#   make sanitize      the kernels under NVIDIA's compute-sanitizer and Triton's own (needs a GPU, the
#                      CUDA toolkit and Triton 3.9)
#   make flags         the tests that need a GPU under XLA's flags and with 64-bit types
#   make stress        threads, interrupts, little memory, full disks (ARGS="--seconds 300")
#   make docs wheel    the documentation in site/, the wheel in dist/
#   make clean         removes what these made
#   make help          this list
#
# PYTHON=python3.12 picks the interpreter, VENV=… the folder, CUDA=cuda12 the CUDA packages.

PYTHON ?= python3
VENV ?= .venv
CUDA ?= cuda13
ARGS ?=
TESTS ?= not gpu and not slow
PARALLEL ?= --numprocesses=auto --maxprocesses=8 --dist=worksteal

PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
MODELS_VENV := .venv-models
MODELS_STAMP := $(MODELS_VENV)/.installed

HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
comma := ,
EXTRAS := dev$(if $(HAS_GPU),$(comma)$(CUDA))

# On Linux without a GPU, JAX's CUDA plugin alone lets the tests lower for CUDA; --no-deps leaves
# out NVIDIA's libraries, and with them the backend, so JAX goes on using the CPU.
LOWERING_ONLY := $(if $(HAS_GPU),,$(filter Linux,$(shell uname -s)))

# What Python imports it compiles once and keeps: the tests are many processes. (pip would compile
# everything, which takes longer than to install it.)
unexport PYTHONDONTWRITEBYTECODE

# uv takes a third of pip's time; pip takes over where uv fails, as it does not read pip's settings.
install = $(1) -m uv pip install --quiet --python $(1) $(2) || $(1) -m pip install --quiet --no-compile $(2)

.PHONY: demo test gpu-test fuzz mutants lint format coverage bench cards matrix models sanitize flags stress docs wheel clean help
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(PY) examples/demo.py $(ARGS)

test: $(STAMP)
	JAX_PLATFORMS=cpu $(PY) -m pytest -m "$(TESTS)" --ignore=tests/gpu $(PARALLEL) $(ARGS)

gpu-test: $(STAMP)
	$(PY) -c "import jax; print(jax.devices('gpu'))"
	$(PY) -m pytest -m gpu tests/gpu -n 12 --dist loadgroup $(ARGS)

fuzz: $(STAMP)
	$(PY) -m tests.fuzz $(ARGS)

mutants: $(STAMP)
	JAX_PLATFORMS=cpu $(PY) -m tools.mutants $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

coverage: $(STAMP)
	$(PY) -m coverage erase
	JAX_PLATFORMS=cpu $(PY) -m coverage run -m pytest -q -m "$(TESTS)" --ignore=tests/gpu $(PARALLEL) $(ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m tools.covered
	$(PY) -m coverage report

bench: $(STAMP)
	$(PY) -m benchmarks $(ARGS)

cards: $(STAMP)
	JAX_PLATFORMS=cpu $(PY) -m tests.cards $(ARGS)

matrix: $(STAMP)
	$(PY) -m nox -f tools/matrix.py $(ARGS)

models: $(MODELS_STAMP)
	JAX_PLATFORMS=cpu $(MODELS_VENV)/bin/python -m benchmarks.models $(ARGS)
	JAX_PLATFORMS=cpu $(MODELS_VENV)/bin/python -m benchmarks.checkpoints
	JAX_PLATFORMS=cpu $(MODELS_VENV)/bin/python -m benchmarks.logits
	JAX_PLATFORMS=cpu $(MODELS_VENV)/bin/python -m benchmarks.folders

sanitize: $(STAMP)
	JAX_PLATFORMS=cpu TRIAX_CUDA_ARCH=90 $(PY) -m tools.sanitize all $(ARGS)

flags: $(STAMP)
	$(PY) -m tools.flags $(ARGS)

stress: $(STAMP)
	$(PY) -m tests.stress $(ARGS)

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	$(PY) tools/check_site.py site

wheel: $(STAMP)
	$(PY) -m build

clean:
	rm -rf $(VENV) .venv-312 .venv-nightly $(MODELS_VENV) .matrix build dist site
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Triax needs Python 3.11 or later; PYTHON=$(PYTHON) is %d.%d" % sys.version_info[:2])'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	-$(PY) -m pip install --quiet --no-compile uv
	$(call install,$(PY),--editable '.[$(EXTRAS)]')
	$(if $(LOWERING_ONLY),$(call install,$(PY),--no-deps "jax-cuda13-plugin==$$($(PY) -c 'from importlib.metadata import version; print(version("jax"))')"))
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(call install,$(PY),--editable '.[docs]')
	@touch $@

$(MODELS_STAMP): pyproject.toml
	test -x $(MODELS_VENV)/bin/python || $(PYTHON) -m venv $(MODELS_VENV)
	-$(MODELS_VENV)/bin/python -m pip install --quiet --no-compile uv
	$(call install,$(MODELS_VENV)/bin/python,--editable '.[models]')
	@touch $@
