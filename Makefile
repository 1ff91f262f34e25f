# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make .venv themselves.
PYTHON ?= python3
# TORCH=newest takes the newest torch that pip finds, in an environment of its own: gigabytes of CUDA. To look for a newer
# one later, remove .venv-newest.
VENV := $(if $(filter newest,$(TORCH)),.venv-newest,.venv)
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(filter newest,$(TORCH)),$(VENV)/constraints.txt,constraints.txt)
INSTALL := $(BIN)/pip install -q --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
# pip would compile on one core. Packages hold files that are no Python of this version, and say so.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

# A run is several processes, and the tests are hundreds of runs: the sources are compiled once, not in each of them.
export PYTHONDONTWRITEBYTECODE :=

SEEDS ?= 1-1000
FRAMES ?= 1000000
N ?= 20
MINUTES ?= 30

.PHONY: setup setup-dev launchers demo test test-quick test-repeat test-gpu lint sim fuzz soak bench bench-quick clean

setup: $(VENV)/.core
setup-dev: $(VENV)/.dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

.venv-newest/constraints.txt: constraints.txt | $(BIN)/python
	grep -v '^torch==' $< > $@

$(VENV)/.core: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(INSTALL) -e '.[examples]'
	$(COMPILE)
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(INSTALL) -e '.[dev]'
	$(COMPILE)
	@touch $(VENV)/.core $@  # it is more than the core

# Other people's launchers, and false clocks, for tests that are skipped without them. As root, on Debian and its kin.
launchers:
	apt-get install -y --no-install-recommends slurm-wlm libfaketime

demo: setup
	$(BIN)/distbelief train examples/digits.py --workers 2

lint: setup-dev
	$(BIN)/ruff check src tests bench examples conftest.py
	$(BIN)/ruff format --check src tests bench examples conftest.py
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Four at a time on two cores: runs wait for each other often. In the order of their names, so that whole runs come first and the short files even out at the end.
test: lint
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# For the inner loop: no linters, and no tests that start processes.
test-quick: setup-dev
	$(BIN)/python -m pytest --quick -n 2

# Every test that starts processes N times beside a busy loop per core. Hours; goes on where it was, by its log.
test-repeat: setup-dev
	$(BIN)/python -m tests.repeat --times $(N) $(ONLY)

# For a machine with a CUDA device. Whatever Python has torch there will do: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest tests/gpu

sim: setup-dev
	$(BIN)/python -m tests.sim.run --seeds $(SEEDS) --jobs 2 $(if $(MEMBERS),--members $(MEMBERS)) --keep-going

# A real run, and a key-value service, under siege.
fuzz: setup-dev
	$(BIN)/python -m tests.fuzz --frames $(FRAMES)
	$(BIN)/python -m tests.fuzz --frames $(FRAMES) --kv

# As root: two hosts in namespaces, a random fault every 20 s, then the twin. SEED repeats the draw; LOG=FILE keeps the lines.
soak: setup-dev
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(LOG),--log $(LOG))

# Side by side with peers. The first: everything, for hours; broken off, it goes on where it was with `make bench RESUME=1`.
bench bench-quick: setup-dev
	$(BIN)/python -m bench $(if $(filter bench-quick,$@),--quick) $(if $(RESUME),--resume)

clean:
	rm -rf .venv .venv-newest runs build dist src/*.egg-info
