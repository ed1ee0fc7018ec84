# Every target sets up what it needs in .venv first; where nothing changed, that takes no time.
# Options of pip go in PIP_FLAGS, an interpreter in PYTHON: make setup PYTHON=/opt/python3.11/bin/python3

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
PIP_FLAGS ?=
PYTEST_FLAGS ?=
# The vLLM behind the one of .venv. Its wheel is for CUDA, so what needs an engine does not run on it.
NEXT_VLLM := 0.33.0
NEXT := $(VENV)-0.33
FUZZ_MINUTES ?= 60
FUZZ_OUT ?= out/fuzz.json
SOAK_MINUTES ?= 10
TRACE ?= conversation_trace.jsonl
POLICIES_OUT ?= out/policies
SOAK_OUT ?= out/soak.json
# An interpreter whose torch knows the GPU, for gpu-validate: the one of .venv is for CPUs.
GPU_PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-next check bench policies fuzz mutants soak gpu-validate clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{printf "%-18s %s\n", $$1, $$2}'

setup: ## make .venv from the pinned requirements (a few minutes and 5 GB the first time)
	@PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" bash .ci/setup $(VENV)

demo: setup ## serve a long prompt cold and warm on the real vLLM engine, and draw the load's timeline
	@$(BIN)/layerstream demo

test: setup ## run the tests, without those marked slow
	@$(BIN)/pytest -m "not slow" $(PYTEST_FLAGS)

test-full: setup ## run every test
	@$(BIN)/pytest $(PYTEST_FLAGS)

test-next: setup ## run the tests under vLLM's scheduler, without an engine, on the next vLLM (340 MB the first time)
	@bash .ci/setup-next $(NEXT) $(NEXT_VLLM) $(VENV)
	@PYTHONPATH="$(CURDIR)/$(NEXT)/site" VLLM_TARGET_DEVICE=cpu $(BIN)/pytest -m "not slow and not engine" \
		tests/hooks tests/contracts/test_scheduler_order.py tests/fuzz $(PYTEST_FLAGS)

check: setup ## lint, types, import rules and the contents of the wheel
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash .ci/check

bench: setup ## measure against the targets: about an hour, with the machine left alone
	@$(BIN)/python -m pytest profiles/microbench --timeout=0 -o faulthandler_timeout=0 --benchmark-quiet $(PYTEST_FLAGS)

policies: setup ## compare eviction policies on the trace TRACE and on a made-up workload (half an hour)
	@$(BIN)/python -m profiles.policies --trace "$(TRACE)" --out $(POLICIES_OUT)

fuzz: setup ## serve at random under vLLM's real scheduler, for FUZZ_MINUTES (an hour)
	@mkdir -p $(dir $(FUZZ_OUT))
	@$(BIN)/python profiles/fuzz.py --minutes $(FUZZ_MINUTES) --out $(FUZZ_OUT)

mutants: setup ## make faults in the code by hand, one at a time, and see which test finds each
	@$(BIN)/python profiles/mutations.py

soak: setup ## serve on all tiers while services, disk and engine fail, for SOAK_MINUTES (10)
	@mkdir -p $(dir $(SOAK_OUT))
	@$(BIN)/python -m profiles.soak --minutes $(SOAK_MINUTES) --out $(SOAK_OUT)

gpu-validate: ## prove the GPU path on this machine's GPU, in at most eight minutes (GPU_PYTHON: a python with its torch)
	@$(GPU_PYTHON) -m profiles.gpu_validate

clean: ## remove what builds and tools leave behind, but not .venv
	@rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
