# `make help` lists the targets and variables. A target's comment after ## is its line there.
PYTHON ?= python3
JAX ?=
ARGS ?=
OP ?= all
CUDA ?=
CUDA_ARCHITECTURES ?=

python_version := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv/python$(python_version)-jax$(or $(JAX),latest)
python := $(VENV)/bin/python
# If this machine has an NVIDIA driver, install jax with its CUDA plugin and build the GPU half.
driver := $(wildcard /proc/driver/nvidia/version)
jax := jax$(if $(driver),[cuda13])$(if $(JAX),==$(JAX))
gpu_half = $(or $(CUDA),$(if $(driver),,OFF))
headers := build/ffi_headers
# Tests use one process a processor, at most eight. With a GPU they use one, because processes would share the GPU.
processes = $(if $(driver),,-n $(shell n=$$(nproc); echo $$((n < 8 ? n : 8))))

.PHONY: help build test test-all matrix fuzz accuracy compatibility demo bench emulate sanitize sanitize-gpu kernels docs \
  wheel reproducible fmt lint clean
.DEFAULT_GOAL := build

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'Variables, as in make test PYTHON=python3.12 JAX=0.11.2:'
	@echo '  PYTHON              interpreter, 3.11 or newer (python3)'
	@echo '  JAX                 version of jax (the newest supported one)'
	@echo '  CUDA                ON builds the GPU half, OFF leaves it out (ON if there is an NVIDIA GPU)'
	@echo '  CUDA_ARCHITECTURES  90a-real, "80-real;90a-real", release, ... (the GPUs of this machine)'
	@echo '  ARGS                arguments of the tests, the demo, the benchmarks'
	@echo '  OP                  op to benchmark (all)'
	@echo 'Each pair of PYTHON and JAX has its own environment in .venv/.'

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(python) -m pip install --quiet --upgrade pip
	$(python) -m pip install --progress-bar on --quiet '$(jax)' $$($(python) tools/requirements.py runtime build demo test lint)
	touch $@

# FFI headers of the oldest supported jaxlib, whatever jaxlib the environment has.
$(headers)/ready: pyproject.toml | $(VENV)/ready
	$(python) -m pip install --quiet --no-deps --only-binary=:all: --python-version 3.12 --upgrade \
	  --target $(headers) "$$($(python) tools/requirements.py headers)"
	touch $@

# Ninja rebuilds only changed files. The cache of the Python, options and compilers is removed first; the handlers'
# objects do not depend on Python, so they stay.
build: $(VENV)/ready $(headers)/ready ## Build and install jaxops, editable, into .venv/ (the default)
	@$(if $(CUDA)$(driver),:,echo 'No NVIDIA GPU here: the GPU half is left out. CUDA=ON builds it.')
	rm -f build/cmake/CMakeCache.txt build/cmake/.skbuild-info.json
	$(python) -m pip install --quiet --no-build-isolation --no-deps --editable . \
	  --config-settings=cmake.define.JAXOPS_FFI_INCLUDE_DIR=$(CURDIR)/$(headers)/jaxlib/include \
	  $(if $(gpu_half),--config-settings=cmake.define.JAXOPS_CUDA=$(gpu_half)) \
	  $(if $(CUDA_ARCHITECTURES),--config-settings='cmake.define.JAXOPS_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES)') \
	  $(if $(racecheck),--config-settings=cmake.define.JAXOPS_RACECHECK=$(racecheck))

test: build ## Run the tests without the slow ones
	$(python) -m pytest $(or $(ARGS),$(processes))

test-all: build ## Run all tests
	$(python) -m pytest -m '' $(or $(ARGS),$(processes))

matrix: build ## Run the ops under every JAX transformation
	$(python) tests/transformations.py $(ARGS)

fuzz: build ## Compare random calls with float64; ARGS='softmax --cases 500 --seed 1'
	$(python) tests/fuzz.py $(ARGS)

accuracy: build ## Measure errors on this device and rewrite docs/accuracy.md
	$(python) tests/accuracy.py $(ARGS)

compatibility: ## Run version-dependent tests with every Python here and every supported jax
	$(PYTHON) tools/compatibility.py $(ARGS)

demo: build ## Compare the main ops with jax.nn, then train a small model with and without jaxops
	$(python) -m benchmarks.demo $(ARGS)

bench: build ## Benchmark an op beside XLA; OP=softmax
	$(python) -m benchmarks $(OP) $(ARGS)

# Each GPU thread becomes a fiber. Needs the CUDA toolkit's headers, but no GPU.
emulate: build ## Test the CUDA row kernels on the CPU
	HEADERS=$(CURDIR)/$(headers)/jaxlib/include JOBS=2 tools/variant.sh $(python) emulate -DJAXOPS_EMULATE=ON -- \
	  tests/ops/test_softmax.py tests/ops/test_logits.py tests/ops/test_norm.py tests/handlers/test_rows.py tests/ops/test_contract.py \
	  tests/ops/test_fuzz.py tests/handlers/test_frames.py \
	  -k 'not matmul and not cuda and not memory_of_some_rows and not depend_on_threads' $(ARGS)
	JAXOPS_EMULATED_CLUSTER=4 HEADERS=$(CURDIR)/$(headers)/jaxlib/include JOBS=2 tools/variant.sh $(python) emulate \
	  -DJAXOPS_EMULATE=ON -- tests/ops/test_softmax.py tests/ops/test_norm.py -k every_row_length $(ARGS)

# With AddressSanitizer the tests also call the handlers through JAX. JAX does not support ThreadSanitizer, so with it
# they only call the handlers directly, with call frames of every row length and malformed ones.
sanitize: build ## Test the CPU handlers under sanitizers
	HEADERS=$(CURDIR)/$(headers)/jaxlib/include tools/sanitize.sh $(python) address,undefined -m '' \
	  tests/handlers/test_frames.py tests/ops/test_softmax.py tests/ops/test_logits.py tests/ops/test_norm.py -k 'not cuda' $(ARGS)
	HEADERS=$(CURDIR)/$(headers)/jaxlib/include tools/sanitize.sh $(python) thread -m '' \
	  tests/handlers/test_frames.py -k 'not cuda' $(ARGS)

# racecheck has a build of its own; `make build` then makes the usual one again.
sanitize-gpu: racecheck = $(if $(findstring racecheck,$(ARGS)),ON)
sanitize-gpu: build ## Test the GPU handlers under compute-sanitizer; ARGS='--only "memcheck matmul"', '--only racecheck'
	$(python) tools/sanitize_gpu.py $(ARGS)

kernels: build ## Count the kernels of the built GPU half, and their bytes, by kind
	$(python) tools/kernels.py $(ARGS)

docs: $(VENV)/ready ## Build the documentation site in build/site
	$(python) -m pip install --quiet $$($(python) tools/requirements.py docs)
	$(python) -m mkdocs build

# WHEEL_PYTHONS='python3.11 python3.12' builds both wheels: one for 3.11, one for every later Python.
WHEEL_PYTHONS ?= $(PYTHON)
wheel: ## Build wheels and the source distribution in dist/
	CUDA='$(CUDA)' CUDA_ARCHITECTURES='$(CUDA_ARCHITECTURES)' tools/wheel.sh $(WHEEL_PYTHONS)

reproducible: ## Check that two builds in different folders give identical wheels
	rm -rf build/reproducible
	for place in a b; do \
	  git clone --quiet . build/reproducible/$$place && $(MAKE) -C build/reproducible/$$place wheel || exit 1; \
	done
	cd build/reproducible && sha256sum */dist/* && for file in a/dist/*; do cmp $$file b/dist/$$(basename $$file) || exit 1; done

cxx_sources = $(shell find ffi tests -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')

fmt: $(VENV)/ready ## Format the code
	$(python) -m ruff check --fix .
	$(python) -m ruff format .
	$(VENV)/bin/clang-format -i $(cxx_sources)

lint: $(VENV)/ready ## Check formats, style and prose
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(cxx_sources)
	$(python) tools/prose.py

clean: ## Remove build/, dist/ and .venv/
	rm -rf build dist .venv
