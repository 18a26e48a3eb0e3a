# pdray: make help

SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv/bin
ARGS ?=
TESTS ?=
TOGETHER := $(filter-out tests/integration tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
BENCH ?=

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */  make \1|/' | column -t -s '|'

setup:  ## make .venv with everything; quick where nothing changed (options: head of .ci/setup.sh)
	@.ci/setup.sh

run: setup  ## set up if need be, then serve on this machine: make run ARGS="--prefill 2"
	@exec $(VENV)/pdray serve $(ARGS)

# The integration tests start whole clusters, which need both cores; all others run two at a time.
test: setup  ## all tests but the slow ones; a part: make test TESTS=tests/unit
	@if [ -n "$(TESTS)" ]; then exec $(VENV)/pytest -q -m "not slow" $(TESTS); fi; \
	$(VENV)/pytest -q -m "not slow" -n 2 --dist loadfile $(TOGETHER) && \
	$(VENV)/pytest -q -m "not slow" tests/integration

test-all: setup  ## all tests
	$(VENV)/pytest -q $(or $(TESTS),tests)

lint: setup  ## style, types, import arrows
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports

check: lint test  ## what CI runs

bench: setup  ## measure the claims, under 20 minutes: docs/benchmarks.md; or single ones: make bench BENCH="stream_cost"
	@if [ -z "$(BENCH)" ]; then \
		exec $(VENV)/pdray bench scenario --form short --output docs/benchmarks.jsonl --page docs/benchmarks.md $(ARGS); \
	fi; \
	for name in $(BENCH); do \
		echo "== services.bench.$$name" >&2; $(VENV)/python -m services.bench.$$name $(ARGS) || exit 1; \
	done

proto:  ## regenerate the protobuf stubs
	$(VENV)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. services/protocol/proto/*.proto

clean:  ## remove .venv, caches and build output
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find services kvstore tests -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help setup run test test-all lint check bench proto clean
