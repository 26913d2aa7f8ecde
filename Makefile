# `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
# Tests are shared out over the cores file by file: those of one file have traces and trained networks in common.
PYTEST := $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist loadfile

.PHONY: demo test lint check-types layers tests longer coverage fuzz hostile faults paper-smoke clean

demo: .venv/demo
	$(BIN)/recoup demo

test: .venv/dev lint check-types layers tests

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types:
	$(BIN)/mypy

layers:
	$(BIN)/lint-imports

# Tests that try things at random, break things on purpose, prune large or many networks or run examples take longer: they
# are `make longer`. With COVER the tests collect coverage, which `make coverage` judges; longer ones take half as long
# again with it, and are left out.
LONGER := tests/fuzz tests/hostile tests/faults tests/test_threads.py tests/test_random_wirings.py \
	tests/test_callers_things.py tests/test_hostile_calls.py tests/test_torchvision.py tests/test_cifar_networks.py \
	tests/test_examples.py tests/test_docs.py tests/test_laws.py tests/cli/test_demo.py tests/benchmarks
COVERED := $(if $(COVER),--cov --cov-report=)

tests:
	$(PYTEST) $(COVERED) --durations 15 $(addprefix --ignore=,$(LONGER))

longer: .venv/dev
	$(PYTEST) --durations 15 $(LONGER)

# What `make test COVER=1` has run: the algebra must have 95 % of its branches covered, all of it 85 %.
coverage: .venv/dev
	$(BIN)/coverage report --include='src/recoup/algebra/*' --fail-under=95
	$(BIN)/coverage report --fail-under=85 --skip-covered

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[data]'
	touch $@

# torchvision and timm are installed without their dependencies: they would pull another build of torch.
.venv/dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps torchvision timm
	$(BIN)/pip install --quiet --constraint constraints.txt pyyaml huggingface-hub
	touch $@ .venv/demo

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* build

# The longer checks, each with a fresh seed that it prints. `make fuzz N=10000`: random networks under the laws of
# tests/fuzz/laws.py; `make hostile N=10000`: saved results as a stranger might send them.
JOBS ?= 2
fuzz: .venv/dev
	$(BIN)/python -m tests.fuzz --count $(or $(N),300) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))

hostile: .venv/dev
	$(BIN)/python -m tests.hostile --artefacts $(or $(N),1000) $(if $(SEED),--seed $(SEED))

# kill -9 and SIGTERM at random moments, full disks, a read-only disk, two writers; the disks need root.
MOMENTS ?= 50
faults: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults --count $(MOMENTS)

# Every experiment of docs/paper.md on small networks that are trained in the run; fails where one has lost its meaning.
paper-smoke: .venv/dev
	$(BIN)/python -m benchmarks.paper all --smoke
