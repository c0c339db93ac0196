# make serve   a server with the bundled model on http://127.0.0.1:8000
# make test    everything CI runs
# make fuzz    coverage-guided fuzzing of what others write, FUZZ_SECONDS for each target (default: 600)
# make soak    mixed traffic for SOAK_MINUTES (default: 30), memory and descriptors watched; the scheduler beside its
#              model for a million operations; random mixes of features under pressure beside the same requests alone
# make sanitize  the tests of cancellation, preemption and the scheduler over a core with sanitizers
# make test-gpu  tests/gpu on a machine with one: GPU_PROCESSES at once (default: 8), then those that must be alone
# make clients   other projects' clients (lm_eval, LiteLLM, LangChain and others) against a server with the bundled model
# All set up .venv first: the package, editable, with its development tools.

PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
OPENAI_AGENTS := .venv-openai-agents
NODE_CLIENTS := tests/clients/node/node_modules/.installed
FUZZ_SECONDS ?= 600
SOAK_MINUTES ?= 30
GPU_PROCESSES ?= 8
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NATIVE := $(wildcard csrc/*/*) CMakeLists.txt pyproject.toml constraints.txt
SANITIZED = $(BIN)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=$(3) -DASYNCENGINE_TESTS=ON -DASYNCENGINE_WERROR=ON -DASYNCENGINE_UNITY=ON \
	-DASYNCENGINE_SANITIZE=$(2) >/dev/null && $(BIN)/cmake --build build/$(1) && build/$(1)/core_tests

.PHONY: install serve test lint native asan tsan pytest test-gpu fuzz soak sanitize clients clean

install: $(INSTALLED)

$(INSTALLED): $(NATIVE)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

serve: install
	$(BIN)/asyncengine serve

test: lint native pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

# The C++ core without Python, under the sanitizers: one build's tests, which mostly wait, run while the other compiles.
# With the address sanitizer -O0 compiles in half the time; warnings that need an optimiser come from the other build.
native: install
	$(MAKE) --jobs=2 asan tsan

asan: install
	$(call SANITIZED,asan,address$(COMMA)undefined,-O0)

tsan: install
	$(call SANITIZED,tsan,thread,-O1)

# A new worker would begin with the test that ended the last one.
pytest: install
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

test-gpu: install
	$(BIN)/pytest --numprocesses $(GPU_PROCESSES) -m 'not alone' tests/gpu
	$(BIN)/pytest -m alone tests/gpu

fuzz: install
	$(BIN)/pip install --quiet --constraint constraints.txt atheris
	$(BIN)/python -m tests.fuzz.run all --seconds $(FUZZ_SECONDS)

soak: install
	$(BIN)/python -m tests.core.long_run --operations 1000000 --seed 1
	$(BIN)/python -m tests.soak.mixed --minutes $(SOAK_MINUTES) --seed 1
	$(BIN)/python -m tests.soak.features --minutes $(SOAK_MINUTES) --seed 1

sanitize: install
	$(BIN)/pip install --quiet --constraint constraints.txt pybind11
	$(BIN)/python tests/sanitized.py address
	$(BIN)/python tests/sanitized.py thread

# In environments of their own: they need other versions of what .venv has. The JavaScript ones need Node 20 and npm.
# One Python client needs other versions of what the others have.
clients: install $(CLIENTS)/.installed $(OPENAI_AGENTS)/.installed $(NODE_CLIENTS)
	$(CLIENTS)/bin/pytest -c tests/clients/pytest.ini tests/clients
	$(OPENAI_AGENTS)/bin/pytest -c tests/clients/pytest.ini $(wildcard tests/clients/test_openai_agents*.py)

$(CLIENTS)/.installed: tests/clients/requirements.txt
$(OPENAI_AGENTS)/.installed: tests/clients/requirements-openai-agents.txt

$(CLIENTS)/.installed $(OPENAI_AGENTS)/.installed:
	test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	touch $@

$(NODE_CLIENTS): tests/clients/node/package-lock.json
	npm --prefix tests/clients/node ci --no-audit --no-fund
	touch $@

clean:
	rm -rf build $(VENV) $(CLIENTS) $(OPENAI_AGENTS) tests/clients/node/node_modules

COMMA := ,
