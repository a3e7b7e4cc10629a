# Everything runs from a fresh checkout with Python 3.11 or newer (venv and pip included).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1
# Set in many containers; without compiled files every program that a test starts compiles the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: browser demo test tests test-all lint fix types docs site bench faults clean

# uv where there is one, else pip; what uv cannot get (it reads no pip.conf), pip tries again.
define install
	@echo "installing into $(VENV): quantkit and what $(1) needs; PyTorch is most of it, so the first"
	@echo "time takes as long as a download of one to five GB"
	@start=$$(date +%s); \
	{ command -v uv >/dev/null && \
	uv pip install --quiet --python $(BIN)/python $${PIP_INDEX_URL:+--index-url "$$PIP_INDEX_URL"} \
	--editable '$(2)'; } || $(BIN)/pip install --quiet --editable '$(2)' && \
	echo "installed in $$(($$(date +%s) - start)) s"
endef

demo: $(VENV)/.installed
	@echo "the demo quantises a small model ten ways, scores and compares: minutes on two cores"
	$(BIN)/quantkit demo

# The types are checked beside the tests, which leave part of two cores idle.
test: lint browser
	$(MAKE) --no-print-directory --jobs 2 types tests

# Three workers keep two cores busy: tests often wait for programs that they start.
tests: $(VENV)/.developed
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist loadscope --no-loadscope-reorder

# Pages are tested in a real browser where there is one, or where it may be installed.
browser:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get && \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends \
		chromium chromium-driver; } >/dev/null 2>&1 || \
		echo "there is no Chromium, so tests of pages are skipped; on Debian: apt install chromium-driver"

# The slow tier too; add `-m gpu` by hand on a machine with a GPU.
test-all: lint types
	$(BIN)/pytest -q -m 'not gpu and not network'

lint: $(VENV)/.developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.developed
	$(BIN)/mypy

fix: $(VENV)/.developed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.developed
	$(BIN)/python scripts/write_help_page.py
	$(BIN)/python scripts/write_choosing_page.py
	$(BIN)/python scripts/write_models_page.py
	$(BIN)/python scripts/write_formats_page.py
	$(BIN)/python scripts/write_recipes_page.py
	$(BIN)/python scripts/write_figures.py

# The documentation as a site in build/site, offline and strict.
site: $(VENV)/.developed
	$(BIN)/python scripts/build_site.py

bench: $(VENV)/.developed
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/startup.py --questions
	$(BIN)/python benchmarks/data_free.py --blocks 4 --hidden 1024 --intermediate 2816

# Thousands of damaged inputs, kills and limits: takes hours, and resumes after a stop.
faults: $(VENV)/.developed
	nice $(BIN)/python tests/faults/campaign.py mutations 0:10000
	nice $(BIN)/python tests/faults/campaign.py kills 0:500
	nice $(BIN)/python tests/faults/campaign.py limits 0:120
	$(BIN)/python tests/faults/campaign.py collect
	$(BIN)/python scripts/write_figures.py

# A stamp newer than pyproject.toml means that there is nothing to install.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "quantkit needs Python 3.11 or newer; call make PYTHON=python3.12 or the like"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
		{ echo "cannot make a virtual environment; on Debian: apt install python3-venv"; exit 1; }
	$(call install,the demo,.)
	@touch $@

$(VENV)/.developed: pyproject.toml | $(VENV)/.installed
	$(call install,the suite,.[dev])
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
