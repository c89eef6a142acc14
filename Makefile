# All tools: run, test, lint, docs, site, bench. Each target first creates the environment, once.

# The first working Python 3.11 or newer; PYTHON=... selects another.
PYTHON ?= $(firstword $(foreach python,python3.11 python3.12 python3.13 python3.14 python3 python,$(shell \
	$(python) -c 'import sys; sys.version_info >= (3, 11) and print("$(python)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
# One thread: the model is too small for two, and processes that share two cores slow each other down severalfold.
export OMP_NUM_THREADS ?= 1
# Bytecode is cached even if the shell disables it: tests start many processes, each of which would compile everything.
unexport PYTHONDONTWRITEBYTECODE

QUICK := not slow and not statistical and not process and not ranks and not compile and not browser and not trainer \
	and not gpu and not xla and not fake_device
# Limit of processor time for a quick test, in seconds; CI hosts are slower. make test has no limit, so that its results
# do not depend on the host.
QUICK_LIMIT := $(if $(CI),2,1)

.PHONY: pictures types run fast fast-oldest fast-newest fast-matrix test slow coverage dist oracle oracle-update shape lint docs site bench fastai matrix xla zoo clean

run: $(STAMP)
	$(BIN)/loopscope run mod_arithmetic --preset quick --strategy stride target \
		--jobs 2 --with-hooks observers --hook-csv --overwrite
	$(BIN)/loopscope report output/mod_arithmetic/stride output/mod_arithmetic/target \
		--out output/mod_arithmetic/report.html --overwrite

# Three tiers of tests. Quick tests start no processes; the markers in pyproject.toml list what the others start. The
# marker longer leaves out a tenth of them, and half of their time; ARGS=--durations=30 shows the longest of the rest.
fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "$(QUICK) and not longer" --quick-limit $(QUICK_LIMIT) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# Both ends of the supported range, each in a separate environment with torch's default build, which takes several GB;
# all other versions are from constraints.txt. torchao 0.18 does not import with torch 2.9, so its tests are skipped there.
fast-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pip uninstall --quiet --yes torchao
	.venv-oldest/bin/python -m pytest -n 2 --dist loadfile -m "$(QUICK)" --quick-limit $(QUICK_LIMIT) $(ARGS)

fast-newest: .venv-newest/.installed
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile -m "$(QUICK)" --quick-limit $(QUICK_LIMIT) $(ARGS)

# One combination, for CI: make fast-matrix PYTHON=python3.12 TORCH=2.13. Remove .venv-matrix before another combination.
fast-matrix: .venv-matrix/.installed
	$(if $(filter 2.9,$(TORCH)),.venv-matrix/bin/python -m pip uninstall --quiet --yes torchao)
	.venv-matrix/bin/python -m pytest -n 2 --dist loadfile -m "$(QUICK)" --quick-limit $(QUICK_LIMIT) $(ARGS)

.venv-oldest/.installed: END_PYTHON := python3.11
.venv-oldest/.installed: END_TORCH := torch==2.9.*
.venv-newest/.installed: END_PYTHON := python3.13
.venv-newest/.installed: END_TORCH := torch==2.15.*
.venv-matrix/.installed: END_PYTHON := $(PYTHON)
.venv-matrix/.installed: END_TORCH := torch==$(TORCH).*
.venv-oldest/.installed .venv-newest/.installed .venv-matrix/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(END_PYTHON) -m venv $(@D)
	grep -vE '^torch(vision)?==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(@D)/constraints.txt \
		"$(END_TORCH)" --editable '.[dev,wandb,trackio,tensorboard,plot,report,lm,site]'
	touch $@

# torch_xla has no build for the torch version in constraints.txt; this environment takes several GB.
xla:
	test -x .venv-xla/bin/python || $(PYTHON) -m venv .venv-xla
	.venv-xla/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.9.*" "torch_xla==2.9.*" pytest hypothesis --editable '.[cli]'
	PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest -m xla tests/training_hooks/averaging/test_on_xla.py

slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "slow or statistical" --hypothesis-profile "new examples" $(ARGS)
	$(if $(ARGS),,$(MAKE) coverage)

# Branch coverage of the tests of make fast; make slow includes it. Measuring takes about twice the time of make fast, and
# would disturb the measurements of time in other tests. FLOOR is the measured share, rounded down, less one point:
# 93 % of lines and branches on 26 November 2026, with Python 3.11, torch 2.13.0 and no GPU.
FLOOR := 92
coverage: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "$(QUICK)" --cov --cov-report=term --cov-fail-under=$(FLOOR) $(ARGS)

# Prints nothing if behaviour is unchanged. PART=hooks|experiments|trainers|ranks|help compares one part.
oracle: $(STAMP)
	@$(BIN)/python -m tests.oracle compare $(PART)

# Commit its files separately, with the reason of the change (docs/decisions/0027-behaviour-is-recorded.md).
oracle-update: $(STAMP)
	@$(BIN)/python -m tests.oracle update $(PART)

# Type checkers and editors cannot follow an editable install with renamed folders, so they use folders of links: the
# project's own checks one in build/types, and checks of code that uses loopscope the stub package loopscope-stubs in
# the environment (PEP 561), in which only __init__ must be named as a stub. Nothing imports either of them.
LINKED = $(CURDIR)/framework/* $(foreach folder,training_hooks sinks experiments,$(CURDIR)/$(folder))
TYPES := build/types
STUBS = $(addsuffix /loopscope-stubs,$(wildcard $(VENV)/lib/python3*/site-packages))
types:
	rm -rf $(TYPES)/loopscope $(STUBS)
	mkdir -p $(TYPES)/loopscope $(STUBS)
	for folder in $(TYPES)/loopscope $(STUBS); do ln -s $(LINKED) $$folder/ || exit 1; done
	for folder in $(STUBS); do mv $$folder/__init__.py $$folder/__init__.pyi || exit 1; done

# The structure of the source code in numbers; ARGS=--step lists the functions of one step, ARGS=--imports the modules.
shape: $(STAMP)
	@$(BIN)/python -m tests.shape $(ARGS)

lint: $(STAMP) types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python -m tests.language
	$(BIN)/python -m tests.shape --write --check
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m docs.generate

site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The pictures of the page and of the live screen; needs Chromium with its driver.
pictures: $(STAMP)
	$(BIN)/python -m docs.make_pictures

# Source archive and wheel in dist/, checked, and the wheel installed into an empty environment, without the command's
# packages and with them.
dist:
	rm -rf dist .venv-dist
	$(PYTHON) -m venv .venv-dist/tools
	.venv-dist/tools/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build twine
	.venv-dist/tools/bin/python -m build
	.venv-dist/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv .venv-dist/empty
	.venv-dist/empty/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	cd .venv-dist && empty/bin/python -c "import loopscope; loopscope.attach, loopscope.read_run"
	.venv-dist/empty/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		"$$(ls dist/*.whl)[cli]"
	cd .venv-dist && empty/bin/loopscope --help && empty/bin/loopscope list

bench: $(BENCH_STAMP)
	$(BIN)/python -m tests.benchmarks $(ARGS)
	$(BIN)/python -m docs.generate

# fastai needs a torchvision that matches torch's build; otherwise imports of lightning fail.
fastai:
	test -x .venv-fastai/bin/python || $(PYTHON) -m venv .venv-fastai
	.venv-fastai/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[fastai]'

# Trains every trainer and loop with hooks and without; ARGS=--write renews the table in docs/data and its summary. The
# environment is separate because timm needs a torchvision that matches torch's build.
matrix: .venv-trainers/.installed
	.venv-trainers/bin/python -m tests.trainer_matrix $(ARGS)

# Trains every case of the zoo, with a planted fault or healthy, and compares the doctor's findings with the cause;
# ARGS=--write renews the table in docs/data and its summary.
zoo: $(STAMP)
	$(BIN)/python -m tests.zoo $(ARGS)

.venv-trainers/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev,trainers]'
	touch $@

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "loopscope needs Python 3.11 or newer, and none was found: make PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev,wandb,trackio,tensorboard,plot,report,lm,site]'
	$(MAKE) --no-print-directory types
	touch $(STAMP)

$(BENCH_STAMP): $(STAMP)
	$(INSTALL) '.[bench]'
	touch $(BENCH_STAMP)

clean:
	rm -rf $(VENV) .venv-xla .venv-fastai .venv-oldest .venv-newest .venv-matrix .venv-trainers .venv-dist build dist *.egg-info
