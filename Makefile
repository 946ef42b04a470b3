# `make demo` and `make test` need Python 3.11 or newer and nothing else; everything is installed into .venv.
# Settings: PYTHON=/path/to/python3.12  RUN_DIR=runs/other  PYTEST_ARGS="-k router"  PYTEST_WORKERS=4

RUN_DIR ?= runs/demo
PYTEST_ARGS ?=
PYTEST_WORKERS ?= auto
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-machines kernels-all gpu check format bench bench-distributed clean

help:
	@echo "make demo    train a mixture-of-experts language model on real text, evaluate it, sample from it"
	@echo "make test    run every test"
	@echo "make test-machines  run every test as on processors with fewer instructions, and with more threads (hours)"
	@echo "make kernels-all  run every test of the Triton kernels: interpreter, builds for every GPU target (no GPU needed)"
	@echo "make gpu     on a machine with a GPU: the kernels' GPU tests, then the first table of the race against the peers"
	@echo "make check   run the linters, the type checker and the design rules"
	@echo "make bench   run the benchmarks"
	@echo "make bench-distributed  the layer on 1, 2 and 4 ranks of this machine, beside DeepSpeed's where it is installed"
	@echo "make format  format the code"
	@echo "make clean   remove .venv and caches; runs/ stays"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tools/setup.sh
	@sh tools/setup.sh

demo: $(STAMP)
	@$(BIN)/expertmesh train gpt-moe-demo --train.run-dir $(RUN_DIR) --train.resume auto
	@$(BIN)/expertmesh report --run $(RUN_DIR)

# One thread per worker: small tensors gain nothing from more, and workers would fight for the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --maxprocesses 8

test: $(STAMP)
	@$(PYTEST) -m "not exhaustive" $(PYTEST_ARGS)

test-fast: $(STAMP)
	@$(PYTEST) -m "not slow and not exhaustive" $(PYTEST_ARGS)

# AVX2, AVX-512 without BF16, all instructions; one, two and four threads: one after the other, a table at the end.
test-machines: $(STAMP)
	@$(BIN)/python tools/test_machines.py --workers $(PYTEST_WORKERS) -- $(PYTEST_ARGS)

# Everything under tests/kernels, the slow part too: sweeps in the interpreter, builds for sm_80, sm_90, sm_100, gfx942.
# TRITON=3.6.0: the same with this Triton beside the pinned one, from PyPI in a folder of its own.
TRITON ?=
TRITON_SITE := .triton-$(TRITON)
kernels-all: $(STAMP) $(if $(TRITON),$(TRITON_SITE))
	@$(if $(TRITON),PYTHONPATH=$(TRITON_SITE):src:.) $(PYTEST) tests/kernels $(PYTEST_ARGS)

.triton-%: $(STAMP)
	@$(BIN)/python -m pip install -q --no-deps --target $@ triton==$*

# GPU_PYTHON=python3: an interpreter that has torch for this GPU, pytest, pydantic and tyro; none: installs into .venv.
# GPU_WHEELS=folder: packages that it lacks, as `make gpu-wheels` collects them, for a machine without a network.
GPU_WHEELS ?=
GPU_SITE := .gpu-site
GPU_ENV = PYTHONPATH=src:.$(if $(GPU_WHEELS),:$(GPU_SITE)) PYTHONUNBUFFERED=1
GPU_RUN = $(GPU_ENV) $(or $(GPU_PYTHON),$(BIN)/python) -m
GPU_WORKERS ?= 8
GPU_RACE_ARGS ?= --quick
# Tests of kernels and operators that take a GPU where there is one, and the interpreter elsewhere.
ON_ANY_DEVICE := tests/kernels/test_row_kernels.py tests/kernels/test_topk_kernel.py tests/kernels/test_ops_triton.py \
  tests/kernels/test_batch_invariant_kernels.py tests/ops/test_topk.py tests/ops/test_capacity.py

# The race is run whatever the tests say: it checks its results itself. -W default: PyTorch's CUDA part warns of its own
# accord (of TF32, of the synchronisation debug mode), which elsewhere would fail a test.
GPU_TEST = $(GPU_RUN) pytest -n $(GPU_WORKERS) -W default
gpu: $(if $(GPU_PYTHON),,$(STAMP)) $(if $(GPU_WHEELS),gpu-site)
	@failed=0; \
	$(GPU_TEST) -m gpu tests/kernels tests/benchmarks || failed=1; \
	$(GPU_TEST) -m "not gpu and not exhaustive" $(ON_ANY_DEVICE) || failed=1; \
	PYTORCH_ALLOC_CONF=expandable_segments:True $(GPU_RUN) benchmarks.race $(GPU_RACE_ARGS) || failed=1; \
	exit $$failed

gpu-site:
	@$(or $(GPU_PYTHON),$(BIN)/python) -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
	  --target $(GPU_SITE) $(GPU_WHEELS)/*.whl

# What the tests and the race need beside torch, triton and transformers, for Linux on x86-64 and Python 3.12.
GPU_PYTHON_VERSION ?= 3.12
gpu-wheels: $(STAMP)
	$(BIN)/python -m pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
	  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	  --platform manylinux2014_x86_64 -c constraints.txt -d $(or $(GPU_WHEELS),.whl) \
	  pydantic pydantic_core annotated-types typing-inspection typing_extensions tyro docstring_parser typeguard \
	  liger-kernel

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/repo

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.routing_scaling
	$(BIN)/python -m benchmarks.layer
	$(BIN)/python -m benchmarks.trainer

bench-distributed: $(STAMP)
	$(BIN)/python -m benchmarks.distributed_layer

clean:
	rm -rf .venv .gpu-site .whl build dist src/*.egg-info .ruff_cache .mypy_cache .pytest_cache .import_linter_cache .hypothesis
