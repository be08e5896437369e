# make run: install what is needed and do the main job. make test: prove it. make check: style, types, layers.
# make lab: build the guest with zfs that some tests boot, and fetch nbdkit's vddk plugin; once, some minutes, as root; kept in
# ~/.cache/synvirt-lab.
# make deb: a Debian package of it, in dist/. make deb-proof: install it in a bare Debian 12, import an OVA there, boot it, and
# import every other kind of file; as root.
# make unit-proof: its units under systemd and libvirtd, in a container; as root.
# make bench: speed, as ratios against other tools in the same run, written into docs/performance.md and the README; refused
# where others work on the machine meanwhile. make bench-quick: processor time against recorded bounds, in a minute or two.
# make bench-page: a copy while 1,000 clients listen to the stream and 200 users look at the page.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help
.PHONY: help setup run test test-again check bench bench-quick bench-page clean setup-test lab deb deb-proof unit-proof

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

# The stamps hold the environment to its lock files: change one of them, and it is made again, beside the present one. What
# pyproject.toml says of this project itself is installed in place.
$(VENV)/.runtime: requirements.txt packaging/packages.txt
	@echo "Setting up: Debian's packages that this machine lacks, then $(VENV) by the lock file; one to three minutes, the first time only"
	packaging/install-packages.sh packaging/packages.txt
	packaging/make-venv.sh $(VENV) requirements.txt

# A new environment has it already.
$(VENV)/.project: pyproject.toml packaging/launcher.py | $(VENV)/.runtime
	test $@ -nt pyproject.toml -a $@ -nt packaging/launcher.py || packaging/install-project.sh $(VENV)
	touch $@

$(VENV)/.dev: requirements-dev.txt packaging/packages-test.txt $(VENV)/.runtime | $(VENV)/.project
	packaging/install-packages.sh packaging/packages-test.txt
	$(BIN)/pip install -q --ignore-installed --require-hashes -r requirements-dev.txt
	touch $@

setup: $(VENV)/.project
	@$(BIN)/python -m compileall -q src

setup-test: $(VENV)/.dev

run: setup
	$(BIN)/synvirt demo

# Three workers more than there are cores: each waits more than half of its time, for a process, a guest or a disk. WORKERS=n: so many.
WORKERS ?= $$(($$(nproc) + 3))
# Plugins that libraries bring and no test uses: loading them takes each worker more than a second.
PYTEST := pytest -p no:schemathesis -p no:anyio

test: setup-test
	SAY_PROCESSORS=1 $(BIN)/python -m tests.running.reaping -m $(PYTEST) -n $(WORKERS) --maxprocesses 5 --dist worksteal --durations 100

# More than two are no accident of one noisy moment.
test-again: setup-test
	$(BIN)/python -m tests.running.last_failed --at-most 2
	$(BIN)/python -m tests.running.reaping -m $(PYTEST) -v --last-failed --last-failed-no-failures none --maxfail 1

lab:
	packaging/install-packages.sh packaging/packages-lab.txt
	lab/build
	lab/vddk

check: setup-test
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

deb: setup
	packaging/build-deb.sh dist

deb-proof: deb setup-test
	packaging/install-packages.sh packaging/packages-lab.txt
	packaging/prove-deb.sh dist/*.deb

unit-proof: deb
	packaging/install-packages.sh packaging/packages-unit.txt
	packaging/prove-unit.sh dist/*.deb

bench: setup-test
	$(BIN)/python -m bench --write

bench-quick: setup-test
	$(BIN)/python -m bench.quick

bench-page: setup-test
	$(BIN)/python -m bench.service.page

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
