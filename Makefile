# make build | test | test-all | matrix | fuzz | accuracy | compatibility | emulate | sanitize | sanitize-gpu | demo |
# bench OP=softmax | docs | wheel | reproducible | fmt | lint
# PYTHON chooses the interpreter (3.11 or newer), JAX a version of jax (0.10.0, 0.11.2, ...; default: the newest
# supported one); each pair gets an environment of its own. CUDA=ON builds the GPU half, CUDA=OFF leaves it out; by default
# it is built where there is an NVIDIA GPU. ARGS is handed to the demo, the tests and the benchmarks.
PYTHON ?= python3
JAX ?=
ARGS ?=
OP ?= all
CUDA ?=
CUDA_ARCHITECTURES ?=

python_version := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv/python$(python_version)-jax$(or $(JAX),latest)
python := $(VENV)/bin/python
# With an NVIDIA driver here, jax comes with its CUDA plugin, and the GPU half is built.
driver := $(wildcard /proc/driver/nvidia/version)
jax := jax$(if $(driver),[cuda13])$(if $(JAX),==$(JAX))
gpu_half = $(or $(CUDA),$(if $(driver),,OFF))
headers := build/ffi_headers
# The tests run in a process for each processor, eight at most; where there is a GPU, which they would share, in one.
processes = $(if $(driver),,-n $(shell n=$$(nproc); echo $$((n < 8 ? n : 8))))

.PHONY: build test test-all matrix fuzz accuracy compatibility demo bench emulate sanitize sanitize-gpu docs wheel \
  reproducible fmt lint clean
.DEFAULT_GOAL := build

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(python) -m pip install --quiet --upgrade pip
	$(python) -m pip install --progress-bar on --quiet '$(jax)' $$($(python) tools/requirements.py runtime build demo test lint)
	touch $@

# The FFI headers alone of the oldest supported jaxlib, beside whatever jaxlib the environment has.
$(headers)/ready: pyproject.toml | $(VENV)/ready
	$(python) -m pip install --quiet --no-deps --only-binary=:all: --python-version 3.12 --upgrade \
	  --target $(headers) "$$($(python) tools/requirements.py headers)"
	touch $@

# Incremental: ninja rebuilds what changed. What says for which Python, options and compilers the folder was made goes
# first; the objects of the handlers depend on no Python, and stay.
build: $(VENV)/ready $(headers)/ready
	@$(if $(CUDA)$(driver),:,echo 'No NVIDIA GPU here: the GPU half is left out. CUDA=ON builds it.')
	rm -f build/cmake/CMakeCache.txt build/cmake/.skbuild-info.json
	$(python) -m pip install --quiet --no-build-isolation --no-deps --editable . \
	  --config-settings=cmake.define.JAXOPS_FFI_INCLUDE_DIR=$(CURDIR)/$(headers)/jaxlib/include \
	  $(if $(gpu_half),--config-settings=cmake.define.JAXOPS_CUDA=$(gpu_half)) \
	  $(if $(CUDA_ARCHITECTURES),--config-settings='cmake.define.JAXOPS_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES)')

test: build
	$(python) -m pytest $(or $(ARGS),$(processes))

# With the slow tests.
test-all: build
	$(python) -m pytest -m '' $(or $(ARGS),$(processes))

# Every op under every transformation of JAX, on the devices here.
matrix: build
	$(python) tests/transformations.py $(ARGS)

# Random calls of every op against float64. make fuzz ARGS='softmax --cases 500 --seed 1'
fuzz: build
	$(python) tests/fuzz.py $(ARGS)

# The errors of every op on this device, into benchmarks/results/accuracy.csv and docs/accuracy.md.
accuracy: build
	$(python) tests/accuracy.py $(ARGS)

# The tests that depend on versions, for every Python here with every supported minor version of jax.
compatibility:
	$(PYTHON) tools/compatibility.py $(ARGS)

demo: build
	$(python) -m benchmarks.demo $(ARGS)

bench: build
	$(python) -m benchmarks $(OP) $(ARGS)

# The row kernels for CUDA on this machine's processor, each of their threads a fiber: their results, without a GPU. Needs
# the CUDA toolkit's headers.
emulate: build
	HEADERS=$(CURDIR)/$(headers)/jaxlib/include JOBS=2 tools/variant.sh $(python) emulate -DJAXOPS_EMULATE=ON -- \
	  tests/test_softmax.py tests/test_logits.py tests/test_norm.py tests/test_rows.py tests/test_contract.py \
	  tests/test_fuzz.py tests/test_frames.py \
	  -k 'not matmul and not cuda and not memory_of_some_rows and not depend_on_threads' $(ARGS)

# The CPU handlers compiled with sanitizers: on call frames of every row length and malformed ones; and through JAX, which
# knows nothing of ThreadSanitizer.
sanitize: build
	HEADERS=$(CURDIR)/$(headers)/jaxlib/include tools/sanitize.sh $(python) address,undefined -m '' \
	  tests/test_frames.py tests/test_softmax.py tests/test_logits.py tests/test_norm.py -k 'not cuda' $(ARGS)
	HEADERS=$(CURDIR)/$(headers)/jaxlib/include tools/sanitize.sh $(python) thread -m '' \
	  tests/test_frames.py -k 'not cuda' $(ARGS)

# The GPU handlers under compute-sanitizer. make sanitize-gpu ARGS='--only "memcheck matmul"'
sanitize-gpu: build
	$(python) tools/sanitize_gpu.py $(ARGS)

# The site, in build/site; its code is run by the tests.
docs: $(VENV)/ready
	$(python) -m pip install --quiet $$($(python) tools/requirements.py docs)
	$(python) -m mkdocs build

# Wheels and the source distribution, in dist. make wheel WHEEL_PYTHONS='python3.11 python3.12' builds both wheels: one
# for 3.11 and one for all later.
WHEEL_PYTHONS ?= $(PYTHON)
wheel:
	CUDA='$(CUDA)' CUDA_ARCHITECTURES='$(CUDA_ARCHITECTURES)' tools/wheel.sh $(WHEEL_PYTHONS)

# Whether two builds in different places give the same wheels, to the bit; CUDA=OFF for the CPU half alone.
reproducible:
	rm -rf build/reproducible
	for place in a b; do \
	  git clone --quiet . build/reproducible/$$place && $(MAKE) -C build/reproducible/$$place wheel || exit 1; \
	done
	cd build/reproducible && sha256sum */dist/* && for file in a/dist/*; do cmp $$file b/dist/$$(basename $$file) || exit 1; done

cxx_sources = $(shell find ffi tests -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')

fmt: $(VENV)/ready
	$(python) -m ruff check --fix .
	$(python) -m ruff format .
	$(VENV)/bin/clang-format -i $(cxx_sources)

lint: $(VENV)/ready
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(cxx_sources)
	$(python) tools/prose.py

clean:
	rm -rf build dist .venv
