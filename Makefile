# make demo   replay a request trace through all tiers       (TRACE=path.jsonl, ARGS="--seed 7")
# make test   run all tests, the plugins on real servers included (as root it installs these from Debian)
# make test-sglang   the adapter on SGLang's own controllers (SGLANG="0.5.10.post1 0.5.14 0.5.23")
# make test-mooncake, make test-nixl, make test-s3   one plugin's tests
# make test-gpu   the cases that need a CUDA device; make test-triton   the GPU's copy kernel without one
# make sglang-matrix the same on all versions, and docs/sglang.md from it
# make lint   ruff and mypy
# make conformance   the suite on a backend     (BACKEND=file, or module:Class of a file in examples/)
# make conformance-matrix the suite on what there is, and docs/conformance.md from it
# make bench  the benchmarks behind docs/benchmarks.md
# make bench-s3 the S3 plugin beside its raw client and SGLang's seaweedfs   (ARGS="--server ceph")
# The first run sets everything up in .venv: Python >= 3.10 and a package index are all it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DISTRIBUTIONS := . plugins/file conformance
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml) conformance/pyproject.toml

CLIENTS := $(patsubst plugins/%/requirements.txt,%,$(wildcard plugins/*/requirements.txt))

SGLANG ?= 0.5.10.post1 0.5.14 0.5.23

.PHONY: demo test $(CLIENTS:%=test-%) test-gpu test-triton test-sglang sglang-matrix lint conformance conformance-matrix bench bench-s3 clean
.DELETE_ON_ERROR:

demo: $(VENV)/.ready
	@$(BIN)/hicache-storage replay $(TRACE) $(ARGS)

test: $(VENV)/.clients
	@$(BIN)/pytest -q $(ARGS)

test-sglang:
	@for version in $(SGLANG); do \
		echo "sglang $$version" && PYTHON=$(PYTHON) sh tests_sglang/setup_env.sh $$version && \
		.venv-sglang-$$version/bin/python -m pytest -q -c tests_sglang/pytest.ini --rootdir tests_sglang \
			$(ARGS) tests_sglang || exit 1; \
	done

$(CLIENTS:%=test-%): test-%: $(VENV)/.clients
	@$(BIN)/pytest -q $(ARGS) plugins/$*

test-gpu: $(VENV)/.ready
	@$(BIN)/pytest -q -m gpu $(ARGS) tests/engine

# Its interpreter and compiler need no GPU. A torch for CUDA brings the Triton that belongs to it.
test-triton: $(VENV)/.ready
	@$(BIN)/python -c 'import triton' 2>/dev/null \
		|| $(BIN)/pip install -q --disable-pip-version-check --no-deps triton==3.9.0
	@$(BIN)/pytest -q -k gpus_kernel $(ARGS) tests/engine/test_transfer.py

sglang-matrix:
	@for version in $(SGLANG); do \
		$(MAKE) -s test-sglang SGLANG=$$version ARGS="--junitxml=results-$$version.xml" || exit 1; \
	done
	@$(PYTHON) tests_sglang/matrix.py $(SGLANG:%=results-%.xml) > docs/sglang.md && rm $(SGLANG:%=results-%.xml)

lint: $(VENV)/.ready
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

BACKEND ?= file
conformance: $(VENV)/.ready
	@PYTHONPATH=examples $(BIN)/hicache-conformance --backend $(BACKEND) $(ARGS)

# Backends that fail some case make no error here: the page says which.
REPORTS := build/reports
conformance-matrix: $(VENV)/.clients
	@sh tests_sglang/setup_env.sh 0.5.23 && mkdir -p $(REPORTS)
	-@PYTHONPATH=examples $(BIN)/hicache-conformance --backend file --seed 1 --json $(REPORTS)/file.json
	-@PYTHONPATH=examples $(BIN)/hicache-conformance --backend dict_backend:DictStorage --seed 1 \
		--json $(REPORTS)/dict.json
	-@PYTHONPATH=tests_sglang:tests_sglang/at_start .venv-sglang-0.5.23/bin/hicache-conformance \
		--backend sglang:file --set 'file_storage_path={tmp}' --seed 1 --json $(REPORTS)/sglang-file.json
	-@$(BIN)/hicache-storage mooncake up -- \
		$(BIN)/hicache-conformance --backend mooncake --seed 1 --json $(REPORTS)/mooncake.json
	@$(BIN)/hicache-conformance compare $(REPORTS)/file.json $(REPORTS)/dict.json $(REPORTS)/mooncake.json \
		$(REPORTS)/sglang-file.json --markdown $(REPORTS)/matrix.md
	@sed -i '/^<!-- below: /q' docs/conformance.md && cat $(REPORTS)/matrix.md >> docs/conformance.md

bench: $(VENV)/.ready
	@$(BIN)/python benchmarks/file_backend.py $(ARGS)

bench-s3:
	@sh tests_sglang/setup_env.sh 0.5.23
	@PYTHONPATH=tests_sglang/at_start:tests_sglang .venv-sglang-0.5.23/bin/python benchmarks/s3_backend.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-sglang-*

# torch: what the interpreter already has is accepted, through the venv's system site packages.
$(VENV)/.ready: requirements.txt $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python >= 3.10 is needed; name one with: make PYTHON=python3.x"; exit 1; }
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -r requirements.txt
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	@$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps $(DISTRIBUTIONS:%=-e %)
	@touch $@

# The client libraries of the plugins, and the servers that their tests start.
$(VENV)/.clients: $(VENV)/.ready $(wildcard plugins/*/requirements.txt plugins/*/apt.txt)
	@for plugin in $(CLIENTS); do \
		sh .ci/apt.sh plugins/$$plugin/apt.txt && \
		$(BIN)/pip install -q --disable-pip-version-check --no-deps -r plugins/$$plugin/requirements.txt && \
		$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e plugins/$$plugin || exit 1; \
	done
	@touch $@
