# The course's commands. `make help` lists them; only Python >= 3.11 and make are needed to begin.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

# The environment is rebuilt when the lock file, the project file or Python's minor version changes.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
STAMP := $(VENV)/setup-$(VERSION)-$(shell cat requirements.lock pyproject.toml | cksum | cut -d ' ' -f 1)

# One thread per process: tests and notebooks use the cores by processes, and numbers stay the same.
export OMP_NUM_THREADS ?= 1
# A notebook's kernel is the environment's own Python, whatever kernels the machine has.
export JUPYTER_PREFER_ENV_PATH := 1

NOTEBOOKS := $(wildcard notebooks/*.ipynb)

.DEFAULT_GOAL := help
.PHONY: help setup book serve offline pdf test lint test-unit test-notebooks test-browser results bench live address lock clean

help: ## List the commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## Make .venv from the lock file and install samkit into it, editable

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "This course needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || echo missing)."; \
	  echo "Install one, or name it: make setup PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' lacks its venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@rm -f $(VENV)/setup-*
	@test "$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$(VERSION)" \
	  || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing the versions of requirements.lock into $(VENV) (several GB with torch; a few minutes)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

book: setup ## Execute every chapter and build the book under _build/html
	$(BIN)/jupyter-book build . --all -W -n --keep-going
	@echo
	@echo "The book is ready. Open it in a browser:  file://$(CURDIR)/_build/html/index.html"
	@echo "or serve it (search works best that way): make serve"

serve: setup ## Serve the built book at http://localhost:8000
	@test -f _build/html/index.html || { echo "There is no book yet: run make book first."; exit 1; }
	@echo "The book is at http://localhost:$${PORT:-8000} (stop with Ctrl-C)"
	@$(BIN)/python -m http.server "$${PORT:-8000}" --bind 127.0.0.1 --directory _build/html

offline: book ## Zip the built book, to be read without a network: dist/sam-book.zip
	@mkdir -p dist && rm -f dist/sam-book.zip
	cd _build/html && $(CURDIR)/$(BIN)/python -m zipfile -c $(CURDIR)/dist/sam-book.zip .
	@echo "dist/sam-book.zip: unpack it and open index.html"

pdf: setup ## Print the whole book: dist/sam-book.pdf (needs Chromium)
	$(BIN)/jupyter-book build . --builder singlehtml -W -n --keep-going
	$(BIN)/python book/tools/pdf.py _build/singlehtml dist/sam-book.pdf

test: lint test-unit test-notebooks ## Linters, unit tests, doctests, and every notebook through nbval

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(if $(NOTEBOOKS),$(BIN)/nbstripout --verify --keep-id $(NOTEBOOKS))

test-unit: setup
	$(BIN)/pytest -m "not browser" --numprocesses $(WORKERS) --dist loadfile

test-notebooks: setup
	$(if $(NOTEBOOKS),$(BIN)/pytest --override-ini addopts= --override-ini filterwarnings=default \
	  --nbval-lax --nbval-current-env --numprocesses $(WORKERS) --dist loadfile $(NOTEBOOKS))

test-browser: setup ## Read the built book in headless Chromium (needs Chromium)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { echo "make test-browser needs Chromium; on Debian: apt install chromium"; exit 1; }
	@test -f _build/html/index.html || $(MAKE) book
	$(BIN)/pytest -m browser

results: setup ## Run the long experiments again (ONLY=name for one; resumes where it stopped)
	$(BIN)/python -m samkit.experiments $(if $(ONLY),--only $(ONLY)) --workers $(WORKERS)

bench: setup ## Time samkit beside its peers
	$(BIN)/python -m benchmarks

live: setup ## Draw the live figures' static pictures again, after an edit (needs Node)
	$(BIN)/python book/tools/live_pictures.py

address: setup ## Write repository.url of _config.yml into every badge, setup cell and project file
	$(BIN)/python book/tools/address.py

lock: setup ## Resolve requirements.lock again from pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 \
	  --no-header --no-annotate --constraint book/tools/constraints.txt --output-file requirements.lock

clean: ## Remove what the build made (the environment stays)
	rm -rf _build dist .pytest_cache .ruff_cache
