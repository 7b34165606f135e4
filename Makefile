# `make demo` and `make test` need Python 3.11, or 3.12 (PYTHON=python3.12), with venv and pip, make, bash and git; they
# build the rest once.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif
PYTHON ?= python3.11
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
SGLANG_0_5_12_VENV ?= .venv-sglang-0.5.12
MUTATION_VENV ?= .venv-mutation
PIP_INSTALL = -m pip install --disable-pip-version-check --progress-bar off
ARGS ?=
# Two files of tests at a time: most of their time goes into starting servers, which two cores do side by side. A test
# that times out ends its worker, and with it the run: pytest-xdist 3.8 would hand out finished files again and wait.
PARALLEL = -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

TRAINER_STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-for-tests
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_0_5_12_STAMP := $(SGLANG_0_5_12_VENV)/.installed
MUTATION_STAMP := $(MUTATION_VENV)/.installed

.PHONY: demo test test-for test-fast test-fake-gpu test-all test-mutations test-sglang-0.5.12 lint format env \
	trainer-env test-env sglang-env clean-env

demo: env  ## Watch a small policy learn, on a CPU, with the real parts
	$(VENV)/bin/python -m recipe.atropos.launch_services --preset demo $(ARGS)

test: env test-env  ## Style and the whole test suite: what CI runs
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

test-for: env test-env  ## One file of tests: make test-for FILE=tests/unit/data/test_rows.py
	$(VENV)/bin/python -m pytest -m "slow or not slow" $(FILE) $(ARGS)

test-fast: test-env  ## The tests that start no server
	$(VENV)/bin/python -m pytest tests/unit $(PARALLEL) $(ARGS)

# An nvidia-smi that lists two GPUs, and a driver's entries, for every program that is started.
FAKE_GPU := $(abspath tests/fake_gpu)
test-fake-gpu: test-env  ## The same, on a machine that seems to have GPUs
	PATH=$(FAKE_GPU):$$PATH PYTHONPATH=$(FAKE_GPU) $(VENV)/bin/python -m pytest tests/unit $(PARALLEL) $(ARGS)

test-all: env test-env  ## The same, and what takes long
	$(VENV)/bin/python -m pytest -m "slow or not slow" $(PARALLEL) $(ARGS)

test-mutations: test-env $(MUTATION_STAMP)  ## Which faults no fast test would see; docs/testing.md has the result
	$(VENV)/bin/python tests/mutation/run.py --python $(abspath $(MUTATION_VENV))/bin/python $(ARGS)

# What starts, controls or pushes to SGLang, against the version that verl pins; its environment is built here alone.
test-sglang-0.5.12: test-env $(SGLANG_0_5_12_STAMP)
	ATROPOS_SGLANG_PYTHON=$(abspath $(SGLANG_0_5_12_VENV))/bin/python $(VENV)/bin/python -m pytest \
		$(patsubst %,tests/e2e/test_%.py,inference sglang_server loop two_servers transports launch) $(ARGS)

lint: test-env
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

format: test-env
	$(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format .

env:  # both at once: pip uses one core
	@$(MAKE) --no-print-directory --jobs=2 trainer-env sglang-env
trainer-env: $(TRAINER_STAMP)
test-env: $(TEST_STAMP)
sglang-env: $(SGLANG_STAMP)

# Two environments, because the pins of verl and of SGLang exclude each other. Each is built from nothing whenever its
# pins change, so that no package of an older set stays behind.
# $(call made,FOLDER) makes an environment anew, but removes no folder that make has not made, as docs/gpu.md has some.
made = if [ -e $(1) ] && [ ! -e $(1)/.made ] && [ ! -e $(1)/.installed ]; then \
	echo "$(1) was not made by make, which would replace it: move it, or give another folder (VENV, SGLANG_VENV)"; exit 1; \
	fi; rm -rf $(1) && mkdir -p $(1) && touch $(1)/.made && $(PYTHON) -m venv $(1)
# $(call progress,NAME,FILES) shows of pip's output how many of the packages in FILES it has found.
progress = | awk -v total=$$(cat $(2) | grep -c ==) '/^Collecting /{if (++n % 25 == 0) say(n " of " total " packages found")} \
	/^Installing/{say("unpacking " total " packages")} function say(text) {print "$(1): " text; fflush()}'

$(TRAINER_STAMP): requirements/trainer-cpu.txt pyproject.toml
	@echo "$(VENV): installing the trainer's $$(grep -c == $<) packages (torch, verl, ray), 2.3 GB, once, in about 3 minutes"
	@$(call made,$(VENV))
	@$(VENV)/bin/python $(PIP_INSTALL) -r requirements/trainer-cpu.txt $(call progress,$(VENV),$<)
	@$(VENV)/bin/python $(PIP_INSTALL) --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(TEST_STAMP): $(TRAINER_STAMP) requirements/test.txt requirements/gem.txt  # a C compiler compiles one of gem's
	$(VENV)/bin/python $(PIP_INSTALL) --quiet -r requirements/test.txt
	$(VENV)/bin/python $(PIP_INSTALL) --quiet --no-deps --ignore-requires-python -r requirements/gem.txt
	touch $@

$(MUTATION_STAMP): requirements/mutation.txt
	$(call made,$(MUTATION_VENV))
	$(MUTATION_VENV)/bin/python $(PIP_INSTALL) --quiet -r requirements/mutation.txt
	touch $@

$(SGLANG_STAMP): requirements/sglang-cpu.txt requirements/sglang.txt
$(SGLANG_0_5_12_STAMP): requirements/sglang-0.5.12-cpu.txt requirements/sglang-0.5.12.txt
$(SGLANG_STAMP) $(SGLANG_0_5_12_STAMP): %/.installed:
	@echo "$*: installing SGLang's $$(cat $^ | grep -c ==) packages, 2.6 GB, once, in about 3 minutes"
	@$(call made,$*)
	@$*/bin/python $(PIP_INSTALL) -r $(filter %-cpu.txt,$^) $(call progress,$*,$^)
	@$*/bin/python $(PIP_INSTALL) --quiet --no-deps -r $(filter-out %-cpu.txt,$^)
	@touch $@

clean-env:
	rm -rf $(VENV) $(SGLANG_VENV) $(SGLANG_0_5_12_VENV) $(MUTATION_VENV)
