# The commands for newcomers and for CI. Settings:
#   PYTHON  the interpreter that makes the environment
#   LOCK    auto | cpu | cuda | vllm-cpu | vllm | controller; auto: cuda if there is an NVIDIA GPU, else cpu
#   VLLM=1  the same lock with vLLM, in an environment of its own
#   VENV    the folder of the environment
#   VIEW=1  of make quickstart: show the run in the browser while it trains; RUN of make view
#   ARGS    further arguments of the command
#   HOSTS and DAYS of make certs, N of make fuzz and make chaos, REF of make same-weights
PYTHON ?= python3
LOCK ?= auto
VLLM ?=
VIEW ?=
RUN ?=
ARGS ?=
HOSTS ?= localhost,127.0.0.1
DAYS ?= 90

ifneq ($(filter-out 0,$(VLLM)),)
VENV ?= .venv-vllm
WHICH = --lock $(LOCK) --vllm
TESTS = vllm and not gpu
BACKEND = rollout.backend=vllm
else
VENV ?= .venv
WHICH = --lock $(LOCK)
TESTS = not gpu$(if $(filter vllm-cpu,$(LOCK)),, and not vllm)
BACKEND =
endif
# Files that are named are run whole, the long proofs in them, too.
CHOSEN = $(TESTS)$(if $(findstring .py,$(ARGS)),, and not extended and not docker)
VENV_TRL ?= .venv-trl

# Two folders beside the checkout, which tests use if they are there; the environment may name others: data sets (without
# them some tests are skipped, and CI fails), and tools that make a Docker engine.
export SPLITPPO_TEST_DATA ?= $(abspath $(wildcard ../shared/data))
export SPLITPPO_TEST_TOOLS ?= $(abspath $(wildcard ../shared/tools))

# With bytecode, torch and the other packages are compiled once, not at every start.
unexport PYTHONDONTWRITEBYTECODE

PY = $(VENV)/bin/python
BUF = $(VENV)/bin/buf

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev quickstart view screenshots test test-all test-slow test-slurm check check-stubs check-proto proto proto-baseline kill-matrix same-weights chaos bench bench-viewer bench-trl gpu-proof rehearse-gpu test-trackers test-openenv test-agents lock certs fuzz compose curves test-deploy

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | while IFS="$$(printf '\t')" read -r name what; do \
	  printf '  make %-14s %s\n' "$$name" "$$what"; done

setup:  ## make the environment .venv from the lock that fits this machine, or from LOCK=...; VLLM=1: .venv-vllm, with vLLM
	@$(PYTHON) -m tools.install $(WHICH) --venv $(VENV)

setup-dev:  ## make the environment with the tools for tests and checks
	@$(PYTHON) -m tools.install $(WHICH) --dev --venv $(VENV)

ifneq ($(filter-out 0,$(VIEW)),)
# The viewer outlives the run, until Ctrl-C.
define WITH_VIEWER
$(PY) -m viewer --wait runs/quickstart & viewer=$$!; trap 'kill $$viewer 2>/dev/null' EXIT; $(1); status=$$?; \
  echo "the viewer goes on, at its address above; Ctrl-C ends it"; wait $$viewer; exit $$status
endef
else
WITH_VIEWER = $(1)
endif

quickstart: setup  ## teach a tiny model to sort letters by PPO, in runs/quickstart; ARGS="key=value ..." overrides keys; VLLM=1: sample with vLLM; VIEW=1: in the browser
	@$(call WITH_VIEWER,$(PY) -m recipes.sort_letters.quickstart $(BACKEND) $(ARGS))

view: setup  ## show the runs in runs/, or RUN=..., in the browser: pages for responses, tokens and critic
	@$(PY) -m viewer $(or $(RUN),runs) $(ARGS)

screenshots: setup-dev  ## take the pictures of the viewer's pages in docs/pictures/viewer anew, of the quickstart or RUN=...; needs chromium
	$(PY) -m tools.screenshots $(if $(RUN),--run $(RUN)) $(ARGS)

test: setup-dev  ## show every promise of the README, and test all that is fast, without a GPU; VLLM=1: with vLLM; ARGS="tests/unit -k kl": only these tests
	$(PY) -m tests --part first -m "$(CHOSEN)" $(ARGS)

test-all: setup-dev  ## run all tests that need no GPU, but the long proofs; VLLM=1: the tests that need vLLM; ARGS="--part rest": those that make test leaves out
	$(PY) -m tests -m "$(CHOSEN)" $(ARGS)

test-deploy: setup-dev  ## test deploy/compose on a Docker engine: killed, stopped, resumed; SKIPPED, with the reason, without an engine
	$(PY) -m tests -m "docker and not extended" tests/deployment $(ARGS)

test-slow: setup-dev  ## run the tests of make test-all, the long proofs (marked extended), and those of random models with three other seeds
	$(PY) -m tests -m "$(TESTS)" --seeds 1,2,3 $(ARGS)
	$(if $(ARGS),,$(PY) -m tests.rehearsal -m extended tests/rehearsal)

test-slurm: setup-dev  ## test deploy/slurm on a Slurm cluster of this machine: killed, queued again, a node lost; SKIPPED, with the reason, without Slurm
	$(PY) -m pytest tests/slurm $(ARGS)

test-trackers: setup-dev  ## test every tracker by its own client, also with a server that is killed, in an environment of its own, .venv-trackers
	@test -x .venv-trackers/bin/python || $(PYTHON) -m venv .venv-trackers
	@.venv-trackers/bin/python -m pip install --quiet -r tests/integration/trackers/requirements.txt
	$(PY) -m pytest tests/integration/trackers $(ARGS)

test-openenv: setup-dev  ## test sessions with a server of OpenEnv, also one that is killed, in an environment of its own, .venv-openenv
	@test -x .venv-openenv/bin/python || $(PYTHON) -m venv .venv-openenv
	@.venv-openenv/bin/python -m pip install --quiet -r tests/integration/openenv/requirements.txt
	$(PY) -m pytest tests/integration/openenv $(ARGS)

# The packages of .venv are there, too, so that torch is not installed twice.
SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
test-agents: setup-dev  ## train agents of frameworks that others wrote (openai-agents, smolagents), in an environment of its own, .venv-agents
	@test -x .venv-agents/bin/python || $(PY) -m venv .venv-agents
	@$(PY) -c $(SITE_PACKAGES) > $$(.venv-agents/bin/python -c $(SITE_PACKAGES))/splitppo.pth
	@.venv-agents/bin/python -m pip install --quiet -r tests/integration/agents/requirements.txt
	$(PY) -m pytest tests/integration/agents $(ARGS)

check: setup-dev check-stubs check-proto  ## check lint, format, types, import rules, generated stubs, the wire contract, commit messages, form of code and pages
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m tools.commit_messages
	$(PY) -m pytest -q tests/style

check-stubs: setup-dev
	@generated=$$(mktemp -d) && trap 'rm -rf "$$generated"' EXIT && $(PY) tools/stubs.py --out "$$generated" \
	  && diff -r -x __init__.py -x __pycache__ "$$generated/splitppo/v1" splitppo/v1 \
	  || { echo "splitppo/v1 differs from what proto/ generates: run make proto and commit the result"; exit 1; }

check-proto: setup-dev
	$(BUF) lint
	$(BUF) format --diff --exit-code
	$(BUF) breaking --against proto/baseline.binpb

proto: setup-dev  ## regenerate splitppo/v1 from proto/
	$(PY) tools/stubs.py --out .

proto-baseline: setup-dev  ## at a release: make today's proto/ the contract that make check compares later changes with
	$(BUF) lint
	$(BUF) build --exclude-source-info -o proto/baseline.binpb

kill-matrix: setup-dev  ## kill every process at every point of a step, and compare the weights; ARGS="--only 'critic_0-*'"
	$(PY) -m tests.kill_matrix $(ARGS)

compose:  ## run the quickstart in containers, by deploy/compose, until the controller ends
	@deploy/compose/run.sh

same-weights: setup-dev  ## compare the weights of the quickstart, every schedule, both rank counts and ten kinds of runs with those of the commit REF; VLLM=1 adds a run with vLLM
	$(PY) -m tests.same_weights $(or $(REF),$(error REF names the commit to compare with)) $(ARGS)

chaos: setup-dev  ## kill processes N times at random in a long run (N=50), which must end with the weights of an undisturbed run
	$(PY) -m tests.chaos --kills $(or $(N),50) $(ARGS)
	$(PY) -m tests.chaos.orphans

bench: setup-dev  ## run the benchmarks: start and recovery, loading, memory, long rows, episodes of several contexts, gradient checkpointing, transport, published weights, health checks under load, moments in bf16, the record of a run, overlap of actor and critic, a rollout group, planner, scale, streaming, shares of the rollouts, rollout engines, conversations, sandboxes, hostile responses, agent programs
	$(PY) -m benchmarks.startup
	$(PY) -m benchmarks.loading
	$(PY) -m benchmarks.memory
	$(PY) -m benchmarks.long_rows
	$(PY) -m benchmarks.segments
	$(PY) -m benchmarks.checkpointing
	$(PY) -m benchmarks.transport
	$(PY) -m benchmarks.exchange
	$(PY) -m benchmarks.health
	$(PY) -m benchmarks.moments
	$(PY) -m benchmarks.recording
	$(PY) -m benchmarks.overlap
	$(PY) -m benchmarks.rollout_group
	$(PY) -m benchmarks.planner
	$(PY) -m benchmarks.scale
	$(PY) -m benchmarks.streaming
	$(PY) -m benchmarks.streaming --reward-model
	$(PY) -m benchmarks.shares
	$(PY) -m benchmarks.rollout
	$(PY) -m benchmarks.turns
	$(PY) -m benchmarks.conversations
	$(PY) -m benchmarks.crashing_tools
	$(PY) -m benchmarks.sandbox
	$(PY) -m benchmarks.scorers
	$(PY) -m benchmarks.tool_calls
	$(PY) -m benchmarks.agents

bench-viewer: setup-dev  ## measure the viewer with a run of 2,000 steps and 1 GB of rollouts, for 11 minutes; ARGS="--seconds 60": shorter; needs chromium
	$(PY) -m benchmarks.viewer $(ARGS)

# A Python of the caller's (PY=python3) is taken as it is.
gpu-proof: $(if $(filter command line,$(origin PY)),,setup-dev)  ## show on one GPU what only a GPU can show: tests, updates, long rows, PPO runs; ARGS=--quick: in eight minutes; ARGS="--only row": some cases; PY=python3: without making the environment
	$(PY) -m benchmarks.gpu_proof $(ARGS)

rehearse-gpu: setup-dev  ## run what is for GPUs on pretended ones: tests/gpu, engines, roles, whole runs; SKIPPED, with the reason, without a C++ compiler
	$(PY) -m tests.rehearsal $(ARGS)

curves: setup-dev  ## draw learning curves of every algorithm on sort_letters, of three on conversations, and of scores on tokens, in runs/curves; resumable; ARGS="--only ppo grpo --seeds 1"
	$(PY) -m benchmarks.curves $(ARGS)
	$(if $(ARGS),,$(PY) -m benchmarks.token_scores)

bench-trl: setup-dev  ## compare a PPO step with TRL's, in an environment of its own, .venv-trl; ARGS="--lengths fixed --dtype bf16"
	@test -x $(VENV_TRL)/bin/python || $(PYTHON) -m venv $(VENV_TRL)
	@$(VENV_TRL)/bin/python -m pip install --quiet -c requirements/cpu.txt -r benchmarks/trl-requirements.txt
	$(PY) -m benchmarks.versus_trl --trl $(VENV_TRL)/bin/python $(ARGS)

certs: setup  ## make certificates for services.security in certs/, or new ones of the same authority; HOSTS=gpu-one,10.0.0.5 DAYS=90
	@$(PY) tools/certs.py --hosts "$(HOSTS)" --days "$(DAYS)" $(ARGS)

fuzz: setup-dev  ## send N=50000 malformed and hostile inputs to services of every role, and check that nothing in the services changes
	$(PY) -m tests.fuzz --inputs $(or $(N),50000) $(ARGS)

lock: setup-dev  ## resolve pyproject.toml again and write requirements/*.txt
	$(PY) -m pip install --quiet -r requirements/installer.txt
	$(PY) tools/lock.py
