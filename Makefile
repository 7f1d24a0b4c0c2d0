# `make demo` and `make test` do all setup themselves; `make help` lists all targets.
PY ?= python3
VENV_PY := .venv/bin/python
READY := .venv/.ready
SETUP_INPUTS := requirements-dev.txt pyproject.toml scripts/setup.sh $(wildcard plugins/*/pyproject.toml)
# One thread per process, so that results do not depend on the number of cores, and timings are
# comparable.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
# Write bytecode even if the environment forbids it: tests start hundreds of processes, and each would
# compile the package again. pytest also caches its rewritten assertions as bytecode.
export PYTHONDONTWRITEBYTECODE :=
# Maximum time of a test in seconds; read by pytest-timeout if it is installed.
export PYTEST_TIMEOUT ?= 120
# Number of test processes; 0 runs all tests in a single process.
WORKERS ?= 2
PYTEST := $(VENV_PY) -m pytest
# Each process runs one file at a time.
SHARED = -n $(WORKERS) --dist loadfile
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow nightly soak check lint types public-types contracts format reading wheels release-check docs bench rivals vllm-tests vllm-engine oldest-transformers clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-19s %s\n", $$1, $$2 }' Makefile

# Editable installs contain the path of the checkout, so a moved or copied checkout is set up again.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif

$(READY): $(SETUP_INPUTS)
	@sh scripts/setup.sh "$(PY)"
	@printf '%s\n' "$(CURDIR)" > $@

setup: $(READY) ## Set up .venv (every other target does this itself)

demo: $(READY) ## Replay a real trace through a small decoder (options: ARGS="--steps 200")
	@$(VENV_PY) -m dispatchkit demo $(ARGS)

# The files are divided in advance: pytest-xdist would import all of these thousands of short tests in
# every process, and send six messages for each test.
test: $(READY) ## Run all tests except slow tests and GPU tests
	@$(VENV_PY) scripts/shares.py $(WORKERS) -m "not slow and not gpu" $(ARGS)

# Many slow tests wait for other processes, and one test takes minutes by itself.
test-slow: WORKERS = 3
test-slow: export PYTEST_TIMEOUT := 900
test-slow: $(READY) ## Run the slow tests: package builds, all golden vectors, many processes
	$(PYTEST) $(SHARED) --no-loadscope-reorder -m "slow and not gpu" $(ARGS)

nightly: export HYPOTHESIS_PROFILE := nightly
nightly: export PYTEST_TIMEOUT := 7200
nightly: $(READY) ## Run everything with 10,000 random examples for each property
	$(PYTEST) $(SHARED) -m "not gpu" $(ARGS)

check: lint types contracts ## Check lint, formatting, types and import contracts (-k: continue after a failure)

lint: $(READY)
	$(VENV_PY) -m ruff check --output-format concise .
	$(VENV_PY) -m ruff format --check .

types: $(READY)
	$(VENV_PY) -m mypy dispatchkit $(wildcard plugins/*/src)

# Not part of `check`, because it downloads node (60 MB) and takes half a minute.
public-types: $(READY) ## Check with pyright that every public name has a type (fetches pyright)
	@$(VENV_PY) -m pip install --quiet --disable-pip-version-check 'pyright[nodejs]==1.1.414'
	PATH="$(CURDIR)/.venv/bin:$$PATH" VIRTUAL_ENV="$(CURDIR)/.venv" \
		$(VENV_PY) -m pyright --verifytypes dispatchkit --ignoreexternal

contracts: $(READY)
	$(VENV_PY) -c "from importlinter.cli import lint_imports_command as main; main()" --no-logo

format: $(READY) ## Format the code
	$(VENV_PY) -m ruff check --fix-only .
	$(VENV_PY) -m ruff format .

reading: $(READY) ## Update the summaries and line counts in docs/reading.md
	@$(VENV_PY) scripts/reading.py

rivals: $(READY) ## Fetch published vLLM dispatchers into .rivals/, for tests that compare with them
	@$(VENV_PY) scripts/rivals.py

vllm-tests: $(READY) ## Run the dispatcher tests of every vLLM release on dispatchkit's classes (fetches 2 GB)
	@$(VENV_PY) plugins/dispatchkit-vllm/upstream/run.py $(ARGS)

vllm-engine: $(READY) ## Run complete vLLM engines on the CPU, with policies in both runners (fetches 2 GB)
	@$(VENV_PY) plugins/dispatchkit-vllm/upstream/cpu_engine.py $(ARGS)

# The oldest supported release; requirements-dev.txt pins the newest.
OLDEST := .rivals/transformers-4.57.1
oldest-transformers: $(READY) ## Fetch the oldest supported transformers into .rivals/, and test with it
	test -d $(OLDEST) || $(VENV_PY) -m pip install --quiet --disable-pip-version-check \
		--target $(OLDEST) transformers==4.57.1
	PYTHONPATH=$(OLDEST) $(PYTEST) plugins/dispatchkit-transformers/tests/test_transformers.py \
		plugins/dispatchkit-transformers/tests/test_generate_options.py $(ARGS)

wheels: $(READY) ## Build the core and all plugins into .wheels/ (needs no network)
	@rm -rf .wheels
	$(VENV_PY) -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps \
		--no-build-isolation --wheel-dir .wheels . $(addprefix ./,$(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)))
	@ls .wheels

release-check: $(READY) ## Build all distributions into dist/, and test them in a new environment
	$(VENV_PY) scripts/release.py $(ARGS)

docs: $(READY) ## Build the pages into docs/_build/html (installs Sphinx)
	@$(VENV_PY) -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	$(VENV_PY) -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo docs/_build/html/index.html

soak: $(READY) ## Run all features together, with random faults (ARGS="--steps 1000000 --seed 1")
	$(VENV_PY) scripts/soak.py $(ARGS)

bench: $(READY) ## Run the CPU benchmarks; each result is one line of JSON
	@for script in bench/*.py; do $(VENV_PY) "$$script" || exit 1; done

clean: ## Remove the environment and all build outputs
	rm -rf .venv .wheels dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
