PYTHON ?= python
SCRIPTS = .ci/run slurm/*.sh slurm/*.slurm tests/*.sh tests/slurm/*.sh tests/slurm/stand_in/bin/*

.PHONY: bench-sglang test-slurm test-slurm-short check format test test-compat bench-scale

check: ## style, lint and types, of shell scripts too
	shellcheck --external-sources --exclude=SC1091 $(SCRIPTS)
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pyright

format: ## rewrite files the way `check` wants them
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

test-compat: ## our parts against those of upstream 0.4.0, which pip installs in a side environment
	ATROPOS_COMPAT=1 $(PYTHON) -m pytest tests/compat

test: ## every test; loopback only
	$(PYTHON) -m pytest

bench-scale: ## 50,000 x 16 through a mock engine, with kills and faults: an hour; SCALE="--problems 2000" for less
	$(PYTHON) -m tests.scale $(SCALE)

test-slurm: ## the SLURM scripts on SLURMs of one and of three nodes that the tests start; root on Debian
	ATROPOS_SLURM=long $(PYTHON) -m pytest tests/slurm

test-slurm-short: ## the part of it that CI runs, under two minutes
	ATROPOS_SLURM=short $(PYTHON) -m pytest tests/slurm

bench-sglang: ## is a running SGLang the bottleneck? make bench-sglang URL=http://127.0.0.1:9000 MODEL=/path/of/model
	$(PYTHON) -m benchmarks.bench_sglang $(URL) --model $(MODEL)
