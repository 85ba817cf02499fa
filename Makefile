# One entry for everything: `make demo`, `make test`, `make bench`, `make lint`.
# Every target makes what it needs (.venv, .criu) by itself.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: venv criu lint test soak bench demo proto clean
.DEFAULT_GOAL := venv

venv: $(STAMP)

$(STAMP): pyproject.toml setup.py scripts/make-venv.sh $(wildcard gpuimg/store/kernel/*)
	@sh scripts/make-venv.sh $(PYTHON) $(VENV)
	@touch $@

criu: $(STAMP)
	@$(BIN)/python -m scripts.fetch_criu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m scripts.generate_proto --check

test: $(STAMP) criu
	$(BIN)/python -m pytest -m "not soak"

soak: $(STAMP) criu
	$(BIN)/python -m pytest -m soak

bench: $(STAMP)
	$(BIN)/python -m bench $(BENCH_ARGS)
	$(BIN)/python -m bench --incremental $(INCREMENTAL_ARGS)

demo: $(STAMP)
	@if [ "$$(id -u)" = 0 ]; then $(MAKE) --no-print-directory criu; fi
	@$(BIN)/python -m scripts.demo

proto: $(STAMP)
	$(BIN)/python -m scripts.generate_proto

clean:
	rm -rf $(VENV) .criu .cache build dist *.egg-info
