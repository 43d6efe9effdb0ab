# Every result and every check, one command each. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
TORCH ?= cpu
SCALE ?= mini
LAUNCHER ?= joblib
JOBS ?= 2
REUSE ?= none
SEEDS ?=
OVERRIDES ?=
PY := $(VENV)/bin/python
READY := $(VENV)/.ready-$(TORCH)

# One thread a process: two torch threads on a busy two-core machine are many times slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup data reproduce-table1 table1 reproduce-table2 reproduce-table5 reproduce-table6 reproduce-table7 reproduce-table8 tune-table2 table2 table5 table6 table7 table8 tables figures bench test test-slow lint clean

help: ## this list
	@grep -hE '^[a-z][a-zA-Z0-9-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  \033[1m%-18s\033[0m %s\n", $$1, $$2}'
	@echo "  settings: SCALE=debug|mini|paper SEEDS=0,1 LAUNCHER=joblib|basic JOBS=2 REUSE=committed TORCH=cpu|cuda OVERRIDES='key=value …'"

setup: $(READY) ## the environment, in .venv, from requirements.lock (TORCH=cpu|cuda)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info[:2] == (3, 11) else "Python 3.11 is needed, this is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.11")'
	@test "$(TORCH)" = cpu -o "$(TORCH)" = cuda || { echo "TORCH=$(TORCH): choose cpu or cuda"; exit 2; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing the environment into $(VENV): about a minute"
	@$(PY) -m pip install -qq --disable-pip-version-check -r requirements.lock
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps --editable .
	@$(PY) -c 'import torch, sys; want = "$(TORCH)" == "cuda"; have = torch.version.cuda is not None; print("torch", torch.__version__, "(CUDA build)" if have else "(CPU build)"); sys.exit("TORCH=cuda: pip served a CPU build; point pip at an index with CUDA builds (PIP_INDEX_URL) and run make setup again" if want and not have else 0)'
	@rm -f $(VENV)/.ready-*; touch $@

data: setup ## fetch or build, tokenise and verify the data of SCALE
	@$(PY) scripts/data.py --scale $(SCALE) $(OVERRIDES)

reproduce-table1: setup ## table 1 from nothing: every optimizer of two libraries probed, about a minute
	@$(PY) scripts/reproduce.py table1 --scale $(SCALE) --launcher basic --reuse $(REUSE) $(if $(SEEDS),--seeds $(SEEDS)) $(OVERRIDES)

reproduce-table2: setup ## table 2 from nothing: data, sweep, table, figure, verdict
	@$(PY) scripts/reproduce.py table2 --scale $(SCALE) --launcher $(LAUNCHER) --jobs $(JOBS) --reuse $(REUSE) $(if $(SEEDS),--seeds $(SEEDS)) $(OVERRIDES)

tune-table2: setup ## the learning-rate sweep behind table 2
	@$(PY) scripts/reproduce.py tune_table2 --scale $(SCALE) --launcher $(LAUNCHER) --jobs $(JOBS) --reuse $(REUSE) $(if $(SEEDS),--seeds $(SEEDS)) $(OVERRIDES)

reproduce-table5: setup ## table 5 from nothing: one training state, rescaled in mid-run and continued in ten ways
	@$(PY) scripts/reproduce.py table5 --scale $(SCALE) --launcher $(LAUNCHER) --jobs $(JOBS) --reuse $(REUSE) $(if $(SEEDS),--seeds $(SEEDS)) $(OVERRIDES)

reproduce-table6: setup ## table 6 from nothing: matrix sensing by nine update rules, the dial, FlowAdam, and their controls
	@$(PY) scripts/reproduce.py table6 --scale $(SCALE) --launcher $(LAUNCHER) --jobs $(JOBS) --reuse $(REUSE) $(if $(SEEDS),--seeds $(SEEDS)) $(OVERRIDES)

reproduce-table7: setup ## table 7 from nothing: a hyperspectral scene completed, rates as published and as validation chooses
	@$(PY) scripts/reproduce.py table7 --scale $(SCALE) --launcher $(LAUNCHER) --jobs $(JOBS) --reuse $(REUSE) $(if $(SEEDS),--seeds $(SEEDS)) $(OVERRIDES)

reproduce-table8: setup ## table 8 from nothing: attention rotated: which rules see the basis
	@$(PY) scripts/reproduce.py table8 --scale $(SCALE) --launcher $(LAUNCHER) --jobs $(JOBS) --reuse $(REUSE) $(if $(SEEDS),--seeds $(SEEDS)) $(OVERRIDES)

table1: setup ## results/tables/table1.* and its figure from the committed summary, no measurement
	@$(PY) scripts/aggregate.py table1 --scale $(SCALE) --strict
	@$(PY) scripts/plot.py table1 --scale $(SCALE)

table2: setup ## results/tables/table2.* and its figures from committed summaries, no training
	@$(PY) scripts/aggregate.py table2 --scale $(SCALE) --strict
	@$(PY) scripts/plot.py table2 --scale $(SCALE)

table5: setup ## results/tables/table5.* and its figure from committed summaries, no training
	@$(PY) scripts/aggregate.py table5 --scale $(SCALE) --strict
	@$(PY) scripts/plot.py table5 --scale $(SCALE)

table6: setup ## results/tables/table6.* and its figures from committed summaries, no training
	@$(PY) scripts/aggregate.py table6 --scale $(SCALE) --strict
	@$(PY) scripts/plot.py table6 --scale $(SCALE)

table7: setup ## results/tables/table7.* and its figures from committed summaries, no training
	@$(PY) scripts/aggregate.py table7 --scale $(SCALE) --strict
	@$(PY) scripts/plot.py table7 --scale $(SCALE)

table8: setup ## results/tables/table8.* and its figures from committed summaries, no training
	@$(PY) scripts/aggregate.py table8 --scale $(SCALE) --strict
	@$(PY) scripts/plot.py table8 --scale $(SCALE)

tables: setup ## every committed table, from committed summaries
	@$(PY) scripts/aggregate.py table1 table2 tune_table2 table5 table6 --strict

figures: setup ## every committed figure, from committed summaries
	@$(PY) scripts/plot.py table1 table2 tune_table2 table5 table6

bench: setup ## speed as ratios, written to results/benchmarks
	@$(PY) benchmarks/training_step.py
	@$(PY) benchmarks/matrix_sensing.py

test: setup ## the fast tests (what CI runs)
	@$(PY) -m pytest -n 2 -m "not slow" -q

test-slow: setup ## the long proofs
	@$(PY) -m pytest -n 2 -m slow -q

lint: setup ## ruff and mypy
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy --strict saggs && $(VENV)/bin/mypy experiments train.py && $(VENV)/bin/mypy scripts benchmarks && MYPYPATH=tests $(VENV)/bin/mypy tests examples

clean: ## remove the environment and caches; runs in outputs/ stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
