# The first use of a target builds .venv; later uses find it there.
#
#   make demo     train LeNet on MNIST digits over shared memory, on as many ranks as there are cores,
#                 at most 4; or choose: make demo BACKEND=gloo DEMO_RANKS=4 (mpi, threads)
#   make demo-chainer   train LeNet in Chainer
#   make demo-jax       train LeNet in JAX, with optax, on 2 ranks
#   make demo-splits    train a U-Net; each of 2 ranks computes half of every picture's rows
#   make test     prove each fact once, in nine minutes on two cores; the tests of MPI use MPICH (in .mpi)
#   make test-all run all tests: every case of every test, whole programs, and Open MPI
#   make quick    run the tests that changes break first, in 90 seconds
#   make test-gpu run the tests that need a GPU, if there is one; installs nothing: see docs/gpu.md
#   make clients  test libraries that use torch.distributed over our process group (docs/clients.md)
#   make test-jax test JAX: unmodified programs, arrays, training; with two versions of JAX
#   make test-clusters  test the examples for submitit and Dask
#   make test-ray test the backend for Ray's actors, with a Ray of its own on this machine
#   make docs     build the documentation as a site, in site/; the tests build and check it, too
#   make check    run formatter, linter, type checker and tests
#   make pythons  test the package on Python 3.11 to 3.15, each in .pythons: see docs/install.md
#   make soak     random calls, aliases, kills and mutated messages, for hours: see docs/failures.md
#   make sanitize run the native core's ranks as threads, under the compiler's sanitizers
#   make freethreaded  build a Python without a GIL, with this package, in .freethreaded, and test it
#   make musl     build a Python for musl, with this package's wheel, in .musl, and test it
#   make aarch64  run the native core and the conformance kit for AArch64 under QEMU, for an hour or more
#   make parity   compare every transport and framework here with an oracle: parity.html
#   make bench    compare with three MPI libraries and Gloo (installs them into .mpi)
#   make bench-jax      compare sums in compiled JAX programs with those of XLA's Gloo
#   make release-check  build the files that a release uploads, in dist, and check them
#   make wheels   build wheels with the native core for each Python, in wheelhouse; needs Docker
#   make clean    remove everything that was built

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory --no-builtin-rules

# The first Python that is new enough and can make a virtual environment.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3.15 python3; do \
	if $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null; then echo $$p; break; fi; done)
# Pinned, because other versions install gigabytes for GPUs, which nothing here uses. For Python 3.15
# there are wheels from 2.15 on.
TORCH ?= torch==$(shell $(PYTHON) -c 'import sys; print("2.13.0" if sys.version_info < (3, 15) else "2.15.0")')

# The transport that carries the data in the demo, and the number of ranks. With more ranks than
# cores the demo would only show that ranks wait for a core. One rank alone would show nothing.
BACKEND ?= shm
DEMO_RANKS ?= $(shell n=$$(nproc); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))

BIN := .venv/bin
# Show errors only: pip and setuptools print long warnings about things that are as intended.
INSTALL := -m pip install --quiet --quiet --disable-pip-version-check
PIP := $(BIN)/python $(INSTALL)
# Runs a command that takes minutes and prints nothing, and prints every ten seconds that it runs.
define with_progress
$(1) & job=$$!; trap 'kill $$job 2>/dev/null || true' EXIT; SECONDS=0; \
while sleep 1; kill -0 $$job 2>/dev/null; do \
	if ((SECONDS % 10 == 0)); then echo "  still installing, $$SECONDS s"; fi; done; \
wait $$job
endef

.PHONY: demo demo-chainer demo-splits clients docs test test-all quick test-gpu check format lint types soak sanitize freethreaded parity bench bench-jax release-check wheels clean aarch64 musl pythons test-jax soak-jax test-clusters demo-jax test-ray
.DEFAULT_GOAL := demo

demo: .venv/.demo $(if $(filter mpi,$(BACKEND)),.mpi/mpich/.done)
	$(if $(filter mpi,$(BACKEND)),.mpi/mpich/bin,$(BIN))/python -m collective run -n $(DEMO_RANKS) \
	--backend $(BACKEND) examples/mnist_sgd.py

demo-chainer: .venv/.demo .venv/.chainer $(if $(filter mpi,$(BACKEND)),.mpi/mpich/.done)
	$(if $(filter mpi,$(BACKEND)),.mpi/mpich/bin,$(BIN))/python -m collective run -n $(DEMO_RANKS) \
	--backend $(BACKEND) examples/mnist_chainer.py

demo-jax: .jax/.done
	.jax/bin/python -m collective run -n 2 --backend shm examples/mnist_jax.py

demo-splits: .venv/.demo $(if $(filter mpi,$(BACKEND)),.mpi/mpich/.done)
	$(if $(filter mpi,$(BACKEND)),.mpi/mpich/bin,$(BIN))/python -m collective run -n 2 \
	--backend $(BACKEND) examples/segment.py

# Tests spend much of their time waiting: for a deadline, or for processes to start. So there are two
# more workers than there are cores. The tests of a file stay together, because they share ranks.
# Files start in the order of tests/support/selection.py, long ones first.
WORKERS ?= $(shell echo $$(($$(nproc) + 2)))
XDIST := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The tests start thousands of processes. Without bytecode files each of them would compile the
# modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
test: .venv/.abi .venv/.chainer .mpi/mpich/.done
	$(BIN)/python -m pytest $(XDIST) --once

test-all: .venv/.abi .venv/.chainer .mpi/mpich/.done .mpi/openmpi/.done
	$(BIN)/python -m pytest $(XDIST)

# The tests that changes break first, for the inner loop: tests/support/selection.py has the list.
quick: .venv/.dev .venv/.chainer
	$(BIN)/python -m pytest $(XDIST) --quick

# Needs no environment: the program makes one for each Python, in .pythons. Some Pythons:
# make pythons PYTHONS="3.14 3.15"
PYTHONS ?=
pythons:
	@"$(PYTHON)" tests/pythons/run.py $(PYTHONS)

# Use the Python environment of the machine with the GPU: .venv has no PyTorch for GPUs.
GPU_PYTHON ?= $(or $(VIRTUAL_ENV:%=%/bin/python),$(shell command -v python3 || echo python3))
RANKS ?= 2
test-gpu:
	@"$(GPU_PYTHON)" tests/gpu/run.py --ranks "$(RANKS)"

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open site/index.html. Its search needs a server: python3 -m http.server --directory site"

# The clients have an environment of their own, because they install some 60 packages.
CLIENTS_ENV = PATH="$(CURDIR)/.clients/bin:$$PATH" TORCH_EXTENSIONS_DIR="$(CURDIR)/.clients/extensions"
clients: .clients/.compiled
	$(CLIENTS_ENV) .clients/bin/python -m pytest tests/clients

# Random JAX programs, as many for each transport and number of ranks: 10,008 in all. Then the
# reduce-scatters of jax#40830, and starts. A short run is
# make soak-jax PROGRAMS=20 TURNS=30 STARTS=3.
PROGRAMS ?= 1112
TURNS ?= 1500
STARTS ?= 100
SEED ?= 1
soak-jax: .jax/.done
	for ranks in 2 3 4; do for transport in "shm 1" "gloo 1" "hierarchical 2"; do \
	set -- $$transport; \
	COLLECTIVE_INSECURE=1 COLLECTIVE_INTERFACE=lo .jax/bin/python -m collective run -n $$ranks --jax \
	--backend $$1 tests/jax/random_programs.py --seed $(SEED) --programs $(PROGRAMS) --hosts $$2 || exit 1; \
	done; done
	.jax/bin/python -m collective run -n 4 --jax tests/jax/reduce_scatters.py --turns $(TURNS)
	for start in $$(seq $(STARTS)); do .jax/bin/python -m collective run -n 2 --jax tests/jax/starts.py x || exit 1; done

# JAX has two environments: the oldest version that is supported, and the newest on a newer Python.
JAX ?= jax==0.10.2
JAX_PYTHON ?= $(PYTHON)
NEW_JAX ?= jax
# The first one that runs: pyenv has a file of the name for each Python that is not selected.
NEW_JAX_PYTHON ?= $(or $(shell for python in python3.13 python3.12; do \
	"$$python" -c 'import sys; print(sys.executable)' 2>/dev/null && break; done),$(PYTHON))
test-jax: .jax/.done .jax-new/.done
	.jax/bin/python -m pytest tests/jax
	.jax-new/bin/python -m pytest tests/jax

test-clusters: .clusters/.done
	.clusters/bin/python -m pytest tests/clusters

# Ray's processes are heavy, so the tests run one after the other. `make test-ray RAY_TESTS=DIR` also
# runs Ray's own tests, which are in python/ray/util/collective/tests of a checkout of Ray.
RAY ?= ray[train]==2.60.0
test-ray: .ray/.done
	.ray/bin/python -m pytest tests/ray

# The tests come last: the quick checks fail first, and the output ends with the tests' count.
check: format lint types test

format: .venv/.dev
	$(BIN)/ruff format --check .

lint: .venv/.dev
	$(BIN)/ruff check .

types: .venv/.dev .venv/.chainer
	MYPYPATH=benchmarks $(BIN)/mypy --strict -p collective \
	$(patsubst benchmarks/%.py,-m %,$(wildcard benchmarks/*.py))

# The last two programs may fail: torch_suite.py if a test fails over our backend only, and hosts.py
# without root.
bench: .venv/.bench .venv/.chainer $(patsubst %,.mpi/%/.done,mpich openmpi impi-rt)
	$(BIN)/python -m collective bench --op all_reduce,all_gather,send_recv --quick \
	--sizes 4,1K,16K,256K,4M,32M --vs mpi4py,torch --json bench.json --plot bench.png
	$(BIN)/python -m collective bench --train --quick --backend shm,gloo --vs torch,chainermn \
	--json train.json
	$(BIN)/python benchmarks/targets.py
	$(BIN)/python benchmarks/native.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/nccl.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/chainer_training.py
	$(BIN)/python benchmarks/elastic.py --backends shm,gloo,hierarchical
	$(BIN)/python benchmarks/shards.py --core on,off
	$(BIN)/python benchmarks/torch_suite.py
	$(BIN)/python benchmarks/hosts.py

bench-jax: .jax/.done
	.jax/bin/python benchmarks/jax_in_jit.py
	.jax/bin/python benchmarks/xla.py

# A short run: make soak CALLS=10000 KILLS=6 CASES=1000 MESSAGES=1000. All options:
# python -m tests.soak --help
CALLS ?= 1000000
KILLS ?= 200
CASES ?= 100000
MESSAGES ?= 100000
FLIPS ?= 10000
# Number of calls for each combination of two numbers of ranks and two lengths of areas.
THREADS ?= 2500000
soak: .venv/.dev .mpi/mpich/.done .mpi/openmpi/.done
	$(BIN)/python -m tests.soak calls --backend shm --size 2 --turns $(CALLS)
	$(BIN)/python -m tests.soak calls --backend shm --size 4 --turns $(CALLS)
	$(BIN)/python -m tests.soak aliasing --cases $(CASES)
	COLLECTIVE_NATIVE=off $(BIN)/python -m tests.soak aliasing --backend shm --cases $(CASES)
	$(BIN)/python -m tests.soak kills --runs $(KILLS)
	$(BIN)/python -m tests.soak messages --mutations $(MESSAGES)
	$(BIN)/python -m tests.soak flips --flips $(FLIPS)
	$(BIN)/python -m tests.soak elastic --kills $(KILLS)
	$(BIN)/python -m tests.soak elastic --kills $(KILLS) --spares 4
	$(BIN)/python -m tests.native.threads --sanitizers none --ranks 2 3 --areas 1024 4096 \
	--calls $(THREADS)

# Needs a compiler with its sanitizers, and NumPy.
sanitize: .venv/bin/python
	@$(PIP) numpy
	$(BIN)/python -m tests.native.threads --programs shared folds --calls 1000
	$(BIN)/python -m tests.native.threads --programs messages xla --calls 4000
	$(BIN)/python -m tests.native.unlocked_threads --calls 1000

# Needs a compiler, apt and Debian's packages that CPython's build needs, such as libssl-dev. The words
# in FREETHREADED go to CPython's configure.
FREETHREADED ?=
freethreaded: .venv/.dev
	tests/native/freethreaded.sh .freethreaded $(FREETHREADED)
	$(BIN)/python -m pytest tests/native/test_free_threads.py

# Needs gcc and apt. The kit runs outside of this folder, so that Python imports the installed wheel.
musl: .venv/bin/python
	tests/native/musl.sh .musl
	cd .musl && bin/python3 -m collective doctor
	cd .musl && for core in on off; do for transport in shm threads; do \
	COLLECTIVE_NATIVE=$$core bin/python3 -m collective.testing $$transport --sizes 2,3; done; done

# Needs Debian with qemu-user and a cross compiler, and a network at its first run. It says what is
# missing. The words in AARCH64 go to the program: make aarch64 AARCH64="--parts kit --core off". All
# options: python -m tests.native.aarch64 --help
AARCH64 ?=
aarch64: .venv/bin/python
	$(BIN)/python -m tests.native.aarch64 $(AARCH64)

parity: .venv/.dev .venv/.chainer .mpi/mpich/.done
	.mpi/mpich/bin/python -m collective parity --random 200 --seed 7 --train --splits \
	--json parity.json --html parity.html

SCHEMA = $(BIN)/check-jsonschema --builtin-schema vendor
# Build two wheels from the sdist's sources: one with the native core, and one without it, which is
# for every platform.
release-check: .venv/.release
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	COLLECTIVE_NATIVE=off $(BIN)/python -m build --no-isolation --wheel
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(SCHEMA).citation-file-format CITATION.cff
	$(SCHEMA).github-workflows .github/workflows/*.yml
	$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA).github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/towncrier build --draft --version next
	$(BIN)/cibuildwheel --platform linux --print-build-identifiers

# cibuildwheel has an environment of its own, because it needs none of our packages.
wheels: .wheels/.done
	rm -rf wheelhouse
	.wheels/bin/python -m cibuildwheel --platform linux --output-dir wheelhouse

.venv/.release: .venv/.dev
	@echo "Installing the group release"
	@$(PIP) --group release
	@touch $@

.wheels/.done: pyproject.toml
	@$(PYTHON) -m venv .wheels
	@.wheels/bin/python $(INSTALL) 'cibuildwheel>=3'
	@touch $@

# The pip that comes with many a Python is too old for the options --group and
# --build-constraint.
.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 or newer with the module venv;" \
	"install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Building .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@$(PIP) 'pip>=25.3'

# The installation also builds the native core, beside its sources, if there is a C compiler.
NATIVE := $(wildcard collective/native/*.[ch])
.venv/.demo: pyproject.toml setup.py $(NATIVE) | .venv/bin/python
	@echo "Installing $(TORCH): some 200 MB to download if pip has no copy, one to three minutes"
	@$(call with_progress,$(PIP) '$(TORCH)')
	@echo "Installing collective-comm[torch,examples]"
	@$(PIP) --editable '.[torch,examples]'
	@touch $@

.venv/.dev: .venv/.demo pyproject.toml
	@echo "Installing collective-comm[parity] and the group dev"
	@$(PIP) --editable '.[parity]' --group dev
	@touch $@

.venv/.abi: .venv/.dev
	@echo "Installing collective-comm[nccl,cupy] and the group abi"
	@$(PIP) --editable '.[nccl,cupy]' --group abi
	@touch $@

# Chainer's own setup needs pkg_resources, which setuptools had until 82.
.venv/.chainer: pyproject.toml | .venv/bin/python
	@echo "Installing collective-comm[chainer]"
	@echo 'setuptools<80' > .venv/build-constraint.txt
	@$(PIP) --build-constraint .venv/build-constraint.txt 'chainer==7.8.1'
	@$(PIP) --editable '.[chainer]'
	@touch $@

# An environment can have only one MPI library, and the tests use two, the benchmarks three. So each
# library has its own environment, which takes all other packages from .venv.
.mpi/%/.done: pyproject.toml | .venv/.dev
	@echo "Installing mpi4py and $* into .mpi/$*"
	@$(BIN)/python -m venv .mpi/$*
	@.mpi/$*/bin/python $(INSTALL) 'mpi4py>=4' $*
	@.mpi/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > .mpi/$*/.site
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % \
	sysconfig.get_path("purelib"))' > "$$(cat .mpi/$*/.site)/venv.pth"
	@touch $@

# The clients' requirements would install another torch, so constrain it. DeepSpeed's setup imports
# torch, so install torch first.
.clients/.done: pyproject.toml tests/clients/requirements.txt
	@echo "Building .clients with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .clients
	@echo '$(TORCH)' > .clients/constraints.txt
	@.clients/bin/python $(INSTALL) '$(TORCH)' 'setuptools>=77,<80' wheel
	@echo "Installing $$(tr '\n' ' ' < tests/clients/requirements.txt)"
	@DS_BUILD_OPS=0 .clients/bin/python $(INSTALL) --no-build-isolation \
	--constraint .clients/constraints.txt --requirement tests/clients/requirements.txt
	@.clients/bin/python $(INSTALL) --no-build-isolation --editable '.[torch]'
	@touch $@

.jax/.done: REQUIREMENTS = '$(JAX)'
.jax/.done: JAX_BASE = $(JAX_PYTHON)
.jax-new/.done: REQUIREMENTS = '$(NEW_JAX)'
.jax-new/.done: JAX_BASE = $(NEW_JAX_PYTHON)
# Gloo comes with PyTorch. The extras and optax are for the training tests and make demo-jax. The
# installation builds the native core, one file for all Pythons, and the libraries for XLA.
.jax/.done .jax-new/.done: pyproject.toml setup.py $(NATIVE) $(wildcard adapters/jax/*.c adapters/jax/xla/*.[ch])
	@echo "Building $(@D) with $$($(JAX_BASE) --version)"
	@$(JAX_BASE) -m venv $(@D)
	@echo "Installing $(REQUIREMENTS) and $(TORCH)"
	@$(@D)/bin/python $(INSTALL) $(REQUIREMENTS) '$(TORCH)' 'setuptools>=77' optax pytest pytest-timeout
	@$(@D)/bin/python $(INSTALL) --no-build-isolation --editable '.[jax,examples,parity]'
	@touch $@

.clusters/.done: pyproject.toml setup.py
	@echo "Building .clusters with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .clusters
	@.clusters/bin/python $(INSTALL) submitit distributed 'setuptools>=77' pytest pytest-timeout
	@.clusters/bin/python $(INSTALL) --no-build-isolation --editable .
	@touch $@

.ray/.done: pyproject.toml setup.py
	@echo "Building .ray with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .ray
	@echo "Installing $(RAY) and $(TORCH)"
	@.ray/bin/python $(INSTALL) '$(RAY)' '$(TORCH)' 'setuptools>=77' pytest pytest-timeout
	@.ray/bin/python $(INSTALL) --no-build-isolation --editable '.[ray]'
	@touch $@

# DeepSpeed compiles a part of itself at its first use. That takes minutes, too long for a test. An
# interrupted compilation leaves a lock for which the next one would wait, so remove the folder
# first.
.clients/.compiled: .clients/.done
	@echo "Compiling what DeepSpeed needs on a CPU"
	@rm -rf .clients/extensions
	@$(CLIENTS_ENV) .clients/bin/python -c 'from deepspeed.accelerator import get_accelerator; \
	get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)' > .clients/compiled.txt 2>&1 \
	|| { cat .clients/compiled.txt >&2; exit 1; }
	@touch $@

.venv/.bench: .venv/.demo
	@echo "Installing collective-comm[bench]"
	@$(PIP) --editable '.[bench]'
	@touch $@

clean:
	rm -rf .venv .mpi .clients .freethreaded .editable .wheels build dist wheelhouse site *.egg-info bench.json bench.png parity.html parity.json train.json .hypothesis .mypy_cache .pytest_cache .ruff_cache .aarch64 .musl .pythons .jax .jax-new .clusters .ray
	rm -f collective/native/*.so adapters/jax/*.so adapters/jax/xla/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
