# `make demo` and `make test` do all set-up themselves; `make help` lists the rest.
PY ?= python3
VENV_PY := .venv/bin/python
READY := .venv/.ready
SETUP_INPUTS := requirements-dev.txt pyproject.toml scripts/setup.sh $(wildcard plugins/*/pyproject.toml)
# One thread per process: results do not depend on the number of cores, and timings are comparable.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
# Even where the environment forbids it: tests start hundreds of processes, and each would compile
# the package again. (pytest keeps its rewritten assertions there, too.)
export PYTHONDONTWRITEBYTECODE :=
# Read by pytest-timeout where it is installed: seconds that one test may take.
export PYTEST_TIMEOUT ?= 120
# Processes that share the tests; 0 runs them in one.
WORKERS ?= 2
PYTEST := $(VENV_PY) -m pytest
# A file each at a time.
SHARED = -n $(WORKERS) --dist loadfile
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow nightly soak check lint types public-types contracts format reading wheels release-check docs bench rivals vllm-tests vllm-engine oldest-transformers clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-19s %s\n", $$1, $$2 }' Makefile

# An environment belongs to the folder it was made in (editable installs name it): a moved or
# copied checkout is set up anew.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif

$(READY): $(SETUP_INPUTS)
	@sh scripts/setup.sh "$(PY)"
	@printf '%s\n' "$(CURDIR)" > $@

setup: $(READY) ## Make .venv ready (every other target does so itself)

demo: $(READY) ## Replay a real trace through a small decoder (options: ARGS="--steps 200")
	@$(VENV_PY) -m dispatchkit demo $(ARGS)

# The files are divided beforehand: these are thousands of short tests, of which xdist would import
# all in every process and send six messages for each.
test: $(READY) ## Run all tests but the slow ones and those for a GPU
	@$(VENV_PY) scripts/shares.py $(WORKERS) -m "not slow and not gpu" $(ARGS)

# Many of them wait for other processes; and one alone takes minutes.
test-slow: WORKERS = 3
test-slow: export PYTEST_TIMEOUT := 900
test-slow: $(READY) ## Run the slow tests: package builds, full vectors, many processes
	$(PYTEST) $(SHARED) --no-loadscope-reorder -m "slow and not gpu" $(ARGS)

nightly: export HYPOTHESIS_PROFILE := nightly
nightly: export PYTEST_TIMEOUT := 7200
nightly: $(READY) ## Run everything with 10,000 random examples for each property
	$(PYTEST) $(SHARED) -m "not gpu" $(ARGS)

check: lint types contracts ## Lint, formatting, types, import contracts (-k: all, even if one fails)

lint: $(READY)
	$(VENV_PY) -m ruff check --output-format concise .
	$(VENV_PY) -m ruff format --check .

types: $(READY)
	$(VENV_PY) -m mypy dispatchkit $(wildcard plugins/*/src)

# Not part of `check`: it brings its own node, 60 MB, and takes half a minute.
public-types: $(READY) ## Check that every public name is typed, as pyright sees it (fetches pyright)
	@$(VENV_PY) -m pip install --quiet --disable-pip-version-check 'pyright[nodejs]==1.1.414'
	PATH="$(CURDIR)/.venv/bin:$$PATH" VIRTUAL_ENV="$(CURDIR)/.venv" \
		$(VENV_PY) -m pyright --verifytypes dispatchkit --ignoreexternal

contracts: $(READY)
	$(VENV_PY) -c "from importlinter.cli import lint_imports_command as main; main()" --no-logo

format: $(READY) ## Rewrite the code in the project's format
	$(VENV_PY) -m ruff check --fix-only .
	$(VENV_PY) -m ruff format .

reading: $(READY) ## Bring the counts of docs/reading.md up to date
	@$(VENV_PY) scripts/reading.py

rivals: $(READY) ## Fetch published vLLM dispatchers into .rivals/, which tests then compare with
	@$(VENV_PY) scripts/rivals.py

vllm-tests: $(READY) ## Run vLLM's own dispatcher tests, of every release, on our classes (fetches 2 GB)
	@$(VENV_PY) plugins/dispatchkit-vllm/upstream/run.py $(ARGS)

vllm-engine: $(READY) ## Run whole vLLM engines on the CPU with policies in both runners (fetches 2 GB)
	@$(VENV_PY) plugins/dispatchkit-vllm/upstream/cpu_engine.py $(ARGS)

# The other end of the range than the one that requirements-dev.txt pins.
OLDEST := .rivals/transformers-4.57.1
oldest-transformers: $(READY) ## Fetch the oldest transformers served into .rivals/, and test with it
	test -d $(OLDEST) || $(VENV_PY) -m pip install --quiet --disable-pip-version-check \
		--target $(OLDEST) transformers==4.57.1
	PYTHONPATH=$(OLDEST) $(PYTEST) plugins/dispatchkit-transformers/tests/test_transformers.py \
		plugins/dispatchkit-transformers/tests/test_generate_options.py $(ARGS)

wheels: $(READY) ## Build core and every plugin into .wheels/ (needs no network)
	@rm -rf .wheels
	$(VENV_PY) -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps \
		--no-build-isolation --wheel-dir .wheels . $(addprefix ./,$(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)))
	@ls .wheels

release-check: $(READY) ## Build all distributions into dist/, install them elsewhere, run their tests
	$(VENV_PY) scripts/release.py $(ARGS)

docs: $(READY) ## Build the pages into docs/_build/html (adds Sphinx to the environment)
	@$(VENV_PY) -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	$(VENV_PY) -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo docs/_build/html/index.html

soak: $(READY) ## Run everything at once, with faults at random (ARGS="--steps 1000000 --seed 1")
	$(VENV_PY) scripts/soak.py $(ARGS)

bench: $(READY) ## Run the CPU benchmarks, one JSON line for each result
	@for script in bench/*.py; do $(VENV_PY) "$$script" || exit 1; done

clean: ## Remove the environment and everything built
	rm -rf .venv .wheels dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
