# `make train` is the main job, `make test` is what CI runs. Both make the virtual environment first.
PYTHON ?= python3
# TORCH=2.14.1 uses another torch than the pinned one, in an environment of its own. Each torch has its own bounds on
# setuptools, whose pin gives way too; pip resolves the rest as pinned.
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
PINS = $(if $(TORCH),$$(grep == requirements.txt | grep -vE "^(torch|setuptools)==") torch==$(TORCH) "setuptools>=77",-r requirements.txt)
export OMP_NUM_THREADS ?= 1
# A process that a signal ends writes where it was.
export PYTHONFAULTHANDLER ?= 1
# So many processes run tests, in the order of tests/support/run_order.py; ranks come on top.
JOBS ?= 2

.PHONY: help train inspect examples test test-all lint types gpu-check trainers bench clean

help:
	@echo "make train      train a small GPT on two processes (or one per GPU)"
	@echo "make inspect    predict a step of Llama 3 8B on 64 H100, without a GPU"
	@echo "make examples   the shorter examples"
	@echo "make test       lint, type check and the tests that CI runs"
	@echo "make test TORCH=2.14.1   these on another torch, in .venv-2.14.1 (docs/reference/versions.md); ARGS=... goes to pytest"
	@echo "make test-all   the slow tests too"
	@echo "make gpu-check  the tests that need GPUs, with PYTHON (skipped where there are none)"
	@echo "make trainers   the tests with Lightning, accelerate, transformers and torchtitan, which it installs in .venv-trainers"
	@echo "make bench      step time against FSDP2, DDP and the unsharded model"
	@echo "make clean      remove the virtual environments and everything built"

$(VENV)/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(PINS)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

train: $(VENV)/.installed
	$(BIN)/torchrun --standalone --nproc-per-node "$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)')" \
		examples/train_gpt.py $(ARGS)

# MODEL, and further options in ARGS: make inspect MODEL=llama_3_405b ARGS="--plan auto"
MODEL ?= llama_3_8b
inspect: $(VENV)/.installed
	@mkdir -p out
	$(BIN)/graphshard inspect examples.llama_model:$(MODEL) --mesh shard=64 --hardware h100-sxm --unit "layers.*" \
		--param-dtype bfloat16 --reduce-dtype float32 \
		--html out/$(MODEL).html --text out/$(MODEL).txt --trace out/$(MODEL).trace.json --json out/$(MODEL).json $(ARGS)

examples: $(VENV)/.installed
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/finetune_llama.py
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_vit.py
	$(BIN)/torchrun --standalone --nproc-per-node 4 examples/train_tp.py
	$(BIN)/torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check graphshard passes

# The two source folders form one package only once installed; here they are joined without that, the backend's entry point too.
.PHONY: joined
joined:
	rm -rf build/joined && mkdir -p build/joined/graphshard-0.dist-info
	cp -rs "$(CURDIR)/graphshard" build/joined/
	ln -s "$(CURDIR)/passes" build/joined/graphshard/passes
	printf '[torch_dynamo_backends]\ngraphshard = graphshard.backend:graphshard\n' > build/joined/graphshard-0.dist-info/entry_points.txt

types: $(VENV)/.installed joined
	$(BIN)/mypy -p graphshard

test: lint types
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile $(ARGS)

test-all: lint types
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "" $(ARGS)

# With packages that other tests do not need, in an environment of its own: .venv stays as it is.
trainers:
	$(PYTHON) -m venv .venv-trainers
	.venv-trainers/bin/pip install --quiet -r requirements.txt
	.venv-trainers/bin/pip install --quiet -r requirements.txt --no-build-isolation -e ".[trainers]"
	.venv-trainers/bin/python -m pytest -q -m "" tests/ranks/test_trainer_*.py tests/ranks/test_torchao.py $(ARGS)

# With the Python whose torch sees the GPUs, whatever its version, and nothing installed: what that version warns of is no failure.
gpu-check: joined
	GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo PYTHONPATH="$(CURDIR)/build/joined" $(PYTHON) -P -m pytest -q -rP -W default -m gpu $$(grep -rl --include "*.py" "mark.gpu" tests)

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/step_time.py $(ARGS)

clean:
	rm -rf .venv .venv-* build dist *.egg-info out tests/artefacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
