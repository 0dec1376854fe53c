# The developer's commands. `make demo` and `make test` set up .venv themselves; nothing is installed outside it.
#   PYTHON=python3.12       the interpreter that .venv is built on
#   TORCH_INDEX=address     where to take torch from when none is installed (README, "Without a GPU")
#   ARGS='...'              passed on to pytest, the demo or the bench
#   HOURS=100               simulated hours of the soak
#   MINUTES=10              minutes of real processes under faults in the soak
#   SIM=ci                  of the soak only the simulation: 100 hours and 2,000 seeds, whatever HOURS says
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
STAMP := .venv/.complete
NATIVE := .venv/native/.complete
BROWSER := .venv/browser/.complete
HOURS ?= 100
MINUTES ?= 10
JOBS := $(shell getconf _NPROCESSORS_ONLN)
# one more than there are cores: some tests wait for processes and for real time
WORKERS := $(shell expr $(JOBS) + 1)

.PHONY: dashboard help venv demo test lint format chaos soak clients bench native clean

help:  ## what can be made
	@sed -n 's/^\([a-z]*\):.*## /  make \1  /p' Makefile

venv: $(STAMP)  ## .venv with the pinned versions

$(STAMP): pyproject.toml constraints.txt tests/fuzz.txt .ci/venv
	.ci/venv
	touch $@

demo: $(STAMP)  ## a head and two nodes on this machine, and a node killed mid-answer
	$(BIN)/python -m superfluid_head.demo $(ARGS)

# with bytecode, whatever the environment says: workers and the processes they start import the same files again and again
test: $(STAMP)  ## every test, with pytest's own summary
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 4 $(ARGS)

lint: $(STAMP)  ## format, lint, types, import floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## put the code in its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

chaos: $(STAMP)  ## real processes killed, frozen, cut off and starved: a table, exit 1 on a missed bar
	$(BIN)/python -m tests.chaos $(ARGS)

soak: $(STAMP)  ## the long versions: a fleet in virtual time under faults, many kills of real nodes
ifeq ($(SIM),ci)
	$(BIN)/python -m tests.sim.soak --hours 100 --seeds 2000 --jobs $(JOBS)
else
	$(BIN)/python -m tests.sim.soak --hours $(HOURS) --jobs $(JOBS)
	SUPERFLUID_SIM_EXAMPLES=3000 $(BIN)/python -m pytest --timeout 0 tests/sim/test_machine.py
	$(BIN)/python -m tests.unit.link.soak_frames
	$(MAKE) native
	$(BIN)/python -m tests.unit.simulator.soak_native
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES)
	$(BIN)/python -m tests.failover.soak
	$(BIN)/python -m tests.cases.soak --schemas 10000
	$(BIN)/python -m tests.unit.head_api.soak_lag
	$(BIN)/python -m tests.e2e.soak_memory
	PYTHONPATH=.venv/fuzz $(BIN)/python -W ignore -m tests.unit.head_api.soak_openapi --cases 1000
	SUPERFLUID_TEST_KERNELS=20 $(BIN)/python -m pytest --timeout 0 tests/unit/engine_cuda/test_kernels.py
	$(BIN)/superfluid selftest --device cpu --only engines
	$(BIN)/superfluid bench scenario kill
	$(BIN)/superfluid bench scenario kill --engine native --batch-invariant --rounds 13
	$(BIN)/superfluid bench scenario kill --engine native --rounds 6
	SUPERFLUID_TEST_MODES=10000 $(BIN)/python -m pytest --timeout 0 tests/cases/test_modes.py
	SUPERFLUID_TEST_CUTS=10000 SUPERFLUID_TEST_TEXT_BYTES=1048576 $(BIN)/python -m pytest --timeout 0 tests/unit/head_text/test_dialects.py
endif

dashboard: $(STAMP) $(BROWSER)  ## the dashboard in a Chromium before a live fleet; SUPERFLUID_TEST_SHOTS=FOLDER keeps screenshots
	SUPERFLUID_TEST_BROWSER=.venv/browser $(BIN)/python -m pytest tests/dashboard/test_browser.py $(ARGS)

$(BROWSER): $(STAMP) tests/browser.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/browser -r tests/browser.txt
	npm install --silent --no-audit --no-fund --prefix .venv/browser axe-core@4.14.1
	touch $@

clients: $(STAMP)  ## programs that people use against the demo model, installed by name into environments of their own
	$(BIN)/python -m tests.clients.run $(ARGS)

bench: $(STAMP)  ## decode and prefill beside llama-server and transformers, planning, a burst with one prefix
	$(BIN)/superfluid bench compare $(ARGS)
	$(BIN)/python -m tests.unit.scheduler.bench_plan
	$(BIN)/python -m tests.unit.engine_torch.bench_prefix

native: $(NATIVE)  ## the hot modules compiled, in .venv/native; used by whoever puts that folder in PYTHONPATH

$(NATIVE): $(STAMP) .ci/native.py $(shell find superfluid_core superfluid_noded superfluid_head -name '*.py')
	rm -rf .venv/native .venv/native-build
	$(BIN)/python .ci/native.py -q build --build-base .venv/native-build --build-lib .venv/native
	rm -rf .venv/native-build
	touch $@

clean:  ## remove .venv and every cache
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info build dist
