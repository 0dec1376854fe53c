# The developer's commands. `make demo` and `make test` set up .venv themselves; nothing is installed outside it.
#   PYTHON=python3.12       the interpreter that .venv is built on
#   TORCH_INDEX=address     where to take torch from when none is installed (README, "Without a GPU")
#   ARGS='...'              passed on to pytest, the demo or the bench
#   HOURS=100               simulated hours of the soak
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
STAMP := .venv/.complete
HOURS ?= 100
JOBS := $(shell getconf _NPROCESSORS_ONLN)

.PHONY: help venv demo test lint format soak bench clean

help:  ## what can be made
	@sed -n 's/^\([a-z]*\):.*## /  make \1  /p' Makefile

venv: $(STAMP)  ## .venv with the pinned versions

$(STAMP): pyproject.toml constraints.txt .ci/venv
	.ci/venv
	touch $@

demo: $(STAMP)  ## a head and two nodes on this machine, and a node killed mid-answer
	$(BIN)/python -m superfluid_head.demo $(ARGS)

test: $(STAMP)  ## every test, with pytest's own summary
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)  ## format, lint, types, import floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## put the code in its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(STAMP)  ## the long versions: a fleet in virtual time under faults, many kills of real nodes
	$(BIN)/python -m tests.sim.soak --hours $(HOURS) --jobs $(JOBS)
	$(BIN)/superfluid bench failover --engine mock --runs 200
	$(BIN)/superfluid bench failover --engine native --runs 20

bench: $(STAMP)  ## decode and prefill beside llama-server and transformers, planning, a burst with one prefix
	$(BIN)/superfluid bench compare $(ARGS)
	$(BIN)/python -m tests.unit.scheduler.bench_plan
	$(BIN)/python -m tests.unit.engine_torch.bench_prefix

clean:  ## remove .venv and every cache
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info build dist
