# SPDX-License-Identifier: Apache-2.0
PYTHON ?= python3.11
RUN := .venv/bin/python

.PHONY: help install test lint demo tree diffstat wheel clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: ## make .venv, with our files live in it; nothing to do, nothing done
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install CPython 3.11, or make $@ PYTHON=/path/to/it" >&2; exit 1; }
	@$(PYTHON) -m tools.install
