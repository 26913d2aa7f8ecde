# `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint check-types layers coverage clean

demo: .venv/demo
	$(BIN)/recoup demo

test: .venv/dev lint check-types layers coverage

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types:
	$(BIN)/mypy

layers:
	$(BIN)/lint-imports

# The whole suite runs under coverage, its files spread over the cores; the algebra half must have 95 % of its branches
# covered.
coverage:
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist loadfile --cov --cov-report=
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
