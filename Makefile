# SPDX-License-Identifier: Apache-2.0
PYTHON ?= python3.11
RUN := .venv/bin/python
# Where the environment says that Python keeps no bytecode, each process of a server compiles
# 15 seconds of sources again.
export PYTHONDONTWRITEBYTECODE :=
OURS := setup.py vllm vllm_pilot tools patches tests demo examples benchmarks

.PHONY: help install test test-full test-long test-models workloads lint format fuzz mutations demo playground tree diffstat docs-stats native wheel pilot-wheel release clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12
	@echo 'On a GPU host: see CONTRIBUTING.md, "Run on a GPU host".'

install: ## make .venv with our files live in it (does nothing when nothing changed)
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: install CPython 3.11, or make install PYTHON=/path/to/it" >&2; exit 1; }
	@$(PYTHON) -m tools.install

# Each model runner is set up before vLLM is imported, so each has a pytest process of its own. They
# run side by side: neither uses more than a core for long. V1 has most tests; some of its folders
# wait until V2 has ended, so that both cores are done at about the same time.
LATER := tests/conformance tests/docs tests/pilot tests/programs
# So have those with images, which import torchvision: tests/support/vision.py.
PICTURES = { $(RUN) -m pytest --tier full --pictures $(ARGS) || { test $$? = 5 && test -n "$(ARGS)"; }; } &&
define run_tests
@{ $(RUN) -m pytest --tier $(1) --runner v2 --durations=25 $(ARGS) || { test $$? = 5 && test -n "$(ARGS)"; }; v2=$$?; \
$(if $(ARGS),true,$(RUN) -m pytest --tier $(1) --durations=25 $(LATER)) && $(if $(filter full,$(1)),$(PICTURES)) \
exit $$v2; } >build/test-2.log 2>&1 & other=$$!; \
$(RUN) -m pytest --tier $(1) $(if $(ARGS),$(ARGS),--durations=40 $(LATER:%=--ignore=%)); v1=$$?; \
wait $$other; v2=$$?; cat build/test-2.log; test $$v1 = 0 && test $$v2 = 0
endef

test: install lint ## install, lint, the quick tests on both model runners (ARGS='-k name' for some)
	$(call run_tests,quick)

test-full: install lint ## the same with all tests but the long ones: what CI runs (25 to 80 minutes on 2 cores)
	$(call run_tests,full)

test-models: install ## every architecture against transformers (half an hour), into docs/models.md
	$(RUN) -m tests.conformance --jobs 2 --out build/conformance; $(RUN) -m tests.conformance --jobs 2 --runner v2 --out build/conformance; $(RUN) -m tests.conformance.report build/conformance

fuzz: install ## malformed HTTP bodies and vectors: is each refused by name? (N=20000)
	$(RUN) -m tests.http.fuzz $(or $(N),20000)
	$(RUN) -m tests.peers.lens_fuzz $(or $(N),10000)

mutations: install ## break the wiring on purpose: is it noticed? (docs/mutations.md)
	$(RUN) -m tests.mutations

# Seeds of another day each time; the tests of `make test` have the same ones always.
test-long: install ## the tests that take minutes each: several servers and engines at once
	$(RUN) -m pytest --tier long
	$(RUN) -m pytest --tier long --runner v2

workloads: install ## capture under random workloads, for ten minutes or so (WORKLOADS=300 of an engine)
	WORKLOADS=$(or $(WORKLOADS),100) WORKLOADS_FROM=$$(date +%s) $(RUN) -m pytest -s tests/serving/test_capture_workloads.py

lint: install ## ruff, mypy, who imports whom, and that the patches are small
	$(RUN) -m ruff check $(wildcard $(OURS))
	$(RUN) -m ruff format --check $(wildcard $(OURS))
	$(RUN) -m tools.typecheck
	$(RUN) -m tools.imports
	$(RUN) -m tools check

format: install ## let ruff format our files
	$(RUN) -m ruff check --fix $(wildcard $(OURS))
	$(RUN) -m ruff format $(wildcard $(OURS))

demo: install ## get a small model, find a direction in it, steer along it (MODEL=/path: your own)
	$(RUN) -m demo $(if $(MODEL),--model $(MODEL))

playground: install ## serve that small model with a page to see and steer it (PORT=8000)
	$(RUN) -m demo.playground $(if $(PORT),--port $(PORT))

tree: install ## leave build/tree, the fork as four git commits, for reading
	@git -C build/tree log --oneline --stat=1 --format='%h %s' | grep -vE '[|]|^$$'

diffstat: install ## how little the fork changes
	@$(RUN) -m tools diffstat

docs-stats: install ## words of each page, and its budget
	@$(RUN) -m tools.docs_stats

# The ops are found by engines without torch.compile; without them taps use torch and Triton.
native: install ## build csrc/ into the live tree (optional; needs CMake and a C++ compiler, for GPUs nvcc)
	$(RUN) -m tools.native build/tree/vllm

wheel: install ## the distributable wheel, in dist/; says whether it has native ops
	$(RUN) setup.py bdist_wheel

pilot-wheel: install ## the small wheel vllm-pilot, in dist/: patches an installed vLLM
	$(RUN) -m tools pilot-wheel

release: install ## the small wheel with SHA256SUMS and CHANGES.md, in dist/, from a committed tree
	$(RUN) -m tools release

clean: ## delete .venv and build/
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
