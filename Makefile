# Needs make and Python 3.11 or later; everything else goes into .venv.
.PHONY: help .venv other-python demo docs test test-all test-servers test-engines fuzz check check-install clean

# The Python that .venv is of, so that a change of the requirements renews it as it is.
PYTHON ?= $(or $(shell test -x "$$(cat .venv/python 2>/dev/null)" && cat .venv/python),python3)
JOBS ?= 3
BIN = .venv/bin
READY = .venv/installed

help:
	@echo "make demo    run the demonstration; results go to demo/out"
	@echo "make test    run the tests, JOBS=$(JOBS) at a time; a few minutes"
	@echo "make test-all   these and the exhaustive ones: kills, soak, fuzz, Triton's interpreter, a real model, packaging"
	@echo "make test-servers   the tests that need real servers, which are downloaded"
	@echo "make test-engines   the tests inside vLLM, LMCache and SGLang, in an environment of their own: VLLM_ENV=$(VLLM_ENV)"
	@echo "make fuzz N=100000 SEED=1   mutants of every file format; findings go to build/fuzz"
	@echo "make docs    the documentation as a site, in site/; warnings are errors"
	@echo "make check   ruff, formatting and mypy"
	@echo "make check-install   requirements against the package index alone; the wheel in a clean environment, with a torch of its own"
	@echo "make .venv   only the virtual environment, from PYTHON=$(PYTHON), with its torch where it has one"
	@echo "make clean   remove everything that can be made again"

.venv: $(READY)

# Naming another PYTHON makes the environment anew.
ifneq ($(origin PYTHON),file)
ifneq ($(shell cat .venv/python 2>/dev/null),$(shell "$(PYTHON)" -c 'import sys; print(sys.executable)' 2>/dev/null))
$(READY): other-python
endif
endif
other-python: ;

$(READY): pyproject.toml constraints.txt scripts/set_up.py
	@"$(PYTHON)" -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kvwire needs Python 3.11 or later, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'
	@"$(PYTHON)" scripts/set_up.py
	@"$(PYTHON)" -c 'import sys; print(sys.executable)' > .venv/python
	@touch $(READY)

demo: $(READY)
	$(BIN)/kvwire demo --model "$$($(BIN)/python scripts/demo_model.py)"

# KVWIRE_EXPLORE=<seed> makes property tests draw other examples than the usual ones: the same for the same seed.
# A file's tests stay together, so that one worker compiles its numba kernels and the others find them cached; slow files
# first, in the order of tests/conftest.py. Python keeps what it compiles, also where the environment says otherwise: else
# each worker and each process that a test starts compiles all tests and the package anew.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
test: $(READY)
	$(PYTEST) -m "not servers and not exhaustive"

test-all: $(READY)
	$(PYTEST)

# Ceph's gateway, Swift and nginx, downloaded once into KVWIRE_SERVERS (~/.cache/kvwire-servers); Debian 12, no root.
test-servers: $(READY)
	$(BIN)/pytest -m servers tests/servers

# vLLM pins its own torch, transformers and numba, so that it has an environment of its own; on a machine without a GPU its
# build for processors is taken. KVWIRE_VLLM_ENV names one that is there already.
VLLM_ENV ?= $(or $(KVWIRE_VLLM_ENV),.venv-vllm)
test-engines: $(READY)
	@if $(BIN)/python scripts/vllm_environment.py "$(VLLM_ENV)" --tests; then \
	  "$(VLLM_ENV)/bin/python" -m pytest -W default tests/vllm/test_in_vllm*.py tests/chunks/test_in_*.py; \
	else echo "skipped: the tests inside vLLM need $(VLLM_ENV), which could not be made (see above)"; fi

# NUMBA_BOUNDSCHECK=1 make fuzz checks every index of the kernels, too.
N ?= 10000
SEED ?= 0
fuzz: $(READY)
	$(BIN)/python -m tests.codec.fuzz --mutants $(N) --seed $(SEED) --jobs $(JOBS) --kinds

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Modules are read, none is imported.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

check-install: $(READY)
	scripts/check_install.sh

clean:
	rm -rf .venv build dist site demo/out kvwire.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
