# fullrank: `make demo` shows it at work, `make test` checks it. Needs Python 3.11+, git and make; builds .venv by itself.
#
#   PYTHON=python3.12    the Python that .venv is built with (default: python3, or the first 3.11+ found)
#   ARGS="..."           handed on: make demo ARGS="--minutes 2", make test ARGS="tests/decoding -k beam"
#   WORKERS=4            processes that run the tests (default: one per core, at most 4)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all test-versions book book-links lint format gpu-compile size clean

PYTHON ?=
ARGS ?=
WORKERS ?= auto
BIN := .venv/bin
VENV := PYTHON="$(PYTHON)" sh scripts/venv.sh
SPHINX := OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 16

demo: ## train three small models on the built-in text and write runs/demo/report.html
	@$(VENV) run
	@$(BIN)/fullrank demo $(ARGS)

test: ## run every test that protects a change
	@$(VENV) dev
	@$(PYTEST) $(ARGS)

test-all: ## run those, the full products of all stages, the examples and the long campaigns
	@$(VENV) dev
	@$(PYTEST) -m "" $(ARGS)

test-versions: ## run the tests of Hugging Face models with the lowest and the newest torch and transformers, or with VERSIONS
	@PYTHON="$(PYTHON)" sh scripts/versions.sh $(if $(VERSIONS),"$(VERSIONS)")

book: ## build the book into build/book; a warning or a dead link inside it is a fault
	@$(VENV) dev
	@$(SPHINX) build/book
	@echo "build/book/index.html"

book-links: ## look up the links of the book to other sites
	@$(VENV) dev
	@$(SPHINX) -b linkcheck build/links

lint: ## check style, formatting, types and who imports whom
	@$(VENV) dev
	@failed=""; \
	$(BIN)/ruff check . || failed="$$failed style"; \
	$(BIN)/ruff format --check . || failed="$$failed formatting"; \
	$(BIN)/mypy || failed="$$failed types"; \
	$(BIN)/lint-imports || failed="$$failed imports"; \
	if [ -n "$$failed" ]; then echo "lint: faults in$$failed" >&2; exit 1; fi

format: ## format the code and mend what can be mended
	@$(VENV) dev
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

gpu-compile: ## compile the GPU kernels without a GPU, and print registers, spills and an estimate (ARGS="--capabilities 90": one card)
	@$(VENV) dev
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/compile_gpu.py $(ARGS)

size: ## print lines, tokens and density of the code, and how many functions begin with neither a verb nor a noun (ARGS=--names)
	@$(VENV) run
	@$(BIN)/python scripts/size.py $(ARGS)

clean: ## remove .venv, caches and build products (runs/ stays)
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks research -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
