PYTHON ?= python

.PHONY: check format test

check: ## style, lint and types
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pyright

format: ## rewrite files the way `check` wants them
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

test: ## every test; loopback only
	$(PYTHON) -m pytest
