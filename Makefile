# make setup | lint | test | test-all | test-gpu | demo | docs | clean
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := torch==2.13.0

# Bytecode is kept: tests start a few hundred processes, and each would compile the sources anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup lint test test-all test-gpu demo docs clean

setup: $(STAMP)

# torch goes first and alone, so that a torch that is already usable here (any of the supported versions) is kept.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); raise SystemExit(not (2, 11) <= v < (2, 14))' 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e '.[test,lint]'
	touch $@

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Every sweep and fuzzer in full, and the trainers of others: 65 to 75 minutes on two cores.
test-all: setup
	$(BIN)/python -m pip install --quiet -e '.[integrations]'
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "" --durations=40

# On a machine with a GPU: what needs one, and ranks over NCCL that share it, beside DDP and FSDP2.
test-gpu: setup
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/nccl.py --quick

demo: setup
	$(BIN)/python examples/demo.py

docs: setup
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
