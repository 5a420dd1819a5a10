# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without a GPU this exact version has a CPU build; change it with TORCH="torch" to take the default CUDA build.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo "torch>=2.11" || echo "torch==2.13.0")

.PHONY: demo test test-all test-sanitised lint browser bench-serve bench-latency bench-kv bench-sched bench-step bench-kernels bench-peers bench-load clean

demo: $(VENV)/.installed
	$(BIN)/specserve demo

test: $(VENV)/.installed-dev lint
	$(BIN)/pytest -n 2 --dist loadfile

test-all: $(VENV)/.installed-dev lint
	SPECSERVE_EXAMPLES=10000 $(BIN)/pytest -n 2 --dist loadfile -m "slow or not slow" --timeout 3600

# The kernels' tests on libraries that stop at the first wrong access or undefined operation, for every instruction set
# of this machine. The sanitisers must be in the process before anything else is.
SANITISERS = $(foreach lib,libasan.so libubsan.so libstdc++.so,$(shell $${CXX:-g++} -print-file-name=$(lib)))
test-sanitised: $(VENV)/.installed-dev
	SPECSERVE_SANITISE=1 LD_PRELOAD="$(SANITISERS)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		$(BIN)/pytest tests/kernels -p no:cacheprovider

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

browser:
	command -v chromium >/dev/null && command -v chromedriver >/dev/null \
		|| (apt-get update -qq && apt-get install -y -qq chromium chromium-driver)

bench-serve: $(VENV)/.installed-dev
	$(BIN)/python bench/serve.py --compare transformers

bench-latency: $(VENV)/.installed-dev
	$(BIN)/python bench/latency.py

bench-kv: $(VENV)/.installed-dev
	$(BIN)/python bench/kv_policies.py

bench-sched: $(VENV)/.installed-dev
	$(BIN)/python bench/scheduler.py

bench-step: $(VENV)/.installed-dev
	$(BIN)/python bench/step.py

bench-kernels: $(VENV)/.installed-dev
	$(BIN)/python bench/kernels.py

bench-load: $(VENV)/.installed-dev
	$(BIN)/python bench/load.py

bench-peers: $(VENV)/.installed-dev
	$(BIN)/python bench/peers.py

$(VENV)/.installed: pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
