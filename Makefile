# `make demo` and `make test` do all their set-up in .venv; the second time it takes a moment.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
NATIVE_SOURCES := $(shell find kernels_ascendc moe_triton/core/abi.py moe_triton/core/ascendc.py moe_triton/core/kernel.py moe_triton/core/records.py \
    moe_triton/core/region.py moe_triton/schemes/__init__.py $(wildcard moe_triton/schemes/*/ascendc.py) moe_triton/tools/codegen.py -type f -not -name '*.pyc')
# Not what others have written.
CPP_SOURCES := $(filter-out kernels_ascendc/hosts/libfabric/%,$(filter %.h %.cpp %.asc,$(NATIVE_SOURCES)))
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
PIP := $(INSTALL) --quiet
TORCH := torch==2.13.0
# Three workers for two cores: a quarter of the time tests wait, for processes to start or deadlines to pass. A file's
# tests by one worker, for they share groups of ranks; files in the order of tests/budgets.py. A worker that has died
# stays dead: xdist would give the test that killed it to the next one, and wait forever once all are.
SPREAD := --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: demo test test-quick test-long test-bare test-aarch64 test-hosts chaos-short chaos-long chaos-survivors lint gate gate-update docs bench clean

demo: $(VENV)/.installed
	$(BIN)/moe-triton demo

test: lint
	$(BIN)/python -m pytest -n 3 $(SPREAD) --durations=25
	$(MAKE) chaos-short

# At every save: tests/tiers.py says which.
test-quick: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 $(SPREAD) --timeout 60 $$($(BIN)/python -m tests.tiers)

# The site is built there too, and a wheel.
test-long: $(VENV)/.installed $(VENV)/.docs $(VENV)/.wheels
	$(BIN)/python -m pytest -n 3 $(SPREAD) --durations=25 -m long tests
	$(MAKE) chaos-long

# The first command on a plain machine: a clean clone, the public index alone, no kernel compiled yet. Once per release,
# and with another Python by PYTHON=...: it downloads gigabytes.
test-bare:
	@bare=$$(mktemp -d) && trap 'rm -rf "$$bare"' EXIT && git clone --quiet . "$$bare/moe_triton" && cd "$$bare/moe_triton" && \
	  env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null MOE_TRITON_CACHE="$$bare/cache" $(MAKE) demo PYTHON="$(PYTHON)" && \
	  $(BIN)/python -m pip check && $(BIN)/moe-triton doctor --fix; du -sh "$$bare/moe_triton/$(VENV)"

# On an emulated processor, in build/aarch64: what docs/aarch64.md lists. apt-get install qemu-user g++-aarch64-linux-gnu.
test-aarch64: $(VENV)/.installed $(VENV)/.wheels
	$(BIN)/python -m tests.aarch64

# Ranks on several hosts, which are namespaces of this machine: what `make test` and `make test-long` run of them.
test-hosts: $(VENV)/.installed
	$(BIN)/python -m pytest -m "long or not long" tests/hosts

# Ranks that are killed, stopped, late, interrupted or wrong, at random moments: whether the others go on.
chaos-short: $(VENV)/.installed
	$(BIN)/python -m tests.chaos --seconds 25

chaos-long: $(VENV)/.installed
	$(BIN)/python -m tests.chaos --seconds 60 --seed 1

# Every Triton kernel in every shape through the NPU's compiler, against the figures in tests/autotune/gate/golden.
gate: $(VENV)/.installed
	$(BIN)/moe-triton gate

# Keeps what the compiler does now, there and in docs/compiler-gate.md.
gate-update: $(VENV)/.installed
	$(BIN)/moe-triton gate --update

# Ranks that are lost while the others go on without them: every kind of trial six times. A quarter of an hour.
chaos-survivors: $(VENV)/.installed
	$(BIN)/python -m tests.chaos.survivors --trials 540

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)
	$(MAKE) $(VENV)/.tidy

# By way of build/, so that a failure leaves the page as it was. The variable silences a notice about mkdocs 2.
docs: $(VENV)/.installed $(VENV)/.docs docs/assets/mermaid.min.js
	@mkdir -p build
	$(BIN)/python -m moe_triton.tools.pages limits > build/limits.md
	mv build/limits.md docs/limits.md
	$(BIN)/python -m moe_triton.tools.pages arguments > build/arguments.md
	mv build/arguments.md docs/arguments.md
	$(BIN)/python -m autotune.cli.model.page > build/model-figures.md
	mv build/model-figures.md docs/model-figures.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What draws the pages' pictures. Without npm, browsers fetch it themselves, and show the pictures' text where they cannot.
MERMAID := mermaid-11.17.2
docs/assets/mermaid.min.js:
	@mkdir -p build
	if command -v npm >/dev/null; then npm pack --silent --pack-destination build $(subst -,@,$(MERMAID)) && \
	  tar -xzOf build/$(MERMAID).tgz package/dist/mermaid.min.js > $@.new && mv $@.new $@; fi

COMPILED = $(firstword $(wildcard build/*/compile_commands.json))
# Once for what it has found nothing in. Of all sources those that were compiled: without Python's headers, not all are.
$(VENV)/.tidy: $(VENV)/.installed kernels_ascendc/.clang-tidy
	$(BIN)/python -c 'import json; print(*{x["file"] for x in json.load(open("$(COMPILED)"))})' \
	  | xargs -n 1 -P 2 $(BIN)/clang-tidy --quiet -p $(COMPILED)
	@touch $@

# A package for this machine's Python and processor, in dist/.
.PHONY: wheel
wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

# Packages for both processors and for each Python whose headers Debian has, in dist/: docs/wheels.md.
.PHONY: wheels
wheels: $(VENV)/.installed $(VENV)/.wheels
	$(BIN)/python -m wheels

bench: $(VENV)/.installed $(VENV)/.bench
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.compare
	$(BIN)/python -m benchmarks.compare scaling
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.operators
	$(BIN)/python -m benchmarks.balance
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.moves
	$(BIN)/python -m benchmarks.lost_ranks
	$(BIN)/python -m benchmarks.hosts --hosts 2
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.python_time
	$(BIN)/python -m benchmarks.trace_overhead

$(VENV)/.packages: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "moe_triton needs Python 3.10 to 3.13, for Triton kernels 3.10 or 3.11: make PYTHON=/path/to/python3.11"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || \
	  { echo "moe_triton needs a C++17 compiler: apt-get install g++ (or set CXX)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) packaging
	@# Without its requirements: of these, upstream's triton is to stay away (moe_triton/core/triton_package.py).
	@echo "torch, some hundred MB; where pip finds no build for CPUs, gigabytes of CUDA libraries come with it:"
	$(PIP) --no-deps $(TORCH)+cpu 2>/dev/null || $(INSTALL) --no-deps $(TORCH)
	$(BIN)/python -I moe_triton/core/triton_package.py hold
	$(INSTALL) $(TORCH) scikit-build-core cmake ninja
	@echo "moe_triton, with its kernels, and the tools of development:"
	$(INSTALL) --no-build-isolation --editable '.[cpu,dev,tune]'
	$(BIN)/python -I moe_triton/core/triton_package.py mend
	@touch $@

# Only C++ changed: build it again, nothing to resolve. What the packages came with was built a moment ago.
$(VENV)/.installed: $(VENV)/.packages $(NATIVE_SOURCES)
	@if [ -n "$$(find $(NATIVE_SOURCES) -newer $(VENV)/.packages)" ]; then \
	  echo "building the kernels: half a minute"; $(PIP) --no-build-isolation --no-deps --editable . || exit 1; fi
	@touch $@

# After .installed only so that two pips never run at once.
$(VENV)/.docs: $(VENV)/.packages | $(VENV)/.installed
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

$(VENV)/.wheels: $(VENV)/.packages | $(VENV)/.installed
	$(PIP) --no-build-isolation --editable '.[wheels]'
	@touch $@

$(VENV)/.bench: $(VENV)/.packages | $(VENV)/.installed
	$(PIP) --no-build-isolation --editable '.[bench]'
	@touch $@

clean:
	rm -rf $(VENV) build
