# make run [PROMPT="..."]   a real model answers over gRPC, out of two services; everything it needs is set up first
# make serve                both services, until Ctrl-C
# make test                 lint, types and tests, without the long campaigns; make test-all runs those too
# make test-kernels         the CUDA kernels alone, without a GPU
# make gpu-check [STAGE=..] on a GPU machine: the same on the device, under its sanitizer, end to end, measured
# make gpu-wheels           what gpu-check needs beside torch, cupy and NVRTC, for a GPU machine without a network
# make compiled             the scheduler's core compiled to C, in build/compiled (deploy/compile_core.py)
# make lint | format | protos | bench | constraints | clean

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
PROMPT ?= Why is the sky blue? Answer in two sentences.
PROTO := protos/stepwire/v1/inference.proto protos/stepwire/v1/admin.proto
ifeq ($(origin BENCH),undefined)
BENCH := --concurrency 8 --num-requests 32 --input-tokens 128 --output-tokens 128 --ignore-eos
endif

# As given: a dollar sign in it is not make's, and, through the environment, no shell reads it as code either.
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: run serve test test-all test-kernels gpu-check gpu-wheels compiled lint format protos bench constraints clean

run: $(VENV)/.run $(MODEL)
	@$(PY) -m deploy.run_local --model $(MODEL) -- \
	  $(PY) -m stepwire generate --chat --max-tokens 128 --temperature 0.2 --top-p 0.9 --address {address} -- "$$PROMPT"

serve: $(VENV)/.run $(MODEL)
	@$(PY) -m deploy.run_local --model $(MODEL) --serve

bench: $(VENV)/.run $(MODEL)
	@$(PY) -m deploy.run_local --model $(MODEL) -- $(PY) -m bench.serve --address {address} $(BENCH)

test: lint $(MODEL)
	$(PY) -m pytest -m "not slow" -n 2 --dist loadfile

test-kernels: $(VENV)/.dev
	$(PY) -m pytest tests/kernels -m "not slow" -n 2

# In whatever environment has torch for the GPU and cupy: see docs/cuda.md. Figures go to .run/gpu-check.
GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),$(PYTHON))
gpu-check:
	@$(GPU_PYTHON) -m bench.gpu_check --stage "$(STAGE)"

gpu-wheels: | $(VENV)/bin/python
	$(PIP) download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp -c constraints.txt \
	  --platform manylinux2014_x86_64 $(foreach libc,17 26 27 28,--platform manylinux_2_$(libc)_x86_64) -d .run/gpu-wheels \
	  msgspec pyzmq gguf grpcio grpcio-health-checking grpcio-reflection googleapis-common-protos protobuf

compiled: $(VENV)/.dev
	$(PY) -m deploy.compile_core build/compiled

test-all: lint $(MODEL)
	$(PY) -m pytest

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

protos: $(VENV)/.dev
	$(PY) -m grpc_tools.protoc -I . --python_out=. --grpc_python_out=. --pyi_out=. $(PROTO)

# The pinned versions of this environment become those of everyone.
constraints: $(VENV)/.dev
	( head -1 constraints.txt; $(PIP) freeze --exclude-editable | sed 's/+cpu$$//' ) > $(VENV)/constraints.new
	mv $(VENV)/constraints.new constraints.txt

clean:
	rm -rf $(VENV) .run build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info

# Stamps: pip runs only when the pinned versions or the project's own metadata changed.
$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install -c constraints.txt -e '.[scheduler,executor]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --no-compile -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.run

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(MODEL): deploy/fetch_model.py | $(VENV)/bin/python
	@$(PY) deploy/fetch_model.py models >/dev/null
	@touch $@
