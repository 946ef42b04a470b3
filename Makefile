# `make demo` and `make test` need Python 3.11 or newer and nothing else; everything is installed into .venv.
# Settings: PYTHON=/path/to/python3.12  RUN_DIR=runs/other  PYTEST_ARGS="-k router"  PYTEST_WORKERS=4

RUN_DIR ?= runs/demo
PYTEST_ARGS ?=
PYTEST_WORKERS ?= auto
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo chat chat-serve serve soak soak-hostile test-clients translate classify test test-fast test-all test-machines test-as-gpu test-versions test-parents test-trl finetune-peers kernels-all kernels-sanitized release gpu gpu-kernels gpu-engine gpu-sweep gpu-peers gpu-workloads gpu-report gpu-site gpu-wheels check docs format bench bench-distributed clean

help:
	@echo "make install install into .venv, as everything below does first"
	@echo "make demo    train a mixture-of-experts language model on real text, evaluate it, sample from it"
	@echo "make chat    the whole way once: text, conversations, preferences, a reward, 8 bits; then make chat-serve"
	@echo "make translate  train a small encoder-decoder on parallel text, then translate and score (DATA=folder, FROM=en, TO=de)"
	@echo "make classify  train a small vision transformer with experts on digits, then classify (IMAGES=folder, CLASSIFY_ARGS=...)"
	@echo "make serve   OpenAI's interface over the model of \`make demo\`, and a page that shows its experts"
	@echo "make soak    200 streaming clients on a server, for minutes"
	@echo "make soak-hostile  one client of the server does harm, and 50 others must lose nothing"
	@echo "make test-clients  libraries of OpenAI's interface against the server: openai, LangGraph, LiteLLM, pydantic-ai, AI SDK (npm)"
	@echo "make test    run the tests"
	@echo "make test-all  run the exhaustive ones too: full sweeps of parameters, layouts and kernels (hours)"
	@echo "make test-machines  run every test as on processors with fewer instructions, and with more threads (hours)"
	@echo "make test-as-gpu  run tests of rollouts, training and adapters by the GPU's kernels, in Triton's interpreter (half an hour)"
	@echo "make test-versions  run the tests that concern them beside the oldest and the newest of what the package needs"
	@echo "make test-parents  run Tutel's and DeepSpeed's own examples, and DeepSpeed's tests, through our doors (PARENTS=folder with their checkouts)"
	@echo "make test-trl  run the tests of fine-tuning beside TRL and peft, installed into .venv-trl"
	@echo "make finetune-peers  time and memory of fine-tuning beside TRL and peft (FOLDER=runs/finetune-peers)"
	@echo "make kernels-all  run every test of the Triton kernels: interpreter, builds for every GPU target (no GPU needed)"
	@echo "make kernels-sanitized  run the tests of the kernels in C with the compiler's checks of memory and of undefined behaviour"
	@echo "make release build the sdist and the wheels into dist/ (any platform; Linux on x86-64 with the kernels in C), and try each in an empty environment"
	@echo "make gpu     on a machine with a GPU: ceilings, the GPU tests, the time of every kernel, engine steps beside vLLM's; gpu-sweep, gpu-peers, gpu-workloads: the rest"
	@echo "make check   run the linters, the type checker and the design rules"
	@echo "make docs    build the site of docs/ into site/, with the reference of the Python API and of the command line"
	@echo "make bench   run the benchmarks"
	@echo "make bench-distributed  the layer on 1, 2 and 4 ranks of this machine, beside DeepSpeed's where it is installed"
	@echo "make format  format the code"
	@echo "make clean   remove .venv and caches; runs/ stays"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tools/setup.sh
	@sh tools/setup.sh

demo: $(STAMP)
	@$(BIN)/expertmesh train gpt-moe-demo --train.run-dir $(RUN_DIR) --train.resume auto
	@$(BIN)/expertmesh report $(RUN_DIR) --check

# The whole way once, from the demo's model (RUN_DIR) to one that answers; CHAT_DIR=folder, CHAT_ARGS="--seed 1", "--tiny".
# Fetches the extra `chat` the first time; then it needs no network.
CHAT_DIR ?= runs/chat
CHAT_ARGS ?=
chat: $(STAMP)
	@$(BIN)/python -c "import chatterbot_corpus, reasoning_gym" 2>/dev/null || \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[chat]'
	@$(BIN)/python examples/chat/way.py $(CHAT_DIR) --base $(RUN_DIR) $(CHAT_ARGS)

chat-serve: $(STAMP)
	@test -f $(CHAT_DIR)/int8/config.json || $(MAKE) --no-print-directory chat
	@$(BIN)/expertmesh serve $(CHAT_DIR)/int8 $(SERVE_ARGS)

# DATA: a folder with train.LANG, val.LANG, ...; Multi30k where it is beside the project, else what benchmarks/claims/lohelp.py makes of
# LibreOffice's help, where Debian's packages of it are installed.
DATA ?= $(firstword $(wildcard data/multi30k ../shared/data/multi30k) lohelp)
FROM ?= en
TO ?= de
TRANSLATE_DIR ?= runs/translate
TRANSLATE_ARGS ?=
translate: $(STAMP)
	@$(if $(filter lohelp,$(DATA)),$(BIN)/python -m benchmarks.claims.lohelp --if-missing)
	@$(BIN)/expertmesh train translate-multi30k --data.path $(DATA) --data.languages $(FROM),$(TO) --data.pairs $(FROM)-$(TO) \
	  --train.run-dir $(TRANSLATE_DIR) --train.resume auto $(TRANSLATE_ARGS)
	@$(BIN)/expertmesh translate $(TRANSLATE_DIR) --to $(TO) "Two dogs play in the snow." "A man rides a bicycle."

# IMAGES: a folder with a folder of images per class, or with IDX files; MNIST's ten thousand where they are beside the project.
IMAGES ?= $(firstword $(wildcard data/mnist10k ../shared/data/mnist10k))
CLASSIFY_DIR ?= runs/classify
CLASSIFY_ARGS ?=
classify: $(STAMP)
	@test -n "$(IMAGES)" || { echo "error: no images; make classify IMAGES=folder, with a folder of images per class, or with MNIST's" \
	  "IDX files (images-idx3-ubyte.gz, labels-idx1-ubyte.gz)" >&2; exit 2; }
	@$(BIN)/expertmesh train swin-mnist --data.path $(IMAGES) --train.run-dir $(CLASSIFY_DIR) --train.resume auto $(CLASSIFY_ARGS)
	@$(BIN)/expertmesh classify $(CLASSIFY_DIR) --score
	@for images in $(wildcard $(IMAGES)/images-idx3-ubyte*); do $(BIN)/expertmesh classify $(CLASSIFY_DIR) \
	  $$images@8001 $$images@8002 $$images@8003 --picture $(CLASSIFY_DIR)/experts.png; done

# Serves the model of RUN_DIR, which is trained first where there is none: SERVE_ARGS="--port 8001".
SERVE_ARGS ?=
serve: $(STAMP)
	@test -d $(RUN_DIR)/checkpoints || $(MAKE) --no-print-directory demo
	@$(BIN)/expertmesh serve $(RUN_DIR) $(SERVE_ARGS)

# Load on a server for minutes: SOAK_ARGS="--clients 50 --seconds 10".
SOAK_ARGS ?=
soak: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.soak $(SOAK_ARGS)

soak-hostile: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.hostile_soak $(SOAK_ARGS)

# Needs a network the first time; CLIENTS_ARGS="--only langgraph".
CLIENTS_ARGS ?=
test-clients: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients $(CLIENTS_ARGS)

# One thread per worker: small tensors gain nothing from more, and workers would fight for the cores.
# Bytecode is kept, whatever the environment says: many tests start a process that imports everything.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --maxprocesses 8

test: $(STAMP)
	@$(PYTEST) -m "not exhaustive" $(PYTEST_ARGS)

test-fast: $(STAMP)
	@$(PYTEST) -m "not slow and not exhaustive" $(PYTEST_ARGS)

test-all: $(STAMP)
	@$(PYTEST) $(PYTEST_ARGS)

# AVX2, AVX-512 without BF16, all instructions; one, two and four threads: one after the other, a table at the end.
test-machines: $(STAMP)
	@$(BIN)/python tools/test_machines.py --workers $(PYTEST_WORKERS) -- $(PYTEST_ARGS)

# What a GPU would compute, in Triton's interpreter: slow; tests of rollouts against training, and of adapters, by default.
# Runs that are killed are left out: they are processes of their own, by the kernels in C.
AS_GPU := tests/engine/test_on_policy.py tests/engine/test_request_adapters.py tests/rl tests/moe/test_lora.py -k "not killed"
test-as-gpu: $(STAMP)
	@$(PYTEST) -p tests.support.as_gpu -m "not exhaustive" $(or $(PYTEST_ARGS),$(AS_GPU))

# VERSIONS="transformers==5.0.0": that row alone; needs the network of PyPI.
VERSIONS ?=
test-versions: $(STAMP)
	@$(BIN)/python tools/test_versions.py $(VERSIONS)

# PARENTS: a folder with checkouts `tutel` and `DeepSpeedExamples`; tests/integrations/test_parents.py has their commits.
PARENTS ?=
test-parents: $(STAMP)
	@test -d "$(PARENTS)" || { echo "error: no parents; make test-parents PARENTS=folder, with a checkout of tutel" \
	  "in it" >&2; exit 2; }
	@EXPERTMESH_PARENTS=$(abspath $(PARENTS)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations/test_parents.py $(PYTEST_ARGS)

# TRL beside what .venv has, in an environment of its own: its packages are for these two targets alone.
TRL := .venv-trl
FOLDER ?= runs/finetune-peers
test-trl: $(TRL)/.installed
	@PYTHONPATH=src:. OMP_NUM_THREADS=1 $(TRL)/bin/python -m pytest tests/peers tests/objectives \
	  tests/integrations/test_migrate_finetuning.py $(PYTEST_ARGS)

finetune-peers: $(TRL)/.installed
	@PYTHONPATH=src:. $(TRL)/bin/python -m benchmarks.finetune_peers $(FOLDER)

$(TRL)/.installed: $(STAMP)
	@$(BIN)/python -m venv $(TRL)
	@$(TRL)/bin/python -c "import sys, sysconfig; open(sysconfig.get_path('purelib') + '/project.pth', 'w').write(sys.argv[1])" \
	  "$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")"
	@$(TRL)/bin/python -m pip install -q -c constraints.txt trl==1.16.0 peft accelerate datasets
	@touch $@

# Everything under tests/kernels, the slow part too: sweeps in the interpreter, builds for sm_80, sm_90, sm_100, gfx942.
# TRITON=3.6.0: the same with this Triton beside the pinned one, from PyPI in a folder of its own.
TRITON ?=
TRITON_SITE := .triton-$(TRITON)
kernels-all: $(STAMP) $(if $(TRITON),$(TRITON_SITE))
	@$(if $(TRITON),PYTHONPATH=$(TRITON_SITE):src:.) $(PYTEST) tests/kernels $(PYTEST_ARGS)

# The kernels in C, compiled with checks, also with drawn sizes: another compiler command is another object of the cache.
SANITIZED := -g -fsanitize=address,undefined -fno-sanitize-recover=undefined
kernels-sanitized: $(STAMP)
	@CC="gcc $(SANITIZED)" LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ops/experts/test_native*.py $(PYTEST_ARGS)

release: $(STAMP)
	@$(BIN)/python tools/release.py dist

.triton-%: $(STAMP)
	@$(BIN)/python -m pip install -q --no-deps --target $@ triton==$*

# GPU_PYTHON=python3: an interpreter that has torch for this GPU, triton and transformers; none: installs into .venv.
# GPU_WHEELS=folder: what else is needed, as `make gpu-wheels` collects it, for a machine without a network.
GPU_WHEELS ?=
GPU_SITE := .gpu-site
GPU_ENV = PYTHONPATH=src:.$(if $(GPU_WHEELS),:$(GPU_SITE)) PYTHONUNBUFFERED=1
GPU_RUN = $(GPU_ENV) $(or $(GPU_PYTHON),$(BIN)/python) -m
GPU_OUT ?= runs/race
# More of a call: GPU_RACE_ARGS="--sanitize", "--shapes qwen3-8k", "--dry-run" (which needs no GPU).
GPU_RACE_ARGS ?=

# Call (a) of five: ceilings, the tests that matter, the time of every kernel at four shapes; eight minutes at most.
# The others: make gpu-sweep (tiles), gpu-peers (the race), gpu-workloads (what users run), then make gpu-report.
gpu: gpu-kernels gpu-engine
gpu-kernels gpu-sweep gpu-peers gpu-engine gpu-workloads: gpu-%: $(if $(GPU_PYTHON),,$(STAMP)) $(if $(GPU_WHEELS),gpu-site)
	@$(GPU_RUN) benchmarks.race $* $(GPU_OUT) $(GPU_RACE_ARGS)

gpu-report: $(if $(GPU_PYTHON),,$(STAMP))
	@$(GPU_RUN) benchmarks.race report $(GPU_OUT)

gpu-site:
	@$(or $(GPU_PYTHON),$(BIN)/python) -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
	  --target $(GPU_SITE) $(GPU_WHEELS)/*.whl

# What the tests and the race need beside torch, triton and transformers, for Linux on x86-64 and Python 3.12; the peers' wheels
# with their versions are in benchmarks/race/peers.toml. Where they are too many to carry at once: pieces of 60 MB in .whl-pieces, which
# `python3 tools/wheels.py join .whl-pieces .whl` joins on the other side.
GPU_PYTHON_VERSION ?= 3.12
gpu-wheels: $(STAMP)
	$(BIN)/python -m pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
	  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	  --platform manylinux2014_x86_64 -c constraints.txt -d $(or $(GPU_WHEELS),.whl) \
	  pydantic pydantic_core annotated-types typing-inspection typing_extensions tyro docstring_parser typeguard \
	  pytest pytest-xdist hypothesis execnet iniconfig pluggy pygments sortedcontainers rich markdown-it-py mdurl \
	  $$($(BIN)/python -m benchmarks.race.peers)
	python3 tools/wheels.py split $(or $(GPU_WHEELS),.whl) .whl-pieces

# The design rules are tests, too: not here where `make check test` runs them beside the others.
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(if $(filter test test-fast test-all,$(MAKECMDGOALS)),,$(BIN)/python -m pytest tests/repo)

# Fetches the extra `docs` the first time; then it needs no network. Any warning, a link that leads nowhere for instance, is an error.
SITE ?= site
docs: $(STAMP)
	@$(BIN)/python -c "import material, mkdocs, mkdocstrings" 2>/dev/null || $(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir $(abspath $(SITE))
	@echo "Open $(SITE)/index.html"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tools/wrap_docs.py
	$(BIN)/python tools/rooms.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks.routing_scaling
	$(BIN)/python -m benchmarks.layer
	$(BIN)/python -m benchmarks.trainer

bench-distributed: $(STAMP)
	$(BIN)/python -m benchmarks.distributed_layer

clean:
	rm -rf .venv .venv-trl site .gpu-site .whl .whl-pieces .triton-* build dist src/*.egg-info .ruff_cache .mypy_cache .pytest_cache .import_linter_cache .hypothesis
