# The README's two commands: `make demo` and `make test`. Each sets up .venv first, and finds it ready the next time.
# Another Python: `make demo PYTHON=python3.12`. Nothing is written outside this folder but caches.

.DEFAULT_GOAL := help
.PHONY: help demo test test-long quick test-cuda site wheels results gpu clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Files are compiled when they are first imported: most of what torch and transformers bring never is.
INSTALL := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt

# Processes start in a second from compiled files, in ten without.
export PYTHONDONTWRITEBYTECODE =

help:
	@echo "make demo    train a small GPT twice, by eager PyTorch and by lowtide, and compare"
	@echo "make test    lint, types, layers, tests: what CI runs, and then test-cuda"
	@echo "make quick   the tests of the rooms that train nothing: what one runs while working"
	@echo "make test-long  the tests that make test leaves out, as each takes long"
	@echo "make test-cuda  tests of a GPU, on a device that computes nothing: a second environment of 1.5 GB, .venv-cuda"
	@echo "make site    the documentation as a site, in build/site"
	@echo "make wheels  a wheel with compiled kernels for each of PYTHONS, and the source distribution, in dist"
	@echo "make results  all saved tables anew, at this commit and on this machine: a night; goes on where it was cut off"
	@echo "make gpu     all that is to be measured on a GPU, by the Python at hand; without a GPU a dry run"
	@echo "make clean   remove what the other two made"

demo: $(READY)
	@$(BIN)/python -m bench.demo

# One thread for each worker, so that workers do not fight for cores. Types are checked beside the tests; pytest's summary is the last line.
test: $(READY)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy --no-error-summary & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup; tests=$$?; \
	wait $$types || { echo "make test: mypy complains, above"; exit 1; }; exit $$tests

# What `make test` leaves out: longer than that takes.
test-long: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup --long

# What one runs while working: the rooms that need no training, without what tests/slow.txt names, in about a minute.
QUICK := $(addprefix tests/,ir plan problems placement rewrite split lower report kernels base planning) $(addprefix tests/test_,asserts.py house.py layers.py programs_as_text.py words.py)
quick: $(READY)
	@$(BIN)/ruff check --quiet
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup --quick $(QUICK)

# The tests of a GPU on the null device (tests/null_cuda). Without a CUDA build of torch nothing runs, and that is said. Those that
# tests/long.txt names run with CUDA_TESTS='--long tests/gpu'.
CUDA_VENV := .venv-cuda
CUDA_TORCH ?= torch==2.14.1
CUDA_TESTS ?= tests/gpu
test-cuda:
	@$(PYTHON) -m tests.null_cuda.environment $(CUDA_VENV) '$(CUDA_TORCH)' && \
	OMP_NUM_THREADS=1 $(CUDA_VENV)/bin/python -m tests.null_cuda pytest -n auto --maxprocesses 4 --dist loadgroup $(CUDA_TESTS); status=$$?; \
	if [ $$status = 77 ]; then echo "make test-cuda: nothing was tested"; else exit $$status; fi

# Pages as a site in build/site, to be read from that folder. The reference is made from docstrings, so that torch is not needed.
SITE_VENV := .venv-site
site:
	@test -x $(SITE_VENV)/bin/mkdocs || { $(PYTHON) -m venv $(SITE_VENV) && $(SITE_VENV)/bin/python -m pip install -qq --disable-pip-version-check 'mkdocs-material>=9.7,<10' 'mkdocstrings-python>=2,<3'; }
	@NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs build --quiet --site-dir build/site && echo "build/site/index.html"

# Each Python that is named gets an environment with torch in it: minutes, and 2 GB meanwhile.
PYTHONS ?= $(PYTHON)
wheels: $(READY)
	@$(BIN)/python -m release.wheels --python $(PYTHONS)

# RESULTS='--only ago serve' for some tables; --list says how old each is.
results: $(READY)
	@$(BIN)/python -m bench.rerun $(RESULTS)

# Nothing is installed for it: .venv where there is one, else PYTHON with what it has.
gpu:
	@$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) -m bench.on_gpu --minutes 15

# torch goes first and by itself: whatever else is asked for then has to live with this build of it.
$(READY): pyproject.toml research/pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v < (3, 14) or sys.exit("lowtide needs Python 3.10 to 3.13, got %d.%d: make PYTHON=python3.12" % v)'
	@echo "setting up $(VENV): this takes a minute or two, once"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) torch
	@$(INSTALL) --editable '.[bench,dev]' --editable ./research
	@$(INSTALL) --no-deps torchvision timm
	@$(INSTALL) --no-deps --target $(VENV)/executorch executorch flatbuffers ruamel.yaml tabulate torchao
	@touch $@

clean:
	rm -rf $(VENV) $(CUDA_VENV) $(SITE_VENV) build *.egg-info research/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find lowtide research bench tests -name __pycache__ -prune -exec rm -rf {} +
