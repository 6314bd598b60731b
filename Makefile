# Everything a newcomer needs: `make swarm` runs a three-node swarm here, `make test` runs the tests.
# Both create .venv by themselves; `make setup` does nothing when nothing changed.

PYTHON ?= python3
BIN := .venv/bin
PRESET ?= tiny

.PHONY: setup swarm test test-fast format check check-slow mutants docker-test setup-vllm test-vllm clean

setup: .venv/.installed

.venv/.installed: requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) found: install Python 3.11 or newer, or call make PYTHON=/path/to/python3"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

swarm: setup
	$(BIN)/python examples/local_swarm.py --preset $(PRESET)

# Two workers of one thread each: more threads than cores wait for each other.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

# While working, under a minute: without the files that take the time, which are named here.
test-fast: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile -q $(addprefix --ignore=tests/,$(SLOWER))

SLOWER := test_join.py test_simulation.py test_lifecycle.py test_node.py test_terminal.py cli examples experiments kernels learning/test_distill.py \
	network/directory network/libp2p network/test_live.py policy/test_loading.py policy/test_refusals.py policy/test_sparse_attention.py \
	policy/test_tiny_models.py rollout/calibration rollout/paged rollout/sparsity tasks/test_gym.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check-slow: setup
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# Puts the one-line faults of tests/mutants into a copy, and names those that no test of their room notices.
mutants: setup
	$(BIN)/python -m tests.mutants.run $(MUTANTS_ARGS)

docker-test: setup
	docker/test.sh

# vLLM brings versions of its own, so it has an environment of its own: 3.5 GB, on a CPU. The lock is complete; --no-deps leaves out the
# torchvision, torchaudio and torchcodec that vLLM asks for and does not need for text.
setup-vllm: .venv-vllm/.installed

.venv-vllm/.installed: requirements-vllm.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) found: install Python 3.11 or newer, or call make PYTHON=/path/to/python3"; exit 2; }
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.lock
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

test-vllm: setup-vllm
	.venv-vllm/bin/python -m pytest tests/with_vllm $(PYTEST_ARGS)

clean:
	rm -rf .venv .venv-vllm build *.egg-info
