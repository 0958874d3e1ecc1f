# Chopper's two commands are `make demo` and `make test`; `make help` lists the rest.
#
# Both build the pinned environment in .venv on first use and bring it up to date when
# pyproject.toml, constraints.txt or the C source change. Wanted on the machine: Python >= 3.11, make, git
# and a C compiler (traces are scanned and host spans nested in C, and torch.compile asks for one).

# First of these that exists; or say `make demo PYTHON=/path/to/python3.12`.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Options for every pip install, for example PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# on a machine without GPUs, which saves gigabytes of CUDA libraries.
PIP_ARGS ?=
# Options for pytest, for example PYTEST_ARGS="-k closure". Three workers for two cores by default:
# tests wait for the processes that they start.
PYTEST_ARGS ?= -n $(shell expr \( 3 \* $$(getconf _NPROCESSORS_ONLN) + 1 \) / 2) --dist worksteal
# Percent of lines and branches that `make coverage` must reach, children included.
COVERAGE_MIN ?= 80
# Programs of tests/clients/programs to record, for example CLIENTS="gan.py item_loop.py"; all if none.
CLIENTS ?=
# Where the demo writes; an earlier demo's runs and pages there are replaced.
DEMO_RUN ?= runs/demo
DEMO_REPORT ?= report.html
DEMO_COMPARISON ?= comparison.html

PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Build dependencies are pinned too, so nothing is fetched into an isolated build environment.
# Python compiles a module when it is first imported: most modules of the packages never are.
INSTALL := $(PIP) install --no-compile --no-build-isolation -c constraints.txt $(PIP_ARGS)

export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
# One after the other, but the checks of `make test`: each takes one core, and two take as long.
ifneq ($(MAKECMDGOALS),checks)
.NOTPARALLEL:
endif
.PHONY: help env demo test test-all checks two-checks lint types layers collection unit coverage docs validate fuzz bench clients traces clean

help:  ## what can be made
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# $(call environment,EXTRA): Chopper, editable, with the packages of an extra.
define environment
@test -n "$(PYTHON)" || { echo "chopper: no Python found; install Python 3.11 or newer, or pass PYTHON=/path/to/python3" >&2; exit 1; }
@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "chopper: $(PYTHON) is older than Python 3.11; install a newer one, or pass PYTHON=/path/to/python3.11" >&2; exit 1; }
@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || { echo "chopper: $(PYTHON) cannot make an environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
@$(INSTALL) pip setuptools
@$(INSTALL) -e '.[$(1)]'
@# Built for one Python by an earlier version: Python would prefer them to those for the stable ABI.
@find analyzers collectors -name '_*.cpython-*.so' -exec rm -f {} +
endef

PINNED := pyproject.toml constraints.txt setup.py $(wildcard analyzers/*.c analyzers/*/*.c collectors/*.[ch] collectors/*/*.[ch])

$(VENV)/run.stamp: $(PINNED)
	@echo "chopper: making the pinned environment in $(VENV) (a few minutes the first time)" >&2
	$(call environment,torch)
	@touch $@

# Holds what run.stamp stands for: in a fresh clone one installation, not two.
$(VENV)/dev.stamp: $(PINNED)
	@echo "chopper: making the pinned environment in $(VENV), with the development tools (a few minutes the first time)" >&2
	$(call environment,dev)
	@touch $(VENV)/run.stamp $@

env: $(VENV)/dev.stamp  ## the environment of all targets, in .venv

# $(call record,DIRECTORY,OPTIONS): the demo's training, on two processes of one thread each.
record = $(BIN)/chopper record -o $(1) --force -- \
  env OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/demo.py $(2)

# Calibrated first (once per machine), so that machines without GPUs have a ceiling to compare with.
# Text ends where its first screen does; the pages have the rest.
demo: $(VENV)/run.stamp  ## record a training, take the action that its report suggests, compare
	@$(BIN)/chopper calibrate --ranks 2 --quick >/dev/null
	@$(call record,$(DEMO_RUN),)
	@echo
	@$(BIN)/chopper analyze $(DEMO_RUN) | sed '/^Where the time went/,$$d'
	@$(BIN)/chopper report $(DEMO_RUN) -o $(DEMO_REPORT) --force >/dev/null
	@echo "The action is taken: examples/demo.py --fixed tokenizes once and leaves the loss on the device."
	@$(call record,$(DEMO_RUN)-fixed,--fixed)
	@echo
	@$(BIN)/chopper compare $(DEMO_RUN) $(DEMO_RUN)-fixed | sed '/^What to try first/,$$d'
	@$(BIN)/chopper compare $(DEMO_RUN) $(DEMO_RUN)-fixed -o $(DEMO_COMPARISON) --force >/dev/null
	@printf '%s\n' "next: source $(BIN)/activate        # then chopper is on the path:" \
	  "      chopper analyze $(DEMO_RUN)        # every cause; --by layer, op, rank …" \
	  "      chopper record -- python train.py" >&2

# pytest comes last, so that its closing line is the last line.
test: two-checks unit  ## what guards the code: checks, documentation, tests

test-all: two-checks coverage  ## the same with the tests that take long, and coverage

two-checks: $(VENV)/dev.stamp
	@$(MAKE) --no-print-directory -j 2 --output-sync=target checks

checks: lint types layers docs collection

lint: $(VENV)/dev.stamp  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp  ## mypy --strict
	$(BIN)/mypy

layers: $(VENV)/dev.stamp  ## import-linter: who may import whom
	$(BIN)/lint-imports

# Compiles the tests once, beside mypy: otherwise each of pytest's workers does. What fails here
# fails again in pytest, which shows it.
collection: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true

unit: $(VENV)/dev.stamp  ## pytest without the tests that take long
	$(BIN)/python -m pytest -m "not long" $(PYTEST_ARGS)

# Every process that a test starts is measured too: that takes a third more time.
coverage: $(VENV)/dev.stamp  ## all of pytest with coverage
	$(BIN)/python -m pytest --cov --cov-report=term --cov-fail-under=$(COVERAGE_MIN) $(PYTEST_ARGS)

docs: $(VENV)/dev.stamp  ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Options for the injections, for example VALIDATE_ARGS="--real --causes data_stall".
VALIDATE_ARGS ?= --synthetic
validate: $(VENV)/dev.stamp  ## known causes, injected: what the attribution finds of them
	$(BIN)/python -m tests.known_causes $(VALIDATE_ARGS)

# Options for the campaign, for example FUZZ_ARGS="--seconds 60 --seed 7 --only run".
FUZZ_ARGS ?=
fuzz: $(VENV)/dev.stamp  ## ten minutes of hostile inputs; what fails is kept in tests/fuzz/corpus
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

# The peers have dependencies of their own, so an environment of their own. TraceLens is on no package index.
TRACELENS := TraceLens @ git+https://github.com/AMD-AGI/TraceLens.git@171dd74721ca1ec45709e5805b68ae1f65e27811
$(VENV)/peers.stamp: benchmarks/peers.txt $(VENV)/run.stamp
	@echo "chopper: installing the peers to compare with in $(VENV)/peers" >&2
	@$(BIN)/python -m venv $(VENV)/peers
	@$(VENV)/peers/bin/python -m pip --disable-pip-version-check -qq install $(PIP_ARGS) -r benchmarks/peers.txt
	@$(VENV)/peers/bin/python -m pip --disable-pip-version-check -qq install $(PIP_ARGS) -c benchmarks/peers.txt "$(TRACELENS)" || echo "chopper: TraceLens could not be installed: its columns stay empty" >&2
	@touch $@

bench: $(VENV)/dev.stamp $(VENV)/peers.stamp  ## the figures of the README, each beside its peer
	@for script in benchmarks/[a-z]*.py; do \
	  echo "== $$script"; PYTHONPATH=$(CURDIR) CHOPPER_PEERS=$(abspath $(VENV))/peers/bin/python $(BIN)/python $$script || exit 1; \
	done

# The libraries have dependencies of their own, so an environment of their own; chopper is in it, editable.
$(VENV)/clients.stamp: tests/clients/requirements.txt $(VENV)/run.stamp
	@echo "chopper: installing the libraries whose programs are recorded in $(VENV)/clients (some minutes)" >&2
	@test -x $(VENV)/clients/bin/python || $(BIN)/python -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip --disable-pip-version-check -qq install $(PIP_ARGS) -r tests/clients/requirements.txt
	@$(VENV)/clients/bin/python -m pip --disable-pip-version-check -qq install --no-build-isolation --no-deps -e .
	@touch $@

clients: $(VENV)/clients.stamp  ## record programs of real libraries, compare with a witness in each
	@$(VENV)/clients/bin/python -m tests.clients --page docs/concepts/clients.md $(CLIENTS)

traces:  ## download the public traces of tests/golden/catalogue.csv into CHOPPER_TRACES, or traces/
	@"$(PYTHON)" tests/golden/fetch.py "$(or $(CHOPPER_TRACES),traces)"

clean:  ## remove the environment and everything that was built (recorded runs stay)
	rm -rf $(VENV) build dist site htmlcov .coverage .coverage.* *.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./.git -prune -o \( -name '_scan.*.so' -o -name '_forest.*.so' -o -name '_longest.*.so' \) -exec rm -f {} +
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
